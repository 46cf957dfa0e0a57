"""Linen modules have the parameters and initial values of their Flax namesakes; with `bf16()` they are those, bit for bit."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import coat_jax
from coat_jax import linen, recipes

X = jax.random.normal(jax.random.key(1), (2, 6, 16))
TOKENS = jnp.array([[1, 2, 3], [3, 3, 0]])
MASK = nn.make_causal_mask(X[..., 0], dtype=bool)
PAIRS = {
    "Dense": (linen.FP8Dense, nn.Dense, (7,), {}, X),
    "Dense without bias": (linen.FP8Dense, nn.Dense, (7,), {"use_bias": False, "kernel_init": nn.initializers.ones}, X),
    "DenseGeneral": (linen.FP8DenseGeneral, nn.DenseGeneral, ((3, 4),), {"axis": (-2, -1)}, X),
    "DenseGeneral with batch": (linen.FP8DenseGeneral, nn.DenseGeneral, (4,), {"batch_dims": (0,)}, X),
    "Embed": (linen.FP8Embed, nn.Embed, (10, 8), {}, TOKENS),
    "RMSNorm": (linen.FP8RMSNorm, nn.RMSNorm, (), {}, X),
    "LayerNorm": (linen.FP8LayerNorm, nn.LayerNorm, (), {"use_bias": False}, X),
    "MultiHeadAttention": (
        linen.FP8MultiHeadAttention,
        nn.MultiHeadDotProductAttention,
        (4,),
        {"qkv_features": 32, "normalize_qk": True},
        X,
    ),
}


def run(module, params, x):
    call = {"mask": MASK} if isinstance(module, nn.MultiHeadDotProductAttention) else {}
    return module.apply(params, x, **call)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", PAIRS)
def test_parameters_are_those_of_flax_and_so_is_bf16(name, dtype):
    ours, theirs, args, options, x = PAIRS[name]
    flax = theirs(*args, **options, dtype=dtype)
    params = flax.init(jax.random.key(0), x)
    for recipe in (recipes.bf16(), recipes.coat()):
        own = ours(*args, **options, dtype=dtype, recipe=recipe).init(jax.random.key(0), x)
        assert jax.tree.structure(own) == jax.tree.structure(params)
        for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(params), strict=True):
            assert a.dtype == b.dtype
            assert bool((a == b).all())

    def loss(module, params):
        y = run(module, params, x)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    results = []
    for module in (flax, ours(*args, **options, dtype=dtype, recipe=recipes.bf16())):
        results.append(jax.jit(jax.value_and_grad(lambda p, module=module: loss(module, p), has_aux=True))(params))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        assert a.dtype == b.dtype
        assert bool((a == b).all())

    exact = run(flax, params, x)
    close = run(ours(*args, **options, dtype=dtype, recipe=recipes.lean()), params, x)
    assert close.dtype == exact.dtype
    # Norms and rows of a table are exact; one product is off by at most 2^-4 of each operand, attention has two in a row.
    products = {"RMSNorm": 0, "LayerNorm": 0, "Embed": 0, "MultiHeadAttention": 2}.get(name, 1)
    error = jnp.linalg.norm((close - exact).astype(jnp.float32)) / jnp.linalg.norm(exact.astype(jnp.float32))
    assert error <= 2 * products * 2.0**-4


class SwiGLU(nn.Module):
    """Three Dense layers, as one writes it with Flax."""

    @nn.compact
    def __call__(self, x):
        gate, up = (nn.Dense(24, use_bias=False, name=name)(x) for name in ("gate", "up"))
        return nn.Dense(16, use_bias=False, name="down")(nn.silu(gate) * up)


class MLP(nn.Module):
    """Two Dense layers, as one writes it with Flax."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(16, name="out")(nn.gelu(nn.Dense(24, name="in")(x)))


@pytest.mark.parametrize(("ours", "theirs"), [(linen.FP8SwiGLU, SwiGLU), (linen.FP8MLP, MLP)])
def test_feed_forward_blocks_are_dense_layers(ours, theirs):
    params = theirs().init(jax.random.key(0), X)
    assert jax.tree.map(jnp.shape, ours(24).init(jax.random.key(0), X)) == jax.tree.map(jnp.shape, params)
    plain = jax.jit(theirs().apply)(params, X)
    assert bool((jax.jit(ours(24, recipe=recipes.bf16()).apply)(params, X) == plain).all())
    close = ours(24, recipe=recipes.lean()).apply(params, X)
    assert jnp.linalg.norm(close - plain) <= 4 * 2.0**-4 * jnp.linalg.norm(plain)  # two products of two operands


class Body(nn.Module):
    """A layer for nn.scan."""

    @nn.compact
    def __call__(self, x):
        return x + linen.FP8SwiGLU(24, recipe=recipes.lean(), name="mlp")(linen.FP8RMSNorm(name="norm")(x)), None


def test_modules_in_nn_scan_and_nn_remat():
    def model(body):
        return nn.scan(body, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()

    params = model(Body).init(jax.random.key(0), X)
    remat = nn.remat(Body, policy=coat_jax.remat_policy, prevent_cse=False)
    grads = [jax.jit(jax.grad(lambda p, body=body: jnp.sum(model(body).apply(p, X)[0] ** 2)))(params) for body in (Body, remat)]
    for a, b in zip(*map(jax.tree.leaves, grads), strict=True):
        assert a.shape[0] == 3
        assert bool((a == b).all())


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (linen.FP8Dense(4, dot_general=jax.lax.dot_general), "FP8Dense: dot_general="),
        (linen.FP8DenseGeneral(4, batch_dims=(1,)), r"FP8DenseGeneral: batch_dims=\(1,\)"),
        (linen.FP8RMSNorm(reduction_axes=(0,)), r"FP8RMSNorm: reduction_axes=\(0,\) has no FP8 form"),
        (linen.FP8LayerNorm(axis_name="batch"), "FP8LayerNorm: axis_name='batch' has no FP8 form"),
        (linen.FP8MultiHeadAttention(4, decode=True), "FP8MultiHeadAttention: decode=True has no FP8 form"),
        (
            linen.FP8MultiHeadAttention(4, dropout_rate=0.1, deterministic=False),
            "FP8MultiHeadAttention: dropout_rate=0.1 has no FP8 form",
        ),
    ],
)
def test_what_has_no_fp8_form_is_refused_by_name(module, words):
    with pytest.raises(ValueError, match=words):
        module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)


def test_self_attention_reads_one_stash():
    module = linen.FP8MultiHeadAttention(4, use_bias=False)
    params = module.init(jax.random.key(0), X)
    _, pull = jax.vjp(lambda p, x: module.apply(p, x), params, X)
    codes = sum(leaf.nbytes for leaf in jax.tree.leaves(pull) if leaf.dtype == jnp.uint8)
    assert codes == X.size  # the input, once for q, k and v; coat() keeps q, k, v and o as they are
    causal = linen.FP8MultiHeadAttention(4, use_bias=False, causal=True).apply(params, X)
    masked = module.apply(params, X, mask=MASK)
    assert bool(jnp.allclose(causal, masked, rtol=0, atol=1e-5))


def test_masks_of_flax_helpers_are_taken():
    """They are float32 unless told otherwise, 0 where a key is hidden."""
    x, mask = jax.random.normal(jax.random.key(0), (2, 8, 16)), nn.make_causal_mask(jnp.ones((2, 8), jnp.int32))
    assert mask.dtype == jnp.float32
    ours, flax = linen.FP8MultiHeadAttention(num_heads=4), nn.MultiHeadDotProductAttention(num_heads=4)
    params = flax.init(jax.random.key(1), x, mask=mask)
    want = flax.apply(params, x, mask=mask)
    got = ours.apply(params, x, mask=mask)
    assert bool((got == ours.apply(params, x, mask=mask.astype(bool))).all())
    assert jnp.linalg.norm(got - want) <= 0.1 * jnp.linalg.norm(want)


class MLP(nn.Module):
    """Two layers without names, as people write them, or with the names that Flax gives those of `nn.Dense`."""

    dense: type
    named: bool = False

    @nn.compact
    def __call__(self, x):
        first, second = ({"name": f"Dense_{i}"} if self.named else {} for i in range(2))
        h = nn.silu(self.dense(16, **first)(x))
        return self.dense(8, **second)(h)


def test_a_checkpoint_of_layers_without_names_loads_where_the_names_are_given():
    x, key = jnp.ones((2, 8)), jax.random.key(0)
    plain = MLP(nn.Dense).init(key, x)
    assert sorted(MLP(linen.FP8Dense).init(key, x)["params"]) == ["FP8Dense_0", "FP8Dense_1"]  # Flax's name for the class
    named = MLP(linen.FP8Dense, named=True).init(key, x)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), plain, named))
