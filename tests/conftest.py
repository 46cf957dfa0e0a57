"""What every test shares: eight CPU devices, and which tests can run with what is installed."""

import importlib.util
import os
import pathlib

# Before the first import of jax. A caller's own choice of platform stands: JAX_PLATFORMS=cuda make test.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the suite's time is XLA's, spent on making the machine code of small programs fast: without that it takes two thirds.
# Ten steps whose bits are compared are compiled as users compile them: OPTIMIZED in tests/fused_step/test_step.py.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 " + os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
# The `plan` extra brings a CUDA plug-in that looks for a driver when it loads; only its compiler is used here.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
# What one process has compiled, the others and later runs read: a quarter of the suite's time is spent on programs that it has
# already compiled. JAX's key holds the program, the versions and the flags.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[1] / ".pytest_cache" / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import pytest

HAS_DEMO = all(importlib.util.find_spec(name) for name in ("grain", "matplotlib", "typer", "rich"))
HAS_PLAN = importlib.util.find_spec("jax_cuda12_plugin") is not None

# The core alone (jax, flax, optax and what they bring) runs every other file.
NEED_DEMO = (
    "test_cli.py",
    "test_doctor.py",
    "test_docs.py",
    "test_figures.py",
    "test_notebooks.py",
    "plan",
    "studies",
    "train",
)
collect_ignore = [] if HAS_DEMO else list(NEED_DEMO)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-extras", action="store_true", help="fail where the `demo` or the `plan` extra is missing")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--require-extras") and not (HAS_DEMO and HAS_PLAN):
        raise pytest.UsageError("--require-extras: an extra is missing; install it with: pip install '.[test,plan]'")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [] if HAS_PLAN else [item for item in items if item.get_closest_marker("plan")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter) -> None:
    if not HAS_DEMO:
        terminalreporter.write_line(f"left out, the `demo` extra is not installed: {', '.join(NEED_DEMO)}")
    if not HAS_PLAN:
        terminalreporter.write_line("left out, the `plan` extra is not installed: tests that compile for an H100")
