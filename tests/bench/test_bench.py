"""The bench without a GPU: its whole path on a CPU at small shapes, that it sees wrong kernels, and what it needs."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import E4M3, PerGroup, QuantSpec, quantize
from coat_jax.bench import calibrate, ceilings, compiled, run, subjects
from coat_jax.bench.ceilings import Ceilings
from coat_jax.bench.check import compare
from coat_jax.bench.harness import Contender, by_turns
from coat_jax.bench.kernels import KernelSpec, Sizes, cases, numbers
from coat_jax.bench.row import BenchRow
from coat_jax.bench.worker import CallError, Worker
from coat_jax.compiled import devices, topology
from coat_jax.plan import command, paper
from pallas_kernels import backend

SMALL = Sizes(tokens=64, hidden=128, intermediate=256)
SETTING = subjects.BenchConfig(SMALL, "xla", seed=7, repeats=3, span=1e-4, recipes=("bf16", "lean", "nothing"))
SPEC = QuantSpec(E4M3, PerGroup(16))


def case(name, function, inputs=lambda key: (numbers(key, 32, 128),)):
    """A case whose kernel is `function`, and whose reference quantizes."""
    make = lambda implementation: (lambda x: quantize(x, SPEC)) if implementation == "xla" else function  # noqa: E731
    return KernelSpec(name, make, inputs, 32 * 128, 3.25)


def test_results_are_written_over_operands_and_blanks():
    contender = Contender(lambda x, y: (x + y, y[:, :2]), (jnp.ones((4, 3)), jnp.ones((4, 3))), donated=(0,))
    assert contender.covered and [blank.shape for blank in contender.blanks] == [(4, 2)]
    x, y = jnp.ones((4, 3)), jnp.full((4, 3), 2.0)
    total, part = contender.poisoned((x, y))
    assert (total == 3).all() and (part == 2).all() and not x.is_deleted()
    state = contender.again(contender.again(contender.start((x, y))))
    assert (state[0] == 5).all()


def test_a_result_that_is_not_all_written_is_caught():
    class Lazy(Contender):
        def call(self, buffers):
            stale = buffers[-1][0] + 0
            return [result.at[0].set(stale) for result in super().call(buffers)]

    with pytest.raises(ArithmeticError, match="not all of them is written"):
        Lazy(lambda x: x * 2, (jnp.ones((4, 3)),)).poisoned((jnp.ones((4, 3)),))


def test_contenders_take_turns():
    args = (jnp.ones(3),)
    samples = by_turns({"a": (Contender(jnp.sin, args), args), "b": (Contender(jnp.cos, args), args)}, repeats=4, span=1e-5)
    assert {name: len(times) for name, times in samples.items()} == {"a": 4, "b": 4}
    assert all(t > 0 for times in samples.values() for t in times)


def test_one_code_apart_is_right_and_two_are_wrong():
    q = quantize(numbers(jax.random.key(0), 32, 128), SPEC)

    def moved(steps):
        bits = jax.lax.bitcast_convert_type(q.payload, jnp.uint8)
        payload = jax.lax.bitcast_convert_type(bits.at[:, 5].set((bits[:, 5] & 0x87) | 0x18).at[:, 5].add(steps), E4M3.dtype)
        return type(q)(payload, q.scale, q.exponent, q.spec, q.dtype)

    assert compare(q, q) == (32 * 128, 0, 0)
    assert compare(moved(1), moved(0)) == (32 * 128, 32, 0)
    assert compare(moved(2), moved(0)) == (32 * 128, 32, 32)
    x = jnp.linspace(1, 2, 100, dtype=jnp.bfloat16)
    assert compare([x], [x]).wrong == 0 and compare([x * 1.1], [x]).wrong == 100
    assert compare([x.at[3].set(jnp.nan)], [x]).wrong == 1
    with pytest.raises(ValueError, match="results like"):
        compare([x[:5]], [x])


def half_done(x):
    q = quantize(x, SPEC)
    return type(q)(q.payload.at[-1].set(q.payload[0]), q.scale, q.exponent, q.spec, q.dtype)


def stale(x):
    """The same results for ever."""
    return quantize(jnp.asarray(np.random.default_rng(0).normal(size=x.shape), x.dtype), SPEC)


@pytest.mark.parametrize("wrong", [half_done, stale, lambda x: quantize(x * 1.13, SPEC)])
def test_a_wrong_kernel_is_caught_and_not_timed(wrong):
    setting = dataclasses.replace(SETTING, implementation="pallas")
    [row] = subjects.kernel_rows(case("wrong", wrong), setting, Ceilings(1.0, 1.0, 1.0))
    assert row.check.startswith("WRONG") and row.seconds is None


@pytest.mark.skipif(not backend.can_interpret, reason="the interpreter came with jax 0.12")
def test_an_interpreted_kernel_is_equal_and_timed():
    [chosen] = [c for c in cases(SMALL) if c.name.startswith("quantize, e4m3, group 16,")]
    setting = dataclasses.replace(SETTING, implementation="interpret", repeats=1, span=0.0)
    [row] = subjects.kernel_rows(chosen, setting, Ceilings(1e9, 1e9, 1e9))
    assert row.check == "equal" and row.seconds > 0 and row.plain > 0 and row.share == row.reached / 1e9


@pytest.mark.parametrize("chosen", cases(SMALL), ids=lambda case: case.name)
def test_every_case_has_operands_and_results_to_compare(chosen):
    results = jax.eval_shape(lambda *args: chosen.stands_for(chosen.make("xla")(*args)), *chosen.abstract)
    assert jax.tree.leaves(results) and chosen.least > 0 and chosen.elements > 0


def test_every_row_is_made_and_written_and_one_that_fails_says_so(tmp_path, capsys):
    def fails(x):
        raise NotImplementedError("no such kernel")

    def no_product(x, w, scales):
        raise NotImplementedError("no such product")

    product = dataclasses.replace(case("product", lambda x: quantize(x, SPEC)), flops=1e6)
    chosen = (case("fails", fails), case("wrong", half_done), product, case("right", lambda x: quantize(x, SPEC)))
    files = [str(tmp_path / name) for name in ("rows.json", "device.json")]
    setting = dataclasses.replace(SETTING, implementation="pallas")  # the cases' own; the step, which has none here, is XLA's
    monkey = pytest.MonkeyPatch()
    monkey.setattr(ceilings, "f8_product", no_product)
    monkey.setattr(subjects, "step_rows", lambda setting, device: STEPS(SETTING, device))
    with pytest.raises(ArithmeticError, match="results are wrong of wrong"), monkey.context():
        run.measured(jax.devices("cpu")[0], setting, output=run.BenchOutput(*files, "typed"), chosen=chosen)
    monkey.undo()
    record = json.loads(pathlib.Path(files[0]).read_text())
    rows = {row["name"]: row for row in record["rows"]}
    assert "no such kernel" in rows["fails"]["error"] and rows["right"]["seconds"] > 0 and rows["product"]["check"] == "equal"
    assert {"ceiling, copy", "ceiling, bf16 product"} <= rows.keys()
    timed = {name: row for name, row in rows.items() if name.startswith(("layer", "step"))}
    assert "unknown" in timed.pop("layer, forward and backward, nothing")["error"]
    assert len(timed) == 7 and timed.keys() == record["model_errors"].keys() and all(r["modelled"] > 0 for r in timed.values())
    assert record["command"] == "typed" and record["device"] == "cpu" and record["seed"] == 7
    said = capsys.readouterr().out
    assert "microseconds" in said and "step-time model" in said and "s] fails" in said
    device = devices.named(files[1])
    assert (
        device.memory_bytes_per_second == rows["ceiling, copy"]["reached"] and "memory, bf16 measured with jax" in device.source
    )
    assert "no such product" in rows["ceiling, FP8 product"]["error"] and rows["product"]["share"] is None
    assert device.f8_flops == calibrate.described("cpu").f8_flops


STEPS = subjects.step_rows


def test_rows_are_left_out_when_time_is_up():
    rows = run.measured(
        jax.devices("cpu")[0], SETTING, output=run.BenchOutput(), budget=-1.0, chosen=(case("late", half_done),)
    )
    assert [row.name for row in rows if "left out" in row.error] == ["step of a layer", "layer, forward and backward", "late"]


def test_a_row_that_aborts_its_process_says_so_and_the_next_ones_run_and_are_in_the_file(tmp_path, monkeypatch):
    """A small kernel in a worker, behind a row that aborts and one that raises."""
    [kernel] = [c for c in cases(SMALL) if c.name.startswith("quantize, e4m3, group 16,")]
    file, held = tmp_path / "rows.json", []

    def work(setting, device, most, only, chosen):
        for name, *call in (
            ("aborts", os.abort),
            ("raises", int, "x"),
            (kernel.name, run.kernel_rows, kernel.name, setting, most),
        ):
            yield name, *call
            held.append([row["name"] for row in json.loads(file.read_text())["rows"]][-1])

    monkeypatch.setattr(run, "_work", work)
    setting = dataclasses.replace(SETTING, repeats=1)
    with Worker() as worker:
        run.measured(jax.devices("cpu")[0], setting, output=run.BenchOutput(json=str(file)), call=worker.call)
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert "status -6" in rows["aborts"]["error"] and "ValueError: invalid literal" in rows["raises"]["error"]
    assert rows[kernel.name]["seconds"] > 0 and rows["ceiling, copy"]["seconds"] > 0
    assert held == ["aborts", "raises", kernel.name]  # each in the file before the next began


def test_a_call_that_hangs_is_ended():
    with Worker(patience=2) as worker, pytest.raises(CallError, match="hung for 2 s"):
        worker.call(time.sleep, 60)


def test_the_optimizer_and_products_come_first():
    names = [name for name, *_ in run._work(SETTING, devices.named("h100"), Ceilings(1.0, 1.0, 1.0), "", None)]
    order = [next(i for i, name in enumerate(names) if name.startswith(word)) for word in ("step", "AdamW", "product", "layer")]
    assert order == sorted(order) and order[0] == 0 and len(names) == len(cases(SMALL)) + 2
    others = names[order[-1] + 1 :]
    assert others and not any(name.startswith(("AdamW", "product")) for name in others)


def test_a_calibrated_device_keeps_what_was_not_measured(tmp_path):
    base = calibrate.described("NVIDIA H200")
    device = calibrate.calibrated(base, "NVIDIA H200", Ceilings(4e12, 7e14, 1.2e15))
    calibrate.write(str(tmp_path / "mine.json"), device)
    assert devices.named(str(tmp_path / "mine.json")) == device
    assert (device.f8_flops, device.link_bytes_per_second) == (1.2e15, devices.named("h200").link_bytes_per_second)
    assert calibrate.errors([BenchRow("a", seconds=2.0, modelled=1.0), BenchRow("b", seconds=2.0)]) == {"a": -0.5}


def test_without_a_gpu_it_shows_the_static_table_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr(topology, "missing", lambda: "no plug-in")
    rows = run.run("AdamW")
    said = capsys.readouterr().out
    assert "nothing is measured" in said and "Not compiled here" in said and "recorded on" in said
    assert rows and all(row.name in said for row in rows)
    with pytest.raises(ValueError, match="nothing was written"):
        run.run(output=run.BenchOutput(calibrate="device.json"))


BAD = {
    "a folder for a file": (lambda d: run.BenchOutput(json=str(d)), "is a folder"),
    "no such folder": (lambda d: run.BenchOutput(calibrate=str(d / "no" / "x.json")), "there is no folder"),
    "a description that plan would not read": (lambda d: run.BenchOutput(calibrate=str(d / "h200.txt")), "name ends in .json"),
    "one file for both": (lambda d: run.BenchOutput(str(d / "x.json"), str(d / "x.json")), "a file of its own"),
    "a picture of no known kind": (lambda d: command.PlanOutput(plot=d / "x.nonesuch"), "ends in one of .png"),
    "a table that is no JSON": (
        lambda d: paper.run(d / "kept.json", output=command.PlanOutput(), typed=""),
        "holds something else",
    ),
    "no kernel of that name": (
        lambda d: run.run("AdamX", run.BenchOutput(str(d / "new.json"))),
        "use part of one of quantize",
    ),
    "no time": (lambda d: run.run(budget=float("nan")), "give the seconds"),
    "rows of another day": (lambda d: run.run("AdamW", run.BenchOutput(str(d / "new.json"))), "leave it out"),
    "a file of something else": (lambda d: run.BenchOutput(str(d / "kept.json")), "holds something else"),
    "rows that would be lost": (lambda d: run.run("AdamW", run.BenchOutput(str(d / "rows.json"))), "1 rows that would be lost"),
    "a description over something else": (lambda d: run.BenchOutput(calibrate=str(d / "kept.json")), "cannot be read"),
}


@pytest.mark.parametrize(("call", "advice"), BAD.values(), ids=BAD)
def test_what_cannot_be_done_is_refused_before_the_work_and_nothing_is_overwritten(call, advice, tmp_path, monkeypatch):
    monkeypatch.setattr(topology, "missing", lambda: "no plug-in")
    (tmp_path / "kept.json").write_text("mine")
    measured = {"command": "", "date": "", "versions": {}, "seed": 1, "rows": [{"name": "AdamW, coat, master None"}]}
    (tmp_path / "rows.json").write_text(json.dumps(measured))
    with pytest.raises(ValueError, match=advice) as error:
        call(tmp_path)
    assert "\n" not in str(error.value) and (tmp_path / "kept.json").read_text() == "mine"
    assert json.loads((tmp_path / "rows.json").read_text()) == measured and not (tmp_path / "new.json").exists()


BARE = """
import runpy, sys

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("typer", "matplotlib", "grain", "pytest", "jax_plugins", "jax_cuda12_plugin"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Nothing())
sys.argv = ["bench", *sys.argv[1:]]
runpy.run_module("coat_jax.bench", run_name="__main__")
"""


def test_it_runs_with_jax_flax_and_optax_alone():
    """Flax itself brings rich; nothing here prints with it."""
    environment = dict(os.environ, JAX_PLATFORMS="cpu", PYTHONPATH=str(pathlib.Path(__file__).parents[2]))
    done = subprocess.run([sys.executable, "-c", BARE], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "nothing is measured" in done.stdout and "AdamW" in done.stdout
    refused = [sys.executable, "-c", BARE, "--calibrate", "x.json"]
    done = subprocess.run(refused, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "--calibrate measures a Hopper GPU" in done.stderr.splitlines()[-1]


@pytest.mark.plan
@pytest.mark.parametrize("name", ["dequantize, e4m3, group 16,", "AdamW, coat, master bf16-stochastic"])
def test_kernels_compiled_for_an_h100_write_over_what_they_are_given(name):
    [chosen] = [c for c in cases(Sizes(512, 512, 1024)) if c.name.startswith(name)]
    # The compiler tells of a kernel once in a process, and the test of the table, which may share this one, wants to hear it.
    compiled.compiled(next(c for c in cases() if c.name == chosen.name))
    contender = Contender(chosen.make("pallas"), chosen.abstract, chosen.donated)
    mesh = topology.gpu_mesh(devices.named("h100").target(), {"x": 1})
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    contender.shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in contender.shapes]
    # Past JAX's persistent cache, which cannot read programs for a GPU that is not here.
    jitted = jax.jit(contender.flat, donate_argnums=contender.overwritten, keep_unused=True)
    contender.compiled = topology.compile_lowered(jitted.lower(*contender.shapes))
    assert contender.covered and " copy(" not in contender.compiled.as_text()


@pytest.mark.plan
def test_ceilings_compiled_for_an_h100_are_one_product_each():
    from coat_jax.compiled import compile_for

    made = jax.eval_shape(lambda: {name: args for name, (_, args) in ceilings.products(Sizes(512, 512, 1024)).items()})
    bf16 = compile_for("h100", ceilings.bf16_product, *made["bf16 product"])
    f8 = compile_for("h100", ceilings.f8_product, *made["FP8 product"])
    assert bf16.count("bf16") == 1 and f8.count("f8") == 1 and not f8.count("bf16")
