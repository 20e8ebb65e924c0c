"""Rows of a model and simple learners at one number of pairs: losses, risks, distances and leads, with errors."""

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.learners.learner_comparison import LearnerComparison
from mechinterp.analysis.learners.simple import fitted
from mechinterp.analysis.stats import carried_by_few, mean_and_sem, ratio_and_sem
from mechinterp.config import TaskConfig
from mechinterp.display import with_sem
from mechinterp.figures import MODEL
from mechinterp.icl.prompts import Prompts

Pairs = dict[str, tuple[np.ndarray | float, np.ndarray | float]]
EXACT_RISK = 1e-9
"""A learner counts as exact if its error is below this fraction of that of predicting 0; no ratio
to it is given."""


def rows_at(
    own: Float[Tensor, "batch d_y"], prompts: Prompts, law: TaskConfig | None, names: Iterable[str]
) -> tuple[list[dict[str, object]], Float[np.ndarray, "prompt learner"]]:
    """Rows at one number of pairs, the model's first, and the squared errors of each against y; the
    last column has those of predicting 0."""
    f, y, clean = (
        each.double().numpy(force=True) for each in (own, prompts.y_query, prompts.y_query_clean)
    )
    fits = {name: fitted(name, prompts, law, f) for name in names}
    predicted = [f, *(fit.prediction for fit in fits.values())]
    distance, loss, risk = (
        np.stack([np.square(each - to).mean(1) for each in predicted], 1) for to in (f, y, clean)
    )
    zero = np.square(clean).mean()
    nearest = 1 + int(np.nan_to_num(distance[:, 1:].mean(0), nan=np.inf).argmin())
    rows: list[dict[str, object]] = []
    for index, name in enumerate((MODEL, *fits)):
        pairs: Pairs = {
            "loss": mean_and_sem(loss[:, index]),
            "risk": mean_and_sem(risk[:, index]),
        }
        values: dict[str, object] = {
            "median_loss": np.median(loss[:, index]),
            "median_risk": np.median(risk[:, index]),
            "carried_by_few": bool(carried_by_few(risk[:, index])),
        }
        if index:
            unexplained, sem = ratio_and_sem(distance[:, index], np.square(f).mean(1))
            gap = distance[:, index] - distance[:, nearest]
            exact = risk[:, index].mean() <= EXACT_RISK * zero
            pairs |= {
                "loss_gap": mean_and_sem(loss[:, 0] - loss[:, index]),
                "ratio": (np.nan, np.nan) if exact else ratio_and_sem(risk[:, 0], risk[:, index]),
                "r2": (1 - unexplained, sem),
                "lead": ratio_and_sem(gap, np.square(f).mean(1)),
                "factor": (fits[name].factor, fits[name].factor_sem),
            }
            values["setting"] = fits[name].setting
        rows.append({"learner": name} | ordered(pairs, values))
    return rows, np.column_stack([loss, np.square(y).mean(1)])


def ordered(pairs: Pairs, values: dict[str, object]) -> dict[str, object]:
    """Values and standard errors of a row in the order of the columns; NaN for missing numbers."""
    row: dict[str, object] = {}
    for name in LearnerComparison.COLUMNS:
        if name in ("loss", "loss_gap", "risk", "ratio", "r2", "lead", "factor"):
            pair = pairs.get(name, (np.nan, np.nan))
            row |= {each: float(v) for each, v in zip(with_sem(name), pair, strict=True)}
        elif name not in ("n_pairs", "learner", "note"):
            row[name] = values.get(name, np.nan)
    return row


def mean_losses(
    losses: Sequence[Float[np.ndarray, "prompt column"]], names: Sequence[str]
) -> pd.DataFrame:
    """Mean loss of each learner over numbers of pairs, and the model's divided by it.

    Args:
        losses: Squared errors at each number of pairs, as `rows_at` returns them.
    """
    *columns, zero = np.mean(losses, 0).T
    rows = []
    for name, own in zip(names, columns, strict=True):
        exact = own.mean() <= EXACT_RISK * zero.mean()
        ratio = (np.nan, np.nan) if exact else ratio_and_sem(columns[0], own)
        pairs = zip(with_sem("loss", "ratio"), (*mean_and_sem(own), *ratio), strict=True)
        few = {"median_loss": np.median(own), "carried_by_few": bool(carried_by_few(own))}
        rows.append({"learner": name} | {key: float(value) for key, value in pairs} | few)
    return pd.DataFrame(rows)
