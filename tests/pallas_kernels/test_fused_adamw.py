"""The fused optimizer step: interpreted, the bytes of plain JAX; compiled, one pass over memory in place."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from interpreting import interpreted, numbers_like, same_bytes

from coat_jax import coat_adamw, codecs

ROWS = {"in/kernel": (40, 128), "layers/kernel": (3, 8, 128), "norm/scale": (128,)}
COLUMNS = {"out/kernel": (256, 128)}
BIG = (4096, 8192)


def like(shapes, seed, factor=1.0):
    return {
        name: (factor * numbers_like(shape, seed + i)).astype(jnp.bfloat16) for i, (name, shape) in enumerate(shapes.items())
    }


@interpreted
@pytest.mark.parametrize(
    "codec, master, shapes", [("coat", "bf16+8", ROWS), ("coat", None, COLUMNS), ("log_relative", "bf16-stochastic", ROWS)]
)
@pytest.mark.parametrize("entry", ["update_and_apply", "update"])
def test_an_interpreted_step_is_that_of_plain_jax(entry, codec, master, shapes):
    """From moments that a step has stored; leaves of one kind share a launch, those of float32 moments have none."""

    def step(implementation):
        options = {"codec": codecs.named(codec), "master": master, "implementation": implementation}
        return jax.jit(getattr(coat_adamw(3e-4, b2=0.95, min_size=1, **options), entry))

    params = like(shapes, 0)
    state = coat_adamw(3e-4, codec=codecs.named(codec), master=master, min_size=1).init(params)
    first, state = step("xla")(like(shapes, 10, 1e-3), state, params)
    params = first if entry == "update_and_apply" else optax.apply_updates(params, first)
    same_bytes(*(step(name)(like(shapes, 20, 1e-3), state, params) for name in ("xla", "interpret")))


def big_step(master, implementation=None):
    optimizer = coat_adamw(3e-4, b2=0.95, master=master, implementation=implementation)
    params = {"kernel": jax.ShapeDtypeStruct(BIG, jnp.bfloat16)}
    return optimizer.update_and_apply, (params, jax.eval_shape(optimizer.init, params), params)


@interpreted
@pytest.mark.parametrize("master, most", [(None, 10.6), ("bf16+8", 12.7)])
def test_the_copies_of_a_step_move_every_byte_once(master, most):
    """bf16 weight read and written, bf16 gradient read, two moments of one byte and 5/128 read and written: 10.16 bytes per
    parameter; a byte of compensation read and written makes 12.16."""
    step, args = big_step(master, "interpret")
    [moved] = re.findall(r"bytes_accessed=(\d+)", str(jax.make_jaxpr(step)(*args)))
    assert int(moved) / (BIG[0] * BIG[1]) < most


@pytest.mark.plan
@pytest.mark.parametrize("master", [None, "bf16+8"])
def test_compiled_for_an_h100_a_step_is_one_kernel_in_place(master):
    from coat_jax.compiled import compile_for

    step, args = big_step(master)
    program = compile_for("h100", step, *args, donate_argnums=(1, 2))
    assert program.temp_bytes < 4096
    assert len(re.findall(r"custom_call_target=\S*mosaic_gpu", program.text)) == 1
    assert " copy(" not in program.text


def chained(tx):
    """A training step's second half, as people write it with Optax, and its arguments."""
    params = {"kernel": jax.ShapeDtypeStruct((4096, 11008), jnp.bfloat16)}

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step, (params, jax.eval_shape(tx.init, params), params)


CHAINS = {
    "alone": lambda: (coat_adamw(3e-4), 0),
    "clipped": lambda: (optax.chain(optax.clip_by_global_norm(1.0), coat_adamw(3e-4)), 6),
    "masked": lambda: (optax.masked(coat_adamw(3e-4), {"kernel": True}), 0),
    "hyperparameters": lambda: (optax.inject_hyperparams(coat_adamw)(3e-4), 0),
    "scheduled, log_relative": lambda: (coat_adamw(optax.cosine_decay_schedule(3e-4, 10), codec=codecs.LOG_RELATIVE), 0),
}


@pytest.mark.plan
@pytest.mark.parametrize("name", CHAINS)
def test_compiled_for_an_h100_update_is_a_kernel_in_every_chain(name):
    """A bf16 gradient read, moments read and written, a direction written in float32: 10.16 bytes per parameter. The direction
    and the parameter read, and the parameter written: 8 more. Clipping reads the gradients for their norm, and reads and writes
    them: 6."""
    from coat_jax.compiled import compile_for
    from coat_jax.compiled.roofline import traffic

    tx, besides = CHAINS[name]()
    step, args = chained(tx)
    program = compile_for("h100", step, *args, donate_argnums=(0, 1))
    assert len(re.findall(r"custom_call_target=\S*mosaic_gpu", program.text)) == 1
    parameters = 4096 * 11008
    assert program.temp_bytes <= (4 + besides / 3) * parameters + 4096  # the direction, and the clipped gradients
    assert traffic(program) <= (18.2 + besides) * parameters


@pytest.mark.plan
def test_leaves_of_one_shape_share_one_compiled_kernel():
    from coat_jax.compiled import compile_for

    optimizer = coat_adamw(3e-4)
    params = {f"layer_{i}": jax.ShapeDtypeStruct((256, 512), jnp.bfloat16) for i in range(12)}
    text = compile_for("h100", optimizer.update_and_apply, params, jax.eval_shape(optimizer.init, params), params).text
    hashes = re.findall(r"mosaic_gpu_v2.*?kernel_hash = \"((?:[^\"\\]|\\.)*)\"", text)
    assert len(hashes) == 3 and len(set(hashes)) == 1, (len(hashes), len(set(hashes)))


@pytest.mark.plan
def test_compiled_for_an_h100_a_train_state_moves_what_the_chain_alone_moves():
    from flax.training.train_state import TrainState

    from coat_jax.compiled import compile_for
    from coat_jax.compiled.roofline import traffic

    params, optimizer = {"kernel": jax.ShapeDtypeStruct((4096, 11008), jnp.bfloat16)}, coat_adamw(3e-4)
    state = jax.eval_shape(lambda p: TrainState.create(apply_fn=jnp.sin, params=p, tx=optimizer), params)
    program = compile_for("h100", lambda s, g: s.apply_gradients(grads=g), state, params, donate_argnums=(0,))
    assert traffic(program) <= 18.2 * 4096 * 11008
    assert program.temp_bytes <= 4.01 * 4096 * 11008
