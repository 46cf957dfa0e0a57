"""Checkpoints with Orbax that come back bit for bit, on any number of devices, or say why not.

Orbax casts an array silently into the dtype of the template it is restored to. A manifest beside the arrays holds what each
was (dtype, shape, and the spec of quantized ones), and is compared before anything is read.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from coat_jax.optim.leaves import path_name
from coat_jax.optim.state import is_quantized

FORMAT_VERSION = 2
"""Of the layout of a saved state: names of the fields, meaning of codes, scales and exponents."""


def manifest(state: Any) -> dict[str, Any]:
    """What a state is made of: the format version, and for each leaf its dtype, shape and spec as text."""
    rows = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_quantized)[0]

    def describe(leaf: Any) -> str:
        if isinstance(leaf, _NUMBERS):
            return type(leaf).__name__
        shape = list(leaf.shape)
        return f"{shape} as {leaf.spec!r}" if is_quantized(leaf) else f"{leaf.dtype}{shape}"

    return {"format_version": FORMAT_VERSION, "leaves": {path_name(path): describe(leaf) for path, leaf in rows}}


_NUMBERS = (bool, int, float)


def _is_key(leaf: Any) -> bool:
    return not isinstance(leaf, _NUMBERS) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _data(leaf: Any) -> Any:
    """What Orbax is given of a leaf: an array, for a typed random key the numbers that it holds."""
    return np.asarray(leaf) if isinstance(leaf, _NUMBERS) else jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _like(template: Any, data: Any) -> Any:
    """A leaf as the template has it, of what Orbax gave back."""
    if isinstance(template, _NUMBERS):
        return type(template)(data)
    return jax.random.wrap_key_data(data, impl=_kind(template)) if _is_key(template) else data


def _kind(template: Any) -> Any:
    """The implementation of a typed random key, or of the shape of one, which `key_impl` reads of traced ones only."""
    kinds: list[Any] = []
    jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), template)
    return kinds[0]


def save(path: Path | str, state: Any) -> None:
    """Writes a state, sharded or not, into the new folder `path`.

    Args:
      path: a folder that does not exist.
      state: any tree of arrays, Python numbers and typed random keys, such as (params, optimizer state) or a `TrainState`.

    Raises:
      ValueError: `path` exists.
    """
    path = Path(path).absolute()
    if path.exists():
        raise ValueError(f"checkpoint.save: path={str(path)!r} exists; name a new folder")
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(jax.tree.map(_data, state)), manifest=ocp.args.JsonSave(manifest(state))
        )
        checkpointer.save(path, args=arguments)


def restore(path: Path | str, template: Any) -> Any:
    """Reads a state that was saved with `save`.

    Args:
      path: the folder.
      template: a tree like the state: arrays, or `jax.ShapeDtypeStruct`s with the shardings that are wanted now, such as
        jax.eval_shape(optimizer.init, params).

    Raises:
      ValueError: no checkpoint there, another format version, or a leaf that is missing, unknown, or of another dtype, shape or
        spec in the template.
    """
    path = Path(path).absolute()
    if not path.is_dir():
        raise ValueError(f"checkpoint.restore: path={str(path)!r} is no checkpoint; give the folder that save wrote")
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        try:
            saved = checkpointer.restore(path, args=ocp.args.Composite(manifest=ocp.args.JsonRestore()))["manifest"]
            rows = dict(saved["leaves"]), int(saved["format_version"])
        except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
            raise ValueError(
                f"checkpoint.restore: path={str(path)!r} has no readable manifest: it was not written by checkpoint.save, or "
                f"not to its end; give another checkpoint ({type(error).__name__})"
            ) from None
        _check(*rows, manifest(template)["leaves"])
        abstract = jax.tree.map(_wanted, template)
        data = checkpointer.restore(path, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract)))["state"]
        return jax.tree.map(_like, template, data)


def _wanted(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and place of a leaf; the first device where the template names none."""
    if isinstance(leaf, _NUMBERS):
        leaf = np.asarray(leaf)
    if _is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _check(saved: dict[str, str], version: int, wanted: dict[str, str]) -> None:
    if version != FORMAT_VERSION:
        raise ValueError(
            f"checkpoint.restore: the checkpoint has format version {version}, this is coat_jax's version {FORMAT_VERSION}; "
            "restore it with the release that wrote it"
        )
    for name in sorted(saved | wanted):
        there, here = saved.get(name, "nothing"), wanted.get(name, "nothing")
        if there != here:
            raise ValueError(
                f"checkpoint.restore: {name} was saved as {there}, the template has {here}; use the optimizer and "
                "the parameters that were saved"
            )
