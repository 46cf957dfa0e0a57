"""What a variant holds in memory: bytes of optimizer state, and bytes that its compiled step keeps for the backward pass."""

import collections
import os
from typing import Any

import jax
import numpy as np
import optax

from coat_jax.compiled import Residual, kept_for_backward
from coat_jax.optim.state import viewed
from coat_jax.quant import QuantizedArray


def nbytes(tree: Any) -> int:
    """Bytes of all arrays in a tree, or of the arrays whose shapes it holds."""
    return sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def memory() -> int:
    """Bytes that the first device has; a CPU has the machine's."""
    limits = jax.devices()[0].memory_stats()
    return limits["bytes_limit"] if limits else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def state_bytes(opt_state: Any) -> dict[str, Any]:
    """Bytes of the moments in an optimizer state, those of one byte per element and those in f32 apart.

    Args:
      opt_state: the state, or its shapes, of any chain that holds one Adam with fields `mu` and `nu`.

    Returns:
      `quantized_parameters` and `quantized_bytes` (both moments together), `f32_parameters`, `f32_bytes`, `f32_leaves`
      (names), and bytes per parameter, over the quantized ones (None without any) and over all.
    """
    sizes: collections.Counter[str] = collections.Counter()
    names: list[str] = []
    opt_state = viewed(opt_state, "state_bytes")
    for field in ("mu", "nu"):
        moments = optax.tree.get(opt_state, field)
        for path, leaf in jax.tree.leaves_with_path(moments, is_leaf=lambda x: isinstance(x, QuantizedArray)):
            kind = "quantized" if isinstance(leaf, QuantizedArray) else "f32"
            sizes[f"{kind}_parameters"] += leaf.size if field == "mu" else 0
            sizes[f"{kind}_bytes"] += leaf.size * np.dtype(leaf.dtype).itemsize if kind == "f32" else leaf.nbytes
            if kind == "f32" and field == "mu":
                names.append(jax.tree_util.keystr(path, simple=True, separator="/"))
    parameters, quantized = sizes["quantized_parameters"] + sizes["f32_parameters"], sizes["quantized_parameters"]
    return {
        **{f"{kind}_{what}": sizes[f"{kind}_{what}"] for kind in ("quantized", "f32") for what in ("parameters", "bytes")},
        "f32_leaves": names,
        "bytes_per_quantized_parameter": sizes["quantized_bytes"] / quantized if quantized else None,
        "bytes_per_parameter": (sizes["quantized_bytes"] + sizes["f32_bytes"]) / parameters,
    }


def is_attention_matrix(kept: Residual, batch: int, seq: int, heads: int) -> bool:
    """Whether a kept array has an entry for each pair of tokens and each head: attention scores and probabilities."""
    return kept.shape.count(seq) >= 2 and np.prod(kept.shape) == batch * heads * seq * seq


def kept_bytes(compiled: Any, *, batch: int, seq: int, heads: int) -> float:
    """Bytes that the scan over layers keeps for its backward pass, per token and layer, attention matrices left out.

    Read from the compiled program: buffers with a row for each layer that the forward loop writes and the backward loop
    reads. Attention matrices grow with the square of the sequence and do not exist where attention is one fused kernel, as it
    is on GPUs, so they would hide the rest.
    """
    kept = [k for k in kept_for_backward(compiled) if not is_attention_matrix(k, batch, seq, heads)]
    return sum(k.nbytes / k.layers for k in kept) / (batch * seq)
