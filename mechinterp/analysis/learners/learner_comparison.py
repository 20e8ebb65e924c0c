"""A model and simple learners on the same prompts, at each number of pairs: the result of `compare_learners`."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float

from mechinterp import figures
from mechinterp.analysis.learners.nearest import NEAR_R2
from mechinterp.analysis.learners.simple import LEARNERS
from mechinterp.analysis.number_format import digits, explained, with_error
from mechinterp.analysis.result import Table, records
from mechinterp.display import Result
from mechinterp.figures import MODEL

LARGEST_ERROR = 0.2
"""A sentence quotes a ratio of risks only if its standard error is at most this fraction of it."""


@dataclass(frozen=True, eq=False, repr=False)
class LearnerComparison(Result):
    """A model and simple learners on the same prompts, at each number of pairs.

    The columns of the frames are in `COLUMNS`, most with a standard error over prompts; differences
    and ratios are paired. Rows of the model have no distance to itself.
    """

    COLUMNS: ClassVar = {
        "n_pairs": "Number of pairs before the predicted x.",
        "learner": "The model, or a simple learner.",
        "loss": "Mean squared error against y, noise included.",
        "risk": "Excess risk: mean squared error against y without noise. Equal to the loss if that y is unknown.",
        "ratio": "Excess risk of the model divided by that of the learner; empty if the learner makes no error.",
        "r2": "1 - mean (model - learner)^2 / mean model^2.",
        "factor": "Factor that is fitted to the model: step size eta of the gradient steps (1/x^2), and mu times the sign of omega for the kernel head.",
        "setting": "Chosen setting: penalty of ridge regression (x^2), number of steps, omega of the kernel head (1/x^2).",
        "loss_gap": "Loss of the model minus loss of the learner.",
        "lead": "R^2 of the nearest learner minus R^2 of this learner; its error leaves out that another learner may be nearest on other prompts.",
        "median_loss": "Median over prompts of the squared error against y.",
        "median_risk": "Median over prompts of the squared error against y without noise.",
        "carried_by_few": "True if the worst 1% of the prompts make up more than half of the risk: then read the median.",
        "note": "Reason why numbers of the model are missing.",
    }
    UNITS: ClassVar = {"y²": ("loss", "risk", "loss_gap", "median_loss", "median_risk")}

    rows: pd.DataFrame
    """Numbers of each number of pairs and learner."""
    means: pd.DataFrame
    """Mean loss of each learner over the trained numbers of pairs, and `ratio`: mean loss of the
    model divided by it."""
    trained: tuple[int, int]
    """First and last number of pairs of the means: those of the model's training, if known."""
    n_prompts: int
    one_pass: bool
    """True if one pass gave all numbers of pairs, by the prefix check; False: one run for each."""
    notes: tuple[str, ...]
    """Sentences on an unknown law, means of x or y, and numbers of pairs that overflow."""

    @property
    def at_trained(self) -> pd.DataFrame:
        """Rows of the largest trained number of pairs, by learner."""
        return self.rows[self.rows.n_pairs == self.trained[1]].set_index("learner")

    @property
    def learners(self) -> tuple[str, ...]:
        """The model, then the learners."""
        return tuple(self.means.learner)

    @property
    def nearest(self) -> pd.DataFrame:
        """Rows of the learners at the largest trained number of pairs, nearest to the model first."""
        others = self.at_trained.drop(MODEL)
        return others.sort_values("r2", ascending=False, kind="stable")

    @property
    def best(self) -> str:
        """Learner nearest to the model at the largest trained number of pairs."""
        return str(self.nearest.index[0])

    @property
    def headline(self) -> str:
        """The nearest learner and its R²."""
        first = self.nearest.iloc[0]
        return f"{self.best}, {explained(first.r2, first.r2_sem)}"

    @property
    def verdict(self) -> str:
        """Sentence: the nearest learner, its distance, and the next learner."""
        first, *others = (row for _, row in self.nearest.iterrows())
        if np.isnan(first.r2):
            return "The model predicts 0 on every prompt."
        letter = LEARNERS[self.best].factor
        factor = f", {letter} = {with_error(first.factor, first.factor_sem)}" if letter else ""
        closest = (
            "Closest to"
            if first.r2 >= NEAR_R2
            else f"No learner is close (R² < {NEAR_R2:g}); next:"
        )
        text = f"{closest} {self.best}{factor}: {explained(first.r2, first.r2_sem)} after {self.trained[1]} pairs"
        for second in others[:1]:
            clear = second.lead > 2 * second.lead_sem
            text += f"; then {second.name}, R² = {second.r2:.4f}"
            text += "" if clear else " (the difference is not significant)"
        return f"{text}."

    @property
    def risks(self) -> str:
        """Sentence: excess risk of the model, and its ratio to that of each learner.

        Ratios with an error above `LARGEST_ERROR` of them are left out.
        """
        at = self.at_trained
        model = at.loc[MODEL]
        quoted = at[sharp(at.ratio, at.ratio_sem)]
        ratios = [
            f"{with_error(row.ratio, row.ratio_sem)} times that of {'predicting 0' if name == 'zero' else name}"
            for name, row in quoted.iterrows()
        ]
        size = f"is {with_error(model.risk, model.risk_sem)} y²"
        if model.carried_by_few:
            size = f"has the median {digits(model.median_risk)} y² over prompts"
        return f"The model's excess risk {size}{': ' if ratios else ''}{'; '.join(ratios)}."

    @property
    def few(self) -> list[str]:
        """Sentence on the risks that a few prompts decide."""
        at = self.at_trained[self.at_trained.carried_by_few]
        return few_text("risks", zip(at.index, at.median_risk, strict=True))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({' '.join(self.sentences())})"

    def sentences(self) -> list[str]:
        """The nearest learner, the risks, and what to know about them."""
        return [self.verdict, self.risks, *self.few, *self.notes]

    def to_frame(self) -> pd.DataFrame:
        """One row per number of pairs and learner, the model first."""
        return self.rows.copy()

    def tables(self) -> dict[str, Table]:
        """All rows; those of the largest trained number of pairs come first."""
        quiet = (
            *("n_pairs", "loss_gap", "loss_gap_sem", "lead", "lead_sem", "median_loss"),
            *("median_risk", "carried_by_few", "note"),
        )
        title = f"Learners after {self.trained[1]} pairs"
        at = Table(self.at_trained.reset_index(), title, quiet=quiet)
        every = Table(self.to_frame(), "Learners at each number of pairs", brief=False)
        one = self.rows.n_pairs.nunique() == 1
        return {"learners": at} if one else {"learners": at, "learners_by_n_pairs": every}

    def to_document(self) -> dict:
        """Fields of the JSON document."""
        fields = {name: getattr(self, name) for name in ("best", "verdict", "n_prompts", "notes")}
        pairs = {"trained": list(self.trained), "one_pass": self.one_pass}
        return fields | pairs | {"means": records(self.means), "rows": records(self.rows)}

    def figures(self) -> dict[str, go.Figure]:
        """Loss and risk over the number of pairs; for a single number the risk as bars."""
        if self.rows.n_pairs.nunique() == 1:
            return {"learner_risk": self.plot_bars()}
        return {"learner_loss": self.plot(), "learner_risk": self.plot_risk()}

    def plot(self) -> go.Figure:
        """Loss over the number of pairs; bars of the excess risk if there is one number only."""
        if self.rows.n_pairs.nunique() == 1:
            return self.plot_bars()
        return self._curves("loss", "Loss over the number of in-context examples", "loss (y²)")

    def plot_risk(self) -> go.Figure:
        """Excess risk over the number of pairs."""
        title = "Excess risk over the number of in-context examples"
        return self._curves("risk", title, "excess risk (y²)")

    def plot_bars(self) -> go.Figure:
        """Excess risk of the model and of each learner; predicting 0, and risks above twice that,
        are left out, because they would dwarf the others."""
        at = self.at_trained
        scale = at.risk.get("zero", np.inf)
        shown = at[(at.index != "zero") & ((at.risk <= 2 * scale) | (at.index == MODEL))]
        return figures.bars(
            shown.index.tolist(),
            {"excess risk": (shown.risk.to_numpy(), shown.risk_sem.to_numpy())},
            title=f"Excess risk of the model and of learners after {self.trained[1]} pairs",
            y_title="excess risk (y²)",
        )

    def _curves(self, column: str, title: str, y_title: str) -> go.Figure:
        """A column over the number of pairs, a curve for each learner."""
        wide = self.rows.pivot(index="n_pairs", columns="learner", values=[column, f"{column}_sem"])
        values = wide[column][list(self.learners)]
        # Least squares has errors of any size at d_x pairs, and would hide the other curves.
        if "zero" in values:
            values = values.where(values <= 2 * values["zero"].max())
        errors = wide[f"{column}_sem"][list(self.learners)]
        curves = figures.named(self.learners, values.to_numpy().T, errors.to_numpy().T)
        axis = "in-context examples"
        return figures.lines(
            wide.index.to_numpy(), curves, title=title, x_title=axis, y_title=y_title
        )


def few_text(what: str, medians: Iterable[tuple[str, float]]) -> list[str]:
    """Sentence on means that a few prompts decide, with the medians; none if there are none.

    Example:
        >>> few_text("risks", [("least_squares", 0.31)])[0][-45:]
        'read their medians (y²): least_squares 0.310.'
    """
    named = ", ".join(f"{name} {digits(median)}" for name, median in medians)
    start = f"The worst 1% of the prompts make up more than half of these {what}"
    return [f"{start}, so read their medians (y²): {named}."] if named else []


def sharp(ratio: float | Float[np.ndarray, " row"], sem: float | Float[np.ndarray, " row"]) -> Any:
    """True where a ratio is known to `LARGEST_ERROR` of it.

    Example:
        >>> sharp(np.array([2.0, 2.0, np.nan]), np.array([0.3, 0.5, 0.0])).tolist()
        [True, False, False]
    """
    return sem <= LARGEST_ERROR * ratio
