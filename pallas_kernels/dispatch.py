"""Which of two functions a program contains: a kernel where it is compiled for a Hopper GPU, plain JAX everywhere else.

The choice falls when a program is lowered, when its target is known: the same traced function takes the kernel on an H100 and
plain XLA on an A100, a B200 or a CPU, compiled for from any machine.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.extend as jex
from jax.interpreters import ad, batching, mlir

from pallas_kernels.jaxprs import Function, Untraced
from pallas_kernels.partition import Split, partitioned

Shapes = tuple[tuple[tuple[int, ...], Any], ...]
"""Shape and dtype of each result."""

by_target_p = jex.core.Primitive("kernel_by_target")
by_target_p.multiple_results = True


class Parts(NamedTuple):
    """How a program for several devices cuts arrays: which axes it may, and the mesh in use."""

    split: Split
    mesh: jax.sharding.AbstractMesh


def by_target(
    kernel: Function,
    plain: Function,
    *args: Any,
    required: str | None = None,
    split: Split | None = None,
) -> Any:
    """kernel(*args) in a program for a Hopper GPU, plain(*args) in any other. Both return the same tree of arrays.

    In a program for several GPUs the kernel runs inside `jax.shard_map`, and elsewhere on each device's part of the arrays,
    where `split` says how they may be cut and `jax.set_mesh` which mesh there is. Else plain runs: the partitioner cannot look
    into a kernel and would gather its operands. Outside `jax.jit` plain runs. Derivatives are those of plain.

    Args:
      kernel, plain: functions of arrays or trees of arrays. With `split`, kernel also takes the keyword `places`: the `Place`
        of each array of args, in trees of the same structure.
      required: None, or what to say where the kernel cannot run.
      split: the labels of all arrays' axes.

    Raises:
      ValueError: `required`, where it is given and the program does not take the kernel.
    """
    flat, tree = jax.tree.flatten(args)
    if required is None and any(axis is not None for x in flat for axis in jax.typeof(x).sharding.spec):
        return plain(*args)  # shardings that are part of types, `AxisType.Explicit`, are known to JAX's own functions alone
    shapes, out = jax.tree.flatten(jax.eval_shape(plain, *args))

    def of_flat(function: Function) -> Function:
        def call(*xs: Any, **keywords: Any) -> Any:
            trees = {name: jax.tree.unflatten(tree, leaves) for name, leaves in keywords.items()}
            return jax.tree.leaves(function(*jax.tree.unflatten(tree, xs), **trees))

        return call

    mesh = jax.sharding.get_abstract_mesh()
    parts = None if split is None or mesh.empty else Parts(split, mesh)
    functions = Untraced(of_flat(kernel), of_flat(plain))
    like = tuple((x.shape, x.dtype) for x in shapes)
    results = by_target_p.bind(*flat, functions=functions, required=required, parts=parts, like=like)
    return jax.tree.unflatten(out, results)


def _for_hopper(module: Any) -> bool:
    """Whether a module is lowered for Hopper GPUs."""
    if tuple(module.platforms) != ("cuda",) or module.backend is None:
        return False
    return all(str(device.compute_capability) == "9.0" for device in module.backend.devices())


def _on_one_device(axes: Any) -> bool:
    """Whether code with an axis context is a program for one device, or that of one of several."""
    mesh = getattr(axes, "mesh", None)
    if mesh is None:
        return axes.num_devices == 1
    return mesh.size == 1 or set(mesh.axis_names) == set(axes.manual_axes)


def _lower(context: Any, *operands: Any, functions: Untraced, required: str | None, parts: Parts | None, like: Shapes) -> Any:
    del like
    module, chosen = context.module_context, functions.plain
    if _for_hopper(module):
        if _on_one_device(module.axis_context):
            chosen = functions.kernel
        elif parts is not None and getattr(module.axis_context, "num_devices", None) == parts.mesh.size:
            chosen = partitioned(functions.kernel, functions.plain, parts.split)
            # A partitioner needs a mesh, which JAX looks up for its own primitives only; of the devices it takes the number.
            devices = tuple(module.backend.devices()[: parts.mesh.size])
            there = dataclasses.replace(module.axis_context, device_assignment=devices, abstract_mesh=parts.mesh)
            context = context.replace(module_context=module.replace(axis_context=there))
    if chosen is functions.plain and required is not None:
        raise ValueError(required)
    return mlir.lower_fun(jax.jit(chosen), multiple_results=True)(context, *operands)


def _run(*operands: Any, functions: Untraced, required: str | None, parts: Parts | None, like: Shapes) -> Any:
    if required is None:
        return functions.plain(*operands)
    bound = functools.partial(by_target_p.bind, functions=functions, required=required, parts=parts, like=like)
    return jax.jit(bound)(*operands)


def _abstract(*operands: Any, like: Shapes, **_: Any) -> list[Any]:
    return [jax.core.ShapedArray(shape, dtype) for shape, dtype in like]


def _batch(operands: Any, axes: Any, *, functions: Untraced, required: str | None, parts: Parts | None, like: Shapes) -> Any:
    del parts  # a batch is not cut
    [size] = {x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None}
    like = tuple(((size, *shape), dtype) for shape, dtype in like)
    batched = Untraced(*(jax.vmap(f, in_axes=tuple(axes)) for f in (functions.kernel, functions.plain)))
    results = by_target_p.bind(*operands, functions=batched, required=required, parts=None, like=like)
    return results, [0] * len(results)


def _differentiate(primals: Any, tangents: Any, *, functions: Untraced, **_: Any) -> Any:
    return jax.jvp(functions.plain, tuple(primals), tuple(ad.instantiate_zeros(tangent) for tangent in tangents))


by_target_p.def_abstract_eval(_abstract)
by_target_p.def_impl(_run)
mlir.register_lowering(by_target_p, _lower)
batching.primitive_batchers[by_target_p] = _batch
ad.primitive_jvps[by_target_p] = _differentiate
