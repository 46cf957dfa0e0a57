"""The pages that people read, the README and docs/: their code, what they say to install, their diffs and their links."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name(page: Path) -> str:
    """The page's path from the root."""
    return page.relative_to(ROOT).as_posix()


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of a language, whole lines."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def program(text: str) -> str:
    """All Python blocks of a page as one program: they share names."""
    return "\n".join(blocks(text, "python"))


def shell_lines(text: str) -> list[str]:
    """The lines of the shell blocks, without comments."""
    lines = [re.sub(r"\s+#.*", "", line).strip() for block in blocks(text, "bash") for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def extras(text: str) -> frozenset[str] | None:
    """The extras of this package that a page says to install; None where it says to install nothing.

    A page may name several ways; the first is taken, as a reader takes it.
    """
    found = re.search(r"pip install '?\.(?:\[([\w,]+)\])?'?(?=\s|`|$)", text, re.MULTILINE)
    return None if found is None else frozenset((found[1] or "").split(",")) - {""}


def exports(text: str) -> dict[str, str]:
    """The environment variables that a page says to export."""
    pairs = (re.fullmatch(r"export (\w+)=(\S+)", line) for line in shell_lines(text))
    return {pair[1]: pair[2] for pair in pairs if pair}


def apply_diff(diff: str, text: str) -> str:
    """`text` with every "-" line replaced by the "+" lines behind it; "+" lines before the first "-" go to the last import.

    Raises:
      AssertionError: a "-" line that the text does not have once.
    """
    lines, old = text.splitlines(), None
    for change in diff.splitlines():
        sign, line = change[0], change[1:]
        if sign == "-":
            assert lines.count(line) == 1, f"the program has {lines.count(line)} lines {line!r}"
            old = lines.index(line)
            del lines[old]
        elif sign == "+" and old is not None:
            lines.insert(old, line)
            old += 1
        elif sign == "+":
            last = max(i for i, known in enumerate(lines) if re.match(r"(import|from) ", known))
            lines.insert(last + 1, line)
    return "\n".join(lines) + "\n"


def links(text: str) -> list[str]:
    """Targets of the links and pictures of a page, without their anchors."""
    targets = [
        target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    ]
    return [target for target in targets if target and "://" not in target]
