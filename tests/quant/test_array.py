"""`QuantizedArray` as a pytree: what it checks, what it lets through, and every transformation that carries it."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import SHAPE, SPECS, jit_dequantize, jit_quantize, same_bits
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax.quant import E4M3, PerBlock, PerGroup, PowerExpansion, QuantizedArray, QuantSpec, dequantize, quantize

POWER = SPECS["e4m3 power"]
X = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)


@pytest.fixture(scope="module")
def q() -> QuantizedArray:
    return jit_quantize(X, POWER)


def parts(q: QuantizedArray, **other) -> QuantizedArray:
    """A new QuantizedArray of q's parts, some replaced: through the constructor, which checks."""
    fields = {name: getattr(q, name) for name in ("payload", "scale", "exponent", "spec", "dtype")}
    return QuantizedArray(**(fields | other))


def test_describes_itself(q):
    assert (q.shape, q.ndim, q.size, q.dtype) == (SHAPE, 2, 65_280, np.float32)
    assert q.scale.shape == q.exponent.shape == (255, 2)
    assert q.nbytes == 65_280 + 510 * 4 + 510
    assert repr(q) == "QuantizedArray(float32[255, 256] as e4m3, group 128, PowerExpansion, float32 scales)"


@pytest.mark.parametrize("name", ["payload", "scale", "exponent"])
def test_construction_checks_dtypes(q, name):
    with pytest.raises(TypeError, match=f"QuantizedArray: {name} "):
        parts(q, **{name: getattr(q, name).astype(jnp.float16)})


@pytest.mark.parametrize("name, error", [("scale", ValueError), ("exponent", TypeError), ("payload", ValueError)])
def test_construction_checks_shapes(q, name, error):
    with pytest.raises(error, match="QuantizedArray: "):
        parts(q, **{name: getattr(q, name)[:7]})


def test_construction_checks_the_exponent_s_presence(q):
    with pytest.raises(TypeError, match="exponent is None, the spec is"):
        parts(q, exponent=None)
    with pytest.raises(TypeError, match="exponent is "):
        parts(q, spec=QuantSpec(E4M3, PerGroup(128)))


def test_leaves_and_their_names(q):
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path({"mu": q})[0]]
    assert paths == ["['mu'].payload", "['mu'].scale", "['mu'].exponent"]
    plain = jit_quantize(X, SPECS["e4m3"])
    assert len(jax.tree.leaves(plain)) == 2
    assert jax.tree.structure(q) == jax.tree.structure(jit_quantize(X + 1, POWER))
    assert jax.tree.structure(q) != jax.tree.structure(plain)


def test_tree_map_puts_anything_in_the_leaves(q):
    """Shapes, dtypes, shardings, partition specs, None: what Optax, Orbax and jit do with a tree of arrays."""
    assert jax.tree.map(lambda a: a.shape, q).scale == (255, 2)
    assert jax.tree.map(lambda a: P("d"), q).payload == P("d")
    assert jax.tree.map(lambda a: None, q).scale is None
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:5]), ("d",)), P("d"))
    placed = jax.device_put(q, jax.tree.map(lambda a: sharding, q))
    assert same_bits(placed, q) and placed.payload.sharding == sharding
    np.testing.assert_array_equal(jit_dequantize(placed), jit_dequantize(q))


def test_eval_shape_and_sharded_init(q):
    abstract = jax.eval_shape(lambda x: quantize(x, POWER), X)
    assert isinstance(abstract, QuantizedArray)
    assert (abstract.shape, abstract.nbytes, abstract.scale.dtype) == (SHAPE, q.nbytes, np.float32)
    assert jax.eval_shape(dequantize, abstract).shape == SHAPE
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:5]), ("d",)), P("d"))
    shardings = jax.tree.map(lambda a: sharding, abstract)
    made = jax.jit(lambda x: quantize(x, POWER), out_shardings=shardings)(X)
    assert same_bits(made, q) and {leaf.sharding for leaf in jax.tree.leaves(made)} == {sharding}


def test_jit_does_not_compile_twice(q):
    traces = []

    @jax.jit
    def step(q):
        traces.append(q)
        return quantize(dequantize(q) * 0.5, q.spec)

    step(step(jax.tree.map(jnp.copy, q)))
    assert len(traces) == 1


def test_donation_reuses_the_buffers(q):
    mine = jax.tree.map(jnp.copy, q)
    step = jax.jit(lambda q: quantize(dequantize(q) * 0.5, q.spec), donate_argnums=0)
    step(mine)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(mine))


def test_scan_carries_and_stacks(q):
    def half(q, _):
        q = quantize(dequantize(q) * 0.5, q.spec)
        return q, q

    last, stacked = jax.lax.scan(half, q, None, length=3)
    assert stacked.payload.shape == (3, *SHAPE) and stacked.scale.shape == (3, 255, 2)
    assert same_bits(jax.tree.map(lambda a: a[-1], stacked), last)
    for _ in range(3):
        q = jit_quantize(jit_dequantize(q) * 0.5, q.spec)
    assert same_bits(last, q)


def test_cond_while_and_vmap_carry_it(q):
    half = jax.jit(lambda q: quantize(dequantize(q) * 0.5, q.spec))
    assert same_bits(jax.lax.cond(True, lambda q: q, half, q), q)
    assert same_bits(jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, half(c[1])), (0, q))[1], half(half(q)))
    batched = jax.jit(jax.vmap(lambda x: quantize(x, POWER)))(X.reshape(5, 51, 256))
    assert same_bits(jax.tree.map(lambda a: a.reshape(255, -1), batched), q)
    np.testing.assert_array_equal(jax.jit(jax.vmap(dequantize))(batched).reshape(SHAPE), jit_dequantize(q))


def test_copies_and_pickles(q):
    assert same_bits(copy.deepcopy(q), q)
    back = pickle.loads(pickle.dumps(q))
    assert same_bits(back, q) and (back.spec, back.dtype) == (q.spec, q.dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_the_array_s_dtype_comes_back(dtype):
    x = jnp.asarray(X[:4]).astype(dtype)
    q = quantize(x, QuantSpec(E4M3, PerBlock((2, 128))))
    assert q.dtype == dequantize(q).dtype == dtype
    assert dequantize(q, jnp.float32).dtype == jnp.float32


def test_values_are_hashable_and_equal_by_value():
    assert hash(POWER) == hash(QuantSpec(E4M3, PerGroup(128), PowerExpansion()))
    assert QuantSpec(E4M3, PerBlock([2, 2])) == QuantSpec(E4M3, PerBlock((2, 2)))
    assert QuantSpec(E4M3, PerGroup(128), rounding="nearest") == QuantSpec(E4M3, PerGroup(128))
    assert QuantSpec(E4M3, PerGroup(128), scale_dtype="float32") == QuantSpec(E4M3, PerGroup(128))
