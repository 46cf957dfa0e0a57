"""Multi-head attention. A skin over `coat_jax.ops`."""

from typing import Any

import jax
from flax import nnx
from flax.linen import dtypes

from coat_jax import ops
from coat_jax.flax_arguments import refuse
from coat_jax.nnx.parameters import parameters, takes_recipe
from coat_jax.ops import Recipe

_OTHERS = ("qkv_dot_general", "out_dot_general", "qkv_dot_general_cls", "out_dot_general_cls")


@takes_recipe
class FP8MultiHeadAttention(nnx.MultiHeadAttention):
    """o = attention(x W_q, y W_k, z W_v) W_o like `flax.nnx.MultiHeadAttention`, with its parameters.

    Query, key and value share one FP8 input where they read the same array. The softmax runs in float32. Under a recipe that
    quantizes no product this is the Flax module itself.

    Args:
      num_heads, in_features, and all options: those of `flax.nnx.MultiHeadAttention`.
      recipe: what is quantized and kept; None is `recipes.coat()`.

    Raises:
      TypeError: a recipe that is none.
      ValueError: dropout, decoding, shardings, or a product or attention function of one's own, under a recipe that quantizes.
    """

    recipe: Recipe

    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        deterministic: bool | None = None,
        decode: bool | None = None,
        is_causal: bool = False,
        **others: Any,
    ) -> jax.Array:
        """(batch, tokens, features) to (batch, tokens, out_features); mask (batch, heads, tokens, keys), bool or numbers of
        which 0 hides a key, as Flax's helpers make them."""
        if not self.recipe.products_quantized:
            given = {"mask": mask, "deterministic": deterministic, "decode": decode, "is_causal": is_causal, **others}
            return super().__call__(inputs_q, inputs_k, inputs_v, **given)
        refuse(self, decode=self.decode if decode is None else decode, **others)
        refuse(self, **{name: getattr(self, name, None) for name in _OTHERS})
        if self.attention_fn is not nnx.dot_product_attention:
            refuse(self, attention_fn=self.attention_fn)
        if self.dropout_rate > 0 and not (self.deterministic if deterministic is None else deterministic):
            refuse(self, dropout_rate=self.dropout_rate)
        if inputs_k is None and inputs_v is not None:
            raise ValueError(
                "FP8MultiHeadAttention: inputs_v without inputs_k; give both, or inputs_k alone to be used as both"
            )
        inputs_k = inputs_q if inputs_k is None else inputs_k
        inputs = {"query": inputs_q, "key": inputs_k, "value": inputs_k if inputs_v is None else inputs_v}
        params = parameters(self)
        norms = {name: norm for name in ("query", "key") if (norm := getattr(self, f"{name}_ln")) is not None}
        recipe = self.recipe if self.precision is None else self.recipe.replace(precision=self.precision)
        dtype = dtypes.canonicalize_dtype(*inputs.values(), params["out"]["kernel"], dtype=self.dtype)
        hidden = None if mask is None else mask.astype(bool)
        call = ops.blocks.multi_head_attention
        return call(params, inputs, recipe, dtype=dtype, norms=norms, causal=is_causal, mask=hidden)
