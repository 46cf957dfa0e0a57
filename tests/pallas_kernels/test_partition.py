"""Kernels on the parts of sharded arrays: labels and places are right, and no code depends on how arrays are cut."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreting import numbers_like, same_bytes
from jax.sharding import PartitionSpec as P
from meshes import COLLECTIVE, mesh_of, run_on

from coat_jax import coat_adamw, codecs, ops, recipes
from coat_jax.optim import fused, state_specs
from coat_jax.quant import E4M3, PerBlock, PerGroup, QuantSpec, product, quantize, rounding
from pallas_kernels import dispatch
from pallas_kernels.partition import Split, partitioned, stretched


@pytest.mark.parametrize("shardy", [True, False])
@pytest.mark.parametrize(
    "spec", [P("a"), P(None, "b"), P("a", "b"), P(None, ("a", "b")), P(None, None, "b"), P("a", None, "b")]
)
def test_elements_are_numbered_as_in_the_whole(spec, shardy):
    """The last axis is cut in pairs, so that b, 4 devices, takes 24 numbers in sixes and not 20 in fives."""
    for shape, cut in (((4, 16, 24), True), ((4, 16, 20), spec != P(None, None, "b") and spec != P("a", None, "b"))):
        pairs = (*shape[:-1], shape[-1] // 2)
        split = Split((("x", "y", "z"), ("x", "y", "z")), (("x", "y", "z"), ("x", "y", "z")))
        parts = []

        def kernel(x, sums, *, places, parts=parts):
            numbers = jnp.arange(x.size, dtype=jnp.uint32).reshape(x.shape)
            parts.append(x.shape)
            return stretched(numbers, places[0].stretch) + places[0].first, sums + x.reshape(*sums.shape, 2).sum(-1)

        plain = lambda x, sums: (x.astype(jnp.uint32), sums)  # noqa: E731
        x, sums = numbers_like(shape), numbers_like(pairs, 1)
        jax.config.update("jax_use_shardy_partitioner", shardy)
        try:
            call = partitioned(kernel, plain, split)
            (numbers, added), text = run_on(mesh_of(a=2, b=4), (spec, spec if cut else P()), call, x, sums)
        finally:
            jax.config.update("jax_use_shardy_partitioner", True)
        same_bytes(numbers, rounding.element_index(shape))
        same_bytes(added, sums + x.reshape(*pairs, 2).sum(-1))
        assert not cut or (not COLLECTIVE.search(text) and np.prod(parts[-1]) < np.prod(shape))


def launched(step, leaves, groups, *, name, scalars, aliases, numbered, interpret, blocks):
    """`group_map` in plain JAX: the function of a launch on whole leaves, with the numbers that a kernel would give it."""
    del name, aliases, interpret, blocks
    done = []
    for i, (leaf, laid) in enumerate(zip(leaves, groups, strict=True)):
        numbers = lambda laid=laid: laid.split(rounding.element_index(laid.shape))  # noqa: E731
        keywords = {"numbers": numbers} if numbered else {}
        done.append(step(*leaf, axes=laid.axes, scalars=tuple(s[i] for s in scalars), **keywords))
    return done


@pytest.mark.parametrize("spec", [P(None, ("a", "b")), P("b", "a")])
def test_codes_of_a_step_do_not_depend_on_how_leaves_are_cut(spec, monkeypatch):
    """What Hopper GPUs would run on their parts, with the launch itself in plain JAX: moments and weights rounded at random."""
    shapes = {"layers": (3, 1024, 16), "up": (16, 1024), "two groups": (256, 8)}
    optimizer = coat_adamw(1e-2, codec=codecs.named("log_relative"), master="bf16-stochastic", min_size=1)
    params, first, grads = (
        {name: numbers_like(shape, seed).astype(jnp.bfloat16) for name, shape in shapes.items()} for seed in (0, 1, 2)
    )
    params, state = jax.jit(optimizer.update_and_apply)(first, optimizer.init(params), params)
    want = jax.jit(optimizer.update_and_apply)(grads, state, params)
    mesh = mesh_of(a=2, b=4)
    specs = {name: P(*[None] * (len(shape) - 2), *spec) for name, shape in shapes.items()}
    places = (specs, state_specs(state, params, specs, mesh.shape), specs)
    monkeypatch.setattr(dispatch, "_for_hopper", lambda module: True)
    monkeypatch.setattr(fused, "group_map", launched)
    seen = []
    launch = fused._launch
    monkeypatch.setattr(fused, "_launch", lambda *args: seen.append(args[1]) or launch(*args))
    got, text = run_on(mesh, places, optimizer.update_and_apply, grads, state, params)
    same_bytes(got, want)
    cut = {spot.whole for spots in seen for spot in spots if spot.part != spot.whole}
    assert cut == {shapes["layers"], shapes["up"]}


@pytest.mark.plan
@pytest.mark.parametrize(
    "entry, axes, spec",
    [
        ("update_and_apply", {"fsdp": 4}, P("fsdp")),
        ("update_and_apply", {"data": 2, "fsdp": 2}, P("data", "fsdp")),
        ("update", {"fsdp": 4}, P(None, "fsdp")),
    ],
)
def test_compiled_for_four_h100s_a_step_is_kernels_without_exchanges(entry, axes, spec):
    from coat_jax.compiled import compile_for

    shapes = {"up": (4096, 11008), "square": (4096, 4096), "layers": (4, 4096, 11008)}
    optimizer = coat_adamw(1e-3, codec=codecs.named("log_relative"), master="bf16-stochastic")
    params = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    state = jax.eval_shape(optimizer.init, params)
    specs = {name: P(*[None] * (len(shape) - 2), *spec) for name, shape in shapes.items()}
    kept = state_specs(state, params, specs, axes)
    program = compile_for(
        "h100",
        getattr(optimizer, entry),
        *(params, state, params),
        gpus=4,
        mesh=axes,
        donate_argnums=(1, 2),
        in_shardings=(specs, kept, specs),
        out_shardings=(specs, kept),
    )
    assert "mosaic_gpu" in program.text and not program.collectives
    updated = (state, params) if entry == "update_and_apply" else state
    assert program.alias_bytes >= sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(updated)) / 4


@pytest.mark.plan
def test_compiled_for_four_h100s_an_activation_is_kernels_without_exchanges():
    """Its 86 groups are no multiple of 4, and need not be: sequences are cut."""
    from coat_jax.compiled import compile_for

    def gradients(gate, up):
        return jax.grad(lambda *xs: ops.swiglu(*xs, recipes.lean()).astype(jnp.float32).sum(), (0, 1))(gate, up)

    x = jax.ShapeDtypeStruct((8, 128, 11008), jnp.bfloat16)
    program = compile_for("h100", gradients, x, x, gpus=4, in_shardings=(P("fsdp"), P("fsdp")))
    assert program.text.count('custom_call_target="mosaic_gpu') == 2 and not program.collectives


@pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P("b", "a")], ids=str)
def test_devices_share_the_rows_or_the_contraction_of_a_product(spec, monkeypatch):
    """What Hopper GPUs would run on their parts, in plain JAX. Sums of four parts differ by their roundings to float32."""
    a = quantize(numbers_like((256, 512)), QuantSpec(E4M3, PerGroup(128)))
    b = quantize(numbers_like((200, 512), 1), QuantSpec(E4M3, PerBlock((128, 128))))
    want = product.scaled_product(a, b)
    monkeypatch.setattr(dispatch, "_for_hopper", lambda module: True)
    seen = []

    def plain(*parts, dtype, interpret, places):
        seen.append(parts[0].shape)
        return product._plain(*parts, dtype=dtype)

    monkeypatch.setattr(product, "_kernel", plain)
    specs = tuple(jax.tree.map(lambda _, spec=spec: spec, x) for x, spec in ((a, spec), (b, P())))
    got, text = run_on(mesh_of(a=4, b=2), specs, lambda a, b: product.scaled_product(a, b), a, b)  # traced anew
    pieces = {P("a"): (4, 1), P(None, "a"): (1, 4), P("b", "a"): (2, 4)}[spec]
    assert seen[-1] == (256 // pieces[0], 512 // pieces[1])
    assert COLLECTIVE.findall(text) == ["all-reduce("] * (pieces[1] > 1)
    np.testing.assert_allclose(got, want, atol=8 * 2.0**-24 * np.abs(want).max() * 128**0.5, rtol=0)


@pytest.mark.plan
def test_compiled_for_four_h100s_weights_travel_in_fp8_and_gradients_are_scattered():
    from coat_jax.compiled import compile_for

    x, w = jax.ShapeDtypeStruct((2048, 512), jnp.bfloat16), jax.ShapeDtypeStruct((512, 768), jnp.float32)

    def step(x, w, g):
        y, pull = jax.vjp(lambda x, w: ops.linear([x], [w], recipes.blocks())[0], x, w)
        return y, pull(g)

    g, cut = jax.ShapeDtypeStruct((2048, 768), jnp.bfloat16), P("fsdp")
    program = compile_for("h100", step, x, w, g, gpus=4, in_shardings=(cut, cut, cut), out_shardings=(cut, (cut, cut)))
    assert len(re.findall(r"custom_call_target=\S*mosaic_gpu", program.text)) == 5  # three products, two turned operands
    gathered = {c.dtype for c in program.collectives if c.kind == "all-gather" and c.nbytes >= 512 * 768}
    assert gathered == {"f8e4m3fn"}
    assert [c.dtype for c in program.collectives if c.kind != "all-gather"] == ["f32"]
