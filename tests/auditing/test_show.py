import io
import math
import re
import subprocess
import sys
from html.parser import HTMLParser

import matplotlib as mpl
import numpy as np
import pytest
import torch
from rich.console import Console

import creditscope as cs
from creditscope import figures
from creditscope.auditing import show
from creditscope.auditing.verdict import Verdict

NASTY = "<script>|`a_b`*"


def network():
    return cs.nets.ResMLP(inputs=6, width=8, depth=3, classes=3)


def examples(n=48):
    draw = torch.Generator().manual_seed(1)
    return torch.randn(n, 6, generator=draw), torch.randint(0, 3, (n,), generator=draw)


@pytest.fixture(scope="module")
def one():
    torch.manual_seed(0)
    learner = cs.rules.DFA().attach(network())
    scores = {"accuracies": [0.5, 0.6], "baselines": {"frozen-bp": [0.4, 0.5], "shallow": [0.7, 0.7]}}
    return cs.audit(learner, *examples(), nulls=20, **scores)


@pytest.fixture(scope="module")
def several():
    torch.manual_seed(0)
    learner = cs.rules.DFA().attach(network())
    exact = cs.rules.BP().attach(learner.network)
    given = {NASTY: learner.credits, "exact": exact.credits, "some": lambda x, y: [None, *exact.credits(x, y)[1:]]}
    return cs.audit(learner.network, *examples(), credits=given, nulls=20)


@pytest.fixture(scope="module")
def updates_only():
    torch.manual_seed(0)
    net = network()
    return cs.audit(net, *examples(), updates=lambda x, y: {"embed.weight": torch.ones(8, 6)}, nulls=20)


def printed(audit, width=100):
    out = io.StringIO()
    Console(width=width, file=out).print(audit.table())
    return out.getvalue()


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [4.39e8, 1e-30, 3.2e-7, 0.0123, -0.5, 12.3456, 9999.0, 123456.0, -7e-12])
def test_a_number_is_short_and_right(value):
    text = show.number(value)
    assert len(text) <= 8
    assert float(text) == pytest.approx(value, rel=0.06)


def test_what_is_not_known_is_a_dash():
    assert show.number(math.nan) == show.MISSING
    assert show.number(math.inf) == "inf"
    assert show.number(0.0) == "0.000"


def test_accuracies_name_n_and_ddof():
    assert show.accuracy_of([0.5]) == "0.500 (n = 1 seed)"
    text = show.accuracy_of([0.1, 0.2, 0.6])
    assert text.startswith(f"0.300 ± {np.std([0.1, 0.2, 0.6], ddof=1):.3f}")
    assert "ddof = 1, n = 3 seeds" in text


# --- the table --------------------------------------------------------------------------------------------------------


def test_a_row_a_state_with_its_figures(one):
    text = printed(one)
    rows = [line.split() for line in text.splitlines() if re.match(r" \d", line)]
    assert [row[0] for row in rows] == ["0·", "1", "2", "3"]
    for l, row in enumerate(rows):
        assert row[1] == f"{float(one.data.cosine[l]):.3f}"
        assert row[-3:-1] == [show.number(float(one.data[name][l])) for name in ("state_norm", "reference_norm")]


def test_the_verdict_stands_below_with_every_sentence(one):
    text = " ".join(printed(one).split())
    assert f"dfa: {one.verdict.status}" in text
    for sentence in [*one.verdict.reasons.values(), *one.verdict.unmeasured.values(), *one.verdict.hints]:
        assert " ".join(sentence.split()) in text


@pytest.mark.parametrize("name", ["one", "several", "updates_only"])
def test_legible_at_100_columns(name, request):
    audit = request.getfixturevalue(name)
    text = printed(audit)
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text


def test_several_credits_are_blocks_of_rows(several):
    text = printed(several)
    rows = [line for line in text.splitlines() if re.match(r" \d", line)]
    assert len(rows) == 3 * 4
    for name, verdict in several.verdicts.items():
        assert f"{name}: {verdict.status}" in text
    assert "–" in rows[8]  # the credit that was not given for state 0


def test_names_are_no_markup_of_the_terminal(several):
    assert "[95 %]" in printed(several)
    assert NASTY in printed(several)


def test_columns_that_were_not_measured_are_left_out(one):
    quick = cs.audit(cs.rules.DFA().attach(network()), *examples(), tier="quick")
    heading = next(line for line in printed(quick).splitlines() if "cosine" in line)
    assert "ρ" not in heading.split()
    assert "ρ" in next(line for line in printed(one).splitlines() if "cosine" in line).split()


# --- the checklist ----------------------------------------------------------------------------------------------------


def test_the_checklist_is_filled_in(one):
    text = one.to_markdown()
    for needed in (
        "a\\_l = B\\_l e for every state",
        "ResMLP",
        "3 blocks",
        "terminal normalisation: LayerNorm",
        "n = 48",
        "0.550 ± 0.071 (sample standard deviation, ddof = 1, n = 2 seeds)",
        "baseline frozen-bp: 0.450 ± 0.071",
        "baseline shallow: 0.700 ± 0.000",
        "mean of the never-clamped cosines over the states that drive trained blocks (h\\_1, h\\_2, h\\_3)",
        "cross-batch stability",
        "- [x] norms are per example",
        "20 draws",
        f"**Verdict: {one.verdict.status}**",
    ):
        assert needed in text, needed
    table = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(table) == 2 + 4
    assert len({line.count("|") for line in table}) == 1


def test_every_flag_is_in_the_checklist(one):
    text = one.to_markdown()
    for key in one.verdict.flags:
        assert f"- {key}: " in text


def test_names_are_no_markup_of_a_page(several):
    text = several.to_markdown()
    assert NASTY not in text.replace(f"## {NASTY}", "").replace(f"# Audit: {NASTY}", "")


def test_updates_alone_have_a_checklist_too(updates_only):
    text = updates_only.to_markdown()
    assert "null-credit: no credit was given, only updates" in text
    assert "Γ" not in text.partition("## Pitfalls")[0].replace("aggregate Γ", "")


# --- the page ---------------------------------------------------------------------------------------------------------


class Reader(HTMLParser):
    VOID = frozenset({"meta", "br", "link", "img", "path", "use"})

    def __init__(self):
        super().__init__()
        self.open, self.refers, self.scripts = [], [], 0

    def handle_starttag(self, tag, attrs):
        self.refers += [value for key, value in attrs if key in ("src", "href") and value and not value.startswith("#")]
        self.scripts += tag == "script"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


@pytest.mark.parametrize("name", ["one", "several", "updates_only"])
def test_the_page_is_whole_and_needs_nothing_else(name, request, tmp_path):
    audit = request.getfixturevalue(name)
    text = audit.to_html(tmp_path / "a.html").read_text("utf-8")
    reader = Reader()
    reader.feed(text)
    assert not reader.open
    assert not reader.scripts
    assert not [link for link in reader.refers if not link.startswith("data:")]
    assert text.count("<svg") == (2 if name == "updates_only" else 3)
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_the_verdict_comes_first_and_names_are_escaped(several, tmp_path):
    text = several.to_html(tmp_path / "a.html").read_text("utf-8")
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert text.index('class="verdict') < text.index("<table>") < text.index("<svg")


def test_the_same_audit_is_the_same_page(one, tmp_path):
    first = one.to_html(tmp_path / "a.html").read_bytes()
    assert one.to_html(tmp_path / "b.html").read_bytes() == first
    one.save(tmp_path / "a.nc")
    again = cs.load_audit(tmp_path / "a.nc")
    assert again.to_html(tmp_path / "c.html").read_bytes() == first
    assert again.to_markdown() == one.to_markdown()


def test_a_kept_audit_is_shown_without_torch(one, tmp_path):
    one.save(tmp_path / "a.nc")
    code = (
        "import sys, creditscope as cs\n"
        "audit = cs.load_audit('a.nc')\n"
        "audit.to_html('a.html'), audit.to_markdown(), audit.table()\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


# --- its figures ------------------------------------------------------------------------------------------------------


def test_alignment_draws_the_figures_and_their_intervals(several):
    figure = figures.alignment(several.data)
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in panels] == [*several.verdicts]
    for axes, name in zip(panels, several.verdicts, strict=True):
        own = several.data.sel(credit=name)
        line = axes.get_lines()[1]
        np.testing.assert_array_equal(line.get_ydata(), own.cosine)
        assert axes.get_ylabel() in ("", "cosine with the exact gradient")


def test_a_null_is_drawn_where_it_was_measured(one):
    assert "null ± 3 sd" in {text.get_text() for text in figures.alignment(one.data).legends[0].get_texts()}
    quick = cs.audit(cs.rules.DFA().attach(network()), *examples(), tier="quick")
    assert "null ± 3 sd" not in {text.get_text() for text in figures.alignment(quick.data).legends[0].get_texts()}


def test_norms_by_state(one):
    left, right = figures.layer_norms(one.data).axes
    np.testing.assert_array_equal(left.get_lines()[0].get_ydata(), one.data.state_norm)
    drawn = {line.get_label(): line.get_ydata() for line in right.get_lines()}
    np.testing.assert_array_equal(drawn["exact gradient"], one.data.reference_norm)
    np.testing.assert_array_equal(drawn["credit, DFA"], one.data.credit_norm)
    low, high = right.get_ylim()
    assert high >= 9.9 * low


def test_precision_has_the_limit_that_it_is_judged_by(one):
    (axes,) = figures.precision(one.data, limit=0.01).axes
    drawn = {line.get_label(): line.get_ydata() for line in axes.get_lines()}
    np.testing.assert_array_equal(drawn["backprop through the network"], one.data.precision_error)
    assert [*drawn["limit 0.01"]] == [0.01, 0.01]


def test_drawing_changes_no_setting(one, tmp_path):
    before = dict(mpl.rcParams)
    one.to_html(tmp_path / "a.html")
    assert dict(mpl.rcParams) == before


def test_sentences_hold_all_that_a_verdict_says():
    verdict = Verdict("flagged", ("a",), {"a": "why a"}, {"b": "why b"}, ("try c",))
    assert show.sentences(verdict) == [
        ("", ["a: why a"]),
        ("not measured: ", ["b: why b"]),
        ("hint: ", ["try c"]),
    ]
