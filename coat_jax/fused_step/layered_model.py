"""`LayeredModel`: a model as functions, embedding -> layers, scanned -> head and loss; trees with hidden leaves."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from coat_jax.ops import CodedWeight
from coat_jax.quant import QuantizedArray

Params = Any
Batch = Any


@dataclasses.dataclass(frozen=True)
class Stack:
    """Layers that are one function, repeated over stacked parameters.

        x = enter(outer, x, batch);   x = layer(row_i, x, batch) for i = 0..L-1

    Attributes:
      enter: (outer, x, batch) -> x, between what stands before and the first layer. x is a floating-point array, or a tree of
        them, of one shape and dtype through all layers of the stack.
      layer: (row, x, batch) -> x, row being the parameters of one layer.
      key: of the stacked layers in the parameters; each of their leaves has the layers as its first axis.
      codes: row -> a tree like the row with a `QuantizedArray` in place of each weight that the layer's products quantize
        (`ops.weight_codes`), None elsewhere. A step with micro-batches makes them once for all of these, and the layer gets a
        `ops.CodedWeight` in place of such a weight. None: every micro-batch quantizes where weights are used.
    """

    enter: Callable[[Params, Any, Batch], Any]
    layer: Callable[[Params, Any, Batch], Any]
    key: str
    codes: Callable[[Params], Any] | None = None

    def apply(self, row: Params, codes: Any, x: Any, batch: Batch) -> Any:
        """One layer, its weights together with their codes where there are some."""
        return self.layer(row if codes is None else with_codes(row, codes), x, batch)


@dataclasses.dataclass(frozen=True)
class LayeredModel:
    """A model whose layers are one function, repeated over stacked parameters; or several such stacks, one behind the other.

        x = embed(outer, batch);   x = layer(row_i, x, batch) for i = 0..L-1;   loss(outer, x, batch)

    `outer` is the parameters without the stacks, and embed, enter and loss all see all of it: tied embeddings are one leaf
    which two of them read. x is a floating-point array, or a tree of them, of one shape and dtype through all layers. The
    batch may hold anything: tokens, embeddings in their place, a weight for each token that the loss reads.

    Attributes:
      embed: (outer, batch) -> x.
      layer, stack, codes: of the first stack: `Stack.layer`, `Stack.key` and `Stack.codes`.
      loss: (outer, x, batch) -> float32 scalar, a mean over the batch.
      further: stacks behind the first one, such as the language model behind an image encoder.
      loss_weight: batch -> scalar, what the loss's mean is over, such as the sum of the tokens' weights: micro-batches count in
        these proportions. None: they count alike.

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
    codes: Callable[[Params], Any] | None = None
    further: tuple[Stack, ...] = ()
    loss_weight: Callable[[Batch], jax.Array] | None = None

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """All stacks, in the order in which they run. The first is entered by `embed`."""
        first = Stack(lambda outer, _, batch: self.embed(outer, batch), self.layer, self.stack, self.codes)
        return (first, *self.further)

    def __call__(self, params: Params, batch: Batch, codes: Mapping[str, Any] | None = None) -> jax.Array:
        """The loss, the layers of a stack in one scan: what ordinary automatic differentiation differentiates.

        Args:
          params, batch: of the model.
          codes: of the weights, from `weight_codes`; None quantizes weights where they are used.
        """
        rows, outer = self.split(params)
        x = None
        for stack in self.stacks:
            x = stack.enter(outer, x, batch)
            inputs = (rows[stack.key], None if codes is None else codes[stack.key])

            def layer(x: Any, row: tuple[Params, Any], stack: Stack = stack) -> tuple[Any, None]:
                return stack.apply(*row, x, batch), None

            x, _ = jax.lax.scan(layer, x, inputs)
        return self.loss(outer, x, batch)

    def weight_codes(self, params: Params) -> dict[str, Any]:
        """The codes of every stack's weights by its key, stacked like these; None for a stack that makes none."""
        return {s.key: None if s.codes is None else jax.lax.map(s.codes, params[s.key]) for s in self.stacks}

    def split(self, params: Params) -> tuple[dict[str, Params], Params]:
        """(stacked rows by key, outer)."""
        keys = [stack.key for stack in self.stacks]
        return {key: params[key] for key in keys}, {key: value for key, value in params.items() if key not in keys}

    def join(self, rows: Mapping[str, Params], outer: Params) -> Params:
        """The inverse of `split`."""
        return {**outer, **rows}

    def layers(self, params: Params) -> dict[str, int]:
        """L, the number of layers, of every stack by its key.

        Raises:
          TypeError, ValueError: parameters that are not such stacks of layers beside others, or two stacks of one key.
        """
        keys = [stack.key for stack in self.stacks]
        if len(set(keys)) < len(keys):
            raise ValueError(f"LayeredModel: the stacks are called {keys}; give each a key of its own")
        return {key: _depth(params, key) for key in keys}

    def is_row(self, params: Params, key: str | None = None) -> Any:
        """A tree like params: True on the leaves of the stack of that key, of any stack for None."""
        keys = [stack.key for stack in self.stacks] if key is None else [key]
        return {name: jax.tree.map(lambda _, inside=name in keys: inside, value) for name, value in params.items()}


def _depth(params: Params, key: str) -> int:
    """The number of layers under a key of the parameters; see `LayeredModel.layers`."""
    if not isinstance(params, Mapping) or key not in params:
        keys = sorted(map(str, params)) if isinstance(params, Mapping) else type(params).__name__
        raise TypeError(f"params: no stack of layers under {key!r}, only {keys}; scan the layers (flax.linen.scan)")
    rows = params[key]
    if isinstance(rows, (list, tuple)):
        raise TypeError(
            f"params[{key!r}]: {len(rows)} separate layers, not one stack; "
            "jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers) makes it one where they are alike"
        )
    leaves = jax.tree_util.tree_leaves_with_path(rows)
    depths = {jax.tree_util.keystr(path): leaf.shape[:1] for path, leaf in leaves}
    if len(set(depths.values())) != 1 or () in depths.values():
        raise ValueError(f"params[{key!r}]: first axes {depths} are not one number of layers; stack every leaf")
    return next(iter(depths.values()))[0]


def with_codes(row: Params, codes: Any) -> Params:
    """The row with an `ops.CodedWeight` in place of every weight that has codes."""

    def join(code: QuantizedArray | None, weight: Any) -> Any:
        return weight if code is None else CodedWeight(weight, code)

    return jax.tree.map(join, codes, row, is_leaf=lambda code: code is None or isinstance(code, QuantizedArray))


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
