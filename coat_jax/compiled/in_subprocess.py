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

from coat_jax.compiled.program import Program
from coat_jax.compiled.topology import compile_lowered, gpu_mesh

# Custom calls that export cannot vouch for across versions; here both sides are the same installation.
_CALLS = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward", "mosaic_gpu_v2", "mosaic_gpu")


def compile_elsewhere(
    fn: Callable[..., Any], args: tuple, mesh: AbstractMesh, shardings: dict[str, Any], donate_argnums: Any, target: str
) -> Program:
    """`compile_for` in another Python process.

    Args:
      fn, args: the function and its abstract arguments.
      mesh: what the shardings are over.
      shardings: `in_shardings` and perhaps `out_shardings`, as `jax.jit` takes them.
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

    with jax.sharding.use_abstract_mesh(mesh):
        placed: dict[str, Any] = {"in_shardings": tuple(jax.tree.leaves(jax.tree.broadcast(shardings["in_shardings"], args)))}
        if "out_shardings" in shardings:
            results = jax.eval_shape(fn, *args)
            placed["out_shardings"] = jax.tree.leaves(jax.tree.broadcast(shardings["out_shardings"], results))
        exported = export.export(jax.jit(flat, **placed), platforms=["cuda"], disabled_checks=checks)(*leaves)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "exported").write_bytes(exported.serialize())
        order = {"target": target, "mesh": dict(mesh.shape), "donate": flags}
        Path(folder, "order.json").write_text(json.dumps(order))
        environment = dict(os.environ, JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1", JAX_PLATFORMS="cpu")
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-m", __name__, folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise RuntimeError(f"compile_for: the fresh process that compiles failed: {lines[-1]}")
        return pickle.loads(Path(folder, "program").read_bytes())


def serve(folder: str) -> None:
    """The other process's side: reads the order in the folder and writes the program there."""
    order = json.loads(Path(folder, "order.json").read_text())
    exported = export.deserialize(bytearray(Path(folder, "exported").read_bytes()))
    gpus = exported.nr_devices
    mesh = gpu_mesh(order["target"], order["mesh"])
    args = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
        for a, s in zip(exported.in_avals, exported.in_shardings_jax(mesh), strict=True)
    ]
    donated = tuple(i for i, flag in enumerate(order["donate"]) if flag)
    with jax.set_mesh(mesh):
        lowered = jax.jit(lambda *leaves: exported.call(*leaves), donate_argnums=donated).lower(*args)
        program = Program.of(compile_lowered(lowered), gpus)
    Path(folder, "program").write_bytes(pickle.dumps(program))


if __name__ == "__main__":
    serve(sys.argv[1])
