"""A compiled program as the planner sees it: its memory, its products, its collectives, what it keeps."""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any

from coat_jax.compiled import hlo
from coat_jax.compiled.residuals import Residual, kept_in


@dataclasses.dataclass(frozen=True)
class Product:
    """One matrix product or attention of a program.

    Attributes:
      kind: "f8", "bf16", "f32", ... for a matrix product of such operands; "attention" and "attention backward" for cuDNN's.
      name: the path of JAX operations that it comes from.
      flops: floating-point operations of one call, multiplication and addition apart.
      times: calls in one run of the program.
    """

    kind: str
    name: str
    flops: float
    times: int


@dataclasses.dataclass(frozen=True)
class Collective:
    """One exchange between GPUs.

    Attributes:
      kind: "all-gather", "reduce-scatter", "all-reduce", "all-to-all" or "collective-permute".
      dtype: XLA's name of what travels.
      nbytes: bytes of the whole (gathered, or not yet scattered) array.
      times: calls in one run of the program.
    """

    kind: str
    dtype: str
    nbytes: int
    times: int


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program, per GPU.

    Attributes:
      peak_bytes: the most memory that it holds at once, arguments and results included: XLA's plan, not a measurement. It
        leaves out the CUDA context, workspaces of cuBLAS and NCCL, and the allocator's fragmentation.
      argument_bytes, output_bytes, temp_bytes, alias_bytes: memory of arguments, of results, of temporaries, and of results
        that share an argument's memory.
      text: XLA's text of it.
      gpus: how many devices run it.
    """

    peak_bytes: int
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    text: str = dataclasses.field(repr=False)
    gpus: int = 1

    @classmethod
    def of(cls, compiled: Any, gpus: int = 1) -> "Program":
        """The program that `jax.jit(f).lower(...).compile()` returned, for any device."""
        m = compiled.memory_analysis()
        together = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes
        peak = m.peak_memory_in_bytes
        return cls(
            peak_bytes=peak if peak >= m.temp_size_in_bytes else together,  # for CPUs XLA's peak leaves temporaries out
            argument_bytes=m.argument_size_in_bytes,
            output_bytes=m.output_size_in_bytes,
            temp_bytes=m.temp_size_in_bytes,
            alias_bytes=m.alias_size_in_bytes,
            text=compiled.as_text(),
            gpus=gpus,
        )

    @functools.cached_property
    def module(self) -> hlo.Module:
        """The text, parsed."""
        return hlo.parse(self.text)

    @functools.cached_property
    def products(self) -> tuple[Product, ...]:
        """Matrix products and attentions, inside loops and fusions too."""
        return tuple(_products(self.module))

    @functools.cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Exchanges between GPUs."""
        return tuple(_collectives(self.module))

    @functools.cached_property
    def kept(self) -> tuple[Residual, ...]:
        """What its scans over layers keep for the backward pass."""
        return kept_in(self.module)

    def count(self, kind: str) -> int:
        """How many products of a kind stand in the program's text; one in a loop counts once."""
        return sum(product.kind == kind for product in self.products)

    def flops(self) -> dict[str, float]:
        """Floating-point operations of one run, by kind of product."""
        total: dict[str, float] = collections.defaultdict(float)
        for product in self.products:
            total[product.kind] += product.flops * product.times
        return dict(total)

    def collective_bytes(self) -> dict[str, int]:
        """Bytes that one run exchanges, by kind and dtype, such as "all-gather f8e4m3fn"."""
        total: collections.Counter[str] = collections.Counter()
        for collective in self.collectives:
            total[f"{collective.kind} {collective.dtype}"] += collective.nbytes * collective.times
        return dict(total)


def kept_for_backward(compiled: Any) -> tuple[Residual, ...]:
    """What a compiled training step keeps for its backward pass: buffers with a row per layer, written by the forward scan.

    Args:
      compiled: what `jax.jit(step).lower(...).compile()` returns, or a `Program`, or XLA's text of one.

    Returns:
      One `Residual` per buffer: name, dtype, shape of a layer, layers, bytes. Empty where no scan over layers has a backward.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def loss(w, x):
      ...     return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])
      >>> w, x = jax.ShapeDtypeStruct((6, 64, 64), jnp.float32), jax.ShapeDtypeStruct((8, 64), jnp.float32)
      >>> kept = kept_for_backward(jax.jit(jax.grad(loss)).lower(w, x).compile())
      >>> max(k.shape for k in kept), {k.layers for k in kept}
      ((8, 64), {6})
    """
    if isinstance(compiled, Program):
        return compiled.kept
    return kept_in(hlo.parse(compiled if isinstance(compiled, str) else compiled.as_text()))


def _products(module: hlo.Module) -> Iterator[Product]:
    for computation, instruction, times in hlo.executed(module):
        found = [(computation, instruction)]
        if instruction.opcode in ("fusion", "fusion-start"):
            inner = [module.computations[name] for name in instruction.called]
            found = [(c, i) for c in inner for i in c.instructions.values()]
        for inside, maker in found:
            if maker.opcode == "dot" or maker.target.startswith(("__cublas$", "__onednn$matmul")):
                yield Product(_dtype(inside, maker), maker.op_name, _matmul_flops(inside, maker), times)
            elif maker.estimated_flops:
                yield Product(_dtype(inside, maker), maker.op_name, maker.estimated_flops, times)
            elif maker.target.startswith("__cudnn$fmha"):
                kind = "attention backward" if "Backward" in maker.target else "attention"
                yield Product(kind, maker.op_name, _attention_flops(inside, maker), times)


def _operand(computation: hlo.Computation, instruction: hlo.Instruction, index: int) -> hlo.Value:
    return computation.instructions[instruction.operands[index]].values[0]


def _dtype(computation: hlo.Computation, instruction: hlo.Instruction) -> str:
    dtype = _operand(computation, instruction, 0).dtype
    return "f8" if dtype.startswith("f8") else dtype


def _matmul_flops(computation: hlo.Computation, product: hlo.Instruction) -> float:
    # lhs is (batch, m, k), rhs (batch, k, n), the result (batch, m, n), whatever the order of their axes, so
    # m n k = sqrt(|lhs| |rhs| |result|) / batch^1.5.
    lhs, rhs, out = _operand(computation, product, 0), _operand(computation, product, 1), product.values[0]
    axes = re.search(r'lhs_batch_dim(?:ension)?s"?[:=][\[{]([^\]}]*)', product.attributes)
    batch = math.prod(lhs.shape[int(axis.strip('" '))] for axis in axes.group(1).split(",") if axis) if axes else 1
    return 2 * math.sqrt(lhs.size / batch * (rhs.size / batch) * (out.size / batch)) * batch


def _attention_flops(computation: hlo.Computation, attention: hlo.Instruction) -> float:
    # Two products of (queries, d) with (d, keys) forward, five backward; a causal mask skips half of each.
    _, scores = attention.attributes.split('"intermediate_tensor_shape"', 1)
    size = math.prod(int(n.strip('" ')) for n in re.findall(r'"dimensions":\s*\[([^\]]*)\]', scores)[0].split(","))
    products = 5 if "Backward" in attention.target else 2
    causal = '"mask_type": "CAUSAL"' in attention.attributes
    return 2 * products * size * _operand(computation, attention, 0).shape[-1] * (0.5 if causal else 1)


_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def _collectives(module: hlo.Module) -> Iterator[Collective]:
    for computation, instruction, times in hlo.executed(module):
        kind = instruction.opcode.removesuffix("-start")
        if kind not in _COLLECTIVES:
            continue
        moved = [_operand(computation, instruction, i) for i in range(len(instruction.operands))]
        results = instruction.values[len(moved) :] if instruction.opcode.endswith("-start") else ()
        results = tuple(v for v in results if v.shape) or instruction.values
        by_dtype: collections.Counter[str] = collections.Counter()
        for before, after in zip(moved, results, strict=False):
            by_dtype[before.dtype] += max(before.nbytes, after.nbytes)
        for dtype, nbytes in by_dtype.items():
            yield Collective(kind, dtype, nbytes, times)
