"""NNX modules: with the weights of the Linen ones the same bits, with the arguments of Flax's the same parameters."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax.nnx.traversals import flatten_mapping

import coat_jax
import coat_jax.nnx as fp8
from coat_jax import linen as fp8_linen
from coat_jax import recipes
from coat_jax.optim import coat_adamw

X = jax.random.normal(jax.random.key(0), (2, 16, 64))
RNGS = functools.partial(nnx.Rngs, 0)
CASES = {
    "linear": (fp8_linen.FP8Dense(96), lambda **o: fp8.FP8Linear(64, 96, **o)),
    "linear without bias": (fp8_linen.FP8Dense(96, use_bias=False), lambda **o: fp8.FP8Linear(64, 96, use_bias=False, **o)),
    "general": (fp8_linen.FP8DenseGeneral((4, 8)), lambda **o: fp8.FP8LinearGeneral(64, (4, 8), **o)),
    "general with batch": (
        fp8_linen.FP8DenseGeneral(24, axis=1, batch_dims=(0,)),
        lambda **o: fp8.FP8LinearGeneral(16, 24, axis=1, batch_axis={0: 2}, **o),
    ),
    "einsum": (fp8_linen.FP8DenseGeneral((4, 8)), lambda **o: fp8.FP8Einsum("btd,dnh->btnh", (64, 4, 8), (4, 8), **o)),
    "rms norm": (fp8_linen.FP8RMSNorm(), lambda **o: fp8.FP8RMSNorm(64, **o)),
    "layer norm": (fp8_linen.FP8LayerNorm(), lambda **o: fp8.FP8LayerNorm(64, **o)),
    "attention": (fp8_linen.FP8MultiHeadAttention(4), lambda **o: fp8.FP8MultiHeadAttention(4, 64, decode=False, **o)),
    "attention with norms": (
        fp8_linen.FP8MultiHeadAttention(4, normalize_qk=True),
        lambda **o: fp8.FP8MultiHeadAttention(4, 64, normalize_qk=True, decode=False, **o),
    ),
    "swiglu": (fp8_linen.FP8SwiGLU(128), lambda **o: fp8.FP8SwiGLU(64, 128, **o)),
    "self attention": (fp8_linen.FP8SelfAttention(4, 2), lambda **o: fp8.FP8SelfAttention(64, 4, 2, **o)),
    "self attention of Qwen3": (
        fp8_linen.FP8SelfAttention(4, 2, head_dim=32, qkv_bias=True, o_bias=True, qk_norm=True),
        lambda **o: fp8.FP8SelfAttention(64, 4, 2, head_dim=32, qkv_bias=True, o_bias=True, qk_norm=True, **o),
    ),
    "block": (fp8_linen.FP8TransformerBlock(4, 2, 128), lambda **o: fp8.FP8TransformerBlock(64, 4, 2, 128, **o)),
    "block of OLMo": (
        fp8_linen.FP8TransformerBlock(4, 4, 128, norm="layer"),
        lambda **o: fp8.FP8TransformerBlock(64, 4, 4, 128, norm="layer", **o),
    ),
    "mlp": (fp8_linen.FP8MLP(128), lambda **o: fp8.FP8MLP(64, 128, **o)),
}


def with_weights(module, params):
    """A function (params, x) that runs an NNX module with the parameters of a Linen one."""
    graph, state = nnx.split(module)
    flat, given = dict(nnx.to_flat_state(state)), flatten_mapping(params)
    assert {p: v.shape for p, v in flat.items()} == {p: v.shape for p, v in given.items()}

    def run(params, x):
        leaves = flatten_mapping(params)
        return nnx.merge(graph, nnx.from_flat_state([(path, var.replace(leaves[path])) for path, var in flat.items()]))(x)

    return run


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("recipe", [recipes.coat(), recipes.lean(), recipes.bf16()], ids=["coat", "lean", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_with_one_set_of_weights_linen_and_nnx_give_the_same_bits(name, recipe, dtype):
    if name.startswith("attention") and recipe == recipes.bf16():
        pytest.skip("Flax's own attentions, which round in other places")
    ours, make = CASES[name]
    ours, module = ours.clone(recipe=recipe), make(recipe=recipe, rngs=RNGS())
    x = X.astype(dtype)
    params = ours.init(jax.random.key(1), x)["params"]
    params = jax.tree.map(lambda p: (p + 0.1 * jnp.arange(p.size).reshape(p.shape) / p.size).astype(dtype), params)

    def outcome(run):
        def call(params, x):
            y, pull = jax.vjp(run, params, x)
            return y, pull(jnp.sin(y))

        return jax.jit(call)(params, x)

    wanted = outcome(lambda params, x: ours.apply({"params": params}, x))
    got = outcome(with_weights(module, params))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        assert bool((a == b).all()), float(jnp.max(jnp.abs(a - b)))


NAMESAKES = [
    (fp8.FP8Linear, nnx.Linear, (64, 96)),
    (fp8.FP8LinearGeneral, nnx.LinearGeneral, ((8, 8), (4, 24))),
    (fp8.FP8Einsum, nnx.Einsum, ("bd,dnh->bnh", (64, 4, 8), (4, 8))),
    (fp8.FP8Embed, nnx.Embed, (100, 64)),
    (fp8.FP8RMSNorm, nnx.RMSNorm, (64,)),
    (fp8.FP8LayerNorm, nnx.LayerNorm, (64,)),
    (fp8.FP8MultiHeadAttention, nnx.MultiHeadAttention, (4, 64)),
]


@pytest.mark.parametrize(("ours", "theirs", "args"), NAMESAKES)
def test_parameters_are_those_of_the_namesake(ours, theirs, args):
    """Names, shapes, dtypes, initial values and metadata."""
    options = {"param_dtype": jnp.bfloat16, "rngs": RNGS()}
    names = ("kernel", "scale", "embedding")
    taken = [n for n in names if f"{n}_metadata" in theirs.__init__.__annotations__]
    options |= {f"{n}_metadata": {"mine": 3} for n in taken}
    axis = {"axis": (-2, -1)} if theirs is nnx.LinearGeneral else {}
    states = [nnx.state(make(*args, **axis, **{**options, "rngs": RNGS()})) for make in (ours, theirs)]
    flat = [dict(nnx.to_flat_state(state)) for state in states]
    assert flat[0].keys() == flat[1].keys() and flat[0]
    for path, var in flat[1].items():
        mine = flat[0][path]
        assert type(mine) is type(var) and mine.get_metadata() == var.get_metadata()
        assert mine.dtype == var.dtype and bool((mine[...] == var[...]).all())


@pytest.mark.parametrize(("ours", "theirs", "args"), NAMESAKES)
def test_nothing_quantized_is_the_namesake_itself(ours, theirs, args):
    x = jnp.arange(20).reshape(2, 10) if theirs is nnx.Embed else X.reshape(2, 16, 8, 8) if theirs is nnx.LinearGeneral else X
    x = X[0] if theirs is nnx.Einsum else x
    axis = {"axis": (-2, -1)} if theirs is nnx.LinearGeneral else {"decode": False} if "Attention" in theirs.__name__ else {}
    a, b = (make(*args, rngs=RNGS(), **axis, **more)(x) for make, more in ((ours, {"recipe": recipes.bf16()}), (theirs, {})))
    assert bool((a == b).all())


def test_embedding_rows_and_their_gradients_are_those_of_flax():
    tokens = jnp.array([[1, 2, 1], [0, 99, 1]])
    grads = []
    for make in (fp8.FP8Embed, nnx.Embed):
        module = make(100, 8, rngs=RNGS())
        y, grad = nnx.value_and_grad(lambda m: jnp.sum(jnp.sin(m(tokens))))(module)
        grads.append((y, grad["embedding"][...]))
    for a, b in zip(*grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_byte_per_element_of_the_input_is_kept():
    layer = fp8.FP8Linear(64, 96, param_dtype=jnp.bfloat16, rngs=RNGS())
    x = X.astype(jnp.bfloat16)
    _, pull = jax.vjp(lambda x: layer(x), x)
    kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.shape != layer.kernel.shape]
    assert x.size <= sum(leaf.nbytes for leaf in kept) <= x.size + 8


class Model(nnx.Module):
    """A block of one's own: norm, attention, SwiGLU."""

    def __init__(self, rngs, recipe):
        self.norm = fp8.FP8RMSNorm(64, recipe=recipe, rngs=rngs)
        self.attention = fp8.FP8MultiHeadAttention(4, 64, decode=False, recipe=recipe, rngs=rngs)
        self.mlp = fp8.FP8SwiGLU(64, 128, recipe=recipe, rngs=rngs)
        self.head = fp8.FP8Linear(64, 32, recipe=recipe, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x), is_causal=True)
        return self.head(x + self.mlp(x))


@pytest.mark.parametrize("name", ["coat", "lean", "blocks"])
def test_a_model_trains_in_one_trace(name):
    traces = []
    model = Model(RNGS(), recipes.named(name))
    optimizer = nnx.Optimizer(model, coat_adamw(3e-3), wrt=nnx.Param)
    y = jax.random.normal(jax.random.key(1), (2, 16, 32))

    @nnx.jit
    def step(model, optimizer):
        traces.append(0)
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(X) - y) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(12)]
    assert losses[-1] < 0.7 * losses[0] and len(traces) == 1


def test_modules_of_one_recipe_made_twice_share_a_program():
    traces = []

    @nnx.jit
    def run(model, x):
        traces.append(0)
        return model(x)

    for _ in range(2):
        run(Model(RNGS(), recipes.coat()), X)
    assert len(traces) == 1


@pytest.mark.parametrize("spec", [("fsdp", None), (None, "tensor"), ("fsdp", "tensor")])
def test_on_explicit_axes_results_and_gradients_are_those_of_one_device(spec):
    alone = fp8.FP8Linear(64, 96, use_bias=False, rngs=RNGS())
    wanted = jax.jit(jax.value_and_grad(lambda w, x: loss_of(alone, w, x)))(alone.kernel[...], X)
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"))
    with jax.set_mesh(mesh):
        layer = fp8.FP8Linear(64, 96, use_bias=False, kernel_metadata={"out_sharding": spec}, rngs=RNGS())
        x = jax.device_put(X.reshape(8, 4, 64), jax.NamedSharding(mesh, jax.P("fsdp")))
        got = jax.jit(jax.value_and_grad(lambda w, x: loss_of(layer, w, x)))(layer.kernel[...], x)
        assert jax.typeof(got[1]) == jax.typeof(layer.kernel[...])
        assert jax.typeof(layer(x, out_sharding=jax.P("fsdp", None, "tensor"))).sharding.spec == jax.P("fsdp", None, "tensor")
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-5)
    assert np.linalg.norm(np.asarray(got[1]) - wanted[1]) <= 0.05 * np.linalg.norm(wanted[1])  # a rounding to FP8 may flip


def loss_of(layer, kernel, x):
    graph, _ = nnx.split(layer)
    return jnp.sum(jnp.sin(nnx.merge(graph, nnx.State({"kernel": nnx.Param(kernel)}))(x)))


REFUSED = [
    (lambda: fp8.FP8Linear(4, 4, recipe="coat", rngs=RNGS()), TypeError, "FP8Linear: recipe='coat' is not a Recipe"),
    (lambda: fp8.FP8SwiGLU(4, 4, recipe=1, rngs=RNGS()), TypeError, "FP8SwiGLU: recipe=1 is not a Recipe"),
    (
        lambda: fp8.FP8Linear(4, 4, dot_general=coat_jax.dot_general(recipes.lean()), rngs=RNGS())(jnp.ones((1, 4))),
        ValueError,
        "FP8Linear: dot_general=",
    ),
    (lambda: fp8.FP8Einsum("ab,bc->ac", (4, 4), einsum_op=jnp.einsum, rngs=RNGS()), TypeError, "FP8Einsum: einsum_op="),
    (lambda: fp8.FP8RMSNorm(4, axis_name="b", rngs=RNGS())(jnp.ones((1, 4))), ValueError, "axis_name='b' has no FP8 form"),
    (lambda: fp8.FP8LayerNorm(4, rngs=RNGS())(jnp.ones((1, 4)), mask=jnp.ones((1, 4))), ValueError, "mask="),
    (
        lambda: fp8.FP8MultiHeadAttention(2, 4, dropout_rate=0.5, deterministic=False, rngs=RNGS())(jnp.ones((1, 2, 4))),
        ValueError,
        "dropout_rate=0.5 has no FP8 form",
    ),
    (
        lambda: fp8.FP8MultiHeadAttention(2, 4, decode=True, rngs=RNGS())(jnp.ones((1, 2, 4))),
        ValueError,
        "decode=True has no FP8 form",
    ),
    (lambda: fp8.FP8MultiHeadAttention(2, 4, rngs=RNGS())(X, inputs_v=X), ValueError, "inputs_v without inputs_k"),
]


@pytest.mark.parametrize(("call", "error", "says"), REFUSED)
def test_what_has_no_fp8_form_is_refused(call, error, says):
    with pytest.raises(error, match=re.escape(says)):
        call()


def test_masks_as_flax_makes_them():
    layer = fp8.FP8MultiHeadAttention(4, 64, decode=False, rngs=RNGS())
    mask = linen.make_causal_mask(jnp.ones((2, 16)))
    np.testing.assert_allclose(layer(X, mask=mask), layer(X, is_causal=True), rtol=2e-2, atol=2e-2)
