"""What the bench times: the kernels of `coat_jax.bench.kernels`, a Llama layer both ways, and the optimizer's step."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from coat_jax import coat_adamw, recipes
from coat_jax.bench.ceilings import Ceilings
from coat_jax.bench.check import Agreement, compare
from coat_jax.bench.harness import Contender, by_turns, median
from coat_jax.bench.kernels import KernelSpec, Sizes, numbers
from coat_jax.bench.row import BenchRow, Timed, ready
from coat_jax.compiled import roofline
from coat_jax.compiled.devices import Device
from coat_jax.compiled.program import Program
from coat_jax.linen import FP8TransformerBlock


@dataclasses.dataclass(frozen=True)
class BenchConfig:
    """How a bench runs.

    Attributes:
      sizes: of everything.
      implementation: of the kernels: "pallas", or "interpret" where a test has no GPU.
      seed: of the random operands, another one in each run.
      repeats: samples of each contender.
      span: seconds of a sample.
      recipes: of the layers.
    """

    sizes: Sizes
    implementation: str
    seed: int
    repeats: int = 9
    span: float = 0.02
    recipes: tuple[str, ...] = recipes.NAMES

    @property
    def timing(self) -> dict[str, Any]:
        """Keywords of `by_turns`."""
        return {"repeats": self.repeats, "span": self.span}

    def operands(self, inputs: Callable[[jax.Array], Any], name: str) -> Any:
        """Random operands of a row, ready on the device."""
        key = jax.random.fold_in(jax.random.key(self.seed), sum(name.encode()))
        return jax.block_until_ready(jax.jit(inputs)(key))


def checked(case: KernelSpec, setting: BenchConfig) -> tuple[Any, Contender, Contender, Agreement]:
    """Fresh operands, the kernel, plain XLA, and how they agree where the kernel writes over poisoned buffers.

    The kernel runs before the reference, so that no buffer can hold the reference's results.
    """
    args = setting.operands(case.inputs, case.name)
    kernel = Contender(case.make(setting.implementation), args, case.donated)
    got = kernel.poisoned(args)
    plain = Contender(case.make("xla"), args, case.donated)
    agreement = compare(*(case.stands_for(results) for results in (got, plain.results(plain.call(plain.start(args))))))
    return args, kernel, plain, agreement


def kernel_rows(case: KernelSpec, setting: BenchConfig, ceilings: Ceilings) -> list[BenchRow]:
    """A kernel checked against plain XLA, then timed; in turns with XLA if it streams."""
    args, kernel, plain, agreement = checked(case, setting)
    if agreement.wrong:
        return [BenchRow(case.name, check=str(agreement), error="not timed: its results are wrong")]
    contenders = {"kernel": (kernel, args)} | ({} if case.flops else {"plain": (plain, args)})
    samples = by_turns(contenders, **setting.timing)
    seconds = median(samples["kernel"])
    reached = (case.flops or case.elements * case.least) / seconds
    most = ceilings.f8 if case.flops else ceilings.memory
    check = str(agreement) + ("" if kernel.covered else "; a result went through a buffer of XLA's")
    return [
        BenchRow.timed(
            case.name,
            samples["kernel"],
            reached=reached,
            share=most and reached / most,
            plain=None if case.flops else median(samples["plain"]),
            check=check,
        )
    ]


def _rows(title: str, made: Mapping[str, Callable[[], Timed]], setting: BenchConfig, device: Device | None) -> list[BenchRow]:
    """A row for each contender, in turns; one that fails says so. `device` is for the step-time model."""
    contenders, rows = ready(title, made)
    samples = by_turns(contenders, **setting.timing)
    for name, (contender, _) in contenders.items():
        model = None if device is None else roofline.seconds(Program.of(contender.compiled), device).total
        rows.append(BenchRow.timed(f"{title}, {name}", samples[name], modelled=model))
    return rows


def layer_rows(setting: BenchConfig, device: Device | None) -> list[BenchRow]:
    """One Llama layer forward and backward by each recipe, in turns."""
    sizes = setting.sizes
    heads = max(1, sizes.hidden // 128)
    x_shape = (max(1, sizes.tokens // 2048), min(2048, sizes.tokens), sizes.hidden)

    def block(name: str) -> FP8TransformerBlock:
        return FP8TransformerBlock(heads, heads, sizes.intermediate, param_dtype=jnp.bfloat16, recipe=recipes.named(name))

    def inputs(key: jax.Array) -> Any:
        first, second, third = jax.random.split(key, 3)
        x, dy = jax.random.normal(first, x_shape, jnp.bfloat16), jax.random.normal(second, x_shape, jnp.bfloat16)
        return block("bf16").init(third, x), x, dy

    def step(name: str) -> Callable[..., Any]:
        def both(params: Any, x: jax.Array, dy: jax.Array) -> Any:
            y, pull = jax.vjp(block(name).apply, params, x)
            return y, pull(dy)

        return both

    args = setting.operands(inputs, "layer")
    made = {name: functools.partial(lambda name: (Contender(step(name), args), args), name) for name in setting.recipes}
    return _rows("layer, forward and backward", made, setting, device)


def step_rows(setting: BenchConfig, device: Device | None) -> list[BenchRow]:
    """One step of AdamW on the weights of a layer: Optax's, COAT by XLA, and COAT by its kernel, in turns."""
    hidden, intermediate = setting.sizes.hidden, setting.sizes.intermediate
    shapes = {"qkvo": (4, hidden, hidden), "gate_up": (2, hidden, intermediate), "down": (intermediate, hidden)}

    def leaves(key: jax.Array) -> Any:
        return {name: numbers(jax.random.fold_in(key, i), *shape) for i, (name, shape) in enumerate(shapes.items())}

    def of_optax(dtype: Any) -> Any:
        optimizer = optax.adamw(1e-3)

        def step(grads: Any, state: Any, params: Any) -> Any:
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        def inputs(key: jax.Array) -> Any:
            grads, params = (jax.tree.map(lambda x: x.astype(dtype), leaves(k)) for k in jax.random.split(key))
            return grads, optimizer.init(params), params

        return step, inputs

    def of_coat(implementation: str, master: str | None) -> Any:
        optimizer = coat_adamw(1e-3, master=master, implementation=implementation, min_size=1)

        def inputs(key: jax.Array) -> Any:
            grads, params = map(leaves, jax.random.split(key))
            return grads, optimizer.init(params), params

        return optimizer.update_and_apply, inputs

    made = {
        "optax.adamw, float32": of_optax(jnp.float32),
        "optax.adamw, bf16 with its moments": of_optax(jnp.bfloat16),
        "coat_adamw, bf16, XLA": of_coat("xla", None),
        "coat_adamw, bf16, kernel": of_coat(setting.implementation, None),
        "coat_adamw, bf16+8, kernel": of_coat(setting.implementation, "bf16+8"),
    }

    def contender(step: Callable[..., Any], inputs: Callable[[jax.Array], Any]) -> Timed:
        args = setting.operands(inputs, "step")
        return Contender(step, args, (1, 2)), args

    started = {name: functools.partial(contender, *pair) for name, pair in made.items()}
    return _rows("step of a layer", started, setting, device)
