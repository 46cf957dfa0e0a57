"""Sharding over a mesh: where parameters, optimizer state and batches live."""

from coat_jax.parallel.fsdp import batch_sharded, batch_shards, batch_spec, fsdp_specs

__all__ = ["batch_sharded", "batch_shards", "batch_spec", "fsdp_specs"]
