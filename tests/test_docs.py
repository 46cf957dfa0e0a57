"""README and docs/ tell the truth: their code runs, their commands, links and paths exist, and the front page's diff pays."""

import ast
import importlib.util
import re
import shlex

import front_page
import pages
import pytest
import test_house
import typer

from coat_jax.commands import app

README = pages.README.read_text()
WITH_CODE = [page for page in pages.PAGES if pages.blocks(page.read_text(), "python")]
COMPILING = "compile_for"  # what a page calls that needs the `plan` extra


def needs_plan(page):
    return [pytest.mark.plan] if COMPILING in pages.program(page.read_text()) else []


@pytest.mark.parametrize("page", [pytest.param(page, marks=needs_plan(page), id=pages.name(page)) for page in WITH_CODE])
def test_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(pages.program(page.read_text()), pages.name(page), "exec"), {"__name__": "page"})


@pytest.mark.parametrize("page", WITH_CODE, ids=pages.name)
def test_a_page_with_code_says_what_to_install_and_imports_what_it_uses(page):
    text = page.read_text()
    assert pages.extras(text) is not None, "no line with: pip install ."
    assert ("plan" in pages.extras(text)) == (COMPILING in pages.program(text))


def test_readme_is_short_and_its_first_screen_has_everything():
    lines = README.splitlines()
    assert len(lines) <= 120
    screen = README.split("\n## ")[0]
    assert len(screen.splitlines()) <= 45
    [diff] = pages.blocks(screen, "diff")
    assert sum(line.startswith("+") for line in diff.splitlines()) == 3
    for kind in ("compiled", "measured", "modelled"):
        assert re.search(rf"\| {kind} \|$", screen, re.MULTILINE), kind
    for text in ("pip install .", "make demo", "make test", "](results/plan_llama2_7b.png)"):
        assert text in screen


def test_the_front_pages_program_is_the_quick_starts_after_the_diff():
    _, before, *_ = pages.blocks(front_page.QUICKSTART.read_text(), "python")
    [after] = pages.blocks(README, "python")
    assert ast.dump(ast.parse(after)) == ast.dump(ast.parse(pages.apply_diff(front_page.diff(), before)))
    assert pages.blocks(front_page.QUICKSTART.read_text(), "diff") == [front_page.diff()]


@pytest.mark.plan
@pytest.mark.xdist_group("front page")
def test_the_front_pages_diff_pays():
    """The compiled peak falls by a quarter or more, and both peaks are the committed ones."""
    import figures

    rows = {name: front_page.compiled(source) for name, source in front_page.sources().items()}
    assert rows["after"]["peak_bytes"] <= 0.75 * rows["before"]["peak_bytes"]
    for name, row in figures.load("front_page")["rows"].items():
        assert rows[name]["peak_bytes"] == pytest.approx(row["peak_bytes"], rel=0.005)
        assert rows[name]["parameters"] == row["parameters"]


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_links_lead_somewhere(page):
    for target in pages.links(page.read_text()):
        assert (page.parent / target).exists(), target


def commands(text):
    """Calls of this package's command and modules in shell blocks and in code within sentences, as lists of words."""
    inline = re.findall(r"`((?:coat-jax|python -m) [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    lines = [line for line in pages.shell_lines(text) if re.match(r"coat-jax |python -m (coat_jax|pallas_kernels)", line)]
    return [shlex.split(" ".join(line.split())) for line in inline + lines]


@pytest.mark.parametrize("page", [page for page in pages.PAGES if commands(page.read_text())], ids=pages.name)
def test_commands_and_their_options_exist(page):
    group = typer.main.get_command(app)
    for words in commands(page.read_text()):
        if words[0] == "python":
            assert importlib.util.find_spec(words[2]) is not None, words
            continue
        own = {option for parameter in group.params for option in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
        if words[1].startswith("-"):
            assert words[1] in own, words
            continue
        known = {option for parameter in group.commands[words[1]].params for option in parameter.opts}
        given = {word.split("=")[0] for word in words[2:] if word.startswith("--")}
        assert given <= known | own, f"{given - known} of {words}"


def architecture():
    return (pages.ROOT / "docs" / "architecture.md").read_text()


def test_where_do_i_change_what_names_files_that_exist():
    table = architecture().split("## Where do I change what")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", table, re.MULTILINE)[2:]
    assert len(rows) >= 20
    for question, places in rows:
        paths = re.findall(r"`([\w./]+)`", places)
        assert paths, question
        assert all((pages.ROOT / path).exists() for path in paths), (question, paths)


def test_the_floors_of_the_page_are_those_that_are_enforced():
    [listed] = pages.blocks(architecture(), "text")
    floors = [line.split(maxsplit=2) for line in listed.splitlines() if line.strip()]
    told: dict[int, set[str]] = {}
    level = -1
    for row in floors:
        if row[0].isdigit():
            level, row = int(row[0]), row[1:]
        told.setdefault(level, set()).add(row[0].rstrip("/").removesuffix(".py").replace("/", "."))
    here = [
        {room for room in rooms if any(f"{module}.".startswith(f"{room}.") for module in test_house.PATHS)}
        for rooms in test_house.FLOORS
    ]
    assert [told[level] for level in sorted(told)] == [rooms for rooms in here if rooms]
