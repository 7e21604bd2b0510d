"""Published faults of log-probs, from the sampler to the learner, by name.

The same kinds on given logits are in kernels/test_logprob.py: C01, C03, C04,
C08, C10; C09 in test_logprob_tiles.py; padding (C06) in test_transformer.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import addition
from rl_is import build, overrides, train
from rl_is.core.types import Batch, PolicyOutputs, Prompts, Rollout
from rl_is.infra.preemption import Preemption
from rl_is.learner import step
from rl_is.models import sampler, scoring
from rl_is.models.config import TransformerConfig
from rl_is.models.sampler import Sampling
from rl_is.models.transformer import Model
from rl_is.objective import constants as constants_lib
from rl_is.objective import presets
from rl_is.objective.compose import Objective
from rl_is.rollout import batching, generator
from rl_is.rollout.verify import Scores

V = 11
MODEL = Model(TransformerConfig(
    vocab_size=V, embed=8, layers=1, heads=2, kv_heads=1, head_dim=4, mlp=8))
SCORES = Scores(np.zeros(16, np.float32), np.zeros(16, bool))


@pytest.fixture(scope="module")
def params():
  return jax.tree.map(lambda x: x * 3, MODEL.init(jax.random.key(0)))


@pytest.mark.parametrize("prompt,answer", [(2, 2), (1, 1), (1, 3), (4, 1)])
def test_C02_the_last_prompt_token_predicts_the_first_answer_token(
    params, prompt, answer):
  """P = N = 2: the logits of positions 1 and 2 score tokens 2 and 3."""
  rows = jnp.arange(16)
  prompts = Prompts((rows[:, None] + jnp.arange(prompt)[None]) % V,
                    jnp.ones((16, prompt), bool), rows, 0 * rows)
  out = jax.jit(functools.partial(sampler.sample, model=MODEL))(
      params, prompts, jax.random.key(1), 0,
      sampling=Sampling(1.0, max_new_tokens=answer))
  mask = np.arange(prompt + answer) >= prompt
  np.testing.assert_array_equal(out.mask, np.broadcast_to(mask, out.mask.shape))
  hidden = MODEL.hidden(params, out.tokens, out.valid)
  logp = np.asarray(jax.nn.log_softmax(
      (hidden @ MODEL.unembed(params))[..., :V]))
  want = np.take_along_axis(
      logp[:, prompt - 1:-1], np.asarray(out.tokens)[:, prompt:, None], 2)[..., 0]
  np.testing.assert_allclose(out.logp_behaviour[:, prompt:], want, atol=1e-5)
  scored = scoring.score(params, batching.assemble(out, SCORES, 4),
                         model=MODEL, temperature=1.0).logp
  np.testing.assert_allclose(scored[:, prompt:], want, atol=1e-5)


def first_batch(one_device, **changes):
  """(parts, parameters, batch 0) of a run with a KL and every re-scoring."""
  config = addition.get_config("tiny")
  changes = {"objective.preset": "ppo_tis", "objective.regularizer": "k3",
             "objective.constants.kl_coef": 0.1, "rollout.rescore_share": 1.0,
             **changes}
  for name, value in changes.items():
    overrides.apply(config, name, value)
  parts = build.build(config, devices=one_device)
  params = jax.tree.map(lambda x: 4 * x, parts.model.init(jax.random.key(0)))
  source = train._source(config, parts, [], {}, 0, Preemption())
  source.publish(0, params)
  return parts, params, source.batch(0)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_C03_C13_every_log_prob_is_of_one_temperature(one_device, temperature):
  """Sampler's, its re-scoring, proximal, reference, current; T is in the log."""
  parts, params, batch = first_batch(
      one_device, **{"rollout.temperature": temperature})
  assert parts.constants["temperature"] == temperature  # in provenance.jsonl
  prepared, = step.prepare_batch(
      params, params, batch, parts.constants, objective=parts.objective,
      model=parts.model)
  score = functools.partial(scoring.score, params, batch, model=parts.model)
  m = batch.mask
  for x in (batch.logp_version, prepared.logp_prox, prepared.logp_ref,
            score(temperature=temperature).logp):
    np.testing.assert_allclose(x[m], batch.logp_behaviour[m], atol=1e-5)
  plain = score(temperature=1.0).logp
  assert np.abs(plain - batch.logp_behaviour)[m].max() > 0.05
  # A log-prob divided by T is no log-prob of a tempered distribution.
  assert np.abs(plain / temperature - batch.logp_behaviour)[m].max() > 0.05


def test_C13_a_sampler_of_another_temperature_says_so(one_device):
  """0.8 on the learner's side, 0.8 x 1.5 on the sampler's; a metric says 1.5."""
  parts, params, batch = first_batch(one_device, **{
      "rollout.temperature": 0.8, "mismatch.temperature": 1.5})
  assert parts.constants["temperature"] == 0.8
  assert parts.dials == {"mismatch/temperature": 1.5}
  m = batch.mask
  for temperature, recorded in ((1.2, batch.logp_behaviour),
                                (0.8, batch.logp_version)):
    scored = scoring.score(params, batch, model=parts.model,
                           temperature=temperature).logp
    np.testing.assert_allclose(scored[m], recorded[m], atol=1e-5)


def test_C04_a_filter_that_cannot_be_replayed_is_refused(one_device):
  """top_p alone has no bound on its kept set; with one, the ratio is 1."""
  with pytest.raises(ValueError, match=r"sampling.top_p = 0.8 needs.*top_k"):
    first_batch(one_device, **{"rollout.top_p": 0.8})
  parts, params, batch = first_batch(
      one_device, **{"rollout.top_p": 0.8, "rollout.top_k": 6})
  m = batch.mask
  np.testing.assert_allclose(batch.logp_version[m], batch.logp_behaviour[m],
                             atol=1e-5)
  full = scoring.score(params, batch.replace(kept_ids=None), model=parts.model,
                       temperature=1.0).logp
  assert (full - batch.logp_behaviour)[m].mean() < -0.05  # the kept mass


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_C08_what_is_stored_is_float32(dtype):
  """-10.03 is -10 in bf16: a ratio of 1 in place of e^-.03 = .97045."""
  model = Model(TransformerConfig(
      vocab_size=V, embed=8, layers=1, heads=2, kv_heads=1, head_dim=4, mlp=8,
      dtype=dtype, param_dtype=dtype))
  rows = jnp.arange(8)
  prompts = Prompts(rows[:, None], jnp.ones((8, 1), bool), rows, 0 * rows)
  out = jax.jit(functools.partial(sampler.sample, model=model))(
      model.init(jax.random.key(0)), prompts, jax.random.key(1), 0,
      sampling=Sampling(1.0, max_new_tokens=2, top_k=5, record_top_k=3))
  assert out.logp_behaviour.dtype == out.head_logp_behaviour.dtype == np.float32
  logp = np.asarray(out.logp_behaviour)[np.asarray(out.mask)]
  assert (logp <= 0).all()
  assert (logp != logp.astype(jnp.bfloat16).astype(np.float32)).any()


@pytest.mark.parametrize("preset", ["pg", "tis", "gspo", "cispo", "seq_mis",
                                    "icepop", "geo_rs", "dppo_tv", "topr"])
def test_C16_two_impossible_log_probs_off_the_mask_are_silent(preset):
  """-inf - -inf is NaN: there it must change no bit of loss or gradient."""
  preset = presets.get(preset)
  objective = Objective(preset.spec)
  values = constants_lib.resolve(preset.spec, preset.constants, {})
  mask = np.array([[1, 0, 1], [1, 1, 0]], bool)
  logp = np.array([[-1, -2, -.5], [-1, -3, -2]], np.float32)

  def run(junk):
    at = lambda x: jnp.asarray(np.where(mask, x, junk), jnp.float32)
    batch = Batch(jnp.zeros((2, 3), int), mask, mask, jnp.array([1., 0]),
                  jnp.array([0, 0]), at(logp - .01), logp_prox=at(logp + .02))
    batch, = objective.minibatches(objective.prepare(batch, values))
    (loss, metrics), grad = jax.value_and_grad(lambda x: objective.loss(
        PolicyOutputs(x), batch, values), has_aux=True)(at(logp))
    return loss, grad, metrics

  quiet, got = run(-1.0), run(-np.inf)
  assert np.isfinite(got[0]) and np.isfinite(got[1]).all()
  jax.tree.map(np.testing.assert_array_equal, got, quiet)


@pytest.mark.parametrize("value", [-np.inf, np.inf, np.nan])
def test_C16_a_sampled_token_that_was_impossible_stops_the_run(value):
  """Row 5 of groups of 4 at prompts 10, 11: prompt 11, sample 1, token 2."""
  mask = np.zeros((8, 3), bool)
  mask[:, 1:] = True
  logp = np.where(mask, -1.0, -np.inf).astype(np.float32)  # silent off the mask
  make = lambda logp: Rollout(None, None, mask, logp, None, None)
  generator._check_finite(make(logp), [10, 11], 4)
  logp[5, 2] = value
  with pytest.raises(FloatingPointError, match="prompt 11, sample 1, token 2"):
    generator._check_finite(make(logp), [10, 11], 4)
