"""Compiling a function for GPUs that are not here."""

import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from coat_jax.plan import devices, fresh
from coat_jax.plan.devices import Device
from coat_jax.plan.program import Program

OPTIONS = {"xla_gpu_enable_triton_gemm": False}
"""Without a device XLA cannot time products and takes Triton's; with autotuning cuBLASLt's win, so those are asked for."""
_UNLIMITED = 10**13  # bytes; more than any program wants, so that XLA recomputes nothing to fit


class PlanError(RuntimeError):
    """What keeps the planner from compiling here, and what would change that."""


def compile_for(
    device: str | Device,
    fn: Callable[..., Any],
    *abstract_args: Any,
    gpus: int = 1,
    mesh: Mapping[str, int] | None = None,
    donate_argnums: int | tuple[int, ...] = (),
    in_shardings: Any = None,
    out_shardings: Any = None,
    memory: Literal["unlimited", "real"] = "unlimited",
) -> Program:
    """Compiles fn for GPUs of a kind, on a machine that may have none.

    Args:
      device: "h100", "h200", the path of a description, or a `Device`.
      fn: a function of arrays, jitted or not.
      *abstract_args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
      gpus: how many, in one host.
      mesh: size of each mesh axis by name; None is `{"fsdp": gpus}`.
      donate_argnums: as in `jax.jit`.
      in_shardings, out_shardings: trees of `PartitionSpec`s over the mesh as in `jax.jit`; None in in_shardings is
        replicated, in out_shardings the compiler's choice.
      memory: "unlimited" asks how much the program wants; "real" lets XLA recompute what does not fit the device's memory.

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
    if int(np.prod(list(axes.values()))) != gpus:
        raise ValueError(f"compile_for: the mesh {axes} has {np.prod(list(axes.values()))} places for gpus={gpus}")
    target = device.target(_UNLIMITED if memory == "unlimited" else None)
    found = _devices(target, gpus)
    where = AbstractMesh(tuple(axes.values()), tuple(axes)) if found is None else _mesh(found, axes)
    if in_shardings is None:
        in_shardings = PartitionSpec()
    placed = {"in_shardings": _place(where, in_shardings)}
    if out_shardings is not None:
        placed["out_shardings"] = _place(where, out_shardings)
    if found is None:
        return fresh.compile_elsewhere(fn, abstract_args, where, placed, donate_argnums, target)
    with jax.set_mesh(where):
        lowered = jax.jit(fn, donate_argnums=donate_argnums, **placed).lower(*abstract_args)
        return Program.of(lowered.compile(compiler_options=dict(OPTIONS)), gpus)


def available() -> str | None:
    """None where programs can be compiled for a GPU, else the line that says what to install."""
    names = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13", "jax_cuda12_plugin", "jax_cuda13_plugin")
    if any(_installed(name) for name in names):
        return None
    return "compiling for a GPU needs JAX's CUDA plug-in; install it with: pip install 'coat-jax[plan]'"


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _devices(target: str, gpus: int) -> list[Any] | None:
    """GPUs to compile for, or None where this process started JAX without the plug-in and only a fresh one can."""
    if missing := available():
        raise PlanError(missing)
    # The plug-in refuses to load where there is no driver, unless this is set before JAX's first use of a backend.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    try:
        description = topologies.get_topology_desc(
            platform="cuda", topology_name="gpu", target_config=target, topology=f"1x1x{gpus}"
        )
    except (NotImplementedError, RuntimeError, ValueError) as error:
        if "not implemented" not in str(error) and "cuda" not in str(error).lower():
            raise
        return None
    return description.devices


def _mesh(found: list[Any], axes: Mapping[str, int]) -> Mesh:
    return Mesh(np.array(found).reshape(tuple(axes.values())), tuple(axes))


def _place(mesh: Mesh | AbstractMesh, specs: Any) -> Any:
    """The same tree with a sharding for each `PartitionSpec`; None becomes replicated."""
    leaf = lambda s: s is None or isinstance(s, PartitionSpec)  # noqa: E731
    return jax.tree.map(lambda s: NamedSharding(mesh, s or PartitionSpec()), specs, is_leaf=leaf)
