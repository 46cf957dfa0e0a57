"""What the device can do, measured: a copy, and products of bfloat16 and of FP8 that XLA leaves to cuBLASLt."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from coat_jax.bench.harness import Contender, by_turns, median
from coat_jax.bench.kernels import Sizes, numbers
from coat_jax.bench.row import BenchRow, Timed, ready
from coat_jax.compiled.devices import Device


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Bytes per second of memory, read and written; operations per second of products; None of what could not be measured."""

    memory: float | None
    bf16: float | None
    f8: float | None


def copy(x: jax.Array) -> jax.Array:
    """Each byte read once and written once: the negative, which XLA cannot leave out."""
    return -x


def bf16_product(x: jax.Array, w: jax.Array) -> jax.Array:
    """x w^T in bfloat16."""
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))


def f8_product(x: jax.Array, w: jax.Array, scales: jax.Array) -> jax.Array:
    """x w^T of E4M3 with a scale per tensor, written so that XLA makes one FP8 product of it."""
    return bf16_product(*(a.astype(jnp.bfloat16) * s.astype(jnp.bfloat16) for a, s in zip((x, w), scales, strict=True)))


def products(sizes: Sizes) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The copy and the products, with their operands: the up projection of a layer."""
    key, other = jax.random.split(jax.random.key(0))
    x, w = numbers(key, sizes.tokens, sizes.hidden), numbers(other, sizes.intermediate, sizes.hidden)
    small = (x.astype(jnp.float8_e4m3fn), w.astype(jnp.float8_e4m3fn), jnp.ones(2))
    big = numbers(key, 2 * sizes.tokens, sizes.intermediate)
    return {"copy": (copy, (big,)), "bf16 product": (bf16_product, (x, w)), "FP8 product": (f8_product, small)}


def measure(sizes: Sizes, device: Device, **options: Any) -> tuple[Ceilings, list[BenchRow]]:
    """The ceilings in one run, and their rows; shares are of what `device` is said to have."""
    made = products(sizes)
    contenders, rows = ready("ceiling", {name: functools.partial(_made, *pair) for name, pair in made.items()})
    flops = 2.0 * sizes.tokens * sizes.hidden * sizes.intermediate
    work = {"copy": 2.0 * made["copy"][1][0].nbytes, "bf16 product": flops, "FP8 product": flops}
    said = dict(zip(work, (device.memory_bytes_per_second, device.bf16_flops, device.f8_flops), strict=True))
    reached: dict[str, float | None] = dict.fromkeys(work)
    for name, samples in by_turns(contenders, **options).items():
        rate = work[name] / median(samples)
        rows.append(BenchRow.timed(f"ceiling, {name}", samples, reached=rate, share=rate / said[name]))
        reached[name] = rate
    return Ceilings(*reached.values()), rows


def _made(function: Callable[..., Any], args: tuple[Any, ...]) -> Timed:
    return Contender(function, args), args
