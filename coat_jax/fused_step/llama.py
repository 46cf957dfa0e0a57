"""This library's Llama as a `LayeredModel`."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from coat_jax import ops
from coat_jax.fused_step.layered_model import Batch, LayeredModel, Params
from coat_jax.models import llama


def layered_llama(model: llama.Llama) -> LayeredModel:
    """Embedding, layer, and head with loss of a Llama.

    A batch is integer tokens (batch, seq + 1): the loss is `model.loss` of all tokens but the last, the targets all but the
    first. Or it is a dict with "inputs", tokens (batch, seq) or embeddings (batch, seq, hidden), "targets" (batch, seq), and
    perhaps "weights" (batch, seq): of each token in the mean, 0 for padding. Micro-batches then count by their weights.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from coat_jax.fused_step.llama import layered_llama
      >>> from coat_jax.models import llama
      >>> model = llama.Llama(llama.preset("tiny", layers=2))
      >>> tokens = jnp.arange(17)[None]
      >>> params = model.init(jax.random.key(0), tokens)["params"]
      >>> layered_llama(model)(params, tokens).shape
      ()
    """

    def embed(outer: Params, batch: Batch) -> Any:
        return model.apply({"params": outer}, _parts(batch)[0], method=model.embeddings)

    def apply_layer(row: Params, x: jax.Array, batch: Batch) -> jax.Array:
        return llama.apply_layer(row, x, model.config, model.recipe, input_only=model.remat == "layer")

    def loss(outer: Params, x: jax.Array, batch: Batch) -> Any:
        return model.apply({"params": outer}, x, *_parts(batch)[1:], method=model.head_loss)

    def loss_weight(batch: Batch) -> jax.Array:
        _, targets, weights = _parts(batch)
        return jnp.float32(targets.size) if weights is None else jnp.sum(weights, dtype=jnp.float32)

    return LayeredModel(
        embed, apply_layer, loss, codes=lambda row: ops.blocks.block_codes(row, model.recipe), loss_weight=loss_weight
    )


def _parts(batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Inputs, targets and weights of a batch."""
    if isinstance(batch, Mapping):
        return batch["inputs"], batch["targets"], batch.get("weights")
    return batch[:, :-1], batch[:, 1:], None
