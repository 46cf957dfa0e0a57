"""An FP8 product of matrices with a scale for every 128 numbers along the contraction, in one kernel.

    y[i, j] = sum over blocks c of 128 along the contraction:  (a[i, c] . b[j, c]) sa[i, c] sb[j, c]

The tensor cores sum one block, in about 14 bits; the sum over blocks is float32 in registers. Of three warpgroups one copies
operands into shared memory, several blocks ahead, and two multiply, each half the rows of a tile. A program per multiprocessor
goes through many tiles, and copies the first blocks of the next while the last of this one are multiplied and stored.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.backend import pl, plgpu

DEPTH = 128
"""Numbers along the contraction that share a scale."""
ROWS = 64
"""Rows of a tile that one warpgroup multiplies: what one tensor core instruction takes."""
CONSUMERS = 2
"""Warpgroups that multiply."""
COLUMNS = (128, 64)
"""Columns that a tile may have, widest first: with 128 a thread holds 64 sums and 64 partial sums in registers."""
BAND = 8
"""Tiles of rows that the programs walk along together, so that the L2 cache holds what they read."""
REGISTERS = (40, 232)
"""Of each thread that copies, and that multiplies."""


@dataclasses.dataclass(frozen=True)
class ProductLaunch:
    """Everything static about one product.

    Attributes:
      shape: rows, columns and depth of the contraction.
      blocked: whether the right scales are one for 128 columns, or one for each.
      formats: dtypes of the left and the right operand.
      dtype: of the result.
      interpret: whether to run on the CPU.
      columns: of a tile.
    """

    shape: tuple[int, int, int]
    blocked: bool
    formats: tuple[Any, Any]
    dtype: Any
    interpret: bool
    columns: int

    @classmethod
    def of(
        cls, shape: tuple[int, int, int], blocked: bool, formats: tuple[Any, Any], dtype: Any, interpret: bool
    ) -> "ProductLaunch":
        """The launch with the widest tiles of which every multiprocessor gets one, or the narrowest."""
        launches = [cls(shape, blocked, formats, dtype, interpret, columns) for columns in COLUMNS]
        return next((launch for launch in launches if math.prod(launch.tiles) >= backend.SMS), launches[-1])

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a tile."""
        return CONSUMERS * ROWS, self.columns

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles along rows and columns."""
        return -(-self.shape[0] // self.tile[0]), -(-self.shape[1] // self.columns)

    @property
    def blocks(self) -> int:
        """Blocks along the contraction."""
        return -(-self.shape[2] // DEPTH)

    @property
    def programs(self) -> int:
        """Thread blocks to launch: one on each multiprocessor, two where they are interpreted."""
        return min(math.prod(self.tiles), 2 if self.interpret else backend.SMS)

    @property
    def result(self) -> int:
        """Bytes of a tile of the result."""
        return math.prod(self.tile) * jnp.dtype(self.dtype).itemsize

    @property
    def stages(self) -> int:
        """Blocks in flight: what shared memory holds beside a tile of the result."""
        return min(6, (backend.SHARED_MEMORY - self.result - 1024) // (sum(self.tile) * DEPTH))

    @property
    def moved(self) -> int:
        """Bytes of all copies, most of them from the L2 cache: two tiles of operands for every block of every tile."""
        scales = 4 * self.tile[0] + (4 if self.blocked else 4 * self.columns)
        return math.prod(self.tiles) * (self.blocks * (sum(self.tile) * DEPTH + scales) + self.result)

    def scratch(self) -> list[Any]:
        """Shared memory of the stages and of a tile of the result; for each stage a barrier for "filled" and one for "free"."""
        return [
            [
                backend.swizzled(self.stages, (extent, DEPTH), dtype)
                for extent, dtype in zip(self.tile, self.formats, strict=True)
            ],
            backend.swizzled(1, self.tile, self.dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=self.stages),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=self.stages),
        ]

    def place(self, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First row and column of this program's tile number `step`. Tiles are counted down the columns of a band of rows."""
        down, across = self.tiles
        tile = jax.lax.axis_index("program") + step * self.programs
        band, within = jax.lax.div(tile, BAND * across), jax.lax.rem(tile, BAND * across)
        height = jnp.minimum(down - band * BAND, BAND)
        row, column = band * BAND + jax.lax.rem(within, height), jax.lax.div(within, height)
        return row * self.tile[0], column * self.columns

    def body(self, *refs: Any) -> None:
        """The kernel: refs are operands, scales, the result, then the scratch."""
        left, right, left_scale, right_scale, result, stages, outs, filled, free = refs
        out = outs.at[0]
        program, warpgroup = jax.lax.axis_index("program"), jax.lax.axis_index("warpgroup")
        tiles = (math.prod(self.tiles) - program + self.programs - 1) // self.programs

        @pl.when(warpgroup == CONSUMERS)
        def _():
            plgpu.set_max_registers(REGISTERS[0], action="decrease")
            jax.lax.fori_loop(0, tiles, lambda step, _: self.fetch(step, (left, right), stages, filled, free), None)

        @pl.when(warpgroup < CONSUMERS)
        def _():
            plgpu.set_max_registers(REGISTERS[1], action="increase")
            for slot in range(self.stages):
                plgpu.barrier_arrive(free.at[slot])
            first = warpgroup * ROWS
            rows = pl.ds(first, ROWS)
            lefts = stages[0].at[:, rows]

            def tile(step, _):
                row, column = self.place(step)
                scales = self.factors((left_scale, right_scale), row + first, column)
                total = self.multiply(step, (lefts, stages[1]), scales, filled, free)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the store of the tile before has left this room
                out.at[rows][...] = total.astype(self.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out.at[rows], result.at[pl.ds(row + first, ROWS), pl.ds(column, self.columns)])

            jax.lax.fori_loop(0, tiles, tile, None)
            plgpu.wait_smem_to_gmem(0)

    def slot(self, step: jax.Array, k: jax.Array) -> jax.Array:
        """The stage that holds block k of tile number `step`."""
        return jax.lax.rem(step * self.blocks + k, self.stages)

    def fetch(self, step: jax.Array, operands: Sequence[Any], stages: Sequence[Any], filled: Any, free: Any) -> None:
        """Copies the blocks of a tile into shared memory, one after another as room becomes free."""

        def block(k, _):
            slot = self.slot(step, k)
            plgpu.barrier_wait(free.at[slot])
            for operand, stage, start, extent in zip(operands, stages, self.place(step), self.tile, strict=True):
                source = operand.at[pl.ds(start, extent), pl.ds(k * DEPTH, DEPTH)]
                plgpu.copy_gmem_to_smem(source, stage.at[slot], filled.at[slot])

        jax.lax.fori_loop(0, self.blocks, block, None)

    def multiply(self, step: jax.Array, stages: Sequence[Any], factor: Callable[..., Any], filled: Any, free: Any) -> jax.Array:
        """The sum over all blocks of this warpgroup's rows of a tile."""
        shape = (ROWS, self.columns)

        def block(k, total):
            slot = self.slot(step, k)
            spread = factor(k)  # on its way while the tensor cores work; used behind them
            plgpu.barrier_wait(filled.at[slot])

            def contract(sums):
                plgpu.wgmma(sums, stages[0].at[slot], stages[1].at[slot].T)
                return sums[...]

            part = pl.run_scoped(contract, plgpu.ACC(shape, jnp.float32))
            plgpu.barrier_arrive(free.at[slot])
            return total + part * spread()

        zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        return jax.lax.fori_loop(0, self.blocks, block, zero)

    def factors(self, scales: Sequence[Any], row: jax.Array, column: jax.Array) -> Callable[..., Any]:
        """k -> a function that gives the factors of block k: the rows and columns from (row, column), spread over a tile."""

        def spread(x, axis):
            return plgpu.layout_cast(jax.lax.broadcast_in_dim(x, (ROWS, self.columns), (axis,)), plgpu.Layout.WGMMA)

        def factor(k):
            down = backend.load(scales[0].at[k, pl.ds(row, ROWS)], plgpu.Layout.WGMMA.reduce(1))
            if self.blocked:
                number = scales[1][jax.lax.div(column, DEPTH), k]
                return lambda: spread(down * number, 0)
            across = backend.load(scales[1].at[k, pl.ds(column, self.columns)], plgpu.Layout.WGMMA.reduce(0))
            return lambda: spread(down, 0) * spread(across, 1)

        return factor


def scaled_product(
    a: jax.Array, b: jax.Array, a_scale: jax.Array, b_scale: jax.Array, *, dtype: Any, interpret: bool = False
) -> jax.Array:
    """y = a b^T of FP8 matrices that have a scale for every 128 numbers along the contraction.

    Args:
      a: (m, k) float8, contraction last ("K-major").
      b: (n, k) float8.
      a_scale: (m, k / 128) float32, the last block may be shorter.
      b_scale: (n, k / 128) float32, or (n / 128, k / 128) where 128 rows of b share one.
      dtype: of y, bfloat16 or float32.
      interpret: run on the CPU (jax 0.12), with the race detector.

    Returns:
      (m, n). The copy engine wants m in eights, n and k in 128s: other operands are padded, which copies them.

    Raises:
      ValueError: formats that this jax cannot mix, or `interpret` without an interpreter.

    Source: the two levels of accumulation are those of DeepSeek-V3, arXiv 2412.19437, section 3.3.2.
    """
    if a.dtype != b.dtype and not backend.can_mix_formats:
        raise ValueError(f"scaled_product: {a.dtype} times {b.dtype} needs jax 0.11; this is {jax.__version__}")
    m, n = a.shape[0], b.shape[0]
    blocked = b_scale.shape[0] != n
    a, b = _padded(a, 8, DEPTH), _padded(b, COLUMNS[0], DEPTH)
    b_scale = b_scale if blocked else _padded(b_scale, COLUMNS[0], 1).T
    shape = (a.shape[0], b.shape[0], a.shape[1])
    launch = ProductLaunch.of(shape, blocked, (a.dtype, b.dtype), jnp.dtype(dtype), interpret)
    call = backend.launch(
        launch.body,
        [jax.ShapeDtypeStruct(shape[:2], dtype)],
        launch.scratch(),
        {"program": launch.programs},
        warpgroups=CONSUMERS + 1,
        name="scaled_product",
        interpret=interpret,
        bytes_moved=launch.moved,
        flops=2 * math.prod(shape),
    )
    [y] = call(a, b, _padded(a_scale, launch.tile[0], 1).T, b_scale)
    return y if y.shape == (m, n) else y[:m, :n]


def _padded(x: jax.Array, *multiples: int) -> jax.Array:
    """x with zeros behind, up to multiples of these extents."""
    short = [(0, -extent % multiple) for extent, multiple in zip(x.shape, multiples, strict=True)]
    return jnp.pad(x, short) if any(after for _, after in short) else x
