"""Between states: a running `optax.adamw` to `coat_adamw` and back."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from coat_jax.optim import adam_formula, codecs, leaves
from coat_jax.optim.adam_formula import Moments
from coat_jax.optim.adamw import CoatAdamState
from coat_jax.optim.codecs import MomentCodec
from coat_jax.optim.leaves import Named
from coat_jax.optim.step import codec_of, groups_of, merge, noise_of_leaf
from coat_jax.quant import QuantizedArray, dequantize


def is_quantized(node: Any) -> bool:
    """Whether a node of a state is a `QuantizedArray`."""
    return isinstance(node, QuantizedArray)


def replace_states(state: Any, kind: type, fn: Callable[[Any], Any]) -> Any:
    """`state` with every node of type `kind` replaced by fn of it."""
    return jax.tree.map(lambda node: fn(node) if isinstance(node, kind) else node, state, is_leaf=lambda n: isinstance(n, kind))


def read_moment(stored: QuantizedArray | jax.Array) -> jax.Array:
    """One stored moment in float32, r itself where it is kept relative."""
    return dequantize(stored) if isinstance(stored, QuantizedArray) else stored


def read(state: CoatAdamState, codec: MomentCodec, operation: str) -> optax.ScaleByAdamState:
    """The moments that a state stands for, in float32, as a state of `optax.scale_by_adam`.

    Args:
      state: of an optimizer with this codec.
      codec: what tells a relative mu from a plain one.
      operation: who asks, for messages.

    Raises:
      ValueError: the state was made with another codec.
    """

    def mu_of(mu: Any, nu: Any) -> jax.Array:
        codec_of(codec, mu, nu, operation)
        value, second = read_moment(mu), read_moment(nu)
        if not (is_quantized(mu) or is_quantized(nu)):
            return value
        return jnp.where(second > 0, value * jnp.sqrt(second) if codec.relative else value, 0.0)

    mu = jax.tree.map(mu_of, state.mu, state.nu, is_leaf=is_quantized)
    return optax.ScaleByAdamState(state.count, mu, jax.tree.map(read_moment, state.nu, is_leaf=is_quantized))


def to_adamw(state: Any, codec: MomentCodec = codecs.COAT) -> Any:
    """The state of `optax.adamw` that a `coat_adamw` state without a master stands for, at any depth of wrappers and chains.

    Args:
      state: any tree of states.
      codec: of the optimizer.

    Raises:
      ValueError: the state was made with another codec.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from coat_jax import coat_adamw
      >>> params = {"kernel": jnp.ones((64, 128))}
      >>> plain = to_adamw(coat_adamw(1e-3).init(params))
      >>> updates, plain = optax.adamw(1e-3).update(params, plain, params)
    """
    return replace_states(state, CoatAdamState, lambda node: read(node, codec, "to_adamw"))


def from_adamw(
    state: Any,
    codec: MomentCodec = codecs.COAT,
    *,
    quantize_filter: Sequence[str] | None = None,
    min_size: int | None = None,
) -> Any:
    """The state of `coat_adamw` nearest to one of `optax.adamw`, at any depth of wrappers and chains.

    Args:
      state: any tree of states.
      codec, quantize_filter, min_size: as given to `coat_adamw`.

    Raises:
      TypeError, ValueError: as `coat_adamw` for the filter.
    """
    patterns, least = leaves.check_filter(quantize_filter), leaves.check_min_size(min_size)

    def convert(node: optax.ScaleByAdamState) -> CoatAdamState:
        tree = Named.of(node.mu)
        rows = []
        chosen = leaves.choose_codecs(tree, codec, patterns, least)
        for name, own, mu, nu in zip(tree.names, chosen, tree.leaves, *tree.beside(node.nu), strict=True):
            groups = groups_of(own, mu.shape)
            pair = Moments(*(groups.split(moment.astype(jnp.float32)) for moment in (mu, nu)))
            noise = noise_of_leaf(name, own, groups, None, node.count)
            kept = adam_formula.encode(pair, own, groups.axes, jnp.zeros(pair.mu.shape, bool), noise)
            rows.append((merge(kept.mu, groups, own.mu), merge(kept.nu, groups, own.nu)))
        return CoatAdamState(node.count, *tree.build(rows, 2))

    return replace_states(state, optax.ScaleByAdamState, convert)
