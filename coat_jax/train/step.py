"""The step that everyone writes: the gradients of a loss, then the optimizer."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax


@dataclasses.dataclass(frozen=True)
class OrdinaryStep:
    """A training step by `jax.value_and_grad`: (params, state, batch) -> (params, state, loss).

    Attributes:
      loss: (params, batch) -> mean loss, a floating-point number.
      optimizer: any Optax transformation; one with `update_and_apply`, as this library's, updates parameters in one pass.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> step = OrdinaryStep(lambda w, x: (w - x) ** 2, optax.sgd(0.25))
      >>> w = jnp.zeros(())
      >>> w, state, loss = step(w, step.init(w), 1.0)
      >>> float(w), float(loss)
      (0.5, 1.0)
    """

    loss: Callable[[Any, Any], jax.Array]
    optimizer: optax.GradientTransformation

    def init(self, params: Any) -> Any:
        """The optimizer's state."""
        return self.optimizer.init(params)

    def __call__(self, params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        """One step."""
        loss, grads = jax.value_and_grad(self.loss)(params, batch)
        if hasattr(self.optimizer, "update_and_apply"):
            return *self.optimizer.update_and_apply(grads, state, params), loss
        updates, state = self.optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss
