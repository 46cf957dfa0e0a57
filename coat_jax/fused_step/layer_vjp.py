"""One layer forward and backward as two functions of arrays, with what the first keeps for the second."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from coat_jax.fused_step import dependence
from coat_jax.fused_step.layered_model import Batch, Params, Stack, hide, show

Residuals = list[jax.Array]
"""What the backward pass of a layer needs and cannot have again from the layer's parameters alone."""


@dataclasses.dataclass(frozen=True)
class LayerVjp:
    """y, kept = forward(row, codes, x);   grads, dx = backward(row, codes, kept, dy).

    Attributes:
      stack: whose layer it is.
      batch: what the layer sees of the batch.
      trained: a tree of bools like a row; only where True there is a gradient.
      from_row: for each residual of `jax.vjp`, whether it is made again from the parameters and their codes instead of kept.
    """

    stack: Stack
    batch: Batch
    trained: Any
    from_row: tuple[bool, ...]

    @classmethod
    def of(cls, stack: Stack, batch: Batch, trained: Any, row: Params, codes: Any, x: Any) -> "LayerVjp":
        """The layer for parameters, codes and inputs of these shapes.

        Raises:
          TypeError: a layer that returns other shapes than it takes, or works on integers.
        """
        bare = cls(stack, batch, trained, ())
        _check_same(x, jax.eval_shape(lambda row, codes, x: bare._vjp(row, codes, x)[0], row, codes, x))
        # The residuals of y = rms(x, w_norm) @ w_up are x, its root mean square, h and w_norm, w_up. The last two come from the
        # row alone: kept for 32 layers they would be the whole model a second time.
        n = len(jax.tree.leaves((row, codes)))
        sources = dependence.sources(lambda row, codes, x: jax.tree.leaves(bare._vjp(row, codes, x)[1]), row, codes, x)
        return cls(stack, batch, trained, tuple(max(found, default=-1) < n for found in sources))

    def _vjp(self, row: Params, codes: Any, x: Any) -> tuple[Any, Callable]:
        def layer(trained_row: Params, x: Any) -> Any:
            return self.stack.apply(show(self.trained, trained_row, row), codes, x, self.batch)

        return jax.vjp(layer, hide(self.trained, row), x)

    def forward(self, row: Params, codes: Any, x: Any) -> tuple[Any, Residuals]:
        """What the layer makes of x, and what is kept."""
        y, pull = self._vjp(row, codes, x)
        return y, [leaf for leaf, again in zip(jax.tree.leaves(pull), self.from_row, strict=True) if not again]

    def backward(self, row: Params, codes: Any, kept: Residuals, cotangent: Any) -> tuple[Params, Any]:
        """Gradients of the trained parameters of the row, and of x."""
        # The layer is traced again for its pullback's tree and for the residuals that come from the row. The cotangent stands
        # in for x, whose shape it has: nothing that is computed from it is read, and XLA removes it.
        leaves, tree = jax.tree.flatten(self._vjp(row, codes, cotangent)[1])
        rest = iter(kept)
        leaves = [leaf if again else next(rest) for leaf, again in zip(leaves, self.from_row, strict=True)]
        return jax.tree.unflatten(tree, leaves)(cotangent)


def _check_same(x: Any, y: Any) -> None:
    shapes = [jax.tree.map(lambda a: (a.shape, str(a.dtype)), tree) for tree in (x, y)]
    if shapes[0] != shapes[1]:
        raise TypeError(f"LayeredModel.layer: takes {shapes[0]} and returns {shapes[1]}; a scanned layer returns what it takes")
    for leaf in jax.tree.leaves(x):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(f"LayeredModel.embed: x has a leaf of {leaf.dtype}; give the rest by the batch")
