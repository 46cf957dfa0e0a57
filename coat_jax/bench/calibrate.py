"""A description of the device at hand with measured ceilings, for `coat-jax plan --device FILE`, and the model's error."""

import dataclasses
import datetime
from collections.abc import Sequence

import jax

from coat_jax.bench.ceilings import Ceilings
from coat_jax.bench.row import BenchRow
from coat_jax.compiled import devices
from coat_jax.compiled.devices import Device
from coat_jax.results import write_json


def described(kind: str) -> Device:
    """The known device that is most like one of this kind: "h200" for an H200, else "h100"."""
    return devices.named("h200" if "H200" in kind else "h100")


def calibrated(base: Device, kind: str, ceilings: Ceilings) -> Device:
    """The base with measured ceilings; what was not measured (memory, links, clock) stays."""
    found = [name for name, rate in dataclasses.asdict(ceilings).items() if rate]
    measured = f"{', '.join(found) or 'nothing'} measured with jax {jax.__version__} on {datetime.date.today()}"
    return dataclasses.replace(
        base,
        name=kind,
        memory_bytes_per_second=ceilings.memory or base.memory_bytes_per_second,
        bf16_flops=ceilings.bf16 or base.bf16_flops,
        f8_flops=ceilings.f8 or base.f8_flops,
        source=f"{measured}; the rest as of {base.name}",
    )


def write(file: str, device: Device) -> None:
    """Writes a description that `coat_jax.compiled.devices.named` reads."""
    write_json(file, dataclasses.asdict(device))


def errors(rows: Sequence[BenchRow]) -> dict[str, float]:
    """For each row with a modelled time, how far it is from the measured one, as a part of that: -0.2 is a fifth too short."""
    return {row.name: row.modelled / row.seconds - 1 for row in rows if row.modelled is not None and row.seconds}
