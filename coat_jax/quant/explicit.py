"""Explicit axes of a mesh, which `jax.make_mesh` makes where it is not told: shardings that are part of types."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec


def explicit_mesh(*trees: Any) -> Any:
    """The mesh on whose Explicit axes some array of the trees is sharded; None where there is none."""
    for leaf in jax.tree.leaves(trees):
        if isinstance(leaf, jax.Array) and any(axis is not None for axis in jax.typeof(leaf).sharding.spec):
            return jax.typeof(leaf).sharding.mesh
    return None


def spec_of(x: jax.Array) -> PartitionSpec:
    """Where an array lies, by its type."""
    return jax.typeof(x).sharding.spec


def on_auto_axes(fn: Callable[..., Any], mesh: Any, specs: Any) -> Callable[..., Any]:
    """`fn`, computed as on Auto axes: XLA places what is inside, and results lie as `specs` says.

    Gradients of its arguments have the arguments' own shardings, which `jax.sharding.auto_axes` sees to.

    Args:
      fn: function of arrays.
      mesh: of the Explicit axes.
      specs: a tree like fn's results of `PartitionSpec`s.
    """
    places = jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda node: isinstance(node, PartitionSpec))
    return jax.sharding.auto_axes(fn, out_sharding=places)


def joined(*specs: Iterable[Any]) -> PartitionSpec:
    """One spec of the axes of several, one after another; a mesh axis that shards an earlier one shards no later one.

    Rows of a batch over "fsdp" with features of a kernel over ("fsdp", "tensor"): P("fsdp", "tensor").
    """
    used: set[str] = set()
    found: list[Any] = []
    for axes in (axes for spec in specs for axes in spec):
        names = tuple(name for name in (axes if isinstance(axes, tuple) else (axes,)) if name is not None and name not in used)
        used.update(names)
        found.append(names if len(names) > 1 else names[0] if names else None)
    return PartitionSpec(*found)
