"""Where an optimizer's state lives on a mesh, from where the parameters live."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from coat_jax.quant.explicit import explicit_mesh, on_auto_axes, spec_of


def state_specs(state: Any, params: Any, specs: Any, mesh: Mapping[str, int]) -> Any:
    """A `PartitionSpec` for every array of an Optax state: what is shaped like the parameters is sharded like them.

    A moment's codes take their parameter's spec, its scales and exponents too wherever the number of groups divides by the
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
      >>> state_specs(state, params, {"kernel": P(None, "fsdp")}, {"fsdp": 8})[0].mu.scale["kernel"] == P(None, "fsdp")
      True
    """
    treedef: Any
    leaves, treedef = jax.tree.flatten(params)
    shapes = [leaf.shape for leaf in leaves]

    def nothing(node: Any) -> bool:
        return node is None  # where a parameter has nothing, such as scales of a moment in float32

    def like_params(node: Any) -> bool:
        leaves, structure = jax.tree.flatten(node, is_leaf=nothing)
        return bool(structure == treedef) and all(
            leaf is None or _fits(getattr(leaf, "shape", ()), shape) for leaf, shape in zip(leaves, shapes, strict=True)
        )

    def place(node: Any) -> Any:
        if not like_params(node):
            return jax.tree.map(lambda _: PartitionSpec(), node)
        rows = zip(jax.tree.leaves(node, is_leaf=nothing), treedef.flatten_up_to(specs), shapes, strict=True)
        return treedef.unflatten([_place(leaf, spec, shape, mesh) for leaf, spec, shape in rows])

    return jax.tree.map(place, state, is_leaf=lambda node: like_params(node) or nothing(node))


def _fits(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether an array has the shape of a parameter, or that of its groups."""
    return len(shape) == len(whole) and all(part <= size for part, size in zip(shape, whole, strict=True))


def _place(leaf: Any, spec: PartitionSpec, shape: tuple[int, ...], mesh: Mapping[str, int]) -> PartitionSpec | None:
    if leaf is None or leaf.shape == shape:
        return None if leaf is None else spec
    return spec_of_groups(spec, leaf.shape, mesh)


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


def init_on_any_axes(init: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`init` of a transformation, which on Explicit axes runs as on Auto ones; its results lie as `state_specs` says.

    A parameter f32[1024@fsdp, 512] gets codes f8[1024@fsdp, 512] and scales f32[8@fsdp, 512]: types say where they lie.
    """

    @functools.wraps(init)
    def run(params: Any) -> Any:
        mesh = explicit_mesh(params)
        if mesh is None:
            return init(params)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        specs = jax.tree.map(spec_of, params)
        return on_auto_axes(init, mesh, state_specs(jax.eval_shape(init, shapes), shapes, specs, mesh.shape))(params)

    return run


def update_on_any_axes(update: Callable[..., Any]) -> Callable[..., Any]:
    """`update`, or `update_and_apply`, which on Explicit axes runs as on Auto ones; results lie as what they replace."""

    @functools.wraps(update)
    def run(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        mesh = explicit_mesh(updates, state, params)
        if mesh is None:
            return update(updates, state, params, **extra)
        specs = jax.tree.map(spec_of, (updates if params is None else params, state))
        return on_auto_axes(lambda *args: update(*args[:3], **args[3]), mesh, specs)(updates, state, params, extra)

    return run
