"""The planner from the outside: settings, searches, tables, files, and what it says about bad input."""

import contextlib
import dataclasses
import json
import os
import signal

import jax
import jax.numpy as jnp
import optax
import pytest

from coat_jax import cli, recipes
from coat_jax.compiled import devices
from coat_jax.models import llama, plain
from coat_jax.plan import PlanError, command, picture, row, search
from coat_jax.plan.config import PlanConfig
from coat_jax.plan.row import PlanRow

GIB = devices.GIB


def line(setting, *, base=20 * GIB, per_sequence=7 * GIB):
    """A planner whose peak is a line in the batch per GPU."""
    return PlanRow(
        setting, peak_bytes=base + per_sequence * (setting.batch // setting.gpus), flops={"bf16": 1.0}, step_seconds=1.0
    )


def test_flops_that_are_needed_are_six_per_weight_and_token_and_causal_attention():
    setting = PlanConfig("llama2-7b", batch=4)
    weights = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000
    attention = 3.5 * 32 * (2 * 2048 * 4096)  # 2 products of 2 s h operations, half of them masked; backward 2.5 times that
    assert setting.needed_flops() == (6 * weights + attention) * 4 * 2048
    assert setting.replace(gpus=4).needed_flops() == setting.needed_flops() / 4
    # Qwen3-0.6B: 16 heads of 128 from 1024 features; norms and embedding multiply nothing, the tied head does.
    wide = PlanConfig("qwen3-0.6b", seq=1024)
    weights = 596_049_920 - 28 * (2 * 1024 + 2 * 128) - 1024
    assert wide.needed_flops() == (6 * weights + 3.5 * 28 * 2 * 1024 * 16 * 128) * 1024


@pytest.mark.parametrize(("base", "per_sequence", "gpus"), [(20, 7, 1), (20, 7, 4), (60, 1, 1), (74, 1, 2), (90, 1, 1)])
def test_the_largest_batch_is_the_last_that_leaves_the_reserve(base, per_sequence, gpus):
    planned = []

    def plan(setting):
        planned.append(setting)
        return line(setting, base=base * GIB, per_sequence=per_sequence * GIB)

    start = PlanConfig("tiny", batch=gpus, gpus=gpus)
    found = search.largest_batch(plan(start), plan, 4 * GIB)
    room = devices.named("h100").memory_bytes - 4 * GIB - base * GIB
    assert found == max(0, room // (per_sequence * GIB)) * gpus
    assert len(planned) <= 5 and len(set(planned)) == len(planned)


def test_the_frontier_has_what_everyone_has_and_what_is_ours_and_the_setting_itself():
    setting = PlanConfig("tiny", recipe="bf16", codec="log_relative", batch=2)
    found = search.frontier(setting)
    assert found[0] == setting and len(set(found)) == len(found)
    labels = [s.label for s in found]
    for name in ("BF16, optax.adamw", "BF16, optax.adamw, dots policy", "BF16, optax.adamw, full remat"):
        assert name in labels
    assert {"BF16, coat moments, full remat", "lean, log_relative moments, fused"} <= set(labels)
    assert {(s.batch, s.seq, s.gpus) for s in found} == {(2, 2048, 1)}


def test_a_setting_that_does_not_compile_is_a_row_and_the_others_are_still_shown_and_written(monkeypatch, tmp_path, capsys):
    def plan(setting):
        return PlanRow(setting, error="XlaRuntimeError: no") if setting.recipe == "coat" else line(setting)

    monkeypatch.setattr(row, "plan", plan)
    output = command.PlanOutput(json=str(tmp_path / "rows.json"), plot=tmp_path / "rows.png")
    rows = command.run(PlanConfig("tiny"), compare=True, output=output, command="coat-jax plan tiny --compare")
    document = json.loads((tmp_path / "rows.json").read_text())
    assert [r["peak_bytes"] for r in document["rows"]] == [r.peak_bytes for r in rows]
    assert [r["error"] for r in document["rows"][-2:]] == ["XlaRuntimeError: no"] * 2  # sorted to the end
    assert document["versions"]["jax"] == jax.__version__ and document["command"] == "coat-jax plan tiny --compare"
    assert {"recipe", "codec", "batch", "argument_bytes", "temp_bytes", "modelled_tokens_per_second"} <= set(
        document["rows"][0]
    )
    assert "XlaRuntimeError: no" in capsys.readouterr().out
    assert (tmp_path / "rows.png").stat().st_size > 10_000


def test_rows_that_a_plan_would_not_have_are_not_replaced(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(row, "plan", line)
    path = tmp_path / "rows.json"
    table = ["plan", "tiny", "--compare", "--json", str(path)]
    assert cli.main(table) == 0
    written = path.read_text()
    assert cli.main(["plan", "tiny", "--json", str(path)]) == 2
    assert "rows that this plan would not have" in capsys.readouterr().err and path.read_text() == written
    assert cli.main([*table, "--fit"]) == 0  # the same rows and more of each
    fitted = path.read_text()
    assert cli.main(table) == 2 and path.read_text() == fitted


def test_a_picture_replaces_a_picture_and_nothing_else(monkeypatch, tmp_path):
    monkeypatch.setattr(row, "plan", line)
    for kind in command.PICTURES:
        path = tmp_path / f"rows{kind}"
        call = ["plan", "tiny", "--plot", str(path)]
        assert cli.main(call) == 0 and cli.main(call) == 0
        path.write_bytes(b"a photo")
        assert cli.main(call) == 2 and path.read_bytes() == b"a photo"


def test_an_interrupt_that_the_compiler_takes_for_an_error_ends_the_plan(monkeypatch):
    planned = []

    def plan(setting):
        planned.append(setting)
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        return PlanRow(setting, error="XlaRuntimeError: KeyboardInterrupt")

    monkeypatch.setattr(row, "plan", plan)
    assert cli.main(["plan", "tiny", "--compare"]) == 130 and len(planned) == 1


def test_a_description_is_read_once_for_a_row(monkeypatch):
    real, read = devices.named, []
    monkeypatch.setattr(devices, "named", lambda name: read.append(name) or real(name))
    planned = line(PlanConfig("tiny"))
    assert planned.fits() and planned.to_json()["device"] == "h100" and planned.memory_bytes == real("h100").memory_bytes
    assert read == ["h100"]


def test_json_on_standard_output_is_alone_there(monkeypatch, capsys):
    monkeypatch.setattr(row, "plan", line)
    command.run(PlanConfig("tiny"), output=command.PlanOutput(json="-"))
    seen = capsys.readouterr()
    assert json.loads(seen.out)["rows"][0]["model"] == "tiny" and "tiny" in seen.err


def test_the_picture_names_its_axis_and_unit_and_every_row():
    rows = [line(s) for s in search.frontier(PlanConfig("tiny"))]
    axes = picture.frontier(rows).axes[0]
    assert axes.get_xlabel() == "compiled peak (GiB per GPU)"
    assert [t.get_text() for t in axes.get_yticklabels()] == [r.setting.label for r in rows]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("llama9", "preset='llama9' is unknown"),
        ("tiny --device a100", "device='a100' is unknown; use one of h100, h200"),
        ("tiny --gpus 4 --batch 6", "batch=6 sequences do not divide over gpus=4; use a multiple of 4"),
        ("tiny --gpus 65", "one plan covers up to 64"),
        ("tiny --batch 0", "batch=0; use 1 or more"),
        ("tiny --recipe fp4", "recipe='fp4' is unknown; use one of coat, lean, blocks, bf16, plain"),
        ("tiny --codec none", "codec='none' is unknown"),
        ("tiny --remat dots", "remat='dots' is a policy of plain Flax"),
        ("tiny --remat some", "remat='some' is unknown; use one of none, dots, layer"),
        ("tiny --recipe plain --fused", "fused updates layers with this library's recipes and codecs"),
        ("tiny --codec optax --master bf16+8", "codec='optax' has none"),
        ("tiny --reserve -1", "reserve=-1.0 GiB"),
        ("tiny --json absent/rows.json", "there is no folder 'absent'"),
        ("", "no MODEL"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message, capsys):
    assert cli.main(["plan", *arguments.split()]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_without_the_plug_in_it_is_one_line_and_status_1(monkeypatch, capsys):
    def missing(setting):
        raise PlanError("compiling for a GPU needs JAX's CUDA plug-in; install it with: pip install 'coat-jax[plan]'")

    monkeypatch.setattr(row, "plan", missing)
    assert cli.main(["plan", "tiny"]) == 1
    assert capsys.readouterr().err.endswith("pip install 'coat-jax[plan]'\n")


@pytest.mark.plan
def test_a_step_compiled_by_hand_has_the_same_bytes_and_its_row_says_so():
    setting = PlanConfig("tiny", recipe="plain", codec="optax", batch=2, seq=256)
    planned = row.plan(setting)

    config = dataclasses.replace(llama.preset("tiny"), param_dtype=jnp.bfloat16)
    model, tx = plain.Llama(config, attention="cudnn"), optax.adamw(1e-3, weight_decay=0.1)
    params = jax.eval_shape(lambda: plain.Llama(config).init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"])

    def step(params, state, tokens):
        def loss(params):
            return model.apply({"params": params}, tokens[:, :-1], tokens[:, 1:], method=model.loss)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    from jax.experimental import topologies

    target = devices.named("h100").target(10**13)
    description = topologies.get_topology_desc(platform="cuda", topology_name="t", target_config=target, topology="1x1x1")
    placed = jax.sharding.SingleDeviceSharding(description.devices[0])
    arguments = (params, jax.eval_shape(tx.init, params), jax.ShapeDtypeStruct((2, 257), jnp.int32))
    jitted = jax.jit(step, in_shardings=placed, donate_argnums=(0, 1))
    by_hand = jitted.lower(*arguments).compile(compiler_options={"xla_gpu_enable_triton_gemm": False}).memory_analysis()
    assert planned.peak_bytes == by_hand.peak_memory_in_bytes
    assert (planned.argument_bytes, planned.temp_bytes) == (by_hand.argument_size_in_bytes, by_hand.temp_size_in_bytes)
    assert planned.recomputed == pytest.approx(0, abs=1e-3) and set(planned.products) >= {"bf16", "attention"}


def test_named_recipes_are_those_that_the_planner_offers():
    labels = {PlanConfig("tiny", recipe=name).label for name in (*recipes.NAMES, "plain")}
    assert len(labels) == len(recipes.NAMES) + 1
