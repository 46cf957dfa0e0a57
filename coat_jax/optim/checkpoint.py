"""Checkpoints with Orbax that come back bit for bit, on any number of devices, or say why not.

Orbax casts an array silently into the dtype of the template it is restored to. A manifest beside the arrays holds what each
was (dtype, shape, and the spec of quantized ones), and is compared before anything is read.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from coat_jax.optim.convert import is_quantized
from coat_jax.optim.leaves import path_name

FORMAT_VERSION = 1
"""Of the layout of a saved state: names of the fields, meaning of codes, scales and exponents."""


def manifest(state: Any) -> dict[str, Any]:
    """What a state is made of: the format version, and for each leaf its dtype, shape and spec as text."""
    rows = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_quantized)[0]

    def describe(leaf: Any) -> str:
        shape = list(leaf.shape)
        return f"{shape} as {leaf.spec!r}" if is_quantized(leaf) else f"{np.dtype(leaf.dtype)}{shape}"

    return {"format_version": FORMAT_VERSION, "leaves": {path_name(path): describe(leaf) for path, leaf in rows}}


def save(path: Path | str, state: Any) -> None:
    """Writes a state, sharded or not, into the new folder `path`.

    Args:
      path: a folder that does not exist.
      state: any tree of arrays and quantized arrays, such as (params, optimizer state).

    Raises:
      ValueError: `path` exists.
    """
    path = Path(path).absolute()
    if path.exists():
        raise ValueError(f"checkpoint.save: path={str(path)!r} exists; name a new folder")
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        arguments = ocp.args.Composite(state=ocp.args.StandardSave(state), manifest=ocp.args.JsonSave(manifest(state)))
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
        saved = checkpointer.restore(path, args=ocp.args.Composite(manifest=ocp.args.JsonRestore()))["manifest"]
        _check(saved, manifest(template))
        abstract = jax.tree.map(_wanted, template)
        return checkpointer.restore(path, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract)))["state"]


def _wanted(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and place of a leaf; the first device where the template names none."""
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _check(saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    version = saved["format_version"]
    if version != FORMAT_VERSION:
        raise ValueError(
            f"checkpoint.restore: the checkpoint has format version {version}, this is coat_jax's version {FORMAT_VERSION}; "
            "restore it with the release that wrote it"
        )
    for name in sorted(saved["leaves"] | wanted["leaves"]):
        there, here = saved["leaves"].get(name, "nothing"), wanted["leaves"].get(name, "nothing")
        if there != here:
            raise ValueError(
                f"checkpoint.restore: {name} was saved as {there}, the template has {here}; use the optimizer and "
                "the parameters that were saved"
            )
