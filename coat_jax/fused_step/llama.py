"""This library's Llama as `LayeredModel`."""

from typing import Any

import jax

from coat_jax.fused_step.layered_model import Batch, LayeredModel, Params
from coat_jax.models import llama


def layered_llama(model: llama.Llama) -> LayeredModel:
    """Embedding, layer, and head with loss of a Llama, on batches of tokens, int (batch, seq + 1).

    The loss is `model.loss` of all tokens but the last, the targets all but the first.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from coat_jax.models import llama
      >>> from coat_jax.fused_step.llama import layered_llama
      >>> model = llama.Llama(llama.preset("tiny", layers=2))
      >>> tokens = jnp.arange(17)[None]
      >>> params = model.init(jax.random.key(0), tokens)["params"]
      >>> layered_llama(model)(params, tokens).shape
      ()
    """

    def embed(outer: Params, batch: Batch) -> Any:
        return model.apply({"params": outer}, batch[:, :-1], method=lambda module, tokens: module.embed(tokens))

    def apply_layer(row: Params, x: jax.Array, batch: Batch) -> jax.Array:
        return llama.apply_layer(row, x, model.config, model.recipe, input_only=model.remat == "layer")

    def loss(outer: Params, x: jax.Array, batch: Batch) -> Any:
        return model.apply({"params": outer}, x, batch[:, 1:], method=model.head_loss)

    return LayeredModel(embed, apply_layer, loss)
