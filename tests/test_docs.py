"""The code in README and docs runs.

The ``python`` blocks of a page are executed in order, in one module, in an empty folder. A block under the comment
``<!-- not run: why -->`` is left out. ``console`` blocks under the comment ``<!-- run -->`` have their lines
``$ creditscope ...`` executed after the page's Python. A page with ``<!-- slow: why -->`` waits for ``make slow``.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from markdown_it import MarkdownIt

import creditscope

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, its text, its first line and the comment right above it."""

    language: str
    text: str
    line: int
    comment: str


def blocks(page: Path) -> Iterator[Block]:
    comment = ""
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type == "fence":
            assert token.map is not None
            yield Block(token.info.strip(), token.content, token.map[0] + 1, comment)
        comment = token.content.strip() if token.type == "html_block" else ""


def wanted(page: Path) -> list[Block]:
    return [
        block
        for block in blocks(page)
        if (block.language == "python" and not re.match(r"<!-- not run: \S", block.comment))
        or (block.language == "console" and block.comment == "<!-- run -->")
    ]


def pages_with_code() -> list:
    return [
        pytest.param(page, id=page.name, marks=[pytest.mark.slow] if "<!-- slow:" in page.read_text("utf-8") else [])
        for page in PAGES
        if wanted(page)
    ]


def run_python(page: Path, block: Block, module: ModuleType) -> None:
    at_its_line = "\n" * block.line + block.text  # so that a traceback points into the page
    exec(compile(at_its_line, str(page), "exec"), module.__dict__)


def run_console(block: Block) -> None:
    creditscope = str(Path(sys.executable).with_name("creditscope"))
    for line in block.text.splitlines():
        if line.startswith("$ creditscope "):
            done = subprocess.run([creditscope, *shlex.split(line)[2:]], capture_output=True, text=True)
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", pages_with_code())
def test_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = ModuleType(f"page_{page.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look their annotations up
    todo = wanted(page)
    for block in todo:
        if block.language == "python":
            run_python(page, block, module)
    for block in todo:
        if block.language == "console":
            run_console(block)


def test_blocks_left_out_say_why():
    for page in PAGES:
        for block in blocks(page):
            assert not block.comment.startswith("<!-- not run -->"), f"{page.name}:{block.line} gives no reason"


def test_a_page_is_read_as_described(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\na = 1\n```\ntext\n\n"
        "<!-- not run: needs a cluster -->\n```python\nb\n```\n\n"
        "```python\nassert a\n```\n\n"
        "```console\n$ creditscope list\n```\n\n"
        "<!-- run -->\n```console\n$ creditscope --version\n```\n"
    )
    assert [block.text for block in wanted(page)] == ["a = 1\n", "assert a\n", "$ creditscope --version\n"]


def test_every_public_name_has_its_place_in_the_reference():
    reference = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\.\. public:: creditscope\.(\w+)$", reference, re.MULTILINE)
    assert sorted(documented) == sorted(set(creditscope.__all__) - {"__version__"})


@pytest.mark.slow
def test_docs_build_without_a_warning(tmp_path):
    pytest.importorskip("sphinx", reason="the docs extra is not installed")
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-d", str(tmp_path / "trees")]
    plain = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run([*command, ROOT / "docs", tmp_path / "html"], capture_output=True, text=True, env=plain)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "html" / "index.html").exists()
