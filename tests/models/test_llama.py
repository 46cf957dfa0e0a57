"""The Llama: sizes, equality with plain Flax, what each recipe does to its gradients, and remat."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import coat_jax
from coat_jax import ops, recipes
from coat_jax.models import llama

# Published sizes of the checkpoints of these names.
PARAMETERS = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama-30b": 32_528_943_616,
    "llama3-8b": 8_030_261_248,
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "smollm2-135m": 134_515_008,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "olmo-1b": 1_176_764_416,
    "olmo-7b": 6_888_095_744,
}
TOKENS = jax.random.randint(jax.random.key(3), (2, 17), 0, 256)
SMALL = llama.preset("tiny", layers=2, hidden=32, intermediate=48)


def test_every_preset_has_a_published_size():
    assert {"tiny", *PARAMETERS} == set(llama.presets())


@pytest.mark.parametrize("name", PARAMETERS)
def test_presets_have_the_published_sizes(name):
    model = llama.Llama(llama.preset(name))
    params = jax.eval_shape(lambda key: model.init(key, jnp.zeros((1, 8), jnp.int32)), jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == PARAMETERS[name]


class Plain(nn.Module):
    """The same Llama in nothing but Flax and jax.nn."""

    config: llama.Config

    @nn.compact
    def __call__(self, tokens):
        c = self.config
        x = nn.Embed(c.vocab_size, c.hidden, dtype=c.dtype, name="embed")(tokens)
        layers = nn.scan(PlainLayer, variable_axes={"params": 0}, split_rngs={"params": True}, length=c.layers)
        x, _ = layers(c, name="layers")(x)
        x = nn.RMSNorm(c.norm_eps, dtype=c.dtype, name="norm")(x)
        kernel = nn.Dense(c.vocab_size, use_bias=False, dtype=c.dtype, name="head")
        return kernel(x)


class PlainLayer(nn.Module):
    """One layer of `Plain`."""

    config: llama.Config

    @nn.compact
    def __call__(self, x):
        norm = lambda name: nn.RMSNorm(self.config.norm_eps, dtype=x.dtype, name=name)(x)  # noqa: E731
        x = x + PlainAttention(self.config, name="attention")(norm("attention_norm"))
        return x + PlainMLP(self.config, name="mlp")(norm("mlp_norm")), None


class PlainAttention(nn.Module):
    """Attention of `Plain`."""

    config: llama.Config

    @nn.compact
    def __call__(self, h):
        c = self.config
        widths = {"q": c.heads, "k": c.kv_heads, "v": c.kv_heads}
        q, k, v = (
            nn.Dense(n * c.head_width, use_bias=False, dtype=h.dtype, name=name)(h).reshape(*h.shape[:2], n, c.head_width)
            for name, n in widths.items()
        )
        y = jax.nn.dot_product_attention(ops.rope(q), ops.rope(k), v, is_causal=True).reshape(h.shape)
        return nn.Dense(c.hidden, use_bias=False, dtype=h.dtype, name="o")(y)


class PlainMLP(nn.Module):
    """SwiGLU of `Plain`."""

    config: llama.Config

    @nn.compact
    def __call__(self, h):
        dense = lambda n, name: nn.Dense(n, use_bias=False, dtype=h.dtype, name=name)  # noqa: E731
        gate, up = (dense(self.config.intermediate, name)(h) for name in ("gate", "up"))
        return dense(self.config.hidden, "down")(nn.silu(gate) * up)


@functools.cache
def initial():
    """Parameters of `SMALL`, which have the same names and shapes for every recipe."""
    return jax.jit(llama.Llama(SMALL, recipes.bf16()).init)(jax.random.key(0), TOKENS)["params"]


@functools.cache
def of_recipe(name, remat=None):
    """The loss and the gradients of `SMALL` at `initial()`."""
    return gradients(llama.Llama(SMALL, recipes.named(name), remat=remat), initial())


def gradients(model, params):
    loss = lambda p: model.apply({"params": p}, TOKENS[:, :-1], TOKENS[:, 1:], method=model.loss)  # noqa: E731
    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    return value, jnp.concatenate([leaf.astype(jnp.float32).ravel() for leaf in jax.tree.leaves(grads)])


def test_bf16_is_plain_flax_bit_for_bit():
    model, plain = llama.Llama(SMALL, recipes.bf16()), Plain(SMALL)
    params = jax.jit(model.init)(jax.random.key(0), TOKENS)["params"]
    flax = jax.jit(plain.init)(jax.random.key(0), TOKENS)["params"]
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, flax)
    trunk = jax.jit(lambda p, t: model.apply({"params": p}, t).astype(SMALL.dtype))(params, TOKENS)
    assert bool((trunk == jax.jit(lambda p, t: plain.apply({"params": p}, t))(params, TOKENS)).all())


@pytest.mark.xdist_group("llama")
def test_recipes_share_parameters_and_stay_near_bf16():
    exact = llama.Llama(llama.preset("tiny", layers=2, hidden=32, intermediate=48, dtype=jnp.float32), recipes.bf16())
    value, true = gradients(exact, initial())
    errors = {}
    for name in ("bf16", "coat", "lean", "blocks"):
        loss, grads = of_recipe(name)
        assert loss == pytest.approx(float(value), rel=1e-2)
        errors[name] = float(jnp.linalg.norm(grads - true) / jnp.linalg.norm(true))
    # Every layer adds a forward product's error (2^-4 at worst of each operand) to the stream and a backward one's (2^-4 and
    # 2^-3) to the gradient; errors of two layers of four products each add in squares.
    assert errors["bf16"] <= 8 * 2.0**-8
    assert max(errors["coat"], errors["lean"], errors["blocks"]) <= (8 * (2 * 2.0**-8 + 2.0**-8 + 2.0**-6)) ** 0.5


@pytest.mark.xdist_group("llama")
def test_remat_of_a_layer_keeps_its_input_and_the_policy_changes_no_bit():
    value, grads = of_recipe("lean")
    again, kept = of_recipe("lean", coat_jax.remat_policy)
    assert bool((kept == grads).all())
    assert again == value
    assert bool((of_recipe("bf16", "layer")[1] == of_recipe("bf16")[1]).all())  # bf16() keeps the input exactly
    loss, redone = of_recipe("lean", "layer")
    assert loss == value
    assert jnp.linalg.norm(redone - grads) <= 0.3 * jnp.linalg.norm(grads)  # two FP8 programs, their inputs 2^-4 apart


def test_olmo_has_no_norm_parameters_and_ties_its_head():
    model = llama.Llama(llama.preset("olmo-1b", layers=2, hidden=32, intermediate=48, heads=2, kv_heads=2, vocab_size=256))
    params = jax.jit(model.init)(jax.random.key(0), TOKENS)["params"]
    assert sorted(params) == ["embed", "layers"]
    assert sorted(params["layers"]) == ["attention", "mlp"]
    _, grads = gradients(model, params)
    assert bool(jnp.isfinite(grads).all())


def test_bad_values_are_refused_by_name():
    with pytest.raises(ValueError, match="preset='llama' is unknown; use one of tiny, llama2-7b"):
        llama.preset("llama")
    with pytest.raises(ValueError, match="heads=4 is not a multiple of kv_heads=3"):
        llama.preset("tiny", kv_heads=3)
    with pytest.raises(ValueError, match="head_dim=7; each head needs an even width"):
        llama.preset("tiny", head_dim=7)
    with pytest.raises(ValueError, match="remat='stash'; use None, 'layer' or a jax.checkpoint policy"):
        llama.Llama(SMALL, remat="stash").init(jax.random.key(0), TOKENS)
    with pytest.raises(ValueError, match="norm='batch' is unknown; use 'rms' or 'layer'"):
        llama.Llama(llama.preset("tiny", norm="batch")).init(jax.random.key(0), TOKENS)


def test_padding_of_weight_zero_changes_neither_loss_nor_gradients():
    """float32, so that only the order of sums differs: 2^-24 of each of some hundred terms."""
    config = llama.preset("tiny", layers=1, hidden=32, intermediate=48, dtype=jnp.float32)
    model = llama.Llama(config, recipes.bf16())
    tokens, targets = TOKENS[:, :6], TOKENS[:, 1:7]
    params = model.init(jax.random.key(0), tokens)["params"]
    padded = [jnp.pad(x, ((0, 0), (0, 3)), constant_values=7) for x in (tokens, targets)]
    weights = jnp.pad(jnp.ones(tokens.shape), ((0, 0), (0, 3)))

    def loss(params, *args):
        return model.apply({"params": params}, *args, method=model.loss)

    want, got = (jax.jit(jax.value_and_grad(loss))(params, *args) for args in ((tokens, targets), (*padded, weights)))
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=100 * 2.0**-24 * float(jnp.abs(a).max()))


def test_embeddings_stand_for_tokens():
    model = llama.Llama(SMALL, recipes.coat())
    params = jax.jit(model.init)(jax.random.key(0), TOKENS)["params"]
    rows = params["embed"]["embedding"][TOKENS].astype(SMALL.dtype)
    by_tokens, by_rows = (model.apply({"params": params}, x) for x in (TOKENS, rows))
    assert bool((by_tokens == by_rows).all())
    with pytest.raises(ValueError, match=r"embeddings of shape .*; use \(batch, tokens, "):
        model.apply({"params": params}, rows[..., :-1])
