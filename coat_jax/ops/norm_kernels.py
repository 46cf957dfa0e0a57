"""Functions of whole rows, norms that is: kernels make and redo their stash in one pass over memory."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coat_jax.ops.stash import Chosen, Stash, Stashable, keep_quantized, restore_quantized
from coat_jax.quant import Implementation, QuantizedArray, QuantSpec, Rounding, codec, dequantize, quantize
from coat_jax.quant.granularity import Groups
from coat_jax.quant.implementation import DEFAULTS, Operation, choose, group_map, refusal
from coat_jax.quant.quantize import merge_codes, split_codes

Mean = Callable[[jax.Array], jax.Array]

WIDEST = 8192
"""Elements of a row that a multiprocessor has the registers and the shared memory for."""


def mean_of_row(x: jax.Array) -> jax.Array:
    """Mean over the last axis, which is kept."""
    return jnp.mean(x, -1, keepdims=True)


def mean_of_groups(x: jax.Array) -> jax.Array:
    """Mean over the last two axes, repeated over them: first in every group, then over the groups.

    It is the mean of a row that lies in groups, in the order in which a kernel computes it and its derivative.
    """
    # A row of 4096 in groups of 128 is (32, 128): 32 sums of 128 numbers, then one sum of 32. One sum of 4096 would round in
    # another order, and the last bit of the mean would depend on who computes it.
    groups = jnp.sum(x, -1)
    mean = jnp.sum(groups, -1) * np.float32(1 / (x.shape[-1] * x.shape[-2]))
    for like in (groups, x):
        mean = jax.lax.broadcast_in_dim(mean, like.shape, tuple(range(mean.ndim)))
    return mean


def norm_refusal(spec: QuantSpec, x: Any, params: Sequence[Any] = ()) -> str | None:
    """Why no kernel takes the rows of x, an array or a `QuantizedArray`, kept as `spec`, or these parameters; or None."""
    groups = Groups.of(spec.granularity, x.shape)
    if groups.axes != (-1,):
        return "has kernels for rows that are kept in groups along them only"
    if reason := refusal(groups):
        return reason
    width, features = max(groups.tile), x.shape[-1]
    if width not in (16, 32, 64, 128, 256):
        return f"has kernels for rows in groups of 16, 32, ... 256 elements, not of {width}"
    stored = 1 if spec.has_exponent else spec.scale_dtype.itemsize  # copies of numbers per group are of 16, 32, ... bytes
    # Groups of 128 with bfloat16 scales: 16 B hold 8 scales, so rows are of 8 x 128 = 1024, 2048, ... elements. Groups of 16:
    # 8 scales as well, 8 x 16 = 128. Float32 scales in groups of 128: 16 B hold 4, so 512.
    multiple = width * max(16 // stored, 8 if width == 16 else 4)
    if features % multiple or features > WIDEST:
        return (
            f"has kernels for rows of {multiple}, {2 * multiple}, ... {WIDEST} elements in groups of {width}, not of {features}"
        )
    if other := [str(p.shape) for p in params if p is not None and p.shape != (features,)]:
        return f"has kernels for parameters of shape ({features},), not of {', '.join(other)}"
    if np.dtype(x.dtype).itemsize != 2:
        return f"has kernels for rows of 16-bit numbers, not of {x.dtype}"
    return "has no kernel that rounds rows stochastically" if spec.rounding is Rounding.STOCHASTIC else None


@dataclasses.dataclass(frozen=True)
class NormFunction(Stashable):
    """y = fn(x, *params) for every row of x.

    Attributes:
      fn: takes x, parameters of its last axis or None, and the keyword `mean`, the mean of the row that an element is in; but
        for that it is elementwise.
      alone: whether the library, left the choice, takes the kernels on one Hopper GPU. Compiled for an H100, 8192 rows of 4096
        and groups of 128, an RMSNorm by itself moves 5.0 bytes per element forward and 5.3 back by kernels, where XLA moves 9.1
        and 11.1. In front of a product XLA fuses it with the product's quantization, and kernels gain nothing: a step of
        Llama-2-7B at batch 4 is 0.02 % faster by the model, and peaks 50 MiB higher.
      called: the function that a person called, for messages.
    """

    fn: Callable[..., jax.Array]
    alone: bool = False
    called: str = "norm"

    @property
    def operation(self) -> Operation:
        """The row of the table of defaults."""
        return Operation.NORM if self.alone else Operation.NORM_BEFORE_PRODUCT

    def forward(
        self, inputs: Sequence[Any], params: Sequence[Any], specs: Sequence[QuantSpec | None], implementation: Chosen
    ) -> tuple[Any, tuple[Stash, ...]]:
        """y and the stash of x; as a kernel it reads x and writes y, payload and scales."""
        [x], [spec] = inputs, specs
        if not jnp.issubdtype(x.dtype, jnp.floating) or self.by_xla(implementation, spec, x, params):
            return super().forward(inputs, params, specs, implementation)
        assert spec is not None
        groups = Groups.of(spec.granularity, x.shape)

        def plain(x, params):
            return self(x, *params), quantize(x, spec)

        def row(x, params, axes):
            codes = codec.encode(x.astype(jnp.float32), spec, axes)
            return self.of_row(x, *params), *(part for part in codes if part is not None)

        def kernel(x, params, *, interpret):
            [(y, *parts)] = run(row, "norm", (groups.split(x),), params, groups, interpret)
            return groups.merge(y), merge_codes(as_codes(parts), groups, spec, x.dtype)

        options: dict[str, Any] = {"operation": self.operation, "called": self.called, "refused": None}
        y, q = choose(kernel, plain, x, params, implementation=implementation, **options)
        return y, (keep_quantized(q),)

    def recompute(
        self, kept: Sequence[Stash], params: Sequence[Any], implementation: Chosen
    ) -> tuple[Callable[[], Any], Callable[[Any], tuple[Any, ...]]]:
        """y, and from dy the gradients; as kernels they read payload, scales and dy, and write y or dx."""
        [stash] = kept
        if not isinstance(stash, QuantizedArray) or self.by_xla(implementation, stash.spec, stash, params):
            return super().recompute(kept, params, implementation)
        q = restore_quantized(stash)

        def again(q, params):
            return self(dequantize(q), *params)

        def pull(q, params, dy):
            return jax.vjp(self, dequantize(q), *params)[1](dy)

        def again_kernel(q, params, *, interpret):
            codes, groups = split_codes(q)

            def row(*args):
                *parts, params, axes = args
                return (self.of_row(decode(parts, q, axes), *params),)

            [(y,)] = run(row, "norm_again", codes, params, groups, interpret)
            return groups.merge(y)

        def pull_kernel(q, params, dy, *, interpret):
            codes, groups = split_codes(q)

            def row(*args):
                *parts, dy, params, axes = args
                return jax.vjp(self.of_row, decode(parts, q, axes), *params)[1](dy)

            count = sum(p is not None for p in params)
            [(dx, *sums)] = run(row, "norm_gradient", (*codes, groups.split(dy)), params, groups, interpret, sums=count)
            made = iter(sums)
            dparams = [None if p is None else next(made).sum(0).reshape(p.shape).astype(p.dtype) for p in params]
            return groups.merge(dx), *dparams

        options: dict[str, Any] = {"operation": self.operation, "called": self.called, "refused": None}
        options["implementation"] = implementation
        return (
            lambda: choose(again_kernel, again, q, params, **options),
            lambda dy: choose(pull_kernel, pull, q, params, dy, **options),
        )

    def by_xla(self, implementation: Chosen, spec: QuantSpec | None, x: Any, params: Sequence[Any]) -> bool:
        """Whether plain JAX is chosen.

        Raises:
          ValueError: a kernel is chosen, and there is none for these rows.
        """
        implementation = DEFAULTS[self.operation] if implementation is None else implementation
        if spec is None or implementation is Implementation.XLA:
            return True
        return Implementation.resolve(implementation, self.called, norm_refusal(spec, x, params)) is Implementation.XLA

    def of_row(self, x: jax.Array, *params: jax.Array | None) -> jax.Array:
        """fn of one row that lies in groups, as a kernel sees it."""
        return self.fn(x, *params, mean=mean_of_groups)


def as_codes(parts: Sequence[jax.Array]) -> codec.Codes:
    """Payload, scale and, if there is one, exponent as codes."""
    return codec.Codes(parts[0], parts[1], parts[2] if len(parts) > 2 else None)


def decode(parts: Sequence[jax.Array], q: QuantizedArray, axes: codec.Axes) -> jax.Array:
    """x of its codes in a kernel, in its own dtype."""
    return codec.decode(as_codes(parts), q.spec, axes).astype(q.dtype)


def run(
    row: Callable[..., tuple[Any, ...]],
    name: str,
    operands: Iterable[jax.Array | None],
    params: Sequence[jax.Array | None],
    groups: Groups,
    interpret: bool,
    sums: int = 0,
) -> list[tuple[jax.Array, ...]]:
    """One launch of row(*operands, params, axes), operands laid out by groups and float32 parameters of a row."""
    [count, width] = groups.split_shape[-2:]

    def fn(*tiles, axes, shared=()):
        loads = iter(shared)
        given = [None if p is None else next(loads)().astype(jnp.float32) for p in params]
        return tuple(part for part in row(*tiles, given, axes) if part is not None)

    leaf = tuple(x for x in operands if x is not None)
    shared = [p.reshape(count, width) for p in params if p is not None]
    return group_map(fn, [leaf], [groups], name=name, shared=shared, row=count, sums=sums, interpret=interpret)
