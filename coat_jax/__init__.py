"""COAT for JAX: FP8 optimizer states and FP8 activations for Flax and Optax.

Names load on first use: `import coat_jax` reads neither JAX nor Flax nor any kernel module.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coat_jax import nnx as nnx
    from coat_jax import ops as ops
    from coat_jax import pretrained as pretrained
    from coat_jax import recipes as recipes
    from coat_jax.compiled import compile_for as compile_for
    from coat_jax.compiled import explain_memory as explain_memory
    from coat_jax.conversion import convert as convert
    from coat_jax.linen import FP8MLP as FP8MLP
    from coat_jax.linen import FP8Dense as FP8Dense
    from coat_jax.linen import FP8DenseGeneral as FP8DenseGeneral
    from coat_jax.linen import FP8Embed as FP8Embed
    from coat_jax.linen import FP8LayerNorm as FP8LayerNorm
    from coat_jax.linen import FP8MultiHeadAttention as FP8MultiHeadAttention
    from coat_jax.linen import FP8RMSNorm as FP8RMSNorm
    from coat_jax.linen import FP8SwiGLU as FP8SwiGLU
    from coat_jax.linen import FP8TransformerBlock as FP8TransformerBlock
    from coat_jax.ops import remat_policy as remat_policy
    from coat_jax.ops.layer_hooks import dot_general as dot_general
    from coat_jax.ops.layer_hooks import einsum as einsum
    from coat_jax.optim import coat_adamw as coat_adamw
    from coat_jax.optim import codecs as codecs
    from coat_jax.optim import scale_by_coat_adam as scale_by_coat_adam
    from coat_jax.quant import E4M3 as E4M3
    from coat_jax.quant import E5M2 as E5M2
    from coat_jax.quant import PerBlock as PerBlock
    from coat_jax.quant import PerGroup as PerGroup
    from coat_jax.quant import PerTensor as PerTensor
    from coat_jax.quant import PowerExpansion as PowerExpansion
    from coat_jax.quant import QuantizedArray as QuantizedArray
    from coat_jax.quant import QuantSpec as QuantSpec
    from coat_jax.quant import dequantize as dequantize
    from coat_jax.quant import quantize as quantize
    from coat_jax.recipes import Recipe as Recipe

__version__ = "0.1.0"

_HOME = {
    "E4M3": "coat_jax.quant",
    "E5M2": "coat_jax.quant",
    "PerBlock": "coat_jax.quant",
    "PerGroup": "coat_jax.quant",
    "PerTensor": "coat_jax.quant",
    "PowerExpansion": "coat_jax.quant",
    "QuantizedArray": "coat_jax.quant",
    "QuantSpec": "coat_jax.quant",
    "dequantize": "coat_jax.quant",
    "quantize": "coat_jax.quant",
    "codecs": "coat_jax.optim.codecs",
    "coat_adamw": "coat_jax.optim",
    "scale_by_coat_adam": "coat_jax.optim",
    "recipes": "coat_jax.recipes",
    "Recipe": "coat_jax.recipes",
    "nnx": "coat_jax.nnx",
    "ops": "coat_jax.ops",
    "pretrained": "coat_jax.pretrained",
    "remat_policy": "coat_jax.ops",
    "compile_for": "coat_jax.compiled",
    "explain_memory": "coat_jax.compiled",
    "convert": "coat_jax.conversion",
    "dot_general": "coat_jax.ops.layer_hooks",
    "einsum": "coat_jax.ops.layer_hooks",
    "FP8Dense": "coat_jax.linen",
    "FP8RMSNorm": "coat_jax.linen",
    "FP8DenseGeneral": "coat_jax.linen",
    "FP8Embed": "coat_jax.linen",
    "FP8LayerNorm": "coat_jax.linen",
    "FP8MLP": "coat_jax.linen",
    "FP8MultiHeadAttention": "coat_jax.linen",
    "FP8SwiGLU": "coat_jax.linen",
    "FP8TransformerBlock": "coat_jax.linen",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'coat_jax' has no attribute {name!r}")
    module = importlib.import_module(_HOME[name])
    return module if _HOME[name].rsplit(".", 1)[1] == name else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
