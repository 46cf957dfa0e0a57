"""See inside a state: what is stored how, how healthy it is, and how far it is from a float32 one."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from coat_jax.optim import convert
from coat_jax.optim.codecs import MomentCodec
from coat_jax.optim.leaves import path_name
from coat_jax.optim.state import CoatAdamState, is_quantized, viewed
from coat_jax.quant import LogRange, PerGroup, PowerExpansion, QuantizedArray


def adam_states(state: Any) -> list[CoatAdamState]:
    """Every `CoatAdamState` inside a tree of states."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, CoatAdamState))
    return [node for node in nodes if isinstance(node, CoatAdamState)]


def describe_state(state: Any, codec: MomentCodec | None = None) -> str:
    """A table of every leaf of a state: path, shape, how it is stored, group, axis, bytes, share of all bytes.

    Args:
      state: any tree of states or of their shapes.
      codec: of the optimizer; None is the one with a name that made the state.

    Example:
      >>> import jax.numpy as jnp
      >>> from coat_jax import coat_adamw
      >>> print(describe_state(coat_adamw(1e-3).init({"kernel": jnp.ones((64, 128))})))
      leaf         shape   stored as            group  axis  bytes   share
      0/count      scalar  int32                -      -     4       0.0%
      0/mu/kernel  64x128  e4m3 PowerExpansion  64     -1    8,832   50.0%
      0/nu/kernel  64x128  e4m3 PowerExpansion  64     -1    8,832   50.0%
      0/codec      scalar  uint32               -      -     4       0.0%
      quantized    100.0%  of mu and nu                      17,664  100.0%
      total                                                  17,672
    """
    rows = []
    state = viewed(state, "describe_state", codec)
    for path, leaf in jax.tree_util.tree_flatten_with_path(state, is_leaf=is_quantized)[0]:
        if isinstance(leaf, QuantizedArray):
            groups = leaf.spec.granularity
            assert isinstance(groups, PerGroup)
            stored = (
                str(leaf.spec.format)
                if leaf.spec.expansion is None
                else f"{leaf.spec.format} {type(leaf.spec.expansion).__name__}"
            )
            rows.append((path_name(path), leaf.shape, stored, str(groups.size), str(groups.axis), leaf.nbytes))
        else:
            rows.append((path_name(path), leaf.shape, str(leaf.dtype), "-", "-", leaf.size * np.dtype(leaf.dtype).itemsize))
    total = sum(row[-1] for row in rows)
    cells = [("leaf", "shape", "stored as", "group", "axis", "bytes", "share")]
    for name, shape, stored, group, axis, size in rows:
        cells.append(
            (name, "x".join(map(str, shape)) or "scalar", stored, group, axis, f"{size:,}", f"{size / max(total, 1):.1%}")
        )
    of_moments, quantized = _share_quantized(state)
    if of_moments is not None:
        share = f"{quantized / max(total, 1):.1%}"
        cells.append(("quantized", f"{of_moments:.1%}", "of mu and nu", "", "", f"{quantized:,}", share))
    cells.append(("total", "", "", "", "", f"{total:,}", ""))
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells)


def _share_quantized(state: Any) -> tuple[float | None, int]:
    """Which share of the elements of mu and nu of a viewed state is quantized, None without moments, and the bytes of these."""
    moments = jax.tree.leaves([(adam.mu, adam.nu) for adam in adam_states(state)], is_leaf=is_quantized)
    stored = [leaf for leaf in moments if is_quantized(leaf)]
    size = sum(leaf.size for leaf in moments)
    return sum(leaf.size for leaf in stored) / size if size else None, sum(leaf.nbytes for leaf in stored)


class Health(NamedTuple):
    """Signals of one step, float32 scalars; cheap enough for every step, as they read one byte per element.

    Attributes:
      nonfinite: share of gradient elements that are NaN or inf. Above 0: skip the step (optax.apply_if_finite) and look at that
        layer's activations.
      saturated: share of quantized mu at the largest code, one in each group at least (1/128). Above 0.1: groups are nearly
        constant; nothing is lost, but a smaller learning rate is due if the loss is restless.
      dormant: share of quantized elements whose mu is exactly 0. Above 0.5: many elements get no gradient; look for dead units
        or frozen parameters, and mask those out of the optimizer.
      octaves: widest range, log2(amax / amin), that a group of nu is fitted to; COAT's smallest k is 16.6 / octaves. Above 24:
        scales inside a group differ too much for E4M3; use `codecs.LOG_RELATIVE`, or keep that leaf in float32.
    """

    nonfinite: jax.Array
    saturated: jax.Array
    dormant: jax.Array
    octaves: jax.Array


def _octaves(moment: QuantizedArray) -> jax.Array:
    expansion, exponent = moment.spec.expansion, moment.exponent
    if exponent is None:
        return jnp.zeros(())
    exponent = exponent.astype(jnp.int32).astype(jnp.float32)
    if isinstance(expansion, PowerExpansion):
        return jnp.max(16.0 * float(np.log2(expansion.target)) / exponent)
    assert isinstance(expansion, LogRange)
    return jnp.max(exponent) / 4.0


def health(grads: Any, state: Any, codec: MomentCodec | None = None) -> Health:
    """The signals of `Health`, from gradients and the state after their step. Works under jit.

    Args:
      grads: gradients as given to the optimizer.
      state: any tree of states with a `CoatAdamState` inside.
      codec: of the optimizer; None is the one with a name that made the state.

    Raises:
      ValueError: no `CoatAdamState` in the state, or one of another codec.
    """
    states = adam_states(viewed(state, "health", codec))
    if not states:
        raise ValueError("health: state holds no CoatAdamState; give the state of coat_adamw, or one with it inside")

    def share(pairs: list[tuple[jax.Array, int]]) -> jax.Array:
        size = sum(n for _, n in pairs)
        return sum((count.astype(jnp.float32) for count, _ in pairs), jnp.zeros(())) / float(max(size, 1))  # 7e9 is no int32

    gradients = [(jnp.sum(~jnp.isfinite(leaf)), leaf.size) for leaf in jax.tree.leaves(grads)]
    stored = [leaf for state in states for leaf in jax.tree.leaves(state.mu, is_leaf=is_quantized) if is_quantized(leaf)]
    codes = [(jnp.abs(leaf.payload.astype(jnp.float32)), leaf.spec.format.max, leaf.size) for leaf in stored]
    seconds = [leaf for state in states for leaf in jax.tree.leaves(state.nu, is_leaf=is_quantized) if is_quantized(leaf)]
    return Health(
        nonfinite=share(gradients),
        saturated=share([(jnp.sum(code == top), size) for code, top, size in codes]),
        dormant=share([(jnp.sum(code == 0), size) for code, _, size in codes]),
        octaves=jnp.max(jnp.stack([jnp.zeros(()), *(_octaves(leaf) for leaf in seconds)])),
    )


class MomentError(NamedTuple):
    """Relative L2 errors over all quantized elements whose reference nu is not 0.

    Attributes:
      mu, nu: of the moments.
      update: of the direction mu / sqrt(nu).
    """

    mu: jax.Array
    nu: jax.Array
    update: jax.Array


def moment_error(state: CoatAdamState, reference: Any, codec: MomentCodec | None = None) -> MomentError:
    """How far stored moments are from float32 ones, over the leaves that are quantized.

    Args:
      state: moments stored by `codec`.
      reference: float32 moments with fields mu and nu, such as `optax.ScaleByAdamState`.
      codec: of the state; None is the one with a name that made it.

    Raises:
      ValueError: nothing in the state is quantized, or it was made with another codec.
    """
    marks = [scale is not None for scale in jax.tree.leaves(state.nu.scale, is_leaf=lambda node: node is None)]
    if not any(marks):
        raise ValueError("moment_error: state has no quantized leaf; compare a state of a codec other than FLOAT32")
    got = convert.read(state, codec, "moment_error")

    def total(fn: Any) -> jax.Array:
        sums = [
            jnp.sum(jnp.where(truth_nu > 0, fn(mu, nu, truth_mu, truth_nu), 0.0))
            for mark, mu, nu, truth_mu, truth_nu in zip(
                marks, *map(jax.tree.leaves, (got.mu, got.nu, reference.mu, reference.nu)), strict=True
            )
            if mark
        ]
        return sum(sums, jnp.zeros(()))

    def direction(mu: jax.Array, nu: jax.Array) -> jax.Array:
        return jnp.where(nu > 0, mu * jax.lax.rsqrt(jnp.where(nu > 0, nu, 1.0)), 0.0)

    def relative(of: Any) -> jax.Array:
        off = total(lambda mu, nu, truth_mu, truth_nu: (of(mu, nu) - of(truth_mu, truth_nu)) ** 2)
        return jnp.sqrt(off / total(lambda mu, nu, truth_mu, truth_nu: of(truth_mu, truth_nu) ** 2))

    return MomentError(relative(lambda mu, nu: mu), relative(lambda mu, nu: nu), relative(direction))
