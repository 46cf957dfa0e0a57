"""`with_master`: a wrapper that keeps float32 weights behind bfloat16 parameters."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from coat_jax.optim import codecs, master
from coat_jax.optim.adam_formula import NoiseUse
from coat_jax.optim.leaves import Named, leaf_seed
from coat_jax.optim.master import Master, Weight
from coat_jax.optim.step import first_order, groups_of, noise_of_leaf


class MasterState(NamedTuple):
    """What parameters lack of float32.

    Attributes:
      count: int32, steps taken.
      compensation: int8 or int16 for each bfloat16 parameter; None for others, and for `Master.STOCHASTIC`.
    """

    count: jax.Array  # type: ignore[assignment]
    compensation: Any


def with_master(tx: optax.GradientTransformation, keep: Master | None) -> optax.GradientTransformationExtraArgs:
    """`tx`, an `optax.chain`, computed in float32 and from float32 weights.

        value <- float32 weight of (param, compensation)      value <- value + tx(grad, value)
        param, compensation <- value                          update = param - old param

    Args:
      tx: a chain that ends in updates for `optax.apply_updates`.
      keep: how bfloat16 parameters keep small updates; None keeps nothing, and updates are rounded to the parameters' dtype.

    Returns:
      A transformation whose state is that of the chain, with a `MasterState` behind it where `keep` is given. Updates have the
      dtype that gradient and parameter have together, as Optax's: bfloat16 where both are.

    Raises:
      ValueError: `update` without parameters, where `keep` is given.
    """
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> tuple[Any, ...]:
        if keep is None:
            return tx.init(params)
        return (*tx.init(params), MasterState(jnp.zeros([], jnp.int32), jax.tree.map(lambda p: master.zero(p, keep), params)))

    def update(
        updates: Any, state: tuple[Any, ...], params: Any = None, *, row: jax.Array | None = None, **extra: Any
    ) -> tuple[Any, tuple[Any, ...]]:
        if params is None:
            if keep is None:
                return tx.update(updates, state, row=row, **extra)  # which says what it lacks
            raise ValueError(f"coat_adamw: params=None; master={str(keep)!r} needs the parameters in update")
        tree = Named.of(params)
        inner, kept = (state, None) if keep is None else (state[:-1], state[-1])
        lacks = [None] * len(tree.leaves) if kept is None else tree.beside(kept.compensation)[0]
        values = [
            master.load(Weight(first_order(param) if master.splits(param, keep) else param, lack))
            for param, lack in zip(tree.leaves, lacks, strict=True)
        ]
        changes, inner = tx.update(updates, inner, tree.structure.unflatten(values), row=row, **extra)
        columns = zip(tree.names, tree.leaves, values, *tree.beside(updates, changes), strict=True)
        count: Any = None if kept is None else optax.safe_increment(kept.count)
        rows: list[tuple[Any, Any]] = []
        for name, param, value, grad, change in columns:
            dtype = jnp.promote_types(grad.dtype, param.dtype)
            if keep is None or not master.splits(param, keep):
                rows.append((change.astype(dtype), None))
                continue
            noise = None
            if master.needs_noise(param, keep):
                groups = groups_of(codecs.FLOAT32, param.shape)
                noise = groups.merge(noise_of_leaf(leaf_seed(name), codecs.FLOAT32, groups, row, count)(NoiseUse.MASTER))
            change, new = master.landing(value + change, param, keep, noise, dtype)
            rows.append((change, new.compensation))
        updates, compensation = tree.build(rows, 2)
        return updates, inner if kept is None else (*inner, MasterState(count, compensation))

    return optax.GradientTransformationExtraArgs(init, update)
