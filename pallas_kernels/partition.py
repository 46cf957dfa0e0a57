"""Kernels in programs for several devices: each works on its own part of the arrays, and nothing is exchanged.

XLA's partitioner cannot look into a kernel. A `Split` tells it which axes may be cut, and `partitioned` gives it the kernel for
the parts that it has chosen.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule, custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

Labels = tuple[Hashable | None, ...]
Function = Callable[..., Any]


class Place(NamedTuple):
    """Where the part of an array that a device has lies in the whole.

    Attributes:
      start: index of its first element, a number per axis.
      part, whole: shapes.
    """

    start: tuple[jax.Array | int, ...]
    part: tuple[int, ...]
    whole: tuple[int, ...]

    @classmethod
    def all(cls, shape: tuple[int, ...]) -> "Place":
        """The place of an array that is not cut."""
        return cls((0,) * len(shape), shape, shape)

    @property
    def first(self) -> jax.Array:
        """uint32 row-major number, in the whole, of the first element."""
        strides = (math.prod(self.whole[axis + 1 :]) % 2**32 for axis in range(len(self.whole)))
        terms = (jnp.asarray(n, jnp.uint32) * jnp.uint32(stride) for n, stride in zip(self.start, strides, strict=True))
        return sum(terms, jnp.uint32(0))

    @property
    def stretch(self) -> tuple[tuple[int, int], ...]:
        """(period, skip)s: from one period of the part's elements to the next the whole has `skip` more."""
        found, ratio = [], 1
        for axis in reversed(range(len(self.part))):
            times = self.whole[axis] // self.part[axis]
            if times > 1 and math.prod(self.part[:axis]) > 1:
                period = math.prod(self.part[axis:])
                found.append((period, period * (times - 1) * ratio % 2**32))
            ratio *= times
        return tuple(found)


def stretched(numbers: jax.Array, stretch: Sequence[tuple[int, int]]) -> jax.Array:
    """uint32 numbers of a part's elements, counted in the whole from the part's first element on."""
    skipped = (numbers // jnp.uint32(period) * jnp.uint32(skip) for period, skip in stretch)
    return sum(skipped, numbers)


@dataclasses.dataclass(frozen=True)
class Split:
    """Which axes of a function's operands and results may be cut between devices.

    Attributes:
      operands, results: for every array a label per axis; None for an axis that a device needs whole. Axes with one label are
        cut alike; where one is k times as long as another, k of its elements stay together. Along an axis whose label no
        result has the function sums, and so do the devices that share it.
    """

    operands: tuple[Labels, ...]
    results: tuple[Labels, ...]

    @property
    def summed(self) -> tuple[Hashable, ...]:
        """Labels that no result has."""
        kept = set(itertools.chain(*self.results))
        return tuple(
            dict.fromkeys(label for label in itertools.chain(*self.operands) if label not in kept and label is not None)
        )

    def extents(self, shapes: Sequence[tuple[int, ...]]) -> dict[Hashable, int]:
        """How many pieces each label's axes have at most."""
        found: dict[Hashable, int] = {}
        for labels, shape in zip(self.operands + self.results, shapes, strict=True):
            for label, size in zip(labels, shape, strict=True):
                if label is not None:
                    found[label] = math.gcd(found.get(label, 0), size)
        return found

    def rule(self, shapes: Sequence[tuple[int, ...]]) -> SdyShardingRule:
        """The same for Shardy: a factor per label, and one that is never cut for what stays together."""
        extents = self.extents(shapes)
        names = {label: f"f{i}" for i, label in enumerate(extents)}
        sizes: dict[str, int] = {}
        whole: list[str] = []

        def mapping(labels: Labels, shape: tuple[int, ...]) -> ArrayMapping:
            factors: list[Any] = []
            for label, size in zip(labels, shape, strict=True):
                kept = size // extents.get(label, 1) if label is not None else size
                if label is None or kept > 1:
                    whole.append(f"w{len(whole)}")
                if label is None:
                    factors.append(whole[-1])
                elif kept == 1:
                    factors.append(names[label])
                else:
                    sizes.update({names[label]: extents[label], whole[-1]: kept})
                    factors.append(CompoundFactor(names[label], whole[-1]))
            return ArrayMapping(*factors)

        arrays = [mapping(*pair) for pair in zip(self.operands + self.results, shapes, strict=True)]
        alone = {factor for array in arrays for factor in array if isinstance(factor, str)}
        compound: dict[str, Any] = {name: size for name, size in sizes.items() if name not in alone}
        count = len(self.operands)
        return SdyShardingRule(
            tuple(arrays[:count]),
            tuple(arrays[count:]),
            reduction_factors=tuple(names[label] for label in self.summed),
            need_replication_factors=tuple(whole),
            **compound,
        )

    def axes(self, mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> dict[Hashable, Any]:
        """Mesh axes over which each label is cut: those of the first operand with that label that is cut at all."""
        extents = self.extents([x.shape for x in (*operands, *results)])
        found: dict[Hashable, Any] = {}
        for labels, x in zip(self.operands, operands, strict=True):
            if not any(label in found for label in labels):
                names = _named(mesh, x)
                pieces = (math.prod(mesh.shape[name] for name in some) for some in names)
                fit = [label is not None and extents[label] % many == 0 for label, many in zip(labels, pieces, strict=True)]
                if any(names):
                    found |= {label: some for label, some, good in zip(labels, names, fit, strict=True) if good}
        return dict.fromkeys([None, *extents], ()) | found


def _named(mesh: Any, x: Any) -> list[tuple[str, ...]]:
    """For every axis of an array the mesh axes that cut it; none where its sharding is not of that kind."""
    for axes in itertools.product(range(-1, len(x.shape)), repeat=len(mesh.axis_names)):
        names = [tuple(name for name, on in zip(mesh.axis_names, axes, strict=True) if on == i) for i in range(len(x.shape))]
        if NamedSharding(mesh, PartitionSpec(*names)).is_equivalent_to(x.sharding, len(x.shape)):
            return names
    return [()] * len(x.shape)


def partitioned(kernel: Function, plain: Function, split: Split) -> Function:
    """A function that computes kernel(*parts, places=places) on each device of a program for several.

    Args:
      kernel: of flat arrays, and of the `Place` of each as the keyword `places`; returns flat results.
      plain: the same function of whole arrays, for its shapes.
      split: which axes may be cut.
    """

    def places(axes: Mapping[Hashable, Any], wholes: Sequence[Any], parts: Sequence[Any]) -> list[Place]:
        def start(label: Hashable | None, size: int) -> jax.Array | int:
            return jax.lax.axis_index(axes[label]) * size if axes[label] else 0

        return [
            Place(tuple(map(start, labels, part.shape)), part.shape, whole.shape)
            for labels, whole, part in zip(split.operands, wholes, parts, strict=True)
        ]

    def shardings(mesh: Any, axes: Mapping[Hashable, Any], labels: Sequence[Labels]) -> tuple[NamedSharding, ...]:
        return tuple(NamedSharding(mesh, PartitionSpec(*(axes[label] for label in some))) for some in labels)

    def partition(mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        axes = split.axes(mesh, operands, results)

        def here(*parts: jax.Array) -> tuple[jax.Array, ...]:
            done = tuple(kernel(*parts, places=places(axes, operands, parts)))
            over = tuple(itertools.chain(*(axes[label] for label in split.summed)))
            return jax.lax.psum(done, over) if over else done

        return mesh, here, shardings(mesh, axes, split.results), shardings(mesh, axes, split.operands)

    def infer(mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        return shardings(mesh, split.axes(mesh, operands, results), split.results)

    def rule(mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> SdyShardingRule:
        return split.rule([tuple(kind.shape) for kind in (*operands, *results)])

    call = custom_partitioning(lambda *xs: tuple(plain(*xs)))
    call.def_partition(partition, infer_sharding_from_operands=infer, sharding_rule=rule, decode_shardings=False)
    return call
