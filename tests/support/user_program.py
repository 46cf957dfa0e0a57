"""Programs as users run them: a process of its own, in an empty folder, without what the suite puts into its environment."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUITE = (
    "JAX_PLATFORMS",
    "XLA_FLAGS",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK",
    "COLUMNS",
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES",
)


def environment(**more: str) -> dict[str, str]:
    """The caller's environment without the suite's part, this checkout importable, and `more`."""
    paths = os.pathsep.join(str(ROOT / part) for part in ("", "tests", "tests/support"))
    return {k: v for k, v in os.environ.items() if k not in SUITE} | {"PYTHONPATH": paths, **more}


def run(program: str, folder: Path, *, timeout: float = 240, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs the text of a program; `more` is added to its environment."""
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
