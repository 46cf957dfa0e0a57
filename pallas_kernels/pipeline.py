"""One launch of the skeleton: what is static about it, the loop that loads, computes and stores tiles, and the start.

Tiles travel by asynchronous copies: some in flight while one is computed and up to two are stored. There are as many programs
as the device holds.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.annotate import annotated
from pallas_kernels.backend import pl, plgpu
from pallas_kernels.tiles import Tiles

Struct = jax.ShapeDtypeStruct
Leaf = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class GroupLaunch:
    """Everything static about one launch.

    Attributes:
      fn: tiles (and, as keywords, `scalars`, `numbers` and `shared`) to a tuple of tiles.
      tiles: how arrays are cut.
      operands: shapes and dtypes of every leaf's operands.
      results: shapes and dtypes of every leaf's results.
      columns: extent of the last axis of every leaf's values, without padding.
      aliases: for each result the operand that it overwrites, or None.
      numbered: whether fn takes `numbers`.
      shared: shapes and dtypes of what every tile is given.
      sums: shapes and dtypes of the results that are summed over all tiles of a program.
      name: name of the kernel in profiles and compiled programs.
      interpret: whether to run on the CPU.
      blocks: blocks of one multiprocessor at most: as many as its registers hold.
    """

    fn: Callable[..., tuple[jax.Array, ...]]
    tiles: Tiles
    operands: tuple[tuple[Struct, ...], ...]
    results: tuple[tuple[Struct, ...], ...]
    columns: tuple[int, ...]
    aliases: tuple[int | None, ...]
    numbered: bool
    shared: tuple[Struct, ...]
    sums: tuple[Struct, ...]
    name: str
    interpret: bool
    blocks: int = 4

    @property
    def starts(self) -> list[int]:
        """Number of the first tile of every leaf, and the number of tiles."""
        return [0, *itertools.accumulate(self.tiles.count(leaf[0].shape) for leaf in self.operands)]

    @property
    def stages(self) -> int:
        """Tiles in flight: three where two blocks still share a multiprocessor, else two."""
        return 3 if self.held(3) > 1 else 2

    def shared_memory(self, stages: int) -> int:
        """Bytes that a block takes for `stages` tiles of operands and two of results: whole KiB for each buffer.

        In groups of 16, quantize has tiles of 256 groups: three of bfloat16 numbers, 8 KiB each, two of payloads, 4 KiB, and
        two of bfloat16 scales, half a KiB: 33 KiB, and 2 for barriers and what warps exchange in reductions.
        """
        tiles = [(stages, a) for a in self.operands[0]] + [(2, a) for a in self.results[0]]
        sizes = [count * math.prod(self.tiles.slot(a.shape, a.dtype.itemsize)) * a.dtype.itemsize for count, a in tiles]
        sizes += [a.size * a.dtype.itemsize for a in self.shared + self.sums]
        return sum(-(-size // backend.BUFFER) * backend.BUFFER for size in sizes) + 2 * backend.BUFFER

    def held(self, stages: int) -> int:
        """Blocks that a multiprocessor has the shared memory for."""
        return (backend.SHARED_MEMORY + backend.RESERVED) // (self.shared_memory(stages) + backend.RESERVED)

    @property
    def programs(self) -> int:
        """Blocks to launch: as many as the device holds at once, two where they are interpreted.

        One more would wait for a whole block to end, and then run by itself: of 3 blocks where 2 fit, the third makes the
        launch half as long again.
        """
        most = min(2 if self.sums else self.blocks, max(1, self.held(self.stages)))
        return min(self.starts[-1], 2 if self.interpret else most * backend.SMS)

    @property
    def moved(self) -> int:
        """Bytes of all copies from and to global memory, the whole tiles at ragged ends included."""
        tile = sum(math.prod(self.tiles.shape(a.shape)) * a.dtype.itemsize for a in self.operands[0] + self.results[0])
        return self.starts[-1] * tile + self.programs * sum(a.size * a.dtype.itemsize for a in self.shared + self.sums)

    def scratch(self) -> list[Any]:
        """Shared memory of the tiles, and one barrier per stage."""
        kept = [(self.stages, a) for a in self.operands[0]] + [(2, a) for a in self.results[0]]
        smem = [backend.slots(count, self.tiles.slot(a.shape, a.dtype.itemsize), a.dtype) for count, a in kept]
        once = [plgpu.SMEM(a.shape, a.dtype) for a in self.shared + self.sums]
        arrivals = [(len(self.operands[0]) * self.tiles.copies, self.stages), (len(self.shared) * self.row.copies, 1)]
        return [*smem, *once, *(plgpu.Barrier(num_arrivals=n, num_barriers=count) for n, count in arrivals if n)]

    @property
    def row(self) -> Tiles:
        """The tiles of one row."""
        return dataclasses.replace(self.tiles, extent=self.tiles.part)

    def slot(self, buffers: Sequence[Any], slot: Any, arrays: Sequence[Struct]) -> list[Any]:
        """The tiles of arrays in one slot of their buffers."""
        return [self.tiles.held(ref, slot, a.shape) for ref, a in zip(buffers, arrays, strict=True)]

    def for_leaf(self, tile: jax.Array, act: Callable[[int, jax.Array], None]) -> None:
        """act(leaf, its own number of the tile) for the one leaf that owns the tile."""
        for leaf, (start, stop) in enumerate(itertools.pairwise(self.starts)):
            if len(self.operands) == 1:
                act(leaf, tile)
            else:
                pl.when((tile >= start) & (tile < stop))(functools.partial(act, leaf, tile - start))

    def of_leaf(self, tile: jax.Array, values: Sequence[int]) -> jax.Array | int:
        """The one of `values`, a number per leaf, of the leaf that owns the tile."""
        chosen: Any = values[0]
        for start, value in zip(self.starts[1:-1], values[1:], strict=True):
            chosen = jnp.where(tile >= start, value, chosen)
        return chosen

    def compute(
        self, tile: jax.Array, operands: Sequence[Any], shared: Sequence[Any], scalars: Sequence[Any]
    ) -> tuple[jax.Array, ...]:
        """fn of one tile, or one row of it, of operands in shared memory."""
        layouts = self.tiles.layouts(ref.shape for ref in operands if len(ref.shape) == 2)
        values = next(iter(layouts))
        keywords: dict[str, Any] = {}
        if scalars:
            leaf = self.of_leaf(tile, range(len(self.operands)))
            keywords["scalars"] = tuple(ref[leaf] for ref in scalars)
        if self.numbered:
            first = self.of_leaf(tile, self.starts[:-1])
            columns = self.of_leaf(tile, self.columns)
            keywords["numbers"] = lambda: self.tiles.numbers(tile - first, values, columns)
        if shared:
            keywords["shared"] = tuple(functools.partial(backend.load, ref, layouts[values]) for ref in shared)
        loads = [functools.partial(backend.load, ref, layouts[ref.shape]) for ref in operands]
        wide = self.tiles.axis == -1 and math.prod(values) > 4096  # no registers for both sides of a row's statistic
        return annotated(lambda *tiles: self.fn(*tiles, **keywords), layouts, again=wide)(*loads)

    def compute_tile(self, tile: jax.Array, operands: Sequence[Any], results: Sequence[Any], once: Any, scalars: Any) -> None:
        """Computes a tile row by row, from shared memory to shared memory; what is summed is added to its sum."""
        shared, sums = once
        size, parts = self.tiles.part, self.tiles.parts

        def row(number: Any, _: None) -> None:
            operand, result = (
                [ref if parts == 1 else ref.at[pl.ds(number * size, size)] for ref in refs] for refs in (operands, results)
            )
            values = self.compute(tile, operand, shared, scalars)
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the store before the last one has left this slot
            for ref, value in zip(result, values, strict=False):
                ref[...] = value
            layouts = self.tiles.layouts(ref.shape for ref in sums)
            for ref, value in zip(sums, values[len(results) :], strict=True):
                ref[...] = backend.load(ref, layouts[ref.shape]) + value

        if parts == 1:
            row(0, None)
        else:
            rows = self.operands[0][0].shape[0] // size
            jax.lax.fori_loop(0, jnp.minimum(parts, rows - tile * parts), row, None)

    def body(self, *refs: Any, scalars: int) -> None:
        """The kernel: refs are the scalars, what is shared, every leaf's operands, every leaf's fresh results, the sums, then
        the scratch."""
        n, m = len(self.operands[0]), len(self.results[0])
        rest = iter(refs)
        scalar_refs, shared = _take(rest, scalars), _take(rest, len(self.shared))
        sources = [_take(rest, n) for _ in self.operands]
        targets = [[source[a] if a is not None else next(rest) for a in self.aliases] for source in sources]
        totals = _take(rest, len(self.sums))
        loaded, stored = _take(rest, n), _take(rest, m)
        once, barriers = (_take(rest, len(self.shared)), _take(rest, len(self.sums))), next(rest)
        first, stride, stages = jax.lax.axis_index("program"), self.programs, self.stages
        mine = (self.starts[-1] - first + stride - 1) // stride  # tiles of this program: first, first + stride, ...

        def load(tiles, tile, pairs, barrier):
            for source, target in pairs:
                for piece, held in tiles.pieces(tile, source, target):
                    plgpu.copy_gmem_to_smem(piece, held, barrier)

        def store(tiles, tile, pairs):
            plgpu.commit_smem()
            for source, target in pairs:
                for piece, held in tiles.pieces(tile, target, source):
                    plgpu.copy_smem_to_gmem(held, piece, commit_group=False)

        def fetch(step, slot):
            slots, barrier = self.slot(loaded, slot, self.operands[0]), barriers.at[slot]
            copy = lambda leaf, tile: load(self.tiles, tile, zip(sources[leaf], slots, strict=True), barrier)  # noqa: E731
            self.for_leaf(first + step * stride, copy)

        def step(number, _):
            slot, out = jax.lax.rem(number, stages), jax.lax.rem(number, 2)
            tile = first + number * stride
            plgpu.barrier_wait(barriers.at[slot])
            results = self.slot(stored, out, self.results[0])
            self.compute_tile(tile, self.slot(loaded, slot, self.operands[0]), results, once, scalar_refs)
            copy = lambda leaf, tile: store(self.tiles, tile, zip(results, targets[leaf], strict=True))  # noqa: E731
            self.for_leaf(tile, copy)
            plgpu.commit_smem_to_gmem_group()
            pl.when(number + stages < mine)(lambda: fetch(number + stages, slot))

        for slot in range(stages):
            pl.when(slot < mine)(functools.partial(fetch, slot, slot))
        if shared:
            loading = next(rest)
            load(self.row, 0, zip(shared, once[0], strict=True), loading)
            plgpu.barrier_wait(loading)
        layouts = self.tiles.layouts(ref.shape for ref in once[1])
        for ref in once[1]:
            ref[...] = plgpu.layout_cast(jnp.zeros(ref.shape, ref.dtype), layouts[ref.shape])
        jax.lax.fori_loop(0, mine, step, None)
        if totals:
            store(self.row, first, zip(once[1], totals, strict=True))
            plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0)

    def run(self, leaves: Sequence[Leaf], scalars: Sequence[jax.Array], shared: Sequence[jax.Array]) -> list[Leaf]:
        """Launches the kernel; operands that results overwrite are updated in place where their buffers are free."""
        held = [[jax.new_ref(x) if i in self.aliases else x for i, x in enumerate(leaf)] for leaf in leaves]
        fresh = [r for leaf in self.results for r, a in zip(leaf, self.aliases, strict=True) if a is None]
        fresh += [Struct((self.programs * a.shape[0], *a.shape[1:]), a.dtype) for a in self.sums]
        body = functools.partial(self.body, scalars=len(scalars))
        options = {"name": self.name, "interpret": self.interpret, "bytes_moved": self.moved}
        call = backend.launch(body, fresh, self.scratch(), {"program": self.programs}, **options)
        made = iter(call(*scalars, *shared, *itertools.chain(*held)))
        stored = [tuple(next(made) if a is None else leaf[a][...] for a in self.aliases) for leaf in held]
        totals = tuple(y.reshape(self.programs, *a.shape) for y, a in zip(made, self.sums, strict=True))
        return [leaf + totals for leaf in stored]


def _take(items: Iterator[Any], count: int) -> list[Any]:
    """The next `count` items."""
    return list(itertools.islice(items, count))
