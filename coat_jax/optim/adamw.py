"""`scale_by_coat_adam` and `coat_adamw`: Adam and AdamW as Optax transformations whose moments take one byte each."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from coat_jax.optim import codecs, fused, leaves, master
from coat_jax.optim.codecs import MomentCodec
from coat_jax.optim.leaves import Named
from coat_jax.optim.master import Master, Weight
from coat_jax.optim.moments import NoiseUse, Rate
from coat_jax.optim.step import Adam, Leaf, LeafUpdate, groups_of, in_turn, zeros
from coat_jax.quant import Implementation
from coat_jax.quant.implementation import refuse_explicit

STATIC_ARGS = ("mask", "codec", "quantize_filter", "min_size", "implementation", "master")
"""What decides structure, and so is static: optax.inject_hyperparams(coat_adamw, static_args=STATIC_ARGS)."""


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


class MasterState(NamedTuple):
    """What parameters lack of float32.

    Attributes:
      count: int32, steps taken.
      compensation: int8 or int16 for each bfloat16 parameter; None for others, and for `Master.STOCHASTIC`.
    """

    count: jax.Array  # type: ignore[assignment]
    compensation: Any


@dataclasses.dataclass(frozen=True)
class AdamW:
    """The parts of `coat_adamw`, whose arguments these are."""

    learning_rate: Any
    adam: Adam
    weight_decay: Any
    mask: Any
    scale: optax.GradientTransformationExtraArgs
    codec: MomentCodec
    master: Master | None
    implementation: Implementation | None = None

    @property
    def tail(self) -> optax.GradientTransformationExtraArgs:
        """From a direction to an update."""
        return optax.chain(
            optax.add_decayed_weights(self.weight_decay, self.mask), optax.scale_by_learning_rate(self.learning_rate)
        )

    def init(self, params: Any) -> tuple[Any, ...]:
        """The state: those of the transformations in the chain, and a `MasterState` where there is a master."""
        state = (self.scale.init(params), *self.tail.init(params))
        if self.master is None:
            return state
        compensation = jax.tree.map(lambda p: master.zero(p, self.master), params)
        return (*state, MasterState(jnp.zeros([], jnp.int32), compensation))

    def update(
        self, updates: Any, state: tuple[Any, ...], params: Any = None, *, row: jax.Array | None = None, **extra: Any
    ) -> tuple[Any, tuple[Any, ...]]:
        """Updates for `optax.apply_updates`, float32, and the next state; `row` as in `scale_by_coat_adam`."""
        Implementation.resolve(self.implementation, "coat_adamw", "has a kernel for update_and_apply only")
        directions, first = self.scale.update(updates, state[0], params, row=row)
        if self.master is None:
            updates, rest = self.tail.update(directions, state[1:], params, **extra)
            return updates, (first, *rest)
        if params is None:
            raise ValueError(f"coat_adamw: params=None; master={str(self.master)!r} needs the parameters in update")
        kept: MasterState = state[-1]
        tree = Named.of(params)
        weights = [Weight(*row) for row in zip(tree.leaves, *tree.beside(kept.compensation), strict=True)]
        values = tree.structure.unflatten([master.load(weight) for weight in weights])
        updates, rest = self.tail.update(directions, state[1:-1], values, **extra)
        count = optax.safe_increment(kept.count)
        rows: list[tuple[Any, Any]] = []
        for name, weight, value, change in zip(tree.names, weights, *tree.beside(values, updates), strict=True):
            if not master.splits(weight.param, self.master):
                rows.append((change, None))
                continue
            groups = groups_of(codecs.FLOAT32, change.shape)
            elements = Leaf(name, row).elements(change.shape, groups, master.needs_noise(self.master))
            noise = groups.merge(elements.noise(NoiseUse.MASTER, count)) if master.needs_noise(self.master) else None
            change, new = master.landing(value + change, weight.param, self.master, noise)
            rows.append((change, new.compensation))
        updates, compensation = tree.build(rows, 2)
        return updates, (first, *rest, MasterState(count, compensation))

    def stepper(self, state: tuple[Any, ...]) -> LeafUpdate:
        """The step after `state`, for single leaves or rows of them."""
        return LeafUpdate.at(state[0].count, self.adam, self.codec, self.master)

    def rates(self, state: tuple[Any, ...], params: Any) -> list[Rate]:
        """How far each leaf of `params` follows its direction."""

        def now(value: Any, state: Any) -> jax.Array:
            return jnp.asarray(value(*jax.tree.leaves(state)) if callable(value) else value, jnp.float32)

        mask = self.mask(params) if callable(self.mask) else True if self.mask is None else self.mask
        decays = jax.tree.leaves(jax.tree.broadcast(mask, params))
        decay, rate = now(self.weight_decay, state[1]), now(self.learning_rate, state[2])
        return [Rate(rate, decay if decays_ else jnp.zeros_like(decay)) for decays_ in decays]

    def advance(self, state: tuple[Any, ...], mu: Any, nu: Any, compensation: Any) -> tuple[Any, ...]:
        """The state after a step that left these."""
        rest = jax.tree.map(optax.safe_increment, state[1:3])
        new = (CoatAdamState(optax.safe_increment(state[0].count), mu, nu), *rest)
        return new if self.master is None else (*new, MasterState(optax.safe_increment(state[3].count), compensation))

    def update_and_apply(
        self, grads: Any, state: tuple[Any, ...], params: Any, *, row: jax.Array | None = None
    ) -> tuple[Any, tuple[Any, ...]]:
        """The next parameters and the next state, in one pass over each leaf; `row` as in `scale_by_coat_adam`."""
        _refuse_float32_state(state[0])
        tree, stepper = Named.of(params), self.stepper(state)
        refuse_explicit("coat_adamw", *tree.leaves)
        nothing = tree.structure.unflatten([None] * len(tree.leaves))
        compensation = nothing if self.master is None else state[3].compensation
        columns = tree.beside(grads, state[0].mu, state[0].nu, compensation)
        tasks = [
            fused.Task(grad, mu, nu, Weight(param, lack), rate, row)
            for param, rate, (grad, mu, nu, lack) in zip(
                tree.leaves, self.rates(state, params), zip(*columns, strict=True), strict=True
            )
        ]
        done = fused.update(stepper, tasks, tree.names, self.implementation)
        rows = [(*weight, mu, nu) for weight, mu, nu in done]
        params, compensation, mu, nu = tree.build(rows, 4)
        return params, self.advance(state, mu, nu, compensation)


class CoatAdamW(optax.GradientTransformationExtraArgs):
    """An Optax transformation with a second entry point.

    Attributes:
      update_and_apply: (grads, state, params) -> (params, state): `update` and `optax.apply_updates` in one pass, without a
        tree of updates.
      parts: what both are made of, for optimizers that update a layer at a time.
    """

    parts: AdamW

    def __new__(cls, parts: AdamW) -> "CoatAdamW":
        """The transformation made of `parts`."""
        self = super().__new__(cls, parts.init, parts.update)
        self.parts = parts
        return self

    @property
    def update_and_apply(self) -> Callable[..., tuple[Any, Any]]:
        """(grads, state, params) -> (params, state), in one pass."""
        return self.parts.update_and_apply


def _check_precision(**betas: jax.typing.ArrayLike) -> None:
    """Raises TypeError for a beta in less than float32: in bfloat16 0.999 is 1 and every moment NaN."""
    for name, beta in betas.items():
        dtype = getattr(beta, "dtype", None)
        if dtype is not None and dtype.itemsize < 4:
            raise TypeError(
                f"scale_by_coat_adam: {name} has dtype {dtype}, which cannot tell 0.999 from 1; use float32 "
                "(optax.inject_hyperparams follows the parameters' dtype unless told hyperparam_dtype=jnp.float32)"
            )


def _refuse_float32_state(state: Any) -> None:
    """Raises TypeError for the state of `optax.adamw`: its moments would stay in float32, and nobody would notice."""
    if isinstance(state, optax.ScaleByAdamState):
        raise TypeError(
            "coat_adamw: the state is that of optax.adamw; convert it once, coat_jax.optim.convert.from_adamw(state)"
        )


def _renamed(result: tuple[Any, optax.ScaleByAdamState]) -> tuple[Any, CoatAdamState]:
    return result[0], CoatAdamState(*result[1])


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
      ValueError, TypeError: an argument that does not fit, when the transformation is made; betas in less than float32.

    Source: arXiv 2410.19313, section 4; Kingma and Ba, arXiv 1412.6980.
    """
    patterns = leaves.check_filter(quantize_filter)
    Implementation.resolve(implementation, "scale_by_coat_adam")
    _check_precision(b1=b1, b2=b2)
    if not isinstance(codec, MomentCodec):
        raise TypeError(f"scale_by_coat_adam: codec={codec!r} is not a MomentCodec; use codecs.COAT or codecs.named('coat')")
    adam = Adam(b1, b2, eps, eps_root)

    def init(params: Any) -> CoatAdamState:
        tree = Named.of(params)
        rows = []
        if codec.quantizes:
            refuse_explicit("coat_adamw", *tree.leaves)
        for name, leaf in zip(tree.names, tree.leaves, strict=True):
            own = leaves.leaf_codec(name, leaf.shape, codec, patterns, min_size)
            rows.append((zeros(leaf.shape, own.mu), zeros(leaf.shape, own.nu)))
        return CoatAdamState(jnp.zeros([], jnp.int32), *tree.build(rows, 2))

    def update(
        updates: Any, state: CoatAdamState, params: Any = None, *, row: jax.Array | None = None, **extra: Any
    ) -> tuple[Any, CoatAdamState]:
        del params, extra
        if not codec.quantizes:
            grads = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
            return _renamed(optax.scale_by_adam(*adam, mu_dtype=jnp.float32).update(grads, optax.ScaleByAdamState(*state)))
        _refuse_float32_state(state)
        tree, stepper = Named.of(updates), LeafUpdate.at(state.count, adam, codec)
        refuse_explicit("coat_adamw", *tree.leaves)
        columns = zip(tree.names, tree.leaves, *tree.beside(state.mu, state.nu), strict=True)
        rows: list[Any] = []
        for name, grad, mu, nu in columns:
            if rows:
                (grad, mu, nu), rows[-1] = in_turn((grad, mu, nu), rows[-1])
            rows.append(stepper.direction(grad, mu, nu, Leaf(name, row)))
        directions, mu, nu = tree.build(rows, 3)
        return directions, CoatAdamState(optax.safe_increment(state.count), mu, nu)

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
    master: Master | str | None = None,
) -> CoatAdamW:
    """AdamW with moments of one byte each: put it where `optax.adamw` stands.

        params <- params - learning_rate (u + weight_decay params)        u from `scale_by_coat_adam`

    Args:
      learning_rate: a number or an Optax schedule.
      b1, b2, eps, eps_root: as in `scale_by_coat_adam`.
      weight_decay: strength of the decoupled decay.
      mask: which leaves decay, as in `optax.adamw`.
      codec, quantize_filter, min_size: as in `scale_by_coat_adam`.
      implementation: who computes `update_and_apply`; None takes the kernel in programs for a Hopper GPU. `update` is XLA's.
      master: how bfloat16 parameters keep small updates: "bf16+8", "bf16+16", "bf16-stochastic", or None where parameters are
        float32. `optax.apply_updates` must follow at once, so this transformation comes last in a chain.

    Returns:
      optax.chain(scale_by_coat_adam, optax.add_decayed_weights, optax.scale_by_learning_rate), with its state, and the second
      entry point `update_and_apply`. With `codecs.FLOAT32` and float32 parameters updates are those of `optax.adamw` bit for
      bit. With "bf16+16", `update_and_apply` follows float32 parameters bit for bit, and so does `update` where a step does
      not shrink a parameter below 2^-16 of itself.

    Raises:
      ValueError, TypeError: as `scale_by_coat_adam`; an unknown master.

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
    chosen = Implementation.resolve(implementation, "coat_adamw", None)
    scale = scale_by_coat_adam(b1, b2, eps, eps_root, codec=codec, quantize_filter=quantize_filter, min_size=min_size)
    adam = Adam(b1, b2, eps, eps_root)
    return CoatAdamW(AdamW(learning_rate, adam, weight_decay, mask, scale, codec, Master.resolve(master), chosen))
