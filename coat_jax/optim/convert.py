"""Between states: a running `optax.adamw` to `coat_adamw` and back."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from coat_jax.optim import adam_formula, codecs, leaves
from coat_jax.optim.adam_formula import Moments
from coat_jax.optim.codecs import MomentCodec
from coat_jax.optim.leaves import Named, leaf_seed
from coat_jax.optim.state import CoatAdamState, guard, is_quantized, mark, pack, recognized, replace_states, unpack
from coat_jax.optim.step import groups_of, merge, noise_of_leaf
from coat_jax.quant import QuantizedArray, dequantize


def read_moment(stored: QuantizedArray | jax.Array) -> jax.Array:
    """One stored moment in float32, r itself where it is kept relative."""
    return dequantize(stored) if isinstance(stored, QuantizedArray) else stored


def read(state: CoatAdamState, codec: MomentCodec | None, operation: str) -> optax.ScaleByAdamState:
    """The moments that a state stands for, in float32, as a state of `optax.scale_by_adam`.

    Args:
      state: of an optimizer with this codec.
      codec: of the optimizer; None is the one with a name that made the state.
      operation: who asks, for messages.

    Raises:
      ValueError: the state was made with another codec.
    """

    own = recognized(state, operation) if codec is None else codec

    def mu_of(mu: Any, nu: Any) -> jax.Array:
        value, second = read_moment(mu), read_moment(nu)
        if not (is_quantized(mu) or is_quantized(nu)):
            return value
        return jnp.where(second > 0, value * jnp.sqrt(second) if own.relative else value, 0.0)

    guard(state, own, operation)
    tree = Named.of(state.mu.codes)
    mus, nus = unpack(state, own, operation)
    mu, nu = [mu_of(*pair) for pair in zip(mus, nus, strict=True)], [read_moment(nu) for nu in nus]
    return optax.ScaleByAdamState(state.count, tree.structure.unflatten(mu), tree.structure.unflatten(nu))


def to_adamw(state: Any, codec: MomentCodec | None = None) -> Any:
    """The state of `optax.adamw` that a `coat_adamw` state without a master stands for, at any depth of wrappers and chains.

    Args:
      state: any tree of states.
      codec: of the optimizer; None is the one with a name that made the state.

    Raises:
      ValueError: the state was made with another codec, or with one that has no name.

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
            noise = noise_of_leaf(leaf_seed(name), own, groups, None, node.count)
            kept = adam_formula.encode(pair, own, groups.axes, jnp.zeros(pair.mu.shape, bool), noise)
            rows.append((merge(kept.mu, groups, own.mu), merge(kept.nu, groups, own.nu)))
        return pack(tree, node.count, [mu for mu, _ in rows], [nu for _, nu in rows], jnp.uint32(mark(codec)))

    return replace_states(state, optax.ScaleByAdamState, convert)
