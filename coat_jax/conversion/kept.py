"""What differentiation keeps of a model between its passes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax


def kept_bytes(fn: Callable[..., Any], params: Any, inputs: Sequence[Any]) -> int:
    """Bytes of the residuals of fn(params, *inputs), without the parameters themselves. Nothing is compiled."""
    sizes: list[int] = []

    def run(params: Any, *inputs: Any) -> Any:
        given = {id(leaf) for leaf in jax.tree.leaves(params)}
        _, pull = jax.vjp(lambda params: fn(params, *inputs), params)
        sizes.extend(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull) if id(leaf) not in given)
        return 0

    jax.eval_shape(run, params, *inputs)
    return sum(sizes)
