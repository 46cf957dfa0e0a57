"""Self-attention with heads of a width of their own, biases and norms of the heads, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops, recipes
from coat_jax.linen import FP8SelfAttention, FP8TransformerBlock

X = jax.random.normal(jax.random.key(0), (2, 6, 32))
SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 16, "qkv_bias": True, "o_bias": True, "qk_norm": True}


def parameters(module, x=X):
    """Of a module, every one of them a random number, so that a bias or a scale left out would show."""
    params = module.init(jax.random.key(1), x)["params"]
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    return jax.tree.unflatten(tree, [x + 0.1 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)])


def oracle(params, x, module):
    """The equation, head by head."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x, d = np.asarray(x, np.float64), module.head_dim
    heads = {name: (x @ p[name]["kernel"] + p[name]["bias"]).reshape(*x.shape[:2], -1, d) for name in ("q", "k", "v")}
    for name in ("q", "k"):
        y = heads[name]
        y = y / np.sqrt(np.mean(y**2, -1, keepdims=True) + module.norm_eps) * p[f"{name}_norm"]["scale"]
        angle = np.arange(x.shape[1])[:, None] * module.rope_theta ** (-np.arange(0, d, 2) / d)
        pairs = (y[..., : d // 2] + 1j * y[..., d // 2 :]) * np.exp(1j * angle)[:, None, :]
        heads[name] = np.concatenate([pairs.real, pairs.imag], -1)
    out = np.zeros((*x.shape[:2], module.heads, d))
    for h in range(module.heads):
        q, k, v = heads["q"][:, :, h], *(heads[n][:, :, h // (module.heads // module.kv_heads)] for n in ("k", "v"))
        scores = np.where(np.tri(x.shape[1]), q @ k.swapaxes(1, 2) / np.sqrt(d), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, :, h] = weights / weights.sum(-1, keepdims=True) @ v
    return out.reshape(*x.shape[:2], -1) @ p["o"]["kernel"] + p["o"]["bias"]


def test_attention_is_the_equation_in_float32():
    module = FP8SelfAttention(**SIZES, recipe=recipes.bf16())
    params = parameters(module)
    assert jax.tree.map(jnp.shape, params) == {
        **{name: {"kernel": (32, n), "bias": (n,)} for name, n in (("q", 64), ("k", 32), ("v", 32))},
        "o": {"kernel": (64, 32), "bias": (32,)},
        **{name: {"scale": (16,)} for name in ("q_norm", "k_norm")},
    }
    # Sums of 64 terms, each rounded to 2^-24, through five products and norms of numbers of size 1: some 300 roundings.
    np.testing.assert_allclose(module.apply({"params": params}, X), oracle(params, X, module), rtol=0, atol=300 * 2.0**-24)


@pytest.mark.parametrize("name", ["coat", "lean", "blocks"])
def test_gradients_of_biases_and_norms_are_near_the_exact_ones(name):
    """One rounding to E4M3 of what is kept, 2^-4, one of each operand of two products backward, E5M2 at worst, 2^-3."""
    exact = FP8TransformerBlock(**SIZES, intermediate=48, recipe=recipes.bf16())
    params, g = parameters(exact), jax.random.normal(jax.random.key(3), X.shape)

    def gradients(recipe):
        def loss(params):
            return jnp.sum(g * exact.clone(recipe=recipe).apply({"params": params}, X))

        return jax.jit(jax.grad(loss))(params)["attention"]

    want, got = gradients(recipes.bf16()), gradients(recipes.named(name))
    for path, leaf in jax.tree.leaves_with_path(want):
        near = got
        for key in path:
            near = near[key.key]
        distance = float(jnp.linalg.norm(near - leaf) / jnp.linalg.norm(leaf))
        # k's bias adds q·b to every score of a row, which softmax does not see but for the rotation and the norm: its gradient
        # is a small difference of large numbers.
        assert 0 < distance < (1.0 if path[0].key == "k" else 0.3), jax.tree_util.keystr(path)


@pytest.mark.parametrize("name", ["coat", "lean"])
def test_norms_of_heads_keep_q_and_k_once_in_fp8(name):
    """coat keeps FP8 of what the norms read, and q and k in their dtype, as without norms; lean keeps FP8 of q, k and v."""

    def bytes_kept(qk_norm):
        module = FP8SelfAttention(**SIZES | {"qk_norm": qk_norm}, recipe=recipes.named(name))
        params, x = parameters(module), X.astype(jnp.bfloat16)
        _, pull = jax.vjp(lambda x: module.apply({"params": params}, x), x)
        return sum(leaf.size for leaf in jax.tree.leaves(pull) if leaf.dtype == jnp.uint8)

    heads = X.shape[0] * X.shape[1] * 16
    assert bytes_kept(True) - bytes_kept(False) == (heads * (4 + 2) if name == "coat" else 0)


def test_only_kernels_have_codes():
    block = FP8TransformerBlock(**SIZES, intermediate=48)
    codes = ops.blocks.block_codes(parameters(block), recipes.coat())
    assert codes["attention"]["q"]["kernel"] is not None
    assert codes["attention"]["q"]["bias"] is None
    assert codes["attention"]["q_norm"] == {"scale": None}


def test_a_head_dim_frees_the_width_of_the_heads():
    with pytest.raises(ValueError, match="32 features over heads=5; the second must divide the first"):
        FP8SelfAttention(5, 5).init(jax.random.key(0), X)
    params = FP8SelfAttention(5, 5, head_dim=8).init(jax.random.key(0), X)["params"]
    assert params["q"]["kernel"].shape == (32, 40)
