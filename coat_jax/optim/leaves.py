"""Which leaves of a parameter tree are quantized, along which axis their groups run, and the seed of each: all static."""

import fnmatch
import math
import zlib
from collections.abc import Sequence
from typing import Any

import jax

from coat_jax.optim.codecs import MomentCodec
from coat_jax.quant import PerGroup

DEFAULT_FILTER = ("*", "!*embed*", "!*scale", "!*bias")
"""Every leaf but embeddings, whose 8-bit moments are known to be unstable, and the scales and biases, which are small even
where a scan over layers stacks them into a large leaf."""


def path_name(path: Sequence[Any]) -> str:
    """A tree path as text: layers/attention/kernel."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def check_filter(patterns: Sequence[str] | None) -> tuple[str, ...]:
    """The patterns as a tuple; None is `DEFAULT_FILTER`.

    Raises:
      TypeError: a single string, or anything but strings.
    """
    if patterns is None:
        return DEFAULT_FILTER
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"quantize_filter={patterns!r}; give a sequence of path patterns, such as {DEFAULT_FILTER}")
    return tuple(patterns)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether the last pattern that fits `name` (shell wildcards, any case) is one without a leading "!".

    Example:
      >>> matches("decoder/embed/embedding", ("*", "!*embed*")), matches("decoder/mlp/kernel", ("*", "!*embed*"))
      (False, True)
    """
    chosen = False
    for pattern in patterns:
        if fnmatch.fnmatchcase(name.lower(), pattern.removeprefix("!").lower()):
            chosen = not pattern.startswith("!")
    return chosen


def group_axis(shape: Sequence[int], size: int) -> int:
    """The axis along which groups of `size` run, from the global shape: -1 or -2, that whose groups divide further by two.

    A scale's sharding is the parameter's, so the number of groups must divide by the mesh: 4096 x 11008 has 86 groups in a
    row, which 8 devices cannot share, and 32 in a column, which they can. Between equals the one with fewer groups is taken:
    128 x 64 has 64 groups of 128 in columns, and 128 of only 64 in rows.
    """
    if len(shape) < 2:
        return -1

    def merit(axis: int) -> tuple[int, int]:
        groups, others = -(-shape[axis] // size), shape[-3 - axis]
        return groups & -groups, -groups * others  # the largest power of two that divides it; how few there are

    return max((-1, -2), key=merit)


def leaf_codec(
    name: str, shape: Sequence[int], codec: MomentCodec, patterns: Sequence[str], min_size: int
) -> MomentCodec | None:
    """The codec of one leaf with its group axis chosen, or None where the leaf keeps float32 moments."""
    spec = codec.nu or codec.mu
    if spec is None or not shape or math.prod(shape) < max(1, min_size) or not matches(name, patterns):
        return None
    assert isinstance(spec.granularity, PerGroup)
    return codec.along(group_axis(shape, spec.granularity.size))


def leaf_seed(name: str) -> int:
    """The seed of a leaf's random bits: a checksum of its path, so that it does not depend on the other leaves."""
    return zlib.crc32(name.encode())
