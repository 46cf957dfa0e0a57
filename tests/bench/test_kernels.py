"""Every kernel and product, compiled for an H100: nothing spills, what streams moves the least, products use e4m3 wgmma, and
copies land where the device takes them."""

import copies
import pytest

from coat_jax.bench.kernels import cases


@pytest.mark.plan
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_compiled_for_an_h100(case):
    from coat_jax.bench import compiled as static

    row = static.compiled(case)
    assert 0 < row.registers < 256 and row.spills == 0
    if case.flops:
        assert row.wgmma
    else:
        assert row.least <= row.moved <= 1.05 * row.least
    assert not copies.misaligned(static.reported_case(case)[1])
