"""Reading compiled programs: laws that hold for any program, checked on small ones compiled for the CPU."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from coat_jax.compiled import Program, devices, hlo, kept_for_backward

LAYERS, ROWS, WIDTH = 6, 8, 64


def plain(x, w):
    return x + jnp.tanh(x @ w) * 0.5, None


def stash(x, w):
    """tanh(x) @ w that keeps one byte per element of x and a scale per row, both named."""

    @jax.custom_vjp
    def op(x, w):
        return jnp.tanh(x) @ w

    def forward(x, w):
        with jax.named_scope("stash"):
            scale = jnp.max(jnp.abs(x), -1, keepdims=True)
            codes = jax.lax.bitcast_convert_type((x / scale).astype(jnp.float8_e4m3fn), jnp.uint8)
            kept = checkpoint_name(codes, "codes"), checkpoint_name(scale, "scale")
        return op(x, w), (*kept, w)

    def backward(kept, g):
        codes, scale, w = kept
        x = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(g.dtype) * scale
        return jax.vjp(lambda x, w: jnp.tanh(x) @ w, x, w)[1](g)

    op.defvjp(forward, backward)
    return x + op(x, w), None


def named_only(*names):
    return jax.checkpoint_policies.save_only_these_names(*names)


BODIES = {
    "plain": plain,
    "stash": stash,
    "stash, remat": jax.checkpoint(stash, policy=named_only("codes", "scale")),
    "full remat": jax.checkpoint(plain),
}


def step(body, w, x):
    value, grads = jax.value_and_grad(lambda w: jnp.sum(jax.lax.scan(body, x, w)[0]))(w)
    return w - 0.1 * grads, value


@pytest.fixture(scope="module")
def programs():
    w, x = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32), jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    compiled = {
        name: jax.jit(lambda w, x, body=body: step(body, w, x), donate_argnums=0).lower(w, x).compile()
        for name, body in BODIES.items()
    }
    return {name: Program.of(c) for name, c in compiled.items()}


def test_what_a_stash_keeps_is_its_codes_and_scales(programs):
    # codes: one byte per element; scales: four bytes per row. Nothing else crosses, under a policy that keeps them or none.
    for name in ("stash", "stash, remat"):
        kept = {k.shape: k for k in kept_for_backward(programs[name])}
        assert set(kept) == {(ROWS, WIDTH), (ROWS, 1)}
        assert kept[ROWS, WIDTH].fp8 and kept[ROWS, WIDTH].nbytes == LAYERS * ROWS * WIDTH
        assert not kept[ROWS, 1].fp8 and kept[ROWS, 1].nbytes == LAYERS * ROWS * 4
        assert all(k.layers == LAYERS and k.name.startswith("stash/") for k in kept.values())


def test_plain_autodiff_keeps_arrays_of_f32_and_full_remat_the_layer_input_alone(programs):
    array = LAYERS * ROWS * WIDTH * 4
    plain_bytes = sum(k.nbytes for k in kept_for_backward(programs["plain"]))
    assert plain_bytes % array == 0 and plain_bytes >= 2 * array  # the input of the product and what tanh needs, at least
    (only,) = kept_for_backward(programs["full remat"])
    assert (only.name, only.nbytes) == ("layer input", array)


def test_a_program_without_a_backward_pass_keeps_nothing():
    w, x = jnp.ones((LAYERS, 4, 4)), jnp.ones((2, 4))
    assert kept_for_backward(jax.jit(lambda w, x: jax.lax.scan(plain, x, w)[0]).lower(w, x).compile()) == ()


def test_flops_are_twice_the_multiplications_of_every_product_that_runs(programs):
    # forward, dx and dw: three products of 2 ROWS WIDTH^2 per layer; full remat runs the forward twice.
    once = 2 * ROWS * WIDTH**2 * LAYERS
    assert programs["plain"].flops() == {"f32": pytest.approx(3 * once)}
    assert programs["full remat"].flops()["f32"] == pytest.approx(4 * once)


def test_a_batched_product_counts_each_of_the_batch():
    a, b = jnp.ones((5, 7, 16)), jnp.ones((5, 16, 33))
    program = Program.of(jax.jit(lambda a, b: jnp.einsum("bij,bjk->bik", a, b)).lower(a, b).compile())
    assert sum(program.flops().values()) == pytest.approx(2 * 5 * 7 * 16 * 33)


def test_collectives_are_counted_with_their_whole_arrays_and_their_trips():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = lambda *p: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*p))  # noqa: E731
    gathered = jax.jit(lambda x: x * 2, in_shardings=spec("fsdp", None), out_shardings=spec())
    program = Program.of(gathered.lower(jnp.ones((64, 32), jnp.bfloat16)).compile(), gpus=8)
    assert sum(program.collective_bytes().values()) in (64 * 32 * 2, 64 * 32 * 4)  # CPUs may gather bf16 as f32
    assert {c.kind for c in program.collectives} == {"all-gather"}


def test_donated_arguments_share_memory_with_results(programs):
    assert programs["plain"].alias_bytes == LAYERS * WIDTH * WIDTH * 4
    assert programs["plain"].peak_bytes >= programs["plain"].argument_bytes


@pytest.mark.parametrize(
    ("dtype", "nbytes"), [("f8e4m3fn", 6), ("bf16", 12), ("f32", 24), ("pred", 6), ("s4", 3), ("c64", 48), ("token", 0)]
)
def test_bytes_of_a_value(dtype, nbytes):
    assert hlo.Value(dtype, (2, 3)).nbytes == nbytes


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        kept_for_backward("module {}")


def test_a_description_file_is_held_to_its_fields(tmp_path):
    path = tmp_path / "mine.json"
    fields = vars(devices.named("h100"))
    cases = {
        "lacks memory_bytes": {k: v for k, v in fields.items() if k != "memory_bytes"},
        "unknown fields colour": fields | {"colour": "green"},
        "not a positive whole number": fields | {"core_count": "many"},
        "not like '9.0'": fields | {"compute_capability": "nine"},
    }
    for message, content in cases.items():
        path.write_text(devices.json.dumps(content))
        with pytest.raises(ValueError, match=message):
            devices.named(str(path))
    path.write_text(devices.json.dumps(fields))
    assert devices.named(str(path)) == devices.named("h100")
    with pytest.raises(ValueError, match="cannot be read"):
        devices.named(str(tmp_path / "absent.json"))
    with pytest.raises(ValueError, match="use one of h100, h200"):
        devices.named("a100")


def test_gradients_that_a_later_loop_reads_are_not_kept_for_the_backward_pass(programs):
    def updated_in_rows(w, x):
        grads = jax.grad(lambda w: jnp.sum(jax.lax.scan(plain, x, w)[0]))(w)
        return jax.lax.fori_loop(0, LAYERS, lambda i, w: w.at[i].add(-0.1 * grads[i]), w)

    w, x = jnp.ones((LAYERS, WIDTH, WIDTH)), jnp.ones((ROWS, WIDTH))
    kept = kept_for_backward(jax.jit(updated_in_rows).lower(w, x).compile())
    assert sum(k.nbytes for k in kept) == sum(k.nbytes for k in programs["plain"].kept)
