"""`scaled_product`: the product of two quantized matrices with a scale for every 128 numbers along the contraction."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coat_jax.quant.array import QuantizedArray
from coat_jax.quant.formats import E4M3, E5M2
from coat_jax.quant.granularity import Groups, PerBlock, PerGroup
from coat_jax.quant.implementation import Implementation, Operation, choose, refusal
from coat_jax.quant.quantize import quantize
from coat_jax.quant.spec import QuantSpec

BLOCK = 128
"""Numbers along the contraction that share a scale: Hopper's tensor cores sum so many before float32 takes over."""


def matches(a: QuantSpec | None, b: QuantSpec | None, contract: tuple[int, int] = (1, 1)) -> bool:
    """Whether `scaled_product` can contract axis contract[0] of matrices of spec a with contract[1] of those of b."""
    if a is None or b is None:
        return False
    shared = b.granularity == PerBlock((BLOCK, BLOCK)) or b.granularity == PerGroup(BLOCK) and contract[1] == 1
    plain = all(spec.expansion is None and spec.format in (E4M3, E5M2) for spec in (a, b))
    return a.granularity == PerGroup(BLOCK) and contract[0] == 1 and shared and plain


def transpose(q: QuantizedArray) -> QuantizedArray:
    """The transposed matrix: payload and scales transposed."""
    groups = q.spec.granularity
    if isinstance(groups, PerGroup):
        groups = PerGroup(groups.size, -3 - groups.axis)
    return QuantizedArray(q.payload.T, q.scale.T, None, dataclasses.replace(q.spec, granularity=groups), q.dtype)


def quantize_transposed(
    x: jax.Array, spec: QuantSpec, *, implementation: Implementation | str | None = None, called: str | None = None
) -> QuantizedArray:
    """The transposed matrix in groups of `spec`, which lie along the columns of x; `called` as in `quantize`."""
    tall = dataclasses.replace(spec, granularity=PerGroup(BLOCK, -2))
    quantized = choose(
        lambda x, interpret, places=None: quantize(x, tall, implementation="interpret" if interpret else "pallas"),
        lambda x: quantize(x, tall, implementation="xla"),
        x,
        operation=Operation.QUANTIZE_TRANSPOSED,
        implementation=implementation,
        called=called,
        refused=refusal(Groups.of(tall.granularity, x.shape)),
        split=None if x.shape[0] % BLOCK else _split((("rows", "columns"),), (("rows", "columns"),) * 2),
    )
    return transpose(quantized)


def scaled_product(
    a: QuantizedArray,
    b: QuantizedArray,
    dtype: np.dtype | None = None,
    *,
    implementation: Implementation | str | None = None,
    called: str | None = None,
) -> jax.Array:
    """y = a b^T, blocks of 128 along the contraction summed in FP8 products, their sum in float32.

        y[i, j] = sum over blocks c:  (payload_a[i, c] . payload_b[j, c]) scale_a[i, c] scale_b[j, c]

    Args:
      a: (m, k), in groups of 128 along its last axis.
      b: (n, k), in groups of 128 along its last axis, or in blocks of 128 x 128.
      dtype: of the result; None is a's.
      implementation: "xla", "pallas", "interpret", or None: the kernel in programs for a Hopper GPU, XLA elsewhere.
      called: the function that multiplies, for messages about the implementation; None is this one.

    Returns:
      (m, n).

    Raises:
      ValueError: shapes or specs that do not contract, or an implementation that cannot run.

    Example:
      >>> import jax.numpy as jnp
      >>> from coat_jax import E4M3, PerBlock, PerGroup, QuantSpec, quantize
      >>> from coat_jax.quant import scaled_product
      >>> a = quantize(jnp.full((2, 256), 448.0), QuantSpec(E4M3, PerGroup(128)))
      >>> b = quantize(jnp.full((3, 256), 224.0), QuantSpec(E4M3, PerBlock((128, 128))))
      >>> print(scaled_product(a, b) / 448**2)
      [[128. 128. 128.]
       [128. 128. 128.]]

    Source: DeepSeek-V3, arXiv 2412.19437, section 3.3.2.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"scaled_product: shapes {a.shape} and {b.shape}; give (m, k) and (n, k)")
    if not matches(a.spec, b.spec):
        raise ValueError(
            f"scaled_product: a is {a.spec} and b is {b.spec}; give FP8 in groups of 128 along the last axis (b also in blocks "
            "of 128 x 128), without expansion"
        )
    dtype = a.dtype if dtype is None else np.dtype(dtype)
    # Devices may share the rows of a, or the contraction and then add what each has; all have the rows of b.
    depth = None if a.shape[1] % BLOCK else "depth"
    return choose(
        functools.partial(_kernel, dtype=dtype),
        functools.partial(_plain, dtype=dtype),
        a.payload,
        b.payload,
        a.scale.astype(jnp.float32),
        b.scale.astype(jnp.float32),
        operation=Operation.SCALED_PRODUCT,
        implementation=implementation,
        called=called,
        refused=_refusal(a, b, dtype),
        split=_split((("rows", depth), (None, depth)) * 2, (("rows", None),)),
    )


def _split(operands: tuple[Any, ...], results: tuple[Any, ...]) -> Any:
    from pallas_kernels.partition import Split  # here, so that `import coat_jax` does not load it

    return Split(operands, results)


def _refusal(a: QuantizedArray, b: QuantizedArray, dtype: np.dtype) -> str | None:
    """Why no kernel takes this product, or None."""
    if 0 in a.shape + b.shape:
        return "has no kernel for an empty array"
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"has no kernel that gives {dtype}"
    if a.spec.format != b.spec.format and jax.__version_info__ < (0, 11):
        return f"has no kernel for {a.spec.format} times {b.spec.format} before jax 0.11"
    return None


def _kernel(
    a: jax.Array, b: jax.Array, sa: jax.Array, sb: jax.Array, *, dtype: np.dtype, interpret: bool, places: Any = None
) -> jax.Array:
    del places  # a part of a product is a product
    from pallas_kernels.scaled_product import scaled_product as kernel  # here, so that `import coat_jax` does not load Pallas

    return jax.custom_batching.sequential_vmap(functools.partial(kernel, dtype=dtype, interpret=interpret))(a, b, sa, sb)


def _plain(a: jax.Array, b: jax.Array, sa: jax.Array, sb: jax.Array, *, dtype: np.dtype) -> jax.Array:
    """One block after another, as the kernel does, so that the sum has the kernel's order."""
    rows, columns, size = len(a), len(b), min(BLOCK, a.shape[1])
    if not size:
        return jnp.zeros((rows, columns), dtype)
    if len(sb) != columns:
        sb = jnp.repeat(sb, BLOCK, axis=0)[:columns]
    short = -a.shape[1] % size
    a, b = (jnp.pad(x, ((0, 0), (0, short))) if short else x for x in (a, b))

    def block(k, total):
        left, right = (jax.lax.dynamic_slice_in_dim(x, k * size, size, 1).astype(jnp.float32) for x in (a, b))
        part = jax.lax.dot_general(left, right, (((1,), (1,)), ((), ())))
        return total + part * (sa[:, k][:, None] * sb[:, k][None])

    return jax.lax.fori_loop(0, sa.shape[1], block, jnp.zeros((rows, columns), jnp.float32)).astype(dtype)
