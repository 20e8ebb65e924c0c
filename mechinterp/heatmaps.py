"""Heatmaps of one matrix (such as layers by heads), and of a matrix per head."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float
from plotly.subplots import make_subplots

from mechinterp.figures import MODEL_COLOR, TEMPLATES, finish

SIGNED_SCALE = "RdBu"
UNSIGNED_SCALE = "Blues"
LIGHT_SCALES = {"signed": SIGNED_SCALE, "unsigned": UNSIGNED_SCALE}
DARK_SCALES = {
    "signed": ("#ffb199", "#e8684a", "#9c3a26", "#14171c", "#215a8c", "#4393d0", "#a6d4f7"),
    "unsigned": ("#14171c", "#1d3f5e", "#2f77b0", "#6db3e6", "#d3ebfc"),
}
PANEL, PANEL_GAP, LEAST_BAR = 190, 90, 90
"""Sizes in pixels: side of a head's matrix, gap between two matrices, and smallest length of a colour bar."""


@dataclass(frozen=True, eq=False)
class Matrices:
    """One matrix per head, on a common colour scale with white at 0."""

    values: Float[np.ndarray, "head row column"]
    rows: Sequence[str]
    columns: Sequence[str]
    row_title: str = ""
    column_title: str = ""
    unit: str = ""
    kind: str = ""
    """Kind of the matrices: QK or OV."""
    names: Sequence[str] = ()
    """Title of each matrix; empty: head 0, head 1, ... with the kind."""
    strips: bool = False
    """True: rows have a small fixed height, for matrices with few rows."""
    part: float = 1.0
    """The colour scale ends at this quantile of abs(entry); 1.0 is the maximum."""

    @property
    def limit(self) -> float:
        """End of the colour scale on both sides of 0."""
        return float(np.nanquantile(np.abs(self.values), self.part)) or 1.0

    @property
    def titles(self) -> Sequence[str]:
        """Title of each matrix."""
        return self.names or [f"{self.kind} head {n}".strip() for n in range(len(self.values))]

    @property
    def changing(self) -> list[dict[str, object]]:
        """Properties of each head's heatmap that a slider changes."""
        return [{"z": z, "zmin": -self.limit, "zmax": self.limit} for z in self.values.round(6)]


def head_heatmaps(*kinds: Matrices, title: str) -> go.Figure:
    """Signed heatmaps of the heads side by side, with one block of rows and one colour scale per kind of matrix."""
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
        place, length = 1 - (above + own / 2) / area, max(own, LEAST_BAR) / area
        bar = {"title": {"text": kind.unit}, "y": place, "len": length}
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
    # The titles are above the heatmaps, plotly's buttons above the titles.
    return finish(figure, title, height=130 + area, top=80)


def heatmap(
    matrix: Float[np.ndarray, "row column"],
    *,
    title: str,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    unit: str = "",
    limit: float | None = None,
    signed: bool = True,
) -> go.Figure:
    """One heatmap; the colour scale is white at 0 if signed, else it starts at 0.

    Args:
        rows: Names of the rows; None: layers L0, L1, ...
        columns: Names of the columns; None: heads H0, H1, ...
        limit: End of the colour scale; None: the largest abs(entry).
    """
    limit = float(np.abs(matrix).max()) or 1.0 if limit is None else limit
    figure = go.Figure()
    figure.add_heatmap(
        z=matrix,
        x=[f"H{head}" for head in range(matrix.shape[1])] if columns is None else list(columns),
        y=[f"L{layer}" for layer in range(len(matrix))] if rows is None else list(rows),
        colorscale=SIGNED_SCALE if signed else UNSIGNED_SCALE,
        zmin=-limit if signed else 0,
        zmax=limit,
        colorbar={"title": {"text": unit}},
        hovertemplate="%{y}%{x}<br>%{z:.4g}<extra></extra>",
    )
    figure.update_yaxes(autorange="reversed")
    return finish(figure, title, height=120 + 24 * max(len(matrix), 8))


def scales() -> dict[str, dict[str, object]]:
    """Colours of heatmaps and of the reference curve on a light and a dark page; 0 has the page's background colour."""
    named = {
        name: [[place / (len(colors) - 1), color] for place, color in enumerate(colors)]
        for name, colors in DARK_SCALES.items()
    }
    light = {name: go.Heatmap(colorscale=scale).colorscale for name, scale in LIGHT_SCALES.items()}
    looks = {"light": light, "dark": named}
    return {look: {**looks[look], "model": MODEL_COLOR[look]} for look in TEMPLATES}
