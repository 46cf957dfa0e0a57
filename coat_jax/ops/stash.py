"""Stashes: activations kept in FP8 from the forward pass for the backward pass, and the one factory of ops that keep them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from coat_jax.ops.recipe import Recipe
from coat_jax.quant import Implementation, QuantizedArray, QuantSpec, dequantize, quantize

Chosen = Implementation | str | None

STASH = "coat_stash"
"""The `checkpoint_name` of every stash."""

Stash = QuantizedArray | jax.Array

remat_policy = jax.checkpoint_policies.save_only_these_names(STASH)
"""For `jax.checkpoint` and `nn.remat`: keep exactly the stashes, redo everything else."""


def keep_quantized(q: QuantizedArray) -> QuantizedArray:
    """q as a residual: every part under the name of stashes, the payload as plain bytes.

    `jax.checkpoint` rounds a saved floating-point value that the forward pass uses too, and its rounding turns E4M3 values
    of 256 and above into NaN. Bytes it leaves alone.
    """
    # jax.checkpoint puts reduce_precision(exponent_bits=4, mantissa_bits=3) on a saved E4M3 value. That is an IEEE format of
    # this width, in which the largest exponent means inf and NaN: 240 stays 240, and 256, 288, ... 448 all become NaN.
    payload = jax.lax.bitcast_convert_type(q.payload, jnp.uint8)
    parts = [None if part is None else checkpoint_name(part, STASH) for part in (payload, q.scale, q.exponent)]
    return QuantizedArray.tree_unflatten((q.spec, q.dtype), parts)


def restore_quantized(kept: QuantizedArray) -> QuantizedArray:
    """The inverse of `keep_quantized`."""
    payload = jax.lax.bitcast_convert_type(kept.payload, kept.spec.format.dtype)
    return QuantizedArray.tree_unflatten((kept.spec, kept.dtype), (payload, kept.scale, kept.exponent))


def keep(x: jax.Array, spec: QuantSpec | None, implementation: Chosen = None) -> Stash:
    """What the backward pass gets of x: x quantized to `spec`; x itself for None or where x holds no real numbers."""
    if spec is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return checkpoint_name(x, STASH)
    return keep_quantized(quantize(x, spec, implementation=implementation))


def restore(kept: Stash, implementation: Chosen = None) -> jax.Array:
    """The array that `keep` stands for, in its own dtype."""
    if not isinstance(kept, QuantizedArray):
        return kept
    return dequantize(restore_quantized(kept), implementation=implementation)


@jax.custom_jvp
def _once(gradient: jax.Array) -> jax.Array:
    return gradient


@_once.defjvp
def _refuse_second_derivative(primals: Any, tangents: Any) -> Any:
    raise TypeError(
        "a second derivative through an op that keeps FP8 is asked for, and rounded numbers carry none; "
        "use recipes.bf16() for what a gradient penalty or a Hessian runs through"
    )


def gradient_once(gradient: Any) -> Any:
    """A gradient made of rounded numbers, which has no derivative of its own; None for that of an array of no real numbers.

    The derivative of rounding is 0 almost everywhere, so that second derivatives would be wrong without a word.

    Raises:
      TypeError: a program that differentiates it.
    """
    return None if getattr(gradient, "dtype", None) == jax.dtypes.float0 else _once(gradient)


def differentiable(leaf: Any) -> bool:
    """Whether a gradient flows into an array: real numbers of more than one byte (codes have none), not behind a `jax.Ref`."""
    real = not isinstance(leaf, jax.Ref) and jnp.issubdtype(leaf.dtype, jnp.floating)
    return real and leaf.dtype.itemsize > 1


def vjp_of_last(then: Callable[[Any, Any], Any], h: Any, last: Any) -> Callable[[Any], tuple[Any, Any]]:
    """The vjp of then(h, last) in h and in the differentiable leaves of `last`; the others get None."""
    leaves, tree = jax.tree.flatten(last)
    moving = [differentiable(leaf) for leaf in leaves]

    def of_moving(h: Any, some: list[Any]) -> Any:
        found = iter(some)
        return then(h, jax.tree.unflatten(tree, [next(found) if m else x for m, x in zip(moving, leaves, strict=True)]))

    _, pull = jax.vjp(of_moving, h, [leaf for leaf, m in zip(leaves, moving, strict=True) if m])

    def spread(cotangent: Any) -> tuple[Any, Any]:
        of_h, some = pull(cotangent)
        found = iter(some)
        return of_h, jax.tree.unflatten(tree, [next(found) if m else None for m in moving])

    return spread


@dataclasses.dataclass(frozen=True)
class Stashable:
    """A function, and how it is run while FP8 of its inputs is made, and redone from that. Here by plain JAX.

    A subclass has kernels that do one or the other in one pass over memory.

    Attributes:
      fn: function of arrays (pytrees, for parameters), without captured traced values.
    """

    fn: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """fn(*args)."""
        return self.fn(*args)

    def forward(
        self, inputs: Sequence[Any], params: Sequence[Any], specs: Sequence[QuantSpec | None], implementation: Chosen
    ) -> tuple[Any, tuple[Stash, ...]]:
        """The result on exact values, and what is kept of each input."""
        return self(*inputs, *params), tuple(keep(x, spec, implementation) for x, spec in zip(inputs, specs, strict=True))

    def recompute(
        self, kept: Sequence[Stash], params: Sequence[Any], implementation: Chosen
    ) -> tuple[Callable[[], Any], Callable[[Any], tuple[Any, ...]]]:
        """Like `jax.vjp`, at what was kept: a function that gives the result, and one from cotangent to gradients."""
        y, pull = jax.vjp(self, *(restore(x, implementation) for x in kept), *params)
        return lambda: y, pull


def stashed(
    fn: Callable[..., Any],
    specs: Sequence[QuantSpec | None],
    *,
    implementation: Chosen = None,
    then: Callable[[Any, Any], Any] | None = None,
) -> Callable[..., Any]:
    """`fn`, keeping its inputs in FP8 and nothing else: y = fn(x, w), and (dx, dw) = vjp of fn at (decode(encode(x)), w).

    The forward pass works on exact values. The backward pass reruns `fn` on what it kept.

    Args:
      fn: function of arrays (pytrees, for parameters), without captured traced values; a `Stashable` may have kernels.
      specs: one for each leading argument, an array: what is kept of it (None: itself). Arguments beyond are parameters:
        the caller holds them anyway, so they are kept by reference.
      implementation: who quantizes and dequantizes; see `coat_jax.quantize`.
      then: y = then(fn(x, w), last), `last` one more argument, kept by reference: what consumes fn's result keeps nothing.

    Returns:
      A function of the same arguments, differentiable in all of them.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from coat_jax import E4M3, PerGroup, QuantSpec
      >>> from coat_jax.ops import stashed
      >>> square = stashed(lambda x: x * x, [QuantSpec(E4M3, PerGroup(16))])
      >>> print(jax.grad(lambda x: square(x).sum())(jnp.arange(3.0)))
      [0. 2. 4.]
    """
    specs, count = tuple(specs), len(specs)
    stashable = fn if isinstance(fn, Stashable) else Stashable(fn)
    by_kernel = implementation in (Implementation.PALLAS, Implementation.INTERPRET)

    def run(*args):
        if by_kernel:  # asked for by name: the kernel computes the result here too, or says why it cannot
            return forward(*args)[0]
        return stashable(*args) if then is None else then(stashable(*args[:-1]), args[-1])

    def forward(*args):
        args, last = (args, ()) if then is None else (args[:-1], args[-1])
        h, kept = stashable.forward(args[:count], args[count:], specs, implementation)
        return h if then is None else then(h, last), (kept, args[count:], last)

    def backward(residual, cotangent):
        kept, params, last = residual
        again, pull = stashable.recompute(kept, params, implementation)
        of_last: Any = ()
        if then is not None:
            cotangent, *of_last = vjp_of_last(then, again(), last)(cotangent)
        return tuple(jax.tree.map(gradient_once, (*pull(cotangent), *of_last)))

    op = jax.custom_vjp(run)
    op.defvjp(forward, backward)
    return op


def unstashed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """fn as plain autodiff gets it: what its Flax namesake computes, bit for bit."""
    return fn.fn if isinstance(fn, Stashable) else fn


def nonlinear(fn: Callable[..., jax.Array], inputs: Sequence[jax.Array], recipe: Recipe, *params: Any) -> jax.Array:
    """fn(*inputs, *params), inputs kept as `recipe.nonlinear_input`; where that is None, plain autodiff decides."""
    spec = recipe.nonlinear_input
    if spec is None:
        return unstashed(fn)(*inputs, *params)
    return stashed(fn, [spec] * len(inputs), implementation=recipe.implementation)(*inputs, *params)
