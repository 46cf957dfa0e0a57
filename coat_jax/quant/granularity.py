"""Which elements of an array share one scale: the shapes, and how to split an array into groups and merge it back."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp

Shape = tuple[int, ...]


class Granularity(Protocol):
    """A way to cut an array into groups. `split` shows the groups along `axes`; `merge` is its inverse."""

    def tile(self, shape: Shape) -> Shape:
        """Extent of one group in each dimension of `shape`."""
        ...


@dataclasses.dataclass(frozen=True)
class PerTensor:
    """One scale for the whole array."""

    def tile(self, shape: Shape) -> Shape:
        """The whole shape."""
        return shape

    def __str__(self) -> str:
        return "tensor"


@dataclasses.dataclass(frozen=True)
class PerGroup:
    """One scale for every `size` neighbours along `axis`; the last group of a row may be shorter.

    Attributes:
      size: elements in a group.
      axis: the axis along which groups run, counted from the end (-1 is the last).

    Raises:
      ValueError: `size` < 1 or `axis` >= 0.
    """

    size: int
    axis: int = -1

    def __post_init__(self):
        if self.size < 1:
            raise ValueError(f"PerGroup: size={self.size} elements in a group; use 1 or more (COAT: 16 and 128)")
        if self.axis >= 0:
            raise ValueError(f"PerGroup: axis={self.axis}; count axes from the end: -1 is the last, -2 the one before")

    def tile(self, shape: Shape) -> Shape:
        """1 everywhere, `size` (or the axis if that is shorter) along `axis`."""
        if not shape:
            return ()
        if -self.axis > len(shape):
            raise ValueError(f"PerGroup: axis={self.axis} does not exist in shape {shape}; use -{len(shape)} to -1")
        tile = [1] * len(shape)
        tile[self.axis] = max(1, min(self.size, shape[self.axis]))
        return tuple(tile)

    def __str__(self) -> str:
        return f"group {self.size}" + (f" along axis {self.axis}" if self.axis != -1 else "")


@dataclasses.dataclass(frozen=True)
class PerBlock:
    """One scale for every block over the last axes, (128, 128) for weights; blocks at the edges may be smaller.

    Raises:
      ValueError: a block extent below 1, or more extents than the array has axes.
    """

    block: tuple[int, ...] = (128, 128)

    def __post_init__(self):
        object.__setattr__(self, "block", tuple(self.block))
        if not self.block or min(self.block) < 1:
            raise ValueError(f"PerBlock: block={self.block}; every extent must be 1 or more, as in (128, 128)")

    def tile(self, shape: Shape) -> Shape:
        """1 over leading axes, the block (cut to the array) over the last ones."""
        lead = len(shape) - len(self.block)
        if lead < 0:
            raise ValueError(f"PerBlock: block={self.block} needs {len(self.block)} axes, shape {shape} has {len(shape)}")
        block = (max(1, min(b, n)) for b, n in zip(self.block, shape[lead:], strict=True))
        return (1,) * lead + tuple(block)

    def __str__(self) -> str:
        return "block " + "x".join(map(str, self.block))


@dataclasses.dataclass(frozen=True)
class Groups:
    """The view of one array shape under one granularity, for `split`, `merge` and the shapes in between.

    Attributes:
      shape: shape of the array.
      tile: extent of a group in every dimension.
    """

    shape: Shape
    tile: Shape

    @classmethod
    def of(cls, granularity: Granularity, shape: Sequence[int]) -> "Groups":
        """The groups into which `granularity` cuts an array of `shape`."""
        return cls(tuple(shape), granularity.tile(tuple(shape)))

    @property
    def scale_shape(self) -> Shape:
        """Shape of the scales: as many axes as the array, one entry per group."""
        return tuple(-(-n // t) if t else 0 for n, t in zip(self.shape, self.tile, strict=True))

    def _split_dims(self) -> list[tuple[int, ...]]:
        """For each dimension, the dimensions it becomes: (n,) where groups do not run, (groups, extent) where they do."""
        rows = zip(self.shape, self.tile, self.scale_shape, strict=True)
        return [(count,) if t == 1 else (count, t) for _, t, count in rows]

    @property
    def axes(self) -> tuple[int, ...]:
        """Axes of the split array along which the elements of one group lie, counted from the end."""
        axes, position = [], 0
        for dims in reversed(self._split_dims()):
            if len(dims) == 2:
                axes.append(-1 - position)
            position += len(dims)
        return tuple(reversed(axes))

    @property
    def split_shape(self) -> Shape:
        """Shape of the split array; over `axes` it reduces to `scale_shape`."""
        return tuple(n for dims in self._split_dims() for n in dims)

    @property
    def ragged(self) -> bool:
        """Whether some groups are shorter than others, so that splitting fills them."""
        return any(n % t for n, t in zip(self.shape, self.tile, strict=True) if t)

    def split(self, x: jax.Array) -> jax.Array:
        """x (shape) as groups (split_shape); ragged ends are filled with zeros, which no scale notices."""
        pads = [(0, count * t - n) for n, t, count in zip(self.shape, self.tile, self.scale_shape, strict=True)]
        if any(right for _, right in pads):
            x = jnp.pad(x, pads)
        return x.reshape(self.split_shape)

    def merge(self, groups: jax.Array) -> jax.Array:
        """The inverse of `split`: groups (split_shape) as an array (shape), fill dropped."""
        padded = [count * t for t, count in zip(self.tile, self.scale_shape, strict=True)]
        x = groups.reshape(padded)
        return x if tuple(padded) == self.shape else x[tuple(slice(n) for n in self.shape)]


def count(granularity: Granularity, shape: Sequence[int]) -> int:
    """Number of groups, and so of scales, in an array of `shape`."""
    return math.prod(Groups.of(granularity, shape).scale_shape)
