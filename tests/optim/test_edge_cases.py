"""Adam with stored moments where it is hard: gradients that pause or are not finite, odd shapes, every wrapper of Optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax import coat_adamw, codecs, dequantize
from coat_jax.optim import STATIC_ARGS, scale_by_coat_adam
from coat_jax.optim.state import is_quantized, viewed

STORED = [name for name in codecs.names() if name != "float32"]
SHAPE = (64, 256)


def values(state, name) -> np.ndarray:
    """A moment as numbers."""
    moment = getattr(viewed(state, "test"), name)["w"]
    return np.asarray(dequantize(moment) if is_quantized(moment) else moment)


def gradients(steps: int, sigma: float = 1.0) -> list[np.ndarray]:
    """Normal gradients whose scale differs between elements by lognormal(sigma)."""
    rng = np.random.default_rng(0)
    scale = 1e-3 * np.exp(sigma * rng.normal(size=SHAPE))
    return [(scale * rng.normal(size=SHAPE)).astype(np.float32) for _ in range(steps)]


@pytest.mark.parametrize("live", [0.0, 0.02])
@pytest.mark.parametrize("name", STORED)
def test_a_step_without_gradients_forgets_nothing(name, live):
    """An idle expert, a masked row: nu then only decays, by b2. What storing may cost an element of nu is one code of its grid,
    at most a factor of 2^(1/2) where a range of 16 octaves is laid over E4M3; an exponent fitted to the few live elements
    alone made it 255 times too large. Plain E4M3 has no such grid under amax 2^-15."""
    optimizer = scale_by_coat_adam(codec=codecs.named(name))
    update = jax.jit(optimizer.update)
    state = optimizer.init({"w": jnp.zeros(SHAPE)})
    *before, last = gradients(12)
    for grad in before:
        _, state = update({"w": grad}, state)
    nu = values(state, "nu")
    idle = np.random.default_rng(1).random(SHAPE) >= live
    _, state = update({"w": np.where(idle, np.float32(0), last)}, state)
    after = values(state, "nu")[idle] / nu[idle]
    assert np.median(after) == pytest.approx(0.999, rel=0.01)
    if name != "plain_fp8":
        assert after.max() < 2**0.5 and after.min() > 2**-0.5
    assert np.mean(values(state, "mu") == 0) < 0.02


@pytest.mark.parametrize("name", ["coat", "log_relative"])
def test_dormant_elements_neither_blur_live_ones_nor_forget(name):
    """Half of each group gets no gradient from step 20 to 220. The other half's error is then at most 1.6 times that without (a
    range laid over everything that fades made it seven times), dormant elements stand still, and their nu is on average
    what it should be (a range that leaves them out doubled it in the median), so that they go on where they stopped."""
    optimizer, exact = scale_by_coat_adam(codec=codecs.named(name)), optax.scale_by_adam()
    update, update_exact = jax.jit(optimizer.update), jax.jit(exact.update)

    def run(dormant: bool) -> tuple[float, np.ndarray, np.ndarray]:
        state, want = optimizer.init({"w": jnp.zeros(SHAPE)}), exact.init({"w": jnp.zeros(SHAPE)})
        errors = []
        for step, grad in enumerate(gradients(220, sigma=0.5)):
            if dormant and step >= 20:
                grad[:, ::2] = 0
            u, state = update({"w": grad}, state)
            v, want = update_exact({"w": grad}, want)
            live, right = np.asarray(u["w"])[:, 1::2], np.asarray(v["w"])[:, 1::2]
            errors.append(np.linalg.norm(live - right) / np.linalg.norm(right))
        nu = values(state, "nu") / np.asarray(want.nu["w"])
        return float(np.mean(errors[-10:])), np.asarray(u["w"])[:, ::2], nu[:, ::2]

    error, still, nu = run(True)
    assert not still.any()
    assert np.median(nu) == pytest.approx(1, abs=0.1) and np.mean((nu > 0.5) & (nu < 2)) > 0.95
    assert error < 1.6 * run(False)[0]


def test_betas_in_bfloat16_are_refused():
    """optax.inject_hyperparams gives hyperparameters the dtype of the parameters; b2 = 0.999 would be 1, every update NaN."""
    params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
    inject = optax.inject_hyperparams(coat_adamw, static_args=STATIC_ARGS)
    with pytest.raises(TypeError, match="b1 has dtype bfloat16.*hyperparam_dtype=jnp.float32"):
        inject(1e-3, b1=0.9).init(params)
    optimizer = optax.inject_hyperparams(coat_adamw, static_args=STATIC_ARGS, hyperparam_dtype=jnp.float32)(
        1e-3, b1=0.9, b2=0.999, master="bf16+8"
    )
    updates, _ = jax.jit(optimizer.update)(params, optimizer.init(params), params)
    assert jnp.isfinite(updates["w"]).all()


def test_states_and_codecs_that_do_not_fit_are_refused_in_one_line():
    params, other = {"w": jnp.ones((64, 128))}, {"w": jnp.ones((64, 64))}
    optimizer = coat_adamw(1e-3)
    for call, error, sentence in (
        (lambda: coat_adamw(1e-3, codec="coat"), TypeError, "codec='coat' is not a MomentCodec; use codecs.COAT"),
        (lambda: optimizer.update(other, optimizer.init(params), params), ValueError, "moments of shape \\(64, 128\\)"),
        (
            lambda: optimizer.update(params, coat_adamw(1e-3, codec=codecs.LOG_RELATIVE).init(params), params),
            ValueError,
            "the state belongs to the codec 'log_relative', the optimizer has the codec 'coat'; use the codec that",
        ),
        (
            lambda: optimizer.update(params, optax.adamw(1e-3).init(params), params),
            TypeError,
            "the state is that of optax.adamw; convert it once",
        ),
        (
            lambda: optimizer.update_and_apply(params, optax.adamw(1e-3).init(params), params),
            TypeError,
            "the state is that of optax.adamw; convert it once",
        ),
    ):
        with pytest.raises(error, match=sentence) as caught:
            call()
        assert "\n" not in str(caught.value)
