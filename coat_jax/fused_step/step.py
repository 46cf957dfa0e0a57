"""One training step of a model in parts: fused, each layer updated as soon as its gradients exist, or ordinary."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from coat_jax.fused_step import accumulation
from coat_jax.fused_step import refused as whole_tree
from coat_jax.fused_step.accumulation import Accumulation
from coat_jax.fused_step.gradient_statistics import Statistics
from coat_jax.fused_step.layered_model import Batch, LayeredModel, Params, hide, put, show, take
from coat_jax.fused_step.optimizer_rows import RowOptimizer, select
from coat_jax.fused_step.options import Clip, Metrics, Norm, Skip, StepState, member
from coat_jax.fused_step.tape import Tape
from coat_jax.optim import diagnostics as inspect


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingStep:
    """(params, state, batch) -> (params, state, metrics); jit it and donate the first two. See `fused_step`."""

    parts: LayeredModel
    optimizer: optax.GradientTransformation
    clip: Clip | None
    skip: Skip
    accumulation: Accumulation
    trainable: Any
    fused: bool

    def trained(self, params: Params) -> Any:
        """A tree of bools like params: which leaves are trained."""
        if self.trainable is None:
            return jax.tree.map(lambda _: True, params)
        mask = self.trainable(params) if callable(self.trainable) else self.trainable
        return jax.tree.map(lambda shown, value: jax.tree.map(lambda _: bool(shown), value), mask, params)

    def init(self, params: Params) -> StepState:
        """The state before the first step. Frozen parameters have none."""
        return StepState(self.optimizer.init(hide(self.trained(params), params)), jnp.zeros((), jnp.float32))

    def __call__(self, params: Params, state: StepState, batch: Batch) -> tuple[Params, StepState, Metrics]:
        """One step."""
        self.parts.layers(params)
        take_step = _fused if self.fused else _ordinary
        return take_step(self, params, state, batch)

    def clip_scale(self, norm: jax.Array | None, state: StepState) -> jax.Array | None:
        """What to multiply gradients by: a float32 scalar, or None where nothing is clipped."""
        if self.clip is None:
            return None
        chosen = norm if self.clip.norm is Norm.EXACT else state.previous_norm
        assert chosen is not None
        return jnp.minimum(1.0, self.clip.max_norm / jnp.maximum(chosen, jnp.finfo(jnp.float32).tiny))

    def taken(self, loss: jax.Array, statistics: Statistics | None) -> jax.Array | None:
        """Whether the step is taken: a bool scalar, or None for always."""
        if self.skip is Skip.NEVER:
            return None
        if self.skip is Skip.LOSS:
            return jnp.isfinite(loss)
        assert statistics is not None
        return jnp.isfinite(loss) & (statistics.nonfinite == 0)


def fused_step(
    parts: LayeredModel,
    optimizer: optax.GradientTransformation,
    *,
    clip: Clip | None = None,
    skip: Skip | str = Skip.NEVER,
    accumulation: Accumulation | None = None,
    trainable: Any = None,
) -> TrainingStep:
    """A training step that updates each layer inside the backward pass: a model's gradients never exist together.

    Args:
      parts: the model, embedding -> scanned layers -> head and loss; `layered_llama` makes them of this library's Llama.
      optimizer: an Optax transformation that treats every leaf by itself: `coat_adamw`, `optax.adamw`, chains of such, masks,
        schedules and injected hyperparameters included.
      clip: clipping by global norm; None does not clip.
      skip: which steps are not taken.
      accumulation: micro-batches; None is one.
      trainable: a tree of bools like the parameters or a prefix of it, or a function of them that returns one; where False, a
        parameter is frozen: no gradient, no state. None trains all. Single layers of the stack cannot be frozen.

    Returns:
      A `TrainingStep`: `state = step.init(params)`, then `jax.jit(step, donate_argnums=(0, 1))(params, state, batch)`.

    Raises:
      ValueError: an optimizer with a member that needs all gradients at once, by its name and with what does the same here.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from coat_jax.fused_step.layered_model import LayeredModel
      >>> from coat_jax.fused_step.step import fused_step
      >>> parts = LayeredModel(
      ...     embed=lambda outer, batch: batch @ outer["in"],
      ...     layer=lambda row, x, batch: x + jnp.tanh(x @ row["w"]),
      ...     loss=lambda outer, x, batch: jnp.mean(x**2),
      ... )
      >>> params = {"in": jnp.ones((2, 4)), "layers": {"w": jnp.full((3, 4, 4), 0.1)}}
      >>> step = fused_step(parts, optax.adamw(0.1))
      >>> params, state, metrics = jax.jit(step)(params, step.init(params), jnp.ones((8, 2)))
      >>> metrics.layer_gradient_norms.shape
      (3,)
    """
    whole_tree.refuse_by_name(optimizer)
    options = {"clip": clip, "skip": skip, "accumulation": accumulation, "trainable": trainable}
    return _make(parts, optimizer, fused=True, **options)


def ordinary_step(parts: LayeredModel, optimizer: optax.GradientTransformation, **options: Any) -> TrainingStep:
    """The same step by `jax.value_and_grad`, all gradients first: options as in `fused_step`, any Optax transformation."""
    return _make(parts, optimizer, fused=False, **options)


def _make(parts, optimizer, *, fused, clip=None, skip=Skip.NEVER, accumulation=None, trainable=None) -> TrainingStep:
    return TrainingStep(parts, optimizer, clip, member(Skip, skip, "skip"), accumulation or Accumulation(), trainable, fused)


def _ordinary(step: TrainingStep, params: Params, state: StepState, batch: Batch) -> tuple[Params, StepState, Metrics]:
    trained = step.trained(params)
    shown = hide(trained, params)
    sums = accumulation.ordinary_sums(step.parts, params, trained, batch, step.accumulation)
    loss, grads = accumulation.value_and_grad(step.parts, params, trained, sums.last, sums.codes, sums.share)
    grads = step.accumulation.mean(sums.grads, grads)
    loss = step.accumulation.mean_loss(sums.losses, loss)
    rows, outer = step.parts.split(grads)
    depths = step.parts.layers(params)  # said, as a frozen stack has no array that would tell it
    layers = {key: jax.vmap(Statistics.of, axis_size=depths[key])(some) for key, some in rows.items()}
    statistics = Statistics.of(outer).with_layers(layers)
    scale, taken = step.clip_scale(statistics.norm, state), step.taken(loss, statistics)
    optimizer = RowOptimizer.of(step.optimizer, state.optimizer)
    new = optimizer.apply(_scaled(grads, scale), state.optimizer, shown)
    new_shown, optimizer_state = select(taken, new, (shown, state.optimizer))
    return _finish(show(trained, new_shown, params), optimizer_state, state, loss, statistics, scale, taken)


def _fused(step: TrainingStep, params: Params, state: StepState, batch: Batch) -> tuple[Params, StepState, Metrics]:
    parts, trained = step.parts, step.trained(params)
    optimizer = RowOptimizer.of(step.optimizer, state.optimizer)
    whole_tree.refuse_by_dependence(step.optimizer, state.optimizer, hide(trained, params))
    sums = accumulation.fused_sums(parts, params, trained, batch, step.accumulation)
    tape = Tape.record(parts, params, sums.last, trained, sums.codes, sums.share)
    loss = step.accumulation.mean_loss(sums.losses, tape.loss)
    row_sums, outer_sums = (None, None) if sums.grads is None else parts.split(sums.grads)

    def gradients(key: str, i: jax.Array, grads: Params) -> Params:
        return step.accumulation.mean(None if row_sums is None else take(row_sums[key], i), grads)

    def outer_gradients(grads: Params) -> Params:
        return step.accumulation.mean(outer_sums, grads)

    before = None
    if step.skip is Skip.GRADIENTS or (step.clip is not None and step.clip.norm is Norm.EXACT):
        rows = parts.split(params)[0]
        _, layers, outer = tape.walk(
            lambda key, carry, i, grads: (carry, Statistics.of(gradients(key, i, grads))),
            dict.fromkeys(rows, ()),
            lambda key, carry, i: take(rows[key], i),
        )
        before = Statistics.of(outer_gradients(outer)).with_layers(layers)
    scale = step.clip_scale(None if before is None else before.norm, state)
    taken = step.taken(loss, before)
    update = Update(parts, optimizer, trained, scale, taken)
    params, optimizer_state, statistics = update.run(tape, params, state.optimizer, gradients, outer_gradients)
    return _finish(params, optimizer_state, state, loss, statistics, scale, taken)


@dataclasses.dataclass(frozen=True)
class Update:
    """The second half of a fused step: the walk that updates."""

    parts: LayeredModel
    optimizer: RowOptimizer
    trained: Any
    scale: jax.Array | None
    taken: jax.Array | None

    def run(self, tape: Tape, params: Params, state: Any, gradients: Callable, outer_gradients: Callable) -> Any:
        """Parameters, optimizer state and statistics after the walk."""
        parts, optimizer, trained = self.parts, self.optimizer, self.trained
        rows, outer = parts.split(params)
        nothing = hide(jax.tree.map(lambda _: False, params), params)
        inside = {key: _both(trained, parts.is_row(params, key)) for key in rows}
        outside = _both(trained, jax.tree.map(lambda row: not row, parts.is_row(params)))

        def visit(key: str, carry: Any, i: jax.Array, grads: Params) -> tuple[Any, Statistics]:
            rows, states = carry
            grads = gradients(key, i, grads)
            old = {**nothing, key: hide(trained[key], take(rows, i))}, optimizer.take(states, i)
            new = optimizer.apply(_scaled({**nothing, key: grads}, self.scale), old[1], old[0], row=i)
            new_params, new_state = select(self.taken, new, old)
            new_row = show(trained[key], new_params[key], take(rows, i))
            return (put(rows, new_row, i), optimizer.put(states, new_state, i)), Statistics.of(grads)

        carries = {}
        for key, depth in parts.layers(params).items():
            carries[key] = rows[key], optimizer.hide(inside[key], state)
            optimizer.check_rows(carries[key][1], depth)
        carries, layers, outer_grads = tape.walk(visit, carries, lambda key, carry, i: take(carry[0], i))
        outer_grads = outer_gradients(outer_grads)
        old = hide(outside, params), optimizer.hide(outside, state)
        new = optimizer.apply(_scaled({**nothing, **outer_grads}, self.scale), old[1], old[0])
        new_params, new_state = select(self.taken, new, old)
        outer = parts.split(show(outside, new_params, params))[1]
        # Each stack's state has its own parameters' moments; counters come from the last update, that of the outer parameters.
        merged = new_state
        for key in carries:
            merged = optimizer.show(inside[key], carries[key][1], merged)
        statistics = Statistics.of(outer_grads).with_layers(layers)
        joined = parts.join({key: carry[0] for key, carry in carries.items()}, outer)
        return joined, optimizer.show(outside, new_state, merged), statistics


def _both(first: Any, second: Any) -> Any:
    """Trees of bools: where both are True."""
    return jax.tree.map(lambda a, b: a and b, first, second)


def _scaled(grads: Params, scale: jax.Array | None) -> Params:
    return grads if scale is None else jax.tree.map(lambda g: g.astype(jnp.float32) * scale, grads)


def _finish(params, optimizer_state, state, loss, statistics, scale, taken) -> tuple[Params, StepState, Metrics]:
    norm = statistics.norm
    previous = jnp.where(jnp.isfinite(norm), norm, state.previous_norm)
    metrics = Metrics(
        loss=loss,
        gradient_norm=norm,
        layer_gradient_norms=statistics.layer_norms,
        nonfinite=statistics.nonfinite,
        clip_scale=jnp.ones((), jnp.float32) if scale is None else scale,
        skipped=jnp.zeros((), bool) if taken is None else ~taken,
        health=_health(optimizer_state, statistics, params),
    )
    return params, StepState(optimizer_state, previous), metrics


def _health(optimizer_state: Any, statistics: Statistics, params: Params) -> inspect.Health | None:
    if not inspect.adam_states(optimizer_state):
        return None
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    share = statistics.nonfinite / float(size)  # 7e9 is no int32
    return inspect.health((), optimizer_state)._replace(nonfinite=share)
