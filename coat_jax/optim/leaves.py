"""Which leaves of a parameter tree are quantized, along which axis their groups run, and the seed of each: all static."""

import fnmatch
import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from coat_jax.optim.codecs import FLOAT32, MomentCodec
from coat_jax.quant import PerGroup

DEFAULT_FILTER = ("*", "!*embed*", "!*scale", "!*bias")
"""Every leaf but embeddings, whose 8-bit moments are known to be unstable, and the scales and biases, which are small even
where a scan over layers stacks them into a large leaf."""


def path_name(path: Sequence[Any]) -> str:
    """A tree path as text: layers/attention/kernel. The value inside a variable of Flax NNX has the variable's name."""
    if path and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
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


def leaf_codec(name: str, shape: Sequence[int], codec: MomentCodec, patterns: Sequence[str], min_size: int) -> MomentCodec:
    """The codec of one leaf with its group axis chosen; `FLOAT32` where the leaf is not quantized."""
    spec = codec.nu or codec.mu
    if spec is None or not shape or math.prod(shape) < max(1, min_size) or not matches(name, patterns):
        return FLOAT32
    assert isinstance(spec.granularity, PerGroup)
    return codec.along(group_axis(shape, spec.granularity.size))


def leaf_seed(name: str) -> int:
    """The seed of a leaf's random bits: a checksum of its path, so that it does not depend on the other leaves."""
    return zlib.crc32(name.encode())


class Named(NamedTuple):
    """A tree as the names of its leaves, its leaves and its structure."""

    names: list[str]
    leaves: list[Any]
    structure: Any

    @classmethod
    def of(cls, tree: Any) -> "Named":
        """The leaves of `tree`, their paths as text."""
        rows, structure = jax.tree_util.tree_flatten_with_path(tree)
        return cls([path_name(path) for path, _ in rows], [leaf for _, leaf in rows], structure)

    def beside(self, *trees: Any) -> list[list[Any]]:
        """What other trees have at the places of these leaves."""
        return [self.structure.flatten_up_to(tree) for tree in trees]

    def build(self, rows: Sequence[Sequence[Any]], width: int) -> list[Any]:
        """`width` trees of this structure from one row for each leaf."""
        return [self.structure.unflatten([row[i] for row in rows]) for i in range(width)]
