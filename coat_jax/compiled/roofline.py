"""A model of a step's time: a roofline over the compiled program. A model, not a measurement.

    t = max(sum over products of operations / ceiling + sum over other kernels of bytes / ceiling,
            sum over exchanges of bytes / ceiling)

Every kernel runs at a ceiling of the device's description, and exchanges between GPUs hide behind kernels. So this is a
lower bound, and good for ranking settings rather than for predicting one.
"""

import dataclasses

from coat_jax.compiled import hlo
from coat_jax.compiled.devices import Device
from coat_jax.compiled.program import Program

_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional", "iota", "after-all"}
_MOVED = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 1, "collective-permute": 1}


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Modelled time of one step.

    Attributes:
      products: matrix products and attention.
      others: kernels that move memory.
      exchanges: between GPUs, hidden behind the kernels as far as they go.
    """

    products: float
    others: float
    exchanges: float

    @property
    def total(self) -> float:
        """The step."""
        return max(self.products + self.others, self.exchanges)


def seconds(program: Program, device: Device) -> Seconds:
    """The model's time of a program on a device."""
    ceilings = {"f8": device.f8_flops}
    products = sum(p.flops * p.times / ceilings.get(p.kind, _dense(p.kind, device)) for p in program.products)
    moved = traffic(program)
    ring = (program.gpus - 1) / program.gpus
    exchanged = sum(_MOVED[c.kind] * c.nbytes * c.times * ring for c in program.collectives)
    return Seconds(products, moved / device.memory_bytes_per_second, exchanged / device.link_bytes_per_second)


def traffic(program: Program) -> int:
    """Bytes that a program's kernels read and write, without those of products and attention."""
    return sum(_traffic(program.module, c, i) * times for c, i, times in hlo.executed(program.module))


def _dense(kind: str, device: Device) -> float:
    # float32 products run in TF32, at half of the rate of bf16.
    return device.bf16_flops / (2 if kind == "f32" else 1)


def _traffic(module: hlo.Module, computation: hlo.Computation, instruction: hlo.Instruction) -> int:
    """Bytes that a kernel other than a product reads and writes; of an array that it slices or updates in place, the slice."""
    if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
        return 0
    if instruction.target.startswith("__cu") or instruction.estimated_flops:
        return 0
    operands = [computation.instructions[name] for name in instruction.operands]
    if instruction.opcode in ("dynamic-slice", "gather"):
        return 2 * sum(v.nbytes for v in instruction.values)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * sum(v.nbytes for v in operands[1].values)
    if instruction.opcode not in ("fusion", "fusion-start"):
        return sum(v.nbytes for made in operands for v in made.values) + sum(v.nbytes for v in instruction.values)
    inside = module.computations[instruction.called[0]]
    if any(i.target.startswith("__cu") or i.opcode == "dot" for i in inside.instructions.values()):
        return 0
    return _inside(inside)


def _inside(fused: hlo.Computation) -> int:
    uses: dict[str, list[hlo.Instruction]] = {}
    for instruction in fused.instructions.values():
        for name in instruction.operands:
            uses.setdefault(name, []).append(instruction)
    total = 0
    for parameter in fused.parameters.values():
        users, whole = uses.get(parameter.name, []), sum(v.nbytes for v in parameter.values)
        slices = [u for u in users if u.opcode == "dynamic-slice" and u.operands[0] == parameter.name]
        updates = [u for u in users if u.opcode == "dynamic-update-slice" and u.operands[0] == parameter.name]
        in_parts = len(slices) + len(updates) == len(users)
        total += min(whole, sum(v.nbytes for u in slices for v in u.values)) if in_parts else whole
    results = [fused.instructions[n] for n in fused.root.operands] if fused.root.opcode == "tuple" else [fused.root]
    for result in results:
        in_place = result.opcode == "dynamic-update-slice"
        written = fused.instructions[result.operands[1]] if in_place else result
        total += sum(v.nbytes for v in written.values)
    return total
