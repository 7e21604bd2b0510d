"""The loss of `benchmarks.loss` by Tunix, TRL and verl, where installed.

Their own functions are called as they are; only the model is a stand-in, whose
log-probs are the input. Each side is f(x, constants) -> ((loss, metrics),
gradient), or None: not installed. TRL's and verl's tensors are made once.
"""

import types
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np


def tunix(x: dict[str, jax.Array], constants: dict[str, float]
          ) -> Callable | None:
  """google-tunix: its GRPO loss, token mean; an entropy of one word."""
  try:
    from flax import nnx
    from tunix.rl import algo_core, common
  except ImportError:
    return None
  config = types.SimpleNamespace(
      beta=constants["kl_coef"], epsilon=constants["eps_low"],
      epsilon_high=constants["eps_high"], loss_algo="grpo",
      loss_agg_mode="token-mean", temperature=1.0, kl_loss_mode="low_var_kl",
      kl_clamp_value=None)

  def step(x, _):  # its constants are part of the program
    lr = jnp.clip(x["old"] - x["behaviour"], -20.0, 20.0)
    example = types.SimpleNamespace(
        prompt_ids=None, completion_ids=None, completion_mask=x["mask"],
        advantages=x["adv"], ref_per_token_logps=x["ref"],
        old_per_token_logps=x["old"],
        sampler_is_weights=jnp.minimum(jnp.exp(lr), constants["cap"]))

    def loss(logp):
      scored = lambda *args, **kwargs: (logp, jnp.zeros(logp.shape + (1,)))
      with mock.patch.object(common, "compute_per_token_logps", scored):
        return algo_core.grpo_loss_fn(nnx.Module(), example, config, 0, 1)

    return jax.value_and_grad(loss, has_aux=True)(x["logp"])

  return jax.jit(step)


def _torch_side(x, loss_fn) -> Callable:
  """Forward and backward of loss_fn(logp, t), t the other arrays as tensors."""
  import torch
  t = {k: torch.tensor(np.asarray(v)) for k, v in x.items()}
  t["mask"] = t["mask"].float()

  def step(_, __):
    logp = t["logp"].clone().requires_grad_()
    loss = loss_fn(logp, t)
    loss.backward()
    return (loss.detach().numpy(), {}), logp.grad.numpy()

  return step


def verl(x: dict[str, jax.Array], constants: dict[str, float]
         ) -> Callable | None:
  """verl: `compute_policy_loss_vanilla` and `kl_penalty`, token mean."""
  try:
    import torch
    from omegaconf import OmegaConf
    from verl.trainer.ppo import core_algos
  except ImportError:
    return None
  config = OmegaConf.create(dict(
      clip_ratio=constants["eps_low"], clip_ratio_low=constants["eps_low"],
      clip_ratio_high=constants["eps_high"], clip_ratio_c=1e9,  # no dual clip
      global_batch_info={}))

  def loss_fn(logp, t):
    lr = torch.clamp(t["old"] - t["behaviour"], -20, 20)
    weights = torch.clamp(torch.exp(lr), max=constants["cap"])
    loss, _ = core_algos.compute_policy_loss_vanilla(
        t["old"], logp, t["adv"], t["mask"], "token-mean", config, weights)
    kl = core_algos.kl_penalty(logp, t["ref"], "low_var_kl")
    return loss + constants["kl_coef"] * core_algos.agg_loss(
        kl, t["mask"], "token-mean")

  return _torch_side(x, loss_fn)


def trl(x: dict[str, jax.Array], constants: dict[str, float]
        ) -> Callable | None:
  """TRL: `GRPOTrainer._compute_loss` on a stand-in trainer, `bnpo`."""
  try:
    import torch
    from trl import GRPOTrainer
  except ImportError:
    return None
  import collections
  rows, length = x["logp"].shape
  as_is = lambda x, **kwargs: x
  trainer = types.SimpleNamespace(
      beta=constants["kl_coef"], epsilon_low=constants["eps_low"],
      epsilon_high=constants["eps_high"], loss_type="bnpo",
      importance_sampling_level="token", use_vllm=True,
      vllm_importance_sampling_correction=True, off_policy_mask_threshold=None,
      top_entropy_quantile=1.0, aux_loss_enabled=False, tools=None,
      _entropy_bonus_enabled=False, current_gradient_accumulation_steps=1,
      max_completion_length=length, model=types.SimpleNamespace(training=True),
      args=types.SimpleNamespace(delta=None, use_bias_correction_kl=False),
      accelerator=types.SimpleNamespace(gather=as_is, reduce=as_is,
                                        num_processes=1))
  ids = torch.zeros((rows, length), dtype=torch.long)

  def loss_fn(logp, t):
    lr = torch.clamp(t["old"] - t["behaviour"], -20, 20)
    weights = torch.clamp(torch.exp(lr), max=constants["cap"])
    trainer._metrics = dict(train=collections.defaultdict(list))
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (
        logp, torch.zeros_like(logp), None)
    return GRPOTrainer._compute_loss(trainer, None, dict(
        prompt_ids=ids[:, :0], prompt_mask=ids[:, :0], completion_ids=ids,
        completion_mask=t["mask"], advantages=t["adv"],
        ref_per_token_logps=t["ref"], old_per_token_logps=t["old"],
        importance_sampling_ratio=weights))

  return _torch_side(x, loss_fn)
