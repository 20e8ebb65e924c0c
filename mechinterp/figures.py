"""Figures of curves, bars and points, and the common colours and layout: arrays in, plotly figures out."""

import html
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float
from plotly import io

# Okabe and Ito's colours, distinct for colour-blind readers; a head has the same colour in every figure.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#7f7f7f")
BAR_COLORS = ("#6b7a8f", "#a9b4c2", "#3f8f8b")  # not the colours of heads
QUIET_COLOR = "#868e96"  # visible on white and on black
MODEL_COLOR = {"light": "#1c1c1c", "dark": "#f1f3f5"}
MODEL = "model"
"""Name of the reference curve, drawn dashed, in the text colour and on top; also marks its trace."""
CLEAR = "rgba(0,0,0,0)"
HEIGHT = 380
LONG_LABEL = 16
TEMPLATES = {"light": "plotly_white", "dark": "plotly_dark"}


Curve = np.ndarray | tuple[np.ndarray, np.ndarray]
"""Heights of a curve, optionally with their standard errors."""


def named(
    names: Iterable[str], values: Iterable[np.ndarray], errors: Iterable[np.ndarray]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Curves or groups of bars by name, each with its standard errors.

    Example:
        >>> named(["ridge"], np.array([[1.0, 2.0]]), np.array([[0.1, 0.2]]))
        {'ridge': (array([1., 2.]), array([0.1, 0.2]))}
    """
    return dict(zip(names, zip(values, errors, strict=True), strict=True))


def head_color(head: int) -> str:
    """Colour of a head, by its number."""
    return COLORS[head % len(COLORS)]


def lines(
    x: Float[np.ndarray, " point"] | np.ndarray,
    curves: Mapping[str, Curve],
    *,
    title: str,
    x_title: str,
    y_title: str,
    levels: Sequence[float] | np.ndarray = (),
    log_x: bool = False,
    log_y: bool = False,
    zero_line: bool = False,
) -> go.Figure:
    """Curves over a common axis, with error bars of one standard error if given; `levels` are dotted horizontal lines.

    The curve named `MODEL` is the reference and is drawn on top of the others.
    """
    figure = go.Figure()
    drawn = {n: curve if isinstance(curve, tuple) else (curve, None) for n, curve in curves.items()}
    for index, name in enumerate(sorted(drawn, key=lambda name: name == MODEL)):
        values, error = drawn[name]
        dash = "solid" if index < len(COLORS) else "dot"
        line: dict[str, object] = {"color": head_color(index), "dash": dash}
        if name == MODEL:
            line = {"color": MODEL_COLOR["light"], "dash": "dash", "width": 3}
        figure.add_scatter(
            x=x,
            y=values,
            name=name,
            meta=MODEL if name == MODEL else None,
            legendrank=1 if name == MODEL else None,
            mode="lines" if len(x) > 30 else "lines+markers",
            line=line,
            error_y=None if error is None else {"type": "data", "array": error, "thickness": 1},
        )
    for level in levels:
        figure.add_hline(float(level), line_dash="dot", line_width=1)
    figure.update_xaxes(title_text=x_title, **_axis(log=log_x))
    if np.issubdtype(x.dtype, np.integer) and np.ptp(x) <= 10:
        figure.update_xaxes(dtick=1)  # numbers of layers or heads have no halves
    figure.update_yaxes(title_text=y_title, zeroline=zero_line, **_axis(log=log_y))
    return finish(figure, title, height=HEIGHT)


def in_pairs(figure: go.Figure, n: int) -> go.Figure:
    """The figure with its first n curves solid and the next n dotted, in the same n colours."""
    for index, trace in enumerate(figure.data):
        trace.line.update(color=COLORS[index % n], dash="solid" if index < n else "dot")
    return figure


def _axis(*, log: bool) -> dict[str, object]:
    return {"type": "log", "exponentformat": "power"} if log else {"type": "linear"}


def bars(
    labels: Sequence[str],
    groups: Mapping[str, tuple[np.ndarray, np.ndarray]],
    *,
    title: str,
    y_title: str,
) -> go.Figure:
    """Grouped bars with error bars of one standard error; with long labels the legend is above the bars."""
    figure = go.Figure()
    for index, (name, (values, errors)) in enumerate(groups.items()):
        figure.add_bar(
            x=list(labels),
            y=values,
            name=name,
            marker_color=BAR_COLORS[index % len(BAR_COLORS)],
            error_y={"type": "data", "array": errors, "thickness": 1},
        )
    figure.update_yaxes(title_text=y_title, zeroline=True)
    figure.update_layout(barmode="group", showlegend=len(groups) > 1)
    figure = finish(figure, title, height=HEIGHT)
    if max(map(len, labels), default=0) > LONG_LABEL:
        figure.update_layout(legend={"yanchor": "bottom", "y": 1.02})
    return figure


def beside_ranges(
    numbers: Mapping[str, tuple[float, float]],
    ranges: Mapping[str, tuple[float, float]],
    limits: Mapping[str, float],
    *,
    title: str,
    range_name: str,
) -> go.Figure:
    """Numbers by name, from top to bottom, each beside its range and its limit where there are any.

    The axis reaches from 0 to the largest number or limit; a range may be longer.

    Args:
        numbers: Each number with its standard error; NaN for none.
        ranges: Low and high end.
        range_name: Name of the ranges in the legend.
    """
    value, sem = (np.array([each[n] for each in numbers.values()]) for n in (0, 1))
    ends = np.array([ranges.get(name, (np.nan, np.nan)) for name in numbers]).reshape(-1, 2)
    line = {"color": QUIET_COLOR, "width": 10}
    # One trace for all ranges, with a gap after each.
    low_high_gap = np.column_stack([ends, np.full(len(ends), np.nan)]).ravel()
    names = [name for name in numbers for _ in range(3)]
    figure = go.Figure()
    figure.add_scatter(
        x=low_high_gap, y=names, mode="lines", line=line, opacity=0.4, name=range_name
    )
    limit = [limits.get(name, np.nan) for name in numbers]
    tick = {"symbol": "line-ns", "size": 20, "line": {"width": 2, "color": COLORS[1]}}
    figure.add_scatter(x=limit, y=[*numbers], mode="markers", marker=tick, name="limit")
    figure.add_scatter(
        x=value,
        y=[*numbers],
        mode="markers",
        marker={"color": COLORS[0], "size": 10},
        error_x={"type": "data", "array": sem, "thickness": 1},
        name="value",
    )
    shown = np.array([0.0, *value, *limit])
    shown = shown[np.isfinite(shown)]
    margin = 0.05 * (np.ptp(shown) or 1.0)
    figure.update_xaxes(range=[shown.min() - margin, shown.max() + margin])
    figure.update_yaxes(type="category", autorange="reversed", automargin=True)
    return finish(figure, title, height=HEIGHT)


def runs(
    groups: Mapping[str, Mapping[str, tuple[np.ndarray, ...]]],
    *,
    title: str,
    x_title: str,
    y_title: str,
    markers: bool = False,
    log: bool = False,
) -> go.Figure:
    """Curves or scatter plots of several models by group; each group has one colour and one legend entry.

    Args:
        groups: By group and model: x, y and optionally the standard errors of y. Names are shown literally.
        log: True: both axes are logarithmic.
    """
    figure = go.Figure()
    for index, (group, models) in enumerate(groups.items()):
        for place, (model, (x, y, *error)) in enumerate(models.items()):
            figure.add_scatter(
                x=x,
                y=y,
                error_y={"type": "data", "array": error[0], "thickness": 1} if error else None,
                mode="markers" if markers else "lines",
                name=_plain(group),
                legendgroup=str(index),
                showlegend=place == 0,
                line={"color": head_color(index), "width": 1.5},
                opacity=0.8,
                hovertemplate=f"{_plain(model)}<br>%{{x}}, %{{y:.4g}}<extra></extra>",
            )
    figure.update_xaxes(title_text=x_title, zeroline=markers, **_axis(log=log))
    figure.update_yaxes(title_text=y_title, zeroline=markers, **_axis(log=log))
    return finish(figure, title, height=HEIGHT + 80)


def _plain(name: str) -> str:
    """Name escaped, so that plotly reads neither markup nor a placeholder in it."""
    return html.escape(name).replace("%", "&#37;")


def with_slider(
    figure: go.Figure,
    frames: Mapping[str, Sequence[Mapping[str, object]]],
    *,
    label: str,
    titles: Sequence[str],
    traces: Sequence[int] | None = None,
    start: int = -1,
) -> go.Figure:
    """The figure with a slider that replaces its data and title.

    Args:
        frames: By slider label: the properties of each trace that change, such as {"z": matrix}.
        label: Kind of the slider labels, such as "step".
        traces: Indices of the traces that change; None: all.
        start: Index of the first frame shown; by default the last frame.
    """
    start %= len(frames)
    places = list(range(len(figure.data))) if traces is None else list(traces)
    kinds = [figure.data[place].type for place in places]
    figure.frames = [
        {
            "name": name,
            "data": [{"type": kind, **change} for kind, change in zip(kinds, changes, strict=True)],
            "traces": places,
            "layout": {"title": {"text": title}},
        }
        for (name, changes), title in zip(frames.items(), titles, strict=True)
    ]
    frame = {"duration": 0, "redraw": True}
    at_once = {"mode": "immediate", "frame": frame, "transition": {"duration": 0}}
    steps = [{"label": name, "method": "animate", "args": [[name], at_once]} for name in frames]
    slider = {"steps": steps, "active": start, "pad": {"t": 70}}
    slider["currentvalue"] = {"prefix": f"{label} "}
    figure.update_layout(sliders=[slider], title_text=titles[start])
    for place, change in zip(places, list(frames.values())[start], strict=True):
        figure.data[place].update(change)
    return figure


def templates() -> dict[str, dict]:
    """Plotly templates of all figures for a light and a dark page, with a transparent background."""
    looks = {name: io.templates[template].to_plotly_json() for name, template in TEMPLATES.items()}
    for look in looks.values():
        look["layout"] |= {"paper_bgcolor": CLEAR, "plot_bgcolor": CLEAR}
        buttons = {"bgcolor": CLEAR, "color": QUIET_COLOR, "activecolor": COLORS[0]}
        look["layout"]["modebar"] = buttons
    return looks


def finish(figure: go.Figure, title: str, *, height: int, top: int = 60) -> go.Figure:
    """The figure with its title and the common layout."""
    _put_template(figure, TEMPLATES["light"])
    figure.update_layout(
        title={"text": title, "font": {"size": 15}},
        # Below the axis: a legend beside it leaves no room for the figure on a narrow page.
        legend={"orientation": "h", "yanchor": "top", "y": -0.27},
        height=height,
        margin={"l": 60, "r": 20, "t": top, "b": 50},
    )
    return figure


def _put_template(figure: go.Figure, name: str) -> None:
    """Set one of plotly's own templates, as plotly sets its default: without checking each of its numbers, which takes 25
    times as long as all else in a small figure."""
    figure.layout._validate = False
    try:
        figure.layout.template = io.templates[name]
    finally:
        figure.layout._validate = True
