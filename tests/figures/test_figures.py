import subprocess
import sys

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from creditscope import figures
from creditscope.figures._style import STYLES, style_of
from tests.figures.samples import histories

ALL = [figures.accuracy, figures.norms]


def lines(axes) -> dict[str, object]:
    return {line.get_label(): line for line in axes.get_lines()}


@pytest.mark.parametrize("draw", ALL)
def test_a_figure_changes_nothing_and_can_be_saved(draw, tmp_path):
    data = histories()
    before = data.copy(deep=True)
    figure = draw(data)
    assert isinstance(figure, Figure)
    for kind in ("png", "pdf", "svg"):
        figure.savefig(tmp_path / f"figure.{kind}")
    assert data.identical(before)


@pytest.mark.parametrize("draw", ALL)
def test_labels_and_no_conclusions(draw):
    for axes in draw(histories()).axes:
        assert axes.get_xlabel() == "epoch"
        assert axes.get_title(loc="left") in ("", "BP", "FA", "DFA")
        assert axes.get_legend() is not None


def test_accuracy_draws_a_rule_and_its_baselines():
    data = histories()
    for axes, rule in zip(figures.accuracy(data).axes, ("bp", "fa", "dfa"), strict=True):
        style, drawn = STYLES[rule], lines(axes)
        assert list(drawn) == [style.label, f"{style.label}, blocks frozen", "no blocks"]
        for name, line in zip((rule, f"frozen-{rule}", "shallow"), drawn.values(), strict=True):
            np.testing.assert_allclose(line.get_ydata(), data.test_acc.sel(rule=name).mean("seed"))
        own = drawn[style.label]
        assert (to_hex(own.get_color()).upper(), own.get_marker()) == (style.colour, style.marker)


def test_accuracy_without_baselines():
    (axes,) = figures.accuracy(histories().sel(rule=["fa"]), rules=["fa"]).axes
    assert list(lines(axes)) == ["FA"]


def test_the_band_is_one_sample_standard_deviation():
    data = histories()
    band = figures.accuracy(data).axes[0].collections[0].get_paths()[0].vertices
    own = data.test_acc.sel(rule="bp", epoch=10)
    at_the_end = band[band[:, 0] == 10][:, 1]
    centre, spread = own.mean().item(), own.std(ddof=1).item()
    np.testing.assert_allclose([at_the_end.min(), at_the_end.max()], [centre - spread, centre + spread])


@pytest.mark.parametrize("draw", ALL)
def test_one_seed_has_no_band_and_says_so(draw):
    figure = draw(histories(seeds=1))
    assert all(not axes.collections for axes in figure.axes)
    assert "1 seed" in figure.get_supxlabel()


def test_the_axis_of_accuracy_hides_only_the_beginning():
    data = histories()
    low, high = figures.accuracy(data).axes[0].get_ylim()
    assert low <= data.test_acc.isel(epoch=slice(2, None)).min()
    assert data.test_acc.max() <= high <= 1


def test_norms_are_geometric_means_of_the_last_layer():
    data = histories()
    for axes, name in zip(figures.norms(data).axes, ("state_norm", "reference_norm"), strict=True):
        assert axes.get_yscale() == "log"
        for label, rule in (("BP", "bp"), ("FA", "fa"), ("DFA", "dfa")):
            mean = np.exp(np.log(data[name].sel(rule=rule).isel(layer=-1)).mean("seed"))
            np.testing.assert_allclose(lines(axes)[label].get_ydata(), mean)


def test_a_missing_epoch_leaves_a_gap():
    data = histories()
    data["test_acc"].loc[{"rule": "dfa", "seed": 42, "epoch": [9, 10]}] = np.nan
    drawn = lines(figures.accuracy(data).axes[2])["DFA"].get_ydata()
    assert np.isnan(drawn[-2:]).all()
    assert np.isfinite(drawn[:-2]).all()


def test_each_rule_has_its_own_colour_and_marker():
    assert len({style.colour for style in STYLES.values()}) == len({style.marker for style in STYLES.values()}) == 3
    assert style_of("mine").label == "mine"


def test_figures_load_no_torch_and_no_pyplot():
    code = "import sys, creditscope.figures; print({'torch', 'matplotlib.pyplot'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
