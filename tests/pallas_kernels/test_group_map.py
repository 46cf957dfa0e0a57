"""The skeleton of the row-wise kernels, interpreted: any shape, one launch, in place, and no race (the detector is on)."""

import jax
import jax.numpy as jnp
import pytest
from interpreting import interpreted, numbers_like, same_bytes

from coat_jax.quant import (
    E4M3,
    E5M2,
    INT8,
    UINT8,
    LogRange,
    PerGroup,
    PowerExpansion,
    QuantSpec,
    Softsign,
    codec,
    rounding,
)
from pallas_kernels.group_map import group_map
from pallas_kernels.tiles import Tiles


def scale_rows(x, s):
    """A value per element, its group's maximum, and the scale one up."""
    return x * s[:, None], jnp.max(jnp.abs(x), axis=-1), s + 1


@interpreted
@pytest.mark.parametrize("groups, width", [(1, 128), (131, 128), (300, 32), (1037, 16)])
def test_every_group_once_whatever_their_number(groups, width):
    x, s = numbers_like((groups, width)), numbers_like((groups,), 1)
    [got] = group_map(scale_rows, [(x, s)], name="scale_rows", interpret=True)
    same_bytes(got, scale_rows(x, s))


@interpreted
def test_leaves_of_any_size_share_one_launch_and_know_their_numbers_and_scalars():
    def fn(x, *, scalars, numbers):
        return (x + numbers().astype(jnp.int32).astype(jnp.float32) * scalars[0],)

    leaves = [numbers_like((n, 16), n) for n in (3, 256, 700)]
    factors = jnp.float32([1, 2, 3])
    launched = jax.make_jaxpr(lambda *xs: _numbered(fn, xs, factors))(*leaves)
    assert str(launched).count("name=numbered") == 1
    for x, y, factor in zip(leaves, _numbered(fn, leaves, factors), factors, strict=True):
        same_bytes(y, x + jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape) * factor)


def _numbered(fn, leaves, factors):
    return [
        y for (y,) in group_map(fn, [(x,) for x in leaves], name="numbered", scalars=(factors,), numbered=True, interpret=True)
    ]


@interpreted
@pytest.mark.parametrize("groups, size, columns", [(3, 128, 128), (2, 16, 300)])
def test_groups_along_the_axis_before_the_last(groups, size, columns):
    def fn(x, s, *, numbers):
        return x * s[None], jnp.max(jnp.abs(x), axis=0), numbers()

    x, s = numbers_like((groups, size, columns)), numbers_like((groups, columns), 1)
    [(y, amax, numbers)] = group_map(fn, [(x, s)], name="columns", axis=-2, numbered=True, interpret=True)
    same_bytes((y, amax), (x * s[:, None], jnp.max(jnp.abs(x), axis=1)))
    same_bytes(numbers, rounding.element_index(x.shape))


@interpreted
def test_a_result_takes_its_operands_buffer():
    x, s = numbers_like((200, 128)), numbers_like((200,), 1)
    step = jax.jit(lambda x, s: group_map(scale_rows, [(x, s)], name="s", aliases={0: 0, 2: 1}, interpret=True)[0])
    same_bytes(step(x, s), scale_rows(x, s))


@interpreted
def test_vmap_is_more_groups_or_a_loop():
    x, s = numbers_like((2, 40, 16)), numbers_like((40,), 1)
    one = lambda x: group_map(scale_rows, [(x, s)], name="s", interpret=True)[0]  # noqa: E731
    same_bytes(jax.vmap(one)(x), jax.vmap(lambda x: scale_rows(x, s))(x))
    double = lambda x, f: _numbered(lambda x, *, scalars, numbers: (x * scalars[0],), [x], f[None])[0]  # noqa: E731
    same_bytes(jax.vmap(double)(x, jnp.float32([2, 3])), x * jnp.float32([2, 3])[:, None, None])


def test_what_it_cannot_do_is_said():
    with pytest.raises(ValueError, match="groups of 6 elements"):
        group_map(lambda x: (x,), [(jnp.ones((8, 6)),)], name="six")


@pytest.mark.parametrize("size", [4, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("axis", [-1, -2])
def test_numbers_per_group_are_stored_in_sixteens_and_never_beyond_a_row(axis, size):
    """A device stores contiguous numbers 16 bytes at a time and stops at the end of an array: a tile ends where a row does."""
    for count in (1, 24, 136, 384):
        values = jax.ShapeDtypeStruct((count, size) if axis == -1 else (3, size, count), jnp.bfloat16)
        tiles = Tiles.of(axis, (values,))
        padded = jax.eval_shape(tiles.pad, values).shape
        groups = padded[0] if axis == -1 else padded[-1]
        assert groups % 16 == 0 and tiles.extent % 16 == 0 and 0 <= groups - count < max(16, tiles.extent)
        assert axis == -1 or groups % tiles.extent == 0


SPECS = [
    QuantSpec(E4M3, PerGroup(16), scale_dtype=jnp.bfloat16),
    QuantSpec(E5M2, PerGroup(32)),
    QuantSpec(E4M3, PerGroup(128), PowerExpansion()),
    QuantSpec(E4M3, PerGroup(128), PowerExpansion(), "stochastic", keep_nonzero=True),
    QuantSpec(INT8, PerGroup(128), Softsign()),
    QuantSpec(UINT8, PerGroup(128), LogRange(), "stochastic", keep_nonzero=True),
]


def codec_functions(spec, axis):
    """encode(x) and decode(codes) of tiles, as a kernel takes them."""

    def encode(x, *, numbers=None):
        noise = None if numbers is None else rounding.uniform(7, numbers())
        return tuple(part for part in codec.encode(x.astype(jnp.float32), spec, (axis,), noise) if part is not None)

    def decode(payload, scale, exponent=None):
        return (codec.decode(codec.Codes(payload, scale, exponent), spec, (axis,)).astype(jnp.bfloat16),)

    return encode, decode


@interpreted
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_codes_and_values_are_those_of_plain_jax(spec, axis):
    size = spec.granularity.size
    x = numbers_like((70, size) if axis == -1 else (2, size, 136)).astype(jnp.bfloat16)
    x = abs(x) if spec.format is UINT8 else x
    encode, decode = codec_functions(spec, axis)
    numbered = spec.rounding == "stochastic"
    numbers = {"numbers": lambda: rounding.element_index(x.shape)} if numbered else {}
    [codes] = group_map(encode, [(x,)], name="encode", axis=axis, numbered=numbered, interpret=True)
    same_bytes(codes, jax.jit(lambda x: encode(x, **numbers))(x))
    [back] = group_map(decode, [codes], name="decode", axis=axis, interpret=True)
    same_bytes(back, jax.jit(decode)(*codes))
