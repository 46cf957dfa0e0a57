"""Functions element by element, with FP8 of their inputs: in one pass forward, and in one backward."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from coat_jax.ops.stash import Chosen, Stash, Stashable, keep_quantized, restore_quantized
from coat_jax.quant import Implementation, QuantizedArray, QuantSpec
from coat_jax.quant.one_pass import one_pass


@dataclasses.dataclass(frozen=True)
class Elementwise(Stashable):
    """y = fn(x1, x2, ...), element by element: computed in float32, from the inputs or from what is kept, and rounded once.

    As kernels: inputs -> y and FP8 of every input; FP8 -> y; FP8 and dy -> dx1, dx2, ... Each reads and writes once.

    Attributes:
      fn: function of arrays of one shape to one array of that shape, without captured traced values.
      refused: why no kernel computes fn, or None.
      called: the function that a person called, for messages.

    Example:
      >>> import jax.numpy as jnp
      >>> third = Elementwise(lambda x: x / 3)
      >>> print(third(jnp.ones(2, jnp.bfloat16)))
      [0.333984 0.333984]
    """

    refused: str | None = None
    called: str = "elementwise"

    def __call__(self, *inputs: jax.Array) -> jax.Array:
        """y, in the dtype that fn gives the inputs."""
        return self._result([wide(x) for x in inputs], [x.dtype for x in inputs])

    def forward(
        self, inputs: Sequence[Any], params: Sequence[Any], specs: Sequence[QuantSpec | None], implementation: Chosen
    ) -> tuple[jax.Array, tuple[Stash, ...]]:
        """y, and FP8 of each input."""
        [spec, *others] = set(specs)
        if spec is None or others or not all(map(_at_most_float32, inputs)):
            return super().forward(inputs, params, specs, self._plain(implementation))

        def body(*inputs, encode, decode):
            del decode
            return self(*inputs), tuple(map(encode, inputs))

        y, kept = self._pass(body, *inputs, spec=spec, implementation=implementation)
        return y, tuple(map(keep_quantized, kept))

    def recompute(
        self, kept: Sequence[Stash], params: Sequence[Any], implementation: Chosen
    ) -> tuple[Callable[[], Any], Callable[[Any], tuple[Any, ...]]]:
        """y from the stash, and the gradients from the stash and dy."""
        stored = [restore_quantized(x) for x in kept if isinstance(x, QuantizedArray)]
        if len(stored) < len(kept) or not all(map(_at_most_float32, stored)):
            return super().recompute(kept, params, self._plain(implementation))
        dtypes = [q.dtype for q in stored]

        def again(*stored, encode, decode):
            del encode
            return self._result(list(map(decode, stored)), dtypes)

        def gradients(g, *stored, encode, decode):
            del encode
            _, pull = jax.vjp(self.fn, *map(decode, stored))
            return tuple(d.astype(dtype) for d, dtype in zip(pull(wide(g)), dtypes, strict=True))

        def run(body, *args):
            return self._pass(body, *args, spec=stored[0].spec, implementation=implementation)

        return lambda: run(again, *stored), lambda g: run(gradients, g, *stored)

    def _result(self, values: Sequence[jax.Array], dtypes: Sequence[Any]) -> jax.Array:
        """fn(*values), rounded to the dtype that fn gives `dtypes`."""
        given = [jax.ShapeDtypeStruct(x.shape, dtype) for x, dtype in zip(values, dtypes, strict=True)]
        # silu(gate) * up of bfloat16 inputs: fn in float32, one rounding to bfloat16 at the end. In bfloat16 throughout, silu's
        # result would be rounded too, and XLA would leave that rounding out in one program and not in another.
        return self.fn(*values).astype(jax.eval_shape(self.fn, *given).dtype)

    def _pass(self, body: Callable[..., Any], *args: Any, spec: QuantSpec, implementation: Chosen) -> Any:
        return one_pass(body, *args, spec=spec, called=self.called, implementation=implementation, refused=self.refused)

    def _plain(self, implementation: Chosen) -> Implementation | None:
        return Implementation.resolve(
            implementation, self.called, "has kernels for real numbers of at most 32 bits, kept in one spec"
        )


def _at_most_float32(x: Any) -> bool:
    """Whether x is of real numbers that float32 holds."""
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize <= 4


def wide(x: jax.Array) -> jax.Array:
    """x in float32 where it is a real number of fewer bits."""
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4 else x
