"""Which of two functions a program contains: a kernel where it is compiled for a Hopper GPU, plain JAX everywhere else.

The choice falls when a program is lowered, when its target is known: the same traced function takes the kernel on an H100 and
plain XLA on an A100, a B200 or a CPU, compiled for from any machine.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend as jex
from jax.interpreters import ad, batching, mlir

Function = Callable[..., Any]

by_target_p = jex.core.Primitive("kernel_by_target")
by_target_p.multiple_results = True


def by_target(kernel: Function, plain: Function, *args: Any, required: str | None = None) -> Any:
    """kernel(*args) in a program for a Hopper GPU, plain(*args) in any other. Both return the same tree of arrays.

    A program for several GPUs takes the kernel inside `jax.shard_map` only: elsewhere the partitioner would have to gather
    the operands of a kernel, which it cannot look into. Outside `jax.jit` plain runs. Derivatives are those of plain.

    Args:
      kernel, plain: functions of arrays or trees of arrays.
      required: None, or what to say where the kernel cannot run.

    Raises:
      ValueError: `required`, where it is given and the program does not take the kernel.
    """
    flat, tree = jax.tree.flatten(args)
    out = jax.tree.structure(jax.eval_shape(plain, *args))
    kernel, plain = (
        lambda *xs, function=function: jax.tree.leaves(function(*jax.tree.unflatten(tree, xs))) for function in (kernel, plain)
    )
    return jax.tree.unflatten(out, by_target_p.bind(*flat, kernel=kernel, plain=plain, required=required))


def _takes_kernel(context: Any) -> bool:
    """Whether the program of a lowering context is for one Hopper GPU, or the code of one of several."""
    module = context.module_context
    if tuple(module.platforms) != ("cuda",) or module.backend is None:
        return False
    if any(str(device.compute_capability) != "9.0" for device in module.backend.devices()):
        return False
    mesh = getattr(module.axis_context, "mesh", None)
    if mesh is None:
        return module.axis_context.num_devices == 1
    return mesh.size == 1 or set(mesh.axis_names) == set(module.axis_context.manual_axes)


def _lower(context: Any, *operands: Any, kernel: Function, plain: Function, required: str | None) -> Any:
    chosen = kernel if _takes_kernel(context) else plain
    if chosen is plain and required is not None:
        raise ValueError(required)
    return mlir.lower_fun(jax.jit(chosen), multiple_results=True)(context, *operands)


def _run(*operands: Any, plain: Function, required: str | None, **functions: Any) -> Any:
    if required is None:
        return plain(*operands)
    return jax.jit(lambda *xs: by_target_p.bind(*xs, plain=plain, required=required, **functions))(*operands)


def _abstract(*operands: Any, plain: Function, **_: Any) -> list[Any]:
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in jax.eval_shape(plain, *operands)]


def _batch(operands: Any, axes: Any, *, kernel: Function, plain: Function, required: str | None) -> Any:
    kernel, plain = (jax.vmap(function, in_axes=tuple(axes)) for function in (kernel, plain))
    results = by_target_p.bind(*operands, kernel=kernel, plain=plain, required=required)
    return results, [0] * len(results)


def _differentiate(primals: Any, tangents: Any, *, plain: Function, **_: Any) -> Any:
    return jax.jvp(plain, tuple(primals), tuple(ad.instantiate_zeros(tangent) for tangent in tangents))


by_target_p.def_abstract_eval(_abstract)
by_target_p.def_impl(_run)
mlir.register_lowering(by_target_p, _lower)
batching.primitive_batchers[by_target_p] = _batch
ad.primitive_jvps[by_target_p] = _differentiate
