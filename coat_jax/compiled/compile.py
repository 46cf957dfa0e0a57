"""Compiling a function for GPUs that are not here."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from coat_jax.compiled import devices, in_subprocess
from coat_jax.compiled.devices import Device
from coat_jax.compiled.program import Program
from coat_jax.compiled.topology import compile_lowered, gpu_mesh

_UNLIMITED = 10**13  # bytes; more than any program wants, so that XLA recomputes nothing to fit


def compile_for(
    device: str | Device,
    fn: Callable[..., Any],
    *args: Any,
    gpus: int = 1,
    mesh: Mapping[str, int] | None = None,
    donate_argnums: int | tuple[int, ...] = (),
    in_shardings: Any = None,
    out_shardings: Any = None,
) -> Program:
    """Compiles fn for GPUs of a kind, on a machine that may have none.

    Nothing is computed, and arrays stay where they are. The program is given all the memory that it asks for, so its peak is
    what it wants: it fits if `peak_bytes` leaves some GiB of `Device.memory_bytes` free.

    Args:
      device: "h100", "h200", the path of a description, or a `Device`.
      fn: a function of arrays, jitted or not.
      *args: its arguments, arrays or `jax.ShapeDtypeStruct`s, of which shapes and dtypes count.
      gpus: how many, in one host.
      mesh: size of each mesh axis by name; None is `{"fsdp": gpus}`.
      donate_argnums: as in `jax.jit`.
      in_shardings, out_shardings: trees of `PartitionSpec`s over the mesh as in `jax.jit`; None in in_shardings is
        replicated, in out_shardings the compiler's choice.

    Returns:
      The compiled `Program`.

    Raises:
      ValueError: an unknown device, or a mesh whose axes do not multiply to `gpus`.
      PlanError: no CUDA plug-in is installed; the message says which command installs it.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
      >>> compile_for("h100", lambda x: x @ x, x).argument_bytes  # doctest: +SKIP
      2097152
    """
    device = device if isinstance(device, Device) else devices.named(device)
    axes = dict(mesh or {"fsdp": gpus})
    if math.prod(axes.values()) != gpus:
        raise ValueError(f"compile_for: the mesh {axes} has {math.prod(axes.values())} places for gpus={gpus}")
    target = device.target(_UNLIMITED)
    args = jax.tree.map(_abstract, args)
    in_shardings = PartitionSpec() if in_shardings is None else in_shardings
    found = gpu_mesh(target, axes)
    # Axes of type Auto, as those of gpu_mesh: AbstractMesh makes Explicit ones by itself.
    described = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    where = described if found is None else found
    shardings = {"in_shardings": _place(where, in_shardings)}
    if out_shardings is not None:
        shardings["out_shardings"] = _place(where, out_shardings)
    if found is None:
        return in_subprocess.compile_elsewhere(fn, args, described, shardings, donate_argnums, target)
    with jax.set_mesh(found):
        lowered = jax.jit(fn, donate_argnums=donate_argnums, **shardings).lower(*args)
        return Program.of(compile_lowered(lowered), gpus)


def _abstract(x: Any) -> Any:
    """Shape and dtype of an array, without the device where it lies; anything else as it is."""
    if isinstance(x, jax.Array):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))  # keys have none
    return x


def _place(mesh: Mesh | AbstractMesh, specs: Any) -> Any:
    """The same tree with a sharding for each `PartitionSpec`; None becomes replicated."""
    leaf = lambda s: s is None or isinstance(s, PartitionSpec)  # noqa: E731
    return jax.tree.map(lambda s: NamedSharding(mesh, s or PartitionSpec()), specs, is_leaf=leaf)
