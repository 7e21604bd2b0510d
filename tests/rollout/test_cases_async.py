"""Published faults of asynchronous training, by a case's name; with fakes.

Whole runs are in tests/test_async_run.py: D02 (max_lag 0 is the synchronous
run) and D08 (the sampler's weights are the learner's).
"""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout.test_asynchronous import Fake, fake_groups, learn, make
from rollout.test_rollout import make_generator, tiny_model

from rl_is.core.types import Batch, PolicyOutputs
from rl_is.infra import rng
from rl_is.models import sampler, scoring
from rl_is.objective import constants as constants_lib
from rl_is.objective.compose import Objective
from rl_is.objective.spec import Correction, Spec
from rl_is.rollout import asynchronous, batching
from rl_is.tasks import make_task


def within(seconds, f):
  """f() on a thread of its own; fails, and does not hang, if it takes longer."""
  out = []
  def call():
    try:
      out.append((f(), None))
    except Exception as error:
      out.append((None, error))
  thread = threading.Thread(target=call, daemon=True)
  thread.start()
  thread.join(seconds)
  assert out, f"no end within {seconds} s"
  value, error = out[0]
  if error:
    raise error
  return value


def masked_by_version(versions, now, max_lag):
  """(loss, gradient, metrics) of a batch of one-token rows with A = 1."""
  spec = Spec("pg", advantage="given", corrections=(Correction("version_mask"),))
  column = np.asarray(versions, np.int32)[:, None]
  rows, mask = len(versions), np.ones((len(versions), 1), bool)
  batch = Batch(
      column, mask, mask, np.zeros(rows), np.arange(rows), version=column,
      version_now=np.full(rows, now, np.int32), adv=jnp.ones((rows, 1)))
  objective = Objective(spec)
  values = constants_lib.resolve(spec, {}, dict(max_lag=max_lag))
  batch, = objective.minibatches(objective.prepare(batch, values))
  (loss, metrics), grad = jax.value_and_grad(lambda x: objective.loss(
      PolicyOutputs(x), batch, values), has_aux=True)(jnp.full((rows, 1), -1.0))
  return loss, grad[:, 0], metrics["version_mask/masked_frac"]


def test_D01_the_bound_on_the_age_is_inclusive():
  """At 10 with max_lag 2: 7 goes, 8 stays; of 4 tokens 1 is dropped."""
  _, grad, dropped = masked_by_version([7, 8, 9, 10], 10, 2)
  np.testing.assert_array_equal(grad != 0, [False, True, True, True])
  assert dropped.total == 1 and dropped.count == 4
  for version in (8, 9, 10):
    batching.check_lag(fake_groups([0], version), 10, 2)


@pytest.mark.parametrize("version", [7, 11, -1])
def test_D01_a_late_future_or_unknown_version_is_an_error(version):
  """Of one group of many, and in what a checkpoint brings; -1 is unknown.

  Batch 10 is the last: a younger group would take the place of that of 11.
  """
  bad = fake_groups([1], version)
  match = rf"versions 8 to 10.*\[{version}\]"
  with pytest.raises(RuntimeError, match=match):
    batching.check_lag(batching.join([fake_groups([0], 9), bad], 2), 10, 2)
  source = make(Fake(), first=10, batches=11, cursors=[20, 21],
                waiting=[fake_groups([20], 9), bad])
  with pytest.raises(RuntimeError, match=match):
    within(10, lambda: learn(source, 10, 11))
  source.close()


@pytest.mark.parametrize("first", [0, 7])
@pytest.mark.parametrize("max_lag", [0, 1])
def test_D03_the_first_batch_is_there_at_once(first, max_lag):
  """From 0 and from a resumed step: a lead equal to the bound may start."""
  source = make(Fake(), max_lag=max_lag, first=first, batches=first + 3)
  got = within(10, lambda: learn(source, first, first + 3))
  source.close()
  assert [c for c, _ in got] == [[2 * n, 2 * n + 1]
                                 for n in range(first, first + 3)]


@pytest.mark.parametrize("order", asynchronous.ORDERS)
@pytest.mark.parametrize("learner_ticks", [1, 7])
def test_D05_slow_prompts_have_their_share(order, learner_ticks):
  """Every second group takes 3 ticks, the others 1; 100 batches of two groups.

  A learner of 7 ticks is slower than the 4 that a batch takes: the generator
  is held back, nothing is discarded. A policy that discards what is more than
  one update old trains on none of the slow ones.
  """
  limits, two = dict(updates_per_batch=1, max_lag=1), 2
  version = begun = tick = learner_free = 0
  running, waiting, trained, ages = None, [], [], []
  while version < 100:
    if running and tick >= running[2]:
      waiting.append(running[:2])
      running = None
    if not running and asynchronous.may_start(
        begun + 1, version, batch_size=two, **limits):
      running = begun, version, tick + (3 if begun % 2 else 1)
      begun += 1
    if tick >= learner_free and len(waiting) >= two:
      chosen = asynchronous.choose(
          [v for _, v in waiting], [running[1]] if running else [], two,
          now=version, order=order, **limits)
      trained += [waiting[i][0] for i in chosen]
      ages += [version - waiting[i][1] for i in chosen]
      waiting = [x for i, x in enumerate(waiting) if i not in chosen]
      version, learner_free = version + 1, tick + learner_ticks
    tick += 1
  assert sum(cursor % 2 for cursor in trained) == len(trained) / 2 == 100
  assert sorted(trained) == list(range(200))
  assert max(ages) == 1  # the bound is kept, and used


def test_D07_nothing_of_the_old_weights_survives_new_ones():
  """The same prompts again after a push: as a sampler that knows only the new."""
  generate = make_generator()
  old, new = generate([6, 7]), generate([6, 7], scale=2)
  jax.tree.map(np.testing.assert_array_equal, new,
               make_generator()([6, 7], scale=2))
  m = new.mask
  assert np.abs(new.logp_behaviour - old.logp_behaviour)[m].max() > 0.01
  model = tiny_model()
  params = jax.tree.map(lambda x: 2 * x, model.init(jax.random.key(0)))
  scored = scoring.score(params, new, model=model, temperature=1.0).logp
  np.testing.assert_allclose(scored[m], new.logp_behaviour[m], atol=1e-5)


def test_D09_a_batch_that_is_all_too_old_is_no_update():
  """4 rows of version 3 at 10, at most 2 old: all 4 dropped and counted, loss
  and gradient 0 (the step then moves nothing), and no 0 / 0."""
  loss, grad, dropped = masked_by_version([3] * 4, 10, 2)
  assert loss == 0 and (grad == 0).all()
  assert dropped.total == dropped.count == 4


def test_D09_admission_control_makes_none_too_old():
  """At version 10 nothing of version 3 can come: so begun, it is an error."""
  source = make(Fake(), first=10, batches=11, cursors=[20, 21],
                waiting=[fake_groups([20], 3), fake_groups([21], 3)])
  with pytest.raises(RuntimeError, match=r"versions 8 to 10.*\[3\]"):
    within(10, lambda: learn(source, 10, 11))
  source.close()


@pytest.mark.parametrize("at", [0, 3, 7])
@pytest.mark.parametrize("error", [KeyError("gold"), MemoryError(),
                                   KeyboardInterrupt("stop")])
def test_D10_a_worker_that_raises_stops_the_learner(at, error):
  """Within 5 s, with the prompt and the error's own name."""
  source = make(Fake(fails_at=at, error=error))
  with pytest.raises(RuntimeError) as raised:
    within(5, lambda: learn(source, 0, 6))
  source.close()
  assert f"generator, at prompts [{at}]: {type(error).__name__}" in str(
      raised.value)
  assert raised.value.__cause__ is error


def test_D12_the_order_of_what_waits():
  """Inserted 5, 7, 6 at version 7, take two: the oldest are 5 and 6, the
  freshest 7 and 6. With max_lag 2 the 5 has its last chance: it is taken, with
  the freshest, and not evicted."""
  take = lambda order, versions, max_lag: asynchronous.choose(
      versions, [], 2, now=7, updates_per_batch=1, max_lag=max_lag, order=order)
  assert take("oldest", [5, 7, 6], 2) == [0, 2]
  assert take("freshest", [5, 7, 6], 3) == [1, 2]
  assert take("freshest", [5, 7, 6], 2) == [0, 1]
  for _ in range(3):  # ties go by the prompts' order
    assert take("oldest", [6, 6, 6], 2) == [0, 1]
    assert take("freshest", [6, 6, 6], 9) == [1, 2]


def test_D14_every_draw_has_its_own_noise():
  """Two workers, 4 prompts each, 8 answers: 64 keys; the next step's, and
  another seed's, are others, and the same prompts' are the same."""
  task = make_task("addition", digits=1)

  def keys(seed, cursors, tokens=1):
    prompts = batching.encode_prompts(
        task.tokenizer, [task.train[0]] * len(cursors), cursors, 8, 5)
    rows = sampler.row_keys(rng.key(seed, "sample"), prompts)
    each = jax.vmap(lambda key: jax.vmap(
        lambda t: jax.random.fold_in(key, t))(jnp.arange(tokens)))(rows)
    return {tuple(k) for k in np.asarray(
        jax.random.key_data(each)).reshape(-1, 2)}

  workers = keys(0, range(4)) | keys(0, range(4, 8))
  assert len(workers) == 64 and workers == keys(0, range(8))
  assert not workers & keys(1, range(8)) and not workers & keys(0, range(8, 16))
  assert len(keys(0, range(16), tokens=5)) == 16 * 8 * 5


def test_D14_the_seed_of_the_run_reaches_the_sampler():
  """The same problem at the same cursor: other answers under another seed."""
  answers = [make_generator(key=rng.key(seed, "sample"))([6, 7]).tokens
             for seed in (0, 0, 1)]
  np.testing.assert_array_equal(answers[0], answers[1])
  assert (answers[0] != answers[2]).any()
  # And no two answers to one problem are the same draw.
  assert len({row.tobytes() for row in answers[0][:4]}) > 1
