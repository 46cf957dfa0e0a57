"""The skeleton of the row-wise kernels: load tiles of whole groups, apply a function, store tiles. One pass over memory.

    results[g] = fn(operands[g])   for every group g, tile by tile

The function is ordinary jnp on a tile and may reduce over the axis along which groups lie. Tiles travel by asynchronous
copies: some in flight while one is computed and up to two are stored. There are as many programs as the device holds.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp
from jax.interpreters import batching, mlir

from pallas_kernels import backend
from pallas_kernels.annotate import annotated
from pallas_kernels.backend import pl, plgpu
from pallas_kernels.tiles import Tiles

Struct = jax.ShapeDtypeStruct
Leaf = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Launch:
    """Everything static about one launch.

    Attributes:
      fn: tiles (and, as keywords, `scalars` and `numbers`) to a tuple of tiles.
      tiles: how arrays are cut.
      operands: shapes and dtypes of every leaf's operands.
      results: shapes and dtypes of every leaf's results.
      columns: extent of the last axis of every leaf's values, without padding.
      aliases: for each result the operand that it overwrites, or None.
      numbered: whether fn takes `numbers`.
      name: name of the kernel in profiles and compiled programs.
      interpret: whether to run on the CPU.
    """

    fn: Callable[..., tuple[jax.Array, ...]]
    tiles: Tiles
    operands: tuple[tuple[Struct, ...], ...]
    results: tuple[tuple[Struct, ...], ...]
    columns: tuple[int, ...]
    aliases: tuple[int | None, ...]
    numbered: bool
    name: str
    interpret: bool

    @property
    def starts(self) -> list[int]:
        """Number of the first tile of every leaf, and the number of tiles."""
        return [0, *itertools.accumulate(self.tiles.count(leaf[0].shape) for leaf in self.operands)]

    @property
    def stages(self) -> int:
        """Tiles in flight: three where two blocks still share a multiprocessor, else two."""
        return 3 if 2 * self.shared_memory(3) < backend.SHARED_MEMORY else 2

    def shared_memory(self, stages: int) -> int:
        """Bytes that a block needs for `stages` tiles of operands and two of results."""
        operands, results = (
            sum(math.prod(self.tiles.shape(a.shape)) * a.dtype.itemsize for a in arrays[0])
            for arrays in (self.operands, self.results)
        )
        return stages * operands + 2 * results + 1024

    @property
    def programs(self) -> int:
        """Blocks to launch: as many as the device holds, two where they are interpreted."""
        held = min(4, max(1, backend.SHARED_MEMORY // self.shared_memory(self.stages)))
        return min(self.starts[-1], 2 if self.interpret else held * backend.SMS)

    @property
    def moved(self) -> int:
        """Bytes of all copies from and to global memory, the whole tiles at ragged ends included."""
        tile = sum(math.prod(self.tiles.shape(a.shape)) * a.dtype.itemsize for a in self.operands[0] + self.results[0])
        return self.starts[-1] * tile

    def scratch(self) -> list[Any]:
        """Shared memory of the tiles, and one barrier per stage."""
        kept = [(self.stages, a) for a in self.operands[0]] + [(2, a) for a in self.results[0]]
        smem = [plgpu.SMEM((count, *self.tiles.shape(a.shape)), a.dtype) for count, a in kept]
        return [*smem, plgpu.Barrier(num_arrivals=len(self.operands[0]), num_barriers=self.stages)]

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

    def compute(self, tile: jax.Array, operands: Sequence[Any], scalars: Sequence[Any]) -> tuple[jax.Array, ...]:
        """fn of one tile of operands in shared memory."""
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
        loaded = [backend.load(ref, layouts[ref.shape]) for ref in operands]
        return annotated(lambda *tiles: self.fn(*tiles, **keywords), layouts)(*loaded)

    def body(self, *refs: Any, scalars: int) -> None:
        """The kernel: refs are the scalars, every leaf's operands, every leaf's fresh results, then the scratch."""
        n, m = len(self.operands[0]), len(self.results[0])
        rest = iter(refs)
        scalar_refs = _take(rest, scalars)
        sources = [_take(rest, n) for _ in self.operands]
        targets = [[source[a] if a is not None else next(rest) for a in self.aliases] for source in sources]
        loaded, stored, barriers = _take(rest, n), _take(rest, m), next(rest)
        first, stride, stages = jax.lax.axis_index("program"), self.programs, self.stages
        mine = (self.starts[-1] - first + stride - 1) // stride  # tiles of this program: first, first + stride, ...

        def fetch(step, slot):
            def copy(leaf, tile):
                for source, target in zip(sources[leaf], loaded, strict=True):
                    plgpu.copy_gmem_to_smem(self.tiles.at(tile, source), target.at[slot], barriers.at[slot])

            self.for_leaf(first + step * stride, copy)

        def step(number, _):
            slot, out = jax.lax.rem(number, stages), jax.lax.rem(number, 2)
            tile = first + number * stride
            plgpu.barrier_wait(barriers.at[slot])
            results = self.compute(tile, [ref.at[slot] for ref in loaded], scalar_refs)
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the store before the last one has left this slot
            for ref, value in zip(stored, results, strict=True):
                ref.at[out][...] = value
            plgpu.commit_smem()

            def copy(leaf, tile):
                for source, target in zip(stored, targets[leaf], strict=True):
                    plgpu.copy_smem_to_gmem(source.at[out], self.tiles.at(tile, target), commit_group=False)

            self.for_leaf(tile, copy)
            plgpu.commit_smem_to_gmem_group()
            pl.when(number + stages < mine)(lambda: fetch(number + stages, slot))

        for slot in range(stages):
            pl.when(slot < mine)(functools.partial(fetch, slot, slot))
        jax.lax.fori_loop(0, mine, step, None)
        plgpu.wait_smem_to_gmem(0)

    def run(self, leaves: Sequence[Leaf], scalars: Sequence[jax.Array]) -> list[Leaf]:
        """Launches the kernel; operands that results overwrite are updated in place where their buffers are free."""
        held = [[jax.new_ref(x) if i in self.aliases else x for i, x in enumerate(leaf)] for leaf in leaves]
        fresh = [r for leaf in self.results for r, a in zip(leaf, self.aliases, strict=True) if a is None]
        body = functools.partial(self.body, scalars=len(scalars))
        options = {"name": self.name, "interpret": self.interpret, "bytes_moved": self.moved}
        call = backend.launch(body, fresh, self.scratch(), {"program": self.programs}, **options)
        made = iter(call(*scalars, *itertools.chain(*held)))
        return [tuple(next(made) if a is None else leaf[a][...] for a in self.aliases) for leaf in held]


def _take(items: Iterator[Any], count: int) -> list[Any]:
    """The next `count` items."""
    return list(itertools.islice(items, count))


def group_map(
    fn: Callable[..., tuple[jax.Array, ...]],
    leaves: Sequence[Sequence[jax.Array]],
    *,
    name: str,
    axis: int = -1,
    columns: int | None = None,
    scalars: Sequence[jax.Array] = (),
    aliases: Mapping[int, int] | None = None,
    numbered: bool = False,
    interpret: bool = False,
) -> list[Leaf]:
    """Applies fn to the groups of every leaf, in one launch and one pass over memory.

    Args:
      fn: tiles of operands to a tuple of tiles of results, plain jnp. Tiles are (rows, width) and (rows,) for axis -1 and
        (size, columns) and (columns,) for axis -2. With `scalars` and `numbered` it takes keywords of those names.
      leaves: operands of each leaf, all leaves of one structure: (groups, width) and (groups,) arrays for axis -1,
        (groups, size, columns) and (groups, columns) for axis -2. Any dtype of 8, 16 or 32 bits; width a multiple of 4.
      name: name of the kernel in profiles.
      axis: -1 where groups lie along the last axis of an operand, -2 where they lie along the one before.
      columns: with axis -2, how many columns a group spans besides (16, 32, 64, 128 or 256); None is one.
      scalars: arrays of one number per leaf; fn gets this leaf's as `scalars`.
      aliases: result -> operand of the same shape and dtype whose buffer it takes.
      numbered: give fn `numbers`, a function without arguments: the uint32 row-major number of every element in its operand.
        (A function, so that they take registers only from where they are used.)
      interpret: run on the CPU (jax 0.12), with the race detector.

    Returns:
      The results of each leaf.

    Raises:
      ValueError: a width that is not a multiple of 4, or `interpret` without an interpreter.

    Example:
      >>> double = lambda x: (2 * x,)
      >>> [(y,)] = group_map(double, [(jnp.ones((64, 16)),)], name="double", interpret=True)
    """
    places = tuple((aliases or {}).get(i) for i in range(64))
    flat, tree = jax.tree.flatten((tuple(map(tuple, leaves)), tuple(scalars)))

    def launch(*flat):
        leaves, scalars = jax.tree.unflatten(tree, flat)
        padded = [tuple(Tiles.pad(x, axis) for x in leaf) for leaf in leaves]
        structs = tuple(tuple(Struct(x.shape, x.dtype) for x in leaf) for leaf in padded)
        tiles = Tiles.of(axis, structs[0], columns)
        values = next(i for i, x in enumerate(leaves[0]) if x.ndim == 1 - axis)
        widths = tuple(leaf[values].shape[-1] for leaf in leaves)

        def tile(*operands):
            keywords: dict[str, Any] = {"scalars": tuple(s[0] for s in scalars)} if scalars else {}
            if numbered:
                keywords["numbers"] = lambda: jnp.zeros(operands[values].shape, jnp.uint32)
            return fn(*operands, **keywords)

        outs = jax.eval_shape(tile, *(Struct(tiles.shape(a.shape), a.dtype) for a in structs[0]))
        results = tuple(tuple(Struct(tiles.whole(o.shape, leaf[0].shape), o.dtype) for o in outs) for leaf in structs)
        plan = Launch(fn, tiles, structs, results, widths, places[: len(outs)], numbered, name, interpret)
        ran = plan.run(padded, scalars)
        return [tuple(Tiles.crop(y, leaf[0], axis) for y in done) for done, leaf in zip(ran, leaves, strict=True)]

    fold = not (scalars or numbered)
    if interpret:  # the interpreter's callbacks are effects, which a primitive would have to declare
        return _batchable(launch, fold)(*flat)
    out = jax.eval_shape(launch, *flat)
    results = launch_p.bind(*flat, launch=lambda *xs: jax.tree.leaves(launch(*xs)), fold=fold)
    return jax.tree.unflatten(jax.tree.structure(out), results)


def _over_batch(call: Callable[..., Any], fold: bool, flat: Sequence[jax.Array], axes: Sequence[int | None]) -> Any:
    """A batch of launches: more groups in one, or a loop where fn knows where it is."""
    [size] = {x.shape[axis] for x, axis in zip(flat, axes, strict=True) if axis is not None}
    full = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(flat, axes, strict=True)
    ]
    if not fold:
        return jax.lax.map(lambda xs: call(*xs), tuple(full))
    return jax.tree.map(lambda y: y.reshape(size, -1, *y.shape[1:]), call(*(x.reshape(-1, *x.shape[2:]) for x in full)))


def _batchable(launch: Callable[..., Any], fold: bool) -> Callable[..., Any]:
    call = jax.custom_batching.custom_vmap(launch)

    @call.def_vmap
    def rule(size, batched, *flat):
        out = _over_batch(call, fold, flat, [0 if b else None for b in batched])
        return out, jax.tree.map(lambda _: True, out)

    return call


# A launch is a primitive of its own, so that `jax.vmap` makes more groups of it and nothing looks into its references.
launch_p = jex.core.Primitive("group_map")
launch_p.multiple_results = True


def _abstract(*flat: Any, launch: Callable[..., Any], fold: bool) -> list[Any]:
    del fold
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in jax.eval_shape(launch, *flat)]


def _batch(flat: Sequence[jax.Array], axes: Sequence[int | None], *, launch: Callable[..., Any], fold: bool) -> Any:
    results = _over_batch(functools.partial(launch_p.bind, launch=launch, fold=fold), fold, flat, axes)
    return results, [0] * len(results)


launch_p.def_abstract_eval(_abstract)
launch_p.def_impl(lambda *flat, launch, fold: jax.jit(launch)(*flat))
mlir.register_lowering(launch_p, lambda ctx, *flat, launch, fold: mlir.lower_fun(jax.jit(launch), True)(ctx, *flat))
batching.primitive_batchers[launch_p] = _batch
