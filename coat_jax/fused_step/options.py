"""What a training step may do beside the update: clip gradients, leave a step out, report."""

import dataclasses
import enum
from typing import Any, NamedTuple

import jax

from coat_jax.optim.diagnostics import Health


class Norm(enum.StrEnum):
    """Which global norm clips the gradients of a fused step."""

    EXACT = "exact"
    """This step's: the backward pass runs twice, first for the norm alone."""
    PREVIOUS = "previous"
    """The previous step's, for nothing; the first step is not clipped."""


@dataclasses.dataclass(frozen=True)
class Clip:
    """Clipping by global norm: g <- g min(1, max_norm / norm).

    Attributes:
      max_norm: the largest norm that passes unchanged.
      norm: which norm. An ordinary step with "exact" is what `optax.clip_by_global_norm` does.

    Raises:
      ValueError: max_norm <= 0, an unknown norm.
    """

    max_norm: float
    norm: Norm = Norm.EXACT

    def __post_init__(self):
        if not self.max_norm > 0:
            raise ValueError(f"Clip: max_norm={self.max_norm}; a norm to clip to is positive, such as 1.0")
        object.__setattr__(self, "norm", member(Norm, self.norm, "Clip: norm"))


class Skip(enum.StrEnum):
    """Which step is not taken, parameters and optimizer state staying as they were, all of them."""

    NEVER = "never"
    """Every step is taken."""
    LOSS = "loss"
    """Not where the loss is NaN or inf. Free. Gradients that overflow in the backward pass are not noticed in time: the layers
    behind are updated by then."""
    GRADIENTS = "gradients"
    """Not where the loss or any gradient is NaN or inf. A fused step runs its backward pass twice, as for an exact norm."""


class StepState(NamedTuple):
    """What a step changes beside the parameters.

    Attributes:
      optimizer: the optimizer's state.
      previous_norm: float32, the last finite global norm of the gradients before clipping; 0 before the first step.
    """

    optimizer: Any
    previous_norm: jax.Array


class Metrics(NamedTuple):
    """What a step reports.

    Attributes:
      loss: float32, mean over the batch, before the update.
      gradient_norm: float32, global, before clipping.
      layer_gradient_norms: float32 (layers,).
      nonfinite: float32, number of NaN or inf gradients.
      clip_scale: float32, what gradients were multiplied by.
      skipped: bool, whether the step was not taken.
      health: the optimizer's signals from the state behind the step, `coat_jax.optim.diagnostics.Health`; None where its state
        holds no moments of `coat_adamw`.
    """

    loss: jax.Array
    gradient_norm: jax.Array
    layer_gradient_norms: jax.Array
    nonfinite: jax.Array
    clip_scale: jax.Array
    skipped: jax.Array
    health: Health | None


def member(kind: type[enum.StrEnum], value: str, argument: str) -> Any:
    """The member of that name; `argument` names it in the error.

    Raises:
      ValueError: an unknown name.
    """
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{argument}={value!r} is unknown; use one of {', '.join(repr(str(k)) for k in kind)}") from None
