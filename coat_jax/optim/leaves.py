"""Which leaves of a parameter tree are quantized, how each is cut into groups, and the seed of each: all static."""

import fnmatch
import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from coat_jax.optim.codecs import FLOAT32, MomentCodec
from coat_jax.quant import PerGroup

KEPT = (
    *("*embed*", "*_emb", "emb", "wte", "wpe"),  # embeddings, whose 8-bit moments are known to be unstable
    *("*norm*", "ln", "ln_*", "ln[0-9]*", "lnf", "*_ln"),  # norms, of which a scan over layers makes leaves of two axes
    *("*scale", "*bias*", "gamma", "beta", "b"),  # likewise
)
"""Names, of a leaf or of the module that holds it, of what keeps float32 moments by default. Shell wildcards, any case.

    h/wte/embedding, wte, model/embed_tokens/weight                    embeddings of Flax, a hand-written GPT-2, a Llama
    layers/input_layernorm/weight, layers/0/attn_norm/w, h/ln_1/scale  norms of Hugging Face, Tunix and GPT-2
    text_embedding_model/layers/mlp/kernel                             neither: only mlp and kernel, the last two, count
"""


def path_name(path: Sequence[Any]) -> str:
    """A tree path as text: layers/attention/kernel. The value inside a variable of Flax NNX has the variable's name."""
    if path and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def check_filter(patterns: Sequence[str] | None) -> tuple[str, ...] | None:
    """The patterns as a tuple; None, the default rule, as it is.

    Raises:
      TypeError: a single string, or anything but strings.
    """
    if patterns is None:
        return None
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"quantize_filter={patterns!r}; give a sequence of path patterns, such as ('*', '!*embed*')")
    return tuple(patterns)


def check_min_size(min_size: int | None) -> int:
    """The number; None is 4096.

    Raises:
      TypeError: anything but a Python number, such as the array that `optax.inject_hyperparams` makes of one.
    """
    if min_size is None:
        return 4096
    if not isinstance(min_size, (int, np.integer)):
        raise TypeError(
            f"min_size={min_size!r} decides which leaves are quantized and must be a Python int; "
            "give optax.inject_hyperparams static_args=coat_jax.optim.STATIC_ARGS"
        )
    return int(min_size)


def _fits(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name.lower(), pattern.removeprefix("!").lower())


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """The default rule: whether a leaf has two axes or more, and neither it nor its module is called as in `KEPT`.

    Example:
      >>> is_matrix("layers/mlp/kernel", (256, 256)), is_matrix("layers/norm/weight", (32, 4096)), is_matrix("w", (4096,))
      (True, False, False)
    """
    return len(shape) >= 2 and not any(_fits(part, pattern) for part in name.split("/")[-2:] for pattern in KEPT)


def matches(name: str, patterns: Sequence[str], otherwise: bool = False) -> bool:
    """Whether the last pattern that fits `name` (shell wildcards, any case) is one without a leading "!".

    Args:
      name: a path.
      patterns: in any number.
      otherwise: the answer where no pattern fits and the first one is an exclusion.

    Example:
      >>> matches("decoder/embed/embedding", ("*", "!*embed*")), matches("decoder/mlp/kernel", ("*", "!*embed*"))
      (False, True)
    """
    chosen = otherwise and bool(patterns) and patterns[0].startswith("!")
    for pattern in patterns:
        if _fits(name, pattern):
            chosen = not pattern.startswith("!")
    return chosen


DEVICES = 8
"""Devices that may share a leaf along either of its last two axes, each with whole groups, wherever its shape allows."""


def choose_groups(shape: Sequence[int], size: int) -> PerGroup:
    """Groups of at most `size` along one of the last two axes, chosen by the global shape so that devices can share the leaf.

    The scales of a leaf are sharded like the leaf, and no group may lie on two devices. So the group is the largest one, from
    `size` down to half of it, of which whole ones fit into an eighth of the axis; if there is none, into a quarter, a half, or
    the whole. Multiples of 16, which the kernels take, are tried before those of 8. The axis of the larger groups is taken,
    between equals that with fewer groups in all. With `size` 128:

        shape           an eighth of each axis    groups          for two moments
        4096 x 11008    512, 1376                 128 along -2    0.08 bytes of scales and exponents per element
        4864 x 896      608, 112                  112 along -1    0.09
        576 x 1536      72, 192                   96 along -1     0.10
        576 x 576       72, 72                    72 along -1     0.14; no kernel
        1000 x 999      125, none                 125 is no multiple of 8: a quarter, 250, has none, a half, 500, neither;
                                                  128 along -2, the last one shorter, and devices cannot share that axis
    """
    if len(shape) < 2:
        return PerGroup(size)

    def merit(groups: PerGroup, shared: int) -> tuple[int, int, int]:
        along, across = shape[groups.axis], shape[-3 - groups.axis]
        return shared, min(groups.size, along), -(-(-along // groups.size) * across)

    found = [(merit(groups, shared), groups) for axis in (-1, -2) for groups, shared in [_along(shape[axis], axis, size)]]
    return max(found, key=lambda pair: pair[0])[1]


def _along(length: int, axis: int, size: int) -> tuple[PerGroup, int]:
    """The groups of an axis of `length`, and how many devices can share it."""
    for devices in (DEVICES, DEVICES // 2, DEVICES // 4):
        share, rest = divmod(length, devices)
        for step in (16, 8, size):
            if not rest:
                for candidate in range(size - size % step, (size - 1) // 2, -step):
                    if share % candidate == 0:
                        return PerGroup(candidate, axis), devices
    return PerGroup(size, axis), 1


def leaf_codec(
    name: str, shape: Sequence[int], codec: MomentCodec, patterns: Sequence[str] | None, min_size: int
) -> MomentCodec:
    """The codec of one leaf with its groups chosen; `FLOAT32` where the leaf is not quantized."""
    spec = codec.nu or codec.mu
    if spec is None or not shape or math.prod(shape) < max(1, min_size):
        return FLOAT32
    default = is_matrix(name, shape)
    if not (default if patterns is None else matches(name, patterns, default)):
        return FLOAT32
    assert isinstance(spec.granularity, PerGroup)
    return codec.along(choose_groups(shape, spec.granularity.size))


def leaf_seed(name: str) -> np.uint32:
    """The seed of a leaf's random bits: a checksum of its path, so that it does not depend on the other leaves."""
    return np.uint32(zlib.crc32(name.encode()))


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


def choose_codecs(tree: Named, codec: MomentCodec, patterns: Sequence[str] | None, min_size: int) -> list[MomentCodec]:
    """`leaf_codec` of every leaf.

    Raises:
      ValueError: a filter that quantizes nothing, as no pattern of it fits some large matrix: a slip of the pen, which would
        make the state four times as large without a word.
    """
    shapes = [tuple(getattr(leaf, "shape", ())) for leaf in tree.leaves]
    chosen = [leaf_codec(name, shape, codec, patterns, min_size) for name, shape in zip(tree.names, shapes, strict=True)]
    if codec.quantizes and patterns is not None and not any(own.quantizes for own in chosen):
        for name, shape in zip(tree.names, shapes, strict=True):
            missed = leaf_codec(name, shape, codec, None, min_size).quantizes
            if missed and not any(_fits(name, pattern) for pattern in patterns):
                raise ValueError(
                    f"coat_adamw: quantize_filter={tuple(patterns)} quantizes nothing and does not fit {name!r}; "
                    "correct the pattern, or give codec=codecs.FLOAT32 to keep every moment in float32"
                )
    return chosen


def refuse_complex(tree: Named) -> None:
    """Raises TypeError for a complex leaf: rounding to one byte would drop its imaginary part."""
    for name, leaf in zip(tree.names, tree.leaves, strict=True):
        dtype = getattr(leaf, "dtype", None)
        if dtype is not None and np.issubdtype(dtype, np.complexfloating):
            raise TypeError(
                f"coat_adamw: {name!r} is {dtype}, and moments are stored for real numbers; give that leaf to optax.adamw "
                "(optax.multi_transform)"
            )
