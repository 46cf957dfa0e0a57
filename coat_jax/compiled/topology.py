"""Meshes of GPUs that are not here, from the CUDA plug-in's compiler."""

import importlib.util
import math
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_backend_optimization_level": 0}
"""Without a device XLA cannot time products and takes Triton's; with autotuning cuBLASLt's win, so those are asked for.
Optimizing the machine code of kernels changes no byte of the plan and costs a quarter of the time."""


class PlanError(RuntimeError):
    """What keeps the planner from compiling here, and what would change that."""


def missing() -> str | None:
    """None where programs can be compiled for a GPU, else the line that says what to install."""
    for name in ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13", "jax_cuda12_plugin", "jax_cuda13_plugin"):
        try:
            if importlib.util.find_spec(name) is not None:
                return None
        except ModuleNotFoundError:
            continue
    return "compiling for a GPU needs JAX's CUDA plug-in; install it with: pip install 'coat-jax[plan]'"


def gpu_mesh(target: str, axes: Mapping[str, int]) -> Mesh | None:
    """A mesh of GPUs of one host, to compile for.

    Args:
      target: the device in XLA's text form.
      axes: size of each axis by name.

    Returns:
      The mesh, or None where this process started JAX without the plug-in and only a fresh process can compile.

    Raises:
      PlanError: no CUDA plug-in is installed.
    """
    if message := missing():
        raise PlanError(message)
    # The plug-in refuses to load where there is no driver, unless this is set before JAX's first use of a backend.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    count = math.prod(axes.values())
    try:
        found = topologies.get_topology_desc(
            platform="cuda", topology_name="gpu", target_config=target, topology=f"1x1x{count}"
        ).devices
    except (NotImplementedError, RuntimeError) as error:
        if "not implemented" not in str(error):
            raise
        return None
    return Mesh(np.array(found).reshape(tuple(axes.values())), tuple(axes))


def compile_lowered(lowered: Any) -> Any:
    """The program that `jax.jit(f).lower(...)` describes, compiled for a mesh of `gpu_mesh`.

    JAX's persistent cache stores such a program and then cannot read it without a GPU: each later run would warn and compile
    it again. So nothing is stored while this compiles; the least time of what is stored is set above any.
    """
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        return lowered.compile(compiler_options=dict(COMPILER_OPTIONS))
    finally:
        jax.config.update(name, before)
