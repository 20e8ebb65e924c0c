"""Local learning coefficients of the shipped models: at the end of training, on the plateaus of
linear attention, and for softmax heads.

Lau et al. 2023, arXiv 2308.12108, by Hamiltonian Monte Carlo at n_beta 30,000. Linear attention has
the exact loss of its population. Softmax models have the loss on 512 prompts, at the minimum of
that loss next to the weights.
Run: python -m analyses coefficients/learning (15 minutes; --quick: one model, short chains)"""

import pandas as pd

from analyses.lib import Measured, checkpoint, shipped
from analyses.lib.coefficient_snapshots import coefficient_snapshots
from mechinterp import local_learning_coefficient
from mechinterp.analysis.training.learning_coefficient import LearningCoefficient
from mechinterp.analysis.training.sampler import Chains

LINEAR = ("linear-separate-*", "linear-merged-*", "linear-rank*")
STAIRCASES = {
    "linear-separate-s0": (0, 1800, 3600, 6000, 9000, 10000, 20000),
    "linear-separate-s2": (1000, 1800, 3600, 4400, 5400, 20000),
    "linear-rank1-s2": (4500, 13500, 20000, 27500, 50000),
}
SOFTMAX = ("softmax-h1-s0", "softmax-h2-s0")
SHORT = Chains(n_chains=4, n_draws=100, n_warmup=60, n_leapfrog=20)
COLUMNS = ("estimate", "sem", "exact", "is_minimum", "r_hat", "effective_draws", "acceptance")
COLUMNS += ("nbeta", "loss", "fall", "moved")
NAMES = {"nbeta": "n_beta"}
"""Columns of the data that have another name than the field."""


def row(part: str, name: str, step: int, found: LearningCoefficient, **more: object) -> dict:
    """One row of the data."""
    measured = {NAMES.get(column, column): getattr(found, column) for column in COLUMNS}
    where = {"entries": int(found.sampled.split(" ")[0]), "over": found.over}
    return {"part": part, "model": name, "step": step, **measured, **where, **more}


def ends(names: list[str], chains: Chains | None) -> list[dict]:
    """Rows of linear models at the end of training."""
    found = {name: local_learning_coefficient(checkpoint(name), chains=chains) for name in names}
    return [row("end", name, checkpoint(name).step, one) for name, one in found.items()]


def staircase(name: str, steps: tuple[int, ...], chains: Chains | None) -> list[dict]:
    """Rows for all heads, and for the heads that have learned something, at saved steps."""
    kept = list(checkpoint(name).snapshots)
    nearest = sorted({min(kept, key=lambda at: abs(at - step)) for step in steps})
    found = coefficient_snapshots(checkpoint(name), steps=nearest, chains=chains)
    rows = []
    for place, step in enumerate(found.step):
        learned = int(found.n_learned[place])
        more = {"learned": learned, "live": int(found.n_live[place])}
        more["level"] = found.coefficients[learned]
        whole, live = found.whole[place], found.live[place]
        rows.append(row("all heads", name, int(step), whole, **more))
        rows.append(row("live heads", name, int(step), whole if live is None else live, **more))
    return rows


def softmax(name: str, chains: Chains | None, n_prompts: int) -> list[dict]:
    """Rows of a softmax model at its own weights, and at the nearest minimum of the loss on the
    prompts."""
    model, rows, law = checkpoint(name), [], {"chains": chains, "n_prompts": n_prompts}
    for part, settle in (("softmax", False), ("softmax settled", True)):
        found = local_learning_coefficient(model, settle=settle, **law)
        rows.append(row(part, name, model.step, found))
    return rows


def measure(quick: bool) -> Measured:
    names = [name for pattern in LINEAR for name in shipped(pattern)]
    chains = SHORT if quick else None
    rows = ends(names[:1] if quick else names, chains)
    for name, steps in list(STAIRCASES.items())[: 1 if quick else None]:
        rows += staircase(name, steps[-3:] if quick else steps, chains)
    for name in () if quick else SOFTMAX:
        rows += softmax(name, chains, 512)
    data = pd.DataFrame(rows).astype({"exact": float})
    shown = checkpoint("linear-separate-s0")
    first = coefficient_snapshots(shown, steps=[3600, 20000], chains=SHORT)
    found = local_learning_coefficient(shown, chains=chains)
    pages = {"staircase": first.plot(), "trace": found.plot(), "posterior": found.plot_posterior()}
    return Measured(data, pages)
