"""Copies between global and shared memory land where a device takes them: at multiples of 128 bytes, in PTX, for every size of
group and every kind of tile. (`tests/bench/test_kernels.py` asks the same of every kernel of the library.)"""

import copies
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import backend
from pallas_kernels.group_map import group_map
from pallas_kernels.tiles import Tiles

BF16, F32, U8 = jnp.bfloat16, jnp.float32, jnp.uint8
# What kernels read and write, per group: values, payloads, and numbers of the group. The second moves more than 6 bytes per
# element, so that its tiles are smaller, as those of an optimizer's step are.
OPERANDS = {"a codec": ((BF16, U8), (BF16, F32, U8)), "a step": ((BF16, U8, U8, BF16, U8), (F32, U8, F32, U8))}
SIZES = (16, 32, 48, 64, 96, 128, 256)
ROWS = {16: (16, 256), 32: (16, 80), 64: (16, 64), 128: (8, 32, 40), 256: (16, 32)}
"""Size of a group -> groups of a row, as norms have them."""


def copied(axis, row=None):
    """A launch that copies its operands in and out."""
    return lambda *leaf: group_map(lambda *xs: tuple(xs), [leaf], name="copies", axis=axis, row=row)[0]


def arrays(axis, groups, size, values, numbers):
    """The operands of a launch: so many groups, or so many columns of 64 groups."""
    shape, statistics = ((groups, size), (groups,)) if axis == -1 else ((64, size, groups), (64, groups))
    return [jax.ShapeDtypeStruct(shape, t) for t in values] + [jax.ShapeDtypeStruct(statistics, t) for t in numbers]


def launches(size):
    """A launch for each kind of tile, with its operands. Every program gets many tiles."""
    found = [
        (copied(axis), arrays(axis, 2**16 if axis == -1 else 1024, size, *kinds))
        for kinds in OPERANDS.values()
        for axis in (-1, -2)
    ]
    for row in ROWS.get(size, ()):  # numbers of a row take a multiple of 16 bytes
        numbers = (BF16,) if row % 16 else (BF16, U8)
        found.append((copied(-1, row), arrays(-1, 4096 * row, size, (BF16, U8), numbers)))
    return found


@pytest.mark.plan
@pytest.mark.parametrize("size", SIZES)
def test_every_copy_has_a_place_that_is_a_multiple_of_128(size):
    from coat_jax.bench.compiled import reported

    made = launches(size)
    _, text = reported(lambda leaves: [run(*leaf) for (run, _), leaf in zip(made, leaves, strict=True)], [a for _, a in made])
    assert text.count(".visible .entry") == len(made)
    assert not copies.misaligned(text)


@pytest.mark.plan
def test_tiles_one_behind_another_without_room_between_are_seen(monkeypatch):
    """16 groups of a step, as tiles lay when nothing was rounded up: stage 1 at 64 bytes, and at 16."""
    from coat_jax.bench.compiled import reported

    monkeypatch.setattr(Tiles, "slot", lambda self, array, itemsize: self.shape(array))
    monkeypatch.setattr(backend, "slots", lambda count, shape, dtype: backend.plgpu.SMEM((count, *shape), dtype))
    _, text = reported(copied(-1), *arrays(-1, 2**16, 128, *OPERANDS["a step"]))
    places = {known.low % 128 for _, known in copies.copies(text)}
    assert copies.misaligned(text) and {16, 64} <= places


def test_a_slot_that_copies_could_not_reach_is_refused():
    with pytest.raises(ValueError, match="float32\\[16\\] takes 64 bytes; copies need a multiple of 128"):
        backend.slots(2, (16,), F32)
    with pytest.raises(ValueError, match="takes 512 bytes; copies need a multiple of 1024"):
        backend.swizzled(3, (4, 128), U8)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("size", [*SIZES, 4, 8, 24])
def test_slots_hold_their_tiles_and_no_more_than_128_bytes_besides(axis, size):
    for values, numbers in OPERANDS.values():
        leaf = arrays(axis, 512, size, values, numbers)
        tiles = Tiles.of(axis, tuple(leaf))
        for x in leaf:
            itemsize = x.dtype.itemsize
            used, held = (jax.ShapeDtypeStruct(s, x.dtype) for s in (tiles.shape(x.shape), tiles.slot(x.shape, itemsize)))
            assert held.size * itemsize % 128 == 0 and held.shape[1:] == used.shape[1:]
            assert 0 <= (held.size - used.size) * itemsize < 128 * max(1, used.size // used.shape[0])


def test_bits_of_places_are_followed_along_every_path():
    """A loop that adds 64 to a place: what it begins with is a multiple of 128, what it goes on with is not."""
    kernel = """.version 9.0
.visible .entry kernel()
    mov.b64 %rd1, __dynamic_shmem__0;
    mov.b64 %rd2, %rd1;
$L__BB0_1:
    cvt.u32.u64 %r1, %rd2;
    @%p1 cp.async.bulk.tensor.1d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd9, {%r2}], [%r3];
    add.s64 %rd2, %rd2, STEP;
    @%p2 bra $L__BB0_1;
    mul.wide.s32 %rd3, %r7, STEP;
    add.s64 %rd4, %rd3, 8192;
    cvt.u32.u64 %r4, %rd4;
    @%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd8, {%r2, %r2} ], [%r4];
    ret;
"""
    assert len(copies.misaligned(kernel.replace("STEP", "64"))) == 2
    assert not copies.misaligned(kernel.replace("STEP", "128"))
    assert len(copies.misaligned(kernel.replace("STEP", "128"), 256)) == 2
