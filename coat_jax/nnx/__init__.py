"""Flax NNX modules in FP8: the arguments, parameters and metadata of their `flax.nnx` namesakes, and a recipe."""

from coat_jax.nnx.attention import FP8MultiHeadAttention
from coat_jax.nnx.linear import FP8Einsum, FP8Embed, FP8Linear, FP8LinearGeneral
from coat_jax.nnx.mlp import FP8MLP, FP8SwiGLU
from coat_jax.nnx.norm import FP8LayerNorm, FP8RMSNorm
from coat_jax.nnx.transformer import FP8SelfAttention, FP8TransformerBlock

__all__ = [
    "FP8MLP",
    "FP8Einsum",
    "FP8Embed",
    "FP8LayerNorm",
    "FP8Linear",
    "FP8LinearGeneral",
    "FP8MultiHeadAttention",
    "FP8RMSNorm",
    "FP8SelfAttention",
    "FP8SwiGLU",
    "FP8TransformerBlock",
]
