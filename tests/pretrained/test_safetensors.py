"""Headers of strangers: what is well formed is read, and everything else is refused in one line before it is read."""

import json
import os

import ml_dtypes
import numpy as np
import pytest

from coat_jax.pretrained.safetensors import DTYPES, content, read_header

A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}


def file_of(path, header, data=b"\0" * 32, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def test_what_is_written_is_read_and_lies_where_the_format_has_it(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {}
    for name, dtype in DTYPES.items():
        codes = rng.integers(0, 2 if name == "BOOL" else 256, 6 * dtype.itemsize, np.uint8)
        arrays[name] = codes.view(dtype).reshape(2, 3)
    arrays |= {"scalar": np.float32(3.0), "empty": np.zeros((0, 5), np.float16)}
    arrays = {name: np.asarray(x) for name, x in arrays.items()}
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"".join(content({name: (x.dtype, x.shape) for name, x in arrays.items()}, arrays.values())))
    tensors = read_header(path)
    assert list(tensors) == list(arrays)
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    assert start % 8 == 0
    assert json.loads(raw[8:start])["__metadata__"] == {"format": "pt"}
    for name, x in arrays.items():
        got = tensors[name].mapped()
        assert (got.dtype, got.shape, got.tobytes()) == (x.dtype, x.shape, x.tobytes())
        assert raw[tensors[name].offset :][: x.nbytes] == x.tobytes()
        assert not got.flags.writeable or not x.size


REFUSED = {
    "an unknown dtype": ({"a": A | {"dtype": "F4"}}, r"'a' has dtype 'F4'; known are BOOL"),
    "a dtype that is none": ({"a": A | {"dtype": ["F32"]}}, r"'a' has dtype"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 24]}}, r"'a' has no dtype, shape and data_offsets"),
    "more than these": ({"a": A | {"strides": [1]}}, r"'a' has no dtype, shape and data_offsets in the header, or more"),
    "a list": ({"a": [1]}, r"'a' has no dtype"),
    "a size below zero": ({"a": A | {"shape": [-2, -3]}}, r"'a' has shape \[-2, -3\]"),
    "a size that is true": ({"a": A | {"shape": [True, 6]}}, r"'a' has shape \[True, 6\]"),
    "a broken size": ({"a": A | {"shape": [2.0, 3]}}, r"'a' has shape \[2.0, 3\]"),
    "an endless size": ({"a": A | {"shape": [2**63, 0]}}, r"'a' has shape"),
    "forty axes": ({"a": A | {"shape": [1] * 40}}, r"'a' has shape"),
    "another length": ({"a": A | {"shape": [2, 4]}}, r"'a': F32 of shape \[2, 4\] takes 32 bytes, not those of .* \[0, 24\]"),
    "a huge tensor": ({"a": A | {"shape": [2**40, 2**40]}}, r"takes 4835703278458516698824704 bytes"),
    "offsets in reverse": ({"a": A | {"data_offsets": [24, 0]}}, r"not those of data_offsets \[24, 0\]"),
    "three offsets": ({"a": A | {"data_offsets": [0, 24, 24]}}, r"not those of data_offsets"),
    "a tensor behind the end": ({"a": A, "b": B | {"data_offsets": [32, 40]}}, r"'b' leaves a gap before it"),
    "a longer file": ({"a": A}, r"bytes, and the header tells of \d+; it is damaged"),
    "one tensor on another": ({"a": A, "b": B | {"data_offsets": [16, 24]}}, r"'b' overlaps the tensor before it"),
    "two in one place": ({"a": A, "c": A, "b": B}, r"'c' overlaps the tensor before it"),
    "a list of all": ([A], r"list in place of a JSON object"),
    "a name twice": (b'{"a": 1, "a": 2}', r"'a' is there twice"),
    "no JSON": (b'{"a": ', r"header: .*; it has to be JSON"),
    "no text": (b"\xff\xfe{}", r"header: .*; it has to be JSON"),
    "nested without end": (b"[" * 100_000, r"header: .*; it has to be JSON"),
    "a number without end": (b'{"a": ' + b"9" * 5000 + b"}", r"header: .*; it has to be JSON"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_headers_that_are_wrong_are_refused_by_file_and_key(tmp_path, case):
    header, words = REFUSED[case]
    with pytest.raises(ValueError, match=words) as error:
        read_header(file_of(tmp_path / "x.safetensors", header))
    assert str(tmp_path / "x.safetensors") in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_files_that_are_cut_off_are_refused_at_every_length(tmp_path):
    path = file_of(tmp_path / "x.safetensors", {"a": A, "b": B})
    whole = path.read_bytes()
    read_header(path)
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="cut off|damaged"):
            read_header(path)


def test_a_header_that_claims_the_world_allocates_nothing(tmp_path):
    for length in (2**64 - 1, 2**40, 33):
        with pytest.raises(ValueError, match="cut off or no safetensors file"):
            read_header(file_of(tmp_path / "x", b"", length=length))
    with open(tmp_path / "sparse", "wb") as file:  # 1 TiB, of which the disk holds a page
        file.write((2**39).to_bytes(8, "little"))
        file.truncate(2**40)
    with pytest.raises(ValueError, match=f"a header of {2**39} bytes; up to {2**24} are read"):
        read_header(tmp_path / "sparse")
    with pytest.raises(ValueError, match="there is no such file"):
        read_header(tmp_path)


def test_no_damaged_byte_is_more_than_a_refusal(tmp_path):
    """Of 2,000 files with a few bytes changed each is read, with sizes inside the file, or refused with ValueError."""
    path = file_of(tmp_path / "x.safetensors", {"a": A, "b": B})
    whole, rng = np.frombuffer(path.read_bytes(), np.uint8), np.random.default_rng(0)
    read = 0
    for _ in range(2000):
        damaged = whole.copy()
        damaged[rng.integers(0, len(whole), 3)] = rng.integers(0, 256, 3)
        path.write_bytes(damaged.tobytes())
        try:
            tensors = read_header(path)
        except ValueError:
            continue
        read += 1
        assert all(t.offset + t.mapped().nbytes <= os.path.getsize(path) for t in tensors.values())
    assert 0 < read < 2000


def test_dtypes_without_a_name_are_refused():
    with pytest.raises(ValueError, match="'a' has dtype int4, which safetensors files do not hold"):
        list(content({"a": (np.dtype(ml_dtypes.int4), (2,))}, []))
