"""Where copies land in shared memory, read from PTX: neither ptxas nor the interpreter looks.

`cp.async.bulk.tensor` needs a place that is a multiple of 128 bytes (CUDA programming guide, tensor memory access). Registers
are followed along all paths by what is known of their lowest bits: `(bits, low)` stands for all numbers that end in those. With
the shared memory at a multiple of 1024 and a slot number that nobody knows,

    mul.wide.s32 %rd1, %r1, 64       (0, 0) * 64            = (6, 0): a multiple of 64
    add.s64 %rd2, %rd1, 8192         (6, 0) + (10, 0)       = (6, 0): not known to be a multiple of 128, and so reported
"""

import re
from typing import NamedTuple

BITS = 10
COPY = re.compile(
    r"cp\.async\.bulk\.tensor\.\dd\.(?:shared::\w+\.global\S* \[(%\w+)\]|global\.shared::\S* \[.*?\], \[(%\w+)\])"
)
ASSIGNMENT = re.compile(r"(@!?%p\d+\s+)?(\w+)\.(\S+)\s+(%\w+), ([^;]*);")
LABEL = re.compile(r"(\$L__BB\w+):")
BRANCH = re.compile(r"(@!?%p\d+\s+)?bra(?:\.uni)?\s+(\$L__BB\w+);")


class Known(NamedTuple):
    """Numbers whose lowest `bits` bits are `low`."""

    bits: int
    low: int


class Assignment(NamedTuple):
    """register = operation(operands); `sometimes` where a predicate decides."""

    sometimes: bool
    operation: str
    kind: str
    register: str
    operands: list[str]


class Copy(NamedTuple):
    """A tensor copy, and the register that holds its place in shared memory."""

    text: str
    register: str


NOTHING = Known(0, 0)
Registers = dict[str, Known]


def number(value: int) -> Known:
    return Known(BITS, value % 2**BITS)


def trailing_zeros(x: Known) -> int:
    """How many of its lowest bits are known to be 0."""
    return next((i for i in range(x.bits) if x.low >> i & 1), x.bits)


def either(x: Known | None, y: Known) -> Known:
    """What is known of a register that holds one or the other; None is nothing assigned yet."""
    if x is None:
        return y
    bits = next((i for i in range(min(x.bits, y.bits)) if (x.low ^ y.low) >> i & 1), min(x.bits, y.bits))
    return Known(bits, x.low % 2**bits)


def result(operation: str, kind: str, given: list[Known]) -> Known:
    """What an instruction makes of what is known of its operands."""
    if kind.startswith("hi"):
        return NOTHING
    if operation in ("mov", "cvt"):
        return given[0]
    if operation in ("add", "sub"):
        bits = min(x.bits for x in given)
        return Known(bits, (given[0].low + (1 if operation == "add" else -1) * given[1].low) % 2**bits)
    if operation == "mul":
        # x = low + a 2^bits: in the product every unknown part is multiplied by the other's lowest bits.
        x, y = given
        bits = min(BITS, x.bits + trailing_zeros(y), y.bits + trailing_zeros(x))
        return Known(bits, x.low * y.low % 2**bits)
    if operation == "mad":
        return result("add", "", [result("mul", "", given[:2]), given[2]])
    if operation == "shl" and given[1].bits == BITS:
        return result("mul", "", [given[0], number(2 ** min(given[1].low, BITS))])
    if operation == "and":
        return Known(max(map(trailing_zeros, given)), 0)
    return NOTHING


def operand(text: str, known: Registers) -> Known:
    """What is known of an operand."""
    if re.fullmatch(r"-?\d+", text):
        return number(int(text))
    if text.startswith("__dynamic_shmem"):  # Mosaic's own alignment of buffers counts from here
        return number(0)
    return known.get(text, NOTHING)


def pieces(ptx: str) -> list[tuple[list[Assignment | Copy], list[int]]]:
    """The straight pieces of a kernel: assignments and copies, and the numbers of the pieces that may come next."""
    found: list[tuple[list[Assignment | Copy], list[int | str]]] = [([], [])]
    places: dict[str, int] = {}
    for line in map(str.strip, ptx.splitlines()):
        code, following = found[-1]
        if match := LABEL.match(line):
            following.append(len(found))
            places[match[1]] = len(found)
            found.append(([], []))
        elif match := BRANCH.match(line):
            following += [match[2]] + ([len(found)] if match[1] else [])
            found.append(([], []))
        elif line == "ret;":
            found.append(([], []))
        elif match := COPY.search(line):
            code.append(Copy(match[0], match[1] or match[2]))
        elif match := ASSIGNMENT.match(line):
            code.append(Assignment(bool(match[1]), *match.groups()[1:4], match[5].split(", ")))
    return [(code, [places[name] if isinstance(name, str) else name for name in names]) for code, names in found]


def places_depend_on(code: list[Assignment | Copy]) -> set[str]:
    """The registers that places in shared memory are computed from."""
    made_of: dict[str, set[str]] = {}
    for line in code:
        if isinstance(line, Assignment):
            made_of.setdefault(line.register, set()).update(line.operands)
    todo, seen = [line.register for line in code if isinstance(line, Copy)], set()
    while todo:
        register = todo.pop()
        if register not in seen:
            seen.add(register)
            todo += made_of.get(register, ())
    return seen


def copies(text: str) -> list[tuple[str, Known]]:
    """Every tensor copy of some kernels, and what is known of its place in shared memory, whatever path leads to it."""
    found = [copy for kernel in text.split(".version")[1:] for copy in copies_of_kernel(kernel)]
    assert len(found) == len(COPY.findall(text)) > 0  # each is reached, each is understood
    return found


def copies_of_kernel(ptx: str) -> list[tuple[str, Known]]:
    graph = pieces(ptx)
    needed = places_depend_on([line for code, _ in graph for line in code])
    graph = [([line for line in code if line.register in needed], following) for code, following in graph]
    before: dict[int, Registers] = {0: {}}
    found: dict[tuple[int, int], tuple[str, Known]] = {}
    todo = [0]
    while todo:
        i = todo.pop()
        known = dict(before[i])
        for j, line in enumerate(graph[i][0]):
            if isinstance(line, Copy):
                found[i, j] = line.text, known.get(line.register, NOTHING)
            else:
                value = result(line.operation, line.kind, [operand(text, known) for text in line.operands])
                known[line.register] = either(known.get(line.register), value) if line.sometimes else value
        for other in graph[i][1]:
            old = before.get(other)
            new = known if old is None else old | {name: either(old.get(name), x) for name, x in known.items()}
            if new != old:
                before[other] = new
                todo.append(other)
    return list(found.values())


def misaligned(text: str, multiple: int = 128) -> list[str]:
    """The tensor copies whose place is not known to be a multiple of so many bytes."""
    return [f"{copy}: {known}" for copy, known in copies(text) if 2 ** trailing_zeros(known) < multiple]
