"""Descriptions of GPUs to compile for: what XLA has to know of a device, and its ceilings."""

import dataclasses
import json
import re
from pathlib import Path

GIB = 2**30
_LARGEST = 2**62  # XLA holds integers of 64 bits
_FILE = Path(__file__).with_name("devices.json")

_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: {core_count} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2_cache_bytes} clock_rate_ghz: {clock_ghz} device_memory_size: {memory}
  shared_memory_per_block_optin: 232448 cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{name}"
"""


@dataclasses.dataclass(frozen=True)
class Device:
    """One kind of GPU.

    Attributes:
      name: as the driver calls it.
      compute_capability: "9.0" for Hopper.
      memory_bytes: device memory that a program can see.
      memory_bytes_per_second: ceiling of the device memory.
      bf16_flops, f8_flops: ceilings of dense products, operations per second.
      link_bytes_per_second: ceiling between two GPUs of one host, one direction.
      core_count, clock_ghz, l2_cache_bytes: as the driver tells XLA.
      source: where the numbers are from.
    """

    name: str
    compute_capability: str
    memory_bytes: int
    memory_bytes_per_second: float
    bf16_flops: float
    f8_flops: float
    link_bytes_per_second: float
    core_count: int
    clock_ghz: float
    l2_cache_bytes: int
    source: str

    def target(self, memory_bytes: int | None = None) -> str:
        """The description in the text form that XLA reads, with `memory_bytes` of memory (None: the device's own)."""
        major, minor = self.compute_capability.split(".")
        return _TARGET.format(
            core_count=self.core_count,
            bandwidth=int(self.memory_bytes_per_second),
            l2_cache_bytes=self.l2_cache_bytes,
            clock_ghz=self.clock_ghz,
            memory=memory_bytes or self.memory_bytes,
            major=major,
            minor=minor,
            name=self.name,
        )


def named(device: str) -> Device:
    """The device of that name, or described by the JSON file at that path.

    Args:
      device: "h100", "h200", or a path ending in ".json" whose file holds one object with the fields of `Device`.

    Raises:
      ValueError: an unknown name, a file that cannot be read, or one with a field missing, too many or of another type.

    Example:
      >>> round(named("h100").memory_bytes / GIB, 1)
      79.1
    """
    known = json.loads(_FILE.read_text())
    if device in known:
        return Device(**known[device])
    if not str(device).endswith(".json"):
        raise ValueError(f"device={device!r} is unknown; use one of {', '.join(known)}, or the path of a .json description")
    try:
        if Path(device).exists() and not Path(device).is_file():  # a device of the system may have no end
            raise ValueError("it is no file")
        fields = json.loads(Path(device).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"device={device!r} cannot be read: {error}") from None
    return _described(device, fields)


def _described(path: str, fields: object) -> Device:
    if not isinstance(fields, dict):
        raise ValueError(f"device={path!r} holds a {type(fields).__name__}, not one object with the fields of a device")
    expected = {field.name: field.type for field in dataclasses.fields(Device)}
    missing, unknown = sorted(expected.keys() - fields), sorted(fields.keys() - expected)
    if missing or unknown:
        wrong = f"lacks {', '.join(missing)}" if missing else f"has unknown fields {', '.join(unknown)}"
        raise ValueError(f"device={path!r} {wrong}; it needs {', '.join(expected)}")
    for name, kind in expected.items():
        number = isinstance(fields[name], int if kind is int else int | float) and not isinstance(fields[name], bool)
        if not (isinstance(fields[name], str) if kind is str else number and 0 < fields[name] < _LARGEST):
            wanted = "text" if kind is str else "a positive whole number" if kind is int else "a positive number"
            raise ValueError(f"device={path!r}: {name}={str(fields[name])[:40]!r} is not {wanted} that XLA can hold")
    if not re.fullmatch(r"\d{1,3}\.\d{1,3}", fields["compute_capability"], re.ASCII):
        raise ValueError(f"device={path!r}: compute_capability={fields['compute_capability']!r} is not like '9.0'")
    if not fields["name"].isprintable() or set(fields["name"]) & set('"\\'):
        raise ValueError(f"device={path!r}: name={fields['name']!r} must be printable and without quotes or backslashes")
    return Device(**fields)
