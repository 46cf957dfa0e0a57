"""Compiling in a fresh process: for one whose JAX already runs without the CUDA plug-in.

The function is traced here and travels as exported StableHLO, so that nothing has to be pickled or imported there.
"""

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax import export
from jax.sharding import AbstractMesh

from coat_jax.plan.program import Program

# Custom calls that export cannot vouch for across versions; here both sides are the same installation.
_CALLS = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward", "mosaic_gpu_v2", "mosaic_gpu")


def compile_elsewhere(
    fn: Callable[..., Any], args: tuple, mesh: AbstractMesh, placed: dict[str, Any], donate_argnums: Any, target: str
) -> Program:
    """`compile_for` in another Python process.

    Args:
      fn, args: the function and its abstract arguments.
      mesh: the `AbstractMesh` over which `placed["in_shardings"]` and `["out_shardings"]` are.
      donate_argnums: as in `jax.jit`.
      target: the device in XLA's text form.

    Raises:
      RuntimeError: the other process failed; the message ends with its last line.
    """
    donated = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    leaves, tree = jax.tree.flatten(args)
    flags = [i in donated for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in _CALLS]

    def flat(*leaves):
        return jax.tree.leaves(fn(*jax.tree.unflatten(tree, leaves)))

    shardings = jax.tree.leaves(jax.tree.broadcast(placed["in_shardings"], args))
    jitted = jax.jit(flat, in_shardings=shardings)
    with jax.sharding.use_abstract_mesh(mesh):
        exported = export.export(jitted, platforms=["cuda"], disabled_checks=checks)(*leaves)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "exported").write_bytes(exported.serialize())
        order = {"target": target, "mesh": dict(mesh.shape), "donate": flags}
        Path(folder, "order.json").write_text(json.dumps(order))
        environment = dict(os.environ, JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1", JAX_PLATFORMS="cpu")
        command = [sys.executable, "-m", "coat_jax.plan.fresh", folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise RuntimeError(f"compile_for: the fresh process that compiles failed: {lines[-1]}")
        return pickle.loads(Path(folder, "program").read_bytes())


def _main(folder: str) -> None:
    from coat_jax.plan import compile as plan_compile

    order = json.loads(Path(folder, "order.json").read_text())
    exported = export.deserialize(bytearray(Path(folder, "exported").read_bytes()))
    gpus = exported.nr_devices
    mesh = plan_compile._mesh(plan_compile._devices(order["target"], gpus), order["mesh"])
    args = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
        for a, s in zip(exported.in_avals, exported.in_shardings_jax(mesh), strict=True)
    ]
    donated = tuple(i for i, flag in enumerate(order["donate"]) if flag)
    with jax.set_mesh(mesh):
        lowered = jax.jit(lambda *leaves: exported.call(*leaves), donate_argnums=donated).lower(*args)
        program = Program.of(lowered.compile(compiler_options=dict(plan_compile.OPTIONS)), gpus)
    Path(folder, "program").write_bytes(pickle.dumps(program))


if __name__ == "__main__":
    _main(sys.argv[1])
