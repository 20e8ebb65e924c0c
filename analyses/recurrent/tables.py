"""Tables of docs/results/recurrent.md, from results/recurrent_weights.csv."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analyses.lib.result_tables import markdown
from mechinterp.analysis.number_format import narrow_cell

SCALARS = {"gated": "eta", "gated_delta": "eta", "mesa": "penalty"}
"""Scalar of a rule beside alpha."""


def _rows(results: Path) -> pd.DataFrame:
    return pd.read_csv(results / "recurrent_weights.csv")


def named(results: Path) -> str:
    """Label of each model, and its excess risk over the Bayes learner's."""
    rows = [
        (
            row.model,
            f"{row.drift:g}",
            f"`{row.label}`",
            row.reading,
            f"{row.r2:.4f}",
            narrow_cell(row.over_bayes, row.over_bayes_sem),
            f"{100 * (row.loss_half / row.loss - 1):.2f}%",
        )
        for row in _rows(results).itertuples()
    ]
    header = ("model", "rho", "`name_algorithm`", "class of `response`", "R² of its rule")
    return markdown((*header, "excess risk / Bayes", "loss at half the steps"), rows)


def scalars(results: Path) -> str:
    """Scalars by the weights, by the fit to predictions, and by the response."""
    rows = [_scalars(row) for row in _rows(results).itertuples()]
    header = ("model", "alpha: weights", "fit", "`response`", "second scalar", "weights", "fit")
    return markdown((*header, "`response`", "factor: weights", "fit"), rows)


def _scalars(row: Any) -> tuple[str, ...]:
    second = SCALARS[row.score]
    alpha = "gate" if row.score == "gated_delta" else "alpha"
    seen = narrow_cell(getattr(row, f"response_{alpha}"), getattr(row, f"response_{alpha}_sem"))
    step = "–"
    if row.score == "gated_delta":
        step = narrow_cell(row.response_eta, row.response_eta_sem)
    return (
        row.model,
        f"{row.weights_alpha:.4f}",
        f"{row.named_alpha:.4f}",
        seen,
        second,
        f"{getattr(row, f'weights_{second}'):.4f}",
        f"{getattr(row, f'named_{second}'):.4f}",
        step,
        "1" if np.isnan(row.weights_factor) else f"{row.weights_factor:.3f}",
        f"{row.named_factor:.3f}",
    )
