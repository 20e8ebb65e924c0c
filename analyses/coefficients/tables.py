"""Tables of the page on the local learning coefficient, from the CSV files of its scripts."""

from pathlib import Path

import pandas as pd

from analyses.lib.result_tables import table


def coefficients(results: Path) -> str:
    """Learning coefficients of linear attention at the end of training."""
    columns = {
        "model": "{0.model}",
        "entries drawn": "{0.entries}",
        "λ̂": _estimate,
        "λ at a minimum": "{0.exact:g}",
        "R-hat, effective draws": _chains,
        "nβ L can fall by": "{0.fall:.2g}",
    }
    return table(_measured(results).query("part == 'end'"), columns)


def staircase(results: Path) -> str:
    """Learning coefficients on the plateaus of linear attention: all heads, and the live ones alone."""
    found = _measured(results)
    parts = found[found.part == "all heads"].itertuples()
    whole = {(row.model, row.step): _estimate(row) for row in parts}
    columns = {
        "model": "{0.model}",
        "step": "{0.step:,}",
        "directions learned": "{0.learned:.0f}",
        "live heads": "{0.live:.0f}",
        "λ̂ of all heads": lambda row: whole[row.model, row.step],
        "λ̂ of live heads alone": _estimate,
        "λ of so many heads": "{0.exact:g}",
    }
    return table(found[found.part == "live heads"], columns)


def softmax_coefficients(results: Path) -> str:
    """Learning coefficients of softmax models on prompts."""
    found = _measured(results).query("part.str.startswith('softmax')")
    weights = {"softmax settled": "minimum of the prompts"}
    columns = {
        "model": "{0.model}",
        "weights": lambda row: weights.get(row.part, "as trained"),
        "entries drawn": "{0.entries}",
        "λ̂": _estimate,
        "nβ L can fall by": "{0.fall:.2g}",
        "moved": "{0.moved:.2g}",
    }
    return table(found, columns)


def pairs(results: Path) -> str:
    """Curved directions of softmax heads in their circuits."""
    found = pd.read_csv(results / "coefficients_pairs.csv").query("part == 'circuits'")
    columns = {
        "model": "{0.model}",
        "step": "{0.step:,}",
        "numbers of the circuits": "{0.numbers}",
        "curved upwards": "{0.curved:.0f}",
        "downwards": "{0.negative:.0f}",
        "second smallest curvature": "{0.second:.2g}",
        "smallest": "{0.least:.2g} ± {0.least_sem:.1g}",
    }
    return table(found, columns)


def _measured(results: Path) -> pd.DataFrame:
    return pd.read_csv(results / "coefficients_learning.csv")


def _estimate(row) -> str:
    return f"{row.estimate:.2f} ± {row.sem:.2f}" if row.is_minimum else "no minimum"


def _chains(row) -> str:
    return f"{row.r_hat:.3f}, {row.effective_draws:,.0f}" if row.is_minimum else ""
