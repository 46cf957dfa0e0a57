"""Differentiable functions of plain arrays, bf16 or f32 at their faces, FP8 only in what they keep for the backward pass."""

from coat_jax.ops import blocks
from coat_jax.ops.activation import add, gate_silu, gelu, gelu_function, multiply, silu, swiglu
from coat_jax.ops.attention import attention, attention_linear
from coat_jax.ops.coded_weight import CodedWeight, weight_codes
from coat_jax.ops.contraction import dot_general, einsum
from coat_jax.ops.elementwise import Elementwise
from coat_jax.ops.embedding import embedding
from coat_jax.ops.linear import Prologue, linear
from coat_jax.ops.loss import cross_entropy
from coat_jax.ops.norm import NormKind, layer_norm, normalize_layer, normalize_rms, rms_norm
from coat_jax.ops.norm_kernels import NormFunction
from coat_jax.ops.recipe import Recipe
from coat_jax.ops.rope import Llama3Scaling, rope
from coat_jax.ops.scaling import Scaling
from coat_jax.ops.stash import STASH, Stashable, remat_policy, stashed

__all__ = [
    "STASH",
    "CodedWeight",
    "Elementwise",
    "Llama3Scaling",
    "NormKind",
    "Prologue",
    "Recipe",
    "Scaling",
    "NormFunction",
    "Stashable",
    "add",
    "attention",
    "attention_linear",
    "blocks",
    "cross_entropy",
    "dot_general",
    "einsum",
    "embedding",
    "gate_silu",
    "gelu",
    "gelu_function",
    "layer_norm",
    "linear",
    "multiply",
    "normalize_layer",
    "normalize_rms",
    "remat_policy",
    "rms_norm",
    "rope",
    "silu",
    "stashed",
    "swiglu",
    "weight_codes",
]
