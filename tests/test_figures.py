"""Figures carry the numbers they were given, in colours and on axes that can be compared."""

import re

import numpy as np
import plotly.graph_objects as go
import pytest

from mechinterp import figures, heatmaps
from mechinterp.report.to_html import TITLE_HEIGHT

BUTTONS = 30  # pixels from the top down to the lower edge of plotly's buttons


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


@pytest.mark.parametrize("n_heads", [1, 4, 5, 8, 40])
def test_heatmaps_take_any_number_of_heads(n_heads: int):
    figure = qk_heatmaps(n_heads)
    assert len(figure.data) == n_heads
    rows = -(-n_heads // 4)
    gaps = heatmaps.PANEL_GAP * (rows - 1)
    assert figure.layout.height == 130 + heatmaps.PANEL * rows + gaps


def test_the_names_of_heads_leave_room_for_the_buttons_above():
    figure = qk_heatmaps()
    names = 22  # pixels above the heatmaps, of which the page takes away its own title's
    assert figure.layout.margin.t - TITLE_HEIGHT - names >= BUTTONS
    assert all((note.y, note.yanchor) == (1, "bottom") for note in figure.layout.annotations)


def test_heatmaps_of_zeros_have_a_range():
    matrices = heatmaps.Matrices(np.zeros((1, 2, 2)), ["a", "b"], ["a", "b"])
    (trace,) = heatmaps.head_heatmaps(matrices, title="").data
    assert (trace.zmin, trace.zmax) == (-1, 1)


def test_kinds_of_matrices_stand_below_each_other_each_on_its_own_scale():
    matrices = [
        heatmaps.Matrices(size * np.ones((5, rows, 2)), ["a"] * rows, ["x", "y"], kind=kind)
        for kind, size, rows in (("QK", 1.0, 3), ("OV", 4.0, 1))
    ]
    figure = heatmaps.head_heatmaps(*matrices, title="Both")
    assert [trace.zmax for trace in figure.data] == [1.0] * 5 + [4.0] * 5
    assert [trace.showscale for trace in figure.data] == [True, *[False] * 4] * 2
    names = [note.text for note in figure.layout.annotations]
    assert names == [f"{kind} head {head}" for kind in ("QK", "OV") for head in range(5)]
    bottoms = [figure.layout[f"yaxis{n or ''}"].domain[0] for n in (0, 5, 6, 10)]
    assert bottoms == sorted(bottoms, reverse=True)
    assert len(list(figure.select_xaxes())) == 10
    alone = heatmaps.head_heatmaps(matrices[0], title="QK")
    assert figure.layout.height > alone.layout.height


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


def test_lines_go_on_in_dots_when_the_colours_run_out():
    n_colors = len(figures.COLORS)
    drawn = lines({str(i): np.zeros(2) for i in range(n_colors + 1)}).data
    styles = [(trace.line.color, trace.line.dash) for trace in drawn]
    assert styles[-2:] == [(figures.COLORS[-1], "solid"), (figures.COLORS[0], "dot")]


def test_lines_take_logarithmic_axes():
    assert (lines().layout.xaxis.type, lines().layout.yaxis.type) == ("linear", "linear")
    assert lines(log_x=True).layout.xaxis.type == lines(log_y=True).layout.yaxis.type == "log"
    assert lines(zero_line=True).layout.yaxis.zeroline


def test_the_curve_of_the_model_is_dashed_and_on_top():
    curves = {figures.MODEL: np.array([1.0, 2.0]), "ridge": np.array([1.0, 3.0])}
    below, above = lines(curves).data
    assert (above.name, above.meta, above.line.dash) == ("model", "model", "dash")
    assert above.legendrank == 1
    assert above.line.width > 2
    assert (list(above.y), below.name, below.line.color) == ([1, 2], "ridge", figures.COLORS[0])


def test_heatmaps_have_the_ground_of_the_page_at_zero():
    for ground, look in (("rgb(247,247,247)", "light"), ("#14171c", "dark")):
        signed = dict(heatmaps.scales()[look]["signed"])
        assert signed[0.5] == ground
    assert heatmaps.scales()["dark"]["unsigned"][0][1] == "#14171c"


def test_a_few_whole_numbers_get_no_halves_between_them():
    few, many, real = np.arange(5), np.arange(50), np.linspace(0, 1, 5)
    steps = [
        figures.lines(x, {"a": x}, title="", x_title="", y_title="").layout.xaxis.dtick
        for x in (few, many, real)
    ]
    assert steps == [1, None, None]


def test_lines_have_levels_as_dotted_lines_across():
    shapes = lines(levels=np.array([0.5, -1.0])).layout.shapes
    drawn = [(shape.y0, shape.y1, shape.line.dash) for shape in shapes]
    assert drawn == [(0.5, 0.5, "dot"), (-1, -1, "dot")]
    assert not lines().layout.shapes


def test_bars_carry_values_and_errors():
    figure = bars(2)
    assert [list(trace.y) for trace in figure.data] == [[1, 2], [1, 2]]
    assert [list(trace.error_y.array) for trace in figure.data] == [[0.1, 0.2], [0.1, 1.2]]
    assert figure.data[0].x == ("L0H0", "L0H1")
    assert figure.layout.barmode == "group"
    assert (bars(1).layout.showlegend, figure.layout.showlegend) == (False, True)
    assert figure.data[0].marker.color != figure.data[1].marker.color


def test_the_legend_of_bars_with_long_names_stands_where_the_names_do_not():
    values = {name: (np.array([1.0]), np.array([0.1])) for name in ("estimated", "patched")}
    short, long = (
        figures.bars([label], values, title="Edges", y_title="change")
        for label in ("L0H0", "L1H2 to v of L3H1")
    )
    assert (short.layout.legend.yanchor, long.layout.legend.yanchor) == ("top", "bottom")
    assert short.layout.legend.y < 0 < 1 < long.layout.legend.y


def test_scatter_places_every_head_with_its_label():
    figure = scatter()
    assert [(trace.x[0], trace.y[0]) for trace in figure.data] == [(-0.1, -2.0), (0.1, 2.0)]
    assert [trace.name for trace in figure.data] == ["head 0: negative", "head 1: negative"]
    assert figure.layout.xaxis.zeroline
    assert figure.layout.yaxis.zeroline


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


def test_points_of_a_head_have_its_colour():
    clouds = {f"head {h}": {f"head {h}": (np.arange(3), np.arange(3) * h)} for h in range(2)}
    figure = figures.runs(clouds, title="", x_title="likeness (x²)", y_title="weight", markers=True)
    assert [trace.line.color for trace in figure.data] == [figures.head_color(h) for h in (0, 1)]
    assert {trace.mode for trace in figure.data} == {"markers"}
    assert list(figure.data[1].y) == [0, 1, 2]


def test_both_looks_lie_on_the_page_s_own_ground():
    looks = figures.templates()
    assert set(looks) == {"light", "dark"}
    assert {look["layout"]["paper_bgcolor"] for look in looks.values()} == {"rgba(0,0,0,0)"}
    # Plotly would make their ground of the page's, here half black.
    assert {look["layout"]["modebar"]["bgcolor"] for look in looks.values()} == {"rgba(0,0,0,0)"}
    fonts = [look["layout"]["font"]["color"] for look in looks.values()]
    assert len(set(fonts)) == 2
