"""Where an optimizer's state lives on a mesh, from where the parameters live."""

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from coat_jax.quant import QuantizedArray


def state_specs(state: Any, params: Any, specs: Any, mesh: Mapping[str, int]) -> Any:
    """A `PartitionSpec` for every array of an Optax state: what is shaped like the parameters is sharded like them.

    A moment's payload takes its parameter's spec, its scales and exponents too wherever the number of groups divides by the
    mesh, and are whole along an axis where it does not. Everything else, such as counts, is replicated.

    Args:
      state: of any Optax transformation, arrays or `jax.ShapeDtypeStruct`s.
      params: the parameters.
      specs: a tree like params of `PartitionSpec`s.
      mesh: sizes of the mesh axes by name, such as `mesh.shape`.

    Returns:
      A tree like state.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from coat_jax import coat_adamw
      >>> from jax.sharding import PartitionSpec as P
      >>> params = {"kernel": jnp.zeros((256, 1024))}
      >>> state = jax.eval_shape(coat_adamw(1e-3).init, params)
      >>> state_specs(state, params, {"kernel": P(None, "fsdp")}, {"fsdp": 8})[0].mu["kernel"].scale == P(None, "fsdp")
      True
    """
    treedef: Any
    leaves, treedef = jax.tree.flatten(params)
    shapes = [leaf.shape for leaf in leaves]

    def is_moment(node: Any) -> bool:
        return node is None or isinstance(node, QuantizedArray)  # None: a parameter that has nothing there

    def like_params(node: Any) -> bool:
        leaves, structure = jax.tree.flatten(node, is_leaf=is_moment)
        return bool(structure == treedef) and all(
            leaf is None or getattr(leaf, "shape", None) == shape for leaf, shape in zip(leaves, shapes, strict=True)
        )

    def place(node: Any) -> Any:
        if not like_params(node):
            return jax.tree.map(lambda _: PartitionSpec(), node)
        rows = zip(jax.tree.leaves(node, is_leaf=is_moment), treedef.flatten_up_to(specs), strict=True)
        return treedef.unflatten([_place_moment(leaf, spec, mesh) for leaf, spec in rows])

    return jax.tree.map(place, state, is_leaf=lambda node: like_params(node) or is_moment(node))


def _place_moment(moment: Any, spec: PartitionSpec, mesh: Mapping[str, int]) -> Any:
    if not isinstance(moment, QuantizedArray):
        return None if moment is None else spec
    scale = spec_of_groups(spec, moment.scale.shape, mesh)
    exponent = None if moment.exponent is None else scale
    return QuantizedArray.tree_unflatten((moment.spec, moment.dtype), (spec, scale, exponent))


def spec_of_groups(spec: PartitionSpec, scale_shape: tuple[int, ...], mesh: Mapping[str, int]) -> PartitionSpec:
    """The spec of a leaf's scales: the leaf's, but whole along an axis whose number of groups does not divide by the devices.

    A leaf (1024, 1536) of spec P(None, "fsdp") with groups of 128 along its last axis has scales (1024, 12): 4 devices take 3
    columns of them each, 8 devices cannot share 12 and keep all of them.
    """
    parts = []
    for groups, axes in zip(scale_shape, tuple(spec) + (None,) * (len(scale_shape) - len(spec)), strict=True):
        names = axes if isinstance(axes, tuple) else (axes,) if axes else ()
        parts.append(axes if groups % math.prod(mesh[name] for name in names) == 0 else None)
    return PartitionSpec(*parts)


def sharding_of_groups(leaf: Any, scale_shape: tuple[int, ...]) -> Sharding | None:
    """Where scales of an array that lies somewhere belong; None where JAX decides: in jit, and where nobody chose a place."""
    place = (
        None if isinstance(leaf, jax.core.Tracer) or not getattr(leaf, "committed", True) else getattr(leaf, "sharding", None)
    )
    if not isinstance(place, NamedSharding):
        return place if place is not None and place.is_fully_replicated else None
    spec = spec_of_groups(place.spec, scale_shape, place.mesh.shape)
    return NamedSharding(place.mesh, spec, memory_kind=place.memory_kind)
