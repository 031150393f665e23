import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.figure import Figure

from creditscope.report import Illustration, Page, Table, accuracies
from tests.figures.samples import histories

LABELS = {"bp": "BP", "dfa": "DFA"}


@pytest.fixture
def page():
    table = Table(("rule", "accuracy"), (("BP <b>", "0.9 ± 0.1"),), "a note")
    figure = Illustration(Figure(figsize=(2, 1)), "A figure", "what is to be seen")
    environment = {"versions": {"torch": "2", "cuda": None}, "threads": 1}
    return Page("A title", "a lead", table, (figure,), {"epochs": "3"}, environment, "creditscope demo", ("one", "two"))


# --- the table --------------------------------------------------------------------------------------------------------


def test_accuracies_of_the_last_epoch():
    data = histories()
    table = accuracies(data, LABELS)
    assert [row[0] for row in table.rows] == ["BP", "DFA"]
    for row, rule in zip(table.rows, LABELS, strict=True):
        for cell, name in zip(row[1:], (rule, f"frozen-{rule}", "frozen-bp", "shallow"), strict=True):
            final = data.test_acc.sel(rule=name, epoch=10).to_numpy()
            assert cell == f"{final.mean():.3f} ± {final.std(ddof=1):.3f}"
    assert "(ddof = 1) of 3 seeds; 360 test examples" in table.note


def test_one_seed_has_no_spread():
    table = accuracies(histories(seeds=1), LABELS)
    assert all(re.fullmatch(r"0\.\d{3}", cell) for row in table.rows for cell in row[1:])
    assert "one seed" in table.note


def test_what_is_not_there_is_a_dash_and_never_a_number():
    data = histories().sel(rule=["bp", "dfa", "shallow"])
    data["test_acc"].loc[{"rule": "dfa", "seed": 42, "epoch": 10}] = np.nan
    table = accuracies(data, LABELS)
    assert [row[2] for row in table.rows] == ["–", "–"]
    assert table.rows[1][1] == "–"


# --- the page ---------------------------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """Collects the tags that refer to something, and checks that tags are closed."""

    VOID = ("meta", "img", "br", "link")

    def __init__(self):
        super().__init__()
        self.open, self.references, self.cells = [], [], []

    def handle_starttag(self, tag, attributes):
        self.references += [value for name, value in attributes if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)


def test_the_page_is_whole_and_needs_no_other_file(page):
    reader = Reader()
    reader.feed(page.html())
    assert reader.open == []
    assert len(reader.references) == 1
    assert all(reference.startswith("data:image/svg+xml;base64,") for reference in reader.references)
    assert "url(" not in page.html()


def test_what_the_page_shows(page):
    reader = Reader()
    reader.feed(page.html())
    assert reader.cells == ["rule", "accuracy", "BP <b>", "0.9 ± 0.1"]
    for text in ("A title", "a lead", "a note", "what is to be seen", "creditscope demo", "one\ntwo", "versions.torch"):
        assert text in page.html()
    assert "versions.cuda" not in page.html()


def test_text_is_never_markup(page):
    assert "<script>" not in replace(page, title="<script>alert()</script>", lead="<script>").html()


def test_the_same_page_is_the_same_text(page):
    assert page.html() == page.html()


def test_figures_are_undated(page):
    for kind in ("png", "pdf", "svg"):
        assert page.illustrations[0].image(kind) == page.illustrations[0].image(kind)


def test_the_report_loads_no_torch():
    code = "import sys, creditscope.report; print({'torch', 'matplotlib.pyplot'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
