"""`load`: the parameters of a pretrained model, one after the other from the files to their devices."""

import dataclasses
import functools
import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coat_jax.models import llama
from coat_jax.pretrained.config_file import PARAM_DTYPES, read_config
from coat_jax.pretrained.folder import tensors_of
from coat_jax.pretrained.leaves import HEAD, IGNORED, Leaf, copy_numbers, leaves_of
from coat_jax.pretrained.safetensors import StoredTensor

Placement = jax.sharding.Sharding | Callable[[Any], Any] | Any | None


def load(folder: str | Path, dtype: Any = None, sharding: Placement = None) -> tuple[llama.Config, dict[str, Any]]:
    """The configuration and the parameters of a pretrained Llama, Mistral, Qwen2 or Qwen3: `llama.Llama(config)` runs them.

    Every size in the files is checked first. Then one parameter after the other is read, transposed and placed, so that beside
    what is placed the host holds one of them, the stacked layers of one kernel at most.

    Args:
      folder: holds config.json, and model.safetensors or model.safetensors.index.json with its files.
      dtype: float32 or bfloat16, of all parameters and of the computation. None keeps each parameter in the dtype of its file
        (float32 where its layers differ) and computes in the dtype that config.json names; see `read_config`.
      sharding: where parameters are placed: None, the default device; one `jax.sharding.Sharding` for all of them; a tree of
        these like the parameters; or a function that gives such a tree for the tree of `jax.ShapeDtypeStruct`s.

    Returns:
      config, params: the parameters as `llama.Llama(config).init(...)["params"]` has them.

    Raises:
      ValueError: files that are missing, cut off, damaged or of another size than they say; tensors that are missing, not
        wanted, or of another shape or dtype; what `read_config` refuses; another dtype; a tree that is not that of the
        parameters. The message names the file and the key.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp
      >>> from coat_jax import pretrained
      >>> from coat_jax.models import llama
      >>> config = llama.preset("tiny", layers=1)
      >>> params = llama.Llama(config).init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     pretrained.save(folder, config, params)
      ...     config, loaded = pretrained.load(folder, dtype=jnp.bfloat16)
      >>> loaded["head"]["kernel"].shape, loaded["head"]["kernel"].dtype
      ((128, 256), dtype(bfloat16))
    """
    folder = Path(folder)
    if dtype is not None and jnp.dtype(dtype) not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        raise ValueError(f"load: dtype={jnp.dtype(dtype)}; use float32 or bfloat16, or None for that of the files")
    config = read_config(folder)
    if dtype is not None:
        config = dataclasses.replace(config, param_dtype=jnp.dtype(dtype), dtype=jnp.dtype(dtype))
    sources = match(config, tensors_of(folder), folder)
    shapes = tree_of({s.leaf.path: jax.ShapeDtypeStruct(s.leaf.shape, s.dtype(dtype)) for s in sources})
    places = placed(shapes, sharding)
    loaded = {}
    for source in sources:
        loaded[source.leaf.path] = source.read(source.dtype(dtype), at(places, source.leaf.path))
    return config, tree_of(loaded)


@dataclasses.dataclass(frozen=True)
class Source:
    """A parameter, and the tensors that it is made of: one, or one for each layer."""

    leaf: Leaf
    tensors: tuple[StoredTensor, ...]

    def dtype(self, asked: Any) -> np.dtype:
        """The dtype that was asked for; or that of the tensors, float32 where they differ, which holds each exactly."""
        if asked is not None:
            return jnp.dtype(asked)
        kinds = {tensor.dtype for tensor in self.tensors}
        return kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)

    def read(self, dtype: np.dtype, sharding: jax.sharding.Sharding | None) -> jax.Array:
        """The parameter, placed. Of a sharded one each device's part is made by itself, and equal parts once."""
        shape = self.leaf.shape
        made: dict[Any, np.ndarray] = {}

        def part(index: Any) -> np.ndarray:
            key = tuple(i.indices(n) for i, n in zip(index, shape, strict=True))
            if key not in made:
                made[key] = self.part(index, dtype)
            return made[key]

        if sharding is None:
            value = jax.device_put(self.part((slice(None),) * len(shape), dtype))
        else:
            value = jax.make_array_from_callback(shape, sharding, part)
        # A copy to a device still reads the host's array, and JAX lets go of that when Python collects garbage. Without either
        # the next parameter comes on top.
        value.block_until_ready()
        made.clear()
        gc.collect(0)
        return value

    def part(self, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        """The part of the parameter at an index of slices, in host memory."""
        stacked = self.leaf.layers is not None
        rows = self.tensors[index[0]] if stacked else self.tensors
        inner = index[1:] if stacked else index
        shape = tuple(len(range(*i.indices(n))) for i, n in zip(inner, self.leaf.row, strict=True))
        made = np.empty((len(rows), *shape), dtype)
        for row, tensor in zip(made, rows, strict=True):
            copy_numbers(row, self.leaf.turned(tensor.mapped())[inner])
        return made if stacked else made[0]


def match(config: llama.Config, tensors: Mapping[str, StoredTensor], folder: Path) -> list[Source]:
    """The tensors of every parameter; each tensor of the folder has to be one of these, or one that is known to be spare.

    Raises:
      ValueError: see `load`.
    """
    sources, spare = [], {HEAD} if config.tied_head else set()  # some tied models ship the embedding again as their head
    for leaf in leaves_of(config):
        found = []
        for name in leaf.names():
            if name not in tensors:
                raise ValueError(f"{folder}: {name!r} is in none of its files, and config.json asks for it")
            tensor = tensors[name]
            if tensor.shape != leaf.stored_shape:
                raise ValueError(f"{tensor.where} has shape {tensor.shape}; config.json makes it {leaf.stored_shape}")
            if tensor.dtype not in map(jnp.dtype, PARAM_DTYPES.values()):
                raise ValueError(f"{tensor.where} holds {tensor.dtype}; weights of {', '.join(PARAM_DTYPES)} are read")
            found.append(tensor)
        sources.append(Source(leaf, tuple(found)))
    wanted = {tensor.name for source in sources for tensor in source.tensors} | spare
    for name, tensor in tensors.items():
        if name not in wanted and not name.endswith(IGNORED):
            raise ValueError(f"{tensor.where} is no part of the model that config.json describes")
    return sources


def placed(shapes: Any, sharding: Placement) -> Any:
    """A tree like `shapes` of the sharding of each parameter, None for the default device."""
    if sharding is None or isinstance(sharding, jax.sharding.Sharding):
        return jax.tree.map(lambda _: sharding, shapes)
    given = sharding(shapes) if callable(sharding) else sharding
    wrong = [x for x in jax.tree.leaves(given) if not isinstance(x, jax.sharding.Sharding)]
    if wrong or str(jax.tree.structure(given)) != str(jax.tree.structure(shapes)):
        what = f"holds {wrong[0]!r}" if wrong else "is no tree like the parameters"
        raise ValueError(f"load: sharding {what}; use a jax.sharding.Sharding, or one for each parameter")
    return given


def tree_of(leaves: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Nested dicts of values by their paths."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree


def at(tree: Any, path: tuple[str, ...]) -> Any:
    """The value at a path of nested dicts."""
    return functools.reduce(lambda node, key: node[key], path, tree)
