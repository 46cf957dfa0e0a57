"""The README and every page of docs/ as a newcomer runs them: a fresh environment with only what the page says to install.

python tests/support/fresh_pages.py [PYTHON]        some minutes; ends with status 1 and what a page said that fails
"""

import concurrent.futures
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pages


def main(python: str) -> None:
    """Installs what pages ask for, least first, and runs each page's program in an empty folder."""
    with_code = [page for page in pages.PAGES if pages.blocks(page.read_text(), "python")]
    asked = sorted({tuple(sorted(pages.extras(page.read_text()) or ())) for page in with_code}, key=_cost)
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "PYTHON", "VIRTUAL_ENV"))}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", f"{folder}/venv"], check=True)
        for extras in asked:
            # Each set holds the one before (plan has demo, demo the core), so one environment grows with what is asked for.
            package = f"{pages.ROOT}[{','.join(extras)}]" if extras else str(pages.ROOT)
            command = [f"{folder}/venv/bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package]
            subprocess.run(command, check=True, env=keep)
            here = [page for page in with_code if tuple(sorted(pages.extras(page.read_text()) or ())) == extras]
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                list(pool.map(lambda page: _run(page, Path(folder), keep), here))


def _cost(extras: tuple[str, ...]) -> int:
    """The order in which sets of extras contain each other."""
    return 2 * ("plan" in extras) + ("demo" in extras)


def _run(page: Path, folder: Path, environment: dict[str, str]) -> None:
    began, empty = time.monotonic(), Path(tempfile.mkdtemp(dir=folder))
    command = [f"{folder}/venv/bin/python", "-c", pages.program(page.read_text())]
    done = subprocess.run(
        command, cwd=empty, env=environment | pages.exports(page.read_text()), capture_output=True, text=True, timeout=600
    )
    print(f"{'ok' if done.returncode == 0 else 'FAILED'}  {pages.name(page)}  {time.monotonic() - began:.0f} s", flush=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else sys.executable)
