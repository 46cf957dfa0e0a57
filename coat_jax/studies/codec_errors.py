"""What storing moments costs, on random gradients: errors of the update, dormant elements and drops, for one codec.

Gradients are normal, their scales lognormal(sigma) from element to element of a group; one compiled scan serves all cases.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from coat_jax.optim import adam_formula
from coat_jax.optim.adam_formula import Hyper, Moments
from coat_jax.optim.codecs import GROUP, MomentCodec
from coat_jax.optim.step import split, zeros
from coat_jax.quant import Groups, rounding

SIGMAS = (0.0, 0.5, 1.0, 2.0)
DORMANT_AFTER, DROP_AFTER, LAST, GRACE = 50, 1000, 2000, 100
EPS = 1e-12  # far under any update here, so that errors are those of storing


class Experiment(NamedTuple):
    """One experiment; floats, so that many run in one scan.

    Attributes:
      sigma: of the scales of gradients.
      b2: decay of the second moment.
      after: the step after which half of each group's gradients are multiplied by `factor`.
      factor: 0 for dormant elements, 0.1 for a drop, 1 for neither.
    """

    sigma: float
    b2: float
    after: int
    factor: float


class Outcome(NamedTuple):
    """What came of a case; of pairs the first belongs to the changed half of each group, the second to the live half.

    Attributes:
      error: squared error of the update at each step, (steps, 2).
      power: squared f32 update at each step, (steps, 2).
      excess: by how many learning rates an element moved further than under f32 Adam, from `GRACE` steps after the change.
      nu: nu over its truth, (elements, 2).
      one_shot: relative L2 error of the update after storing the last f32 moments once.
    """

    error: jax.Array
    power: jax.Array
    excess: jax.Array
    nu: jax.Array
    one_shot: jax.Array


def _halves(x: jax.Array) -> jax.Array:
    """Elements of a group, changed and live ones: any shape as (elements, 2)."""
    return x.reshape(-1, 2)


def _direction(pair: Moments) -> jax.Array:
    return jnp.where(pair.nu > 0, pair.mu * jax.lax.rsqrt(jnp.where(pair.nu > 0, pair.nu, 1.0)), 0.0)


@functools.partial(jax.jit, static_argnames=("codec", "steps", "groups"))
def run_cases(codec: MomentCodec, cases: Any, steps: int, groups: int) -> Outcome:
    """Runs the cases (a `Experiment` of arrays) for `steps` steps on `groups` groups each."""
    layout = Groups.of(GROUP, (groups, GROUP.size))
    shape = layout.split_shape
    numbers = functools.partial(rounding.element_index, shape)
    changed = jnp.arange(GROUP.size) % 2 == 0
    key = jax.random.key(0)

    def run(case: Experiment) -> Outcome:
        scale = jnp.exp(case.sigma * jax.random.normal(key, shape)) * 1e-3

        def step(carry: Any, count: jax.Array) -> Any:
            stored, truth, moved = carry
            own = jnp.where(changed & (count > case.after), scale * case.factor, scale)
            grad = own * jax.random.normal(jax.random.fold_in(key, count), shape)
            hyper = Hyper.of(count, 0.9, case.b2, EPS, 0.0)
            noise = adam_formula.noise_of(1, numbers, count, codec.antithetic)
            update, stored = adam_formula.step(grad, stored, codec, (-1,), hyper, noise)
            want, truth = adam_formula.adam(grad, truth, hyper)
            late = (count > case.after + GRACE) & (count <= case.after + LAST)
            moved = tuple(m + jnp.where(late, u, 0.0) for m, u in zip(moved, (update, want), strict=True))
            sums = (jnp.sum(_halves(x) ** 2, 0) for x in (update - want, want))
            return (stored, truth, moved), tuple(sums)

        none = jnp.zeros(shape)
        start = Moments(
            *(split(zeros(jax.ShapeDtypeStruct(layout.shape, jnp.float32), spec), layout) for spec in (codec.mu, codec.nu))
        )
        carry = (start, Moments(none, none), (none, none))
        (stored, truth, moved), (error, power) = jax.lax.scan(step, carry, jnp.arange(1, steps + 1))
        nu = adam_formula.decode(stored, codec, (-1,)).nu
        noise = adam_formula.noise_of(1, numbers, jnp.int32(steps), codec.antithetic)
        once = adam_formula.encode(truth, codec, (-1,), jnp.zeros(shape, bool), noise)
        off = _direction(adam_formula.decode(once, codec, (-1,))) - _direction(truth)
        one_shot = jnp.linalg.norm(off) / jnp.linalg.norm(_direction(truth))
        excess = _halves(jnp.abs(moved[0]) - jnp.abs(moved[1]))[:, 0]
        return Outcome(error, power, excess, _halves(nu / jnp.maximum(truth.nu, 1e-37)), one_shot)

    return jax.vmap(run)(cases)


def _error(outcome: Outcome, case: int, steps: slice, half: int | None = None) -> float:
    """Mean over steps of the relative L2 error of the update, of one half or of both."""
    which = slice(None) if half is None else slice(half, half + 1)
    error, power = (np.asarray(x[case, steps, which], np.float64).sum(-1) for x in (outcome.error, outcome.power))
    return float(np.mean(np.sqrt(error / power)))


def measure(codec: MomentCodec, *, groups: int = 16, sigmas: tuple[float, ...] = SIGMAS, last: int = LAST) -> dict[str, Any]:
    """The synthetic columns of the codec table, as numbers and verdicts for JSON.

    Args:
      codec: what to measure.
      groups: groups of 128 elements in each case.
      sigmas: spreads of the gradients' scales.
      last: steps after a drop.
    """
    begin = min(DROP_AFTER, last // 2)
    steps = begin + last
    betas = (0.95, 0.999)
    plain = [Experiment(sigma, b2, steps, 1.0) for b2 in betas for sigma in sigmas]
    dormant = [case._replace(after=DORMANT_AFTER, factor=0.0) for case in plain]
    drops = [Experiment(sigma, 0.999, begin, 0.1) for sigma in sigmas]
    cases = [*plain, *dormant, *drops]
    stacked = jax.tree.map(lambda *column: jnp.asarray(column), *cases)
    outcome = run_cases(codec, stacked, steps, groups)
    at, n = {case: i for i, case in enumerate(cases)}, len(plain)
    after = slice(DORMANT_AFTER + GRACE, DORMANT_AFTER + last)
    live = [_error(outcome, n + i, after, 1) / max(_error(outcome, i, after, 1), 1e-9) for i in range(n)]
    excess = np.asarray(outcome.excess[n : 2 * n])
    ratios = np.asarray(outcome.nu[2 * n :], np.float64).mean(1)
    typical = np.exp(np.log(np.maximum(np.asarray(outcome.nu[2 * n :], np.float64), 1e-30)).mean(1))
    return {
        "sigmas": list(sigmas),
        "one_shot": [float(outcome.one_shot[at[case]]) for case in plain[: len(sigmas)]],
        "closed_loop": {
            str(b2): [_error(outcome, at[case], slice(steps - 100, steps)) for case in plain if case.b2 == b2] for b2 in betas
        },
        "dormant": {
            "excess_learning_rates_mean": float(excess.mean()),
            "excess_learning_rates_max": float(excess.max()),
            "live_error_ratio_max": max(live),
            "passed": bool(excess.max() <= 1e-3 and max(live) < 2.0),
        },
        "drop": {
            "nu_over_truth_dropped": ratios[:, 0].tolist(),
            "nu_over_truth_live": ratios[:, 1].tolist(),
            "nu_over_truth_geometric": typical.tolist(),
            "passed": bool(np.all(np.abs(ratios - 1) <= 0.1)),
        },
    }
