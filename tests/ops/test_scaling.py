"""Amaxes of a weight product: given instead of measured, and handed out, the gradient's from the backward pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantizations import quantizations

from coat_jax import ops, recipes
from coat_jax.compiled import hlo
from coat_jax.quant import Amax, quantize

RECIPES = {"coat": recipes.coat(), "lean": recipes.lean()}
NORM = ops.Prologue(ops.NormFunction(functools.partial(ops.normalize_rms, eps=1e-5)), RECIPES["lean"].nonlinear_input)


def operands(seed=0):
    keys = jax.random.split(jax.random.key(seed), 5)
    x, *ws = (jax.random.normal(k, s) for k, s in zip(keys[:3], ((6, 128), (128, 32), (128, 48)), strict=True))
    return x, ws, [jax.random.normal(k, (6, n)) for k, n in zip(keys[3:], (32, 48), strict=True)]


def refs():
    return [jax.new_ref(jnp.zeros(())) for _ in range(5)]


def step(recipe, prologue, given, x, ws, gs):
    """Results and gradients of one product with two kernels, and the amaxes: of h, of both kernels, of both gradients."""
    out = refs()
    amaxes = [Amax(a, r) for a, r in zip([None] * 5 if given is None else given, out, strict=True)]
    scaling = ops.Scaling(amaxes[0], amaxes[1:3], amaxes[3:])

    def fn(x, ws):
        return ops.linear([x], ws, recipe, prologue=prologue, scaling=scaling)

    ys, pull = jax.vjp(fn, x, ws)
    return (ys, pull(gs)), jnp.stack([r[...] for r in out])


def truth(prologue, x, ws, gs):
    h = x if prologue is None else prologue.fn(x)
    return jnp.stack([jnp.abs(a).max() for a in (h, *ws, *gs)])


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("prologue", [None, NORM], ids=["bare", "norm"])
@pytest.mark.parametrize("name", RECIPES)
def test_what_is_handed_out_is_what_the_operands_have_and_changes_no_bit(name, prologue, wrap):
    x, ws, gs = operands()
    run = wrap(functools.partial(step, RECIPES[name], prologue, None))
    got, found = run(x, ws, gs)
    np.testing.assert_array_equal(found, truth(prologue, x, ws, gs))

    def plain(x, ws, gs):
        ys, pull = jax.vjp(lambda x, ws: ops.linear([x], ws, RECIPES[name], prologue=prologue), x, ws)
        return ys, pull(gs)

    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wrap(plain)(x, ws, gs)), strict=True):
        # Compiled, XLA may fuse the norm otherwise where its result is reduced too: a few units in float32's last place.
        np.testing.assert_allclose(a, b, rtol=0 if wrap is not jax.jit else 4e-6, atol=0 if wrap is not jax.jit else 1e-6)


def test_the_amaxes_of_a_step_scale_the_next_one():
    """Delayed scaling: codes and products by the amaxes of the step before, saturated where these are smaller."""
    recipe = recipes.coat()
    _, before = jax.jit(functools.partial(step, recipe, None, None))(*operands(0))
    x, ws, gs = operands(1)
    (ys, (dx, dws)), _ = jax.jit(functools.partial(step, recipe, None))(list(before), x, ws, gs)

    def code(x, spec, amax):
        q = quantize(x, spec, amax=amax)
        return q.payload.astype(jnp.float32) * q.scale.astype(jnp.float32)

    h = code(x, recipe.linear_input, before[0])
    kernels = [code(w, recipe.weight, a) for w, a in zip(ws, before[1:3], strict=True)]
    grads = [code(g, recipe.gradient, a) for g, a in zip(gs, before[3:], strict=True)]
    # float32 sums of at most 128 products in another order.
    for y, w in zip(ys, kernels, strict=True):
        np.testing.assert_allclose(y, h @ w, rtol=1e-5, atol=1e-4)
    for dw, g in zip(dws, grads, strict=True):
        np.testing.assert_allclose(dw, h.T @ g, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(dx, sum(g @ w.T for g, w in zip(grads, kernels, strict=True)), rtol=1e-5, atol=1e-4)


def test_over_layers_in_a_scan_with_remat_each_layer_hands_out_its_own():
    recipe, layers = recipes.lean(), 3
    x, w = jax.random.normal(jax.random.key(0), (4, 128)), jax.random.normal(jax.random.key(1), (layers, 128, 128)) * 0.1

    @jax.jit
    def run(w, x):
        inputs, gradients = jax.new_ref(jnp.zeros(layers)), jax.new_ref(jnp.zeros(layers))

        @functools.partial(jax.checkpoint, policy=ops.remat_policy)
        def layer(x, w, of_input, of_gradient):
            scaling = ops.Scaling(Amax(out=of_input), gradients=[Amax(out=of_gradient)])
            [y] = ops.linear([x], [w], recipe, prologue=NORM, scaling=scaling)
            return x + y

        def loss(w):
            y, _ = jax.lax.scan(lambda x, row: (layer(x, *row), None), x, (w, inputs, gradients))
            return jnp.sum(jnp.sin(y))

        return jax.grad(loss)(w), inputs[...], gradients[...]

    grads, inputs, gradients = run(w, x)
    assert bool(jnp.isfinite(grads).all()) and len(set(inputs.tolist())) == len(set(gradients.tolist())) == layers
    np.testing.assert_allclose(inputs[0], jnp.abs(NORM.fn(x)).max(), rtol=1e-6)


def test_a_program_that_is_given_all_amaxes_takes_one_pass():
    x, ws, gs = operands()

    def reductions(given):
        def run(given, x, ws, gs):
            amaxes = [Amax(a) for a in ([None] * 5 if given is None else given)]
            scaling = ops.Scaling(amaxes[0], amaxes[1:3], amaxes[3:])
            ys, pull = jax.vjp(lambda x, ws: ops.linear([x], ws, recipes.coat(), scaling=scaling), x, ws)
            return ys, pull(gs)

        compiled = jax.jit(run).lower(given, x, ws, gs).compile()
        assert quantizations(compiled, x.size)
        module = hlo.parse(compiled.as_text())
        return sum(i.opcode == "reduce" for c in module.computations.values() for i in c.instructions.values())

    assert reductions(None) > reductions([jnp.float32(4)] * 5) == 0


def test_what_has_no_meaning_is_refused():
    x, ws, _ = operands()
    given = Amax(given=jnp.float32(1))
    coded = ops.CodedWeight(ws[0], ops.weight_codes(ws[0], recipes.coat()))
    for recipe, kernels, scaling, message in (
        (recipes.blocks(), ws, ops.Scaling(given), "groups along the rows"),
        (recipes.bf16(), ws, ops.Scaling(given), "quantizes no operand"),
        (recipes.coat(), ws, ops.Scaling(weights=[given]), "scaling.weights has 1 entries for 2 kernels"),
        (recipes.coat().replace(gradient=None), ws, ops.Scaling(gradients=[given] * 2), "recipe.gradient is None"),
        (recipes.coat(), [coded], ops.Scaling(weights=[given]), "comes with its codes"),
        (recipes.coat(), ws, ops.Scaling(Amax(given=jnp.ones(3))), r"amax has shape \(3,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.linear([x], kernels, recipe, scaling=scaling)
