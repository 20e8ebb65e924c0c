"""Figure of the map: relative distance and risk over the size of the pool, and the GPT-2s during
training; an SVG file.

python -m analyses.pools.figure [--out FILE]    (from results/pools/*.csv; needs a browser)
"""

import argparse
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analyses.lib.measured import ROOT

RESULTS = ROOT / "analyses" / "results" / "pools"
POOLS = ("1", "4", "16", "64", "256", "1024", "none")
KINDS = {
    "linear-l3": ("#0072b2", "linear attention, 3 layers"),
    "linear-l2": ("#56b4e9", "linear attention, 2 layers"),
    "gpt2": ("#d55e00", "GPT-2"),
}
PATHS = ("#d55e00", "#009e73", "#cc79a7", "#e69f00", "#0072b2", "#56b4e9")
TITLES = (
    "Relative distance, tasks of the pool",
    "Excess risk on new tasks / ridge's",
    "GPT-2 on its way, tasks of the pool",
)


def over_pools(rows: pd.DataFrame, value: str) -> list[go.Scatter]:
    """A column over the size of the pool, one colour per kind of model; further seeds are single
    points."""
    rows = rows.assign(pool=rows.n_tasks.map("{:.0f}".format).replace("nan", "none"))
    drawn = []
    for kind, (color, name) in KINDS.items():
        one = rows[rows.kind == kind].sort_values("n_tasks")
        for seed, mode in ((one.seed == 0, "lines+markers"), (one.seed > 0, "markers")):
            shown = {"mode": mode, "name": name, "showlegend": False, "marker_color": color}
            drawn.append(go.Scatter(x=one[seed].pool, y=one[seed][value], **shown))
        drawn[-2].showlegend = value == "relative"
    return drawn


def on_the_way(steps: pd.DataFrame) -> list[go.Scatter]:
    """Relative distance over the training steps of the GPT-2s with a pool, one colour per size."""
    drawn = []
    for (n_tasks, rows), color in zip(steps.groupby("n_tasks"), PATHS, strict=False):
        for seed, one in rows.groupby("seed"):
            shown = {"name": f"GPT-2, M = {int(n_tasks)}", "showlegend": seed == 0}
            path = {"x": one.step, "y": one.relative, "mode": "lines+markers"}
            drawn.append(go.Scatter(**path, **shown, marker_color=color))
    return drawn


def figure() -> go.Figure:
    table = pd.read_csv(RESULTS / "pool_map.csv")
    # Models without a pool are drawn with the comparison named in the plan.
    table = table[~(table.n_tasks.isna() & (table.compared_with != 1024))]
    pooled, new = table[table.tasks == "pool"], table[table.tasks == "new"]
    steps = pd.read_csv(RESULTS / "pool_steps.csv").query("kind == 'gpt2' and tasks == 'pool'")
    panels = (
        over_pools(pooled, "relative"),
        over_pools(new.assign(ratio=(new.risk / new.risk_ridge).clip(1, 1000)), "ratio"),
        on_the_way(steps[steps.n_tasks.notna()]),
    )
    drawn = make_subplots(1, 3, subplot_titles=TITLES)
    for column, curves in enumerate(panels, 1):
        drawn.add_traces(curves, rows=1, cols=column)
        if column < 3:
            pools = {"title_text": "tasks in the pool M", "type": "category"}
            drawn.update_xaxes(**pools, categoryarray=POOLS, categoryorder="array", col=column)
    for column in (1, 3):
        ends = {"tickvals": [0, 0.5, 1], "ticktext": ["0 dMMSE", "0.5", "1 ridge"]}
        drawn.update_yaxes(range=[-0.05, 1.05], **ends, col=column)
    drawn.update_yaxes(type="log", tickvals=[1, 10, 100, 1000], range=[-0.1, 3.1], col=2)
    return drawn.update_xaxes(title_text="step", col=3).update_layout(template="plotly_white")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pools_map.svg")
    figure().write_image(parser.parse_args().out, width=1200, height=420)


if __name__ == "__main__":
    main()
