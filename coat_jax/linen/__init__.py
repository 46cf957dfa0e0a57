"""Flax Linen modules with the parameters of their Flax namesakes and FP8 activations."""

from coat_jax.linen.attention import FP8MultiHeadAttention
from coat_jax.linen.dense import FP8Dense, FP8DenseGeneral, FP8Embed
from coat_jax.linen.mlp import FP8MLP, FP8SwiGLU
from coat_jax.linen.norm import FP8LayerNorm, FP8RMSNorm
from coat_jax.linen.parameters import Kernel, WithRecipe
from coat_jax.linen.transformer import FP8SelfAttention, FP8TransformerBlock, NormScale, declare_block

__all__ = [
    "FP8MLP",
    "FP8Dense",
    "FP8DenseGeneral",
    "FP8Embed",
    "FP8LayerNorm",
    "FP8MultiHeadAttention",
    "FP8RMSNorm",
    "FP8SelfAttention",
    "FP8SwiGLU",
    "FP8TransformerBlock",
    "Kernel",
    "NormScale",
    "WithRecipe",
    "declare_block",
]
