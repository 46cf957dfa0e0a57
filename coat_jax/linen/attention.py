"""Multi-head attention. A skin over `coat_jax.ops`."""

import functools

import jax
from flax import linen as nn
from flax.linen import dtypes

from coat_jax import ops, recipes
from coat_jax.flax_arguments import product_recipe, refuse
from coat_jax.linen.parameters import Kernel, WithRecipe
from coat_jax.ops import Recipe

_OTHERS = (
    "qkv_dot_general",
    "out_dot_general",
    "qkv_dot_general_cls",
    "out_dot_general_cls",
    "qk_attn_weights_einsum_cls",
    "attn_weights_value_einsum_cls",
    "decode",
)


class FP8MultiHeadAttention(WithRecipe, nn.MultiHeadDotProductAttention):
    """o = attention(x W_q, y W_k, z W_v) W_o like `flax.linen.MultiHeadDotProductAttention`, with its parameters.

    Query, key and value share one FP8 input where they read the same array. The softmax runs in float32. Under a recipe that
    quantizes no product this is the Flax module itself.

    Attributes:
      causal: whether position t attends to positions up to t only, without a mask array; new here.
      recipe: what is quantized and kept.

    Raises:
      ValueError: dropout, decoding, or a product, einsum or attention function of one's own, under a recipe that quantizes.
    """

    causal: bool = False
    recipe: Recipe = recipes.coat()

    @nn.compact
    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        deterministic: bool | None = None,
        **others,
    ) -> jax.Array:
        """(batch, tokens, features) to (batch, tokens, out_features); mask (batch, heads, tokens, keys), bool or
        numbers of which 0 hides a key, as Flax's helpers make them."""
        if not self.recipe.products_quantized:
            if self.causal:
                mask = nn.combine_masks(mask, nn.make_causal_mask(inputs_q[..., 0], dtype=bool), dtype=bool)
            return super().__call__(inputs_q, inputs_k, inputs_v, mask=mask, deterministic=deterministic, **others)
        refuse(self, **{name: getattr(self, name) for name in _OTHERS}, **others)
        if self.attention_fn is not nn.dot_product_attention:
            refuse(self, attention_fn=self.attention_fn)
        if self.dropout_rate > 0 and not nn.merge_param("deterministic", self.deterministic, deterministic):
            refuse(self, dropout_rate=self.dropout_rate)
        if inputs_k is None and inputs_v is not None:
            raise ValueError(
                "FP8MultiHeadAttention: inputs_v without inputs_k; give both, or inputs_k alone to be used as both"
            )
        inputs_k = inputs_q if inputs_k is None else inputs_k
        inputs = {"query": inputs_q, "key": inputs_k, "value": inputs_k if inputs_v is None else inputs_v}
        return self._attend(inputs, None if mask is None else mask.astype(bool), product_recipe(self))

    def _attend(self, inputs, mask, recipe):
        width = self.qkv_features or inputs["query"].shape[-1]
        if width % self.num_heads:
            raise ValueError(f"FP8MultiHeadAttention: {width} features over num_heads={self.num_heads}; the second must divide")
        heads = (self.num_heads, width // self.num_heads)
        kernel = functools.partial(Kernel, use_bias=self.use_bias, param_dtype=self.param_dtype)
        of_input = functools.partial(kernel, heads, kernel_init=self.kernel_init, bias_init=self.bias_init)
        params = {name: of_input(name=name)(x.shape[-1]) for name, x in inputs.items()}
        of_heads = functools.partial(
            kernel, kernel_init=self.out_kernel_init or self.kernel_init, bias_init=self.out_bias_init or self.bias_init
        )
        params["out"] = of_heads(self.out_features or inputs["query"].shape[-1], name="out")(*heads)
        norm = functools.partial(nn.LayerNorm, use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype)
        norms = {name: norm(name=f"{name}_ln") for name in ("query", "key") if self.normalize_qk}
        dtype = dtypes.canonicalize_dtype(*inputs.values(), params["out"]["kernel"], dtype=self.dtype)
        return ops.blocks.multi_head_attention(params, inputs, recipe, dtype=dtype, norms=norms, causal=self.causal, mask=mask)
