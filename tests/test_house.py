"""The layout of the house: imports only go down, nothing is global, nothing loads early, everything is explained."""

import ast
import doctest
import functools
import graphlib
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HAS_DEMO

ROOT = Path(__file__).parent.parent
FLOORS = {
    "pallas_kernels": 0,
    "coat_jax.quant": 1,
    "coat_jax.ops": 3,
    "coat_jax.optim": 3,
    "coat_jax.recipes": 4,
    "coat_jax.linen": 4,
    "coat_jax.nnx": 4,
    "coat_jax.parallel": 4,
    "coat_jax.models": 5,
    "coat_jax.train": 6,
    "coat_jax.plan": 6,
    "coat_jax.export": 6,
    "coat_jax.cli": 7,
}
NEED_DEMO = ("coat_jax.cli", "coat_jax.train", "coat_jax.plan")


def sources():
    """Every module of the two packages: name -> path."""
    files = [path for package in ("coat_jax", "pallas_kernels") for path in (ROOT / package).rglob("*.py")]
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files}
    return {name: path for path, name in names.items()}


SOURCES = sources()


@functools.cache
def imports(name):
    """Modules that `name` imports: (module, whether when it loads, line). Those for type checkers alone do not count."""
    found = []

    def walk(node, loading):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            found.extend((alias.name, loading, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.append((inner if inner in SOURCES else node.module, loading, node.lineno))
        for child in ast.iter_child_nodes(node):
            walk(child, loading and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))

    walk(ast.parse(SOURCES[name].read_text()), True)
    return found


def floor(name):
    """The floor on which a module stands; None for the package's own front door."""
    return next((level for prefix, level in FLOORS.items() if name == prefix or name.startswith(prefix + ".")), None)


def test_every_module_has_a_floor():
    assert [name for name in SOURCES if floor(name) is None] == ["coat_jax"]


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "coat_jax"])
def test_imports_only_go_down(name):
    here = floor(name)
    upward = [f"line {line}: {other}" for other, _, line in imports(name) if (floor(other) or 0) > here]
    assert not upward
    if here == 3:  # ops and optim do not know each other
        package = name.split(".")[1]
        assert not [other for other, _, _ in imports(name) if floor(other) == 3 and other.split(".")[1] != package]
    if here == 0:
        own = {other.split(".")[0] for other, _, _ in imports(name)} & {"coat_jax", "flax", "optax"}
        assert not own, f"the kernels know jax only, not {own}"


def test_no_import_cycles():
    graph = {name: {other for other, loading, _ in imports(name) if loading and other in SOURCES} - {name} for name in SOURCES}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError with the cycle


MUTATORS = {"append", "extend", "add", "update", "setdefault", "pop", "clear", "insert", "remove"}


def changed_name(node):
    """The name of the container that a piece of code changes in place, if that is what it does."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
        return node.func.value.id if node.func.attr in MUTATORS else None
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del) and isinstance(node.value, ast.Name):
        return node.value.id
    return None


@pytest.mark.parametrize("name", SOURCES)
def test_no_private_part_of_jax_and_no_global_that_changes(name):
    assert not [other for other, _, _ in imports(name) if other.startswith(("jax._src", "jaxlib"))]
    tree = ast.parse(SOURCES[name].read_text())
    targets = [t for node in tree.body if isinstance(node, ast.Assign) for t in node.targets]
    targets += [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
    shared = {target.id for target in targets if isinstance(target, ast.Name)}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for node in (inner for function in functions for inner in ast.walk(function)):
        assert not isinstance(node, ast.Global), f"line {node.lineno}: a global statement"
        assert changed_name(node) not in shared, f"line {node.lineno}: {changed_name(node)} is shared by all callers"


def test_import_loads_neither_flax_nor_kernels():
    code = (
        "import sys, coat_jax; bad = [m for m in sys.modules if m.split('.')[0] in ('flax', 'optax', 'pallas_kernels', 'typer')"
        " or m.startswith('jax.experimental.pallas')]; sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_every_lazy_name_loads():
    import coat_jax

    for name in coat_jax.__all__:
        assert getattr(coat_jax, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = coat_jax.nothing


def loadable():
    """Public modules that can be imported with what is installed."""
    names = [name for name in SOURCES if not any(part.startswith("_") for part in name.split("."))]
    return sorted(name for name in names if HAS_DEMO or not name.startswith(NEED_DEMO))


@pytest.mark.parametrize("name", loadable())
def test_public_things_are_explained_and_their_examples_run(name):
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    for label, thing in inspect.getmembers(module):
        own = getattr(thing, "__module__", None) == name and (inspect.isclass(thing) or inspect.isfunction(thing))
        if own and not label.startswith("_"):
            assert inspect.getdoc(thing), f"{name}.{label} has no docstring"
            for inner, method in vars(thing).items() if inspect.isclass(thing) else ():
                if inspect.isfunction(method) and method.__module__ == name and not inner.startswith("_"):
                    assert method.__doc__, f"{name}.{label}.{inner} has no docstring"
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert result.failed == 0
