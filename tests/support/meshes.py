"""What tests on several devices share: meshes, sharded calls, and the collectives of their programs."""

import re

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

COLLECTIVE = re.compile(r"(?:all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)(?:-start)?\(")


def mesh_of(**axes):
    return Mesh(np.array(jax.devices()).reshape(tuple(axes.values())), tuple(axes))


def run_on(mesh, specs, call, *args):
    """call(*args) of arrays sharded by `specs`, and the text of its program."""
    args = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), args, specs)
    with jax.set_mesh(mesh):
        compiled = jax.jit(call).lower(*args).compile()
        return compiled(*args), compiled.as_text()
