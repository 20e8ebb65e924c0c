"""Figure 3: separate rank-one heads learn one eigenvector per drop; value weights follow eq. (21);
alignment.

Zhang et al. 2025, arXiv 2501.16265, figure 3: 5 heads. The losses use the setting of the published
code, rate 0.02 without 1/N and value weights of 0.01. The numbered claims and the other two pages
use flows from N(0, init^2).
Run: python -m analyses linear/figure_3_drops (seconds; --quick 2 seeds)"""

from dataclasses import replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from analyses.lib import Measured, Record, record, records
from analyses.lib.plateaus import Plateaus, crossings
from analyses.linear import setting as at
from mechinterp import figures
from mechinterp.theory.linear import separate_heads
from mechinterp.theory.linear_jumps import growth_value
from mechinterp.training.linear import Flow, flow

READ = (
    (400, 600),
    (600, 1150),
    (1000, 1900),
)  # Steps of the drops, read from an image of six seeds.


def holder(found: Flow, mode: int) -> tuple[int, int]:
    """Row at which a direction is learned, and the head that holds it then."""
    row, heads = int(np.flatnonzero(found.learned[:, mode] > 0.999)[0]), found.heads
    return row, int(np.abs(heads.v[row] * heads.K[row, :, 0, mode]).argmax())


def growth(found: Flow, mode: int) -> tuple[np.ndarray, np.ndarray]:
    """|v| / v_inf of a direction's head until it is learned, and eq. (21) matched at 0.3; NaN
    before and after."""
    row, head = holder(found, mode)
    v = np.abs(found.heads.v[:, head]) / at.NORMS[mode]
    last = int(np.flatnonzero(v[: row + 1] < 0.3)[-1])
    since = found.time - np.interp(0.3, v[last : last + 2], found.time[last : last + 2])
    law = {"rate": at.FOUND.rates[mode], "target": at.FOUND.targets[mode]}
    rows, value = slice(last + 1, row + 1), np.full(len(v), np.nan)
    value[rows] = growth_value(since[rows], 0.3 * at.NORMS[mode], **law) / at.NORMS[mode]
    return v, value


def measure(quick: bool) -> Measured:
    seeds, claims = range(2 if quick else 10), []
    for init in at.INITS:
        every = [at.separate(init, seed) for seed in seeds]
        errors = [
            [np.nanmax(np.abs(np.subtract(*growth(one, mode)))) for mode in range(4)]
            for one, _ in every
        ]
        claims += drop_records(init, [one for _, one in every])
        claims += growth_records(init, np.array(errors))
    std = 1e-2 * at.FACTOR
    drawn = [separate_heads(5, 4, std=std, seed=seed) for seed in range(2 * len(seeds))]
    starts = [replace(heads, v=np.full(5, std)) for heads in drawn]
    runs = [flow(heads, at.MOMENTS, duration=20_000.0, tau=at.TAU) for heads in starts]
    jumps = np.median([crossings(one, at.FOUND.levels)[:3] for one in runs], axis=0)
    places = [(step - low) / (high - low) for step, (low, high) in zip(jumps, READ, strict=True)]
    text = "steps " + ", ".join(f"{step:.0f}" for step in jumps)
    claims.append(record("linear-separate-steps", at.named(np.array(places), "drop"), text=text))
    steps = np.linspace(0, 10_000, 401)
    curves = at.losses(steps, {f"seed {i}": one for i, one in enumerate(runs[:6])})
    loss = at.page(
        steps, curves, "Separate heads of rank one; levels L(M_m) dotted", x_title="step"
    )
    pages = {"loss": loss} | heads_pages(at.separate(1e-2, 0)[0])
    return Measured(pd.DataFrame({"step": steps} | curves), pages, claims)


def heads_pages(found: Flow) -> dict[str, go.Figure]:
    heads = [holder(found, mode)[1] for mode in range(4)]
    both = {"key": found.heads.K, "query": found.heads.Q}
    grown = [growth(found, mode) for mode in range(4)]
    curves = {
        f"direction {m}{end}": grown[m][i]
        for i, end in enumerate(("", ", eq. (21)"))
        for m in range(4)
    }
    cosines = {
        f"{name} {m}": np.abs(part[:, head, 0, m]) / np.linalg.norm(part[:, head, 0], axis=1)
        for name, part in both.items()
        for m, head in enumerate(heads)
    }
    title = "|v| of the head that learns a direction, relative to its end; eq. (21) dotted"
    value = figures.lines(
        found.time, curves, title=title, y_title="|v| / v_inf", x_title="time (tau)"
    )
    title = "The same heads' keys (solid) and queries (dotted) turn to their eigenvector"
    alignment = figures.lines(
        found.time, cosines, title=title, y_title="|cos|", x_title="time (tau)"
    )
    return {"value": figures.in_pairs(value, 4), "alignment": figures.in_pairs(alignment, 4)}


def drop_records(init: float, found: list[Plateaus]) -> list[Record]:
    """Claims 5 and 10, for initial weights of one scale."""
    gaps = [
        np.abs(one.loss - at.FOUND.levels).max() if len(one.loss) == 5 else np.inf for one in found
    ]
    order = [np.array_equal(one.learned > 0.5, np.tri(5, 4, -1) > 0) for one in found]
    counts = [len(one.drop_time) for one in found]
    asked = {"5-separate": counts, "10-levels": gaps, "10-order": np.array(order, dtype=float)}
    named_by_seed = {f"{id}-init{init:g}": at.named(np.array(v), "seed") for id, v in asked.items()}
    return records("linear-", named_by_seed)


def growth_records(init: float, errors: np.ndarray) -> list[Record]:
    """Claim 12, for initial weights of one scale: errors by seed and direction."""
    asked = {f"median-init{init:g}": {"median": float(np.median(errors))}}
    asked[f"single-init{init:g}"] = at.named(errors, "seed", "direction")
    return records("linear-12-", asked)
