"""Adam's state as clients hold it: trees of plain arrays, each like the parameters."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from coat_jax.optim import codecs
from coat_jax.optim.codecs import MomentCodec
from coat_jax.optim.leaves import Named, choose_groups
from coat_jax.quant import Groups, PerGroup, QuantizedArray

FLOAT = np.dtype(np.float32)


class StoredMoment(NamedTuple):
    """One moment of all parameters: three trees like theirs, of plain arrays, which any client can hold, shard and save.

    A kernel (256, 512) with groups of 128 along its last axis, beside a bias that is not quantized:

        codes      {"kernel": float8_e4m3fn (256, 512), "bias": float32 (512,)}
        scale      {"kernel": float32 (256, 4),         "bias": None}
        exponent   {"kernel": uint8 (256, 4),           "bias": None}

    Attributes:
      codes: one byte for each element; the moment itself, float32, of a leaf that is not quantized.
      scale: multiplies on decode: one number for each group, as many axes as the leaf; None where codes are float32.
      exponent: uint8, of the expansion that is fitted to each group; None where there is none.
    """

    codes: Any
    scale: Any
    exponent: Any


class CoatAdamState(NamedTuple):
    """Adam's state: `optax.ScaleByAdamState` whose moments are stored by a codec.

    Attributes:
      count: int32, steps taken.
      mu: first moments.
      nu: second moments.
      codec: uint32, `mark` of the codec that stored them: codes that mean something else are never trained on.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: StoredMoment
    nu: StoredMoment
    codec: jax.Array


def mark(codec: MomentCodec) -> int:
    """A number for how the codes of a codec are to be read: a checksum of formats, expansions and size of groups."""
    specs = (codec.mu, codec.nu)
    read = [spec and (str(spec.format), repr(spec.expansion), str(spec.scale_dtype), spec.granularity) for spec in specs]
    return zlib.crc32(repr((read, codec.relative)).encode())


def _called(number: int) -> str:
    """The codec of a mark, for messages."""
    names = {mark(codecs.named(name)): repr(name) for name in codecs.names()}
    return names.get(number, "of your own")


def guard(state: CoatAdamState, codec: MomentCodec, operation: str) -> jax.Array:
    """What a step's directions are multiplied by: 1, and NaN where the state belongs to another codec.

    Orbax casts a state into the template of another codec without a word, and a program that is traced cannot raise an error
    for numbers that it does not know. There every update is NaN, from the first step on.

    Raises:
      ValueError: the state belongs to another codec, and its numbers are there.
    """
    if not isinstance(state.codec, (jax.core.Tracer, jax.ShapeDtypeStruct)) and int(state.codec) != mark(codec):
        raise ValueError(
            f"{operation}: the state belongs to the codec {_called(int(state.codec))}, the optimizer has the codec "
            f"{_called(mark(codec))}; use the codec that the state was made with"
        )
    return jnp.where(jnp.asarray(state.codec) == jnp.uint32(mark(codec)), jnp.float32(1), jnp.float32(jnp.nan))


def pack(tree: Named, count: jax.Array, mu: Sequence[Any], nu: Sequence[Any], codec: jax.Array) -> CoatAdamState:
    """The state of moments given leaf by leaf, `QuantizedArray`s or float32; `codec` is the mark."""

    def stored(moments: Sequence[Any]) -> StoredMoment:
        rows = [(x.payload, x.scale, x.exponent) if is_quantized(x) else (x, None, None) for x in moments]
        return StoredMoment(*tree.build(rows, 3))

    return CoatAdamState(count, stored(mu), stored(nu), codec)


def unpack(state: CoatAdamState, codec: MomentCodec, operation: str) -> tuple[list[Any], list[Any]]:
    """mu and nu leaf by leaf: `QuantizedArray`s, or float32.

    Raises:
      ValueError: codes, scales or exponents that the codec would not have stored.
    """
    mu, nu = ([*_leaves(getattr(state, name), name, codec, operation)] for name in ("mu", "nu"))
    return mu, nu


def _leaves(moment: StoredMoment, name: str, codec: MomentCodec, operation: str) -> Any:
    spec, tree = getattr(codec, name), Named.of(moment.codes)
    for path, codes, scale, exponent in zip(tree.names, tree.leaves, *tree.beside(moment.scale, moment.exponent), strict=True):
        if scale is None and codes.dtype == FLOAT:
            yield codes
            continue
        dtypes = tuple(x is not None and np.dtype(x.dtype) for x in (codes, scale, exponent))
        groups = None if spec is None or scale is None else groups_like(codes.shape, scale.shape, spec.granularity.size)
        if groups is None or dtypes != _dtypes(spec):
            raise ValueError(
                f"{operation}: the state keeps {name} of {path!r} as {codes.dtype}"
                f"{'' if scale is None else f', {scale.dtype} scales of shape {tuple(scale.shape)}'}"
                f"{'' if exponent is None else ', exponents'}, the codec as {spec or 'float32'}; "
                "use the codec that the state was made with"
            )
        yield QuantizedArray(codes, scale, exponent, getattr(codec.along(groups), name), FLOAT)


def _dtypes(spec: Any) -> tuple[Any, Any, Any]:
    return spec.format.dtype, np.dtype(spec.scale_dtype), spec.has_exponent and np.dtype(np.uint8)


def groups_like(shape: tuple[int, ...], scale_shape: tuple[int, ...], size: int) -> PerGroup | None:
    """How a leaf was cut into groups, read from its shape and that of its scales; None where nothing fits.

    codes (896, 4864), scale (8, 4864)     896 / 8 = 112 along -2
    codes (256, 512), scale (256, 4)       512 / 4 = 128 along -1
    codes (8, 200), scale (8, 2)           two groups of `size` 128, the last one shorter
    """
    candidates = [choose_groups(shape, size)]
    for axis in (-1, -2)[: len(shape)]:
        whole, rest = divmod(shape[axis], max(1, scale_shape[axis]))
        candidates += [PerGroup(whole, axis)] * (whole > 0 and not rest) + [PerGroup(size, axis)]
    return next((groups for groups in candidates if Groups.of(groups, shape).scale_shape == tuple(scale_shape)), None)


def is_quantized(node: Any) -> bool:
    """Whether a node of a tree is a `QuantizedArray`."""
    return isinstance(node, QuantizedArray)


def recognized(state: CoatAdamState, operation: str) -> MomentCodec:
    """The codec with a name that made a state, by the dtypes that it keeps, and by its mark where its numbers are there.

    Raises:
      ValueError: there is none.
    """
    for name in codecs.names():
        codec = codecs.named(name)
        known = None if isinstance(state.codec, (jax.core.Tracer, jax.ShapeDtypeStruct)) else int(state.codec)
        try:
            mu, nu = unpack(state, codec, operation)
        except ValueError:
            continue
        if known == mark(codec) or (known is None and (any(map(is_quantized, mu + nu)) or not codec.quantizes)):
            return codec
    raise ValueError(f"{operation}: the state was made with a codec that has no name; give it as codec=")


def replace_states(state: Any, kind: type, fn: Callable[[Any], Any]) -> Any:
    """`state` with every node of type `kind` replaced by fn of it."""
    return jax.tree.map(lambda node: fn(node) if isinstance(node, kind) else node, state, is_leaf=lambda n: isinstance(n, kind))


def viewed(state: Any, operation: str, codec: MomentCodec | None = None) -> Any:
    """A tree of states in which mu and nu are trees of `QuantizedArray`s and float32 arrays, for those who look at them.

    Raises:
      ValueError: the codec, or for None any with a name, does not fit.
    """

    def view(node: CoatAdamState) -> CoatAdamState:
        tree = Named.of(node.mu.codes)
        moments = unpack(node, recognized(node, operation) if codec is None else codec, operation)
        return node._replace(mu=tree.structure.unflatten(moments[0]), nu=tree.structure.unflatten(moments[1]))

    return replace_states(state, CoatAdamState, view)
