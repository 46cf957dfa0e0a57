"""Multi-head attention. A skin over `coat_jax.ops`."""

import functools

import jax
from flax import linen as nn
from flax.linen import dtypes

from coat_jax import ops, recipes
from coat_jax.linen.parameters import Kernel, WithRecipe, plus_bias, product_recipe, refuse
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
        """(batch, tokens, features) to (batch, tokens, out_features); mask bool (batch, heads, tokens, keys)."""
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
        return self._attend(inputs, mask, product_recipe(self))

    def _attend(self, inputs, mask, recipe):
        width = self.qkv_features or inputs["query"].shape[-1]
        if width % self.num_heads:
            raise ValueError(f"FP8MultiHeadAttention: {width} features over num_heads={self.num_heads}; the second must divide")
        heads = (self.num_heads, width // self.num_heads)
        kernel = functools.partial(Kernel, use_bias=self.use_bias, param_dtype=self.param_dtype)
        of_input = functools.partial(kernel, heads, kernel_init=self.kernel_init, bias_init=self.bias_init)
        kernels, biases = {}, {}
        for name, x in inputs.items():
            kernels[name], biases[name] = of_input(name=name)(x.shape[-1])
        of_heads = functools.partial(
            kernel, kernel_init=self.out_kernel_init or self.kernel_init, bias_init=self.out_bias_init or self.bias_init
        )
        out, out_bias = of_heads(self.out_features or inputs["query"].shape[-1], name="out")(*heads)
        dtype = dtypes.canonicalize_dtype(*inputs.values(), out, dtype=self.dtype)
        made: dict[str, jax.Array] = {}
        for x in {id(x): x for x in inputs.values()}.values():
            names = [name for name in inputs if inputs[name] is x]
            ys = ops.linear([x.astype(dtype)], [kernels[name] for name in names], recipe)
            made |= {name: plus_bias(y, biases[name]) for name, y in zip(names, ys, strict=True)}
        if self.normalize_qk:
            for name in ("query", "key"):
                norm = nn.LayerNorm(use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype, name=f"{name}_ln")
                made[name] = norm(made[name]).astype(dtype)
        [y] = ops.attention_linear(made["query"], made["key"], made["value"], [out], recipe, causal=self.causal, mask=mask)
        return plus_bias(y, out_bias)
