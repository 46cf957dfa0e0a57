"""One step of many leaves: a kernel reads and writes each of them once where the program is for a Hopper GPU, else XLA.

Both run the group math of `coat_jax.optim.adam_formula`. Leaves that look alike to a kernel (group axis and size, dtypes) share
its launches; leaves with float32 moments stay with XLA.
"""

import functools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coat_jax.optim import adam_formula, master
from coat_jax.optim.adam_formula import Hyper, Moments, Rate
from coat_jax.optim.codecs import MomentCodec
from coat_jax.optim.leaves import leaf_seed
from coat_jax.optim.master import Master
from coat_jax.optim.step import Leaf, codec_of, first_number, groups_of, in_turn, merge, split, step_leaves
from coat_jax.quant import Groups, Implementation
from coat_jax.quant.implementation import Operation, choose, group_map, refusal, shareable
from pallas_kernels.partition import Labels, Place, Split, stretched

LEAVES = 8
"""Leaves of different shapes in one launch at most: a kernel has code for the copies of each."""
ALIKE = 4
"""Leaves of one shape in one launch at most, where there are so many that launches look alike: the fewer, the faster a kernel
compiles."""


def update(
    leaves: Sequence[Leaf],
    names: Sequence[str],
    codec: MomentCodec,
    keep: Master | None,
    hyper: Hyper,
    implementation: Implementation | str | None,
) -> list[tuple[Any, Any, Any]]:
    """The next weight of every leaf, or its direction (float32) where it has no weight, and its mu and nu to keep.

    Raises:
      ValueError: an implementation that is unknown or cannot run.
    """
    done: list[Any] = []
    order: list[int] = []
    seeds = np.array([leaf_seed(name) for name in names])
    for some in _batches(leaves, [_kind(leaf, codec, keep) for leaf in leaves]):
        here, done[-1:] = in_turn([leaves[i] for i in some], done[-1:])
        order += some
        done += _step(here, seeds[some], hyper, codec=codec, keep=keep, implementation=implementation)
    return [done[order.index(i)] for i in range(len(leaves))]


def _batches(leaves: Sequence[Leaf], kinds: Sequence[Hashable]) -> Iterator[list[int]]:
    """Which leaves share a launch: of one kind, and so that launches look alike and are traced and compiled once.

    75 leaves of one shape are 25 launches of 3. Leaves of shapes that are rare lie together in launches of 8.
    """
    for kind in dict.fromkeys(kinds):
        members = [i for i, other in enumerate(kinds) if other == kind]
        shapes: dict[Any, list[int]] = {}
        for i in members:
            shapes.setdefault(leaves[i].grad.shape, []).append(i)
        rare: list[int] = []
        for alike in shapes.values():
            if len(alike) < LEAVES:
                rare += alike
                continue
            size = next((n for n in range(ALIKE, 1, -1) if len(alike) % n == 0), ALIKE)
            yield from (alike[i : i + size] for i in range(0, len(alike), size))
        yield from (sorted(rare)[i : i + LEAVES] for i in range(0, len(rare), LEAVES))


def _kind(leaf: Leaf, codec: MomentCodec, keep: Master | None) -> Hashable:
    """What leaves in one launch have in common; None for a leaf with float32 moments."""
    own = codec_of(codec, leaf.mu, leaf.nu)
    if not own.quantizes:
        return None
    groups = groups_of(own, leaf.grad.shape)
    dtypes = tuple(x.dtype for x in jax.tree.leaves(leaf[:4]))
    return own, dtypes, max(groups.tile, default=1), _refusal(leaf, codec, keep, groups), shareable(groups)


def _refusal(leaf: Leaf, codec: MomentCodec, keep: Master | None, groups: Groups) -> str | None:
    if groups.ragged and _numbered(leaf, codec, keep):
        return "has no kernel that rounds the groups of a ragged leaf stochastically"
    return refusal(groups)


def _numbered(leaf: Leaf, codec: MomentCodec, keep: Master | None) -> bool:
    return codec.stochastic or (leaf.weight is not None and master.needs_noise(leaf.weight.param, keep))


@functools.partial(jax.jit, static_argnames=("codec", "keep", "implementation"))
def _step(
    leaves: list[Leaf],
    seeds: jax.Array,
    hyper: Hyper,
    *,
    codec: MomentCodec,
    keep: Master | None,
    implementation: Implementation | str | None,
) -> list[tuple[Any, Any, Any]]:
    """One step of leaves of one kind. Traced once for batches that look alike, whatever their names."""
    numbered = _numbered(leaves[0], codec, keep)

    def plain(hyper: Hyper, leaves: Sequence[Leaf], seeds: jax.Array) -> Any:
        return step_leaves(leaves, seeds, codec, keep, hyper)

    def kernel(hyper: Hyper, leaves: Sequence[Leaf], seeds: jax.Array, *, interpret: bool, places: Any = None) -> Any:
        spots = [Place.all(leaf.grad.shape) for leaf in leaves] if places is None else [leaf.grad for leaf in places[1]]
        kinds = [spot.stretch if numbered else () for spot in spots]
        done: dict[int, Any] = {}
        for kind in dict.fromkeys(kinds):  # leaves that are cut along different axes number their elements in different ways
            here = [i for i, other in enumerate(kinds) if other == kind]
            some = [leaves[i] for i in here], [spots[i] for i in here], [seeds[i] for i in here]
            done |= zip(here, _launch(*some, codec, keep, hyper, interpret), strict=True)
        return [done[i] for i in range(len(leaves))]

    own = codec_of(codec, leaves[0].mu, leaves[0].nu)
    if not own.quantizes:
        return plain(hyper, leaves, seeds)
    groups = groups_of(own, leaves[0].grad.shape)
    return choose(
        kernel,
        plain,
        hyper,
        leaves,
        seeds,
        operation=Operation.ADAMW,
        implementation=implementation,
        refused=_refusal(leaves[0], codec, keep, groups),
        split=_split(hyper, leaves, seeds) if shareable(groups) else None,
    )


def _split(hyper: Hyper, leaves: Sequence[Leaf], seeds: jax.Array) -> Split:
    """Devices may share every axis of a leaf."""

    def labels(parts: Sequence[Any]) -> tuple[Labels, ...]:
        return tuple(
            tuple((i, axis) for axis in range(jnp.ndim(x))) for i, part in enumerate(parts) for x in jax.tree.leaves(part)
        )

    kept = [(leaf.grad if leaf.weight is None else leaf.weight, leaf.mu, leaf.nu) for leaf in leaves]
    return Split((*labels(hyper), *labels(leaves), (None,) * seeds.ndim), labels(kept))


def _launch(
    leaves: Sequence[Leaf],
    spots: Sequence[Place],
    seeds: Sequence[jax.Array],
    codec: MomentCodec,
    keep: Master | None,
    hyper: Hyper,
    interpret: bool,
) -> list[tuple[Any, Any, Any]]:
    """One launch of the kernel, for leaves or the parts of leaves at `spots`, which are cut alike."""
    numbered = _numbered(leaves[0], codec, keep)
    codec = codec_of(codec, leaves[0].mu, leaves[0].nu)
    groups = [groups_of(codec, leaf.grad.shape) for leaf in leaves]
    laid = [
        (g.split(leaf.grad), Moments(split(leaf.mu, g), split(leaf.nu, g)), jax.tree.map(g.split, leaf.weight))
        for leaf, g in zip(leaves, groups, strict=True)
    ]
    tree = jax.tree.structure(laid[0])
    # What differs from leaf to leaf reaches the kernel as scalars, one of each for every leaf: hyper, rate, seed, first number.
    scalars = [jnp.broadcast_to(value, len(leaves)) for value in hyper]
    scalars += [jnp.stack(column) for column in zip(*(leaf.rate or () for leaf in leaves), strict=True)]
    firsts = [first_number(spot.whole, leaf.row) + spot.first for leaf, spot in zip(leaves, spots, strict=True)]
    scalars += [jnp.stack([jnp.asarray(x, jnp.uint32) for x in column]) for column in (seeds, firsts)]

    def step(*tiles, axes, scalars, numbers=None):
        grad, stored, weight = jax.tree.unflatten(tree, tiles)
        *rest, seed, first = scalars
        hyper, rate = Hyper(*rest[: len(Hyper._fields)]), rest[len(Hyper._fields) :]
        noise = adam_formula.noise_of(
            seed, lambda: stretched(numbers(), spots[0].stretch) + first, hyper.count, codec.antithetic
        )

        def follow(direction):
            return direction if weight is None else adam_formula.next_weight(weight, direction, keep, Rate(*rate), hyper, noise)

        followed, kept = adam_formula.step(grad, stored, codec, axes, hyper, noise, follow)
        return tuple(jax.tree.leaves((kept, followed)))

    gradient, stored, weight = laid[0]
    results_tree = jax.tree.structure((stored, gradient if weight is None else weight))
    done = group_map(
        step,
        [jax.tree.leaves(operands) for operands in laid],
        groups,
        name="coat_adamw",
        scalars=scalars,
        aliases={i: i + 1 for i in range(len(jax.tree.leaves((stored, weight))))},
        numbered=numbered,
        blocks=2,  # of 151 to 226 registers for each thread
        interpret=interpret,
    )
    results = []
    for arrays, g in zip(done, groups, strict=True):
        kept, followed = jax.tree.unflatten(results_tree, arrays)
        results.append((jax.tree.map(g.merge, followed), merge(kept.mu, g, codec.mu), merge(kept.nu, g, codec.nu)))
    return results
