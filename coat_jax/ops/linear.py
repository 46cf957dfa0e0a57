"""Weight products in FP8: several kernels that share one quantized input and one stash."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from coat_jax.ops.coded_weight import CodedWeight, as_matrix, codes_of, plain_weight
from coat_jax.ops.recipe import Recipe
from coat_jax.ops.scaling import Scaling, seen, write
from coat_jax.ops.stash import STASH, Stash, gradient_once, keep_quantized, restore_quantized, stashed, unstashed
from coat_jax.quant import Amax, PerTensor, QuantizedArray, QuantSpec, dequantize, product, quantize
from coat_jax.quant.explicit import explicit_mesh, joined, on_auto_axes, spec_of

Operand = QuantizedArray | jax.Array
LinearWeight = jax.Array | CodedWeight
"""A kernel, alone or together with its codes."""


def operand(x: jax.Array, spec: QuantSpec | None, recipe: Recipe, amax: jax.Array | None = None) -> Operand:
    """A matrix as an operand of a product: quantized, by an amax that is given or by its own, or as it is for None."""
    return x if spec is None else quantize(x, spec, amax=amax, implementation=recipe.implementation, called="linear")


def values(x: Operand, dtype: Any) -> jax.Array:
    """An operand in the dtype of the computation.

    One scale times the payload is written in `dtype`, the form in which XLA recognises an FP8 product on Hopper.
    """
    if not isinstance(x, QuantizedArray):
        return x.astype(dtype)
    if isinstance(x.spec.granularity, PerTensor) and x.spec.expansion is None:
        return x.payload.astype(dtype) * x.scale.astype(dtype)
    return dequantize(x, dtype)


def turned(x: Operand, spec: QuantSpec, recipe: Recipe, dtype: Any) -> QuantizedArray:
    """The transposed matrix as an operand of a product."""
    return product.quantize_transposed(values(x, dtype), spec, implementation=recipe.implementation, called="linear")


def apart(a: Operand, b: Operand) -> tuple[Operand, Operand]:
    """The operands of a product with scales that are this product's alone.

    XLA makes one product of several small ones that share an operand, and no longer sees that they are FP8. A barrier around
    the payloads would keep them apart too, and keep XLA from writing a payload and its transpose in one pass.
    """
    if not (isinstance(a, QuantizedArray) and isinstance(b, QuantizedArray)):
        return a, b
    a_scale, b_scale = jax.lax.optimization_barrier((a.scale, b.scale))
    return (
        QuantizedArray(a.payload, a_scale, a.exponent, a.spec, a.dtype),
        QuantizedArray(b.payload, b_scale, b.exponent, b.spec, b.dtype),
    )


def matrix_product(a: Operand, b: Operand, contract: tuple[int, int], recipe: Recipe, dtype: Any, out: Any) -> jax.Array:
    """Contracts axis contract[0] of matrix a with contract[1] of matrix b, giving dtype `out`.

    Operands that share a scale among 128 numbers along the contraction are multiplied as they are, all others in `dtype`.
    """
    if isinstance(a, QuantizedArray) and isinstance(b, QuantizedArray) and product.matches(a.spec, b.spec, contract):
        b = b if contract[1] else product.transpose(b)
        return product.scaled_product(a, b, out, implementation=recipe.implementation, called="linear")
    dims = (((contract[0],), (contract[1],)), ((), ()))
    a, b = (values(x, dtype) for x in apart(a, b))
    return jax.lax.dot_general(a, b, dims, precision=recipe.precision, preferred_element_type=out)


def keep_operand(x: Operand, shared: jax.Array | None) -> Stash:
    """What the backward pass gets of a product's input: its FP8, or the array itself where others keep that anyway."""
    if shared is not None:
        return shared
    return keep_quantized(x) if isinstance(x, QuantizedArray) else checkpoint_name(x, STASH)


def restore_operand(kept: Stash) -> Operand:
    """The operand that `keep_operand` kept."""
    return restore_quantized(kept) if isinstance(kept, QuantizedArray) else kept


def products(
    h: jax.Array,
    kernels: Sequence[LinearWeight],
    scaling: Scaling | None,
    recipe: Recipe,
    *,
    axes: int = 1,
    shared: bool = False,
    preferred_element_type: Any = None,
) -> tuple[list[jax.Array], Any]:
    """Y_j = q(H) q(W_j), dH = sum_j q(dY_j) q(W_j)^T, dW_j = q(H)^T q(dY_j), with q the recipe's quantization of each role.

    q(H) is kept for the backward pass. Of a kernel that comes with codes both passes read these; any other is quantized in each
    of them, so that no codes are kept between. Groups of 128 lie along the contraction: for dW they are made anew along the
    rows, of dY from its exact values, of H from what is kept. Reshapes to matrices happen inside, so that h and the kernels,
    where they are kept by reference, stay the very arrays that others keep.

    Args:
      h: (*rows, *contracted).
      kernels: (*contracted, *features) or (contracted, *features), of any float dtype; their gradients have the same.
      scaling: amaxes that are given or wanted; None measures all and tells none.
      recipe: specs of the three roles.
      axes: number of contracted axes of h.
      shared: h is kept anyway, by the op that made it: keep it by reference instead of q(H).
      preferred_element_type: dtype of the products; None takes h's.

    Returns:
      For each kernel an array (*rows, *features); and the amaxes of h and of the kernels that are wanted. Those of
      gradients are written in the backward pass.
    """
    silent = Scaling(Amax(), [Amax()] * len(kernels), [Amax()] * len(kernels))
    amaxes = silent if scaling is None else scaling.of_all(kernels, recipe)
    dtype, shape = h.dtype, h.shape
    rows, size = shape[: len(shape) - axes], math.prod(shape[len(shape) - axes :])
    features = [feature_shape(w, size) for w in kernels]
    into = functools.partial(matrix_product, recipe=recipe, dtype=dtype)

    def left(h, amaxes):
        return operand(h.reshape(math.prod(rows), size), recipe.linear_input, recipe, amaxes.input.given)

    def right(w, amax):
        codes = codes_of(w, size, recipe)
        return operand(as_matrix(plain_weight(w), size), recipe.weight, recipe, amax.given) if codes is None else codes

    def run(h, kernels, amaxes):
        return forward(h, kernels, amaxes)[0]

    def forward(h, kernels, amaxes):
        x = left(h, amaxes)
        rights = map(right, kernels, amaxes.weights)
        ys = [
            into(x, w, (1, 0), out=preferred_element_type or dtype).reshape(rows + f)
            for w, f in zip(rights, features, strict=True)
        ]
        found = seen(amaxes.input, h.reshape(math.prod(rows), size), recipe.linear_input)
        of_weights = [
            seen(amax, as_matrix(plain_weight(w), size), recipe.weight) for w, amax in zip(kernels, amaxes.weights, strict=True)
        ]
        return (ys, (found, of_weights)), (keep_operand(x, h if shared else None), kernels, amaxes)

    def backward(residual, cotangents):
        kept, kernels, amaxes = residual
        gs, _ = cotangents
        x = kept.reshape(math.prod(rows), size) if shared else restore_operand(kept)
        gs = [g.reshape(math.prod(rows), math.prod(f)) for g, f in zip(gs, features, strict=True)]
        for g, amax in zip(gs, amaxes.gradients, strict=True):
            write(amax, seen(amax, g, recipe.gradient))
        quantized = [operand(g, recipe.gradient, recipe, amax.given) for g, amax in zip(gs, amaxes.gradients, strict=True)]
        rights = map(right, kernels, amaxes.weights)
        dhs = [into(g, w, (1, 1), out=dtype) for g, w in zip(quantized, rights, strict=True)]
        contracted, left_spec, right_spec = (0, 0), recipe.linear_input, recipe.gradient
        if left_spec and right_spec and product.matches(left_spec, right_spec):
            x, contracted = turned(x, left_spec, recipe, dtype), (1, 1)
            quantized = [turned(g, right_spec, recipe, dtype) for g in gs]
        x = x if isinstance(x, QuantizedArray) else operand(x, recipe.linear_input, recipe, amaxes.input.given)
        dws = [into(x, g, contracted, out=w.dtype).reshape(w.shape) for g, w in zip(quantized, kernels, strict=True)]
        gradients = [CodedWeight(dw, None) if isinstance(w, CodedWeight) else dw for dw, w in zip(dws, kernels, strict=True)]
        return *jax.tree.map(gradient_once, (functools.reduce(jnp.add, dhs).reshape(shape), gradients)), None

    op = jax.custom_vjp(run)
    op.defvjp(forward, backward)
    return op(h, kernels, amaxes)


def feature_shape(kernel: LinearWeight, size: int) -> tuple[int, ...]:
    """The axes of a kernel behind its contracted ones, which hold `size` elements together."""
    contracted, axis = 1, 0
    while axis < kernel.ndim and (contracted < size or not axis):
        contracted, axis = contracted * kernel.shape[axis], axis + 1
    if contracted != size:
        raise ValueError(f"linear: a kernel of shape {kernel.shape} does not contract with {size} features of the input")
    return kernel.shape[axis:]


def contract(
    h: jax.Array, operands: tuple[Sequence[LinearWeight], Scaling | None], recipe: Recipe, *, axes: int, shared: bool, out: Any
) -> tuple[list[jax.Array], Any]:
    """`products` of h with operands (kernels, scaling), or plain `dot_general` where the recipe quantizes none of them."""
    kernels, scaling = operands
    if recipe.products_quantized:
        return products(h, kernels, scaling, recipe, axes=axes, shared=shared, preferred_element_type=out)
    if scaling is not None:
        raise ValueError("linear: scaling is given, and the recipe quantizes no operand of a product; leave it out")
    size = math.prod(h.shape[h.ndim - axes :])
    for w in kernels:
        codes_of(w, size, recipe)  # codes that no product would read are refused
    rows = h.reshape(*h.shape[: h.ndim - axes], size)
    ys = []
    for w in map(plain_weight, kernels):
        matrix = w.astype(h.dtype).reshape(size, *feature_shape(w, size))
        ys.append(jax.lax.dot_general(rows, matrix, (((rows.ndim - 1,), (0,)), ((), ())), recipe.precision, out))
    return ys, None


def refuse_single(operation: str, **lists: Any) -> None:
    """Raises TypeError for an array where a list of arrays is wanted: unpacked or indexed, it would lose its first axis."""
    for name, given in lists.items():
        if not isinstance(given, (list, tuple)):
            shape = getattr(given, "shape", None)
            what = type(given).__name__ if shape is None else f"an array of shape {shape}"
            raise TypeError(f"{operation}: {name} is {what}; use a list, {name}=[...] even for one array")


class Prologue(NamedTuple):
    """The norm, activation or attention before a product, computed inside the op that consumes it.

    Attributes:
      fn: h = fn(*inputs, *params), without captured traced values.
      spec: what is kept of each input for the backward pass; None keeps the input itself.
      params: parameters of fn, kept by reference.
    """

    fn: Callable[..., Any]
    spec: QuantSpec | None
    params: tuple[Any, ...] = ()


def linear(
    inputs: Sequence[jax.Array],
    kernels: Sequence[LinearWeight],
    recipe: Recipe,
    *,
    prologue: Prologue | None = None,
    axes: int = 1,
    shared: bool = False,
    scaling: Scaling | None = None,
    preferred_element_type: Any = None,
) -> list[jax.Array]:
    """y_j = h · kernels_j with h = prologue(*inputs): what feeds several kernels is quantized once and kept once.

    For the backward pass the prologue's inputs are kept as its spec says, and FP8 of h; with `recipe.recompute` only the
    former, and the prologue is run again. Kernels are kept by reference. A product of two
    operands with one scale each is an FP8 product on Hopper.

    Args:
      inputs: what the prologue reads; without a prologue one array, h itself.
      kernels: each (*contracted, *features), of any float dtype; quantized from it directly. h ends in the contracted axes,
        which a kernel may have as one. A `CodedWeight` brings its codes: it is not quantized here.
      recipe: what the operands are quantized to. Where it names no role of a product, this is plain `dot_general`.
      prologue: what is computed before the product.
      axes: number of contracted axes.
      shared: h is kept anyway by the op that made it; keep it by reference.
      scaling: amaxes that are given instead of measured, and where measured ones are written; None measures all of them.
      preferred_element_type: dtype of the products, as in `jax.lax.dot_general`; None takes h's.

    Returns:
      For each kernel (*leading, *features).

    Raises:
      TypeError: an array in place of a list.
      ValueError: shapes that do not contract; no prologue, and not one input; `scaling` on a mesh with `AxisType.Explicit`.

    Example:
      >>> import jax.numpy as jnp
      >>> from coat_jax import ops, recipes
      >>> [y] = ops.linear([jnp.ones((2, 8))], [jnp.full((8, 3), 0.5)], recipes.coat())
      >>> y.shape, round(y[0, 0].item(), 1)
      ((2, 3), 4.0)

    Source: arXiv 2410.19313, section 5.
    """
    refuse_single("linear", inputs=inputs, kernels=kernels)
    params = () if prologue is None else prologue.params
    mesh = explicit_mesh(inputs, kernels, params) if recipe.products_quantized else None
    if mesh is not None:
        if scaling is not None:
            raise ValueError("linear: scaling is given on a mesh with Explicit axes; make the mesh with AxisType.Auto")
        given = inputs, kernels, params

        def call(inputs: Any, kernels: Any, params: Any) -> list[jax.Array]:
            again = None if prologue is None else prologue._replace(params=params)
            out = preferred_element_type
            return linear(inputs, kernels, recipe, prologue=again, axes=axes, shared=shared, preferred_element_type=out)

        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (*inputs, *params))
        h = shapes[0] if prologue is None else jax.eval_shape(prologue.fn, *shapes)
        return on_auto_axes(call, mesh, _places(inputs[0], h.shape, h.ndim - axes, kernels))(*given)
    operands = list(kernels), scaling
    multiply = functools.partial(contract, recipe=recipe, axes=axes, shared=shared, out=preferred_element_type)
    if prologue is None:
        if len(inputs) != 1:
            raise ValueError(f"linear: {len(inputs)} inputs without a prologue; use one, or a prologue that makes one of them")
        [h] = inputs
        return _told(multiply(h, operands), scaling)
    fn, spec, params = prologue
    if spec is None and not recipe.products_quantized:
        return _told(multiply(unstashed(fn)(*inputs, *params), operands), scaling)
    specs = [spec] * len(inputs)
    keeping = functools.partial(stashed, specs=specs, implementation=recipe.implementation)
    if recipe.recompute:
        # What is redone is at hand exactly. Only a product that wants its groups along the rows has a use for that.
        exact = shared or product.matches(recipe.linear_input, recipe.gradient)
        then = functools.partial(multiply, shared=exact)
        return _told(keeping(fn, then=then)(*inputs, *params, operands), scaling)
    return _told(multiply(keeping(fn)(*inputs, *params), operands), scaling)


def _places(x: jax.Array, shape: tuple[int, ...], rows: int, kernels: Sequence[LinearWeight]) -> list[PartitionSpec]:
    """Where products lie on Explicit axes: rows as those of the input, features as those of the kernel.

    (batch@fsdp, 128) times (128, 512@tensor) gives (batch@fsdp, 512@tensor); times (128@fsdp, 512) gives (batch@fsdp, 512), as
    every device needs the whole kernel.
    """
    size = math.prod(shape[rows:])
    return [joined(spec_of(x)[:rows], spec_of(w)[w.ndim - len(feature_shape(w, size)) :]) for w in map(plain_weight, kernels)]


def _told(result: tuple[list[jax.Array], Any], scaling: Scaling | None) -> list[jax.Array]:
    """The products, once the amaxes of the forward pass are written. Outside of every custom_vjp: a backward pass that runs the
    forward one again, on h as it was kept, must not write the amax of that h."""
    ys, found = result
    if scaling is not None:
        write(scaling.input, found[0])
        for amax, value in zip(scaling.weights, found[1], strict=False):
            write(amax, value)
    return ys
