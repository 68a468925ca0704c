"""README.md and docs/ are true: their code runs, outputs match, and links lead somewhere."""

from __future__ import annotations

import re
import shlex
import sys
from contextlib import redirect_stdout
from doctest import ELLIPSIS, OutputChecker
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import maxattn as ma
from maxattn.tools.cli import main
from tests.pages import ROOT, Block, blocks, lines_outside_of_fences, pages, text_of
from tests.waiting import but

RUN, LOADED = ("python", "sh"), ("yaml",)
SHOWN = ("text", "{eval-rst}")
# The tests of these models' modules are beside the modules.
RUN_MODELS = ("streaming", "models", "modules", "maxdiffusion", "sampling", "scan")
WIDTH, README_LINES = 100, 120
PAGE = re.compile(r"\bdocs/[\w/-]+\.(?:md|txt|json|png)\b")
# Files of which pages speak that somebody else has.
MADE = ("scheduler/scheduler_config.json", "model_index.json", "maxattn/kernels/mine.py")
LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")
CONFIG = re.compile(r"# ([\w/]+\.yml)\n")
FILE = re.compile(r"`((?:[\w.]+/)*\w+\.(?:py|yml|json|sh))`")
FOLDER = re.compile(r"`((?:[\w.]+/)+|(?:[\w.]+/)*\w+\.(?:py|yml|json|sh|md))`")
# Pages of folders, for those who change them.
READMES = [str(path.relative_to(ROOT)) for path in (ROOT / "maxattn").rglob("README.md")]
READMES += ["benchmarks/README.md"]


# ---- what blocks do ------------------------------------------------------------------------------


def run_page(page: str) -> None:
    """Run the blocks of a page in order and in one namespace; compare marked outputs."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    for block in blocks(page):
        if block.mark == "output":
            check_output(block, printed)
        elif not block.mark and block.language not in SHOWN:
            printed = run_block(block, names)


def run_block(block: Block, names: dict[str, Any]) -> str:
    """Run or load one block; return its output."""
    with redirect_stdout(StringIO()) as out:
        if block.language == "python":
            # Line breaks before the code: a traceback then names the line of the page.
            source = "\n" * block.line + block.text
            exec(compile(source, ROOT / block.page, "exec", dont_inherit=True), names)
        elif block.language == "yaml":
            load(block)
        else:
            for command in commands(block):
                run_command(block, command)
    return out.getvalue()


def commands(block: Block) -> list[str]:
    """Split a block into commands; a backslash at the end continues a line."""
    return [line for line in block.text.replace("\\\n", "").splitlines() if line.strip()]


def run_command(block: Block, command: str) -> None:
    """Run a command of maxattn in this process, as a shell would."""
    name, *words = shlex.split(command, comments=True)
    assert name == "maxattn", f"{block.where}: only maxattn runs here; mark it <!-- needs: ... -->"
    assert main(words) == 0, f"{block.where}: `{command}` ended with an error"


def load(block: Block) -> None:
    """Load a config; a first line `# NAME.yml` saves it as that file for later blocks."""
    named = CONFIG.match(block.text)
    path = Path(named[1] if named else "block.yml")
    path.write_text(block.text)
    ma.AttentionConfig.from_yaml(path)


def check_output(block: Block, printed: str) -> None:
    """Compare a block of output with the actual output."""
    if not OutputChecker().check_output(block.text, printed, ELLIPSIS):
        paste = f"```text\n{printed.rstrip()}\n```"
        raise AssertionError(f"{block.where}: paste this ('...' for what may differ):\n{paste}")


@pytest.fixture
def root_of_pages(tmp_path, monkeypatch):
    """Change into an empty folder with configs and examples; undo imports from them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for folder in ("configs", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def is_quick(page):
    """Check whether a page is fast enough for `make test`: no notebook, and no models."""
    return "notebooks" not in str(page) and Path(page).stem not in RUN_MODELS


@pytest.mark.usefixtures("root_of_pages")
@pytest.mark.parametrize("page", but(pages(), is_quick))
def test_the_blocks_of_a_page_run(page):
    run_page(page)


@pytest.mark.parametrize("page", pages())
def test_every_block_runs_or_says_what_it_needs(page):
    for block in blocks(page):
        shown = block.mark or block.language in (*RUN, *LOADED, *SHOWN)
        assert shown, f"{block.where}: a block in '{block.language}' is neither run nor marked"


@pytest.mark.parametrize("page", pages())
def test_fences_and_marks_are_read(page):
    """Blocks that the parser misses would not be run."""
    text, found = text_of(page), list(blocks(page))
    assert text.count("```") == 2 * len(found)
    marks = re.findall(r"^<!-- (?!site: ).* -->$", text, re.MULTILINE)
    assert len(marks) == sum(bool(block.mark) for block in found)


def test_the_plan_of_the_readme_is_compared():
    assert [block.mark for block in blocks("README.md")].count("output") >= 1


def test_a_wrong_output_says_what_to_paste():
    block = Block("README.md", 7, "text", "runs ring\n", "output")
    with pytest.raises(AssertionError, match=r"README.md:7: paste this .*\n```text\nruns x\n```"):
        check_output(block, "runs x\n")


# ---- the form of pages ---------------------------------------------------------------------------


def test_the_readme_is_short():
    lines = text_of("README.md").splitlines()
    assert len(lines) <= README_LINES
    assert max(map(len, lines)) <= WIDTH


@pytest.mark.parametrize("page", pages())
def test_lines_of_prose_fit(page):
    lines = lines_outside_of_fences(page)
    wide = [n for n, line in lines if len(line) > WIDTH and not line.startswith("|")]
    assert not wide, f"{page}: lines {wide} are over {WIDTH} columns"


@pytest.mark.parametrize("page", [*pages(), "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page):
    prose = "\n".join(line for _, line in lines_outside_of_fences(page))
    for target in LINK.findall(prose):
        if not target.startswith(("http://", "https://")):
            assert leads(ROOT / page, target), f"{page}: the link {target} leads nowhere"


@pytest.mark.parametrize("page", [*pages(), "CONTRIBUTING.md", *READMES])
def test_files_that_are_named_are_there(page):
    names = FOLDER if page in (*READMES, "docs/architecture.md") else FILE
    roots = ROOT, ROOT / "maxattn", ROOT / "examples/maxattn_examples", (ROOT / page).parent
    for name in names.findall("\n".join(line for _, line in lines_outside_of_fences(page))):
        there = any((root / name).exists() for root in roots)
        assert there or name in MADE, f"{page}: there is no {name}"


def test_a_release_has_at_most_forty_entries():
    releases = re.split(r"^## ", text_of("CHANGELOG.md"), flags=re.MULTILINE)[1:]
    assert all(len(re.findall(r"^- ", each, re.MULTILINE)) <= 40 for each in releases)


def test_measured_rows_are_cited():
    """Every file of docs/measured is cited in a page of results."""
    text = text_of("docs/results.md") + text_of("docs/results_tpu.md")
    cited = set(re.findall(r"measured/([\w.-]+)", text))
    assert {path.name for path in (ROOT / "docs/measured").iterdir()} == cited


def test_pages_that_code_names_are_there():
    for folder in ("maxattn", "examples", "configs", "tests"):
        for file in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.yml")]:
            for name in PAGE.findall(file.read_text(encoding="utf-8", errors="replace")):
                assert (ROOT / name).exists(), f"{file.relative_to(ROOT)}: there is no {name}"


def leads(page: Path, target: str) -> bool:
    """Check whether a link leads to a file, and to a heading if it names one."""
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not anchor:
        return file.exists()
    headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return anchor in map(slug, headings)


def slug(heading: str) -> str:
    """Return GitHub's anchor for a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
