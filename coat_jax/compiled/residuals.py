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
    # A scan over 4 layers and its transpose are two loops; what the first stacks goes into the second's tuple:
    #
    #     %while.54 = (s32[], ..., f32[4,256,512]{2,1,0}, ...) while(%tuple.21), ..., metadata={op_name="jit(step)/jvp()/while"}
    #     %get-tuple-element.357 = f32[4,256,512]{2,1,0} get-tuple-element(%while.54), index=14
    #     %tuple.24 = (s32[], ..., f32[4,256,512]{2,1,0}, ...) tuple(%..., %get-tuple-element.357, ...)
    #     %while.55 = (...) while(%tuple.24), ..., metadata={op_name="jit(step)/transpose(jvp())/while"}
    #
    # Here element 14 of while.54 is kept: 4 rows, written by the first loop, only read by the second. f32[256,512] a layer.
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
    # convert(copy(get-tuple-element(%while.54), index=14)) leads to ("while.54", 14); so does a fusion with one operand of the
    # result's shape, which is what XLA makes of a convert or a transpose.
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
    # A body takes one tuple and makes one: element 14 of `ROOT %tuple.23 = (...) tuple(...)` is as it came if it is, but for
    # copies, get-tuple-element(%param), index=14.
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
    # For the stacked f32[4,256,512] of the example above, in the first loop's body (names shortened):
    #
    #     ROOT %tuple.23 = (...) tuple(..., %update, ...)                         its element 14
    #     %update = f32[4,256,512] fusion(%stack, %tanh, %i), calls=%fused        go into the fusion
    #     ROOT %dus = f32[4,256,512] dynamic-update-slice(%p0, %row, %p2, ...)    written: operand 1, the row
    #     %row = f32[1,256,512] bitcast(%p1)                                      the same array
    #     %p1 = f32[256,512] parameter(1)                                         back out, to the fusion's operand 1
    #     %tanh = f32[256,512] fusion(...), metadata={op_name="jit(step)/jvp()/while/body/mlp/tanh"}
    #
    # and the name is "mlp/tanh". A parameter of the body itself is the scan's carry.
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
    # A transformation wraps the name that it was applied to, and they nest: "transpose(jvp(Llama))" is "Llama".
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
    # "jit(step)/transpose(jvp(Llama))/while/body/mul" is of the backward pass; "jit(step)/jvp(Llama)/transpose(jvp(f))/mul", a
    # gradient that the forward pass takes, is not. "jit(f)/transpose", an operation of that name, has no parenthesis.
    outermost = re.search(r"(?:^|/)(jvp|transpose)\(", instruction.op_name)
    return outermost is not None and outermost.group(1) == "transpose"


def _made(computation: Computation, name: str) -> tuple[Instruction, Value]:
    """Who made the array of that name in this computation, and the array."""
    instruction = computation.instructions[name]
    value = instruction.values[0] if instruction.values else Value("token", ())
    while instruction.opcode in _HANDED_ON and instruction.operands:
        instruction = computation.instructions[instruction.operands[0]]
    return instruction, value
