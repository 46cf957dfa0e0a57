"""`scale_by_coat_adam` and `coat_adamw`: Adam and AdamW as Optax transformations whose moments take one byte each."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from coat_jax.optim import codecs, fused, leaves
from coat_jax.optim.adam_formula import Hyper, Rate
from coat_jax.optim.codecs import MomentCodec
from coat_jax.optim.leaves import Named
from coat_jax.optim.master import Master, Weight
from coat_jax.optim.sharding import init_on_any_axes, update_on_any_axes
from coat_jax.optim.state import CoatAdamState, guard, mark, pack, unpack
from coat_jax.optim.step import Leaf, first_order, zeros
from coat_jax.optim.with_master import MasterState, with_master
from coat_jax.quant import Implementation

STATIC_ARGS = ("mask", "codec", "quantize_filter", "min_size", "implementation", "master", "mu_dtype")
"""Arguments of `coat_adamw` that decide structure. `optax.inject_hyperparams(coat_adamw)` needs them as its `static_args` only
where you give a `min_size`, a number, or a `mask` that is a function: it takes the one for a hyperparameter and the other for a
schedule."""


@dataclasses.dataclass(frozen=True)
class BothUpdates:
    """`update` of an Optax transformation, and `update_and_apply` beside it."""

    update: Callable[..., tuple[Any, Any]]
    update_and_apply: Callable[..., tuple[Any, Any]]

    def __call__(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        """`update`."""
        return self.update(updates, state, params, **extra)


class CoatAdamW(optax.GradientTransformationExtraArgs):
    """An Optax transformation, the pair (init, update), with a second entry point.

    That lies in `update`, so that whoever takes the pair apart and rebuilds it (`copy.deepcopy`, `jax.tree.map`) keeps both.
    """

    @property
    def update_and_apply(self) -> Callable[..., tuple[Any, Any]]:
        """(grads, state, params) -> (params, state): `update` and `optax.apply_updates`, without a tree of updates."""
        return self.update.update_and_apply


def _betas(b1: Any, b2: Any) -> tuple[Any, Any]:
    """Both betas, of which None is Adam's own.

    Raises:
      TypeError: a beta in less than float32: in bfloat16 0.999 is 1 and every moment NaN.
    """
    for name, beta in (("b1", b1), ("b2", b2)):
        dtype = getattr(beta, "dtype", None)
        if dtype is not None and dtype.itemsize < 4:
            raise TypeError(
                f"scale_by_coat_adam: {name} has dtype {dtype}, which cannot tell 0.999 from 1; give jnp.float32 of it "
                "(optax.inject_hyperparams follows the parameters' dtype unless told hyperparam_dtype=jnp.float32)"
            )
    return 0.9 if b1 is None else b1, 0.999 if b2 is None else b2


def _refuse_float32_state(state: Any) -> None:
    """Raises TypeError for the state of `optax.adamw`: its moments would stay in float32, and nobody would notice."""
    if isinstance(state, optax.ScaleByAdamState):
        raise TypeError(
            "coat_adamw: the state is that of optax.adamw; convert it once, coat_jax.optim.convert.from_adamw(state)"
        )


def scale_by_coat_adam(
    b1: jax.typing.ArrayLike | None = None,
    b2: jax.typing.ArrayLike | None = None,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    *,
    codec: MomentCodec = codecs.COAT,
    quantize_filter: Sequence[str] | None = None,
    min_size: int | None = None,
    implementation: Implementation | str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam's direction, `optax.scale_by_adam`, with moments stored by `codec` between steps.

        mu <- b1 mu + (1 - b1) g        nu <- b2 nu + (1 - b2) g^2
        u = (mu / (1 - b1^t)) / (sqrt(nu / (1 - b2^t) + eps_root) + eps)        mu, nu <- stored(mu, nu)

    Args:
      b1, b2: decay rates of the moments; None is 0.9 and 0.999.
      eps: added to the root of the second moment.
      eps_root: added under the root.
      codec: how moments are stored; one of `coat_jax.codecs` or a `MomentCodec` of your own.
      quantize_filter: path patterns; the last one that fits a leaf's path, such as "layers/mlp/kernel", decides, and "!"
        excludes. None is the default rule: every leaf of two axes or more but embeddings, norms, scales and biases, by the
        names that Flax, Hugging Face and Tunix give them (`coat_jax.optim.leaves.KEPT`). A filter that begins with an
        exclusion changes the default rule, any other one replaces it. Other leaves keep float32 moments.
      min_size: leaves of fewer elements keep float32 moments; None is 4096.
      implementation: who computes a step; None takes the kernel in programs for a Hopper GPU. It reads the gradient and both
        moments once, and writes the moments over the old ones and the direction.

    Returns:
      A transformation with state `CoatAdamState`. Updates have the dtype that gradient and parameter have together, float32
      where no parameters are given. Moments of zero decode to exactly zero. An element whose gradient is not finite keeps its
      moments; the update shows it. `update(..., row=i)` updates row i of stacked leaves, given as stacks of one, as the update
      of the whole would: with the same groups and the same random bits.

    Raises:
      ValueError, TypeError: an argument that does not fit, when the transformation is made; betas in less than float32; a
        filter that fits no leaf, or a complex leaf, in `init`.

    Source: arXiv 2410.19313, section 4; Kingma and Ba, arXiv 1412.6980.
    """
    patterns, least = leaves.check_filter(quantize_filter), leaves.check_min_size(min_size)
    b1, b2 = _betas(b1, b2)
    chosen = Implementation.resolve(implementation, "coat_adamw", None)
    if not isinstance(codec, MomentCodec):
        raise TypeError(f"scale_by_coat_adam: codec={codec!r} is not a MomentCodec; use codecs.COAT or codecs.named('coat')")

    def init(params: Any) -> CoatAdamState:
        tree = Named.of(params)
        leaves.refuse_complex(tree)
        chosen = leaves.choose_codecs(tree, codec, patterns, least)
        pairs = list(zip(tree.leaves, chosen, strict=True))
        mu, nu = [zeros(leaf, own.mu) for leaf, own in pairs], [zeros(leaf, own.nu) for leaf, own in pairs]
        return pack(tree, jnp.zeros([], jnp.int32), mu, nu, jnp.uint32(mark(codec)))

    def update(
        updates: Any, state: CoatAdamState, params: Any = None, *, row: jax.Array | None = None, **extra: Any
    ) -> tuple[Any, CoatAdamState]:
        del extra
        tree = Named.of(updates)
        leaves.refuse_complex(tree)
        _refuse_float32_state(state)
        right = guard(state, codec, "coat_adamw")
        mu, nu = unpack(state, codec, "coat_adamw")
        if not codec.quantizes:
            grads = [g.astype(jnp.float32) for g in tree.leaves]
            adam = optax.scale_by_adam(b1, b2, eps, eps_root, mu_dtype=jnp.float32)
            done, (count, mu, nu) = adam.update(grads, optax.ScaleByAdamState(state.count, mu, nu))
            done = [right * direction for direction in done]
        else:
            count = optax.safe_increment(state.count)
            own = [Leaf(first_order(g), m, v, row=row) for g, m, v in zip(tree.leaves, mu, nu, strict=True)]
            rows = fused.update(own, tree.names, codec, None, Hyper.of(count, b1, b2, eps, eps_root, right), chosen)
            done, mu, nu = ([row[i] for row in rows] for i in range(3))
        if params is not None:
            both = zip(tree.leaves, tree.beside(params)[0], strict=True)
            done = [u.astype(jnp.promote_types(g.dtype, p.dtype)) for u, (g, p) in zip(done, both, strict=True)]
        return tree.structure.unflatten(done), pack(tree, count, mu, nu, state.codec)

    return optax.GradientTransformationExtraArgs(init_on_any_axes(init), update_on_any_axes(update))


def coat_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike | None = None,
    b2: jax.typing.ArrayLike | None = None,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    *,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Any = None,
    codec: MomentCodec = codecs.COAT,
    quantize_filter: Sequence[str] | None = None,
    min_size: int | None = None,
    implementation: Implementation | str | None = None,
    master: Master | str | None = None,
    mu_dtype: None = None,
) -> CoatAdamW:
    """AdamW with moments of one byte each: put it where `optax.adamw` stands.

        params <- params - learning_rate (u + weight_decay params)        u from `scale_by_coat_adam`

    Args:
      learning_rate: a number or an Optax schedule.
      b1, b2, eps, eps_root: as in `scale_by_coat_adam`.
      weight_decay: strength of the decoupled decay, a number or an Optax schedule.
      mask: which leaves decay, as in `optax.adamw`.
      codec, quantize_filter, min_size: as in `scale_by_coat_adam`.
      implementation: who computes a step; None takes the kernel in programs for a Hopper GPU. There `update`, in any chain,
        reads gradient and moments once and writes moments and a direction in float32, which XLA makes an update of;
        `update_and_apply` writes the parameters in the same pass.
      master: how bfloat16 parameters keep small updates: "bf16+8", "bf16+16", "bf16-stochastic", or None where parameters are
        float32. `optax.apply_updates` must follow at once, so this transformation comes last in a chain.
      mu_dtype: None, for callers that give it to any AdamW. The codec says how moments are stored.

    Returns:
      optax.chain(scale_by_coat_adam, optax.add_decayed_weights, optax.scale_by_learning_rate), computed in float32, with its
      state, and the second entry point `update_and_apply`. With `codecs.FLOAT32` and float32 parameters updates are those of
      `optax.adamw` bit for bit. With "bf16+16", `update_and_apply` follows float32 parameters bit for bit, and so does `update`
      with float32 gradients where a step does not shrink a parameter below 2^-16 of itself, with bfloat16 gradients where it
      neither doubles nor halves it. It has no derivative: a program that asks for one is refused.

    Raises:
      ValueError, TypeError: as `scale_by_coat_adam`; an unknown master; a mu_dtype.

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
    if mu_dtype is not None:
        raise TypeError(f"coat_adamw: mu_dtype={mu_dtype!r}; moments are stored by codec=, such as codecs.COAT; leave it out")
    chosen, keep = Implementation.resolve(implementation, "coat_adamw", None), Master.resolve(master)
    chain = optax.chain(
        scale_by_coat_adam(
            b1,
            b2,
            eps,
            eps_root,
            codec=codec,
            quantize_filter=quantize_filter,
            min_size=min_size,
            implementation=chosen,
        ),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    tx = with_master(chain, keep)

    def update_and_apply(grads: Any, state: Any, params: Any, *, row: jax.Array | None = None) -> tuple[Any, Any]:
        adam, decayed, scaled, *kept = state
        _refuse_float32_state(adam)
        tree = Named.of(params)
        leaves.refuse_complex(tree)
        count = optax.safe_increment(adam.count)
        nothing = tree.structure.unflatten([None] * len(tree.leaves))
        right = guard(adam, codec, "coat_adamw")
        columns = tree.beside(grads, kept[0].compensation if kept else nothing)
        rates = _rates(_now(learning_rate, scaled), _now(weight_decay, decayed), mask, params)
        own = [
            Leaf(first_order(grad), mu, nu, Weight(first_order(param), lack), jax.tree.map(first_order, rate), row)
            for param, rate, grad, lack, mu, nu in zip(
                tree.leaves, rates, *columns, *unpack(adam, codec, "coat_adamw"), strict=True
            )
        ]
        hyper = Hyper.of(count, *_betas(b1, b2), eps, eps_root, right)
        done = fused.update(own, tree.names, codec, keep, hyper, chosen)
        params, compensation = tree.build([weight for weight, _, _ in done], 2)
        moments = pack(tree, count, [mu for _, mu, _ in done], [nu for _, _, nu in done], adam.codec)
        counts = jax.tree.map(optax.safe_increment, (decayed, scaled))  # all that the states of both can hold
        masters = [MasterState(optax.safe_increment(old.count), compensation) for old in kept]
        return params, (moments, *counts, *masters)

    both = BothUpdates(update_on_any_axes(tx.update), update_on_any_axes(update_and_apply))
    return CoatAdamW(init_on_any_axes(tx.init), both)


def _now(value: optax.ScalarOrSchedule, state: Any) -> jax.Array:
    """A number, or a schedule at the count that its state holds, in float32."""
    return jnp.asarray(value(*jax.tree.leaves(state)) if callable(value) else value, jnp.float32)


def _rates(rate: jax.Array, decay: jax.Array, mask: Any, params: Any) -> list[Rate]:
    """How far each leaf of `params` follows its direction: those that `mask` leaves out do not decay."""
    mask = mask(params) if callable(mask) else True if mask is None else mask
    return [
        Rate(rate, decay if decays else jnp.zeros_like(decay)) for decays in jax.tree.leaves(jax.tree.broadcast(mask, params))
    ]
