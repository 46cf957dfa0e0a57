"""Every kernel and product: compiled for an H100, nothing spills, what streams moves the least, copies land where the device
takes them and all blocks run at once; interpreted with several tiles in every stage, it gives plain JAX's bytes."""

import copies
import jax
import pytest
from interpreting import interpreted, same_bytes

from coat_jax.bench.check import compare
from coat_jax.bench.kernels import Sizes, cases
from pallas_kernels.pipeline import GroupLaunch

# Enough for two tiles in every stage of both programs that the interpreter runs: 12 where there are three stages.
SMALL = {"AdamW": Sizes(64, 128, 256), "quantize, e4m3, block": Sizes(64, 512, 512), "": Sizes(64, 1024, 2048)}
REGISTERS, SHARED_MEMORY = 65536, 228 * 1024
"""Of a streaming multiprocessor of Hopper; a block takes 1 KiB besides its own, and registers in eights for each thread."""


@pytest.fixture
def launched(monkeypatch):
    """The launches of what is traced, and nothing has been before."""
    jax.clear_caches()
    seen, run = [], GroupLaunch.run
    monkeypatch.setattr(GroupLaunch, "run", lambda self, *args: seen.append(self) or run(self, *args))
    return seen


@pytest.mark.plan
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_compiled_for_an_h100(case, launched):
    from coat_jax.bench import compiled as static

    row = static.compiled(case)
    assert 0 < row.registers < 256 and row.spills == 0
    assert not copies.misaligned(static.reported_case(case)[1])
    if case.flops:
        assert row.wgmma
        return
    assert row.least <= row.moved <= 1.05 * row.least
    by_registers = REGISTERS // (128 * -(-row.registers // 8) * 8)
    by_memory = SHARED_MEMORY // (row.shared_memory + 1024) if row.shared_memory else by_registers
    assert launched and all(launch.programs <= 132 * min(by_registers, by_memory) for launch in launched)


def small(case):
    """The case of the same name at sizes for the interpreter."""
    sizes = next(sizes for name, sizes in SMALL.items() if case.name.startswith(name))
    return next(other for other in cases(sizes) if other.name == case.name)


@interpreted
@pytest.mark.parametrize("case", [small(case) for case in cases() if not case.flops], ids=lambda case: case.name)
def test_interpreted_with_two_tiles_in_every_stage_of_every_program(case, launched):
    """Norms sum a row in another order than XLA does: a bf16 result may be its neighbour. All else is equal to the byte. (Of
    products: `test_more_tiles_than_programs_and_more_blocks_than_stages`.)"""
    args = jax.jit(case.inputs)(jax.random.key(0))
    got, want = (jax.jit(case.make(name))(*args) for name in ("interpret", "xla"))
    assert launched and all(launch.starts[-1] >= 2 * launch.programs * launch.stages for launch in launched)
    if "Norm" not in case.name:
        same_bytes(got, want)
    else:
        agreement = compare(got, want)
        assert agreement.wrong == 0 and agreement.codes <= 1e-3 * agreement.elements
