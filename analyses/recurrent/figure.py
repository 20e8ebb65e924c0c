"""Figures of docs/recurrent.md: what learners along the pairs do with ages and places (recurrent.svg), and their best
forgetting on tasks that drift (recurrent_drift.svg, from results/recurrent_drift.csv).

python -m analyses.recurrent.figure    (needs a browser)
"""

from functools import partial

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analyses.lib.measured import RESULTS, ROOT
from analyses.recurrent import learners as make
from analyses.recurrent.weights import LEARNER
from mechinterp import TaskConfig, figures, response
from mechinterp.icl.predictors import ridge

TASK = TaskConfig(d_x=4, context_length=16)
LEARNERS = {
    "descent with forgetting": make.forgetting(1.5, 0.85),
    "delta rule, gate .95": make.gated(0.1, 0.95),
    "recursive least squares": make.recursive(0.85, 0.4),
    "ridge regression": partial(ridge, penalty=0.4),
}
NAMES = {
    "kalman": "Kalman filter",
    "recursive_least_squares": "recursive least squares",
    "online_gd": "online descent",
    "forgetting_gd": "descent with forgetting",
    "ridge": "ridge",
    "zero": "predicting 0",
}
LEAST, MOST = 1e-4, 10.0
"""Ends of the colour scale of L^2 D; smaller effects are white."""


def places() -> go.Figure:
    """Weight by age above the map of effects, a column for each learner."""
    figure = make_subplots(
        rows=2, cols=len(LEARNERS), subplot_titles=list(LEARNERS), vertical_spacing=0.14
    )
    for column, (name, learner) in enumerate(LEARNERS.items(), start=1):
        found = response(learner, task=TASK, n_prompts=512)
        ages = found.position.sort_values("age")
        figure.add_scatter(
            x=ages.age,
            y=ages.weight,
            mode="lines+markers",
            line={"color": figures.COLORS[0]},
            showlegend=False,
            name=name,
            row=1,
            col=column,
        )
        size = found.order.pivot(index="changed", columns="pair", values="size")
        figure.add_heatmap(
            x=size.columns,
            y=size.index,
            z=np.log10(size.clip(LEAST, MOST)),
            zmin=np.log10(LEAST),
            zmax=np.log10(MOST),
            colorscale=[[0, "white"], [1, figures.COLORS[0]]],
            colorbar={"title": "L² D", "tickvals": [-4, -2, 0], "len": 0.45, "y": 0.2}
            | {"ticktext": ["0.0001 or 0", "0.01", "1"]},
            showscale=column == len(LEARNERS),
            row=2,
            col=column,
        )
        figure.update_xaxes(title_text="age of the pair", row=1, col=column)
        figure.update_xaxes(title_text="pair whose weight changes", row=2, col=column)
        figure.update_yaxes(rangemode="tozero", row=1, col=column)
    figure.update_yaxes(title_text="weight of a pair", row=1, col=1)
    figure.update_yaxes(title_text="pair that is replaced", row=2, col=1)
    return figure.update_layout(template="plotly_white", width=1100, height=560)


def trained() -> pd.DataFrame:
    """rho and gate of trained layers with constant gates, by the label of their formula: shipped ones, and those of the
    calibration."""
    shipped = pd.read_csv(RESULTS / "recurrent_weights.csv")
    shipped = shipped.rename(columns={"weights_alpha": "gate"})
    drawn = [pd.read_csv(file) for file in (RESULTS / "recurrent").glob("calibration_trained*.csv")]
    layers = pd.concat(drawn).dropna(subset="gate")
    layers["score"] = layers.family.str.replace("-", "_")
    both = pd.concat([shipped, layers[layers.score != "delta"]])
    return both.assign(learner=both.score.map(LEARNER))[["learner", "drift", "gate"]]


def drift(table: pd.DataFrame) -> go.Figure:
    """Best forgetting, with the gates of trained layers, and excess risk against rho."""
    layers = trained()
    titles = ("best factor per pair", "excess risk")
    figure = make_subplots(rows=1, cols=2, subplot_titles=titles, horizontal_spacing=0.1)
    for color, (learner, name) in zip(figures.COLORS, NAMES.items(), strict=False):
        rows = table[table.learner == learner].sort_values("rho")
        line = {"color": color, "dash": "dash" if learner in ("ridge", "zero") else "solid"}
        for column, value in enumerate(("forgetting", "risk"), start=1):
            if rows[value].notna().any():
                figure.add_scatter(
                    x=rows.rho,
                    y=rows[value],
                    name=name,
                    mode="lines+markers",
                    line=line,
                    showlegend=column == 2,
                    row=1,
                    col=column,
                )
    for color, (learner, name) in zip(figures.COLORS, NAMES.items(), strict=False):
        rows = layers[layers.learner == learner]
        if len(rows):
            figure.add_scatter(
                x=rows.drift,
                y=rows.gate,
                name=f"{name}, trained",
                mode="markers",
                marker={"color": color, "symbol": "x", "size": 7},
                row=1,
                col=1,
            )
    figure.update_xaxes(title_text="rho of the task (1: one β for the whole prompt)")
    figure.update_yaxes(title_text="α, or gate", row=1, col=1)
    figure.update_yaxes(title_text="unit y²", rangemode="tozero", row=1, col=2)
    return figure.update_layout(template="plotly_white", width=1000, height=400)


def main() -> None:
    places().write_image(ROOT / "docs" / "recurrent.svg")
    table = pd.read_csv(RESULTS / "recurrent_drift.csv")
    drift(table).write_image(ROOT / "docs" / "recurrent_drift.svg")


if __name__ == "__main__":
    main()
