"""Figure 3: separate rank-one heads learn one eigenvector per drop; value weights beside eq. (21); alignment.

Zhang et al. 2025, arXiv 2501.16265, figure 3: 5 heads. Its losses are in the published code's setting, rate 0.02
without 1/N and value weights of 0.01; claims by number are on flows from N(0, init^2), as are the other two pages.
Run: python analyses/linear_figure_03.py (seconds; --quick 2 seeds)
"""

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from linear_setting import FOUND, INITS, LENGTH, MOMENTS, NORMS, losses, page, separate
from measured import Claim, Measured, numbers, run

from mechinterp import figures
from mechinterp.analysis.dynamics.plateaus import crossings
from mechinterp.theory.linear_dynamics import learning_rate_time
from mechinterp.theory.linear_heads import separate_heads
from mechinterp.theory.linear_jumps import growth_value
from mechinterp.training.flow import Flow, flow

TAU, FACTOR = learning_rate_time(0.02, n_factors=3, context_length=LENGTH)
READ = ((400, 600), (600, 1150), (1000, 1900))  # Steps of drops, off an image of six seeds.


def holder(found: Flow, mode: int) -> tuple[int, int]:
    """The row at which a direction is learned, and the head that holds it then."""
    row, heads = int(np.flatnonzero(found.learned[:, mode] > 0.999)[0]), found.heads
    return row, int(np.abs(heads.v[row] * heads.K[row, :, 0, mode]).argmax())


def growth(found: Flow, mode: int) -> tuple[np.ndarray, np.ndarray]:
    """|v| / v_inf of a direction's head until it is learned, and eq. (21) matched at 0.3; NaN before and after."""
    row, head = holder(found, mode)
    v = np.abs(found.heads.v[:, head]) / NORMS[mode]
    last = int(np.flatnonzero(v[: row + 1] < 0.3)[-1])
    since = found.time - np.interp(0.3, v[last : last + 2], found.time[last : last + 2])
    law = {"rate": FOUND.rates[mode], "target": FOUND.targets[mode]}
    rows, value = slice(last + 1, row + 1), np.full(len(v), np.nan)
    value[rows] = growth_value(since[rows], 0.3 * NORMS[mode], **law) / NORMS[mode]
    return v, value


def measure(quick: bool) -> Measured:
    seeds, claims = range(2 if quick else 10), []
    for init, level, single in zip(INITS, (1e-3, 1e-5), (1e-2, 1e-3), strict=True):
        every, models = [separate(init, i) for i in seeds], f"{len(seeds)} seeds, init {init:g}"
        counts, gaps = [len(one.drop_time) for _, one in every], [np.abs(one.loss - FOUND.levels).max() if len(one.loss) == 5 else np.inf for _, one in every]  # fmt: skip
        order = sum(np.array_equal(one.learned > 0.5, np.tri(5, 4, -1) > 0) for _, one in every)
        errors = [np.nanmax(np.abs(np.subtract(*growth(one, m)))) for one, _ in every for m in range(4)]  # fmt: skip
        claims += [
            Claim("L-5", "separate heads drop D times", models, "4", numbers(counts, 0), set(counts) == {4}),
            Claim("L-10", f"rests lie on L(M_m), eq. (19), within {level:g}", models, ", ".join(f"{one:.4f}" for one in FOUND.levels), f"within {max(gaps):.1e}", bool(max(gaps) < level)),
            Claim("L-10", "directions are learned one by one, by falling eigenvalue", models, "always", f"{order} of {len(seeds)}", order == len(seeds)),
            Claim("L-12", f"value weights follow eq. (21), median error below {single:g} of v_inf", models, "excellent agreement", f"median {np.median(errors):.1e}", bool(np.median(errors) < single)),
            Claim("L-12", "the same for every drop, within 1e-2", models, "one run drawn", f"largest {max(errors):.1e}; {sum(e < 1e-2 for e in errors)} of {len(errors)} within", max(errors) < 1e-2),
        ]  # fmt: skip
    runs = [flow(separate_heads(5, 4, std=1e-2 * FACTOR, seed=i, constant_v=True), MOMENTS, duration=20_000.0, tau=TAU) for i in range(2 * len(seeds))]  # fmt: skip
    jumps = np.median([crossings(one, FOUND.levels)[:3] for one in runs], axis=0)
    inside = all(low <= step <= high for step, (low, high) in zip(jumps, READ, strict=True))
    claims.append(Claim("", "the median step of the first three drops is in the range of the six published runs", f"{len(runs)} seeds", "; ".join(f"{a} to {b}" for a, b in READ), ", ".join(f"{step:.0f}" for step in jumps), inside))  # fmt: skip
    steps = np.linspace(0, 10_000, 401)
    curves = losses(steps, {f"seed {i}": one for i, one in enumerate(runs[:6])})
    loss = page(steps, curves, "Separate heads of rank one; levels L(M_m) dotted", x_title="step")
    return Measured(pd.DataFrame({"step": steps} | curves), {"loss": loss} | heads_pages(separate(1e-2, 0)[0]), claims)  # fmt: skip


def heads_pages(found: Flow) -> dict[str, go.Figure]:
    heads, both = [holder(found, m)[1] for m in range(4)], {"key": found.heads.K, "query": found.heads.Q}  # fmt: skip
    grown = [growth(found, mode) for mode in range(4)]
    curves = {f"direction {m}{end}": grown[m][i] for i, end in enumerate(("", ", eq. (21)")) for m in range(4)}  # fmt: skip
    cosines = {f"{name} {m}": np.abs(part[:, head, 0, m]) / np.linalg.norm(part[:, head, 0], axis=1) for name, part in both.items() for m, head in enumerate(heads)}  # fmt: skip
    options = {"x_title": "time (tau)", "colors": figures.COLORS[:4]}
    return {
        "value": figures.lines(found.time, curves, title="|v| of the head that learns a direction, relative to its end; eq. (21) dotted", y_title="|v| / v_inf", **options),
        "alignment": figures.lines(found.time, cosines, title="The same heads' keys (solid) and queries (dotted) turn to their eigenvector", y_title="|cos|", **options),
    }  # fmt: skip


if __name__ == "__main__":
    run(measure, __file__)
