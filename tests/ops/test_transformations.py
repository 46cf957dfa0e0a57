"""Ops under jit, vmap, scan, checkpoint and on eight devices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from op_bounds import BF16, relative

import coat_jax
from coat_jax import ops, recipes

NORM = functools.partial(ops.normalize_rms, eps=1e-6)


def block(recipe, x, scale, w_in, w_out):
    """Norm, two products, SwiGLU, product: what a layer is made of."""
    gate, up = ops.linear([x], w_in, recipe, prologue=ops.Prologue(NORM, recipe.nonlinear_input, (scale,)))
    [y] = ops.linear([gate, up], [w_out], recipe, prologue=ops.Prologue(ops.gate_silu, recipe.nonlinear_input))
    return ops.add(x, y)


def parameters(layers=None):
    keys = jax.random.split(jax.random.key(1), 3)
    lead = () if layers is None else (layers,)
    w = [jax.random.normal(key, (*lead, 32, 64)) * 0.2 for key in keys[:2]]
    return jnp.ones((*lead, 32)), w, jax.random.normal(keys[2], (*lead, 64, 32)) * 0.2


X = jax.random.normal(jax.random.key(0), (16, 32)).astype(jnp.bfloat16) * 300  # codes of 256 and more among the payloads


@pytest.mark.parametrize("name", ["coat", "lean"])
def test_gradients_are_bit_equal_with_and_without_the_remat_policy(name):
    recipe = recipes.named(name)

    def loss(layer, x, params):
        body = lambda x, row: (layer(x, *row), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(body, x, params)[0].astype(jnp.float32) ** 2)

    plain = functools.partial(block, recipe)
    kept = jax.checkpoint(plain, policy=coat_jax.remat_policy, prevent_cse=False)
    grads = [jax.jit(jax.grad(functools.partial(loss, layer), (0, 1)))(X, parameters(3)) for layer in (plain, kept)]
    for a, b in zip(*map(jax.tree.leaves, grads), strict=True):
        assert bool(jnp.isfinite(a).all())
        assert bool((a == b).all())


def test_the_remat_policy_keeps_the_stashes_and_nothing_else():
    params = parameters()
    layer = jax.checkpoint(functools.partial(block, recipes.lean()), policy=coat_jax.remat_policy)
    _, pull = jax.vjp(layer, X, *params)
    own = jax.tree.leaves(params)
    kept = [leaf for leaf in jax.tree.leaves(pull) if not any(leaf is p for p in own)]
    # Checkpoint itself keeps the layer's arguments; beside them there is FP8 of x, gate and up with a scale per row.
    assert sum(leaf.nbytes for leaf in kept if leaf.dtype == jnp.uint8) == 16 * (32 + 64 + 64)
    assert sum(leaf.nbytes for leaf in kept if leaf.dtype != jnp.uint8) <= 16 * 3 * 2 + X.nbytes


def test_vmap_quantizes_each_example_by_itself():
    params = parameters()
    xs = jnp.stack([X, X * 2.0**-9])
    run = functools.partial(block, recipes.coat())
    together = jax.jit(jax.vmap(lambda x: run(x, *params)))(xs)
    apart = jnp.stack([jax.jit(run)(x, *params) for x in xs])
    assert relative(together, apart) <= 4 * BF16  # the same codes; batched products may round their results elsewhere


def test_scan_and_loop_agree():
    params = parameters(3)
    run = functools.partial(block, recipes.coat())
    scanned = jax.jit(lambda x, p: jax.lax.scan(lambda x, row: (run(x, *row), None), x, p)[0])(X, params)
    x = X
    for i in range(3):
        x = jax.jit(run)(x, *jax.tree.map(lambda p, i=i: p[i], params))
    assert relative(scanned, x) <= 0.09  # one flipped code moves others: see "Numerics" in the README


def test_eight_devices_see_one_amax():
    assert jax.device_count() == 8
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.NamedSharding(mesh, jax.P("data"))
    x = X * jnp.exp2(jnp.arange(16.0) - 8)[:, None].astype(jnp.bfloat16)  # every device has another largest value
    kept = [jax.jit(lambda x: ops.stash.keep(x, recipes.coat().linear_input))(y) for y in (x, jax.device_put(x, rows))]
    assert bool((kept[0].payload == kept[1].payload).all())
    assert bool((kept[0].scale == kept[1].scale).all())
    grad = jax.jit(jax.grad(lambda x, p: block(recipes.lean(), x, *p).astype(jnp.float32).sum(), 1))
    for a, b in zip(*(jax.tree.leaves(grad(y, parameters())) for y in (x, jax.device_put(x, rows))), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-2 * float(jnp.abs(b).max()))  # sums over devices in another order


LAYOUTS = {
    "data": (P("fsdp"), P(), P()),
    "fsdp": (P("fsdp"), P("fsdp"), P(None, "fsdp")),
    "fsdp x tensor": (P("fsdp"), P("fsdp", "tensor"), P("tensor", "fsdp")),
    "tensor": (P(), P(None, "tensor"), P("tensor")),
    "both axes of the rows": (P(("fsdp", "tensor")), P(), P()),
    "replicated": (P(), P(), P()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", [recipes.coat(), recipes.lean()], ids=["coat", "lean"])
def test_explicit_axes_give_what_auto_ones_give(recipe, layout):
    """The axes that `jax.make_mesh` makes where it is not told: gradients lie as their primals do, with no more exchanges."""
    w_in, w_out = (jax.random.normal(jax.random.key(i), shape) / 8 for i, shape in enumerate([(128, 256), (256, 128)]))
    x = jax.random.normal(jax.random.key(2), (8, 16, 128))

    def gradients(x, w_in, w_out):
        def loss(x, w_in, w_out):
            swiglu = ops.Prologue(ops.gate_silu, recipe.nonlinear_input)
            gate, up = ops.linear([x], [w_in, w_in], recipe)
            [y] = ops.linear([gate, up], [w_out], recipe, prologue=swiglu)
            return jnp.sum(jnp.sin(y))

        return jax.grad(loss, (0, 1, 2))(x, w_in, w_out)

    alone, found = jax.jit(gradients)(x, w_in, w_out), []
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(kind,) * 2)
        with jax.set_mesh(mesh):
            args = [
                jax.device_put(a, jax.NamedSharding(mesh, s)) for a, s in zip((x, w_in, w_out), LAYOUTS[layout], strict=True)
            ]
            got = jax.jit(gradients)(*args)
            text = jax.jit(gradients).lower(*args).compile().as_text()
        for a, g, want in zip(args, got, alone, strict=True):
            assert jnp.linalg.norm(np.asarray(g) - want) <= 0.05 * jnp.linalg.norm(want)  # a rounding to FP8 may flip
            if kind is AxisType.Explicit:
                assert jax.typeof(g) == jax.typeof(a)
        found.append(len(re.findall(r"= \S+ (?:all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)", text)))
    assert found[1] <= found[0], found


def test_explicit_axes_are_kept_by_norms_and_activations():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))
        for op in (ops.silu, lambda x, recipe: ops.rms_norm(x, None, recipe)):
            y, pull = jax.vjp(lambda x, op=op: op(x, recipes.lean()), x)
            assert jax.typeof(y) == jax.typeof(pull(y)[0]) == jax.typeof(x)


def test_second_derivatives_exist_where_nothing_is_quantized():
    f = lambda x: ops.swiglu(x, x, recipes.bf16()).sum()  # noqa: E731
    assert bool(jnp.isfinite(jax.hessian(f)(jnp.ones(3))).all())


@pytest.mark.parametrize("recipe", [recipes.coat(), recipes.lean(), recipes.blocks()], ids=["coat", "lean", "blocks"])
def test_second_derivatives_through_what_is_rounded_are_refused(recipe):
    """Bytes carry no tangent: a gradient penalty would be off by 85 % of its norm."""
    f = lambda x: jnp.sum(jnp.sin(block(recipe, x, *parameters())))  # noqa: E731
    with pytest.raises(TypeError, match=r"a second derivative .* use recipes.bf16\(\)"):
        jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2))(X)
    with pytest.raises(TypeError, match="a second derivative|forward-mode"):
        jax.jvp(jax.grad(f), (X,), (X,))


@pytest.mark.parametrize(("rows", "features"), [(0, 7), (1, 1003)])
def test_odd_sizes_run(rows, features):
    x = jax.random.normal(jax.random.key(0), (rows, features))
    w = [jax.random.normal(jax.random.key(1), (features, 5))] * 2
    for recipe in (recipes.coat(), recipes.lean()):
        y, pull = jax.jit(lambda *a, recipe=recipe: jax.vjp(functools.partial(block_any, recipe), *a))(x, w, w[0].T)
        assert y.shape == x.shape
        assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(pull(y)))


def block_any(recipe, x, w_in, w_out):
    return block(recipe, x, jnp.ones(x.shape[-1]), w_in, w_out)
