"""The fields of every config, and the parsing of its argument.

Only ml_collections is imported: a config is read before anything is built. Set
single fields by `--config.a.b=value`; a config's own argument
(`configs/addition.py:lag=8`) is for choices that several fields share.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

# Every constant that some objective takes; a test holds it to the tables of
# rl_is.ops. Unset means the preset's.
CONSTANTS = (
    "aspo_cap", "bapo_high", "bapo_low", "beta", "cap", "cispo_cap",
    "cispo_floor", "clip_c", "cov_high", "cov_low", "cov_penalty",
    "cov_ratio", "ddof", "delta", "delta_high", "delta_low", "dppo_kl_cap",
    "dppo_tv_cap", "entropy_coef", "eps_high", "eps_low", "ewma_decay",
    "floor", "gamma", "geometric_mask_high", "geometric_mask_low", "high",
    "high_max", "high_step", "icepop_high", "icepop_low", "k_neg", "k_pos",
    "kl_clamp", "kl_coef", "kl_tau", "lambda_neg", "lambda_pos", "length",
    "log_eps", "log_high", "log_low", "low", "low_max", "low_step", "lower",
    "m2po_tau", "max_kl", "max_lag", "max_log_ratio", "mean_eps", "mis_cap",
    "opmd_tau", "opsm_delta", "ratio_mask_high", "ratio_mask_low", "std_eps", "target",
    "tau", "tau_neg", "tau_pos", "tis_cap", "tis_floor", "token_veto_high",
    "token_veto_low", "topr_cap", "trace_cap", "two_sided_delta", "upper",
    "vaco_tv_high", "vaco_tv_low", "var_eps")

# What an objective is made of; unset means the preset's.
CHOICES = ("surrogate", "anchor", "level", "proximal", "corrections",
           "advantage", "advantage_norm", "aggregation", "denominator", "regularizer", "kl_to",
           "kl_weight", "centering", "options")


def base() -> ConfigDict:
  """A config with every field; not locked yet."""
  return ConfigDict(dict(
      seed=0,
      task=dict(name="addition", kwargs=dict()),
      # A verifier that raises, returns no score or takes longer, for one answer:
      # "stop" the run, or "skip" the answer (in no loss; counted).
      verify=dict(seconds=10.0, on_failure="stop"),
      # See rl_is/models/config.py; configs/models.py has those of real models.
      model=dict(
          vocab_size=placeholder(int),  # unset: the tokenizer's
          vocab_multiple=8, embed=64, layers=2, heads=4, kv_heads=4, head_dim=16,
          mlp=128, experts=0, experts_per_token=0, activation="silu",
          rope_theta=10_000.0, window=0, global_every=1,
          local_rope_theta=10_000.0, norm_eps=1e-6, qk_norm=True,
          post_norms=False, embed_scale=False, tie_embeddings=False,
          logit_softcap=placeholder(float), dtype="float32",
          param_dtype="float32", head_precision="highest", attention="xla",
          remat="none", scan_layers=False, logprob_impl="auto",
          logprob_chunk=0),
      mesh=dict(data=-1, fsdp=1, tensor=1),  # -1: all devices that are left
      rollout=dict(
          # "lag": batches exactly `lag` optimizer updates old, taking turns.
          # "async": a generator beside the learner, at most `max_lag` old.
          mode="lag",
          lag=0,
          max_lag=0,
          order="oldest",  # async: which groups are trained on first; "freshest"
          # async: devices for the sampler alone; unset: half, one is shared.
          sampler_devices=placeholder(int),
          rows_per_call=placeholder(int),  # async: unset: a whole batch
          # async: tokens between two looks for newer weights, in the middle of
          # an answer; 0: never. Its cache: "keep" or "read_again".
          swap_tokens=0,
          swap_cache="keep",
          batch_size=256,  # sequences: prompts x group_size
          group_size=8,  # samples a prompt
          record_logp=True,  # False: no sampler log-probs, so no correction
          # Share of the answers that the learner scores too, right where they are
          # sampled: tells the engine's mismatch from staleness.
          rescore_share=0.0,
          record_top_k=0,  # most likely tokens written down at each: centering
          # The learner sends each token through the experts that the sampler's
          # took; their shares are its own.
          replay_routes=False,
          temperature=1.0,
          top_k=0,  # 0: the whole vocabulary
          top_p=1.0,  # below 1 needs top_k > 0
          max_new_tokens=placeholder(int)),  # unset: the task's longest answer
      # What the sampler does otherwise than the learner; see rollout/mismatch.py.
      mismatch=dict(
          weights="none",  # "bf16", "f16", "int" or "mantissa" of `bits` bits
          bits=placeholder(int),
          temperature=1.0,  # the sampler's, as a factor
          top_p=1.0,  # the sampler's alone
          logit_sd=0.0,  # of a fixed pattern over the vocabulary, nats
          logit_seed=0,
          # At a share of the draws, tokens rarer than `spike_below` gain nats.
          spike_rate=0.0,
          spike_nats=0.0,
          spike_below=0.01),
      objective=dict(
          preset="pg",
          **{name: placeholder(str) for name in CHOICES},
          allow_double_counting=False,
          constants={name: placeholder(float) for name in CONSTANTS}),
      optimizer=dict(
          name="adamw", learning_rate=3e-4, warmup_updates=0, b1=0.9, b2=0.95,
          eps=1e-8, weight_decay=0.0, grad_clip=1.0),
      # full_diagnostics: also by sign of advantage and by lag, JSD, chi-square,
      # and the cosine with the gradient before (one more copy of the parameters).
      # psis: k-hat of the sequence weights too (needs full_diagnostics, rl_is[stats]).
      # microbatches: parts of an update whose gradients are added, one at a time.
      train=dict(steps=300, updates_per_batch=1, microbatches=1,
                 full_diagnostics=True, psis=False),
      # Supervised, before step 1: until the chance that a sampled answer to a
      # held-out prompt is right reaches `target`, or for `steps`.
      warm_start=dict(steps=600, batch=128, learning_rate=3e-3, target=0.4,
                      path="",  # "": inside the workdir
                      # A directory with a model in Hugging Face's files, which
                      # takes the place of all that: steps=0.
                      weights=""),
      evaluate=dict(every=0, prompts=256, samples=4, temperature=1.0),
      checkpoint=dict(every=50, keep=2),
      # Rollouts written to workdir/rollouts at every so manyth step (0: never),
      # the newest of them in at most max_gb; see rl_is/rollout/store.py.
      store=dict(every=0, max_gb=1.0),
      track=dict(tensorboard=False),
  ))


def parse_arg(arg: str | None, **defaults):
  """"lag=8,tiny" -> a ConfigDict with the types of the defaults."""
  values = ConfigDict(defaults)
  for item in (arg or "").split(","):
    if not item:
      continue
    key, _, text = item.partition("=")
    if key not in defaults:
      raise ValueError(f"config argument {key!r}: unknown; this config takes "
                       f"{', '.join(sorted(defaults))}")
    values[key] = _convert(key, text, type(defaults[key]))
  return values


def _convert(key: str, text: str, kind: type):
  if kind is bool:
    if text not in ("", "true", "false"):
      raise ValueError(f"config argument {key!r}: expected true or false, got "
                       f"{text!r}")
    return text != "false"
  try:
    return kind(text)
  except ValueError:
    raise ValueError(f"config argument {key!r}: expected {kind.__name__}, got "
                     f"{text!r}") from None
