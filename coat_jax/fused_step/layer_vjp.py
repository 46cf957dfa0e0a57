"""One layer forward and backward as two functions of arrays, with what the first keeps for the second."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from coat_jax.fused_step import dependence
from coat_jax.fused_step import weight_codes as once
from coat_jax.fused_step.layered_model import Batch, LayeredModel, Params, hide, show
from coat_jax.fused_step.weight_codes import Codes

Residuals = list[jax.Array]
"""What the backward pass of a layer needs and cannot have again from the layer's parameters alone."""


@dataclasses.dataclass(frozen=True)
class LayerVjp:
    """y, kept = forward(row, x);   grads, dx = backward(row, kept, dy).

    Attributes:
      parts: the model.
      batch: what the layer sees of the batch.
      trained: a tree of bools like a row; only where True there is a gradient.
      from_row: for each residual of `jax.vjp`, whether it is made again from the parameters instead of kept.
    """

    parts: LayeredModel
    batch: Batch
    trained: Any
    from_row: tuple[bool, ...]

    @classmethod
    def of(cls, parts: LayeredModel, batch: Batch, trained: Any, row: Params, x: Any) -> "LayerVjp":
        """The layer for parameters and inputs of these shapes.

        Raises:
          TypeError: a layer that returns other shapes than it takes, or works on integers.
        """
        bare = cls(parts, batch, trained, ())
        _check_same(x, jax.eval_shape(lambda row, x: bare._vjp(row, x)[0], row, x))
        n = len(jax.tree.leaves(row))
        sources = dependence.sources(lambda row, x: jax.tree.leaves(bare._vjp(row, x)[1]), row, x)
        return cls(parts, batch, trained, tuple(max(found, default=-1) < n for found in sources))

    def _vjp(self, row: Params, x: Any) -> tuple[Any, Callable]:
        def layer(trained_row: Params, x: Any) -> Any:
            return self.parts.layer(show(self.trained, trained_row, row), x, self.batch)

        return jax.vjp(layer, hide(self.trained, row), x)

    def forward(self, row: Params, x: Any) -> tuple[Any, Residuals]:
        """What the layer makes of x, and what is kept."""
        y, pull = self._vjp(row, x)
        return y, [leaf for leaf, again in zip(jax.tree.leaves(pull), self.from_row, strict=True) if not again]

    def backward(self, row: Params, kept: Residuals, cotangent: Any) -> tuple[Params, Any]:
        """Gradients of the trained parameters of the row, and of x."""
        # The cotangent stands in for x: only what does not depend on x is read from this second trace.
        leaves, tree = jax.tree.flatten(self._vjp(row, cotangent)[1])
        rest = iter(kept)
        leaves = [leaf if again else next(rest) for leaf, again in zip(leaves, self.from_row, strict=True)]
        return jax.tree.unflatten(tree, leaves)(cotangent)

    def codes(self, row: Params, x: Any) -> Codes:
        """The codes of the weights of a row that forward and backward use; of x only shapes and dtypes matter."""
        _, kept = jax.eval_shape(self.forward, row, x)
        return once.codes(self.forward, row, x) | once.codes(self.backward, row, kept, x)


def _check_same(x: Any, y: Any) -> None:
    shapes = [jax.tree.map(lambda a: (a.shape, str(a.dtype)), tree) for tree in (x, y)]
    if shapes[0] != shapes[1]:
        raise TypeError(f"LayeredModel.layer: takes {shapes[0]} and returns {shapes[1]}; a scanned layer returns what it takes")
    for leaf in jax.tree.leaves(x):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"LayeredModel.embed: x has a leaf of {leaf.dtype}; pass what is not differentiated through the batch"
            )
