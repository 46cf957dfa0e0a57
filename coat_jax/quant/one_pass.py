"""A function of whole groups written once, run by plain JAX or in one kernel: read once, written once."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coat_jax.quant import codec
from coat_jax.quant.array import QuantizedArray
from coat_jax.quant.granularity import Groups
from coat_jax.quant.implementation import Implementation, Operation, choose, group_map, refusal
from coat_jax.quant.quantize import dequantize, quantize
from coat_jax.quant.spec import QuantSpec
from pallas_kernels.partition import Split


def one_pass(
    fn: Callable[..., Any],
    *args: jax.Array | QuantizedArray,
    spec: QuantSpec,
    called: str,
    implementation: Implementation | str | None,
    refused: str | None = None,
) -> Any:
    """fn(*args, encode=, decode=), by plain JAX, or one kernel that sees some groups of every argument at a time.

    Args:
      fn: of the arguments to a tree of arrays of their shape and of what `encode` gives. `encode(x)` is x quantized to `spec`
        and `decode(q)` the float32 values of a quantized argument; all else is element by element.
      args: arrays and quantized arrays of one shape, all laid out by the groups of `spec`.
      called: the function that a person called, for messages.
      implementation: "xla", "pallas", "interpret", or None: the kernel in programs for a Hopper GPU, XLA elsewhere.
      refused: why no kernel computes fn, or None.

    Returns:
      What fn returns, `QuantizedArray`s where it encodes.

    Raises:
      ValueError: an implementation that is unknown or cannot run.
    """

    def plain(*args):
        out = fn(*args, encode=functools.partial(quantize, spec=spec), decode=lambda q: dequantize(q, np.dtype(np.float32)))
        return jax.tree.map(_made, out, is_leaf=lambda x: isinstance(x, QuantizedArray))

    leaves, tree = jax.tree.flatten(args)
    like = jax.eval_shape(plain, *args)

    def tile(*tiles, axes):
        def encode(x):
            codes = codec.encode(x.astype(jnp.float32), spec, axes)
            return QuantizedArray.tree_unflatten((spec, x.dtype), codes)

        def decode(q):
            return codec.decode(codec.Codes(q.payload, q.scale, q.exponent), q.spec, axes)

        return tuple(jax.tree.leaves(fn(*jax.tree.unflatten(tree, tiles), encode=encode, decode=decode)))

    def kernel(*args, interpret, places=None):  # of a part of every array where devices share them, wherever it lies
        groups = Groups.of(spec.granularity, args[0].shape)
        split = groups.split_shape
        statistics = codec.statistic_shape(split, groups.axes)
        laid = [groups.split(x) if x.shape == groups.shape else x.reshape(statistics) for x in jax.tree.leaves(args)]
        [done] = group_map(tile, [laid], [groups], name=str(Operation.ELEMENTWISE), interpret=interpret)
        merged = [groups.merge(y) if y.ndim == len(split) else y.reshape(groups.scale_shape) for y in done]
        return jax.tree.unflatten(jax.tree.structure(like), merged)

    groups = Groups.of(spec.granularity, args[0].shape)
    axes = tuple(range(len(groups.shape)))
    split = None if groups.ragged else Split((axes,) * len(leaves), (axes,) * len(jax.tree.leaves(like)))
    return choose(
        kernel,
        plain,
        *args,
        operation=Operation.ELEMENTWISE,
        called=called,
        implementation=implementation,
        refused=refused or _refusal(args, spec, groups),
        split=split,  # a group of which several devices have a part is brought together first, as plain JAX does it
    )


def _made(x: Any) -> Any:
    """x, which XLA makes in its own dtype. It would leave out a rounding that the next function undoes, and hold float32."""
    return x if isinstance(x, QuantizedArray) or x.dtype.itemsize >= 4 else jax.lax.optimization_barrier(x)


def _refusal(args: Any, spec: QuantSpec, groups: Groups) -> str | None:
    if any(x.shape != groups.shape for x in args):
        return f"has a kernel for arrays of one shape, not of {', '.join(str(x.shape) for x in args)}"
    if any(x.spec.granularity != spec.granularity for x in args if isinstance(x, QuantizedArray)):
        return f"has a kernel for arguments in one granularity, here {spec.granularity}"
    return refusal(groups)
