"""`save`: a model as config.json and safetensors files, which transformers and the servers that follow it read."""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coat_jax import results
from coat_jax.models import llama
from coat_jax.pretrained.config_file import NAME, config_document, parse_config, read_config
from coat_jax.pretrained.folder import INDEX, WEIGHTS, read_index
from coat_jax.pretrained.json_file import read_object
from coat_jax.pretrained.leaves import Leaf, copy_numbers, leaves_of
from coat_jax.pretrained.loading import at
from coat_jax.pretrained.safetensors import content


def save(
    folder: str | Path, config: llama.Config, params: Any, *, like: str | Path | None = None, file_bytes: int = 5 * 10**9
) -> None:
    """Writes config.json and the parameters, each in its own dtype, bit for bit: `load` gives them back.

    One file, model.safetensors, or several with an index where they are more than `file_bytes` together. Layers are written
    one after the other, and the host holds one tensor at a time. A folder holds the old weights whole or the new ones, whatever
    ends this process. Other files of the folder, such as a tokenizer's, stay.

    Args:
      folder: a new one, an empty one, or one of the same configuration, whose weights are replaced.
      config, params: a model, as `load` gives it.
      like: the folder of the pretrained model that this one comes from. Its config.json is taken over, the dtype aside: the
        numbers of special tokens, the length of the context and the architecture's name are in it. None writes what `config`
        knows.
      file_bytes: of tensors in one file.

    Raises:
      ValueError: a folder that holds another model, a file in its place, or weights in one file where these would be in
        several; parameters that are not those of `config`; a configuration of no known architecture, or another than that of
        `like`; arrays that other processes hold parts of.
      OSError: it cannot be written.
    """
    folder = Path(folder)
    results.check_folder("folder", folder)
    document = document_of(config, like)
    leaves = leaves_of(config)
    check_params(params, leaves)
    files = _files(leaves, params, file_bytes)
    _refuse_others(folder, document, len(files) > 1)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / NAME).exists():
        results.write(folder / NAME, json.dumps(document, indent=2) + "\n")
    if len(files) == 1:
        results.write(folder / WEIGHTS, _content(files[0], params))
        return
    _write_several(folder, files, params)


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor to be written: a parameter, or one layer of it."""

    name: str
    leaf: Leaf
    layer: int | None
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.leaf.row) * self.dtype.itemsize

    def value(self, params: Any) -> np.ndarray:
        """The numbers, in host memory, as the file has them."""
        x = at(params, self.leaf.path)
        x = self.leaf.turned(np.asarray(x if self.layer is None else x[self.layer]))
        if x.flags.c_contiguous:
            return x
        made = np.empty(x.shape, x.dtype)
        copy_numbers(made, x)
        return made


def document_of(config: llama.Config, like: str | Path | None) -> dict[str, Any]:
    """What config.json will say."""
    document = config_document(config)
    if like is None:
        return document
    path = Path(like) / NAME
    theirs = read_object(path)
    theirs = {key: value for key, value in theirs.items() if key not in ("dtype", "torch_dtype")}
    theirs |= {"torch_dtype": document["torch_dtype"]}
    there, here = _same_head(parse_config(theirs, str(path))), _same_head(parse_config(document, "config"))
    for field in dataclasses.fields(there):
        a, b = getattr(there, field.name), getattr(here, field.name)
        if a != b:
            raise ValueError(
                f"save: like={str(like)!r} has {field.name}={a}, config has {b}; give the folder that it comes from"
            )
    return theirs


def _same_head(config: llama.Config) -> llama.Config:
    """The configuration with the width of its heads written out, so that two ways to say it are equal."""
    return dataclasses.replace(config, head_dim=config.head_width)


def check_params(params: Any, leaves: list[Leaf]) -> None:
    """Refuses parameters that are not those of the configuration."""
    given = {tuple(str(getattr(k, "key", k)) for k in path): x for path, x in jax.tree.leaves_with_path(params)}
    wanted = {leaf.path: leaf for leaf in leaves}
    for path in {**wanted, **given}:
        name = "/".join(path)
        if path not in given or path not in wanted:
            raise ValueError(f"save: params {'lack' if path in wanted else 'hold'} {name!r}, and config says otherwise")
        x, shape = given[path], wanted[path].shape
        if x.shape != shape:
            raise ValueError(f"save: params have {name!r} of shape {x.shape}; config makes it {shape}")
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            raise ValueError(f"save: params have {name!r} on devices of other processes; gather it, and save in one process")
        if not jnp.issubdtype(x.dtype, jnp.floating) or not 2 <= x.dtype.itemsize <= 4:
            raise ValueError(f"save: params have {name!r} of dtype {x.dtype}; use float32, bfloat16 or float16")


def _files(leaves: list[Leaf], params: Any, file_bytes: int) -> list[list[_Tensor]]:
    """The tensors of each file, layer by layer, as the model computes."""
    layers = max(leaf.layers or 0 for leaf in leaves)
    first = next(i for i, leaf in enumerate(leaves) if leaf.layers is not None)
    outer = [leaf for leaf in leaves if leaf.layers is None]

    def tensor(leaf: Leaf, layer: int | None) -> _Tensor:
        dtype = np.dtype(at(params, leaf.path).dtype)
        return _Tensor(leaf.name if layer is None else leaf.name.format(layer), leaf, layer, dtype)

    stacked = [leaf for leaf in leaves if leaf.layers is not None]
    tensors = [tensor(leaf, None) for leaf in outer[:first]]
    tensors += [tensor(leaf, i) for i in range(layers) for leaf in stacked]
    tensors += [tensor(leaf, None) for leaf in outer[first:]]
    files: list[list[_Tensor]] = [[]]
    size = 0
    for t in tensors:
        if files[-1] and size + t.nbytes > file_bytes:
            files.append([])
            size = 0
        files[-1].append(t)
        size += t.nbytes
    return files


def _write_several(folder: Path, files: list[list[_Tensor]], params: Any) -> None:
    """Files and their index. This alone says which files count: new ones get names that no file has, and what it does not name
    in the end, the old ones or, after an error, the new, is removed."""

    def counting() -> set[str]:
        return set(read_index(folder).values()) if (folder / INDEX).is_file() else set()

    before = counting()
    choices = (
        [f"model-{i + 1:05}-of-{len(files):05}{f'-{again}' if again else ''}.safetensors" for i in range(len(files))]
        for again in itertools.count()
    )
    names = next(names for names in choices if not any((folder / name).exists() for name in names))
    index = {
        "metadata": {"total_size": sum(t.nbytes for tensors in files for t in tensors)},
        "weight_map": {t.name: name for name, tensors in zip(names, files, strict=True) for t in tensors},
    }
    try:
        for name, tensors in zip(names, files, strict=True):
            results.write(folder / name, _content(tensors, params))
        results.write(folder / INDEX, json.dumps(index, indent=2) + "\n")
    finally:
        for name in {*before, *names} - counting():
            (folder / name).unlink(missing_ok=True)


def _content(tensors: list[_Tensor], params: Any) -> Iterator[Any]:
    """The bytes of a file, tensor by tensor."""
    header = {t.name: (t.dtype, t.leaf.stored_shape) for t in tensors}
    return iter(content(header, (t.value(params) for t in tensors)))


def _refuse_others(folder: Path, document: dict[str, Any], several: bool) -> None:
    """Refuses a folder that holds another model, or the same in another layout."""
    weights = sorted(
        path.name for path in folder.glob("*") if path.suffix in (".safetensors", ".bin", ".gguf") or path.name == INDEX
    )
    if not (folder / NAME).exists():
        if weights:
            raise ValueError(f"save: folder={str(folder)!r} holds {weights[0]} without config.json; give another folder")
        return
    try:
        same = _same_head(read_config(folder)) == _same_head(parse_config(document, "config"))
    except ValueError as error:
        raise ValueError(f"save: folder={str(folder)!r} holds another model ({error}); give another folder") from None
    if not same:
        raise ValueError(f"save: folder={str(folder)!r} holds another model, {NAME} differs from config; give another folder")
    if (folder / (WEIGHTS if several else INDEX)).exists():
        there = "one file, and these are more than file_bytes" if several else "several files, and these fit into one"
        raise ValueError(f"save: folder={str(folder)!r} holds this model in {there}; give another folder")
