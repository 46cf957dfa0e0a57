"""Checkpoints: the same bits, on any devices, or a reason."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax import coat_adamw, codecs
from coat_jax.optim import checkpoint, state_specs

SPECS = {"kernel": P("fsdp", None), "embed": P()}
OPTIMIZER = coat_adamw(1e-2, codec=codecs.LOG_RELATIVE, master="bf16+16", weight_decay=0.1)


def start():
    keys = jax.random.split(jax.random.key(0), 2)
    params = {"kernel": jax.random.normal(keys[0], (1024, 256), jnp.bfloat16), "embed": jax.random.normal(keys[1], (8, 8))}
    return params, OPTIMIZER.init(params)


@jax.jit
def step(carry, i):
    params, state = carry
    grads = jax.tree.map(lambda p: jnp.sin(p.astype(jnp.float32) * (3 + i)), params)
    return OPTIMIZER.update_and_apply(grads, state, params)


def run(carry, steps):
    for i in steps:
        params, state = step(carry, i)
        carry = params, state
    return carry


def shardings(carry, devices):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("fsdp",))
    specs = (SPECS, state_specs(carry[1], carry[0], SPECS, mesh.shape))
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda node: isinstance(node, P))


def template(carry, devices):
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), carry, shardings(carry, devices)
    )


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_resumed_training_is_uninterrupted_training_on_8_then_4_then_8_devices(tmp_path):
    whole = run(start(), range(6))
    carry = jax.device_put(start(), shardings(start(), 8))
    for number, (devices, steps) in enumerate([(8, range(2)), (4, range(2, 4)), (8, range(4, 6))]):
        carry = run(carry, steps)
        assert len(carry[0]["kernel"].sharding.device_set) == devices
        checkpoint.save(tmp_path / str(number), carry)
        carry = checkpoint.restore(tmp_path / str(number), template(carry, 4 if devices == 8 else 8))
    equal(carry, whole)


def test_a_state_comes_back_bit_for_bit_to_one_device(tmp_path):
    carry = run(start(), range(1))
    checkpoint.save(tmp_path / "one", carry)
    equal(checkpoint.restore(tmp_path / "one", jax.eval_shape(start)), carry)
    with pytest.raises(ValueError, match="exists; name a new folder"):
        checkpoint.save(tmp_path / "one", carry)


def test_a_template_of_another_codec_dtype_or_version_is_refused(tmp_path):
    params = {"kernel": jnp.ones((64, 128))}
    checkpoint.save(tmp_path / "coat", coat_adamw(1e-3).init(params))
    for codec in (codecs.FLOAT32, codecs.COAT_E5M2, codecs.LOG_RELATIVE):
        other = jax.eval_shape(coat_adamw(1e-3, codec=codec).init, params)
        with pytest.raises(ValueError, match="0/.u/.*/kernel was saved as .* the template has"):
            checkpoint.restore(tmp_path / "coat", other)
    (file,) = (f for f in (tmp_path / "coat" / "manifest").iterdir() if "format_version" in f.read_text())
    changed = json.loads(file.read_text()) | {"format_version": 7}
    file.write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="format version 7, this is coat_jax's version 2"):
        checkpoint.restore(tmp_path / "coat", jax.eval_shape(coat_adamw(1e-3).init, params))
    with pytest.raises(ValueError, match="is no checkpoint"):
        checkpoint.restore(tmp_path / "nothing", {})
