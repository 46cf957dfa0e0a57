"""Where results come from: what every JSON of this library begins with."""

import datetime
import importlib.metadata
import json
import platform
import re
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


def compact(results: Any) -> str:
    """JSON text with lists of numbers on one line each."""
    return re.sub(r"\[[^][{}\"]*\]", lambda m: " ".join(m.group().split()), json.dumps(results, indent=1)) + "\n"
