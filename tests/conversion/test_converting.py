"""Models of somebody else, converted: their parameters, the bits of the same model in FP8 modules, and what is kept."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import coat_jax
import coat_jax.nnx as fp8
from coat_jax import recipes
from coat_jax.conversion import KEEP, SwiGLU
from coat_jax.optim import coat_adamw

RECIPE = recipes.lean()
X = jax.random.normal(jax.random.key(0), (2, 16, 64)).astype(jnp.bfloat16)


class LlamaMLP(nn.Module):
    """As people write it: three layers and a product."""

    @nn.compact
    def __call__(self, x):
        layer = lambda n, name: nn.Dense(n, use_bias=False, dtype=x.dtype, name=name)  # noqa: E731
        return layer(64, "down_proj")(nn.silu(layer(128, "gate_proj")(x)) * layer(128, "up_proj")(x))


class GPTBlock(nn.Module):
    """LayerNorm, attention, GELU; layers are attributes."""

    dense: type = nn.Dense
    norm: type = nn.LayerNorm
    attention: type = nn.MultiHeadDotProductAttention
    more: tuple = ()

    def setup(self):
        more = {"dtype": jnp.bfloat16, **dict(self.more)}
        self.norm_1, self.norm_2 = self.norm(**more), self.norm(**more)
        self.mix = self.attention(4, **more)
        self.up, self.down = self.dense(128, **more), self.dense(64, **more)

    def __call__(self, x):
        x = x + self.mix(self.norm_1(x))
        return x + self.down(nn.gelu(self.up(self.norm_2(x))))


class Patches(nn.Module):
    """A vision Transformer's first layers: patches by DenseGeneral over two axes."""

    @nn.compact
    def __call__(self, images):
        x = nn.DenseGeneral(64, axis=(-2, -1), dtype=jnp.bfloat16, name="patches")(images)
        return nn.Dense(10, dtype=jnp.bfloat16, name="head")(
            LlamaMLP(name="mlp")(nn.RMSNorm(dtype=jnp.bfloat16, name="norm")(x))
        )


def gradients(model, params, x):
    return jax.jit(jax.value_and_grad(lambda p: jnp.sum(jnp.sin(model.apply({"params": p}, x).astype(jnp.float32)))))(params)


def same_bits(a, b):
    assert all(bool((p == q).all()) for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_a_linen_model_keeps_its_parameters_and_computes_as_if_written_with_fp8_modules():
    plain = GPTBlock()
    converted, report = coat_jax.convert(plain, recipe=RECIPE, inputs=(X,))
    params = plain.init(jax.random.key(1), X)["params"]
    same_bits(params, converted.init(jax.random.key(1), X)["params"])
    ours = GPTBlock(coat_jax.FP8Dense, coat_jax.FP8LayerNorm, coat_jax.FP8MultiHeadAttention, more=(("recipe", RECIPE),))
    same_bits(gradients(converted, params, X), gradients(ours, params, X))
    assert report.swapped == ("norm_1", "mix", "norm_2", "up", "down")
    assert report.kept_after < 0.6 * report.kept_before


def test_a_converted_model_is_quantized_again_at_every_call():
    """Modules that setup makes are one object in all calls; each call has its rule."""
    plain = GPTBlock()
    params = plain.init(jax.random.key(1), X)["params"]
    converted, _ = coat_jax.convert(plain, recipe=RECIPE, inputs=(X,))
    for model, quantized in ((plain, False), (converted, True), (plain, False), (converted, True)):
        assert ("f8_e4m3" in str(jax.make_jaxpr(lambda p, m=model: m.apply({"params": p}, X))(params))) == quantized


def test_rules_choose_by_path_and_the_first_that_fits_decides():
    images = jax.random.normal(jax.random.key(2), (2, 9, 8, 8)).astype(jnp.bfloat16)
    rules = {"head": KEEP, "patches": recipes.coat(), "mlp": SwiGLU()}
    converted, report = coat_jax.convert(Patches(), rules, recipe=RECIPE, inputs=(images,))
    assert {swap.path: swap.became for swap in report.swaps} == {
        "patches": "FP8DenseGeneral",
        "norm": "FP8RMSNorm",
        "mlp": "FP8SwiGLU",
        "head": None,
    }
    assert 'head     Dense         left: rule "keep"' in repr(report)
    params = Patches().init(jax.random.key(3), images)["params"]
    value, grads = gradients(converted, params, images)
    plain_value, plain = gradients(Patches(), params, images)
    assert abs(value - plain_value) < 0.1 * abs(plain_value) + 1
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(plain), strict=True):
        assert jnp.linalg.norm((a - b).astype(jnp.float32)) < 0.3 * jnp.linalg.norm(b.astype(jnp.float32))  # three roundings


class NNXMLP(nnx.Module):
    """As people write it in NNX."""

    def __init__(self, rngs):
        options = {"use_bias": False, "rngs": rngs, "dtype": jnp.bfloat16}
        self.gate_proj, self.up_proj = nnx.Linear(64, 128, **options), nnx.Linear(64, 128, **options)
        self.down_proj = nnx.Linear(128, 64, **options)

    def __call__(self, x):
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class NNXBlock(nnx.Module):
    """Norm, attention, SwiGLU, a head."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(64, rngs=rngs, dtype=jnp.bfloat16)
        self.mix = nnx.MultiHeadAttention(4, 64, decode=False, rngs=rngs, dtype=jnp.bfloat16)
        self.mlp = NNXMLP(rngs)
        self.twice = nnx.List([self.mlp, nnx.Einsum("btd,df->btf", (64, 64), rngs=rngs, dtype=jnp.bfloat16)])
        self.head = nnx.Linear(64, 8, rngs=rngs, dtype=jnp.bfloat16)

    def __call__(self, x):
        x = x + self.mix(self.norm(x))
        return self.head(self.twice[1](x + self.twice[0](self.mlp(x))))


def test_an_nnx_model_is_copied_and_its_layers_have_another_class():
    model = NNXBlock(nnx.Rngs(0))
    converted, report = coat_jax.convert(model, {"head": KEEP, "mlp": SwiGLU()}, recipe=RECIPE, inputs=(X,))
    assert report.swapped == ("mix", "mlp", "norm", "twice/1")
    assert type(model.mix) is nnx.MultiHeadAttention and type(converted.mix) is fp8.FP8MultiHeadAttention
    assert converted.mlp is converted.twice[0] and isinstance(converted.mlp, NNXMLP)  # a layer that is used twice is one
    flat = [dict(nnx.to_flat_state(nnx.state(m, nnx.Param))) for m in (model, converted)]
    assert flat[0].keys() == flat[1].keys()
    same_bits(*([v[...] for v in f.values()] for f in flat))
    ours = fp8.FP8SwiGLU(64, 128, recipe=RECIPE, rngs=nnx.Rngs(0))
    ours.gate, ours.up, ours.down = model.mlp.gate_proj, model.mlp.up_proj, model.mlp.down_proj
    same_bits(converted.mlp(X), ours(X))
    assert report.kept_after < 0.5 * report.kept_before


def test_a_converted_nnx_model_trains_in_one_trace():
    traces = []
    model, _ = coat_jax.convert(NNXBlock(nnx.Rngs(0)), {"mlp": SwiGLU()}, recipe=RECIPE)
    optimizer = nnx.Optimizer(model, coat_adamw(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        traces.append(0)
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(X) - 1.0).astype(jnp.float32) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(8)]
    assert losses[-1] < 0.5 * losses[0] and len(traces) == 1


def test_what_cannot_be_swapped_is_left_and_said():
    class Own(nn.Dense):
        """A class of somebody's own, with a call of its own."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = Own(64, name="own")(x)
            x = nn.Dense(64, dot_general=jax.lax.dot_general, name="hooked")(x)
            return nn.MultiHeadDotProductAttention(4, dropout_rate=0.1, deterministic=True, name="dropping")(x)

    _, report = coat_jax.convert(Model(), recipe=RECIPE, inputs=(X,))
    left = {swap.path: swap.why for swap in report.swaps if swap.became is None}
    assert set(left) == {"own", "hooked", "dropping"}
    assert "coat_jax.dot_general" in left["own"] and "dot_general of its own" in left["hooked"]
    assert "dropout_rate=0.1" in left["dropping"]
    assert report.swapped == tuple(f"dropping/{name}" for name in ("query", "key", "value", "out"))


REFUSED = [
    (lambda: coat_jax.convert(jnp.sin, recipe=RECIPE), TypeError, "model is a"),
    (lambda: coat_jax.convert(GPTBlock(), recipe="lean", inputs=(X,)), TypeError, "recipe='lean' is not a Recipe"),
    (lambda: coat_jax.convert(GPTBlock(), recipe=RECIPE), TypeError, "inputs=None; a Linen model has no layers"),
    (lambda: coat_jax.convert(GPTBlock(), {"up": "no"}, recipe=RECIPE, inputs=(X,)), TypeError, "rules['up']='no'; use 'keep'"),
    (lambda: coat_jax.convert(GPTBlock(), ["up"], recipe=RECIPE, inputs=(X,)), TypeError, "use a dictionary of path patterns"),
    (
        lambda: coat_jax.convert(GPTBlock(), {"top": KEEP}, recipe=RECIPE, inputs=(X,)),
        ValueError,
        "'top', which fits no",
    ),
    (
        lambda: coat_jax.convert(Patches(), {"norm": SwiGLU()}, recipe=RECIPE, inputs=(jnp.ones((1, 9, 8, 8)),)),
        ValueError,
        "norm has no layer 'gate_proj' with a kernel alone",
    ),
]


@pytest.mark.parametrize(("call", "error", "says"), REFUSED)
def test_bad_input_is_refused_in_one_line(call, error, says):
    with pytest.raises(error, match=re.escape(says)):
        call()
