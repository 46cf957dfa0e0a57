"""Fully sharded data parallelism: every device holds a share of each parameter and works on a share of the batch."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

AXIS = "fsdp"
"""Name of the mesh axis that shards parameters and batches."""


def fsdp_specs(params: Any, devices: int, *, stacked: str = "layers", min_size: int = 4096) -> Any:
    """A `PartitionSpec` for every parameter: the first axis that `devices` divides is sharded.

    The axis of stacked layers stays whole, so that a scan takes a layer without an exchange. Gathering along the first axis
    of a layer's parameter concatenates contiguous memory.

    Args:
      params: parameters, arrays or `jax.ShapeDtypeStruct`s.
      devices: size of the mesh axis "fsdp".
      stacked: name of the subtree whose leaves begin with the axis of layers.
      min_size: leaves of fewer elements in a layer are replicated.

    Returns:
      A tree like params. Leaves with no axis that `devices` divides are replicated.

    Example:
      >>> import jax.numpy as jnp
      >>> specs = fsdp_specs({"layers": {"up": jnp.zeros((2, 128, 96))}, "head": jnp.zeros((129, 64))}, 8)
      >>> specs["layers"]["up"] == PartitionSpec(None, "fsdp", None), specs["head"] == PartitionSpec(None, "fsdp")
      (True, True)
    """

    # layers/mlp/down/kernel of Llama-2-7B is (32, 11008, 4096). On 8 devices: axis 0 is the stack, 11008 = 8 x 1376, so the
    # spec is (None, "fsdp", None), and a scan step gathers eight pieces of 1376 rows. A norm's scale, (32, 4096), has 4096
    # elements in a layer, not fewer than min_size: it is cut too, (None, "fsdp").
    def spec(path: Any, leaf: Any) -> PartitionSpec:
        first = int(jax.tree_util.keystr(path[:1], simple=True) == stacked)
        row = leaf.shape[first:]
        size = 1
        for n in row:
            size *= n
        if size < min_size:
            return PartitionSpec()
        for axis, n in enumerate(row):
            if n % devices == 0:
                return PartitionSpec(*[None] * (first + axis), AXIS, *[None] * (len(row) - axis - 1))
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, params)


def batch_spec() -> PartitionSpec:
    """The sharding of tokens and targets: sequences over the axis."""
    return PartitionSpec(AXIS)


def batch_shards() -> int:
    """How many devices share a batch: the size of "fsdp" where the mesh in use has that axis, else 1."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.shape.get(AXIS, 1)


def batch_sharded(x: jax.Array) -> jax.Array:
    """x, its first axis sharded over "fsdp" where the mesh in use has that axis; x itself elsewhere.

    Between layers this keeps activations with their sequences, so that weights are gathered rather than activations.
    """
    if batch_shards() == 1:
        return x
    # Left to itself XLA may gather the activations of all sequences and keep the weights cut, which for long sequences moves
    # more.
    return jax.lax.with_sharding_constraint(x, PartitionSpec(AXIS, *[None] * (x.ndim - 1)))
