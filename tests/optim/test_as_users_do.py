"""What people's programs do around an optimizer, each in a process of its own, without the suite's environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
START = "import copy, jax, jax.numpy as jnp, optax\nfrom coat_jax import QuantizedArray, coat_adamw, codecs\n"

PROGRAMS = {
    "mu_dtype is None or refused": """
coat_adamw(1e-3, 0.9, 0.95, 1e-8, 0.0, mu_dtype=None, weight_decay=0.1)
try:
    coat_adamw(1e-3, mu_dtype=jnp.bfloat16)
except TypeError as error:
    assert "moments are stored by codec=" in str(error)
try:
    coat_adamw(1e-3, 0.9, 0.999, 1e-8, 0.0, None, 0.1)
except TypeError as error:
    assert "positional" in str(error)
else:
    raise AssertionError("optax.adamw's sixth argument is mu_dtype")
""",
    "inject_hyperparams without static_args": """
for dtype, master in ((jnp.float32, None), (jnp.bfloat16, "bf16+8")):
    params = {"kernel": jnp.ones((64, 128), dtype)}
    tx = optax.inject_hyperparams(coat_adamw)(learning_rate=optax.constant_schedule(1e-3), master=master)
    want = jax.eval_shape(tx.init, params)
    state = jax.jit(tx.init)(params)
    for _ in range(3):
        updates, state = jax.jit(tx.update)(params, state, params)
    assert jax.tree.structure(state) == jax.tree.structure(want)
    assert state.inner_state[0].mu.codes["kernel"].dtype == jnp.float8_e4m3fn
    # Three equal gradients: each step is the learning rate and a decay of 1e-4, which bfloat16 rounds away.
    assert abs(float(updates["kernel"][0, 0]) + 1e-3) < 2e-5 or master, updates["kernel"][0, 0]
    assert bool(jnp.isfinite(updates["kernel"]).all())
try:
    jax.eval_shape(optax.inject_hyperparams(coat_adamw)(learning_rate=1e-3, min_size=1024).init, params)
except TypeError as error:
    assert "static_args=coat_jax.optim.STATIC_ARGS" in str(error)
else:
    raise AssertionError("a min_size that is an array")
""",
    "embeddings and norms by the field's names": """
kept = {"wte": (512, 64), "wpe": (512, 64), "h": {"ln_1": {"scale": (12, 512)}}, "final_norm": {"w": (4096,)},
        "layers": {"input_layernorm": {"weight": (32, 4096)}, "attn_norm": {"w": (32, 4096)}}, "cls": (8192,),
        "embedder": {"input_embedding": (512, 64)}, "model": {"embed_tokens": {"weight": (512, 64)}}}
coded = {"text_embedding_model": {"mlp": {"kernel": (256, 256)}, "head": {"w": (256, 256)}}, "layers": {"q": (4, 64, 64)}}
for shapes, quantized in ((kept, False), (coded, True)):
    params = jax.tree.map(jnp.ones, shapes, is_leaf=lambda x: isinstance(x, tuple))
    codes = jax.eval_shape(coat_adamw(1e-3).init, params)[0].mu.codes
    for leaf in jax.tree.leaves(codes):
        assert (leaf.dtype == jnp.float8_e4m3fn) == quantized, (codes, quantized)
""",
    "a filter that fits nothing": """
from coat_jax.optim.diagnostics import describe_state
params = {"mlp": {"kernel": jnp.ones((256, 256))}, "lm_head": {"kernel": jnp.ones((256, 256))}}
state = coat_adamw(1e-3, quantize_filter=("!*lm_head*",)).init(params)  # exclusions alone change the default rule
assert state[0].mu.codes["mlp"]["kernel"].dtype == jnp.float8_e4m3fn
assert state[0].mu.codes["lm_head"]["kernel"].dtype == jnp.float32 and state[0].mu.scale["lm_head"]["kernel"] is None
assert "quantized" in describe_state(state) and " 50.0% " in describe_state(state)
try:
    coat_adamw(1e-3, quantize_filter=("*lm_hed*",)).init(params)
except ValueError as error:
    assert "quantizes nothing and does not fit 'lm_head/kernel'" in str(error), error
else:
    raise AssertionError("a slip of the pen")
""",
    "a state mapped to types prints": """
from coat_jax import PerGroup, QuantSpec, E4M3, quantize
stored = quantize(jnp.ones((64, 128)), QuantSpec(E4M3, PerGroup(128)))
assert "QuantizedArray(float32[] as e4m3" in repr(jax.tree.map(type, stored))
repr(jax.tree.map(type, coat_adamw(1e-3).init({"kernel": jnp.ones((64, 128))})))
""",
    "an optimizer is copied and rebuilt": """
from flax import nnx
tx, params = coat_adamw(1e-3), {"kernel": jnp.ones((64, 128))}
for other in (copy.deepcopy(tx), jax.tree.map(lambda f: f, tx)):
    init, update = other
    jax.tree.map(lambda a, b: None, init(params), tx.init(params))
    new, _ = other.update_and_apply(params, other.init(params), params)
    assert float(new["kernel"][0, 0]) < 1
repr(tx), repr(nnx.Optimizer(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param))
""",
    "an eager init follows the parameters": """
mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
place = jax.NamedSharding(mesh, jax.P("fsdp", None))
params = {"k": jax.device_put(jnp.ones((1024, 4096), jnp.bfloat16), place)}
for codec in (codecs.COAT, codecs.LOG_RELATIVE, codecs.FLOAT32):
    state = coat_adamw(1e-3, codec=codec, master="bf16+8").init(params)
    on = {device.id: 0 for device in jax.devices()}
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            on[shard.device.id] += shard.data.nbytes
    assert max(on.values()) - min(on.values()) <= 12, on  # the counts and the codec's mark
odd = {"k": jax.device_put(jnp.ones((100, 1096)), jax.NamedSharding(mesh, jax.P(None, "fsdp")))}
scale = coat_adamw(1e-3).init(odd)[0].mu.scale["k"]  # 9 groups, which 8 devices cannot share
assert scale.shape == (100, 9) and scale.sharding.is_fully_replicated and len(scale.sharding.device_set) == 8, scale.sharding
""",
    "a state is read by its own codec": """
from coat_jax.optim.convert import to_adamw
from coat_jax.optim.diagnostics import moment_error
params = {"k": jnp.ones((64, 128))}
state = coat_adamw(1e-3, codec=codecs.LOG_RELATIVE).init(params)
_, state = coat_adamw(1e-3, codec=codecs.LOG_RELATIVE).update({"k": jnp.full((64, 128), 1e-3)}, state, params)
exact = optax.adamw(1e-3).init(params)[0]
for name, call in (("to_adamw", to_adamw), ("moment_error", lambda s, c: moment_error(s[0], exact, c))):
    try:
        call(state, codecs.COAT)
    except ValueError as error:
        assert str(error).startswith(name + ": the state belongs to the codec 'log_relative'"), error
    else:
        raise AssertionError(name)
assert abs(float(to_adamw(state)[0].mu["k"][0, 0]) / 1e-4 - 1) < 0.02  # mu itself, not mu / sqrt(nu), which is 3.2
import dataclasses
from coat_jax import PowerExpansion
own = dataclasses.replace(codecs.COAT, mu=dataclasses.replace(codecs.COAT.mu, expansion=PowerExpansion(64.0)))
mine = coat_adamw(1e-3, codec=own).init(params)
try:
    to_adamw(mine)
except ValueError as error:
    assert "a codec that has no name; give it as codec=" in str(error), error
else:
    raise AssertionError("a codec of one's own")
to_adamw(mine, own)
""",
    "complex leaves are refused": """
params = {"c": jnp.full((4,), 1 + 1j, jnp.complex64)}
for codec in (codecs.COAT, codecs.FLOAT32):
    try:
        coat_adamw(1e-2, codec=codec).init(params)
    except TypeError as error:
        assert "'c' is complex64" in str(error), error
    else:
        raise AssertionError(codec)
""",
    "a derivative is refused, and not asked for otherwise": """
p, g = (jax.random.normal(jax.random.key(i), (64, 128)) for i in range(2))
def update(c, lr=1e-2):
    tx = coat_adamw(lr)
    return jnp.sum(optax.apply_updates(p, tx.update(c * g, tx.init(p), p)[0]))
def in_place(c, lr=1e-2):
    tx = coat_adamw(lr)
    return jnp.sum(tx.update_and_apply(c * g, tx.init(p), p)[0])
for fn in (jax.grad(update), jax.grad(in_place), jax.grad(lambda lr: in_place(1.0, lr)), jax.jit(jax.grad(update))):
    try:
        fn(0.5)
    except TypeError as error:
        assert "a derivative through its step is asked for" in str(error), error
    else:
        raise AssertionError("a derivative of 0")
# That by the learning rate is right in update: the direction does not depend on it.
want = (update(1.0, 2e-2) - update(1.0, 1e-2)) / 1e-2
assert abs(jax.grad(lambda lr: update(1.0, lr))(1e-2) / want - 1) < 1e-2
jax.value_and_grad(lambda x: x * jax.lax.stop_gradient(update(jax.lax.stop_gradient(x))))(0.5)
""",
    "Optax's wrappers take bfloat16": """
params = {"k": jnp.ones((64, 128), jnp.bfloat16)}
for wrap in (lambda tx: optax.apply_if_finite(tx, 5), lambda tx: optax.conditionally_mask(tx, lambda step: step < 5),
             lambda tx: optax.conditionally_transform(tx, lambda step: step < 5), lambda tx: optax.MultiSteps(tx, 2)):
    for master in (None, "bf16+8", "bf16-stochastic"):
        tx = wrap(coat_adamw(1e-3, master=master))
        state = tx.init(params)
        for _ in range(2):
            updates, state = jax.jit(tx.update)(params, state, params)
tx = coat_adamw(1e-3)
for dtype, want in ((jnp.bfloat16, jnp.bfloat16), (jnp.float32, jnp.float32)):
    grads = {"k": jnp.ones((64, 128), dtype)}
    assert jax.eval_shape(tx.update, grads, tx.init(params), params)[0]["k"].dtype == want
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_its_own(name):
    env = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_"))}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    if "make_mesh" in PROGRAMS[name]:
        env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    done = subprocess.run([sys.executable, "-c", START + PROGRAMS[name]], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
