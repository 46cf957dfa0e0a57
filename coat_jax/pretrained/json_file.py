"""JSON that a stranger wrote: of bounded length, an object, no name twice."""

import json
import os
from pathlib import Path
from typing import Any

LONGEST = 2**24
"""Bytes of JSON that are read: 100,000 tensors take about half of it."""


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """The object that a text holds.

    Args:
      text: JSON in UTF-8.
      where: what to call it in messages.

    Raises:
      ValueError: other text, a number too long for Python, a name twice in an object.

    Example:
      >>> parse_object(b'{"a": 1}', "config.json")
      {'a': 1}
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"{next(name for name in names if names.count(name) > 1)[:100]!r} is there twice")
        return made

    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {error}; it has to be JSON with each name once") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where}: {type(found).__name__} in place of a JSON object")
    return found


def read_object(path: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
      ValueError: no such file, one that cannot be read or is too long, or what `parse_object` refuses.
    """
    try:
        if not path.is_file():
            raise ValueError(f"{path}: there is no such file")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > LONGEST:
                raise ValueError(f"{path} is longer than {LONGEST} bytes, which no file of this kind is")
            text = file.read(size)  # as many as there are: Python makes room for all that it is asked for
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    return parse_object(text, str(path))
