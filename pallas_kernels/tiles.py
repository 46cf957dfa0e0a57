"""How arrays of groups are cut into tiles: shapes, places, register layouts, and what the copy engine asks of them."""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.backend import pl

Shape = tuple[int, ...]

PIECE = 256
"""Groups that the copy engine takes in one piece."""
ROWS = 16
"""Groups whose numbers, of one byte or more each, the copy engine stores."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tiles of whole groups.

    Attributes:
      axis: -1, arrays are (groups, width) and (groups,); or -2, arrays are (groups, size, columns) and (groups, columns).
      extent: groups (axis -1) or columns (axis -2) in one tile.
      part: groups of the tile that the function sees at a time; all, or those of one row.
    """

    axis: int
    extent: int
    part: int

    @classmethod
    def of(cls, axis: int, operands: tuple[Any, ...], columns: int | None = None, row: int | None = None) -> "Tiles":
        """The tile for a function of `operands`: `columns` of them where a group spans so many, whole rows where `row` groups
        make one, else 8192 elements, 2048 where they move more than 6 bytes each: a function of so many operands has as many
        values alive, and 2048 is what no function here spills at."""
        if columns is not None:
            return cls(axis, columns, columns)
        widths = [a.shape[-1] if axis == -1 else a.shape[-2] for a in operands if a.ndim == 1 - axis]
        elements = 8192 if sum(a.dtype.itemsize for a in operands) <= 6 else 2048
        if row is not None:
            return cls(axis, row * max(1, 4096 // (row * max(widths))), row)
        if axis == -2:
            extent = next((n for n in (128, 64, 32) if n * max(widths) <= elements), 16)
        else:
            least = max(backend.rows_per_warpgroup(width) for width in widths)
            extent = min(PIECE, max(least, elements // max(widths) // least * least))
        return cls(axis, extent, extent)

    def count(self, shape: Shape) -> int:
        """Number of tiles of an operand."""
        return -(-shape[0] // self.extent) if self.axis == -1 else shape[0] * -(-shape[-1] // self.extent)

    def shape(self, array: Shape) -> Shape:
        """Shape of one tile of an array."""
        return (self.extent, *array[1:]) if self.axis == -1 else (*array[1:-1], self.extent)

    def slot(self, array: Shape, itemsize: int) -> Shape:
        """Shape of the shared memory for a tile of an array: the tile, with rows behind it where it takes no multiple of 128
        bytes. 16 float32 numbers have room for 32, 16 of one byte for 128; `held` is the part that is used."""
        rows, *rest = self.shape(array)
        multiple = backend.ALIGNMENT // math.gcd(math.prod(rest) * itemsize, backend.ALIGNMENT)
        return (-(-rows // multiple) * multiple, *rest)

    def held(self, slots: Any, number: Any, array: Shape) -> Any:
        """The tile of an array in slot `number` of shared memory."""
        rows = self.shape(array)[0]
        return slots.at[number] if slots.shape[1] == rows else slots.at[number, pl.ds(0, rows)]

    def whole(self, tile: Shape, operand: Shape) -> Shape:
        """Shape of the array whose tiles are `tile`, with as many groups as `operand`: the inverse of `shape`."""
        return (operand[0], *tile[1:]) if self.axis == -1 else (operand[0], *tile[:-1], operand[-1])

    def seen(self, array: Shape) -> Shape:
        """Shape of what the function sees of one tile of an array."""
        return (self.part, *array[1:]) if self.axis == -1 else self.shape(array)

    def pieces(self, tile: jax.Array, ref: Any, held: Any) -> Iterator[tuple[Any, Any]]:
        """The parts of a reference that tile number `tile` covers, each with its part of the shared memory that holds the
        tile; beyond the end, loads give zeros and stores do nothing."""
        if self.axis == -2:
            yield self.columns(tile, ref), held
        elif self.copies == 1:
            yield ref.at[pl.ds(tile * self.extent, self.extent)], held
        else:
            for start in range(0, self.extent, PIECE):
                size = min(PIECE, self.extent - start)
                yield ref.at[pl.ds(tile * self.extent + start, size)], held.at[pl.ds(start, size)]

    @property
    def copies(self) -> int:
        """Pieces in which a tile is copied."""
        return -(-self.extent // PIECE) if self.axis == -1 else 1

    @property
    def parts(self) -> int:
        """Rows in a tile, or 1."""
        return self.extent // self.part

    def columns(self, tile: jax.Array, ref: Any) -> Any:
        """The columns of a reference that tile number `tile` covers."""
        across = -(-ref.shape[-1] // self.extent)
        columns = pl.ds((tile % across) * self.extent, self.extent)
        return ref.at[tile // across, :, columns] if len(ref.shape) == 3 else ref.at[tile // across, columns]

    def numbers(self, tile: jax.Array, shape: Shape, columns: jax.Array | int) -> jax.Array:
        """uint32 row-major number of every element of a tile (shape) in its operand, which has `columns` columns."""
        rows, across = (jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (0, 1))
        if self.axis == -1:
            row, column = tile * self.extent, jnp.int32(0)
        else:
            tiles = (columns + self.extent - 1) // self.extent
            row, column = (tile // tiles) * shape[0], (tile % tiles) * self.extent
        row, column, columns = (jnp.asarray(x, jnp.int32).astype(jnp.uint32) for x in (row, column, columns))
        return (row + rows) * columns + (column + across)

    def layouts(self, shapes: Iterable[Shape]) -> dict[Shape, Any]:
        """The register layout of every shape among the tiles of values `shapes`, and of the numbers per group of the first."""
        found: dict[Shape, Any] = {}
        for shape in shapes:
            found[shape] = backend.columns_layout(self.extent) if self.axis == -2 else backend.rows_layout(shape[1], self.part)
            found.setdefault((self.part,), found[shape].reduce(self.axis % 2))
        return found

    def pad(self, array: jax.Array) -> jax.Array:
        """The operand with groups in sixteens, or columns in whole tiles. Most have; else this copies.

        The copy engine stores contiguous numbers in 16s of bytes, and stops at the end of an array, not at that of a row.
        """
        place, multiple = (0, ROWS) if self.axis == -1 else (array.ndim - 1, self.extent)
        short = -array.shape[place] % multiple
        return jnp.pad(array, [(0, short if i == place else 0) for i in range(array.ndim)]) if short else array

    @staticmethod
    def crop(result: jax.Array, operand: jax.Array, axis: int) -> jax.Array:
        """The result without what `pad` added to the operand."""
        if axis == -1:
            return result if result.shape[0] == operand.shape[0] else result[: operand.shape[0]]
        return result if result.shape[-1] == operand.shape[-1] else result[..., : operand.shape[-1]]
