"""The dials: closed forms, what is recorded, whole runs."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_train import equal, tiny

from configs import addition
from rl_is import build, overrides, train
from rl_is.core.types import Batch, Prompts
from rl_is.infra import mesh as mesh_lib, metrics
from rl_is.kernels import logits as logits_lib
from rl_is.learner import step
from rl_is.models import sampler, scoring
from rl_is.models.config import TransformerConfig
from rl_is.models.sampler import Sampling
from rl_is.models.transformer import Model
from rl_is.rollout import generator, mismatch
from rl_is.rollout.mismatch import Disturbance, Spikes
from rl_is.rollout.publisher import Publisher

V = 13  # in a table of 16
MODEL = Model(TransformerConfig(
    vocab_size=V, vocab_multiple=8, embed=16, layers=2, heads=4, kv_heads=2,
    head_dim=8, mlp=32))
PATTERN = mismatch.pattern(0, 1.5, vocab_size=V, width=16)


@pytest.fixture(scope="module")
def params():
  return jax.tree.map(lambda x: x * 3, MODEL.init(jax.random.key(0)))


def leaves(tree):
  return {jax.tree_util.keystr(path): np.asarray(x) for path, x in
          jax.tree_util.tree_leaves_with_path(tree)}


# ---- Weights. ---------------------------------------------------------------


def np_quantise(w, bits, axes):
  w = np.asarray(w, np.float64)
  scale = np.abs(w).max(axis=axes, keepdims=True) / (2 ** (bits - 1) - 1)
  return np.rint(w / scale) * scale, scale


def np_mantissa(w, bits):
  fraction, exponent = np.frexp(np.asarray(w, np.float64))
  return np.ldexp(np.rint(np.ldexp(fraction, bits + 1)), exponent - bits - 1)


def test_quantised_by_hand():
  """3 bits: levels 3, s = 1 / 3: 1 -> 3 s, .4 -> round(1.2) s = s, -.2 ->
  round(-.6) s = -s. 2 bits: s = 1: 1, round(.4) = 0, round(-.2) = 0. The
  second channel is ten times the first, the third has no scale."""
  w = jnp.array([[1.0, 10.0, 0.0], [0.4, 4.0, 0.0], [-0.2, -2.0, 0.0]])
  for bits, column in ((3, [1, 1 / 3, -1 / 3]), (2, [1, 0, 0])):
    want = np.outer(column, [1, 10, 0])
    np.testing.assert_allclose(mismatch.quantise(w, bits, (0,)), want, rtol=1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("axes", [(0,), (0, 1)])
def test_quantised_is_within_half_a_step_and_stays(bits, axes):
  w = np.random.default_rng(bits).normal(size=(12, 5, 7)).astype(np.float32)
  q = np.asarray(mismatch.quantise(jnp.asarray(w), bits, axes))
  want, scale = np_quantise(w, bits, axes)
  np.testing.assert_allclose(q, want, rtol=1e-5, atol=1e-6 * scale.max())
  assert (np.abs(w - q) <= scale / 2 * (1 + 1e-4)).all()
  assert np.abs(w - q).max() > 0.4 * scale.min()  # something was rounded
  again = mismatch.quantise(jnp.asarray(q), bits, axes)
  np.testing.assert_allclose(again, q, rtol=1e-6)


def test_int_is_by_output_channel_of_every_linear_layer(params):
  """What a channel is, in the terms of the layers' own einsums."""
  axes = dict(q=(1,), k=(1,), v=(1,), o=(1, 2), gate=(1,), up=(1,), down=(1,))
  got, seen = leaves(mismatch.weights(params, "int", 3)), set()
  for path, w in leaves(params).items():
    name = path.split("'")[-2]
    if name in axes:
      want, _ = np_quantise(w, 3, axes[name])
      np.testing.assert_allclose(got[path], want, rtol=1e-5, atol=1e-6)
      assert (got[path] != w).any()
    else:  # embedding, head, norms
      assert name in ("embed", "head", "scale"), path
      np.testing.assert_array_equal(got[path], w)
    seen.add(name)
  assert seen == {*axes, "embed", "head", "scale"}


AWKWARD = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 1 + 2**-8,
                    1 + 3 * 2**-8, 255.5, -3e38, 65504], np.float32)


@pytest.mark.parametrize("bits", range(1, 24))
def test_mantissa_is_rounded_to_even(bits):
  w = np.random.default_rng(bits).normal(size=4096).astype(np.float32) ** 5
  # Ties: one more bit than is kept, and that one set.
  odd = np.random.default_rng(1).integers(0, 2**bits, 64)
  ties = (1 + (odd + 0.5) / 2**bits).astype(np.float32)
  w = np.concatenate([w[np.abs(w) > 1e-30], ties, -ties])
  got = np.asarray(mismatch.round_mantissa(jnp.asarray(w), bits))
  np.testing.assert_array_equal(got, np_mantissa(w, bits))
  np.testing.assert_array_equal(
      mismatch.round_mantissa(jnp.asarray(got), bits), got)


def test_mantissa_by_hand():
  """One bit: 1, 1.5, 2, 3, 4. 1.25 ties to the even 1 = 1.0b, 1.75 to 2 =
  10.b; 1.2 and 1.3 are nearer to 1 and 1.5; 3.5 ties to 4."""
  w = jnp.array([1.25, 1.75, 1.2, 1.3, 3.5, -1.25])
  np.testing.assert_array_equal(mismatch.round_mantissa(w, 1),
                                [1, 2, 1, 1.5, 4, -1])


def test_23_bits_are_the_identity_and_7_are_bfloat16(params):
  same = lambda a, b: np.testing.assert_array_equal(
      np.asarray(a, np.float32).view(np.uint32), np.asarray(b).view(np.uint32))
  same(mismatch.round_mantissa(jnp.asarray(AWKWARD), 23), AWKWARD)
  normal = AWKWARD[~np.isnan(AWKWARD)]
  same(mismatch.round_mantissa(jnp.asarray(normal), 7),
       normal.astype(jnp.bfloat16).astype(np.float32))
  for kind, bits in (("none", None), ("mantissa", 23)):
    equal(mismatch.weights(params, kind, bits), params)
  equal(mismatch.weights(params, "mantissa", 7),
        mismatch.weights(params, "bf16"))


@pytest.mark.parametrize("kind,dtype", [("bf16", jnp.bfloat16),
                                        ("f16", np.float16)])
def test_casts_round_every_parameter_inside_a_program_too(params, kind, dtype):
  got = mismatch.weights(params, kind)
  want = jax.tree.map(lambda x: np.asarray(x).astype(dtype).astype(np.float32),
                      params)
  equal(got, want)
  assert (leaves(got)["['head']"] != leaves(params)["['head']"]).any()
  equal(mismatch.weights(got, kind), got)


def test_other_numbers_compile_nothing(params):
  before = mismatch.weights._cache_size()
  first = {}
  for kind, numbers in (("int", (2, 3, 4, 8)), ("mantissa", (1, 7, 23))):
    for bits in numbers:
      first[kind, bits] = leaves(mismatch.weights(params, kind, bits))
  # At most one program a kind; an earlier test may have made it.
  assert mismatch.weights._cache_size() - before <= 2
  head = "['blocks']['mlp']['up']"
  assert len({x[head].tobytes() for x in first.values()}) == len(first)


@pytest.mark.parametrize("dtype,digits", [(jnp.bfloat16, 7), (np.float16, 10)])
def test_narrow_parameters_keep_their_dtype(dtype, digits):
  """A grid of `bits` bits, then rounded to the dtype; a dial that is no
  narrower than the dtype changes no bit; zeros and a zero channel stay."""
  w = np.random.default_rng(0).normal(size=(40, 6)).astype(dtype)
  w[:, 2] = 0
  tree = {"up": jnp.asarray(w)}
  for kind, bits in (("int", 2), ("int", 8), ("mantissa", 1), ("mantissa", 23),
                     ("bf16", None), ("f16", None)):
    got = mismatch.weights(tree, kind, bits)["up"]
    assert got.dtype == dtype and not got[:, 2].any()
    wide = np.float64(got)
    if kind == "int":
      live = [0, 1, 3, 4, 5]
      want, scale = np_quantise(w[:, live], bits, (0,))
      ulp = np.abs(want) * 2.0**-digits
      assert (np.abs(wide[:, live] - want) <= ulp + 1e-6 * scale).all()
    elif kind == "mantissa" and bits == 1:
      np.testing.assert_array_equal(wide, np_mantissa(w, 1))
    elif (kind, digits) != ("bf16", 10):
      np.testing.assert_array_equal(got, w)


@pytest.mark.parametrize("kind,bits", [("bf16", None), ("f16", None),
                                       ("int", 4), ("mantissa", 3)])
def test_a_broken_weight_stays_broken(kind, bits):
  """A NaN or an inf is never rounded into a number: its channel shows it."""
  for junk in (np.nan, np.inf, -np.inf):
    w = jnp.ones((3, 2)).at[1, 0].set(junk)
    got = np.asarray(mismatch.weights({"up": w}, kind, bits)["up"])
    assert not np.isfinite(got[1, 0]) and np.isfinite(got[:, 1]).all()


def test_the_publisher_hands_out_what_the_dial_makes(params):
  publisher = Publisher(transform=mismatch.sampler_weights("int", 3))
  mine = jax.tree.map(jnp.copy, params)
  publisher.publish(0, mine)
  jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)(mine)
  assert mine["head"].is_deleted()  # also of what the dial leaves alone
  equal(publisher.latest()[1], mismatch.weights(params, "int", 3))
  plain = Publisher(transform=mismatch.sampler_weights("none", None))
  plain.publish(0, params)
  equal(plain.latest()[1], params)


# ---- Logits. ----------------------------------------------------------------

_draw = jax.jit(functools.partial(sampler.sample, model=MODEL))


def draw(params, rows=64, new=4, key=1, **how):
  """Answers to prompts of three tokens; all rows alike where new == 1."""
  prompt = np.array([[4, 9, 7]]) + (
      0 if new == 1 else np.arange(rows)[:, None] % 3)
  prompts = Prompts(
      jnp.asarray(np.broadcast_to(prompt, (rows, 3)), jnp.int32),
      jnp.ones((rows, 3), bool), jnp.arange(rows, dtype=jnp.int32),
      jnp.zeros(rows, jnp.int32))
  how = dict(temperature=1.0, eos_ids=(2,)) | how
  return jax.device_get(_draw(params, prompts, jax.random.key(key), 0,
                              sampling=Sampling(max_new_tokens=new, **how)))


def learner_logits(params, rollout):
  """float64 [B, T, V], at the position that speaks of token t."""
  hidden = MODEL.hidden(params, rollout.tokens, rollout.valid)
  logits = np.asarray(logits_lib.head_logits(hidden, MODEL.unembed(params)))
  return np.roll(np.float64(logits[..., :V]), 1, axis=1)


def log_softmax(x):
  x = x - x.max(axis=-1, keepdims=True)
  return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def of_token(x, rollout):
  return np.take_along_axis(x, rollout.tokens[..., None], axis=2)[
      ..., 0][rollout.mask]


def recorded(rollout):
  return rollout.logp_behaviour[rollout.mask]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("disturb", [
    None, Disturbance(), Disturbance(np.zeros(16, np.float32),
                                     Spikes(0.0, 5.0, 0.5), 1.0)])
def test_all_off_gives_ratio_one(params, temperature, disturb):
  rollout = draw(params, temperature=temperature, disturb=disturb)
  equal(rollout, draw(params, temperature=temperature))
  batch = Batch(tokens=rollout.tokens, valid=rollout.valid, mask=rollout.mask,
                reward=None, group=None)
  logp = np.asarray(scoring.score(params, batch, model=MODEL,
                                  temperature=temperature).logp)
  ratio = np.exp(logp - rollout.logp_behaviour)[rollout.mask]
  np.testing.assert_allclose(ratio, 1, atol=1e-5)


def test_a_pattern_has_its_deviation_over_the_real_vocabulary():
  assert PATTERN.shape == (16,) and not PATTERN[V:].any()
  assert PATTERN[:V].std() == pytest.approx(1.5, rel=1e-6)
  assert PATTERN[:V].mean() == pytest.approx(0, abs=1e-6)
  double = mismatch.pattern(0, 3.0, vocab_size=V, width=16)
  np.testing.assert_allclose(double, 2 * PATTERN, rtol=1e-6)
  other = mismatch.pattern(1, 1.5, vocab_size=V, width=16)
  assert np.abs(other - PATTERN).max() > 0.5


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_log_prob_under_a_pattern_is_recorded(params, temperature):
  rollout = draw(params, temperature=temperature,
                 disturb=Disturbance(pattern=PATTERN))
  logits = learner_logits(params, rollout) / temperature
  want = of_token(log_softmax(logits + PATTERN[:V]), rollout)
  np.testing.assert_allclose(recorded(rollout), want, atol=1e-5)
  assert np.abs(want - of_token(log_softmax(logits), rollout)).max() > 0.3


def test_the_kept_set_and_the_head_are_of_the_disturbed_logits(params):
  rollout = draw(params, top_k=4, record_top_k=2,
                 disturb=Disturbance(pattern=PATTERN))
  disturbed = learner_logits(params, rollout) + PATTERN[:V]
  ids = np.argsort(-disturbed, axis=-1)[..., :4]
  want = log_softmax(np.take_along_axis(disturbed, ids, axis=2))
  m = rollout.mask
  np.testing.assert_array_equal(rollout.kept_ids[m], ids[m])
  np.testing.assert_array_equal(rollout.head_ids[m], ids[m][:, :2])
  np.testing.assert_allclose(rollout.head_logp_behaviour[m], want[m][:, :2],
                             atol=1e-5)


def test_top_p_on_one_side_by_hand():
  """p = .5 .05 .3 .15: .5 + .3 >= .75 are enough. Half the mass: one token,
  and its tie."""
  p = np.array([[0.5, 0.05, 0.3, 0.15]])
  kept = lambda p, top_p: np.asarray(mismatch.nucleus(
      jnp.log(jnp.asarray(p, jnp.float32)), top_p)) > -1e29
  np.testing.assert_array_equal(kept(p, 0.75), [[True, False, True, False]])
  np.testing.assert_array_equal(kept(p, 0.81), [[True, False, True, True]])
  assert kept(p, 1.0).all() and kept(p, 1e-3).sum() == 1
  np.testing.assert_array_equal(kept([[0.1, 0.4, 0.4, 0.1]], 0.3),
                                [[False, True, True, False]])


def test_top_p_on_one_side_leaves_the_kept_mass_in_the_ratio(params):
  rollout = draw(params, disturb=Disturbance(top_p=0.6))
  assert rollout.kept_ids is None
  logp = log_softmax(learner_logits(params, rollout))
  order = np.argsort(-logp, axis=-1)
  p = np.exp(np.take_along_axis(logp, order, axis=2))
  mass = np.where(np.cumsum(p, axis=-1) - p < 0.6, p, 0).sum(axis=-1)
  log_ratio = of_token(logp, rollout) - recorded(rollout)
  np.testing.assert_allclose(log_ratio, np.log(mass[rollout.mask]), atol=1e-5)


def spiked(logits, nats, below):
  rare = log_softmax(logits) < np.log(below)
  return log_softmax(logits + nats * rare)


@pytest.mark.parametrize("nats", [4.0, -1.0])
def test_spikes_hit_their_share_of_the_draws_and_say_so(params, nats):
  rate, below = 0.3, 0.1
  rollout = draw(params, rows=2048, disturb=Disturbance(
      spikes=Spikes(rate, nats, below)))
  logits = learner_logits(params, rollout)
  plain, hit = (of_token(x, rollout) for x in (
      log_softmax(logits), spiked(logits, nats, below)))
  got = recorded(rollout)
  as_plain, as_hit = (np.abs(got - x) < 1e-4 for x in (plain, hit))
  assert (as_plain | as_hit).all() and (as_hit & ~as_plain).any()
  # Whatever is drawn, a hit shows: it moves the normaliser. Every row's first
  # token has a rare rival, and whether it is hit does not depend on it.
  first = (np.argwhere(rollout.mask)[:, 1] == 3)
  assert (np.abs(plain - hit)[first] > 1e-3).all() and first.sum() == 2048
  assert abs(as_hit[first].mean() - rate) < 4 * np.sqrt(
      rate * (1 - rate) / 2048)


ALL = Disturbance(PATTERN, Spikes(0.5, 1e3, 0.5), 0.9)


@pytest.mark.parametrize("disturb", [
    ALL, dataclasses.replace(ALL, top_p=None), Disturbance(pattern=1e3 * PATTERN),
    Disturbance(spikes=Spikes(1.0, -1e3, 1.0)), Disturbance(top_p=1e-30)])
@pytest.mark.parametrize("top_k", [0, 20])
def test_C10_no_dial_brings_the_padded_vocabulary_up(params, disturb, top_k):
  """Three rows of padding with by far the largest logits; 4096 draws."""
  loud = dict(params, head=params["head"].at[:, V:].set(50.0))
  rollout = draw(loud, rows=1024, top_k=top_k, record_top_k=20, disturb=disturb)
  assert rollout.tokens.max() < V and rollout.head_ids.max() < V
  assert np.isfinite(recorded(rollout)).all()
  used = rollout.head_ids >= 0
  assert np.isfinite(rollout.head_logp_behaviour).all()
  mass = np.where(used, np.exp(rollout.head_logp_behaviour), 0).sum(axis=-1)
  np.testing.assert_allclose(mass[rollout.mask], 1, atol=1e-4)


@pytest.mark.parametrize("spikes", [
    Spikes(1.0, 5.0, 1.0), Spikes(1.0, 1e3, 0.2), Spikes(1.0, -1e3, 0.2)])
def test_spikes_at_the_ends_of_their_ranges(params, spikes):
  """Below 1 every token is raised alike: no change. 1000 nats: only the raised
  ones are left, or only the others; what is drawn is recorded as such."""
  rollout = draw(params, disturb=Disturbance(spikes=spikes))
  logits = learner_logits(params, rollout)
  want = of_token(spiked(logits, spikes.nats, spikes.below), rollout)
  np.testing.assert_allclose(recorded(rollout), want, atol=1e-4)
  plain = of_token(log_softmax(logits), rollout)
  assert (np.abs(plain - want).max() < 1e-5) == (spikes.below == 1)
  if spikes.nats > 100:
    rare = plain < np.log(spikes.below)
    assert rare.all() or (plain[~rare] == recorded(rollout)[~rare]).all()


def test_a_top_p_of_almost_nothing_is_greedy(params):
  rollout = draw(params, disturb=Disturbance(top_p=1e-30))
  equal(rollout.tokens, draw(params, greedy=True).tokens)
  assert (recorded(rollout) == 0).all()


def test_eight_devices_draw_what_one_does(params):
  """The same tokens, hits and kept sets, on any number of devices."""
  rows = np.arange(64, dtype=np.int32)
  prompts = Prompts(4 + rows[:, None] % 3, np.ones((64, 1), bool), rows, 0 * rows)
  how = Sampling(0.9, max_new_tokens=4, top_k=5, disturb=dataclasses.replace(
      ALL, spikes=Spikes(0.5, 3.0, 0.1), top_p=None))
  out = []
  for devices in (jax.devices()[:1], jax.devices()):
    mesh = mesh_lib.make(dict(data=-1, fsdp=1, tensor=1), devices)
    out.append(jax.device_get(_draw(
        jax.device_put(mismatch.weights(params, "int", 4),
                       mesh_lib.replicated(mesh)),
        jax.device_put(prompts, mesh_lib.rows(mesh)), jax.random.key(1), 0,
        sampling=how)))
  one, eight = out
  np.testing.assert_allclose(one.logp_behaviour, eight.logp_behaviour, atol=1e-5)
  equal(*[(x.tokens, x.mask, x.kept_ids) for x in out])


N = 20_000


@pytest.mark.parametrize("name,how,law", [
    ("plain", {}, lambda x: np.exp(log_softmax(x))),
    ("temperature", dict(temperature=1.4),
     lambda x: np.exp(log_softmax(x / 1.4))),
    ("pattern", dict(disturb=Disturbance(pattern=PATTERN)),
     lambda x: np.exp(log_softmax(x + PATTERN[:V]))),
    ("spikes", dict(disturb=Disturbance(spikes=Spikes(0.25, 3.0, 0.05))),
     lambda x: 0.75 * np.exp(log_softmax(x)) + 0.25 * np.exp(
         spiked(x, 3.0, 0.05))),
    ("top_p", dict(disturb=Disturbance(top_p=0.8)), None),
    ("all", dict(disturb=Disturbance(PATTERN, Spikes(0.25, 3.0, 0.05))),
     lambda x: 0.75 * np.exp(log_softmax(x + PATTERN[:V])) + 0.25 * np.exp(
         spiked(x + PATTERN[:V], 3.0, 0.05))),
])
def test_what_is_sampled_is_the_disturbed_distribution(params, name, how, law):
  rollout = draw(params, rows=N, new=1, **how)
  logits = learner_logits(params, jax.tree.map(lambda x: x[:1], rollout))[0, 3]
  if law is None:
    p = np.exp(log_softmax(logits))
    order = np.argsort(-p)
    kept = order[np.cumsum(p[order]) - p[order] < 0.8]
    p = np.where(np.isin(np.arange(V), kept), p, 0) / p[kept].sum()
  else:
    p = law(logits)
  assert p.sum() == pytest.approx(1)
  found = np.bincount(rollout.tokens[:, 3], minlength=V) / N
  assert (np.abs(found - p) <= 4 * np.sqrt(p * (1 - p) / N)).all()
  if name != "plain":  # and it could be told from the plain one
    plain = np.exp(log_softmax(logits))
    assert (np.abs(found - plain) > 8 * np.sqrt(plain * (1 - plain) / N)).any()


def test_other_numbers_of_a_disturbance_compile_nothing(params):
  before = _draw._cache_size()
  for sd, rate, nats in ((1.0, 0.1, 2.0), (2.0, 0.5, -1.0), (0.5, 1.0, 7.0)):
    draw(params, rows=7, disturb=Disturbance(
        mismatch.pattern(3, sd, vocab_size=V, width=16),
        Spikes(rate, nats, nats / 100 + 0.1), top_p=0.9 - rate / 10))
  assert _draw._cache_size() == before + 1


# ---- Runs. ------------------------------------------------------------------

STILL = dict(objective__preset="tis", optimizer__learning_rate=0.0,
             train__steps=3)


def k3(rows):
  return np.mean([row["is/kl_k3"] for row in rows])


def run(warm, workdir, one_device, arg="lag=2", **changes):
  config = tiny(warm, arg, **(STILL | changes))
  train.run(config, str(workdir), devices=one_device)
  return metrics.read(str(workdir))


@pytest.fixture(scope="module")
def undisturbed(warm, tmp_path_factory, one_device):
  return run(warm, tmp_path_factory.mktemp("plain"), one_device)


def bits(kind, n=None):
  return {"mismatch__weights": kind, **({"mismatch__bits": n} if n else {})}


@pytest.mark.parametrize("dial,told", [
    (bits("bf16"), {"mantissa_bits": 7}), (bits("f16"), {"mantissa_bits": 10}),
    (bits("int", 8), {"int_bits": 8}), (bits("int", 4), {"int_bits": 4}),
    (bits("int", 3), {"int_bits": 3}),
    (bits("mantissa", 2), {"mantissa_bits": 2}),
    (dict(mismatch__temperature=1.2), {"temperature": 1.2}),
    (dict(mismatch__top_p=0.9), {"top_p": 0.9}),
    (dict(mismatch__logit_sd=1.0, mismatch__logit_seed=5),
     {"logit_sd": 1.0, "logit_seed": 5}),
    (dict(mismatch__spike_rate=0.5, mismatch__spike_nats=3.0,
          mismatch__spike_below=0.07),
     {"spike_rate": 0.5, "spike_nats": 3.0, "spike_below": 0.07}),
], ids=lambda x: "-".join(map(str, x.values())))
def test_a_run_with_each_dial(warm, tmp_path, one_device, undisturbed, dial,
                              told):
  """Nothing learnt, two updates late: only the dial is between the two."""
  rows = run(warm, tmp_path, one_device, **dial)
  assert 0 <= k3(undisturbed) < 1e-6
  assert 10 * k3(undisturbed) < k3(rows) < 10 and k3(rows) > 1e-10
  want = {f"mismatch/{name}": value for name, value in told.items()}
  for row in rows:
    assert row["is/kl_k3"] >= 0 and np.isfinite(row["is/ess"])
    assert {k: v for k, v in row.items() if k.startswith("mismatch/")} == want
  lines = (tmp_path / "provenance.jsonl").read_text().splitlines()
  assert json.loads(lines[0])["resolved"]["mismatch"] == want
  # Evaluation is of the learner's weights, without any dial.
  for name, value in undisturbed[-1].items():
    if name.startswith("eval/"):
      assert rows[-1][name] == value, name


def test_an_undisturbed_run_tells_of_no_dial(undisturbed):
  assert not any(k.startswith("mismatch/") for row in undisturbed for k in row)
  assert any(k.startswith("eval/") for k in undisturbed[-1])


@pytest.mark.parametrize("kind,numbers", [("int", (8, 5, 3)),
                                          ("mantissa", (10, 5, 2))])
def test_fewer_bits_are_further_away(warm, tmp_path, one_device, kind, numbers):
  found = [k3(run(warm, tmp_path / str(n), one_device, **bits(kind, n)))
           for n in numbers]
  assert found == sorted(found) and found[-1] > 10 * found[0]


def test_the_asynchronous_mode_has_the_same_dials(warm, tmp_path, one_device):
  """Between taking turns and side by side at lag 0 there is no difference."""
  dials = dict(bits("int", 3), mismatch__logit_sd=0.5, evaluate__prompts=0,
               mismatch__temperature=0.9, optimizer__learning_rate=1e-3)
  turns = run(warm, tmp_path / "lag", one_device, "lag=0", **dials)
  beside = run(warm, tmp_path / "async", one_device, "lag=0",
               rollout__mode="async", **dials)
  assert [row["is/kl_k3"] for row in beside] == [
      row["is/kl_k3"] for row in turns]
  assert k3(beside) > 1e-3 and beside[0]["mismatch/int_bits"] == 3


def test_a_sweep_over_the_constants_of_runs_compiles_nothing(
    warm, tmp_path, one_device):
  """Bits, deviation, rate, nats, top-p, temperature: data, in a whole run."""
  sizes = lambda: [f._cache_size() for f in (
      mismatch.weights, generator._sample, step.jit_train_step)]
  found = []
  for i, x in enumerate((1.0, 1.5)):
    run(warm, tmp_path / str(i), one_device, "lag=0", train__steps=1,
        evaluate__prompts=0, mismatch__temperature=x, mismatch__top_p=1 - x / 9,
        mismatch__logit_sd=x, mismatch__spike_rate=x / 9,
        mismatch__spike_nats=x, **bits("mantissa", 4 + i))
    found.append(sizes())
  assert found[0] == found[1]


def test_a_resumed_run_keeps_its_dials(warm, tmp_path, one_device):
  """Cut after step 4 of 6: the same noise, pattern and bits; bit for bit."""
  dials = dict(bits("int", 3), mismatch__logit_sd=1.0, mismatch__spike_rate=0.3,
               mismatch__spike_nats=3.0, train__steps=6, evaluate__prompts=0,
               optimizer__learning_rate=0.02)
  whole, cut = tmp_path / "whole", tmp_path / "cut"
  run(warm, whole, one_device, **dials)
  run(warm, cut, one_device, **dials)
  shutil.rmtree(cut / "checkpoints" / "6")
  rows = [[{k: v for k, v in row.items() if not k.startswith("time/")}
           for row in x] for x in (
               metrics.read(str(whole)), run(warm, cut, one_device, **dials))]
  assert rows[0] == rows[1] and rows[0][-1]["is/kl_k3"] > 1e-3


@pytest.mark.parametrize("changes,words", [
    ({"weights": "int3"}, ["mismatch.weights", "int"]),
    ({"weights": "int"}, ["mismatch.bits", "2 to 16", "None"]),
    ({"weights": "int", "bits": 1}, ["mismatch.bits", "2 to 16", "1"]),
    ({"weights": "int", "bits": 17}, ["mismatch.bits", "2 to 16", "17"]),
    ({"weights": "mantissa", "bits": 0}, ["mismatch.bits", "0"]),
    ({"weights": "bf16", "bits": 7}, ["mismatch.bits", "'bf16'", "7"]),
    ({"bits": 4}, ["mismatch.bits", "'none'", "4"]),
    ({"top_p": 0.9, "rollout.top_k": 8}, ["mismatch.top_p", "top_k", "8"]),
    ({"top_p": 0.0}, ["mismatch.top_p"]),
    ({"temperature": 0.0}, ["mismatch.temperature"]),
    ({"logit_sd": -1.0}, ["mismatch.logit_sd"]),
    ({"spike_rate": 1.5}, ["mismatch.spike_rate"]),
    ({"spike_below": 0.0}, ["mismatch.spike_below"]),
    ({"weights": "mantissa", "bits": 7, "model.param_dtype": "float64"},
     ["mismatch.weights", "float64"]),
    ({"weights": "bf16", "model.param_dtype": "bfloat16"},
     ["mismatch.weights", "changes nothing", "bfloat16"]),
    ({"spike_rate": 0.1}, ["mismatch.spike_rate", "spike_nats", "0.0"]),
    ({"spike_rate": 0.1, "spike_nats": 2.0, "spike_below": 1.0},
     ["mismatch.spike_rate", "spike_below < 1", "1.0"]),
])
def test_what_cannot_act_is_refused(one_device, changes, words):
  config = addition.get_config()
  for name, value in changes.items():
    overrides.apply(config, name if "." in name else f"mismatch.{name}", value)
  with pytest.raises(ValueError) as error:
    build.build(config, devices=one_device)
  assert all(word in str(error.value) for word in words), error.value
  assert "\n" not in str(error.value) and "config.m" in str(error.value)


def test_the_learner_keeps_its_own_temperature(one_device):
  config = addition.get_config()
  config.rollout.temperature, config.mismatch.temperature = 0.8, 1.5
  parts = build.build(config, devices=one_device)
  assert parts.sampling.temperature == pytest.approx(1.2)
  assert parts.constants["temperature"] == 0.8
