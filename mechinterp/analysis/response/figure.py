"""Figures of responses: panels for one model or several, the filter after each layer, similarity, symmetries."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from mechinterp import figures
from mechinterp.analysis.response import reading
from mechinterp.analysis.response.frames import Frames

PANELS = ("weight of a direction", "weight of a pair", "effect of one pair on another", "part left")
LEAST_SIZE, MOST_SIZE = -3.0, 1.0
"""Powers of ten of L^2 D at the ends of the colour scale; it starts at white."""
LEAST_LEFT = 1e-4
"""Smallest part left that is drawn."""
LEAST_MISMATCH, MOST_MISMATCH = 1e-6, 1.0
"""Limits of the axis of mismatches; values outside are drawn at the limit."""
ROW_HEIGHT = 240
"""Height of a row of panels, in pixels."""
RESPONSE_COLOR = figures.COLORS[0]
BAYES_COLOR = figures.QUIET_COLOR
BESIDE_COLORS = (figures.COLORS[4], figures.COLORS[2])
"""Colours of the learners beside the model."""


def panels(found: Sequence[Frames], names: Sequence[str] = ()) -> go.Figure:
    """Four panels for each model: in two rows for one model, in a column each for several."""
    one = len(found) == 1
    rows, columns = (2, 2) if one else (len(PANELS), len(found))
    titles = PANELS if one else [names[n] if n < len(names) else "" for n in range(columns)]
    figure = make_subplots(
        rows=rows,
        cols=columns,
        subplot_titles=[*titles],
        vertical_spacing=0.2 if one else 0.09,
        horizontal_spacing=0.16 if one else 0.24 / columns,
    )
    for n, each in enumerate(found):
        if not one:
            each = replace(each, beside=each.beside[:0])
        for panel, draw in enumerate((_filter, _position, _order, _left)):
            row, column = divmod(panel, 2) if one else (panel, n)
            draw(figure, each, row + 1, column + 1, first=n == 0)
            if n:
                figure.update_yaxes(title_text="", row=row + 1, col=column + 1)
    figure = figures.finish(figure, "Response", height=rows * ROW_HEIGHT + 120, top=90)
    figure.update_layout(title_text=reading.headline(found[0]) if one else "Responses")
    figure.update_layout(legend={"y": -0.12 if one else -0.06})
    return figure


def _filter(figure: go.Figure, found: Frames, row: int, column: int, *, first: bool) -> None:
    """phi over s beside the Bayes learner, ridge and descent; both axes are logarithmic."""
    frame = _last_layer(found.of_output(found.filter))
    place = {"row": row, "col": column}
    beside = found.of_output(found.beside)
    bayes = frame.bayes.notna().any()
    if bayes:
        figure.add_scatter(
            x=frame.s,
            y=_positive(frame.bayes),
            name="Bayes",
            mode="lines",
            legendgroup="Bayes",
            showlegend=first,
            line={"color": BAYES_COLOR, "dash": "dash"},
            **place,
        )
    for color, (name, rows) in zip(
        BESIDE_COLORS, beside.groupby("learner", sort=False), strict=False
    ):
        figure.add_scatter(
            x=rows.s,
            y=_positive(rows.phi),
            name=str(name),
            mode="lines",
            legendgroup=str(name),
            showlegend=first,
            line={"color": color, "dash": "dot"},
            **place,
        )
    figure.add_scatter(
        x=frame.s,
        y=_positive(frame.phi),
        name="model",
        mode="lines+markers",
        legendgroup="model",
        error_y={"type": "data", "array": frame.phi_sem, "thickness": 1},
        showlegend=first,
        line={"color": RESPONSE_COLOR},
        **place,
    )
    figure.update_xaxes(type="log", dtick="D2", title_text="eigenvalue s of XᵀX/L", **place)
    figure.update_yaxes(type="log", dtick="D2", title_text="filter φ(s)", **place)


def _position(figure: go.Figure, found: Frames, row: int, column: int, *, first: bool) -> None:
    """Weight of a pair per similarity over its age."""
    frame = found.of_output(found.position)
    place = {"row": row, "col": column}
    figure.add_scatter(
        x=frame.age,
        y=frame.weight,
        mode="markers",
        marker={"color": RESPONSE_COLOR, "size": 5},
        error_y={"type": "data", "array": frame.weight_sem, "thickness": 1},
        name="model",
        legendgroup="model",
        showlegend=False,
        **place,
    )
    figure.update_xaxes(title_text="age of the pair (0 is the last)", **place)
    figure.update_yaxes(title_text="weight per similarity", rangemode="tozero", **place)


def _order(figure: go.Figure, found: Frames, row: int, column: int, *, first: bool) -> None:
    """L^2 D of a replaced pair on the weight of another, on a logarithmic colour scale."""
    frame = found.of_output(found.order)
    place = {"row": row, "col": column}
    if frame.empty:
        figure.add_annotation(text="not measured", showarrow=False, **place)
        return
    size = frame.pivot(index="changed", columns="pair", values="size")
    with np.errstate(divide="ignore"):
        logs = np.log10(size.to_numpy(dtype=float))
    axis = figure.get_subplot(row, column).yaxis
    low, high = axis.domain
    decades = MOST_SIZE - LEAST_SIZE
    ticks = np.arange(decades + 1)
    figure.add_heatmap(
        z=np.clip(logs, LEAST_SIZE, MOST_SIZE) - LEAST_SIZE,
        x=size.columns,
        y=size.index,
        zmin=0,
        zmax=decades,
        colorscale="Blues",
        showscale=first,
        colorbar={
            "title": {"text": "L²D"},
            "tickvals": ticks,
            "ticktext": [f"10<sup>{power:g}</sup>" for power in ticks + LEAST_SIZE],
            "len": high - low,
            "y": (low + high) / 2,
            "thickness": 12,
        },
        customdata=size.to_numpy(dtype=float),
        hovertemplate="pair %{y} replaced, weight of pair %{x}: %{customdata:.2g}<extra></extra>",
        **place,
    )
    figure.update_xaxes(title_text="pair whose weight changes", **place)
    figure.update_yaxes(title_text="replaced pair", autorange="reversed", **place)


def _left(figure: go.Figure, found: Frames, row: int, column: int, *, first: bool) -> None:
    """Part of the squared predictions left as columns are added."""
    frame = found.of_output(found.left)
    place = {"row": row, "col": column}
    figure.add_bar(
        x=frame["columns"],
        y=np.maximum(frame["left"], LEAST_LEFT),
        marker_color=RESPONSE_COLOR,
        error_y={"type": "data", "array": frame.left_sem, "thickness": 1},
        name="part left",
        showlegend=False,
        **place,
    )
    figure.update_yaxes(
        type="log",
        dtick=1,
        exponentformat="power",
        range=[np.log10(LEAST_LEFT), 0],
        title_text="part left",
        **place,
    )


def filter_by_layer(found: Frames) -> go.Figure:
    """Filter after each layer, with a slider."""
    frame = found.of_output(found.filter)
    last = _last_layer(frame)
    curves: dict = {"after the layer": (_positive(last.phi), last.phi_sem.to_numpy())}
    if last.bayes.notna().any():
        curves["Bayes"] = _positive(last.bayes)
    figure = figures.lines(
        last.s.to_numpy(),
        curves,
        title="",
        x_title="eigenvalue s of XᵀX/L",
        y_title="filter φ(s)",
        log_x=True,
        log_y=True,
    )
    frames = {
        str(layer): [{"y": _positive(rows.phi), "error_y": {"array": rows.phi_sem.to_numpy()}}]
        for layer, rows in frame.groupby("layer")
    }
    titles = [f"Filter after layer {layer}" for layer in frames]
    return figures.with_slider(figure, frames, label="layer", titles=titles, traces=[0])


def similarity(found: Frames) -> go.Figure:
    """Weight of a pair over its similarity to the query."""
    frame = found.of_output(found.similarity)
    return figures.lines(
        frame.u.to_numpy(),
        {"model": (frame.weight.to_numpy(), frame.weight_sem.to_numpy())},
        title="Weight of a pair by its similarity to the query",
        x_title="similarity <q, x>",
        y_title="L df/dy",
        zero_line=True,
    )


def symmetries(found: Frames) -> go.Figure:
    """Mismatch of each symmetry with its standard error, beside the Bayes learner's."""
    frame = found.of_output(found.symmetries)
    names = frame.symmetry.tolist()

    def cut(values: pd.Series) -> np.ndarray:
        return np.clip(values.to_numpy(dtype=float), LEAST_MISMATCH, MOST_MISMATCH)

    within = frame.mismatch.between(LEAST_MISMATCH, MOST_MISMATCH)
    sem = frame.mismatch_sem.where(within, 0.0).to_numpy(dtype=float)
    groups = {"model": (cut(frame.mismatch), sem)}
    if frame.bayes.notna().any():
        groups["Bayes"] = (cut(frame.bayes), np.zeros(len(frame)))
    figure = figures.bars(
        names, groups, title="Change of the predictions under symmetries", y_title="mismatch"
    )
    limits = [np.log10(LEAST_MISMATCH), np.log10(MOST_MISMATCH)]
    figure.update_yaxes(type="log", dtick=1, exponentformat="power", range=limits)
    return figure


def _last_layer(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the whole model."""
    return frame[frame.layer == frame.layer.max()] if "layer" in frame else frame


def _positive(values: pd.Series) -> np.ndarray:
    """Values with those at or below 0 left out, for a logarithmic axis."""
    numbers = values.to_numpy(dtype=float)
    return np.where(numbers > 0, numbers, np.nan)
