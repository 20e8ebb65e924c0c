"""Tables of the page on the local learning coefficient that need more than a CSV file;
analyses/tables.toml has the other tables."""

from pathlib import Path

import pandas as pd

from analyses.lib.result_tables import table

ESTIMATE = ["is_minimum", "{0.estimate:.2f} ± {0.sem:.2f}", "no minimum"]


def staircase(results: Path) -> str:
    """Learning coefficients on the plateaus of linear attention: for all heads, and for the live
    heads alone."""
    found = pd.read_csv(results / "coefficients_learning.csv").set_index(["model", "step"])
    whole, live = (found[found.part == f"{heads} heads"] for heads in ("all", "live"))
    of_all = [f"whole_{ESTIMATE[0]}", ESTIMATE[1].replace("0.", "0.whole_"), ESTIMATE[2]]
    columns = {
        "model": "{0.model}",
        "step": "{0.step:,}",
        "directions learned": "{0.learned:.0f}",
        "live heads": "{0.live:.0f}",
        "λ̂ of all heads": of_all,
        "λ̂ of live heads alone": ESTIMATE,
        "exact λ for live heads": "{0.exact:g}",
    }
    return table(live.join(whole.add_prefix("whole_")).reset_index(), columns)


def grid(results: Path) -> str:
    """Learning coefficients at minima built by hand, one line for each d_x and law of the tasks."""
    every = pd.read_csv(results / "coefficients_sampler.csv").query("part == 'grid'")
    every = every.assign(off=abs(every.estimate - every.exact))
    every["errors"], every["relative"] = every.off / every["sem"], every.off / every.exact
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
