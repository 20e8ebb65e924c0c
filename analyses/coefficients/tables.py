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


def grid(results: Path) -> str:
    """Learning coefficients at minima that are made by hand, a line for each d_x and law of the tasks."""
    every = _sampler(results, "grid").assign(
        off=lambda rows: abs(rows.estimate - rows.exact), errors=lambda rows: rows.off / rows["sem"]
    )
    every["relative"] = every.off / every.exact
    every["within"] = (every.errors < 3) & (every.relative < 0.02)
    laws = every.groupby(["d_x", "spectrum"], as_index=False)
    found = laws.agg(
        most=("n_heads", "max"),
        cases=("within", "size"),
        within=("within", "sum"),
        errors=("errors", "max"),
        relative=("relative", "max"),
    )
    columns = {
        "d": "{0.d_x:.0f}",
        "variances of the tasks": "{0.spectrum}",
        "heads": "1 to {0.most:.0f}",
        "within 3 errors and 2%": "{0.within} of {0.cases}",
        "largest deviation": "{0.errors:.1f} errors, {0.relative:.1%}",
    }
    return table(found, columns)


def minibatches(results: Path) -> str:
    """A learning coefficient by stochastic gradients without rejection."""
    columns = {
        "step size ε": "{0.step_size:g}",
        "prompts of a mini-batch": "{0.batch_size:.0f}",
        "λ̂": "{0.estimate:.2f} ± {0.sem:.2f}",
        "λ": "{0.exact:g}",
    }
    return table(_sampler(results, "mini-batches"), columns)


def temperatures(results: Path) -> str:
    """A learning coefficient over n_beta."""
    columns = {
        "nβ": "{0.n_beta:,.0f}",
        "λ̂": "{0.estimate:.2f} ± {0.sem:.2f}",
        "R-hat": "{0.r_hat:.3f}",
    }
    return table(_sampler(results, "n_beta"), columns)


def early(results: Path) -> str:
    """Curved directions of a softmax pair while its pattern forms."""
    columns = {
        "step": "{0.step:,}",
        "loss": "{0.eval_loss:.3f}",
        "mean size of ω": "{0.omega:.3f}",
        "QK on the diagonal": "{0.qk_diagonal:.2f}",
        "ω of two signs": lambda row: "yes" if row.signs_differ else "no",
        "curved upwards": "{0.curved:.0f}",
        "downwards": "{0.negative:.0f}",
    }
    found = pd.read_csv(results / "coefficients_pairs.csv").query("part == 'early'")
    return table(found, columns)


def _sampler(results: Path, part: str) -> pd.DataFrame:
    found = pd.read_csv(results / "coefficients_sampler.csv")
    return found[found.part == part]


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
