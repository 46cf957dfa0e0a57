"""Where results come from: what every JSON of this library begins with."""

import datetime
import importlib.metadata
import json
import os
import platform
import re
from pathlib import Path
from typing import Any

import coat_jax

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


def provenance(command: str, packages: tuple[str, ...] = PACKAGES) -> dict[str, Any]:
    """The command, the date and the versions of Python, this library and `packages` (those that are installed)."""
    versions = {"python": platform.python_version(), "coat-jax": coat_jax.__version__}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"command": command, "date": datetime.date.today().isoformat(), "versions": versions}


def check_file(option: str, path: str | Path) -> None:
    """Refuses what could not be written later, before the work for it begins; the file is left as it is.

    Raises:
      ValueError: a folder, a file in a folder that does not exist, or one without permission to write.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"{option}={str(path)!r}: there is no folder {str(path.parent)!r}")
    if path.is_dir():
        raise ValueError(f"{option}={str(path)!r} is a folder; give the name of a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option}={str(path)!r} cannot be written; give a file that you may write")


def compact(results: Any) -> str:
    """JSON text with lists of numbers on one line each."""
    return re.sub(r"\[[^][{}\"]*\]", lambda m: " ".join(m.group().split()), json.dumps(results, indent=1)) + "\n"
