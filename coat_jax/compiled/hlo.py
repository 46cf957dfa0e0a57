"""Reading XLA's text of a compiled program: computations, instructions, values. Nothing here knows what they mean."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

# What the patterns below read, from a training step over two GPUs that was compiled for an H100. Long lines are cut (...).
#
#     %fused_subtract (param_0.236: bf16[4,256,512], param_1.300: bf16[4,256,512]) -> bf16[4,256,512] {
#       %param_0.236 = bf16[4,256,512]{2,1,0} parameter(0), metadata={...}
#       ...
#       ROOT %sub.11 = bf16[4,256,512]{2,1,0} subtract(%param_0.236, %mul.7), metadata={op_name="jit(step)/sub" ...}
#     }
#     ENTRY %main.14_spmd (param.4: bf16[4,256,512], param.5: bf16[512,512]) -> (bf16[4,256,512], f32[]) {
#
# _START takes the first line of a computation: "ENTRY " or nothing, then its name, fused_subtract. It stands at the margin and
# ends in a brace; the closing brace stands alone. _INSTRUCTION takes an indented line: "ROOT " or nothing, the name sub.11, and
# the rest, which `_instruction` takes apart. _ARRAY takes dtype and dimensions, "bf16" and "4,256,512", and passes the layout
# {2,1,0}; a dimension may be bounded, as in s32[<=8]. _COMMENT takes the /*index=5*/ that XLA puts into long tuples.
_ARRAY = re.compile(r"([a-z]+(?:\d+\w*)?)\[([\d,<=]*)\]")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%(\S+) = (.*)$")
_START = re.compile(r"^(ENTRY )?%(\S+) .*\{$")
_COMMENT = re.compile(r"/\*.*?\*/")


@dataclasses.dataclass(frozen=True)
class Value:
    """One array: XLA's name of its dtype and its dimensions."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes, without padding."""
        # The first number is the bits of an element: bf16 16, f8e4m3fn 8, s4 4. A pred takes a byte; a token has none.
        bits = re.search(r"\d+", self.dtype)
        return self.size * (int(bits.group()) if bits else 8 if self.dtype == "pred" else 0) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line: `values` are the arrays of its result, flat; `operands` are names in the same computation."""

    name: str
    opcode: str
    values: tuple[Value, ...]
    operands: tuple[str, ...]
    attributes: str

    @property
    def op_name(self) -> str:
        """The path of JAX operations that it comes from, or ""."""
        # metadata={op_name="jit(step)/jvp()/while/body/eval_jaxpr/dot_general" ...}; a quote inside the name is written \".
        return self._attribute(r'op_name="((?:[^"\\]|\\.)*)"')

    @property
    def target(self) -> str:
        """What a custom call calls, or ""."""
        # custom-call(%x, %w, ...), custom_call_target="__cublas$lt$matmul$f8", metadata={...}
        return self._attribute(r'custom_call_target="([^"]+)"')

    @property
    def estimated_flops(self) -> float:
        """Operations of a Mosaic GPU kernel, as its launch says; 0 for others and where it does not say."""
        if not self.target.startswith("mosaic_gpu"):
            return 0.0
        # Its launch stands in the backend_config as MLIR text, in which a quote is written \22: ...\22flops\22: 8589934592, ...
        if found := self._attribute(r"flops\\22: (\d+)"):
            return float(found)
        # jax 0.10 leaves the estimate out. bf16[512,768] of f8[512,1024] and f8[768,1024] takes 2 x 512 x 768 x 1024.
        if "/scaled_product/" in self.op_name:
            inner = self._attribute(r"operand_layout_constraints=\{\w+\[\d+,(\d+)\]")
            return 2.0 * self.values[0].size * int(inner)
        return 0.0

    @property
    def index(self) -> int:
        """Which element a get-tuple-element takes, which argument a parameter is."""
        # f32[4]{0} get-tuple-element(%while.54.clone), index=15, metadata={...}
        return int(self._attribute(r"(?:^|, )index=(\d+)") or 0)

    @property
    def body(self) -> str:
        """The computation that a while loop repeats, or ""."""
        # while(%tuple.21), condition=%region_5.6_spmd, body=%region_0.5_spmd, metadata={...}
        return self._attribute(r"body=%([\w.\-]+)")

    @property
    def trip_count(self) -> int:
        """How often a while loop runs where the compiler knows it, else 1."""
        # while(...), ..., backend_config={"known_trip_count":{"n":"4"},"known_init_step":{"init":"0","step":"1"},...}
        return int(self._attribute(r'"known_trip_count":\{"n":"(\d+)"') or 1)

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it runs (a loop's body, a call's target, a fusion's inside)."""
        # fusion(%param.4, %x), kind=kLoop, calls=%fused_subtract and conditional(...), branch_computations={%a.1, %b.2}, ...
        # A loop's condition= is left out: it runs no kernel of interest.
        found = re.findall(r"(?:body|calls|to_apply|true_computation|false_computation)=%([\w.\-]+)", self.attributes)
        for group in re.findall(r"(?:branch_computations|called_computations)=\{([^}]*)\}", self.attributes):
            found += re.findall(r"%([\w.\-]+)", group)
        return tuple(found)

    def _attribute(self, pattern: str) -> str:
        found = re.search(pattern, self.attributes)
        return found.group(1) if found else ""


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order in which they run, and which of them is the result."""

    name: str
    instructions: dict[str, Instruction]
    root: Instruction

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Its parameters by position."""
        found = (i for i in self.instructions.values() if i.opcode == "parameter")
        return {int(i.operands[0]): i for i in found}


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program: its computations and the name of the one that starts."""

    computations: dict[str, Computation]
    entry: Computation


def parse(text: str) -> Module:
    """The module that `compiled.as_text()` shows.

    Raises:
      ValueError: the text holds no entry computation.
    """
    computations: dict[str, Computation] = {}
    lines: dict[str, Instruction] = {}
    name, entry, root = "", None, None
    for line in text.splitlines():
        if start := _START.match(line):
            name, lines, root = start.group(2), {}, None
            entry = name if start.group(1) else entry
        elif line == "}" and root:
            computations[name] = Computation(name, lines, root)
        elif name and (match := _INSTRUCTION.match(line)):
            instruction = _instruction(match.group(2), _COMMENT.sub("", match.group(3)))
            lines[instruction.name] = instruction
            root = instruction if match.group(1) else root
    if entry is None:
        raise ValueError("not the text of a compiled program: it has no ENTRY computation")
    return Module(computations, computations[entry])


# A line behind "%name = ", type, opcode, operands, attributes:
#
#     (bf16[512,512]{1,0}, s8[4194304]{0}) custom-call(%get-tuple-element.262, %copy.43), custom_call_target="...", ...
#
# The type is one array, or a tuple in parentheses, which may be nested: ((bf16[256,512]{1,0}), bf16[512,512]{1,0}) of an
# all-gather-start. Operands are names; a parameter's is its number, parameter(0), and a constant's is its value.
def _instruction(name: str, line: str) -> Instruction:
    end = _closing(line, 0) if line.startswith("(") else line.index(" ")
    shape, rest = line[:end], line[end:].strip()
    opcode, _, _ = rest.partition("(")
    stop = _closing(rest, len(opcode))
    inside, attributes = rest[len(opcode) + 1 : stop - 1], rest[stop:].removeprefix(", ")
    operands = (inside,) if opcode == "parameter" else tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(name, opcode, values(shape), operands, attributes)


def values(shape: str) -> tuple[Value, ...]:
    """The arrays of a printed type, tuples flattened."""
    found = _ARRAY.findall(shape)
    return tuple(Value(dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d)) for dtype, dims in found)


def _closing(text: str, start: int) -> int:
    """The position behind the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.finditer(r"[()]", text[start:]):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return start + match.end()
    return len(text)


def executed(
    module: Module, start: Computation | None = None, times: int = 1
) -> Iterator[tuple[Computation, Instruction, int]]:
    """Every instruction that starts a kernel or a loop, where it stands, and how often one run of the program reaches it.

    Loops count their trips where the compiler knows them. Insides of fusions are not entered.
    """
    computation = start or module.entry
    for instruction in computation.instructions.values():
        yield computation, instruction, times
        if instruction.opcode in ("while", "call", "conditional", "async-start"):
            for name in instruction.called:
                yield from executed(module, module.computations[name], times * instruction.trip_count)
