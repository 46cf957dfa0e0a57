"""An Optax transformation applied to one layer of a stack at a time: its state in rows, and updates in place."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from coat_jax.fused_step.layered_model import Params, hide, put, show, take


@dataclasses.dataclass(frozen=True)
class RowOptimizer:
    """A transformation that treats every leaf, and every row of a stacked leaf, by itself.

    States are cut by the structure of the parameters: a field of the state with one entry per parameter is cut with them;
    all else (step counts, hyperparameters) is the same for every cut.

    Attributes:
      tx: the transformation. Where it has `update_and_apply(grads, state, params)`, that is used.
      per_parameter: a tree with True at every field of the state that has one entry per parameter, False at other leaves.
    """

    tx: optax.GradientTransformation
    per_parameter: Any

    @classmethod
    def of(cls, tx: optax.GradientTransformation, state: Any) -> "RowOptimizer":
        """The transformation, with the structure of a state of its own."""
        marks = optax.tree.map_params(tx, lambda _: True, state, transform_non_params=lambda _: False, is_leaf=lambda _: True)
        return cls(tx, marks)

    def _map(self, fn: Any, state: Any, *others: Any) -> Any:
        """fn on every per-parameter field, the other leaves from the first state."""
        return jax.tree.map(lambda mark, a, *b: fn(a, *b) if mark else a, self.per_parameter, state, *others)

    def hide(self, keep: Any, state: Any) -> Any:
        """The state of the parameters under a True of `keep`."""
        return self._map(lambda field: hide(keep, field), state)

    def show(self, keep: Any, first: Any, second: Any) -> Any:
        """The state `first` for parameters under a True of `keep`, `second` elsewhere; other leaves from `first`."""
        return self._map(lambda a, b: show(keep, a, b), first, second)

    def take(self, state: Any, i: jax.Array) -> Any:
        """The state of row i."""
        return self._map(lambda field: take(field, i), state)

    def put(self, state: Any, row: Any, i: jax.Array) -> Any:
        """The state with that of row i replaced; other leaves stay as they were before the row's update."""
        return self._map(lambda field, new: put(field, new, i), state, row)

    def check_rows(self, state: Any, layers: int) -> None:
        """Checks that the state of a stack has one entry per layer.

        Raises:
          ValueError: a field that does not; its path, its shape and what would do.
        """

        def check(path: Any, leaf: jax.Array) -> None:
            if leaf.shape[:1] != (layers,):
                raise ValueError(
                    f"optimizer state{jax.tree_util.keystr(path)}: shape {leaf.shape} has no first axis of {layers} layers and "
                    "cannot be updated layer by layer; keep that leaf in float32 (quantize_filter) or use ordinary_step"
                )

        self._map(lambda field: jax.tree_util.tree_map_with_path(check, field), state)

    def apply(self, grads: Params, state: Any, params: Params, row: jax.Array | None = None) -> tuple[Params, Any]:
        """New parameters and state.

        Args:
          row: where the leaves are row i of stacked ones, i: stochastic rounding numbers elements by their place in the whole.
        """
        extra = {} if row is None else {"row": row}
        # The update is compiled by itself, whatever made its inputs: fused with that, XLA may round otherwise.
        grads, state, params = jax.lax.optimization_barrier((grads, state, params))
        if hasattr(self.tx, "update_and_apply"):
            return self.tx.update_and_apply(grads, state, params, **extra)
        updates, state = optax.with_extra_args_support(self.tx).update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state


def select(ok: jax.Array | None, new: Any, old: Any) -> Any:
    """`new` where ok, else `old`; None is ok."""
    return new if ok is None else jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)
