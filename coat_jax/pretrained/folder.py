"""The tensors of a folder: of one safetensors file, or of several that an index names."""

from pathlib import Path
from typing import Any

from coat_jax.pretrained.json_file import read_object
from coat_jax.pretrained.safetensors import StoredTensor, read_header

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_index(folder: Path) -> dict[str, str]:
    """{tensor: file} of a folder's index.

    Raises:
      ValueError: an index without such a map, or with files that are not in the folder itself.
    """
    path = folder / INDEX
    weight_map: Any = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{path}: weight_map is no map of tensors to files")
    for name, file in weight_map.items():
        if Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise ValueError(f"{path}: weight_map has {name[:100]!r} in {file[:100]!r}; use a .safetensors file of that folder")
    return weight_map


def tensors_of(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a folder by name; only headers are read.

    Raises:
      ValueError: no weights, or both one file and an index; a file that is missing or that `read_header` refuses; a tensor
        that is not where the index has it, or that two files hold.
    """
    one, index = (folder / WEIGHTS).is_file(), (folder / INDEX).is_file()
    if one and index:
        raise ValueError(f"{folder} holds both {WEIGHTS} and {INDEX}; take one out")
    if not one and not index:
        raise ValueError(f"{folder} holds neither {WEIGHTS} nor {INDEX}")
    if one:
        return read_header(folder / WEIGHTS)
    weight_map = read_index(folder)
    found: dict[str, StoredTensor] = {}
    for file in dict.fromkeys(weight_map.values()):
        if not (folder / file).is_file():
            raise ValueError(f"{folder / file}: there is no such file, and {INDEX} has tensors in it")
        for name, tensor in read_header(folder / file).items():
            if name in found:
                raise ValueError(f"{tensor.where} is in {found[name].path.name} too; one tensor, one file")
            found[name] = tensor
    for name, file in weight_map.items():
        if name not in found or found[name].path.name != file:
            raise ValueError(f"{folder / file}: {name!r} is not in it, where {INDEX} has it")
    return found
