"""Figure 13: omega and mu during training for two, three and four heads, and the steps from which
the pattern holds.

He et al. 2025, arXiv 2503.12734, figure 13. Run: python -m analyses softmax/figure_13_milestones
(seconds)"""

import numpy as np
import pandas as pd

from analyses.lib import Measured, Record, records
from analyses.lib.milestones import PATTERNS, milestones
from analyses.softmax.setting import BOTH_SIGNS, active, dynamics, ends, gamma, paired, scale_pages

LEAST, MOST = 1000, 300_000


def row(name: str) -> dict:
    """Milestones of a model, the overshoot of its two strongest heads, and the dips of its group
    sums."""
    found, logged = milestones(dynamics(name)), dynamics(name)
    strong = np.argsort(-abs(logged.mu[-1]))[:2]
    late = abs(logged.mu[logged.step >= 5000].sum(1))
    _, mu = ends(name)
    return {
        "model": name,
        "n_heads": len(mu),
        **{part: getattr(found, part) for part in PATTERNS},
        "signs_from": signs_from(name),
        "largest_sum": late.max(),
        "diagonal_early": diagonal_at(name, 10_000 if len(mu) == 4 else 2000),
        "signs_early": signs_at(name, 10_000 if len(mu) == 4 else 2000),
        "peak_step": found.peak_step[strong].max(),
        "overshoot": found.overshoot[strong].min(),
        "fall": (1 - 1 / found.overshoot[strong]).min(),
        "dip": max(dip(name, sign) for sign in (0, 1)),
        "positive": mu.clip(min=0).sum(),
        "negative": -mu.clip(max=0).sum(),
        "gamma": gamma(name),
    }


def signs_from(name: str) -> float:
    """First logged step from which omega and mu of every active head have the same sign."""
    logged = dynamics(name)
    matches = (logged.omega * logged.mu > 0)[:, active(name)].all(1)
    broken = np.flatnonzero(~matches)
    return float(logged.step[broken[-1] + 1]) if len(broken) else 0.0


def signs_at(name: str, step: int) -> float:
    """1.0 if the signs of omega of the active heads at a step are those at the end."""
    logged, heads = dynamics(name), active(name)
    early = logged.omega[logged.step == step][0]
    return float((early * logged.omega[-1] > 0)[heads].all())


def diagonal_at(name: str, step: int) -> float:
    """Smallest cosine of an active head with its diagonal at a step."""
    logged = dynamics(name)
    return logged.heads("qk_diagonal").to_numpy()[logged.step == step][0, active(name)].min()


def dip(name: str, sign: int) -> float:
    """Largest relative fall of the sum of mu of one sign below its earlier maximum, between LEAST
    and MOST steps."""
    logged = dynamics(name)
    sums = abs(logged.group_mu[(logged.step >= LEAST) & (logged.step <= MOST), sign])
    highest = np.maximum.accumulate(sums).clip(min=1e-9)
    return float((1 - sums / highest).max())


def measure(quick: bool) -> Measured:
    data = pd.DataFrame([row(name) for name in paired()])
    pages = {}
    for name in ("softmax-h2-s0", "softmax-h3-s0", "softmax-h4-s0"):
        pages |= scale_pages(name)
    return Measured(data, pages, claims_of(data))


def claims_of(data: pd.DataFrame) -> list[Record]:
    rows = data.set_index("model")
    few, eight = rows[rows.n_heads < 8], rows[rows.n_heads == 8]
    asked = {"O1d-early": few.signs_from, "O1d-early-eight": eight.signs_from}
    asked["O2b-early"] = rows.largest_sum
    for n_heads in (2, 4):
        one = rows[rows.n_heads == n_heads]
        asked[f"O4a-diagonal-h{n_heads}"] = one.diagonal_early
        asked[f"O4a-signs-h{n_heads}"] = one.signs_early
    asked |= {"O4b-step": rows.peak_step, "O4b-height": rows.overshoot, "O4b-fall": rows.fall}
    asked["O4c"] = rows.dip
    for column in ("positive", "negative", "gamma"):
        groups = rows.groupby("n_heads")[column]
        spreads = groups.max() / groups.min() - 1
        asked[f"O4d-{column}"] = {f"{n} heads": spread for n, spread in spreads.items()}
    return records("softmax-", asked | {"zero-sum": few.zero_sum}, over=BOTH_SIGNS)
