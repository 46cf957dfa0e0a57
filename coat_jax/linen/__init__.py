"""Flax Linen modules with the parameters of their Flax namesakes and FP8 activations."""

from coat_jax.linen.dense import FP8Dense, Kernel
from coat_jax.linen.mlp import FP8SwiGLU
from coat_jax.linen.norm import FP8RMSNorm

__all__ = ["FP8Dense", "FP8RMSNorm", "FP8SwiGLU", "Kernel"]
