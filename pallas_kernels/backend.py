"""The one place that names Pallas: version differences, launching, the interpreter, and register layouts.

Works with the Mosaic GPU backend of jax 0.10.2 to 0.12. Its interpreter came with 0.12.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

SMS = 132
"""Streaming multiprocessors of an H100 SXM and of an H200."""
SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that a block of a Hopper GPU may have."""
RESERVED = 1024
"""Bytes that a block takes besides. A multiprocessor has 228 KiB: one block of 227, or three of 75."""
BUFFER = 1024
"""Bytes of which the start of every buffer in shared memory is a multiple."""

ALIGNMENT = 128
"""Bytes of which every place in shared memory that the copy engine (TMA) reads or writes is a multiple: elsewhere the device
stops with a misaligned address, which neither the compiler nor the interpreter sees."""

can_interpret = hasattr(plgpu, "InterpretGPUParams")
"""Whether this jax can run kernels on the CPU."""
has_sqrt = jax.__version_info__ >= (0, 12)
"""Whether the backend lowers a square root; before, it is x times the reciprocal root."""
can_mix_formats = jax.__version_info__ >= (0, 11)
"""Whether the tensor cores can be given E4M3 and E5M2 in one product."""
_INDEX = inspect.signature(plgpu.load).parameters.get("idx")
_LOAD_INDEX = ((),) if _INDEX is not None and _INDEX.default is inspect.Parameter.empty else ()


def launch(body: Callable[..., None], out_types: Sequence[Any], scratch: Sequence[Any], grid: dict[str, int], **options: Any):
    """A function of arrays or Refs that runs `body(*operand_refs, *result_refs, *scratch_refs)` over a grid.

    Args:
      body: kernel body; a Ref among the operands may be written as well as read, and then its array is updated in place.
      out_types: `jax.ShapeDtypeStruct`s of the results.
      scratch: shared memory and barriers.
      grid: axis names and sizes.
      options: `name` of the kernel in profiles; `bytes_moved`, for XLA's schedule and for reading it from a compiled program;
        `interpret` runs it on the CPU; `warpgroups` that each block has, known in the body by the axis "warpgroup".

    Raises:
      ValueError: `interpret` on a jax without the interpreter.
    """
    interpret, warpgroups = options.pop("interpret", False), options.pop("warpgroups", None)
    if interpret and not can_interpret:
        raise ValueError(f"interpret: jax {jax.__version__} cannot interpret Mosaic GPU kernels; use jax 0.12, or plain XLA")
    cost = pl.CostEstimate(flops=options.pop("flops", 0), transcendentals=0, bytes_accessed=options.pop("bytes_moved"))
    threads = {} if warpgroups is None else {"num_threads": warpgroups, "thread_name": "warpgroup"}
    shared = {} if warpgroups is None else {"collective_axes": "warpgroup"}
    call = pl.kernel(
        lambda *refs: pl.run_scoped(lambda *scratch_refs: body(*refs, *scratch_refs), *scratch, **shared),
        tuple(out_types),
        mesh=plgpu.Mesh(grid=tuple(grid.values()), grid_names=tuple(grid), **threads),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        cost_estimate=cost,
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
        **options,
    )

    def in_32_bits(*args: Any) -> Any:
        with jax.enable_x64(False):  # the body counts in 32 bits, also where a program's own integers have 64
            return call(*args)

    return in_32_bits


def load(ref: Any, layout: Any) -> jax.Array:
    """Shared memory into registers, in a named layout."""
    return plgpu.load(ref, *_LOAD_INDEX, layout=layout, optimized=False)


def _row_in_lanes(width: int, rows: int = 0) -> tuple[int, int]:
    """Lanes that share a row, and neighbours that each of them has: at most eight lanes of four, so that a row's maximum is
    three shuffles, unless `rows` asks for more rows than that leaves to a warpgroup."""
    lanes = math.gcd(width, 32) // 4
    if not lanes:
        raise ValueError(f"group_map: groups of {width} elements; a kernel takes multiples of 4 (COAT: 16 and 128)")
    neighbours = 4
    while rows % (4 * 32 // lanes) and lanes < 32 and width % (2 * lanes) == 0:
        lanes *= 2
        neighbours = math.gcd(width // lanes, 4)
    return lanes, neighbours


def rows_per_warpgroup(width: int) -> int:
    """Rows of a (rows, width) tile that four warps hold at a time."""
    return 4 * 32 // _row_in_lanes(width)[0]


def rows_layout(width: int, rows: int) -> Any:
    """Registers of a (rows, width) tile in which a row lies in the lanes of one warp; rows of 8, 16, ..."""
    lanes, neighbours = _row_in_lanes(width, rows)
    if lanes == 32:  # a warp has one row
        tiling = plgpu.Tiling(((4, 32 * neighbours), (neighbours,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    tiling = plgpu.Tiling(((128 // lanes, neighbours * lanes), (32 // lanes, neighbours * lanes), (neighbours,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def columns_layout(columns: int) -> Any:
    """Registers of a (size, columns) tile in which a column lies in the lanes of one warp; 16, 32, 64, 128 or 256 columns."""
    vector = min(4, columns // 16)  # neighbours per lane, so that no two lanes meet in a bank of shared memory
    across = min(columns, 128) // (4 * vector)  # lanes; the others go down a column
    down = 32 // across
    tiling = plgpu.Tiling(((down, 4 * across * vector), (down, across * vector), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1)


def slots(count: int, shape: tuple[int, ...], dtype: Any, *, multiple: int = ALIGNMENT, **transforms: Any) -> Any:
    """Shared memory for `count` tiles one behind another, each in a place that the copy engine can reach.

    A buffer begins at a multiple of 1024 bytes, so slot i of 16 float32 numbers would begin at 64 i: slot 1 is out of reach. 32
    numbers, of which 16 are used, put it at 128.

    Args:
      count: slots.
      shape, dtype: of one.
      multiple: bytes that a slot's place is a multiple of: more than 128 where its bytes are swizzled.
      transforms: of `plgpu.SMEM`.

    Raises:
      ValueError: a slot of other than a multiple of so many bytes.
    """
    size = math.prod(shape) * jnp.dtype(dtype).itemsize
    if size % multiple and count > 1:
        raise ValueError(f"slots: {jnp.dtype(dtype)}{list(shape)} takes {size} bytes; copies need a multiple of {multiple}")
    return plgpu.SMEM((count, *shape), dtype, **transforms)


def swizzled(count: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """`slots` in the order in which tensor cores and copies meet no bank conflicts: pieces of 8 x 128 bytes."""
    # What an abstract class leaves out here, Pallas never calls.
    piece = plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize))  # type: ignore[abstract]
    swizzle = plgpu.SwizzleTransform(128)  # type: ignore[abstract]
    return slots(count, shape, dtype, multiple=8 * 128, transforms=(piece, swizzle))
