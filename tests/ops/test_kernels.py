"""Functions with their stashes: interpreted kernels give plain JAX's bytes, and the oracle agrees with what they keep."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from interpreting import interpreted, numbers_like, same_bytes, same_either_way
from jax.sharding import PartitionSpec
from meshes import COLLECTIVE, mesh_of, run_on

from coat_jax import ops, recipes
from coat_jax.quant import E4M3, E5M2, PerGroup, PerTensor, QuantSpec, one_pass, quantize
from pallas_kernels import dispatch

COAT = recipes.coat()
BF16 = np.dtype(jnp.bfloat16)
OPS = {
    "silu": (ops.silu, 1),
    "gelu": (ops.gelu, 1),
    "multiply": (ops.multiply, 2),
    "swiglu": (ops.swiglu, 2),
}
some = settings(max_examples=2, deadline=None, derandomize=True, phases=[Phase.generate])  # shrinking would take minutes


def both(op, inputs, recipe=COAT):
    """op, what it keeps and its gradients, by plain JAX and interpreted."""

    def run(implementation, inputs, g):
        y, pull = jax.vjp(lambda *xs: op(*xs, recipe.replace(implementation=implementation)), *inputs)
        return y, jax.tree.leaves(pull), pull(g)

    g = numbers_like(inputs[0].shape, 9).astype(inputs[0].dtype)
    return [jax.jit(functools.partial(run, name))(inputs, g) for name in ("xla", "interpret")]


def every_bf16(groups):
    """All bf16 numbers; the second operand meets them in another order."""
    x = jax.lax.bitcast_convert_type(jnp.arange(2**16, dtype=jnp.uint16), jnp.bfloat16)
    return [x.reshape(-1, groups), x.reshape(groups, -1).T]


@interpreted
@pytest.mark.parametrize("name", OPS)
def test_all_bfloat16_numbers_forward_and_backward(name):
    op, count = OPS[name]
    plain, kernel = both(op, every_bf16(256)[:count])
    # Which NaN a NaN is depends on how its compiler orders operands; that it is one does not.
    same_bytes(*(jax.tree.map(lambda x: jnp.where(x == x, x, jnp.nan).astype(x.dtype), ys) for ys in (kernel, plain)))


@interpreted
@pytest.mark.parametrize("name", ["silu", "swiglu"])
@some
@given(
    rows=st.integers(1, 40), columns=st.integers(16, 400), lean=st.booleans(), dtype=st.sampled_from(["bfloat16", "float32"])
)
def test_any_shape(name, rows, columns, lean, dtype):
    op, count = OPS[name]
    columns += -columns % 4 if columns < 128 else 0  # a row shorter than a group is one group
    inputs = [numbers_like((rows, columns), i).astype(dtype) for i in range(count)]
    same_bytes(*both(op, inputs, recipes.lean() if lean else COAT))


@interpreted
def test_the_oracle_agrees_with_what_a_kernel_keeps():
    gate, up = (numbers_like((24, 80), i).astype(jnp.bfloat16) for i in range(2))
    _, kept = ops.Elementwise(ops.gate_silu).forward([gate, up], (), [COAT.nonlinear_input] * 2, "interpret")
    for x, q in zip((gate, up), kept, strict=True):
        want = oracle.encode(np.asarray(x, np.float64), "e4m3", (1, 16), None, bf16_scales=True)
        np.testing.assert_array_equal(q.payload, want.payload("e4m3"))
        np.testing.assert_array_equal(np.asarray(q.scale, np.float32), want.scale)


@interpreted
@pytest.mark.parametrize("spec", [COAT.weight, COAT.gradient, QuantSpec(E5M2, PerTensor(), None, "stochastic")], ids=str)
@pytest.mark.parametrize("shape", [(40, 256), (3, 5, 33), ()], ids=str)
def test_one_scale_for_a_tensor(spec, shape):
    same_either_way(numbers_like(shape).astype(jnp.bfloat16), spec)


@interpreted
@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan])
def test_one_scale_of_a_tensor_that_is_not_finite(bad):
    x = numbers_like((64, 128)).at[3, 4].set(bad)
    q = quantize(x, COAT.weight, implementation="interpret")
    assert bool(jnp.isnan(q.scale).all())
    same_bytes(q, quantize(x, COAT.weight))


def test_what_cannot_run_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="Recipe: implementation='cuda' is unknown"):
        COAT.replace(implementation="cuda")
    x, interpret = jnp.ones((8, 128)), COAT.replace(implementation="interpret")
    stash = jax.grad(lambda x, op, recipe: op(x, recipe=recipe).sum())
    with pytest.raises(ValueError, match="runs in programs for one Hopper GPU"):
        stash(x, ops.silu, COAT.replace(implementation="pallas"))
    with pytest.raises(ValueError, match="no kernel with an error function, which approximate=True does without"):
        stash(x, functools.partial(ops.gelu, approximate=False), interpret)
    with pytest.raises(ValueError, match="groups of 16, 32, ... 256 elements, not of 6"):
        stash(x, ops.silu, interpret.replace(nonlinear_input=QuantSpec(E4M3, PerGroup(6))))


@pytest.mark.parametrize("spec", [PartitionSpec("a", None, "b"), PartitionSpec(None, "b")])
def test_devices_run_functions_on_their_own_parts(spec, monkeypatch):
    """What Hopper GPUs would run, with the launch itself in plain JAX: nothing is exchanged, and no bit depends on it."""
    seen = []

    def launched(tile, leaves, groups, **_):
        seen.append(groups[0].shape)
        return [tile(*leaves[0], axes=groups[0].axes)]

    def run(gate, up, g):
        y, pull = jax.vjp(lambda *xs: ops.swiglu(*xs, recipes.lean()), gate, up)
        return y, jax.tree.leaves(pull), pull(g)

    inputs = [numbers_like((4, 8, 1024), i).astype(jnp.bfloat16) for i in range(3)]
    want = jax.jit(run)(*inputs)
    monkeypatch.setattr(dispatch, "_for_hopper", lambda module: True)
    monkeypatch.setattr(one_pass, "group_map", launched)
    got, text = run_on(mesh_of(a=2, b=4), (spec,) * 3, lambda *xs: run(*xs), *inputs)
    same_bytes(got, want)
    assert not COLLECTIVE.search(text)
    assert np.prod(seen[-1]) < 4 * 8 * 1024
