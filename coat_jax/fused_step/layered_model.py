"""`LayeredModel`: a model as three functions, embedding -> one layer, scanned -> head and loss; trees with hidden leaves."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

Params = Any
Batch = Any


@dataclasses.dataclass(frozen=True)
class LayeredModel:
    """A model whose layers are one function, repeated over stacked parameters.

        x = embed(outer, batch);   x = layer(row_i, x, batch) for i = 0..L-1;   loss(outer, x, batch)

    `outer` is the parameters without `stack`, and embed and loss both see all of it: tied embeddings are one leaf which both
    read. x is a floating-point array, or a tree of them, of one shape and dtype through all layers.

    Attributes:
      embed: (outer, batch) -> x.
      layer: (row, x, batch) -> x, row being the parameters of one layer.
      loss: (outer, x, batch) -> float32 scalar, a mean over the batch.
      stack: key of the stacked layers in the parameters; each of their leaves has the layers as its first axis.

    Example:
      >>> import jax.numpy as jnp
      >>> from coat_jax.fused_step.layered_model import LayeredModel
      >>> parts = LayeredModel(
      ...     embed=lambda outer, batch: outer["in"] * batch,
      ...     layer=lambda row, x, batch: x + row["w"],
      ...     loss=lambda outer, x, batch: jnp.mean(x),
      ... )
      >>> parts({"in": jnp.float32(2.0), "layers": {"w": jnp.ones((3,))}}, jnp.ones((4,)))
      Array(5., dtype=float32)
    """

    embed: Callable[[Params, Batch], Any]
    layer: Callable[[Params, Any, Batch], Any]
    loss: Callable[[Params, Any, Batch], jax.Array]
    stack: str = "layers"

    def __call__(self, params: Params, batch: Batch) -> jax.Array:
        """The loss, layers in one scan: what ordinary automatic differentiation differentiates."""
        rows, outer = self.split(params)
        x, _ = jax.lax.scan(lambda x, row: (self.layer(row, x, batch), None), self.embed(outer, batch), rows)
        return self.loss(outer, x, batch)

    def split(self, params: Params) -> tuple[Params, Params]:
        """(stacked rows, outer)."""
        return params[self.stack], {key: value for key, value in params.items() if key != self.stack}

    def join(self, rows: Params, outer: Params) -> Params:
        """The inverse of `split`."""
        return {**outer, self.stack: rows}

    def layers(self, params: Params) -> int:
        """L, the number of layers.

        Raises:
          TypeError, ValueError: parameters that are not one stack of layers beside others.
        """
        if not isinstance(params, Mapping) or self.stack not in params:
            keys = sorted(map(str, params)) if isinstance(params, Mapping) else type(params).__name__
            raise TypeError(f"params: no stack of layers under {self.stack!r}, only {keys}; scan the layers (flax.linen.scan)")
        rows = params[self.stack]
        if isinstance(rows, (list, tuple)):
            raise TypeError(
                f"params[{self.stack!r}]: {len(rows)} separate layers, not one stack; "
                "jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers) makes it one where they are alike"
            )
        leaves = jax.tree_util.tree_leaves_with_path(rows)
        depths = {jax.tree_util.keystr(path): leaf.shape[:1] for path, leaf in leaves}
        if len(set(depths.values())) != 1 or () in depths.values():
            raise ValueError(f"params[{self.stack!r}]: first axes {depths} are not one number of layers; stack every leaf")
        return next(iter(depths.values()))[0]

    def is_row(self, params: Params) -> Any:
        """A tree like params: True on the leaves of the stack."""
        return {key: jax.tree.map(lambda _, inside=key == self.stack: inside, value) for key, value in params.items()}


def hide(keep: Any, tree: Any) -> Any:
    """`tree` with an `optax.MaskedNode` in place of what lies under a False of `keep`; structure and paths stay."""
    return jax.tree.map(lambda shown, value: value if shown else optax.MaskedNode(), keep, tree)


def show(keep: Any, first: Any, second: Any) -> Any:
    """A tree with `first` under every True of `keep` and `second` elsewhere."""
    return jax.tree.map(lambda shown, a, b: a if shown else b, keep, first, second)


def take(tree: Any, i: jax.Array | int) -> Any:
    """Row i of every leaf, as a stack of one: the rank stays, so that a mask by rank decides as for the stack."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1, 0), tree)


def put(tree: Any, row: Any, i: jax.Array | int) -> Any:
    """`tree` with row i of every leaf replaced by a stack of one, in place where the compiler may."""
    return jax.tree.map(lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, i, 0), tree, row)


def one_row(rows: Any) -> Any:
    """Shapes and dtypes of one row of a stack."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows)


def alone(row: Any) -> Any:
    """A stack of one without its first axis: what `LayeredModel.layer` takes."""
    return jax.tree.map(lambda x: jax.lax.squeeze(x, (0,)), row)


def stacked(row: Any) -> Any:
    """The inverse of `alone`."""
    return jax.tree.map(lambda x: jax.lax.expand_dims(x, (0,)), row)
