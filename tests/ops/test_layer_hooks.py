"""`coat_jax.dot_general` and `coat_jax.einsum` against JAX's own on the operands that they round, and in layers of Flax."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import coat_jax
from coat_jax import FP8Dense, dequantize, quantize, recipes
from coat_jax.optim import coat_adamw

HOOK = coat_jax.dot_general(recipes.coat())


def rounded(x, spec, batch=()):
    """q(x) in x's dtype; for each index of the axes `batch` by itself."""
    x = jnp.moveaxis(x, batch, range(len(batch)))
    call = lambda x: dequantize(quantize(x, spec)).astype(x.dtype)  # noqa: E731
    for _ in batch:
        call = jax.vmap(call)
    return jnp.moveaxis(call(x), range(len(batch)), batch)


def outcome(product, lhs, rhs, g):
    """Y and both gradients."""
    y, pull = jax.vjp(product, lhs, rhs)
    return y, *pull(g)


def expected(product, lhs, rhs, g, batch=((), ()), recipe=None):
    """Y and both gradients of `product` as the recipe defines them: everything rounded first, then JAX's own product."""
    recipe = recipe or recipes.coat()
    operands = rounded(lhs, recipe.linear_input, batch[0]), rounded(rhs, recipe.weight, batch[1])
    return outcome(product, *operands, rounded(g, recipe.gradient, tuple(range(len(batch[0])))))


def assert_close(got, wanted):
    """Up to the order of sums of products of FP8 in float32: n terms are off by about sqrt(n) 2^-24, far below."""
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.max(jnp.abs(b), initial=0)))


@st.composite
def contractions(draw):
    """Shapes and dimension numbers of any order: up to two batch axes, two contracted ones, two rows, two features."""
    sizes = {kind: draw(st.lists(st.integers(1, 5), max_size=2)) for kind in ("batch", "inner", "rows", "features")}
    axes = [
        [(kind, i) for kind in kinds for i in range(len(sizes[kind]))]
        for kinds in (("batch", "inner", "rows"), ("batch", "inner", "features"))
    ]
    left, right = (draw(st.permutations(a)) for a in axes)
    numbers = tuple(
        tuple(tuple(side.index((kind, i)) for i in range(len(sizes[kind]))) for side in (left, right))
        for kind in ("inner", "batch")
    )
    return *(tuple(sizes[kind][i] for kind, i in side) for side in (left, right)), numbers


@settings(max_examples=10, deadline=None)
@given(contractions())
def test_any_order_of_axes_gives_the_product_of_what_is_rounded(case):
    left, right, numbers = case
    lhs, rhs = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate((left, right)))
    plain = functools.partial(jax.lax.dot_general, dimension_numbers=numbers, precision="highest")
    g = jnp.arange(1.0, 1 + math.prod((y := jax.eval_shape(plain, lhs, rhs)).shape)).reshape(y.shape)
    got = jax.jit(functools.partial(outcome, functools.partial(HOOK, dimension_numbers=numbers)))(lhs, rhs, g)
    assert_close(got, jax.jit(functools.partial(expected, plain, batch=numbers[1]))(lhs, rhs, g))


@pytest.mark.parametrize(
    ("subscripts", "left", "right"),
    [
        ("btd,dnh->btnh", (2, 3, 8), (8, 4, 5)),
        ("btnh,nhd->btd", (2, 3, 4, 5), (4, 5, 8)),
        ("...d,df->...f", (2, 3, 8), (8, 6)),
        ("...d,df", (3, 8), (8, 6)),
        ("btd,dnh->bnth", (2, 3, 8), (8, 4, 5)),
        ("ij,jk->ki", (3, 8), (8, 6)),
        ("df,bd->bf", (8, 6), (3, 8)),
        ("i,j->ij", (3,), (4,)),
        ("bd, d -> b", (3, 8), (8,)),
    ],
)
def test_einsum_is_the_einsum_of_what_is_rounded(subscripts, left, right):
    lhs, rhs = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate((left, right)))
    plain = functools.partial(jnp.einsum, subscripts, precision="highest")
    g = jax.random.normal(jax.random.key(2), jax.eval_shape(plain, lhs, rhs).shape)
    got = jax.jit(functools.partial(outcome, functools.partial(coat_jax.einsum(recipes.coat()), subscripts)))(lhs, rhs, g)
    assert_close(got, jax.jit(functools.partial(expected, plain))(lhs, rhs, g))


def test_einsum_sums_before_what_only_one_operand_has():
    lhs, rhs = jax.random.normal(jax.random.key(0), (3, 5)), jax.random.normal(jax.random.key(1), (5, 4, 2))
    y = coat_jax.einsum(recipes.coat())("ij,jkl->ik", lhs, rhs)
    assert_close([y], [coat_jax.einsum(recipes.coat())("ij,jk->ik", lhs, rhs.sum(-1))])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ["coat", "lean", "blocks"])
def test_layers_of_flax_with_the_hook_are_fp8dense_bit_for_bit(name, dtype):
    recipe = recipes.named(name)
    x = jax.random.normal(jax.random.key(0), (4, 256), dtype)
    ours = FP8Dense(128, recipe=recipe, param_dtype=dtype, dtype=dtype)
    params = ours.init(jax.random.key(1), x)
    theirs = nn.Dense(128, param_dtype=dtype, dtype=dtype, dot_general=coat_jax.dot_general(recipe))
    general = nn.DenseGeneral(128, param_dtype=dtype, dtype=dtype, dot_general=coat_jax.dot_general(recipe))
    linear, einsum = (
        make(param_dtype=dtype, dtype=dtype, rngs=nnx.Rngs(0))
        for make in (
            functools.partial(nnx.Linear, 256, 128, dot_general=coat_jax.dot_general(recipe)),
            functools.partial(nnx.Einsum, "bd,df->bf", (256, 128), (128,), einsum_op=coat_jax.einsum(recipe)),
        )
    )

    def of_nnx(module):
        graph, _ = nnx.split(module)
        return lambda p, x: nnx.merge(graph, nnx.State(jax.tree.map(nnx.Param, dict(p["params"]))))(x)

    def gradients(apply):
        return jax.jit(jax.value_and_grad(lambda p, x: jnp.sum(jnp.sin(apply(p, x).astype(jnp.float32))), (0, 1)))(params, x)

    wanted = gradients(ours.apply)
    for apply in (theirs.apply, general.apply, of_nnx(linear), of_nnx(einsum)):
        got = gradients(apply)
        assert all(bool((a == b).all()) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True))


def test_nothing_quantized_is_jax_itself():
    lhs, rhs, numbers = jnp.ones((3, 4)), jnp.arange(8.0).reshape(4, 2), (((1,), (0,)), ((), ()))
    for recipe, quantized in ((recipes.bf16(), False), (recipes.coat(), True)):
        jaxpr = str(jax.make_jaxpr(lambda a, b, r=recipe: coat_jax.dot_general(r)(a, b, numbers))(lhs, rhs))
        assert ("f8_e4m3" in jaxpr) == quantized
    assert str(jax.make_jaxpr(lambda a, b: coat_jax.einsum(recipes.bf16())("ij,jk", a, b))(lhs, rhs)) == str(
        jax.make_jaxpr(lambda a, b: jnp.einsum("ij,jk", a, b))(lhs, rhs)
    )


def test_the_type_that_is_asked_for_and_the_types_of_gradients():
    lhs, rhs = jnp.ones((3, 4), jnp.bfloat16), jnp.ones((4, 2))
    for preferred, mixed in ((None, jnp.float32), (jnp.bfloat16, jnp.bfloat16)):
        y, pull = jax.vjp(lambda a, b, p=preferred: HOOK(a, b, (((1,), (0,)), ((), ())), preferred_element_type=p), lhs, rhs)
        assert y.dtype == mixed
        assert [g.dtype for g in pull(y)] == [jnp.bfloat16, jnp.float32]
    y = HOOK(lhs, rhs.astype(jnp.bfloat16) * 257, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    assert y.dtype == jnp.float32


def test_a_byte_per_element_of_the_input_is_kept():
    x, w = jnp.ones((64, 32), jnp.bfloat16), jnp.ones((32, 8), jnp.bfloat16)
    _, pull = jax.vjp(lambda x, w: HOOK(x, w, (((1,), (0,)), ((), ()))), x, w)
    kept = [leaf for leaf in jax.tree.leaves(pull) if leaf is not w]
    assert x.size <= sum(leaf.nbytes for leaf in kept) <= x.size + 8


def test_hooks_of_one_recipe_are_one_hook():
    """So that modules which hold them compare equal and jit does not trace them again."""
    assert coat_jax.dot_general(recipes.coat()) == HOOK and hash(coat_jax.dot_general(recipes.coat())) == hash(HOOK)
    assert coat_jax.dot_general(recipes.lean()) != HOOK
    assert coat_jax.einsum(recipes.coat()) == coat_jax.einsum(recipes.coat())


def test_an_nnx_model_with_the_hook_trains_in_one_trace():
    traces = []

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(16, 128, dot_general=coat_jax.dot_general(recipes.coat()), rngs=rngs)
            self.attention = nnx.MultiHeadAttention(
                2, 128, qkv_dot_general=HOOK, out_dot_general=HOOK, decode=False, deterministic=True, rngs=rngs
            )
            self.down = nnx.LinearGeneral(128, (2, 2), dot_general=coat_jax.dot_general(recipes.coat()), rngs=rngs)

        def __call__(self, x):
            return self.down(self.attention(nnx.gelu(self.up(x))))

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, coat_adamw(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        traces.append(0)
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    x, y = jax.random.normal(jax.random.key(0), (4, 8, 16)), jax.random.normal(jax.random.key(1), (4, 8, 2, 2))
    losses = [float(step(model, optimizer, x, y)) for _ in range(10)]
    assert losses[-1] < 0.9 * losses[0] and len(traces) == 1


@pytest.mark.parametrize(
    ("spec_x", "spec_w", "out"),
    [
        (P("fsdp"), P(), None),
        (P("fsdp"), P("fsdp"), None),
        (P("fsdp"), P("fsdp", "tensor"), None),
        (P(None, None, "tensor"), P("tensor"), P(None, None, None)),
        (P(("fsdp", "tensor")), P(), None),
        (P(), P(), P("fsdp")),
    ],
)
def test_explicit_axes_give_what_auto_ones_give(spec_x, spec_w, out):
    """Gradients lie as their primals do, results where they are asked to, with no more exchanges than on Auto axes."""
    x, w = jax.random.normal(jax.random.key(0), (8, 16, 128)), jax.random.normal(jax.random.key(1), (128, 2, 64))

    def gradients(x, w, out=None):
        def loss(x, w):
            y = HOOK(x, w, (((2,), (0,)), ((), ())), None, None, out)
            return jnp.sum(jnp.sin(y)), y

        return jax.grad(loss, (0, 1), has_aux=True)(x, w)

    alone, found = jax.jit(gradients)(x, w), []
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(kind,) * 2)
        with jax.set_mesh(mesh):
            args = [jax.device_put(a, jax.NamedSharding(mesh, s)) for a, s in ((x, spec_x), (w, spec_w))]
            call = jax.jit(functools.partial(gradients, out=out if kind is AxisType.Explicit else None))
            (grads, y), text = call(*args), call.lower(*args).compile().as_text()
        assert jnp.linalg.norm(np.asarray(y) - alone[1]) <= 1e-5 * jnp.linalg.norm(alone[1])
        for a, g, want in zip(args, grads, alone[0], strict=True):
            assert jnp.linalg.norm(np.asarray(g) - want) <= 0.05 * jnp.linalg.norm(want)  # a rounding to FP8 may flip
            if kind is AxisType.Explicit:
                assert jax.typeof(g) == jax.typeof(a)
        if kind is AxisType.Explicit and out is not None:
            assert jax.typeof(y).sharding.spec[: len(out)] == tuple(out)
        found.append(len(re.findall(r"= \S+ (?:all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)", text)))
    assert found[1] <= found[0] + (out is not None), found


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: coat_jax.dot_general("coat"), TypeError, "dot_general: recipe='coat' is not a Recipe; use recipes.coat()"),
        (lambda: coat_jax.einsum(None), TypeError, "einsum: recipe=None is not a Recipe"),
        (
            lambda: HOOK(jnp.ones((2, 3), int), jnp.ones((3, 2)), (((1,), (0,)), ((), ()))),
            TypeError,
            "lhs is int32; use bfloat16",
        ),
        (lambda: HOOK(jnp.ones((2, 3)), jnp.ones((3, 2), complex), (((1,), (0,)), ((), ()))), TypeError, "rhs is complex64"),
        (lambda: HOOK(jnp.ones((2, 3)), jnp.ones((4, 2)), (((1,), (0,)), ((), ()))), TypeError, "contracting dimensions"),
        (lambda: coat_jax.einsum(recipes.coat())("ij->i", jnp.ones(2), jnp.ones(2)), ValueError, "names 1 operands"),
        (lambda: coat_jax.einsum(recipes.coat())("ii,ij->j", jnp.ones((2, 2)), jnp.ones((2, 2))), ValueError, "a letter twice"),
        (
            lambda: coat_jax.einsum(recipes.coat())("ij,jk->ik", jnp.ones(2), jnp.ones((2, 2))),
            ValueError,
            "names 2 axes as 'ij'",
        ),
    ],
)
def test_what_cannot_be_multiplied_is_refused(call, error, says):
    with pytest.raises(error, match=re.escape(says)):
        call()
