"""Where results come from and where they go: what every JSON of this library begins with, and how files are written.

Files are replaced whole or not at all, and only where this library wrote what was there before.
"""

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coat_jax

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
STANDARD_OUTPUT = "-"
"""The name that stands for standard output where a command takes a file for its JSON."""
_ORIGIN = {"command": str, "date": str, "versions": dict}


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
      ValueError: an empty name, a folder, a device or a pipe, a file in a folder that does not exist, or one without permission
        to write.
    """
    shown, path = f"{option}={str(path)!r}", Path(path)
    try:
        mode = path.stat().st_mode if path.exists() else None
        if not str(path).strip() or path.name in ("", ".."):
            raise ValueError(f"{shown} is no name of a file; give one such as results.json")
        if not path.parent.is_dir():
            raise ValueError(f"{shown}: there is no folder {str(path.parent)!r}")
        if mode is not None and stat.S_ISDIR(mode):
            raise ValueError(f"{shown} is a folder; give the name of a file")
        if mode is not None and not stat.S_ISREG(mode):
            raise ValueError(f"{shown} is a device or a pipe; give the name of an ordinary file")
        if mode is not None and not os.access(path, os.W_OK):
            raise ValueError(f"{shown} cannot be written; give a file that you may write")
        _probe(path.parent)
    except OSError as error:
        raise ValueError(f"{shown} cannot be written: {error.strerror}; give another file") from None


def check_folder(option: str, path: str | Path) -> None:
    """Refuses a folder into which no file could be written, made first where it does not exist; nothing is made here.

    Raises:
      ValueError: a file, a place below a file, or a place without permission to write.
    """
    shown, path = f"{option}={str(path)!r}", Path(path)
    try:
        there = next(p for p in (path, *path.absolute().parents) if p.exists())
        if not there.is_dir():
            raise ValueError(f"{shown} is a file; name a folder" if there == path else f"{shown}: {str(there)!r} is a file")
        _probe(there)
    except OSError as error:
        raise ValueError(f"{shown} cannot be written: {error.strerror}; give another folder") from None


def _probe(folder: Path) -> None:
    """Makes a file in the folder and removes it: permissions do not tell of read-only devices, nor to an administrator."""
    name = folder / f".coat-jax.{os.getpid()}"
    with open(name, "xb"):
        name.unlink()


def check_new(option: str, path: str | Path) -> None:
    """`check_file`, and folders above the file may be missing: they are made when it is written."""
    if Path(path).parent.is_dir():
        check_file(option, path)
    else:
        check_folder(option, Path(path).parent)


def write(path: str | Path, content: str | bytes | Iterator[Any]) -> None:
    """Writes a file whole or not at all: beside it first, under another name, which then takes its place.

    Whoever reads it meanwhile, and whatever ends this process, finds the old content or the new one.

    Args:
      path: the file; of a link, what it leads to.
      content: text, bytes, or an iterator of the bytes piece by piece.

    Raises:
      OSError: it cannot be written; the message names the file, whose old content stands.
    """
    target = Path(os.path.realpath(path))  # of a link, what it leads to
    beside = target.with_name(f".{target.name[:100]}.{os.getpid()}")
    try:
        with open(beside, "xb") as file:
            pieces = [content.encode("utf-8")] if isinstance(content, str) else content
            file.writelines([pieces] if isinstance(pieces, bytes) else pieces)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            os.chmod(beside, stat.S_IMODE(target.stat().st_mode))
        os.replace(beside, target)
    except OSError as error:
        kept = "; what it held before stands" if target.exists() else ""
        raise OSError(f"{str(path)!r} is not written: {error.strerror}{kept}") from None
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def write_json(path: str | Path, document: Any) -> None:
    """Writes a document as JSON into a file, as `write` does, or to standard output where the path is "-".

    Raises:
      OSError: it cannot be written.
    """
    if str(path) != STANDARD_OUTPUT:
        write(path, compact(document))
    elif sys.stdout is None:
        raise OSError("standard output is closed; give a file")
    else:
        sys.stdout.write(compact(document))
        sys.stdout.flush()


def load(option: str, path: str | Path, pattern: Any) -> dict[str, Any] | None:
    """What an earlier run wrote into a file, to be continued or replaced; None where there is no file or an empty one.

    Args:
      option: what the path was given as, for the message.
      path: the file.
      pattern: what the document is like besides its origin, see `fits`.

    Raises:
      ValueError: a file that cannot be read, or that holds something else.
    """
    check_file(option, path)
    path = Path(path)
    if not path.exists() or not path.stat().st_size:
        return None
    refused = f"{option}={str(path)!r} holds something else than results of this command; it stands, give another file"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{option}={str(path)!r} cannot be read: {error.strerror}; give another file") from None
    except (ValueError, RecursionError):  # no text, no JSON, or nested without end
        raise ValueError(refused) from None
    if not fits(document, _ORIGIN) or not fits(document, pattern):
        raise ValueError(refused)
    return document


def fits(value: Any, pattern: Any) -> bool:
    """Whether JSON has the form of a pattern.

    A pattern is a type (float takes any number); `[p]`, a list of what fits p; `{str: p}`, an object whose values all fit p; or
    `{"name": p, ...}`, an object that has these names at least.

    Example:
      >>> fits({"rows": [{"name": "a", "seconds": 1}]}, {"rows": [{"name": str, "seconds": float}]})
      True
      >>> fits({"rows": [{}]}, {"rows": [{"name": str}]})
      False
    """
    if isinstance(pattern, type):  # a bool is an int to Python, not to JSON
        kinds = (int, float) if pattern is float else pattern
        return isinstance(value, kinds) and (pattern in (bool, object) or not isinstance(value, bool))
    if isinstance(pattern, list):
        return isinstance(value, list) and all(fits(item, pattern[0]) for item in value)
    if not isinstance(value, dict):
        return False
    if set(pattern) == {str}:
        return all(fits(item, pattern[str]) for item in value.values())
    return all(name in value and fits(value[name], part) for name, part in pattern.items())


def check_same(option: str, path: str | Path, old: dict[str, Any], new: dict[str, Any], names: tuple[str, ...]) -> None:
    """Refuses to continue results that were made under other conditions.

    Raises:
      ValueError: one of these names has another value in the old document; the first that differs is shown.
    """
    for name in names:
        before, now = old.get(name), json.loads(json.dumps(new[name]))
        if before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            part = next(key for key in (*now, *before) if before.get(key) != now.get(key))
            name, before, now = f"{name}, {part}", before.get(part), now.get(part)
        raise ValueError(
            f"{option}={str(path)!r} holds results of another run ({name}: {before} there, {now} now); give another place"
        )


def compact(results: Any) -> str:
    """JSON text with lists of numbers on one line each."""
    return re.sub(r"\[[^][{}\"]*\]", lambda m: " ".join(m.group().split()), json.dumps(results, indent=1)) + "\n"
