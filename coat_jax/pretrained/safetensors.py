"""Safetensors files: a header that says where each tensor lies, and the tensors; read through a map of the file.

    8 bytes        n, the length of the header, little-endian
    n bytes        JSON: {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ..., "__metadata__": {...}}
    the rest       the tensors, row by row; offsets count from here, and the tensors lie one behind the other without a gap

Source: https://github.com/huggingface/safetensors#format.
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from coat_jax.pretrained.json_file import LONGEST, parse_object

DTYPES = {
    "BOOL": np.dtype(np.bool_),
    **{f"{sign}{8 * n}": np.dtype(f"{kind}{n}") for sign, kind in (("I", "i"), ("U", "u")) for n in (1, 2, 4, 8)},
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
"""The format's names of dtypes."""
METADATA = "__metadata__"


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies.

    Attributes:
      path: the file.
      name: in the file.
      dtype, shape: as stored.
      offset: of its first byte in the file.
    """

    path: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def where(self) -> str:
        """File and name, for messages."""
        return f"{self.path}: {self.name[:100]!r}"

    def mapped(self) -> np.ndarray:
        """The tensor as a read-only map of the file: bytes come into memory when they are read, and leave with the array."""
        if not math.prod(self.shape):
            return np.zeros(self.shape, self.dtype)
        return np.memmap(self.path, self.dtype, "r", self.offset, self.shape)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name; every size is checked against the file's before anything is read of them.

    Raises:
      ValueError: a file that is none, cannot be read, is cut off, or is longer than its header says; a header that is no JSON
        or longer than 16 MiB; a tensor of an unknown dtype, of a shape that is none, or whose bytes are not those between
        its offsets; tensors that overlap or leave a gap.
    """
    try:
        if not path.is_file():
            raise ValueError(f"{path}: there is no such file")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise ValueError(f"{path}: {size} bytes, cut off or no safetensors file: its header alone takes {length} + 8")
            if length > LONGEST:
                raise ValueError(f"{path}: a header of {length} bytes; up to {LONGEST} are read")
            text = file.read(length)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    header = parse_object(text, f"{path}, header")
    header.pop(METADATA, None)
    tensors = {name: _tensor(path, name, entry, 8 + length) for name, entry in header.items()}
    end = 8 + length
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, math.prod(t.shape))):
        if tensor.offset != end:
            what = "overlaps the tensor before it" if tensor.offset < end else "leaves a gap before it"
            raise ValueError(f"{tensor.where} {what}: it begins at byte {tensor.offset} of the file, not at {end}")
        end += math.prod(tensor.shape) * tensor.dtype.itemsize
        if end > size:
            raise ValueError(f"{tensor.where} ends at byte {end} of a file of {size}: it is cut off")
    if end != size:
        raise ValueError(f"{path}: {size} bytes, and the header tells of {end}; it is damaged")
    return tensors


def _tensor(path: Path, name: str, entry: Any, start: int) -> StoredTensor:
    """What a header says of one tensor."""
    where = f"{path}: {name[:100]!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{where} has no dtype, shape and data_offsets in the header, or more than these")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        raise ValueError(f"{where} has dtype {str(entry['dtype'])[:20]!r}; known are {', '.join(DTYPES)}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    for numbers in (shape, offsets):
        counts = isinstance(numbers, list) and all(type(n) is int and 0 <= n < 2**63 for n in numbers)
        if not counts or len(numbers) > 32:
            raise ValueError(f"{where} has shape {str(shape)[:50]} and data_offsets {str(offsets)[:50]}; these are no sizes")
    dtype, taken = DTYPES[entry["dtype"]], math.prod(shape) * DTYPES[entry["dtype"]].itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != taken:
        raise ValueError(f"{where}: {entry['dtype']} of shape {shape} takes {taken} bytes, not those of data_offsets {offsets}")
    return StoredTensor(path, name, dtype, tuple(shape), start + offsets[0])


def header_bytes(tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> bytes:
    """Length and header of a file that holds tensors of these dtypes and shapes, in this order.

    Raises:
      ValueError: a dtype that the format has no name for, or names so many and long that `read_header` refuses them.
    """
    called = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {METADATA: {"format": "pt"}}  # transformers reads no file without it
    end = 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in called:
            raise ValueError(f"{name!r} has dtype {dtype}, which safetensors files do not hold; cast it")
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": called[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LONGEST:
        raise ValueError(f"a header of {len(text)} bytes; up to {LONGEST} are written")
    return len(text).to_bytes(8, "little") + text


def content(tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]], rows: Iterable[np.ndarray]) -> Iterable[Any]:
    """A file, piece by piece: its header, then the bytes of each tensor.

    Args:
      tensors: dtype and shape by name.
      rows: the tensors, in the same order; each is let go before the next one is asked for.
    """
    yield header_bytes(tensors)
    for row in rows:
        yield memoryview(np.ascontiguousarray(row).reshape(-1).view(np.uint8))
