"""For mkdocstrings: our docstrings say "Example:" where Griffe, which reads them, knows "Examples:" only."""

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Reads "Example:" as a section of runnable examples."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Renames the section in one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
