"""Transformations that a fused step refuses: those that need the gradients of more than one layer at once."""

from collections.abc import Iterator
from typing import Any

import jax
import optax

from coat_jax.fused_step import dependence

_CLIP = "give the step clip=Clip(max_norm)"
_PER_LEAF = "it would see one layer where it saw the stack; use ordinary_step"
ALTERNATIVES = (
    ("clip_by_global_norm", _CLIP),
    ("apply_if_finite", "give the step skip='gradients'"),
    ("MultiSteps", "give the step accumulation=Accumulation(micro_batches)"),
    ("normalize_by_update_norm", "use ordinary_step"),
    ("adaptive_grad_clip", _PER_LEAF),
    ("clip_by_block_rms", _PER_LEAF),
    ("scale_by_trust_ratio", _PER_LEAF),
    ("scale_by_param_block_norm", _PER_LEAF),
    ("scale_by_param_block_rms", _PER_LEAF),
    ("scale_by_factored_rms", _PER_LEAF),
)
"""Optax transformations by name, and what does the same in a fused step."""


def _members(value: Any, depth: int = 0) -> Iterator[str]:
    """Names of the functions that made the closures from which a transformation is composed."""
    if depth > 12:
        return
    if isinstance(value, optax.MultiSteps):
        yield "MultiSteps"
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _members(item, depth + 1)
    elif isinstance(value, dict):
        yield from _members(tuple(value.values()), depth + 1)
    elif callable(value) and hasattr(value, "__qualname__"):
        yield value.__qualname__.split(".")[0]
        cells = getattr(value, "__closure__", None) or ()
        yield from _members(tuple(cell.cell_contents for cell in cells), depth + 1)
        yield from _members(getattr(value, "__self__", ()), depth + 1)


def refuse_by_name(optimizer: Any) -> None:
    """Refuses the known ones before anything is traced.

    Raises:
      ValueError: its name and the alternative.
      TypeError: not an Optax transformation.
    """
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(f"optimizer={optimizer!r} is not an Optax transformation; coat_adamw(3e-4) is one")
    members = set(_members(optimizer if isinstance(optimizer, optax.MultiSteps) else (optimizer.init, optimizer.update)))
    for name, alternative in ALTERNATIVES:
        if name in members:
            raise ValueError(f"optimizer: {name} needs gradients that a fused step never has together; {alternative}")


def refuse_by_dependence(optimizer: optax.GradientTransformation, state: Any, params: Any) -> None:
    """Refuses any other one, by what its updates are computed from.

    Raises:
      ValueError: the first parameter whose update depends on another's gradient.
    """
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, state))
    update = optax.with_extra_args_support(optimizer).update
    found = dependence.sources(lambda grads, state, params: update(grads, state, params), shapes[0], shapes[1], shapes[0])
    for i, path in enumerate(paths):
        others = [paths[j] for j in sorted(found[i]) if j < len(paths) and j != i]
        if others:
            raise ValueError(
                f"optimizer: the update of params{path} depends on the gradient of params{others[0]}, which a fused step never "
                "has together; clip and skip of the step itself may do, else use ordinary_step"
            )
