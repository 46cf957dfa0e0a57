"""One step of many leaves: a kernel reads and writes each of them once where the program is for a Hopper GPU, else XLA.

Both run the group math of `coat_jax.optim.moments`. Leaves that look alike to a kernel (group axis and size, dtypes) share its
launches; leaves with float32 moments stay with XLA.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from coat_jax.optim import master, moments
from coat_jax.optim.master import Weight
from coat_jax.optim.moments import Elements, Hyper, Moments, Rate
from coat_jax.optim.step import Leaf, LeafUpdate, codec_of, groups_of, in_turn, merge, split
from coat_jax.quant import Groups, Implementation
from coat_jax.quant.implementation import choose, group_map, refusal, shareable
from pallas_kernels.partition import Labels, Place, Split, stretched

LEAVES = 8
"""Leaves in one launch at most: a kernel has code for the copies of each."""


class Task(NamedTuple):
    """What one leaf brings to a step: gradient, moments as they are kept, weight, rate, and the row that a leaf is, if one."""

    grad: jax.Array
    mu: Any
    nu: Any
    weight: Weight
    rate: Rate
    row: jax.Array | int | None


def update(
    stepper: LeafUpdate, tasks: Sequence[Task], names: Sequence[str], implementation: Implementation | str | None
) -> list[tuple[Weight, Any, Any]]:
    """The next weight of every leaf, and its mu and nu to keep.

    Raises:
      ValueError: an implementation that is unknown or cannot run.
    """
    done: list[Any] = []
    order: list[int] = []
    kinds = [_kind(stepper, task) for task in tasks]
    for kind in dict.fromkeys(kinds):
        members = [i for i, other in enumerate(kinds) if other == kind]
        size = len(members) if kind is None else LEAVES
        for some in (members[start : start + size] for start in range(0, len(members), size)):
            here, done[-1:] = _in_turn([tasks[i] for i in some], done[-1:])
            order += some
            done += _step(stepper, here, [names[i] for i in some], None if kind is None else implementation)
    return [done[order.index(i)] for i in range(len(tasks))]


def _in_turn(tasks: list[Task], last: list[Any]) -> tuple[list[Task], list[Any]]:
    """Tasks that can begin only when what the last one keeps is there."""
    if not last:
        return tasks, last
    inputs, last = in_turn([task[:3] for task in tasks], last)
    return [task._replace(grad=g, mu=mu, nu=nu) for (g, mu, nu), task in zip(inputs, tasks, strict=True)], last


def _kind(stepper: LeafUpdate, task: Task) -> Hashable:
    """What leaves in one launch have in common; None for a leaf with float32 moments."""
    codec = codec_of(stepper.codec, task.mu, task.nu)
    if not codec.quantizes:
        return None
    groups = groups_of(codec, task.grad.shape)
    dtypes = tuple(x.dtype for x in jax.tree.leaves(task[:4]))
    return codec, dtypes, max(groups.tile, default=1), _refusal(stepper, task, groups), shareable(groups)


def _refusal(stepper: LeafUpdate, task: Task, groups: Groups) -> str | None:
    if groups.ragged and _numbered(stepper, task):
        return "has no kernel that rounds the groups of a ragged leaf stochastically"
    return refusal(groups)


def _numbered(stepper: LeafUpdate, task: Task) -> bool:
    return stepper.codec.stochastic or (master.needs_noise(stepper.master) and master.splits(task.weight.param, stepper.master))


def _step(
    stepper: LeafUpdate, tasks: Sequence[Task], names: Sequence[str], implementation: Implementation | str | None
) -> list[tuple[Weight, Any, Any]]:
    """One step of leaves of one kind."""

    def at(hyper: Hyper) -> LeafUpdate:
        return LeafUpdate(stepper.codec, stepper.master, hyper)

    def plain(hyper: Hyper, tasks: Sequence[Task]) -> Any:
        done: list[Any] = []
        for name, task in zip(names, tasks, strict=True):
            (task,), done[-1:] = _in_turn([task], done[-1:])
            done.append(at(hyper).update(*task[:5], Leaf(name, task.row)))
        return done

    def kernel(hyper: Hyper, tasks: Sequence[Task], *, interpret: bool, places: Any = None) -> Any:
        spots = [Place.all(task.grad.shape) for task in tasks] if places is None else [task.grad for task in places[1]]
        kinds = [spot.stretch if _numbered(stepper, tasks[0]) else () for spot in spots]
        done: dict[int, Any] = {}
        for kind in dict.fromkeys(kinds):  # leaves that are cut along different axes number their elements in different ways
            here = [i for i, other in enumerate(kinds) if other == kind]
            some = [tasks[i] for i in here], [spots[i] for i in here], [names[i] for i in here]
            done |= zip(here, _launch(at(hyper), *some, interpret), strict=True)
        return [done[i] for i in range(len(tasks))]

    codec = codec_of(stepper.codec, tasks[0].mu, tasks[0].nu)
    if not codec.quantizes:
        return plain(stepper.hyper, tasks)
    groups = [groups_of(codec, task.grad.shape) for task in tasks]
    return choose(
        kernel,
        plain,
        stepper.hyper,
        list(tasks),
        operation="coat_adamw",
        implementation=implementation,
        refused=_refusal(stepper, tasks[0], groups[0]),
        split=_split(stepper.hyper, tasks) if shareable(groups[0]) else None,
    )


def _split(hyper: Hyper, tasks: Sequence[Task]) -> Split:
    """Devices may share every axis of a leaf."""

    def labels(parts: Sequence[Any]) -> tuple[Labels, ...]:
        return tuple(
            tuple((i, axis) for axis in range(jnp.ndim(x))) for i, part in enumerate(parts) for x in jax.tree.leaves(part)
        )

    kept = [(task.weight, task.mu, task.nu) for task in tasks]
    return Split((*labels(hyper), *labels(tasks)), labels(kept))


def _launch(
    stepper: LeafUpdate, tasks: Sequence[Task], spots: Sequence[Place], names: Sequence[str], interpret: bool
) -> list[tuple[Weight, Any, Any]]:
    """One launch of the kernel, for leaves or the parts of leaves at `spots`, which are cut alike."""
    codec = codec_of(stepper.codec, tasks[0].mu, tasks[0].nu)
    groups = [groups_of(codec, task.grad.shape) for task in tasks]
    laid = [
        (g.split(task.grad), Moments(split(task.mu, g), split(task.nu, g)), jax.tree.map(g.split, task.weight))
        for task, g in zip(tasks, groups, strict=True)
    ]
    tree = jax.tree.structure(laid[0])
    leaves = [Leaf(name, task.row) for name, task in zip(names, tasks, strict=True)]
    places = [(leaf.seed, leaf.offset(spot.whole) + spot.first) for leaf, spot in zip(leaves, spots, strict=True)]
    scalars = [jnp.broadcast_to(value, len(tasks)) for value in stepper.hyper]
    scalars += [jnp.stack(column) for column in zip(*(task.rate for task in tasks), strict=True)]
    scalars += [jnp.stack([jnp.asarray(x, jnp.uint32) for x in column]) for column in zip(*places, strict=True)]

    def step(*tiles, axes, scalars, numbers=None):
        grad, stored, weight = jax.tree.unflatten(tree, tiles)
        hyper, rate = Hyper(*scalars[: len(Hyper._fields)]), Rate(*scalars[len(Hyper._fields) : -2])

        def elements():
            return Elements(scalars[-2], None if numbers is None else stretched(numbers(), spots[0].stretch) + scalars[-1])

        # The weight comes first: what only it needs has left the registers when the moments are encoded.
        direction, new = moments.adam(grad.astype(jnp.float32), moments.decode(stored, codec, axes), hyper)
        weight = moments.update_weight(weight, direction, stepper.master, rate, hyper, elements())
        kept = moments.encode(new, codec, axes, grad == 0, hyper.count, elements())
        return tuple(jax.tree.leaves((kept, weight)))

    kept_tree = jax.tree.structure(laid[0][1:])
    done = group_map(
        step,
        [jax.tree.leaves(operands) for operands in laid],
        groups,
        name="coat_adamw",
        scalars=scalars,
        aliases={i: i + 1 for i in range(len(jax.tree.leaves(laid[0][1:])))},
        numbered=_numbered(stepper, tasks[0]),
        interpret=interpret,
    )
    results = []
    for arrays, g in zip(done, groups, strict=True):
        kept, weight = jax.tree.unflatten(kept_tree, arrays)
        results.append((jax.tree.map(g.merge, weight), merge(kept.mu, g, codec.mu), merge(kept.nu, g, codec.nu)))
    return results
