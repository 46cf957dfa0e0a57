"""Sums over gradients that are there for a moment: norms and non-finite counts, per layer and in all."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Statistics(NamedTuple):
    """Sums over a tree of gradients.

    Attributes:
      squares: float32, the sum of squares; with `layers`, of all.
      nonfinite: float32, how many are NaN or inf; with `layers`, of all.
      layers: the same per layer, (layers,), or None.
    """

    squares: jax.Array
    nonfinite: jax.Array
    layers: "Statistics | None" = None

    @classmethod
    def of(cls, grads: Any) -> "Statistics":
        """Of one tree, in float32."""
        leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(grads)]
        zero = jnp.zeros((), jnp.float32)
        squares = sum((jnp.sum(x * x) for x in leaves), zero)
        return cls(squares, sum((jnp.sum(~jnp.isfinite(x), dtype=jnp.float32) for x in leaves), zero))

    def with_layers(self, stacks: Mapping[str, "Statistics"]) -> "Statistics":
        """These of the outer parameters, and those of the layers of every stack, together, in the order of the stacks."""
        layers: Statistics = jax.tree.map(lambda *parts: jnp.concatenate(parts), *stacks.values())
        return Statistics(self.squares + layers.squares.sum(), self.nonfinite + layers.nonfinite.sum(), layers)

    @property
    def norm(self) -> jax.Array:
        """float32 sqrt of the sum of squares."""
        return jnp.sqrt(self.squares)

    @property
    def layer_norms(self) -> jax.Array:
        """float32 (layers,)."""
        assert self.layers is not None
        return self.layers.norm
