"""What a compiled training step keeps for its backward pass, layer by layer."""

import dataclasses
import re
from collections.abc import Iterator

from coat_jax.compiled.hlo import Computation, Instruction, Module, Value

# Operations that hand one buffer on, whole.
_SAME_ARRAY = {"copy", "bitcast", "bitcast-convert", "convert", "transpose", "reshape"}
# On the way to an array's maker, these are passed.
_HANDED_ON = _SAME_ARRAY - {"convert"} | {"get-tuple-element", "fusion-done", "copy-done", "copy-start"}
# Parts of an op_name that JAX's transformations add and that name nothing a person wrote.
_NOT_A_NAME = {"while", "body", "cond", "closed_call", "eval_jaxpr", "checkpoint", "rematted_computation", "call_exported", ""}


@dataclasses.dataclass(frozen=True)
class Residual:
    """One array that the forward pass writes for each layer and the backward pass reads.

    Attributes:
      name: where it comes from: scopes, module names and the operation that made it; "layer input" for the carry itself.
      dtype: XLA's name of its dtype. FP8 codes travel as u8 where they were named for a remat policy.
      shape: one layer's.
      layers: how many there are.
      nbytes: bytes of all layers.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    layers: int
    nbytes: int

    @property
    def fp8(self) -> bool:
        """Whether an element takes one byte, as FP8 codes do."""
        return self.dtype.startswith(("f8", "u8", "s8"))


def kept_in(module: Module) -> tuple[Residual, ...]:
    """What the module's scans over layers keep: buffers with a row per layer that one loop writes and a later loop reads.

    A pair of loops (the forward scan and its transpose) is found in any computation; what the second loop changes is its own
    and does not count, nor does what the first loop only reads, such as stacked parameters.
    """
    return tuple(kept for computation in module.computations.values() for kept in _between_loops(module, computation))


def _between_loops(module: Module, computation: Computation) -> Iterator[Residual]:
    loops = [i for i in computation.instructions.values() if i.opcode == "while"]
    seen = set()
    for later in loops:
        for position, operand in enumerate(_elements(computation, later.operands[0])):
            source = _source(computation, operand)
            if source is None or source in seen or not _unchanged(module, later, position):
                continue
            loop, index = computation.instructions[source[0]], source[1]
            value = loop.values[index]
            # What a backward pass writes for a later loop is gradients, for an optimizer.
            stacked = value.shape[:1] == (loop.trip_count,) and loop.trip_count > 1 and not in_backward(loop)
            if stacked and not _unchanged(module, loop, index):
                seen.add(source)
                yield Residual(_name(module, loop, index), value.dtype, value.shape[1:], loop.trip_count, value.nbytes)


def _elements(computation: Computation, name: str) -> tuple[str, ...]:
    """The operands of the tuple of that name."""
    made = computation.instructions[name]
    return made.operands if made.opcode == "tuple" else ()


def _element(computation: Computation, index: int) -> Instruction:
    """What makes element `index` of the computation's result; the result itself where that is no tuple."""
    made = _elements(computation, computation.root.name)
    return computation.instructions[made[index]] if made else computation.root


def _source(computation: Computation, name: str) -> tuple[str, int] | None:
    """The loop and the index of its result that the array of that name is, perhaps in another dtype or layout."""
    instruction = computation.instructions[name]
    while instruction.opcode != "get-tuple-element":
        operands = [computation.instructions[o] for o in instruction.operands if o in computation.instructions]
        if instruction.opcode == "fusion" and len(instruction.values) == 1:
            operands = [o for o in operands if len(o.values) == 1 and o.values[0].shape == instruction.values[0].shape]
        elif instruction.opcode not in _SAME_ARRAY:
            return None
        if not operands:
            return None
        instruction = operands[0]
    made = computation.instructions[instruction.operands[0]]
    return (made.name, instruction.index) if made.opcode == "while" else None


def _unchanged(module: Module, loop: Instruction, index: int) -> bool:
    """Whether the loop's body hands element `index` on as it came."""
    body = _body(module, loop)
    instruction = _element(body, index)
    while instruction.opcode in ("copy", "bitcast"):
        instruction = body.instructions[instruction.operands[0]]
    from_argument = instruction.opcode == "get-tuple-element" and instruction.operands[0] == body.parameters[0].name
    return from_argument and instruction.index == index


def _body(module: Module, loop: Instruction) -> Computation:
    return module.computations[loop.body]


def _name(module: Module, loop: Instruction, index: int) -> str:
    """The name of what the loop writes into element `index`: that of the update's maker, looked up through fusions."""
    inside = [_body(module, loop)]  # the computations that we are in, innermost last
    callers: list[Instruction] = []  # the fusions that we came through
    instruction = _element(inside[0], index)
    written = False
    while True:
        first = inside[-1].instructions.get(instruction.operands[0]) if instruction.operands else None
        many = instruction.opcode == "get-tuple-element" and first is not None and first.opcode == "fusion"
        fused = instruction.opcode in ("fusion", "fusion-start") and not (written and instruction.op_name)
        if instruction.opcode == "parameter" and callers:
            inside.pop()
            instruction = inside[-1].instructions[callers.pop().operands[int(instruction.operands[0])]]
        elif instruction.opcode == "dynamic-update-slice":
            written, instruction = True, inside[-1].instructions[instruction.operands[1]]
        elif many or fused:
            callers.append(first if many and first is not None else instruction)
            inside.append(module.computations[callers[-1].called[0]])
            instruction = _element(inside[-1], instruction.index) if many else inside[-1].root
        elif first is not None and (
            instruction.opcode in _HANDED_ON or (instruction.opcode == "convert" and not instruction.op_name)
        ):
            instruction = first
        elif instruction.opcode == "parameter":
            return "layer input"
        else:
            return readable(instruction.op_name) or instruction.opcode


def readable(op_name: str) -> str:
    """What a person wrote of an op_name: "jit(step)/jvp(Llama)/layers/while/body/norm/mul" is "Llama/layers/norm/mul"."""
    parts = []
    for part in op_name.split("/"):
        while wrapped := re.fullmatch(r"(?:jvp|transpose|vmap|remat|checkpoint)\((.*)\)", part):
            part = wrapped.group(1)
        if part not in _NOT_A_NAME and not re.fullmatch(r"(?:jit|pjit)\(.*\)", part):
            parts.append(part)
    return "/".join(parts)


def kept_outside(module: Module) -> tuple[Residual, ...]:
    """What crosses from forward to backward operations outside of scans: the arrays around them, and those of unrolled layers.

    An operation is the backward pass's where JAX named it so ("transpose(jvp(...))"). Arguments of the program, parameters
    among them, do not count.
    """
    entry = module.entry
    found: dict[str, Residual] = {}
    for instruction in entry.instructions.values():
        if not in_backward(instruction) or instruction.opcode == "parameter":
            continue
        for operand in instruction.operands:
            names = _elements(entry, operand) or (operand,)
            for made, value in (_made(entry, name) for name in names):
                forward = "jvp(" in made.op_name and not in_backward(made)
                in_scan = made.opcode == "while" and made.trip_count > 1 and value.shape[:1] == (made.trip_count,)
                if forward and not in_scan and made.opcode not in ("parameter", "constant", "iota", "broadcast"):
                    found[f"{made.name} {value}"] = Residual(readable(made.op_name), value.dtype, value.shape, 1, value.nbytes)
    return tuple(found.values())


def in_backward(instruction: Instruction) -> bool:
    """Whether it belongs to the outermost backward pass, by its op_name; a gradient taken inside a forward pass does not."""
    outermost = re.search(r"(?:^|/)(jvp|transpose)\(", instruction.op_name)
    return outermost is not None and outermost.group(1) == "transpose"


def _made(computation: Computation, name: str) -> tuple[Instruction, Value]:
    """Who made the array of that name in this computation, and the array."""
    instruction = computation.instructions[name]
    value = instruction.values[0] if instruction.values else Value("token", ())
    while instruction.opcode in _HANDED_ON and instruction.operands:
        instruction = computation.instructions[instruction.operands[0]]
    return instruction, value
