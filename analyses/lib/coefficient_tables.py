"""Tables of the page on the local learning coefficient, from the CSV file of its script."""

from pathlib import Path

import numpy as np
import pandas as pd

from analyses.lib.result_tables import markdown


def coefficients(results: Path) -> str:
    """Learning coefficients of linear attention at the end of training."""
    found = pd.read_csv(results / "learning_coefficient.csv").query("part == 'end'")
    rows = [
        (
            row.model,
            f"{row.entries}",
            _estimate(row),
            f"{row.exact:g}",
            _chains(row),
            f"{row.fall:.2g}",
        )
        for row in found.itertuples()
    ]
    header = ("model", "entries drawn", "λ̂", "λ at a minimum", "R-hat, effective draws")
    return markdown((*header, "nβ L can fall by"), rows)


def staircase(results: Path) -> str:
    """Learning coefficients on the plateaus of linear attention: all heads, and the live ones alone."""
    found = pd.read_csv(results / "learning_coefficient.csv")
    parts = found[found.part == "all heads"].itertuples()
    whole = {(row.model, row.step): row for row in parts}
    rows = []
    for row in found[found.part == "live heads"].itertuples():
        every = whole[row.model, row.step]
        place = (row.model, f"{row.step:,}", f"{row.learned:.0f}", f"{row.live:.0f}")
        rows.append((*place, _estimate(every), _estimate(row), f"{row.exact:g}"))
    header = ("model", "step", "directions learned", "live heads", "λ̂ of all heads")
    return markdown((*header, "λ̂ of live heads alone", "λ of so many heads"), rows)


def softmax_coefficients(results: Path) -> str:
    """Learning coefficients of softmax models on prompts."""
    found = pd.read_csv(results / "learning_coefficient.csv").query(
        "part.str.startswith('softmax')"
    )
    rows = [
        (
            row.model,
            "minimum of the prompts" if row.part == "softmax settled" else "as trained",
            f"{row.entries}",
            _estimate(row),
            f"{row.fall:.2g}",
            f"{row.moved:.2g}",
        )
        for row in found.itertuples()
    ]
    return markdown(("model", "weights", "entries drawn", "λ̂", "nβ L can fall by", "moved"), rows)


def grid(results: Path) -> str:
    """Learning coefficients at minima that are made by hand, a line for each d_x and law of the tasks."""
    every = _sampler(results, "grid")
    rows = []
    for (d_x, spectrum), found in every.groupby(["d_x", "spectrum"]):
        off = found.estimate - found.exact
        relative = off / found.exact
        within = int(((abs(off) < 3 * found["sem"]) & (abs(relative) < 0.02)).sum())
        largest = f"{abs(off / found['sem']).max():.1f} errors, {100 * abs(relative).max():.1f}%"
        counts = f"{found.n_heads.min():.0f} to {found.n_heads.max():.0f}"
        rows.append((f"{d_x:.0f}", spectrum, counts, f"{within} of {len(found)}", largest))
    header = ("d", "variances of the tasks", "heads", "within 3 errors and 2%", "largest deviation")
    return markdown(header, rows)


def minibatches(results: Path) -> str:
    """A learning coefficient by stochastic gradients without rejection."""
    rows = [
        (
            f"{row.step_size:g}",
            f"{row.batch_size:.0f}",
            "none: " + row.reason
            if np.isnan(row.estimate)
            else f"{row.estimate:.2f} ± {row.sem:.2f}",
            f"{row.exact:g}",
        )
        for row in _sampler(results, "mini-batches").itertuples()
    ]
    return markdown(("step size ε", "prompts of a mini-batch", "λ̂", "λ"), rows)


def temperatures(results: Path) -> str:
    """A learning coefficient over n_beta."""
    rows = [
        (f"{row.n_beta:,.0f}", f"{row.estimate:.2f} ± {row.sem:.2f}", f"{row.r_hat:.3f}")
        for row in _sampler(results, "n_beta").itertuples()
    ]
    return markdown(("nβ", "λ̂", "R-hat"), rows)


def early(results: Path) -> str:
    """Curved directions of a softmax pair while its pattern forms."""
    found = pd.read_csv(results / "softmax_pair_coefficient.csv").query("part == 'early'")
    rows = [
        (
            f"{row.step:,}",
            f"{row.eval_loss:.3f}",
            f"{row.omega:.3f}",
            f"{row.qk_diagonal:.2f}",
            f"{row.curved:.0f}",
            f"{row.negative:.0f}",
        )
        for row in found.itertuples()
    ]
    header = ("step", "loss", "mean of the |ω|", "smaller share of QK on the diagonal")
    return markdown((*header, "curved upwards", "downwards"), rows)


def _sampler(results: Path, part: str) -> pd.DataFrame:
    found = pd.read_csv(results / "linear_coefficient_sampler.csv")
    return found[found.part == part]


def pairs(results: Path) -> str:
    """Curved directions of softmax heads in their circuits."""
    found = pd.read_csv(results / "softmax_pair_coefficient.csv").query("part == 'circuits'")
    rows = [
        (
            row.model,
            f"{row.step:,}",
            f"{row.numbers}",
            f"{row.curved:.0f}",
            f"{row.negative:.0f}",
            f"{row.second:.2g}",
            f"{row.least:.2g} ± {row.least_sem:.1g}",
        )
        for row in found.itertuples()
    ]
    header = ("model", "step", "numbers of the circuits", "curved upwards", "downwards")
    return markdown((*header, "second smallest curvature", "smallest"), rows)


def _estimate(row) -> str:
    return f"{row.estimate:.2f} ± {row.sem:.2f}" if row.is_minimum else "no minimum"


def _chains(row) -> str:
    return f"{row.r_hat:.3f}, {row.effective_draws:,.0f}" if row.is_minimum else ""
