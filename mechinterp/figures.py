"""The figures: the only file that knows colours and layout. Arrays in, plotly figures out."""

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float
from plotly import io
from plotly.subplots import make_subplots

# Okabe and Ito's colours, told apart by the colour-blind too; the same head has the same one everywhere.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#7f7f7f")
BAR_COLORS = ("#6b7a8f", "#a9b4c2", "#3f8f8b")  # groups of bars are not heads
QUIET_COLOR = "#868e96"  # seen on white and on black
MODEL_COLOR = {"light": "#1c1c1c", "dark": "#f1f3f5"}
MODEL = "model"
"""The curve that others are compared with: dashed, in the colour of the text, on top of them; and what marks its trace."""
SIGNED_SCALE = "RdBu"
UNSIGNED_SCALE = "Blues"
LIGHT_SCALES = {"signed": SIGNED_SCALE, "unsigned": UNSIGNED_SCALE}
DARK_SCALES = {
    "signed": ("#ffb199", "#e8684a", "#9c3a26", "#14171c", "#215a8c", "#4393d0", "#a6d4f7"),
    "unsigned": ("#14171c", "#1d3f5e", "#2f77b0", "#6db3e6", "#d3ebfc"),
}
CLEAR = "rgba(0,0,0,0)"
HEIGHT = 380
PANEL, PANEL_GAP, LEAST_BAR = 190, 90, 90
"""Pixels: of a matrix of a head, between two of them, and of a bar of colours."""
LONG_LABEL = 16
LEAST_TICKS = 3
"""Of a logarithmic axis."""
TEMPLATES = {"light": "plotly_white", "dark": "plotly_dark"}


def head_color(head: int) -> str:
    """The colour of a head, by its number."""
    return COLORS[head % len(COLORS)]


@dataclass(frozen=True, eq=False)
class Matrices:
    """A matrix for each head, on one colour scale with white at 0."""

    values: Float[np.ndarray, "head row column"]
    rows: Sequence[str]
    columns: Sequence[str]
    row_title: str = ""
    column_title: str = ""
    unit: str = ""
    kind: str = ""
    """What they are of the heads: QK, OV."""
    names: Sequence[str] = ()
    """What stands above each; head 0, head 1, ... of its kind if left out."""
    strips: bool = False
    """Whether rows are as low as they can be, of matrices with few."""
    part: float = 1.0
    """Of all entries, by size, those on whose largest colours end."""

    @property
    def limit(self) -> float:
        """Where the colours end, on both sides of 0."""
        return float(np.nanquantile(np.abs(self.values), self.part)) or 1.0

    @property
    def titles(self) -> Sequence[str]:
        """What stands above each."""
        return self.names or [f"{self.kind} head {n}".strip() for n in range(len(self.values))]

    @property
    def changing(self) -> list[dict[str, object]]:
        """Of the heatmap of each head what a slider changes."""
        return [{"z": z, "zmin": -self.limit, "zmax": self.limit} for z in self.values.round(6)]


def head_heatmaps(*kinds: Matrices, title: str) -> go.Figure:
    """Signed heatmaps of the heads side by side, one kind of matrices below the other, each on a scale of its own."""
    per_row = min(max(len(kind.values) for kind in kinds), 4)
    counts = [-(-len(kind.values) // per_row) for kind in kinds]
    strips = [20 + 22 * len(kind.rows) if kind.strips else PANEL for kind in kinds]
    heights = np.repeat(strips, counts)
    area = int(heights.sum()) + PANEL_GAP * (len(heights) - 1)
    figure = make_subplots(
        rows=len(heights),
        cols=per_row,
        specs=[
            [{} if row * per_row + column < len(kind.values) else None for column in range(per_row)]
            for kind, count in zip(kinds, counts, strict=True)
            for row in range(count)
        ],
        row_heights=heights.tolist(),
        subplot_titles=[name for kind in kinds for name in kind.titles],
        horizontal_spacing=0.06,
        vertical_spacing=PANEL_GAP / area if len(heights) > 1 else 0,
    )
    figure.update_yaxes(autorange="reversed", showticklabels=False)
    first = 0
    for kind, count in zip(kinds, counts, strict=True):
        above, own = (
            int(heights[rows].sum()) + PANEL_GAP * size
            for rows, size in ((slice(first), first), (slice(first, first + count), count - 1))
        )
        bar = {
            "title": {"text": kind.unit},
            "y": 1 - (above + own / 2) / area,
            "len": max(own, LEAST_BAR) / area,
        }
        places = f"<br>{kind.row_title} %{{y}}<br>{kind.column_title} %{{x}}<br>%{{z:.4f}}"
        for head, (name, drawn) in enumerate(zip(kind.titles, kind.changing, strict=True)):
            figure.add_heatmap(
                **drawn,
                x=list(kind.columns),
                y=list(kind.rows),
                colorscale=SIGNED_SCALE,
                showscale=head == 0,
                colorbar=bar,
                hovertemplate=f"{name}{places}<extra></extra>",
                row=first + head // per_row + 1,
                col=head % per_row + 1,
            )
        for row in range(first + 1, first + count + 1):
            figure.update_yaxes(title_text=kind.row_title, showticklabels=True, row=row, col=1)
        first += count
        figure.update_xaxes(title_text=kind.column_title, title_standoff=2, row=first)
    # The names of the heads stand above the heatmaps, plotly's buttons above the names.
    return _finish(figure, title, height=130 + area, top=80)


def heatmap(
    matrix: Float[np.ndarray, "row column"],
    *,
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    unit: str = "",
    limit: float | None = None,
    signed: bool = True,
) -> go.Figure:
    """One heatmap, signed with white at 0 or from 0 on.

    Args:
        limit: Where the colours end; the largest |entry|, if left out.
    """
    limit = float(np.abs(matrix).max()) or 1.0 if limit is None else limit
    figure = go.Figure()
    figure.add_heatmap(
        z=matrix,
        x=list(columns),
        y=list(rows),
        colorscale=SIGNED_SCALE if signed else UNSIGNED_SCALE,
        zmin=-limit if signed else 0,
        zmax=limit,
        colorbar={"title": {"text": unit}},
        hovertemplate="%{y}%{x}<br>%{z:.4g}<extra></extra>",
    )
    figure.update_yaxes(autorange="reversed")
    return _finish(figure, title, height=120 + 24 * max(len(rows), 8))


def layers_by_heads(
    matrix: Float[np.ndarray, "layer head"],
    *,
    title: str,
    unit: str = "",
    limit: float | None = None,
    signed: bool = True,
) -> go.Figure:
    """One heatmap with a cell for each head of each layer; arguments as in `heatmap`."""
    n_layers, n_heads = matrix.shape
    return heatmap(
        matrix,
        title=title,
        rows=[f"L{layer}" for layer in range(n_layers)],
        columns=[f"H{head}" for head in range(n_heads)],
        unit=unit,
        limit=limit,
        signed=signed,
    )


def lines(
    x: Float[np.ndarray, " point"] | np.ndarray,
    curves: Mapping[str, np.ndarray],
    *,
    title: str,
    x_title: str,
    y_title: str,
    errors: Mapping[str, np.ndarray] | None = None,
    colors: Sequence[str] = COLORS,
    levels: Sequence[float] | np.ndarray = (),
    log_x: bool = False,
    log_y: bool = False,
    zero_line: bool = False,
) -> go.Figure:
    """Curves over a common axis; `errors` are bars of one standard error, `levels` dotted lines across.

    A curve named `MODEL` is what the others are compared with, and drawn on top of them.
    """
    figure = go.Figure()
    others = [name for name in curves if name != MODEL]
    for index, name in enumerate([*others, *(name for name in curves if name == MODEL)]):
        error = None if errors is None else errors.get(name)
        line: dict[str, object] = {
            "color": colors[index % len(colors)],
            "dash": "solid" if index < len(colors) else "dot",
        }
        if name == MODEL:
            line = {"color": MODEL_COLOR["light"], "dash": "dash", "width": 3}
        figure.add_scatter(
            x=x,
            y=curves[name],
            name=name,
            meta=MODEL if name == MODEL else None,
            legendrank=1 if name == MODEL else None,
            mode="lines" if len(x) > 30 else "lines+markers",
            line=line,
            error_y=None if error is None else {"type": "data", "array": error, "thickness": 1},
        )
    for level in levels:
        figure.add_hline(float(level), line_dash="dot", line_width=1)
    figure.update_xaxes(title_text=x_title, type="log" if log_x else "linear")
    if np.issubdtype(x.dtype, np.integer) and np.ptp(x) <= 10:
        figure.update_xaxes(dtick=1)  # a number of layers or heads has no half
    figure.update_yaxes(title_text=y_title, type="log" if log_y else "linear", zeroline=zero_line)
    if log_x:
        figure.update_xaxes(log_ticks([x]))
    if log_y:
        figure.update_yaxes(log_ticks(curves.values()))
    return _finish(figure, title, height=HEIGHT)


def log_ticks(values: Iterable[np.ndarray]) -> dict[str, object]:
    """Ticks of a logarithmic axis as numbers that are read at once, three of them or more within the values.

    Example:
        >>> log_ticks([np.array([0.03, 0.4])])["ticktext"]
        ['0.02', '0.05', '0.1', '0.2', '0.5']
    """
    found = np.concatenate([np.ravel(each).astype(float) for each in values])
    found = found[np.isfinite(found) & (found > 0)]
    if not len(found) or found.max() < found.min() * (1 + 1e-6):
        return {}
    low, high = float(found.min()), float(found.max())
    powers = range(int(np.floor(np.log10(low))) - 1, int(np.ceil(np.log10(high))) + 2)
    for steps in ((1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)):
        every = np.array([step * 10.0**power for power in powers for step in steps])
        if ((every >= low) & (every <= high)).sum() >= LEAST_TICKS:
            break
    else:
        step = 10.0 ** np.floor(np.log10(high - low))
        while (high - low) / step < LEAST_TICKS:
            step /= 2
        every = step * np.arange(np.ceil(low / step) - 1, high / step + 2)
        every = every[every > 0]
    first, last = np.searchsorted(every, low, "right") - 1, np.searchsorted(every, high)
    ticks = every[max(first, 0) : last + 1].tolist()
    return {"tickmode": "array", "tickvals": ticks, "ticktext": [_tick(tick) for tick in ticks]}


def log_range(values: np.ndarray) -> tuple[float, float] | None:
    """Ends of a logarithmic axis that has room for these values, as plotly takes them.

    Example:
        >>> log_range(np.array([1.0, 100.0]))
        (-0.1, 2.1)
    """
    found = np.log10(values[values > 0])
    if not len(found):
        return None
    room = 0.05 * float(np.ptp(found)) or 0.1
    return float(found.min()) - room, float(found.max()) + room


def _tick(value: float) -> str:
    for least, letter in ((1e6, "M"), (1e4, "k")):
        if least <= value < 1e9:
            return f"{value / (1e6 if letter == 'M' else 1e3):.6g}{letter}"
    if 1e-4 <= value < 1e9:
        return f"{value:,.6g}"
    power = int(np.floor(np.log10(value) + 1e-9))
    first = f"{value / 10.0**power:.5g}"
    return f"{'' if first == '1' else f'{first}·'}10<sup>{power}</sup>".replace("-", "−")


def bars(
    labels: Sequence[str],
    groups: Mapping[str, np.ndarray],
    *,
    title: str,
    y_title: str,
    errors: Mapping[str, np.ndarray],
) -> go.Figure:
    """Grouped bars with one standard error each; long labels take the room below, and the legend stands above."""
    figure = go.Figure()
    for index, (name, values) in enumerate(groups.items()):
        figure.add_bar(
            x=list(labels),
            y=values,
            name=name,
            marker_color=BAR_COLORS[index],
            error_y={"type": "data", "array": errors[name], "thickness": 1},
        )
    figure.update_yaxes(title_text=y_title, zeroline=True)
    figure.update_layout(barmode="group", showlegend=len(groups) > 1)
    figure = _finish(figure, title, height=HEIGHT)
    if max(map(len, labels)) > LONG_LABEL:
        figure.update_layout(legend={"yanchor": "bottom", "y": 1.02})
    return figure


def head_scatter(
    omega: Float[np.ndarray, " head"],
    mu: Float[np.ndarray, " head"],
    *,
    labels: Sequence[str],
    title: str,
) -> go.Figure:
    """Heads in the plane of omega and mu, labelled; dashed lines mark the axes."""
    figure = go.Figure()
    for head, label in enumerate(labels):
        figure.add_scatter(
            x=[omega[head]],
            y=[mu[head]],
            name=f"head {head}: {label}",
            mode="markers+text",
            text=[f"{head}"],
            textposition="middle right",
            marker={"color": head_color(head), "size": 12},
        )
    figure.add_hline(0, line_dash="dash", line_width=1)
    figure.add_vline(0, line_dash="dash", line_width=1)
    figure.update_xaxes(title_text="omega (1/x²)", zeroline=False)
    figure.update_yaxes(title_text="mu", zeroline=False)
    return _finish(figure, title, height=HEIGHT)


def points(
    groups: Mapping[str, tuple[np.ndarray, np.ndarray]],
    *,
    title: str,
    x_title: str,
    y_title: str,
) -> go.Figure:
    """One cloud of points per head, x and y each."""
    figure = go.Figure()
    for index, (name, (x, y)) in enumerate(groups.items()):
        figure.add_scatter(
            x=x, y=y, name=name, mode="markers", marker={"color": head_color(index), "size": 7}
        )
    figure.update_xaxes(title_text=x_title, zeroline=True)
    figure.update_yaxes(title_text=y_title, zeroline=True)
    return _finish(figure, title, height=HEIGHT)


def runs(
    groups: Mapping[str, Mapping[str, tuple[np.ndarray, ...]]],
    *,
    title: str,
    x_title: str,
    y_title: str,
    markers: bool = False,
    log: bool = False,
) -> go.Figure:
    """Curves, or clouds of points, of several models by group; a group has one colour and one entry in the legend.

    Args:
        groups: x, y and where there are some standard errors of y by model, by group; the names are shown as they are.
        log: Whether both axes are logarithmic.
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
    kind = "log" if log else "linear"
    figure.update_xaxes(title_text=x_title, type=kind, zeroline=markers)
    figure.update_yaxes(title_text=y_title, type=kind, zeroline=markers)
    if log:
        every = [curve for models in groups.values() for curve in models.values()]
        figure.update_xaxes(log_ticks(curve[0] for curve in every))
        figure.update_yaxes(log_ticks(curve[1] for curve in every))
    return _finish(figure, title, height=HEIGHT + 80)


def _plain(name: str) -> str:
    """A name that plotly neither takes for markup nor for a place to fill in."""
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
        frames: By the name that the slider shows: what each trace is to have instead, such as {"z": matrix}.
        label: What the names are of, "step".
        traces: The traces that change; all, if left out.
        start: The frame that it begins at; the last, if left out.
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
    at_once = {
        "mode": "immediate",
        "frame": {"duration": 0, "redraw": True},
        "transition": {"duration": 0},
    }
    steps = [{"label": name, "method": "animate", "args": [[name], at_once]} for name in frames]
    slider = {
        "steps": steps,
        "active": start,
        "currentvalue": {"prefix": f"{label} "},
        "pad": {"t": 70},
    }
    figure.update_layout(sliders=[slider], title_text=titles[start])
    for place, change in zip(places, list(frames.values())[start], strict=True):
        figure.data[place].update(change)
    return figure


def templates() -> dict[str, dict]:
    """The looks of every figure on a light and on a dark page, on the page's own background."""
    looks = {name: io.templates[template].to_plotly_json() for name, template in TEMPLATES.items()}
    for look in looks.values():
        look["layout"] |= {"paper_bgcolor": CLEAR, "plot_bgcolor": CLEAR}
        buttons = {"bgcolor": CLEAR, "color": QUIET_COLOR, "activecolor": COLORS[0]}
        look["layout"]["modebar"] = buttons
    return looks


def scales() -> dict[str, dict[str, object]]:
    """Colours of heatmaps and of the curve of the model on a light and on a dark page; 0 is the page's own ground."""
    named = {
        name: [[place / (len(colors) - 1), color] for place, color in enumerate(colors)]
        for name, colors in DARK_SCALES.items()
    }
    light = {name: go.Heatmap(colorscale=scale).colorscale for name, scale in LIGHT_SCALES.items()}
    found = {"light": light, "dark": named}
    return {look: {**found[look], "model": MODEL_COLOR[look]} for look in TEMPLATES}


def _finish(figure: go.Figure, title: str, *, height: int, top: int = 60) -> go.Figure:
    figure.update_layout(
        title={"text": title, "font": {"size": 15}},
        template=TEMPLATES["light"],
        # Below the axis: beside it, a legend leaves no room for the figure on a narrow page.
        legend={"orientation": "h", "yanchor": "top", "y": -0.22},
        height=height,
        margin={"l": 60, "r": 20, "t": top, "b": 50},
    )
    return figure
