"""`scale_by_coat_adam` and `coat_adamw`: Adam and AdamW as Optax transformations whose moments take one byte each."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from coat_jax.optim import codecs, leaves, moments
from coat_jax.optim.codecs import MomentCodec
from coat_jax.optim.moments import Hyper, Moments
from coat_jax.quant import Groups, Implementation, PerGroup, QuantizedArray, QuantSpec, rounding
from coat_jax.quant.formats import TINY
from coat_jax.quant.quantize import merge_codes, split_codes


class CoatAdamState(NamedTuple):
    """Adam's state: `optax.ScaleByAdamState` in which leaves of mu and nu may be quantized.

    Attributes:
      count: int32, steps taken.
      mu: first moments; a `QuantizedArray`, or float32, for each parameter.
      nu: second moments, likewise.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: Any
    nu: Any


def zeros(shape: tuple[int, ...], spec: QuantSpec | None) -> QuantizedArray | jax.Array:
    """A moment of zeros: float32, or as `spec` stores it."""
    if spec is None:
        return jnp.zeros(shape, jnp.float32)
    scale_shape = Groups.of(spec.granularity, shape).scale_shape
    exponent = jnp.ones(scale_shape, jnp.uint8) if spec.has_exponent else None
    payload, scale = jnp.zeros(shape, spec.format.dtype), jnp.full(scale_shape, TINY, spec.scale_dtype)
    return QuantizedArray(payload, scale, exponent, spec, jnp.float32)


def _split(stored: QuantizedArray | jax.Array, groups: Groups) -> Any:
    return split_codes(stored)[0] if isinstance(stored, QuantizedArray) else groups.split(stored)


def _merge(stored: Any, groups: Groups, spec: QuantSpec | None) -> QuantizedArray | jax.Array:
    return groups.merge(stored) if spec is None else merge_codes(stored, groups, spec, np.dtype(np.float32))


def stored_codec(mu: QuantizedArray | jax.Array, nu: QuantizedArray | jax.Array, codec: MomentCodec) -> MomentCodec | None:
    """The codec that a leaf's moments are stored with: `codec` along the axis of their groups, or None for float32."""
    for moment in (nu, mu):
        if isinstance(moment, QuantizedArray):
            assert isinstance(moment.spec.granularity, PerGroup)
            return codec.along(moment.spec.granularity.axis)
    return None


def step_leaf(
    grad: jax.Array, mu: Any, nu: Any, codec: MomentCodec, hyper: Hyper, seed: int, offset: jax.Array | int = 0
) -> tuple[jax.Array, Any, Any]:
    """One step of one quantized leaf: the direction (float32), mu and nu. `offset` is the number of its first element."""
    spec = codec.nu or codec.mu
    assert spec is not None
    groups = Groups.of(spec.granularity, grad.shape)
    index = groups.split(rounding.element_index(grad.shape, offset)) if codec.stochastic else None
    stored = Moments(_split(mu, groups), _split(nu, groups))
    direction, kept = moments.step(groups.split(grad.astype(jnp.float32)), stored, codec, groups.axes, hyper, seed, index)
    return groups.merge(direction), _merge(kept.mu, groups, codec.mu), _merge(kept.nu, groups, codec.nu)


def scale_by_coat_adam(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    *,
    codec: MomentCodec = codecs.COAT,
    quantize_filter: Sequence[str] | None = None,
    min_size: int = 4096,
    implementation: Implementation | str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam's direction, `optax.scale_by_adam`, with moments stored by `codec` between steps.

        mu <- b1 mu + (1 - b1) g        nu <- b2 nu + (1 - b2) g^2
        u = (mu / (1 - b1^t)) / (sqrt(nu / (1 - b2^t) + eps_root) + eps)        mu, nu <- stored(mu, nu)

    Args:
      b1, b2: decay rates of the moments.
      eps: added to the root of the second moment.
      eps_root: added under the root.
      codec: how moments are stored; one of `coat_jax.codecs` or a `MomentCodec` of your own.
      quantize_filter: path patterns; the last one that fits a leaf's path, such as "layers/mlp/kernel", decides, and "!"
        excludes. None is ("*", "!*embed*", "!*scale", "!*bias"). Other leaves keep float32 moments.
      min_size: leaves of fewer elements keep float32 moments.
      implementation: who computes it; None leaves the choice to the library.

    Returns:
      A transformation with state `CoatAdamState`; updates are float32. Moments of zero decode to exactly zero. An element
      whose gradient is not finite keeps its moments; the update shows it. `update(..., row=i)` updates row i of stacked
      leaves, given as stacks of one, as the update of the whole would: with the same groups and the same random bits.

    Raises:
      ValueError, TypeError: an argument that does not fit, when the transformation is made.

    Source: arXiv 2410.19313, section 4; Kingma and Ba, arXiv 1412.6980.
    """
    patterns = leaves.check_filter(quantize_filter)
    Implementation.resolve(implementation, "scale_by_coat_adam")
    dense = optax.scale_by_adam(b1, b2, eps, eps_root, mu_dtype=jnp.float32)

    def leaf_codec(name: str, value: Any) -> MomentCodec | None:
        return leaves.leaf_codec(name, value.shape, codec, patterns, min_size)

    def flatten(tree: Any) -> tuple[list[str], list[Any], Any]:
        paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
        return [leaves.path_name(path) for path, _ in paths], [value for _, value in paths], treedef

    def init(params: Any) -> CoatAdamState:
        named, values, treedef = flatten(params)
        rows = [(value, leaf_codec(name, value)) for name, value in zip(named, values, strict=True)]
        mu = treedef.unflatten([zeros(value.shape, c.mu if c else None) for value, c in rows])
        nu = treedef.unflatten([zeros(value.shape, c.nu if c else None) for value, c in rows])
        return CoatAdamState(jnp.zeros([], jnp.int32), mu, nu)

    def update(
        updates: Any, state: CoatAdamState, params: Any = None, *, row: jax.Array | None = None, **extra: Any
    ) -> tuple[Any, CoatAdamState]:
        del params, extra
        count = optax.safe_increment(state.count)
        hyper = Hyper.of(count, b1, b2, eps, eps_root)
        named, grads, treedef = flatten(updates)
        mu, nu = treedef.flatten_up_to(state.mu), treedef.flatten_up_to(state.nu)
        chosen_codecs = [stored_codec(*pair, codec) for pair in zip(mu, nu, strict=True)]
        plain = [i for i, c in enumerate(chosen_codecs) if c is None]
        old = optax.ScaleByAdamState(state.count, [mu[i] for i in plain], [nu[i] for i in plain])
        plain_updates, new = dense.update([grads[i].astype(jnp.float32) for i in plain], old)
        for k, i in enumerate(plain):
            grads[i], mu[i], nu[i] = plain_updates[k], new.mu[k], new.nu[k]
        for i, own in enumerate(chosen_codecs):
            if own is not None:
                offset = 0 if row is None else row.astype(jnp.uint32) * jnp.uint32(grads[i].size % 2**32)
                grads[i], mu[i], nu[i] = step_leaf(grads[i], mu[i], nu[i], own, hyper, leaves.leaf_seed(named[i]), offset)
        return treedef.unflatten(grads), CoatAdamState(count, treedef.unflatten(mu), treedef.unflatten(nu))

    return optax.GradientTransformationExtraArgs(init, update)


def coat_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    weight_decay: jax.typing.ArrayLike = 1e-4,
    mask: Any = None,
    *,
    codec: MomentCodec = codecs.COAT,
    quantize_filter: Sequence[str] | None = None,
    min_size: int = 4096,
    implementation: Implementation | str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW with moments of one byte each: put it where `optax.adamw` stands.

        params <- params - learning_rate (u + weight_decay params)        u from `scale_by_coat_adam`

    Args:
      learning_rate: a number or an Optax schedule.
      b1, b2, eps, eps_root: as in `scale_by_coat_adam`.
      weight_decay: strength of the decoupled decay.
      mask: which leaves decay, as in `optax.adamw`.
      codec, quantize_filter, min_size, implementation: as in `scale_by_coat_adam`.

    Returns:
      optax.chain(scale_by_coat_adam, optax.add_decayed_weights, optax.scale_by_learning_rate). With `codecs.FLOAT32` and
      float32 parameters its updates are those of `optax.adamw` bit for bit.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from coat_jax import coat_adamw
      >>> params = {"kernel": jnp.ones((64, 128))}
      >>> optimizer = optax.chain(optax.clip_by_global_norm(1.0), coat_adamw(3e-4))
      >>> state = optimizer.init(params)
      >>> updates, state = optimizer.update({"kernel": jnp.full((64, 128), 0.1)}, state, params)
      >>> optax.apply_updates(params, updates)["kernel"].shape
      (64, 128)

    Source: arXiv 2410.19313; Loshchilov and Hutter, arXiv 1711.05101.
    """
    return optax.chain(
        scale_by_coat_adam(
            b1,
            b2,
            eps,
            eps_root,
            codec=codec,
            quantize_filter=quantize_filter,
            min_size=min_size,
            implementation=implementation,
        ),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
