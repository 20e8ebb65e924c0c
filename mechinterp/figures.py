"""The figures: the only file that knows colours and layout. Arrays in, plotly figures out."""

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float
from plotly.subplots import make_subplots

# Okabe and Ito's colours, told apart by the colour-blind too; the same head has the same one everywhere.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#7f7f7f")
BAR_COLORS = ("#4d4d4d", "#b3b3b3")  # groups of bars are not heads
SIGNED_SCALE = "RdBu"
HEIGHT = 380


def head_color(head: int) -> str:
    """The colour of a head, by its number."""
    return COLORS[head % len(COLORS)]


def head_heatmaps(
    matrices: Float[np.ndarray, "head row column"],
    *,
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    row_title: str = "",
    column_title: str = "",
    unit: str = "",
) -> go.Figure:
    """One signed heatmap per head side by side, on one colour scale with white at 0."""
    n_heads = len(matrices)
    limit = float(np.abs(matrices).max()) or 1.0
    per_row = min(n_heads, 4)
    n_rows = -(-n_heads // per_row)
    figure = make_subplots(
        rows=n_rows,
        cols=per_row,
        subplot_titles=[f"head {head}" for head in range(n_heads)],
        horizontal_spacing=0.06,
        vertical_spacing=0.32 / n_rows,
    )
    for head, matrix in enumerate(matrices):
        heatmap = go.Heatmap(
            z=np.round(matrix, 6),
            x=list(columns),
            y=list(rows),
            coloraxis="coloraxis",
            hovertemplate=f"head {head}<br>{row_title} %{{y}}<br>{column_title} %{{x}}<br>%{{z:.4f}}<extra></extra>",
        )
        figure.add_trace(heatmap, row=head // per_row + 1, col=head % per_row + 1)
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title_text=column_title, row=n_rows)
    figure.update_yaxes(title_text=row_title, col=1)
    bar = {"title": {"text": unit}}
    figure.update_layout(
        coloraxis={"colorscale": SIGNED_SCALE, "cmin": -limit, "cmax": limit, "colorbar": bar},
    )
    return _finish(figure, title, height=90 + 240 * n_rows)


def heatmap(
    matrix: Float[np.ndarray, "row column"],
    *,
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    unit: str = "",
) -> go.Figure:
    """One signed heatmap with white at 0."""
    figure = go.Figure()
    figure.add_heatmap(
        z=matrix,
        x=list(columns),
        y=list(rows),
        colorscale=SIGNED_SCALE,
        zmid=0,
        colorbar={"title": {"text": unit}},
        hovertemplate="%{y}%{x}<br>%{z:.4g}<extra></extra>",
    )
    figure.update_yaxes(autorange="reversed")
    return _finish(figure, title, height=120 + 24 * max(len(rows), 8))


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
    """Curves over a common axis; `errors` are bars of one standard error, `levels` dotted lines across."""
    figure = go.Figure()
    for index, (name, values) in enumerate(curves.items()):
        error = None if errors is None else errors.get(name)
        figure.add_scatter(
            x=x,
            y=values,
            name=name,
            mode="lines" if len(x) > 30 else "lines+markers",
            line={
                "color": colors[index % len(colors)],
                "dash": "solid" if index < len(colors) else "dot",
            },
            error_y=None if error is None else {"type": "data", "array": error, "thickness": 1},
        )
    for level in levels:
        figure.add_hline(float(level), line_dash="dot", line_width=1)
    figure.update_xaxes(title_text=x_title, type="log" if log_x else "linear")
    figure.update_yaxes(title_text=y_title, type="log" if log_y else "linear", zeroline=zero_line)
    return _finish(figure, title, height=HEIGHT)


def bars(
    labels: Sequence[str],
    groups: Mapping[str, np.ndarray],
    *,
    title: str,
    y_title: str,
    errors: Mapping[str, np.ndarray],
) -> go.Figure:
    """Grouped bars with one standard error each."""
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
    return _finish(figure, title, height=HEIGHT)


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


def _finish(figure: go.Figure, title: str, *, height: int) -> go.Figure:
    figure.update_layout(
        title={"text": title, "font": {"size": 15}},
        template="plotly_white",
        # Below the axis: beside it, a legend leaves no room for the figure on a narrow page.
        legend={"orientation": "h", "yanchor": "top", "y": -0.22},
        height=height,
        margin={"l": 60, "r": 20, "t": 60, "b": 50},
    )
    return figure
