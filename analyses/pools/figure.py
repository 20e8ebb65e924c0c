"""The figure of the map: relative distance and risk over the size of the pool, and the path of the GPT-2s; an SVG file.

python -m analyses.pools.figure [--out FILE]    (from results/pools/*.csv)
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "analyses" / "results" / "pools"
POOLS = ("1", "4", "16", "64", "256", "1024", "none")
WIDTH, HEIGHT, LEFT, TOP, GAP = 270, 210, 62, 46, 78
KINDS = {
    "linear-l3": ("#0072b2", "linear attention, 3 layers"),
    "linear-l2": ("#56b4e9", "linear attention, 2 layers"),
    "gpt2": ("#d55e00", "GPT-2"),
}
PATHS = ("#d55e00", "#009e73", "#cc79a7", "#e69f00", "#0072b2", "#56b4e9")
Point = tuple[float, float]


def panel(
    at: int,
    title: str,
    x_title: str,
    x: Sequence[Point | tuple[float, str]],
    y: Sequence[tuple[float, str]],
) -> list[str]:
    """Frame, titles and ticks of one panel; ticks are (position from 0 to 1, text)."""
    left, bottom = LEFT + at * (WIDTH + GAP), TOP + HEIGHT
    parts = [
        f'<rect x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#888"/>',
        f'<text x="{left}" y="{TOP - 14}" font-weight="bold">{title}</text>',
        f'<text x="{left + WIDTH / 2}" y="{bottom + 38}" text-anchor="middle">{x_title}</text>',
    ]
    for place, text in x:
        parts.append(
            f'<text x="{left + float(place) * WIDTH:.1f}" y="{bottom + 18}" text-anchor="middle">{text}</text>'
        )
    for place, text in y:
        level = bottom - float(place) * HEIGHT
        parts.append(f'<text x="{left - 6}" y="{level + 4:.1f}" text-anchor="end">{text}</text>')
        parts.append(
            f'<line x1="{left}" x2="{left + WIDTH}" y1="{level:.1f}" y2="{level:.1f}" stroke="#888" stroke-opacity="0.25"/>'
        )
    return parts


def curve(at: int, points: Sequence[Point], color: str, *, joined: bool = True) -> list[str]:
    """Points from 0 to 1 with a line through them."""
    left, bottom = LEFT + at * (WIDTH + GAP), TOP + HEIGHT
    places = [(left + x * WIDTH, bottom - min(max(y, 0), 1) * HEIGHT) for x, y in points]
    parts = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>' for x, y in places]
    if joined:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
    return parts


def legend(at: int, names: dict[str, str], row: int = 0) -> list[str]:
    """Names beside their colours, below a panel."""
    left, parts = LEFT + at * (WIDTH + GAP), []
    for line, (name, color) in enumerate(names.items()):
        y = TOP + HEIGHT + 62 + 18 * (row + line)
        parts.append(f'<circle cx="{left + 6}" cy="{y - 4}" r="4" fill="{color}"/>')
        parts.append(f'<text x="{left + 16}" y="{y}">{name}</text>')
    return parts


def place_of(n_tasks: float) -> float:
    """Where a pool stands on the axis."""
    name = "none" if math.isnan(n_tasks) else str(int(n_tasks))
    return (POOLS.index(name) + 0.5) / len(POOLS)


def over_pools(table: pd.DataFrame, at: int, values: pd.Series) -> list[str]:
    """A column over the size of the pool, a colour for each kind of model; further seeds are points."""
    parts = []
    for kind, (color, _) in KINDS.items():
        rows = table[table.kind == kind].assign(value=values)
        rows = rows.assign(place=[place_of(n) for n in rows.n_tasks]).sort_values("place")
        first = rows[rows.seed == 0]
        parts += curve(at, list(zip(first.place, first.value, strict=True)), color)
        others = rows[rows.seed > 0]
        points = list(zip(others.place, others.value, strict=True))
        parts += curve(at, points, color, joined=False) if points else []
    return parts


def drawn() -> str:
    """The figure."""
    table = pd.read_csv(RESULTS / "pool_map.csv")
    # Models without a pool are drawn by the comparison that the plan names.
    table = table[~(table.n_tasks.isna() & (table.compared_with != 1024))]
    pooled, new = table[table.tasks == "pool"], table[table.tasks == "new"]
    ticks = [((i + 0.5) / len(POOLS), name) for i, name in enumerate(POOLS)]
    halves = [(0, "0 dMMSE"), (0.25, "0.25"), (0.5, "0.5"), (0.75, "0.75"), (1, "1 ridge")]
    parts = panel(0, "Relative distance, tasks of the pool", "tasks in the pool M", ticks, halves)
    parts += over_pools(pooled, 0, pooled.relative)
    decades = [(i / 3, text) for i, text in enumerate(("1", "10", "100", ">1000"))]
    parts += panel(1, "Excess risk on new tasks / ridge's", "tasks in the pool M", ticks, decades)
    ratio = new.risk / new.risk_ridge
    parts += over_pools(new, 1, ratio.map(lambda value: math.log10(max(value, 1.0)) / 3))
    steps = pd.read_csv(RESULTS / "pool_steps.csv")
    steps = steps[(steps.kind == "gpt2") & (steps.tasks == "pool") & steps.n_tasks.notna()]
    last = float(steps.step.max())
    ends = [(0, "0"), (0.5, f"{last / 2:,.0f}"), (1, f"{last:,.0f}")]
    parts += panel(2, "GPT-2 on its way, tasks of the pool", "step", ends, halves)
    named = {}
    for (n_tasks, rows), color in zip(steps.groupby("n_tasks"), PATHS, strict=False):
        for _, seed in rows.groupby("seed"):
            parts += curve(2, list(zip(seed.step / last, seed.relative, strict=True)), color)
        named[f"M = {int(n_tasks)}"] = color
    parts += legend(0, {name: color for color, name in KINDS.values()}) + legend(2, named)
    width, height = LEFT + 3 * WIDTH + 2 * GAP + 20, TOP + HEIGHT + 62 + 18 * len(named)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">'
    return "\n".join(
        [head, f'<rect width="{width}" height="{height}" fill="white"/>', *parts, "</svg>\n"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pools_map.svg")
    parser.parse_args().out.write_text(drawn(), encoding="utf-8")


if __name__ == "__main__":
    main()
