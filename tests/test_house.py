"""The house's own rules, read from its source: which way imports go, what a module may hold, how long a function may be.

Floors go up, as `FLOORS` lists them. An import goes down to a lower floor or stays in its own room, wherever it stands: at the
top of a file, in a function, for type checkers alone, or in a string that is given to an importer.
"""

import ast
import doctest
import functools
import importlib
import pathlib
import re
import subprocess
import sys

import pytest
from conftest import HAS_DEMO

from pallas_kernels import backend

ROOT = pathlib.Path(__file__).parents[1]
FLOORS = (
    ("pallas_kernels", "coat_jax.compiled", "coat_jax.parallel"),
    ("coat_jax.quant",),
    ("coat_jax",),  # the front door: it names what is below and above, and imports nothing
    ("coat_jax.ops", "coat_jax.optim", "coat_jax.results", "coat_jax.interrupts"),
    ("coat_jax.recipes", "coat_jax.flax_arguments"),
    ("coat_jax.linen", "coat_jax.nnx"),
    ("coat_jax.models", "coat_jax.conversion"),
    ("coat_jax.fused_step",),
    ("coat_jax.pretrained", "coat_jax.train"),
    ("coat_jax.studies", "coat_jax.plan", "coat_jax.bench"),
    ("coat_jax.doctor",),
    ("coat_jax.commands",),
    ("coat_jax.cli", "coat_jax.__main__"),
)
"""Rooms, lowest floor first. Rooms of one floor do not know each other."""
CONTAINERS = {"dict", "list", "set", "defaultdict", "OrderedDict", "Counter", "deque", "bytearray"}
MUTATORS = {"append", "add", "update", "extend", "insert", "pop", "popitem", "clear", "remove", "discard", "setdefault"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def module_name(path: pathlib.Path) -> str:
    """Dotted name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {
    module_name(path): path for package in ("coat_jax", "pallas_kernels") for path in sorted((ROOT / package).rglob("*.py"))
}
every_module = pytest.mark.parametrize("module", PATHS)


@functools.cache
def tree(module: str) -> ast.Module:
    """Syntax tree of one of our modules."""
    return ast.parse(PATHS[module].read_text(encoding="utf-8"))


def imports_of(module: str, source: ast.Module, ours: frozenset[str]) -> list[tuple[str, int]]:
    """Every module that a source imports, with the line. `from a import b` is a.b where that is a module of ours.

    Strings count where they are the name of a module of ours, as `importlib.import_module`, `runpy` and `python -m` take it, or
    hold an import statement, as `python -c` does. Docstrings do not count.
    """
    found = []
    for node in code(source):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: a relative import; write the module's full name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [(name if name in ours else node.module, node.lineno) for name in names]
            if not any(name in ours for name in names):
                found += [(name, node.lineno) for name in names if name.startswith("jax.")]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            statements = re.findall(r"(?:^|;|\n)\s*(?:import|from) ([\w.]+)(?: import (\w+))?", node.value)
            named = [f"{a}.{b}" if f"{a}.{b}" in ours else a for a, b in statements]
            found += [(name, node.lineno) for name in (node.value, *named) if name in ours]
    return found


def imported(module: str) -> list[tuple[str, int]]:
    """What one of our modules imports. The front door names every floor on purpose; only what it loads counts there."""
    source = tree(module)
    if module == "coat_jax":
        source = ast.Module([node for node in source.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
    return imports_of(module, source, frozenset(PATHS))


def place(module: str) -> tuple[int, str]:
    """Number of a module's floor and its room there: the longest listed name that the module's begins with."""
    rooms = [
        (len(room), level, room) for level, row in enumerate(FLOORS) for room in row if f"{module}.".startswith(f"{room}.")
    ]
    _, level, room = max(rooms)
    return level, room


def upward(module: str, imports: list[tuple[str, int]], ours: frozenset[str]) -> list[str]:
    """What is wrong with a module's imports: those to a higher floor, or to another room of its own."""
    level, room = place(module)
    wrong = []
    for name, line in imports:
        if name in ours:
            other = place(name)
            if other[0] > level or (other[0] == level and other[1] != room):
                wrong.append(f"{module}:{line} imports {name}, which is not below it")
    return wrong


def circles(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The part of a graph that is left when everything is taken off that needs nothing more: empty where there is no circle."""
    while leaves := {name for name, below in graph.items() if not below}:
        graph = {name: below - leaves for name, below in graph.items() if name not in leaves}
    return graph


def definitions(module: str):
    """Functions, methods and classes of a module, each as (qualified name, node); what a function defines inside is its own."""

    def walk(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
                yield prefix + child.name, child
            if isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")
            elif not isinstance(child, FUNCTIONS):
                yield from walk(child, prefix)

    yield from walk(tree(module), "")


def code(source: ast.Module):
    """All nodes of a source but its docstrings."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(source)
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(node, clean=False) is not None
    }
    return (node for node in ast.walk(source) if id(node) not in docstrings)


def test_every_module_has_a_floor():
    homeless = [module for module in PATHS if place(module)[1] == "coat_jax" and module != "coat_jax"]
    assert not homeless, f"no floor for {homeless}; add them to FLOORS"


@every_module
def test_imports_go_down(module):
    assert not upward(module, imported(module), frozenset(PATHS))


def test_rooms_and_files_make_no_circles():
    files = {module: {name for name, _ in imported(module) if name in PATHS} for module in PATHS}
    rooms: dict[str, set[str]] = {}
    for module, below in files.items():
        rooms.setdefault(place(module)[1], set()).update({place(name)[1] for name in below} - {place(module)[1]})
    assert not circles(files), f"these import each other in a circle: {circles(files)}"
    assert not circles(rooms), f"these rooms import each other in a circle: {circles(rooms)}"


PLANTED = {
    "at the top": "from coat_jax.plan import command",
    "in a function": "def f():\n    from coat_jax.plan import command",
    "for type checkers": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from coat_jax.plan import command",
    "by import_module": "import importlib\ncommand = importlib.import_module('coat_jax.plan.command')",
    "by runpy": "import runpy\nrunpy.run_module('coat_jax.plan.command')",
    "in a process": "import subprocess\nsubprocess.run(['python', '-c', 'import sys; from coat_jax.plan import command'])",
    "to a neighbour": "from coat_jax.optim import adamw",
}


@pytest.mark.parametrize("source", PLANTED.values(), ids=PLANTED)
def test_a_planted_import_is_found(source):
    found = imports_of("coat_jax.ops.linear", ast.parse(source), frozenset(PATHS))
    assert upward("coat_jax.ops.linear", found, frozenset(PATHS))
    assert not upward("coat_jax.cli", found, frozenset(PATHS))


def test_a_planted_circle_is_found():
    planted = {"plan": {"bench"}, "bench": {"plan"}, "cli": {"plan"}}
    assert circles(planted) == planted
    assert not circles({"plan": {"quant"}, "quant": set(), "cli": {"plan"}})


def test_the_ground_floor_imports_jax_only():
    allowed = {"jax", "numpy", "pallas_kernels", "coat_jax", *sys.stdlib_module_names}
    for module in PATHS:
        if module.startswith(("pallas_kernels", "coat_jax.compiled", "coat_jax.parallel")):
            for name, line in imported(module):
                assert name.split(".")[0] in allowed, f"{module}:{line} imports {name}"


def dotted(node: ast.AST) -> str:
    """a.b.c as written; a string constant as itself; empty for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@every_module
def test_private_jax_and_pallas_are_kept_out(module):
    """`jax._src` nowhere; `jax.experimental.pallas` in one file, which knows the differences between versions."""
    named = imported(module) + [
        (dotted(node), node.lineno) for node in code(tree(module)) if isinstance(node, ast.Attribute | ast.Constant)
    ]
    for name, line in named:
        assert not re.match(r"jax\._src\b", name), f"{module}:{line} names {name}"
        if module != "pallas_kernels.backend":
            assert not re.match(r"jax\.experimental\.pallas\b", name), f"{module}:{line} names {name}"


@every_module
def test_nothing_at_module_level_changes(module):
    """A list, dict or set at module level is a constant: its name is in capitals (or a dunder), and no code in the module
    assigns an item of a module-level name, calls a method on one that changes it, or says `global`. So a table is allowed and a
    registry is not. Caches of pure functions are allowed: what they return does not depend on what was called before.
    """
    names = set()
    for node in tree(module).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            mine = {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
            names |= mine
            built = isinstance(node.value, ast.Call) and dotted(node.value.func).split(".")[-1] in CONTAINERS
            if built or isinstance(node.value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp):
                loose = [name for name in mine if not re.fullmatch(r"_{0,2}[A-Z][A-Z0-9_]*|__\w+__", name)]
                assert not loose, f"{module}:{node.lineno}: {loose} can change; a constant's name is in capitals"
    for node in ast.walk(tree(module)):
        assert not isinstance(node, ast.Global), f"{module}:{node.lineno}: global"
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            assert dotted(node.value) not in names, f"{module}:{node.lineno} writes into {dotted(node.value)}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            assert dotted(node.func.value) not in names, f"{module}:{node.lineno} changes {dotted(node.func.value)}"


@every_module
def test_numbers_of_the_formats_live_in_one_place(module):
    if module != "coat_jax.quant.formats":
        for node in code(tree(module)):
            if isinstance(node, ast.Constant) and type(node.value) in (int, float):
                assert node.value not in (448, 57344), f"{module}:{node.lineno} writes {node.value}; use a Format's max"


@every_module
def test_public_names_have_docstrings(module):
    assert ast.get_docstring(tree(module)) or not tree(module).body, f"{module} has no docstring"
    for name, node in definitions(module):
        if not any(part.startswith("_") for part in name.split(".")):
            assert ast.get_docstring(node), f"{module}:{node.lineno}: {name} has no docstring"


@every_module
def test_sizes(module):
    """350 lines in a file, 60 in a function's body under its docstring, 8 parameters that may be given by position."""
    assert len(PATHS[module].read_text(encoding="utf-8").splitlines()) <= 350
    for node in ast.walk(tree(module)):
        if isinstance(node, FUNCTIONS):
            first = node.body[min(ast.get_docstring(node) is not None, len(node.body) - 1)]
            assert node.end_lineno - first.lineno < 60, f"{module}:{node.lineno}: {node.name} is too long"
            positional = [arg.arg for arg in node.args.posonlyargs + node.args.args if arg.arg not in ("self", "cls")]
            assert len(positional) <= 8, f"{module}:{node.lineno}: {node.name} takes {positional} by position"


def test_median_file_is_short():
    lengths = sorted(len(path.read_text(encoding="utf-8").splitlines()) for path in PATHS.values())
    assert lengths[len(lengths) // 2] <= 150


def loaded(statement: str) -> set[str]:
    """Modules that a fresh interpreter has loaded after a statement."""
    script = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    return set(done.stdout.split())


def test_the_front_door_loads_neither_jax_nor_flax_nor_pallas():
    modules = loaded("import coat_jax")
    heavy = {
        "jax",
        "numpy",
        "flax",
        "optax",
        "orbax",
        "pallas_kernels",
        "jax.experimental.pallas",
        "grain",
        "matplotlib",
        "typer",
        "rich",
    }
    assert not modules & heavy


def test_every_public_name_exists():
    """All names in `coat_jax.__all__` load, in one fresh interpreter, and dir() lists them."""
    names = "coat_jax.__all__"
    assert "flax" in loaded(
        f"import coat_jax\nfor name in {names}: getattr(coat_jax, name)\nassert set(dir(coat_jax)) >= set({names})"
    )


def test_an_unknown_name_is_refused():
    import coat_jax

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = coat_jax.nothing


# Examples run where their module's extra is installed, those of kernels where jax interprets kernels.
LEFT_OUT = () if HAS_DEMO else ("coat_jax.commands", "coat_jax.train", "coat_jax.studies", "coat_jax.plan", "coat_jax.doctor")
LEFT_OUT += () if backend.can_interpret else ("pallas_kernels",)
WITH_EXAMPLES = [module for module, path in PATHS.items() if ">>>" in path.read_text() and not module.startswith(LEFT_OUT)]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_in_docstrings_run(module):
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    result = doctest.testmod(importlib.import_module(module), optionflags=options)
    assert result.attempted and not result.failed
