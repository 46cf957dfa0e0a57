"""Every kernel and product of the library as a case: a function for each implementation, its random operands, and the least
that any implementation would move. The static table, the timed bench and the doctor take their rows from here."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coat_jax import ops
from coat_jax.optim import coat_adamw, codecs, master
from coat_jax.optim.state import viewed
from coat_jax.quant import (
    E4M3,
    Implementation,
    PerBlock,
    PerGroup,
    PerTensor,
    PowerExpansion,
    QuantSpec,
    dequantize,
    quantize,
    scaled_product,
)

Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Extents that cases are made of."""

    tokens: int
    hidden: int
    intermediate: int


LLAMA_7B = Sizes(tokens=8192, hidden=4096, intermediate=11008)
"""Llama-2-7B with four sequences of 2048 tokens."""


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """One kernel, or one product, at one shape.

    Attributes:
      name: of the row.
      make: implementation -> the function; "xla" makes the reference that the others are compared with.
      inputs: random key -> the function's operands. Traceable: their shapes come from `jax.eval_shape`.
      elements: of the array per whose elements bytes are counted.
      least: bytes per element that any implementation moves.
      donated: numbers of the operands that are updated in place.
      flops: of a product; 0 for what streams, whose copies stay within 5 % of `least`.
      stands_for: results -> the values to compare, where one part of a result makes up for the rounding of another.
    """

    name: str
    make: Callable[[str | None], Function]
    inputs: Callable[[jax.Array], tuple[Any, ...]]
    elements: int
    least: float
    donated: tuple[int, ...] = ()
    flops: float = 0
    stands_for: Callable[[Any], Any] = lambda results: results

    @property
    def abstract(self) -> tuple[Any, ...]:
        """Shapes and dtypes of the operands."""
        return jax.eval_shape(lambda: self.inputs(jax.random.key(0)))


def cases(sizes: Sizes = LLAMA_7B) -> tuple[KernelSpec, ...]:
    """Every kernel of the library, at `sizes`."""
    return _cases(sizes)


@functools.cache  # behind `cases`, for which `cases()` and `cases(LLAMA_7B)` would be two tables of kernels compiled twice
def _cases(sizes: Sizes) -> tuple[KernelSpec, ...]:
    return (*_quantization(sizes), *_norms(sizes), *_activations(sizes), *_optimizer(sizes), *_products(sizes))


def matching(only: str, sizes: Sizes = LLAMA_7B) -> tuple[KernelSpec, ...]:
    """The kernels whose names hold `only`.

    Raises:
      ValueError: there is none.
    """
    found = tuple(case for case in cases(sizes) if only in case.name)
    if not found:
        kinds = dict.fromkeys(case.name.split(",")[0] for case in cases(sizes))
        raise ValueError(f"only={only!r} is in no kernel's name; use part of one of {', '.join(kinds)}")
    return found


def numbers(key: jax.Array, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Random values over many octaves, of both signs."""
    key, other = jax.random.split(key)
    return (jax.random.normal(key, shape) * jnp.exp(jax.random.normal(other, shape))).astype(dtype)


def _quantization(sizes: Sizes) -> list[KernelSpec]:
    rows = []
    bf16, f32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)
    for size, scale, expansion in ((16, bf16, None), (128, f32, None), (128, f32, PowerExpansion())):
        spec = QuantSpec(E4M3, PerGroup(size), expansion, scale_dtype=scale)
        least = 3 + (spec.scale_dtype.itemsize + spec.has_exponent) / size
        rows += [_quantize(sizes, spec, least), _dequantize(sizes, spec, least)]
    tensor = QuantSpec(E4M3, PerTensor(), scale_dtype=bf16)
    return [*rows, _quantize(sizes, tensor, 5)]  # the scale is known once all has been read


def _quantize(sizes: Sizes, spec: QuantSpec, least: float) -> KernelSpec:
    def make(implementation: str | None) -> Function:
        return functools.partial(quantize, spec=spec, implementation=implementation)

    def inputs(key: jax.Array) -> tuple[Any, ...]:
        return (numbers(key, sizes.tokens, sizes.intermediate),)

    return KernelSpec(f"quantize, {spec}", make, inputs, sizes.tokens * sizes.intermediate, least)


def _dequantize(sizes: Sizes, spec: QuantSpec, least: float) -> KernelSpec:
    def make(implementation: str | None) -> Function:
        return functools.partial(dequantize, implementation=implementation)

    def inputs(key: jax.Array) -> tuple[Any, ...]:
        return (quantize(numbers(key, sizes.tokens, sizes.intermediate), spec),)

    return KernelSpec(f"dequantize, {spec}", make, inputs, sizes.tokens * sizes.intermediate, least)


def _norms(sizes: Sizes) -> list[KernelSpec]:
    """The norm before a layer's products: RMSNorm as Llama has it, with a bf16 weight, and OLMo's LayerNorm without any."""
    rms, layer = (ops.NormFunction(functools.partial(fn, eps=1e-5)) for fn in (ops.normalize_rms, ops.normalize_layer))
    shape = (sizes.tokens, sizes.hidden)
    norms = (("RMSNorm", rms, 16), ("RMSNorm", rms, 128), ("LayerNorm", layer, 128))
    return [case for name, norm, size in norms for case in _stashing(name, norm, shape, size, weighted=norm is rms)]


def _activations(sizes: Sizes) -> list[KernelSpec]:
    """What stands between the products of a layer: SwiGLU as Llama has it, and SiLU alone."""
    shape = (sizes.tokens, sizes.intermediate)
    swiglu, silu = ops.Elementwise(ops.gate_silu), ops.Elementwise(jax.nn.silu)
    kinds = (("SwiGLU", swiglu, 16, 2), ("SwiGLU", swiglu, 128, 2), ("SiLU", silu, 128, 1))
    return [case for name, fn, size, count in kinds for case in _stashing(name, fn, shape, size, count=count)]


def _stashing(
    name: str, fn: ops.Stashable, shape: tuple[int, int], size: int, *, count: int = 1, weighted: bool = False
) -> list[KernelSpec]:
    """Of a function of `count` arrays in groups of `size`: y and the stash; y from the stash; gradients from stash and dy."""
    spec = QuantSpec(E4M3, PerGroup(size), scale_dtype=np.dtype(jnp.bfloat16))

    def forward(implementation: str | None) -> Function:
        return lambda xs, dy, kept, params: fn.forward(xs, params, [spec] * count, implementation)

    def again(implementation: str | None) -> Function:
        return lambda xs, dy, kept, params: fn.recompute(kept, params, implementation)[0]()

    def gradient(implementation: str | None) -> Function:
        return lambda xs, dy, kept, params: fn.recompute(kept, params, implementation)[1](dy)

    def inputs(key: jax.Array) -> tuple[Any, ...]:
        dy, *xs = (numbers(k, *shape) for k in jax.random.split(key, 1 + count))
        params = [numbers(key, shape[1])] if weighted else []
        _, kept = fn.forward(xs, params, [spec] * count, Implementation.XLA)
        return xs, dy, kept, params

    stash = count * (1 + 2 / size)
    least = {"": (forward, 2 * count + 2), ", again": (again, 2), ", gradient": (gradient, 2 + 2 * count)}
    return [KernelSpec(f"{name}, {spec}{part}", make, inputs, math.prod(shape), n + stash) for part, (make, n) in least.items()]


def _products(sizes: Sizes) -> list[KernelSpec]:
    """Weights in blocks, a product by them, and the product that is their gradient. A gate projection of the Llama layer."""
    groups, blocks = QuantSpec(E4M3, PerGroup(128)), QuantSpec(E4M3, PerBlock((128, 128)))
    tokens, hidden, wide = sizes.tokens, sizes.hidden, sizes.intermediate

    def quantizing(implementation: str | None) -> Function:
        return functools.partial(quantize, spec=blocks, implementation=implementation)

    def weight(key: jax.Array) -> tuple[Any, ...]:
        return (numbers(key, hidden, wide),)

    return [
        KernelSpec(f"quantize, {blocks}", quantizing, weight, hidden * wide, 3 + 4 / 128**2),
        _product("product by weights", (tokens, hidden), groups, (wide, hidden), blocks),
        _product("product of a weight gradient", (hidden, tokens), groups, (wide, tokens), groups),
    ]


def _product(name: str, left: tuple[int, int], a: QuantSpec, right: tuple[int, int], b: QuantSpec) -> KernelSpec:
    def make(implementation: str | None) -> Function:
        return functools.partial(scaled_product, dtype=np.dtype(jnp.bfloat16), implementation=implementation)

    def inputs(key: jax.Array) -> tuple[Any, ...]:
        one, other = jax.random.split(key)
        return quantize(numbers(one, *left), a), quantize(numbers(other, *right), b)

    elements = left[0] * right[0]
    stored = sum(q.nbytes for q in jax.eval_shape(inputs, jax.random.key(0)))
    least = 2 + stored / elements
    return KernelSpec(f"{name}, {a.granularity} x {b.granularity}", make, inputs, elements, least, flops=2 * elements * left[1])


def _optimizer(sizes: Sizes) -> list[KernelSpec]:
    extra = {"coat": 5.0, "log_relative": 4.5}  # bytes per group and moment besides payloads
    more = {None: 0, "bf16+8": 2, "bf16-stochastic": 0}  # bytes per parameter
    return [
        _update(sizes, codec, kept, 10 + 4 * extra[codec] / 128 + more[kept])
        for codec in ("coat", "log_relative")
        for kept in (None, "bf16+8", "bf16-stochastic")
    ]


def _update(sizes: Sizes, codec: str, kept: str | None, least: float) -> KernelSpec:
    """The second step of AdamW, so that there are moments to decode; updates are as large as the parameters."""

    def optimizer(implementation: str | None) -> Any:
        return coat_adamw(1e-2, b2=0.95, codec=codecs.named(codec), master=kept, implementation=implementation)

    def make(implementation: str | None) -> Function:
        return optimizer(implementation).update_and_apply

    def inputs(key: jax.Array) -> tuple[Any, ...]:
        first, second, start = (
            {"kernel": (1e-2 * numbers(k, sizes.hidden, sizes.intermediate)).astype(jnp.bfloat16)}
            for k in jax.random.split(key, 3)
        )
        params, state = make("xla")(first, optimizer("xla").init(start), start)
        return second, state, params

    def stands_for(results: Any) -> Any:
        params, state = results
        state = viewed(state, "bench", codecs.named(codec))
        if kept != "bf16+8":
            return params, state[0]
        return master.load(master.Weight(params["kernel"], state[3].compensation["kernel"])), state[0]

    return KernelSpec(
        f"AdamW, {codec}, master {kept}",
        make,
        inputs,
        sizes.hidden * sizes.intermediate,
        least,
        donated=(1, 2),
        stands_for=stands_for,
    )
