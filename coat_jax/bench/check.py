"""Whether a kernel's results are the reference's: the same codes, or on a device neighbours of them.

A compiled kernel may take another exp2 or division than XLA, so that a value at the edge between two codes falls to the other
side. It is right where every value lies between those of the codes next to the reference's. Results in floats may differ by
one unit in the last place of bfloat16.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from coat_jax.quant import QuantizedArray, dequantize

ROUNDING = 2.0**-7
"""Relative error of a float result: one unit of bfloat16."""
SLACK = 2.0**-6
"""Part of the distance between two codes by which a value may pass the next one: scales have rounding errors of their own."""


class Agreement(NamedTuple):
    """How two results compare.

    Attributes:
      elements: values compared.
      codes: bytes or numbers that are not the same.
      wrong: values beyond the next code, or beyond a unit in the last place.
    """

    elements: int
    codes: int
    wrong: int

    def __str__(self) -> str:
        if self.wrong:
            return f"WRONG: {self.wrong:,} of {self.elements:,}"
        return "equal" if not self.codes else f"{self.codes:,} of {self.elements:,} one code apart"


def compare(got: Any, want: Any) -> Agreement:
    """The agreement of two trees of arrays and `QuantizedArray`s of one structure.

    Raises:
      ValueError: trees, shapes or dtypes that differ.
    """
    shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(tree)] for tree in (got, want)]
    structures: Any = [jax.tree.structure(tree) for tree in (got, want)]
    if structures[0] != structures[1] or shapes[0] != shapes[1]:
        raise ValueError(f"compare: results like {shapes[0]} and {shapes[1]}")
    pairs = [jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, QuantizedArray)) for tree in (got, want)]
    different, wrong = _counts(*pairs)
    return Agreement(sum(x.size for x in pairs[1]), int(different), int(wrong))


@jax.jit
def _counts(got: list[Any], want: list[Any]) -> tuple[jax.Array, jax.Array]:
    """Codes that differ, and values that are wrong. Sums of int32 per leaf hold 2^31 elements."""
    found = [(_of_codes if isinstance(w, QuantizedArray) else _of_values)(g, w) for g, w in zip(got, want, strict=True)]
    different, wrong = (sum(jnp.sum(column[i], dtype=jnp.int32) for column in found) for i in (0, 1))
    return jnp.asarray(different), jnp.asarray(wrong)


def _of_codes(got: QuantizedArray, want: QuantizedArray) -> tuple[jax.Array, jax.Array]:
    value = functools.partial(dequantize, dtype=np.dtype(np.float32), implementation="xla")

    def beside(step: int) -> jax.Array:
        parts = (_neighbour(want.payload, step), want.scale, want.exponent)
        return value(QuantizedArray.tree_unflatten((want.spec, want.dtype), parts))

    below, above = beside(-1), beside(1)
    low, high = jnp.minimum(below, above), jnp.maximum(below, above)
    # E4M3 near 100 with scale 1: codes 96, 104, 112. For a reference of 104 anything in [96, 112] is right, and SLACK * 16 =
    # 0.25 beyond; 88 or 120 are wrong.
    slack, x, exact = SLACK * (high - low), value(got), value(want)
    right = ((x >= low - slack) & (x <= high + slack)) | (x == exact) | (jnp.isnan(x) & jnp.isnan(exact))
    return got.payload.view(jnp.uint8) != want.payload.view(jnp.uint8), ~right


def _neighbour(payload: jax.Array, step: int) -> jax.Array:
    """The next code up or down, of the same sign of infinity: codes end at the largest finite one."""
    if jnp.issubdtype(payload.dtype, jnp.integer):
        info = jnp.iinfo(payload.dtype)
        return jnp.clip(payload.astype(jnp.int32) + step, info.min, info.max).astype(payload.dtype)
    # FP8 codes are sign and magnitude: 0x00 is 0, 0x01 the smallest, 0x7E 448, 0x80 is -0, 0x81 minus the smallest. In
    # `ordered` these are 0, 1, 126, 0, -1, so that a step up or down is +1 or -1; 0x7E and its negative, +-126, are the ends.
    bits = jax.lax.bitcast_convert_type(payload, jnp.uint8).astype(jnp.int32)
    largest = jax.lax.bitcast_convert_type(jnp.finfo(payload.dtype).max, jnp.uint8).astype(jnp.int32)
    ordered = jnp.clip(jnp.where(bits > 127, 128 - bits, bits) + step, -largest, largest)
    bits = jnp.where(ordered < 0, 128 - ordered, ordered).astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(bits, payload.dtype)


def _of_values(got: jax.Array, want: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A float may be off by a unit in the last place of bfloat16, of itself and of a typical one: sums cancel. Codes by one."""
    if got.dtype.itemsize == 1:
        low, high = (_neighbour(want, step).astype(jnp.float32) for step in (-1, 1))
        x = got.astype(jnp.float32)
        return got.view(jnp.uint8) != want.view(jnp.uint8), ~((x >= low) & (x <= high))
    x, y = got.astype(jnp.float32), want.astype(jnp.float32)
    typical = jnp.sqrt(jnp.mean(jnp.where(jnp.isfinite(y), y, 0) ** 2))
    right = (jnp.abs(x - y) <= ROUNDING * (jnp.abs(y) + typical)) | (x == y) | (jnp.isnan(x) & jnp.isnan(y))
    return ~((x == y) | (jnp.isnan(x) & jnp.isnan(y))), ~right
