"""The training loop, on a model small enough to follow by hand."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax.train.loop import DivergedError, Trainer, Variant


def line(optimizer, traced=None):
    """One weight w, the loss (w - x)^2: with `optax.sgd(0.25)` each step halves the distance."""

    def loss(w, batch):
        if traced is not None:
            traced.append(batch.shape)
        return jnp.mean((w - batch) ** 2)

    return Trainer(Variant("line", lambda key: jnp.zeros(()), loss, optimizer), np.zeros((2,), np.float32))


def test_losses_come_before_the_update_and_states_after_it():
    trainer = line(optax.sgd(0.25))
    batches = [np.ones(2, np.float32)] * 3
    weights, losses = [], []
    for step in trainer.train(trainer.start(0), batches):
        weights.append(float(step.state.params))  # read at once: the next step takes the state's memory
        losses.append(step.loss)
    assert losses == [1.0, 0.25, 0.0625]
    assert weights == [0.5, 0.75, 0.875]


def test_all_seeds_share_one_compiled_step():
    traced = []
    trainer = line(optax.adam(0.1), traced)
    for seed in range(3):
        assert len(list(trainer.train(trainer.start(seed), [np.ones(2, np.float32)] * 2))) == 2
    assert len(traced) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_stops_with_arm_and_step_and_keeps_what_came_before(bad):
    trainer = line(optax.sgd(0.25))
    batches = [np.full(2, x, np.float32) for x in (1, 1, bad, 1)]
    losses = []
    with pytest.raises(DivergedError, match=f"variant line: the loss is {bad} at step 3; try") as error:
        losses.extend(step.loss for step in trainer.train(trainer.start(0), batches))
    assert losses == [1.0, 0.25]
    assert (error.value.variant, error.value.step) == ("line", 3)


def test_evaluate_is_the_mean_over_batches_and_changes_nothing():
    trainer = line(optax.sgd(0.25))
    state = trainer.start(0)
    batches = [np.full(2, x, np.float32) for x in (1, 2)]
    assert trainer.evaluate(state.params, batches) == 2.5
    assert float(state.params) == 0.0
