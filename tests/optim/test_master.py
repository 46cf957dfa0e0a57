"""Master weights: what a bfloat16 parameter and its compensation stand for, through both entry points."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from coat_jax import coat_adamw, codecs
from coat_jax.optim import Master, master
from coat_jax.optim.master import Weight

ALL_BFLOAT16 = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
FINITE = ALL_BFLOAT16[np.isfinite(ALL_BFLOAT16.astype(np.float32))]


def values(n=200_000):
    """Normal float32 numbers of every exponent that has a bfloat16 above it."""
    bits = np.random.default_rng(0).integers(0x00800000, 0x7F7F0000, n, dtype=np.uint32)
    return bits.view(np.float32) * np.where(np.arange(n) % 2, 1, -1).astype(np.float32)


def test_sixteen_bits_keep_a_float32_bit_for_bit():
    x = values()
    kept = master.store(jnp.asarray(x), jnp.zeros(1, jnp.bfloat16), Master.BF16_16)
    np.testing.assert_array_equal(master.load(kept).view(jnp.uint32), x.view(np.uint32))


def test_eight_bits_keep_it_within_two_to_the_minus_sixteen():
    # The compensation is rounded to units of 2^8 in the last place: half a unit is 2^7 * 2^-23 of the power of two below x.
    x = values()
    kept = master.store(jnp.asarray(x), jnp.zeros(1, jnp.bfloat16), Master.BF16_8)
    assert np.max(np.abs(np.asarray(master.load(kept), np.float64) / x - 1)) <= 2.0**-16


def test_a_parameter_is_the_nearest_bfloat16_of_its_weight():
    # With eight bits ties reach half a unit of the compensation further: 2^-9 + 2^-17 of the power of two below x.
    x = values()
    for kind, slack in ((Master.BF16_16, 0), (Master.BF16_8, 2.0**-17)):
        param = master.store(jnp.asarray(x), jnp.zeros(1, jnp.bfloat16), kind).param
        away = np.abs(np.asarray(param, np.float64) / x - 1)
        assert np.max(away) <= 2.0**-8 + slack


@pytest.mark.parametrize("kind", list(Master))
def test_every_bfloat16_is_kept_as_it_is(kind):
    noise = jnp.full(FINITE.shape, 0.75)
    kept = master.store(jnp.asarray(FINITE).astype(jnp.float32), jnp.zeros(1, jnp.bfloat16), kind, noise)
    normal = np.abs(FINITE.astype(np.float32)) >= 2.0**-126
    np.testing.assert_array_equal(np.asarray(kept.param)[normal], FINITE[normal])


@pytest.mark.parametrize("kind", list(Master))
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(kind, value):
    kept = master.store(jnp.full(4, value), jnp.zeros(1, jnp.bfloat16), kind, jnp.full(4, 0.5))
    np.testing.assert_array_equal(master.load(kept), np.full(4, value, np.float32))


def test_stochastic_rounding_is_right_on_average():
    # 2^16 draws between neighbours 2^-7 apart: the mean is within 5 standard errors, 5 * 2^-8 / 2^8.
    value = jnp.full(2**16, 1.0 + 0.3 * 2**-7)
    noise = jax.random.uniform(jax.random.key(0), value.shape)
    kept = master.store(value, jnp.zeros(1, jnp.bfloat16), Master.STOCHASTIC, noise)
    assert abs(float(kept.param.astype(jnp.float32).mean()) - float(value[0])) < 5 * 2.0**-16


def test_the_landing_is_what_apply_updates_yields():
    keys = jax.random.split(jax.random.key(0), 2)
    old = jax.random.normal(keys[0], (100_000,)).astype(jnp.bfloat16)
    value = old.astype(jnp.float32) * (1 + jnp.exp2(-20 * jax.random.uniform(keys[1], old.shape)))
    update, weight = jax.jit(master.landing, static_argnums=(2, 3))(value, old, Master.BF16_16, None)
    landed = optax.apply_updates(old, update)
    np.testing.assert_array_equal(landed, weight.param)
    np.testing.assert_array_equal(master.load(weight), value)


PARAMS = {"kernel": (64, 256), "odd": (3, 77), "embed": (8, 16)}


def problem(dtype):
    keys = jax.random.split(jax.random.key(0), len(PARAMS))
    return {
        n: (0.05 * jax.random.normal(k, s)).astype(jnp.bfloat16).astype(dtype)
        for k, (n, s) in zip(keys, PARAMS.items(), strict=True)
    }


def gradients(step):
    keys = jax.random.split(jax.random.key(100 + step), len(PARAMS))
    return {n: jax.random.normal(k, s) for k, (n, s) in zip(keys, PARAMS.items(), strict=True)}


def run(optimizer, params, steps, apply):
    state = optimizer.init(params)
    step = jax.jit(optimizer.update_and_apply if apply else lambda g, s, p: _apply(optimizer, g, s, p))
    for i in range(steps):
        params, state = step(gradients(i), state, params)
    return params, state


def _apply(optimizer, grads, state, params):
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def weights(params, state):
    return jax.tree.map(lambda p, c: master.load(Weight(p, c)), params, state[-1].compensation)


@pytest.mark.parametrize("codec", [codecs.COAT, codecs.LOG_RELATIVE, codecs.FLOAT32])
def test_update_and_apply_with_sixteen_bits_is_float32_adamw_bit_for_bit(codec):
    options = {"learning_rate": optax.linear_schedule(1e-3, 0.0, 10), "weight_decay": 0.1, "codec": codec, "min_size": 200}
    mine, state = run(coat_adamw(**options, master="bf16+16"), problem(jnp.bfloat16), 6, True)
    theirs, reference = run(coat_adamw(**options), problem(jnp.float32), 6, True)
    assert mine["kernel"].dtype == jnp.bfloat16
    jax.tree.map(np.testing.assert_array_equal, weights(mine, state), theirs)
    jax.tree.map(np.testing.assert_array_equal, state[0], reference[0])


@pytest.mark.parametrize("codec", [codecs.COAT, codecs.LOG_RELATIVE])
def test_both_entry_points_agree(codec):
    # The same operations in two programs: the compiler may fuse a product and a sum in one, half an ulp of the terms apart.
    optimizer = coat_adamw(
        1e-3, weight_decay=0.1, mask={"kernel": True, "odd": False, "embed": True}, codec=codec, min_size=200
    )
    one, _ = run(optimizer, problem(jnp.float32), 4, True)
    two, _ = run(optimizer, problem(jnp.float32), 4, False)
    for name in one:
        np.testing.assert_allclose(one[name], two[name], rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["bf16+8", "bf16+16", "bf16-stochastic"])
def test_updates_too_small_for_bfloat16_are_not_lost(kind):
    # 64 steps of 2^-13 on weights near 1, where neighbours are 2^-7 apart: plain bfloat16 would stay where it is.
    optimizer = coat_adamw(2.0**-13, weight_decay=0.0, master=kind, b1=0.0, b2=0.0, eps=0.0)
    params = {"kernel": jnp.ones((64, 128), jnp.bfloat16)}
    state = optimizer.init(params)
    step = jax.jit(lambda s, p: _apply(optimizer, {"kernel": -jnp.ones((64, 128), jnp.bfloat16)}, s, p))
    for _ in range(64):
        params, state = step(state, params)
    np.testing.assert_allclose(float(params["kernel"].astype(jnp.float32).mean()), 1 + 64 * 2.0**-13, rtol=3e-4)


def test_a_master_needs_parameters_and_a_known_name():
    optimizer = coat_adamw(1e-3, master="bf16+8")
    state = optimizer.init(problem(jnp.bfloat16))
    with pytest.raises(ValueError, match="params=None"):
        optimizer.update(gradients(0), state)
    with pytest.raises(ValueError, match=r"master='fp4' is unknown; use None or one of 'bf16\+8'"):
        coat_adamw(1e-3, master="fp4")


def test_bytes_of_parameter_and_state():
    params = {"kernel": jnp.zeros((512, 1024), jnp.bfloat16)}
    kept = (params, coat_adamw(1e-3, master="bf16+8").init(params))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(kept)) / params["kernel"].size <= 5.08
