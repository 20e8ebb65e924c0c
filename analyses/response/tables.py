"""Tables of docs/response.md, from results/response_shipped.csv."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analyses.lib.result_tables import markdown
from mechinterp.analysis.number_format import digits, narrow_cell

FORMS = {"a / (s + c)": "ridge-like", "free": "none of these"}


def _rows(results: Path, *, sparse: bool) -> pd.DataFrame:
    found = pd.read_csv(results / "response_shipped.csv")
    return found[found.uses_sparsity.notna() == sparse]


def _c(row: Any) -> str:
    """c with its error; an upper limit has none, and a flat filter has no c."""
    if np.isfinite(row.c) and np.isnan(row.c_sem):
        return f"below {digits(row.c)}"
    return narrow_cell(row.c, row.c_sem)


def shipped(results: Path) -> str:
    """Reading, filter and part left of the models of tasks that are not sparse."""
    rows = [
        (
            row.model,
            row.reading,
            FORMS.get(row.form, row.form),
            _c(row),
            digits(row.c_bayes) if row.c_bayes < 1e6 else "–",
            narrow_cell(row.mean_of_x, row.mean_of_x_sem),
            "own" if row.coordinates else "x",
            narrow_cell(row.left, row.left_sem),
            narrow_cell(row.least, row.least_sem),
        )
        for row in _rows(results, sparse=False).itertuples()
    ]
    header = ("model", "class", "filter", "c", "c of Bayes", "mean of x subtracted")
    return markdown((*header, "coordinates", "left by the filter", "left by all columns"), rows)


def sparse(results: Path) -> str:
    """Use of sparsity by the models of sparse tasks."""
    rows = [
        (
            row.model,
            f"{row.rotation:.5f} ± {row.rotation_sem:.5f}",
            digits(row.rotation_bayes),
            "yes" if row.uses_sparsity in (True, "True") else "no",
            FORMS.get(row.form, row.form),
            _c(row),
            narrow_cell(row.left, row.left_sem),
        )
        for row in _rows(results, sparse=True).itertuples()
    ]
    header = ("model", "rotation", "rotation of the Bayes learner", "uses sparsity")
    return markdown((*header, "filter", "c", "left by the filter"), rows)
