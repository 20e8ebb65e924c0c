"""Figures carry the numbers they were given, in colours and on axes that can be compared; their copies for print, and how results show."""

import re
import shutil
from dataclasses import dataclass
from importlib import util
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from mechinterp import figures, heatmaps, load, paper, write_report
from mechinterp.display import ROWS_SHOWN, Result
from mechinterp.paper import for_print, save_figure
from mechinterp.progress import progress, show_progress
from tests.conftest import CHECKPOINTS, refused


def qk_heatmaps(n_heads: int = 2) -> go.Figure:
    values = np.linspace(-2, 0.5, n_heads * 6).reshape(n_heads, 2, 3)
    names = ["x0", "x1", "y"]
    matrices = heatmaps.Matrices(values, names[:2], names, "query", "key", unit="1/x²", kind="QK")
    return heatmaps.head_heatmaps(matrices, title="QK circuits")


CURVES = {"head 0": np.array([1.0, 2.0]), "head 1": np.array([3.0, -4.0])}


def lines(curves: dict = CURVES, **options) -> go.Figure:
    titles = {"title": "Loss", "x_title": "step", "y_title": "loss (y²)"}
    return figures.lines(np.array([10, 20]), curves, **titles | options)


def bars(n_groups: int = 1) -> go.Figure:
    groups = {
        f"group {i}": (np.array([1.0, 2.0]), np.array([0.1, 0.2 + i])) for i in range(n_groups)
    }
    return figures.bars(["L0H0", "L0H1"], groups, title="Rise", y_title="rise (y²)")


def scatter(n_heads: int = 2) -> go.Figure:
    sizes = np.linspace(-0.1, 0.1, n_heads)
    points = {
        f"head {n}: negative": {f"head {n}": (sizes[n : n + 1], 20 * sizes[n : n + 1])}
        for n in range(n_heads)
    }
    titles = {"x_title": "omega (1/x²)", "y_title": "mu"}
    return figures.runs(points, title="Heads", markers=True, **titles)


def test_heatmaps_share_one_signed_range_with_white_at_zero():
    for trace in qk_heatmaps().data:
        assert (trace.zmin, trace.zmax) == (-2, 2)
        assert trace.colorbar.title.text == "1/x²"
        places = [place for place, _ in trace.colorscale]
        middle = trace.colorscale[places.index(0.5)][1]
        red, green, blue = map(int, re.findall(r"\d+", middle))
        assert min(red, green, blue) > 240
    assert [trace.showscale for trace in qk_heatmaps().data] == [True, False]


def test_heatmaps_show_the_matrices_the_right_way_up():
    figure = qk_heatmaps()
    values = np.linspace(-2, 0.5, 12).reshape(2, 2, 3)
    assert len(figure.data) == 2
    for trace, matrix in zip(figure.data, values, strict=True):
        np.testing.assert_allclose(trace.z, matrix, atol=1e-6)
        assert (trace.y, trace.x) == (("x0", "x1"), ("x0", "x1", "y"))
    assert figure.layout.yaxis.autorange == figure.layout.yaxis2.autorange == "reversed"
    assert [note.text for note in figure.layout.annotations] == ["QK head 0", "QK head 1"]
    assert (figure.layout.xaxis.title.text, figure.layout.yaxis.title.text) == ("key", "query")


def test_heatmaps_of_zeros_have_a_range():
    matrices = heatmaps.Matrices(np.zeros((1, 2, 2)), ["a", "b"], ["a", "b"])
    (trace,) = heatmaps.head_heatmaps(matrices, title="").data
    assert (trace.zmin, trace.zmax) == (-1, 1)


def test_a_head_has_one_colour_in_every_figure():
    n_heads = len(figures.COLORS) + 1
    points = [trace.line.color for trace in scatter(n_heads).data]
    names = [f"head {head}" for head in range(n_heads)]
    colors = [figures.head_color(head) for head in range(n_heads)]
    curves = lines({name: np.zeros(2) for name in names})
    assert [trace.line.color for trace in curves.data] == points == colors
    assert len(set(points[:-1])) == n_heads - 1
    assert points[-1] == points[0]
    assert not set(figures.BAR_COLORS) & set(figures.COLORS)


def test_lines_carry_values_and_errors():
    figure = lines(CURVES | {"head 1": (CURVES["head 1"], np.array([0.5, 0.25]))})
    first, second = figure.data
    assert (list(second.x), list(second.y), second.name) == ([10, 20], [3, -4], "head 1")
    assert first.error_y.array is None
    assert list(second.error_y.array) == [0.5, 0.25]
    assert all(trace.error_y.array is None for trace in lines().data)


def test_bars_carry_values_and_errors():
    figure = bars(2)
    assert [list(trace.y) for trace in figure.data] == [[1, 2], [1, 2]]
    assert [list(trace.error_y.array) for trace in figure.data] == [[0.1, 0.2], [0.1, 1.2]]
    assert figure.data[0].x == ("L0H0", "L0H1")
    assert figure.layout.barmode == "group"
    assert (bars(1).layout.showlegend, figure.layout.showlegend) == (False, True)
    assert figure.data[0].marker.color != figure.data[1].marker.color


@pytest.mark.parametrize(
    ("figure", "title", "x_title", "y_title"),
    [
        (qk_heatmaps(), "QK circuits", "key", "query"),
        (lines(), "Loss", "step", "loss (y²)"),
        (bars(), "Rise", None, "rise (y²)"),  # the bars are named themselves
        (scatter(), "Heads", "omega (1/x²)", "mu"),
    ],
    ids=["heatmaps", "lines", "bars", "scatter"],
)
def test_a_figure_can_be_read_alone(figure: go.Figure, title: str, x_title, y_title: str):
    assert isinstance(figure, go.Figure)
    assert figure.layout.title.text == title
    assert figure.layout.xaxis.title.text == x_title
    assert figure.layout.yaxis.title.text == y_title
    assert figure.layout.height >= 300


def test_numbers_lie_beside_their_ranges_and_limits_on_an_axis_that_shows_all_numbers():
    figure = figures.beside_ranges(
        {"a": (0.5, 0.1), "b": (np.nan, np.nan), "c": (2.0, np.nan)},
        {"a": (0.1, 0.2), "c": (1.0, 40.0)},
        {"c": 4.0},
        title="Evidence",
        range_name="random weights",
    )
    ranges, limits, values = figure.data
    assert list(ranges.y) == [*"aaabbbccc"]
    np.testing.assert_array_equal(
        ranges.x, [0.1, 0.2, np.nan, np.nan, np.nan, np.nan, 1.0, 40.0, np.nan]
    )
    np.testing.assert_array_equal(limits.x, [np.nan, np.nan, 4.0])
    np.testing.assert_array_equal(values.x, [0.5, np.nan, 2.0])
    np.testing.assert_array_equal(values.error_x.array, [0.1, np.nan, np.nan])
    assert list(figure.layout.xaxis.range) == [-0.2, 4.2]
    assert figure.layout.yaxis.autorange == "reversed"


def test_a_slider_replaces_data_and_title_and_begins_at_the_end():
    frames = {"0": [{"z": np.zeros((2, 3))}, {"z": np.ones((2, 3))}]}
    frames["9"] = [{"z": np.full((2, 3), 2.0)}, {"z": np.full((2, 3), 3.0)}]
    figure = figures.with_slider(qk_heatmaps(), frames, label="step", titles=["first", "last"])
    assert [frame.name for frame in figure.frames] == ["0", "9"]
    assert [frame.layout.title.text for frame in figure.frames] == ["first", "last"]
    np.testing.assert_array_equal(figure.frames[0].data[1].z, np.ones((2, 3)))
    np.testing.assert_array_equal(figure.data[1].z, np.full((2, 3), 3.0))
    assert figure.layout.title.text == "last"
    slider = figure.layout.sliders[0]
    assert [step.args[0] for step in slider.steps] == [("0",), ("9",)]
    assert (slider.active, slider.currentvalue.prefix) == (1, "step ")


def test_a_slider_leaves_other_traces_alone():
    frames = {"a": [{"y": [7.0, 8.0]}]}
    figure = figures.with_slider(lines(), frames, label="", titles=[""], traces=[1])
    assert figure.frames[0].traces == (1,)
    assert [list(trace.y) for trace in figure.data] == [[1, 2], [7, 8]]


def test_an_unsigned_heatmap_starts_at_zero():
    options = {"title": "", "rows": ["a"], "columns": ["b", "c"]}
    signed, unsigned = (
        heatmaps.heatmap(np.array([[1.0, 3.0]]), signed=signed, **options).data[0]
        for signed in (True, False)
    )
    assert (signed.zmin, signed.zmax) == (-3, 3)
    assert (unsigned.zmin, unsigned.zmax) == (0, 3)
    assert signed.colorscale != unsigned.colorscale
    wide = heatmaps.heatmap(np.array([[1.0, 3.0]]), limit=5.0, **options).data[0]
    assert (wide.zmin, wide.zmax) == (-5, 5)


# Figures for print.

LINES = figures.lines(
    np.arange(5.0), {"one": np.arange(5.0)}, title="A title", x_title="x", y_title="y"
)
draws = pytest.mark.skipif(
    util.find_spec("kaleido") is None or shutil.which("chromium") is None,
    reason="drawing needs kaleido and chromium",
)


def test_the_copy_is_in_sizes_of_print_and_the_figure_is_left_alone():
    before = LINES.to_dict()
    printed = for_print(LINES, width=3.3)
    assert printed.layout.width == round(3.3 * 96)
    assert printed.layout.font.size == pytest.approx(8 * 96 / 72)  # 8 points
    assert printed.layout.title.text == ""
    assert for_print(LINES, width=3.3, height=2.5, title="T").layout.height == 240
    assert for_print(LINES, title="T").layout.title.text == "T"
    assert LINES.to_dict() == before


class Found(Result):
    def plot(self):
        return LINES


def test_what_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with refused("figure.doc", ".pdf, .svg or .png"):
        save_figure(LINES, tmp_path / "figure.doc")
    monkeypatch.setattr(paper, "find_spec", lambda name: None)
    with refused("kaleido", "pip install 'mechinterp-icl[figures]'"):
        Found().save_figure(tmp_path / "figure.pdf")
    monkeypatch.setattr(paper, "find_spec", lambda name: object())
    with refused("width", "> 0 inches", 0):
        save_figure(LINES, tmp_path / "figure.pdf", width=0)
    with refused("a result with a plot", "Result"):
        save_figure(Result(), tmp_path / "figure.pdf")
    assert not list(tmp_path.iterdir())


@draws
@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_report_has_its_figures_as_files(tmp_path: Path):
    checkpoint = load(CHECKPOINTS / "softmax-h1-s0")
    asked = {"n_prompts": 64, "analyses": ["circuits", "attention-patterns"], "figures": "svg"}
    write_report(checkpoint, tmp_path / "page", **asked)
    names = {file.name for file in (tmp_path / "page").glob("*.svg")}
    assert names == {"circuits.svg", "attention.svg", "similarity.svg"}
    # The page knows them as its own, so that it can be written anew.
    write_report(checkpoint, tmp_path / "page", overwrite=True, **asked)


# Results in a notebook, and the progress of slow loops.


@dataclass(frozen=True, eq=False, repr=False)
class Count(Result):
    n: int
    name: str = "rows"

    def __repr__(self) -> str:
        return f"Count({self.n} {self.name})"

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame({"row": range(self.n)})


def test_a_result_shows_its_sentence_and_the_first_rows_of_its_table():
    for n, shown in ((2, 2), (ROWS_SHOWN, ROWS_SHOWN), (ROWS_SHOWN + 3, ROWS_SHOWN)):
        html = Count(n)._repr_html_()
        assert f"Count({n} rows)" in html
        assert html.count("<tr") == 1 + shown
        assert ("3 more rows" in html) == (n > ROWS_SHOWN)
    assert "<img" not in Count(1, name="<img src=x onerror=alert(1)>")._repr_html_()


def test_a_loop_inside_a_shown_loop_is_not_shown():
    shown = []

    def noted(items, text):
        shown.append(text)
        yield from items

    with show_progress(noted):
        assert [n for n in progress([1, 2], "outer") for _ in progress([3], "inner")] == [1, 2]
        assert list(progress([4], "next")) == [4]
    assert list(progress([5], "after")) == [5]
    assert shown == ["outer", "next"]
