"""The training loop: one compiled step for a variant, shared by all its seeds; losses come out as they are measured."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from coat_jax.fused_step.step import TrainingStep
from coat_jax.interrupts import heed
from coat_jax.train.step import OrdinaryStep


class State(NamedTuple):
    """What a step takes and gives back.

    Attributes:
      params: the model's parameters.
      opt_state: the optimizer's state.
    """

    params: Any
    opt_state: Any


class StepResult(NamedTuple):
    """One step as measured.

    Attributes:
      number: 1 for the first.
      loss: mean over the batch, before the update.
      seconds: wall time, with the device's work.
      state: after the update.
    """

    number: int
    loss: float
    seconds: float
    state: State


class DivergedError(ArithmeticError):
    """A loss that is not finite.

    Attributes:
      variant: name of the variant.
      step: number of the step.
      loss: the loss.
    """

    def __init__(self, variant: str, step: int, loss: float):
        super().__init__(f"variant {variant}: the loss is {loss} at step {step}; try a lower learning rate or another seed")
        self.variant, self.step, self.loss = variant, step, loss


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to train: initial parameters, a loss and an optimizer.

    Attributes:
      name: as shown in tables.
      init: key -> parameters.
      loss: (parameters, batch) -> mean loss, an f32 scalar.
      optimizer: any Optax transformation.
      fused: the step that updates each layer inside the backward pass; None takes all gradients first.
    """

    name: str
    init: Callable[[jax.Array], Any]
    loss: Callable[[Any, jax.Array], jax.Array]
    optimizer: optax.GradientTransformation
    fused: TrainingStep | None = None

    @classmethod
    def of_model(cls, name: str, model: Any, optimizer: optax.GradientTransformation) -> "Variant":
        """A variant for a model of `coat_jax.models`, on batches of tokens, int (batch, seq + 1)."""

        def init(key: jax.Array) -> Any:
            return model.init(key, jnp.zeros((1, 8), jnp.int32))["params"]

        def loss(params: Any, batch: jax.Array) -> jax.Array:
            return model.apply({"params": params}, batch[:, :-1], batch[:, 1:], method=model.loss)

        return cls(name, init, loss, optimizer)


class Trainer:
    """Trains one variant. Everything is compiled once, for one batch shape, and serves any number of seeds.

    Args:
      variant: what to train.
      batch: a batch, or its shape and dtype.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, optax
      >>> from coat_jax.train.loop import Variant, Trainer
      >>> variant = Variant("line", lambda key: jnp.zeros(()), lambda w, x: jnp.mean((w - x) ** 2), optax.sgd(0.25))
      >>> trainer = Trainer(variant, np.zeros((2,), np.float32))
      >>> batches = [np.ones((2,), np.float32)] * 3
      >>> [step.loss for step in trainer.train(trainer.start(seed=0), batches)]
      [1.0, 0.25, 0.0625]
    """

    def __init__(self, variant: Variant, batch: Any):
        self.variant = variant
        self._start = jax.jit(self._first_state)
        self._loss = jax.jit(variant.loss)
        self._batch = jax.ShapeDtypeStruct(batch.shape, batch.dtype)

    def _first_state(self, key: jax.Array) -> State:
        params = self.variant.init(key)
        return State(params, (self.variant.fused or self.variant.optimizer).init(params))

    def _update(self, state: State, batch: jax.Array) -> tuple[State, jax.Array]:
        if self.variant.fused is not None:
            params, opt_state, metrics = self.variant.fused(*state, batch)
            return State(params, opt_state), metrics.loss
        params, opt_state, loss = OrdinaryStep(self.variant.loss, self.variant.optimizer)(*state, batch)
        return State(params, opt_state), loss

    @functools.cached_property
    def compiled(self) -> Any:
        """The compiled step, (state, batch) -> (state, loss); the state is donated."""
        return jax.jit(self._update, donate_argnums=0).lower(self.abstract_state, self._batch).compile()

    @functools.cached_property
    def abstract_state(self) -> State:
        """Shapes and dtypes of the state."""
        return jax.eval_shape(self._first_state, jax.random.key(0))

    def start(self, seed: int) -> State:
        """The state before the first step."""
        return self._start(jax.random.key(seed))

    def train(self, state: State, batches: Iterable[np.ndarray]) -> Iterator[StepResult]:
        """Takes one step for every batch and yields it. `state` is used up; each step carries the next one.

        Raises:
          DivergedError: a loss that is not finite. What was yielded before stands.
        """
        step = self.compiled
        for number, batch in enumerate(batches, 1):
            heed()
            began = time.perf_counter()
            state, loss = step(state, batch)
            value = float(loss)  # waits for the device, so that `seconds` is the step's own time
            if not math.isfinite(value):
                raise DivergedError(self.variant.name, number, value)
            yield StepResult(number, value, time.perf_counter() - began, state)

    def evaluate(self, params: Any, batches: Iterable[np.ndarray]) -> float:
        """The mean loss over `batches`, without updates."""
        return float(np.mean([float(self._loss(params, batch)) for batch in batches]))
