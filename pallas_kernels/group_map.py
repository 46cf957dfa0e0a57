"""The skeleton of the row-wise kernels: load tiles of whole groups, apply a function, store tiles. One pass over memory.

    results[g] = fn(operands[g])   for every group g, tile by tile

The function is ordinary jnp on a tile and may reduce over the axis along which groups lie; where groups make rows, it sees
one row and may reduce over all of it.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp
from jax.interpreters import batching, mlir

from pallas_kernels.jaxprs import Untraced
from pallas_kernels.pipeline import GroupLaunch, Leaf, Struct
from pallas_kernels.tiles import Tiles


def group_map(
    fn: Callable[..., tuple[jax.Array, ...]],
    leaves: Sequence[Sequence[jax.Array]],
    *,
    name: str,
    axis: int = -1,
    columns: int | None = None,
    scalars: Sequence[jax.Array] = (),
    shared: Sequence[jax.Array] = (),
    aliases: Mapping[int, int] | None = None,
    row: int | None = None,
    sums: int = 0,
    numbered: bool = False,
    blocks: int = 4,
    interpret: bool = False,
) -> list[Leaf]:
    """Applies fn to the groups of every leaf, in one launch and one pass over memory.

    Args:
      fn: tiles of operands to a tuple of tiles of results, plain jnp. Tiles are (rows, width) and (rows,) for axis -1 and
        (size, columns) and (columns,) for axis -2. With `scalars`, `shared` and `numbered` it takes keywords.
      leaves: operands of each leaf, all leaves of one structure: (groups, width) and (groups,) arrays for axis -1,
        (groups, size, columns) and (groups, columns) for axis -2. Any dtype of 8, 16 or 32 bits; width a multiple of 4.
      name: name of the kernel in profiles.
      axis: -1 where groups lie along the last axis of an operand, -2 where they lie along the one before.
      columns: with axis -2, how many columns a group spans besides (16, 32, 64, 128 or 256); None is one.
      scalars: arrays of one number per leaf; fn gets this leaf's as `scalars`.
      shared: (row, width) arrays; fn gets them for every row as `shared`, functions without arguments.
      aliases: result -> operand of the same shape and dtype whose buffer it takes.
      row: with axis -1, how many groups make a row of the one leaf, of which fn then sees one at a time: (row, width) and
        (row,). So many that numbers per group of a row take 16, 32, ... bytes; of 16 elements a multiple of 8. None for groups
        that make no rows.
      sums: how many of fn's results, the last ones, (row, width) and float32, are summed over the rows.
      numbered: give fn `numbers`, a function without arguments: the uint32 row-major number of every element in its operand.
        (A function, so that they take registers only from where they are used.)
      blocks: how many blocks of 128 threads share a multiprocessor at most. It has 65,536 registers: 4 blocks of 128 for each
        thread, 3 of 168, 2 of 255. The compiler's count is in the static table.
      interpret: run on the CPU (jax 0.12), with the race detector.

    Returns:
      The results of each leaf; of one that is summed, the (programs, row, width) sums of every program.

    Raises:
      ValueError: a width that is not a multiple of 4, or `interpret` without an interpreter.

    Example:
      >>> double = lambda x: (2 * x,)
      >>> [(y,)] = group_map(double, [(jnp.ones((64, 16)),)], name="double", interpret=True)
    """
    places = tuple((aliases or {}).get(i) for i in range(64))
    flat, tree = jax.tree.flatten((tuple(map(tuple, leaves)), tuple(scalars), tuple(shared)))

    def launch(*flat):
        leaves, scalars, shared = jax.tree.unflatten(tree, flat)
        tiles = Tiles.of(axis, leaves[0], columns, row)
        padded = [tuple(leaf if row else map(tiles.pad, leaf)) for leaf in leaves]
        structs = tuple(tuple(Struct(x.shape, x.dtype) for x in leaf) for leaf in padded)
        values = next(i for i, x in enumerate(leaves[0]) if x.ndim == 1 - axis)
        widths = tuple(leaf[values].shape[-1] for leaf in leaves)

        def tile(*operands):
            keywords: dict[str, Any] = {"scalars": tuple(s[0] for s in scalars)} if scalars else {}
            if numbered:
                keywords["numbers"] = lambda: jnp.zeros(operands[values].shape, jnp.uint32)
            if shared:
                keywords["shared"] = tuple((lambda x=x: x) for x in shared)
            return fn(*operands, **keywords)

        outs = jax.eval_shape(tile, *(Struct(tiles.seen(a.shape), a.dtype) for a in structs[0]))
        stored, summed = outs[: len(outs) - sums], outs[len(outs) - sums :]
        results = tuple(tuple(Struct(tiles.whole(o.shape, leaf[0].shape), o.dtype) for o in stored) for leaf in structs)
        given, totals = (tuple(Struct(x.shape, x.dtype) for x in xs) for xs in (shared, summed))
        kept = places[: len(stored)]
        plan = GroupLaunch(fn, tiles, structs, results, widths, kept, numbered, given, totals, name, interpret, blocks)
        ran = plan.run(padded, scalars, shared)
        return [
            tuple(Tiles.crop(y, leaf[0], axis) for y in done[: len(stored)]) + done[len(stored) :]
            for done, leaf in zip(ran, leaves, strict=True)
        ]

    fold = 0 if scalars or numbered or sums else len(jax.tree.leaves(list(leaves)))
    if interpret:  # the interpreter's callbacks are effects, which a primitive would have to declare
        return _batchable(launch, fold)(*flat)
    traced = jax.jit(launch)  # once: for the shapes of results here and below, and when the program is lowered
    out = jax.eval_shape(traced, *flat)
    results = launch_p.bind(*flat, launch=Untraced(lambda *xs: jax.tree.leaves(traced(*xs))), fold=fold)
    return jax.tree.unflatten(jax.tree.structure(out), results)


def _over_batch(call: Callable[..., Any], fold: int, flat: Sequence[jax.Array], axes: Sequence[int | None]) -> Any:
    """A batch of launches: more groups of the first `fold` operands in one, or a loop where fn knows where it is."""
    [size] = {x.shape[axis] for x, axis in zip(flat, axes, strict=True) if axis is not None}
    if not fold or any(axis is not None for axis in axes[fold:]):
        fold = 0
    full = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in list(zip(flat, axes, strict=True))[: fold or None]
    ]
    if not fold:
        return jax.lax.map(lambda xs: call(*xs), tuple(full))
    folded = call(*(x.reshape(-1, *x.shape[2:]) for x in full), *flat[fold:])
    return jax.tree.map(lambda y: y.reshape(size, -1, *y.shape[1:]), folded)


def _batchable(launch: Callable[..., Any], fold: int) -> Callable[..., Any]:
    call = jax.custom_batching.custom_vmap(launch)

    @call.def_vmap
    def rule(size, batched, *flat):
        out = _over_batch(call, fold, flat, [0 if b else None for b in batched])
        return out, jax.tree.map(lambda _: True, out)

    return call


# A launch is a primitive of its own, so that `jax.vmap` makes more groups of it and nothing looks into its references.
launch_p = jex.core.Primitive("group_map")
launch_p.multiple_results = True


def _abstract(*flat: Any, launch: Untraced, fold: int) -> list[Any]:
    del fold
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in jax.eval_shape(launch.kernel, *flat)]


def _batch(flat: Sequence[jax.Array], axes: Sequence[int | None], *, launch: Untraced, fold: int) -> Any:
    results = _over_batch(functools.partial(launch_p.bind, launch=launch, fold=fold), fold, flat, axes)
    return results, [0] * len(results)


launch_p.def_abstract_eval(_abstract)
launch_p.def_impl(lambda *flat, launch, fold: jax.jit(launch.kernel)(*flat))
mlir.register_lowering(launch_p, lambda ctx, *flat, launch, fold: mlir.lower_fun(jax.jit(launch.kernel), True)(ctx, *flat))
batching.primitive_batchers[launch_p] = _batch
