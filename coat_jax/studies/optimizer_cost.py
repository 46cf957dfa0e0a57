"""What a step of `coat_adamw` costs on this machine, next to `optax.adamw`.

python -m coat_jax.studies.optimizer_cost [FILE]      50 million parameters, about a minute; writes JSON where a FILE is named
"""

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from coat_jax.optim import coat_adamw, codecs
from coat_jax.results import load, provenance, write_json

SHAPE, LEAVES = (2048, 4096), 6


def seconds(optimizer: optax.GradientTransformation, repeats: int) -> list[float]:
    """Wall time of each of some steps, after one that compiles; parameters and state are donated."""
    params = {f"kernel_{i}": jnp.full(SHAPE, 0.01) for i in range(LEAVES)}
    grads = jax.tree.map(lambda p: jax.random.normal(jax.random.key(0), p.shape), params)
    state = optimizer.init(params)

    def step(grads: Any, state: Any, params: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step, donate_argnums=(1, 2))
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        params, state = jax.block_until_ready(compiled(grads, state, params))
        times.append(time.perf_counter() - began)
    return times[1:]


def run(repeats: int = 5) -> dict[str, Any]:
    """Times every codec and optax.adamw in turn: the median step of each, and its ratio to optax.adamw's."""
    optimizers = {"optax.adamw": optax.adamw(1e-3)}
    optimizers |= {name: coat_adamw(1e-3, codec=codecs.named(name)) for name in ("coat", "log_relative")}
    medians = {name: statistics.median(seconds(optimizer, repeats)) for name, optimizer in optimizers.items()}
    size = SHAPE[0] * SHAPE[1] * LEAVES
    ratios = {name: value / medians["optax.adamw"] for name, value in medians.items()}
    return {
        "parameters": size,
        "seconds_per_step": medians,
        "ratio_to_optax_adamw": ratios,
        "device": jax.devices()[0].device_kind,
    }


def main(argv: Sequence[str]) -> None:
    """Prints the ratios, and writes them where a file is named."""
    if argv:
        load("file", argv[0], {"seconds_per_step": dict})
    results = provenance("python -m coat_jax.studies.optimizer_cost") | run()
    for name, value in results["seconds_per_step"].items():
        print(f"{name:14s} {value:7.3f} s a step, {results['ratio_to_optax_adamw'][name]:.2f} times optax.adamw")
    if argv:
        write_json(argv[0], results)


if __name__ == "__main__":
    main(sys.argv[1:])
