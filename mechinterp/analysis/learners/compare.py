"""A model beside simple learners on the same prompts: one row per number of pairs and learner, the
model first."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp import figures
from mechinterp.analysis.learners.nearest import NEAR
from mechinterp.analysis.learners.simple import CROSS_VALIDATED, FOR_SOME_TASKS, LEARNERS, fitted
from mechinterp.analysis.number_format import digits, explained, with_error
from mechinterp.analysis.result import Table, records
from mechinterp.analysis.stats import (
    LARGEST,
    carried_by_few,
    mean_and_sem,
    ratio_and_sem,
    require_moderate,
)
from mechinterp.config import TaskConfig, TaskLike
from mechinterp.display import Result, with_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import law_in_force, prompts_and_law
from mechinterp.models.run.predictor import Learner, Source, is_learner, learner_of, predictor_of
from mechinterp.progress import progress

Pairs = dict[str, tuple[np.ndarray | float, np.ndarray | float]]
NAME, MODEL = "compare_learners", figures.MODEL
EXACT = 1e-9
"""A learner counts as exact if its error is below this fraction of that of predicting 0; no ratio
to it is given."""
LARGEST_ERROR = 0.2
"""A sentence quotes a ratio of risks only if its standard error is at most this fraction of it."""
OFF_CENTRE, CLEARLY = 0.1, 5.0
"""The mean of x or y is clearly not 0 if it exceeds OFF_CENTRE of the root mean square and CLEARLY
standard errors."""
OVERFLOW = "the model's predictions overflow"
DEFAULT = tuple(
    name for name in LEARNERS if name not in FOR_SOME_TASKS and not LEARNERS[name].without
)
"""Learners for any task. A task with a pool adds dmmse, one that drifts the Kalman filter, several
noise levels adaptive ridge regression; prompts whose x or y have a mean add learners with an intercept."""


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
            "Closest to" if first.r2 >= NEAR else f"No learner is close (R² < {NEAR:g}); next:"
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


def compare_learners(
    source: Source | Learner,
    prompts: Prompts | None = None,
    *,
    learners: Sequence[str] = DEFAULT,
    context_lengths: Sequence[int] | None = None,
    task: TaskLike | None = None,
    n_prompts: int | None = None,
    seed: int = 0,
) -> LearnerComparison:
    """Loss, excess risk and distance to the model of simple learners on the same prompts.

    Step sizes and mu are least squares on the model's predictions, and omega of the kernel head is
    a line search over either sign. Ridge has the penalty of the task's law, which makes it the
    Bayes predictor of a Gaussian task; `best_ridge`, `gd` and `algorithm_1` have the penalty, or
    the number of steps up to 128, that is best on these prompts, which favours them. GD descends
    from zero with the step 1/λ_max of each prompt; Algorithm 1 does so on x reweighted by its
    correlations with y. After k pairs the next x of the prompt is predicted.

    Args:
        source: A model, or a function from prompts to predictions. Of a function with predictions
            after every layer, the last ones are used.
        prompts: Prompts to use; None draws `n_prompts` of the task with `seed`, the same as for
            every analysis.
        learners: Names in `LEARNERS`. A task with a pool adds dmmse. Prompts whose x or y have a
            mean add ridge and least squares with an intercept.
        context_lengths: Numbers of pairs, from 0; None means all pairs of the prompts. A causal
            model whose tokens come in turn is run once for all of them.
        task: Law of the prompts; None means the model's own. If it is unknown, the penalty of ridge
            is cross-validated over the prompts, for each number of pairs.
        n_prompts: None means 4096, or 512 for models with norms or MLPs.
    Raises:
        ValueError: If there is no task to draw prompts from, a learner is unknown, a number of
            pairs is not in 0 to L, there are too few prompts, or all predictions overflow.
    Source:
        He et al. 2025, arXiv 2503.12734, section 4 and eq. (4.12), for gradient steps and kernel
        head. Algorithm 1 is our reading of Chen, Zhao and Zou 2024, arXiv 2408.04532.
    See also:
        `error_curve`, `classify`, `name_algorithm`, `compare_priors`.
    Example:
        >>> from mechinterp.models.constructions.one_layer import debiased_gradient_step
        >>> found = compare_learners(debiased_gradient_step(0.88, 0.05, d_x=5))
        >>> found.best, round(float(found.at_trained.factor["debiased_gd"]), 2)
        ('debiased_gd', 0.88)
    """
    require_learners(learners)
    own = law_in_force(source, task, NAME, prompts)
    used, law = prompts_and_law(
        source,
        prompts,
        analysis=NAME,
        task=task,
        n_prompts=n_prompts,
        seed=seed,
        context_length=longer(own, context_lengths) if prompts is None else None,
        fitted=2 if any(LEARNERS[name].is_fitted for name in learners) else 0,  # omega and mu
    )
    lengths = require_lengths(context_lengths, used.x.shape[1])
    centre = off_centre(used) if prompts is not None else ""
    names = with_companions(learners, law, intercepts=bool(centre))
    notes = [centre, law_note(law, names)]
    return _Comparison(source, used, law, names).at(lengths, notes)


def longer(law: TaskConfig | None, lengths: Sequence[int] | None) -> int | None:
    """Pairs of drawn prompts if they are more than the task's own; None: the task's own, so that
    shorter prompts are the first pairs of those of every analysis."""
    longest = max(lengths or [0])
    return longest if law is not None and longest > law.context_length else None


def require_learners(learners: Sequence[str]) -> None:
    """Refuse unknown learners.

    Raises:
        ValueError: If there is none, or a name is not in `LEARNERS`.
    """
    if isinstance(learners, str) or not learners or not {*learners} <= LEARNERS.keys():
        got = learners if isinstance(learners, str) else list(learners)
        raise ValueError(f"learners must be a list of {', '.join(LEARNERS)}, got {got!r}.")


def require_lengths(given: Sequence[int] | None, longest: int) -> list[int]:
    """Numbers of pairs, rising; None: that of the prompts.

    Raises:
        ValueError: If a number is not in 0 to the number of pairs of the prompts.
    """
    if given is None:
        return [longest]
    if not len(given) or min(given) < 0 or max(given) > longest:
        raise ValueError(f"context_lengths must lie in 0 to {longest}, got {list(given)}.")
    return sorted({int(length) for length in given})


def with_companions(
    learners: Iterable[str], law: TaskConfig | None, *, intercepts: bool
) -> tuple[str, ...]:
    """Learners, with the Bayes learner of a task with a pool, a drift or several noise levels, and with an intercept
    where asked."""
    names = [*learners]
    if law is None and (unknown := [name for name in names if name in FOR_SOME_TASKS]):
        raise ValueError(f"{unknown[0]} needs the law of the prompts: state it by task= (--task).")
    if law is not None:
        names += [name for name, applies in FOR_SOME_TASKS.items() if applies(law)]
    if intercepts:
        names += [name for name, each in LEARNERS.items() if each.without in names]
    return tuple(dict.fromkeys(names))


def off_centre(prompts: Prompts) -> str:
    """Sentence that the mean of x or y is clearly not 0; empty if it is not.

    Example:
        >>> x = torch.randn(8, 5, 2)
        >>> off_centre(Prompts.from_arrays(x, x[..., 0], x[:, 0], x[:, 0, 0])), off_centre(
        ...     Prompts.from_arrays(x + 9, x[..., 0], x[:, 0] + 9, x[:, 0, 0]))[:37]
        ('', 'The mean of x is clearly not 0, so th')
    """
    tokens = {"x": prompts.every_x, "y": prompts.y_of_every_x}
    off = []
    for name, each in tokens.items():
        values = each.double().numpy(force=True)
        mean, sem = mean_and_sem(values.mean(1))
        size = np.sqrt(np.square(values).mean((0, 1)))
        if (np.abs(mean) > np.maximum(OFF_CENTRE * size, CLEARLY * sem)).any():
            off.append(name)
    if not off:
        return ""
    return (
        f"The mean of {' and of '.join(off)} is clearly not 0, so that ridge and least squares with "
        "an intercept are compared too."
    )


def law_note(law: TaskConfig | None, names: Sequence[str]) -> str:
    """Sentence on the penalty of ridge regression if the law of the prompts is unknown."""
    if law is not None or not set(names) & set(CROSS_VALIDATED):
        return ""
    return (
        "The law of the prompts is unknown: the penalty of ridge is chosen by cross-validation over "
        "prompts, for each number of pairs. State the law by task=."
    )


@dataclass(frozen=True, eq=False)
class _Comparison:
    """A model and learners on given prompts of a law."""

    source: Source | Learner
    prompts: Prompts
    law: TaskConfig | None
    names: Sequence[str]

    def at(self, lengths: Sequence[int], notes: Iterable[str]) -> LearnerComparison:
        """Rows at several numbers of pairs, and means over the trained ones."""
        every = None
        if not is_learner(self.source):
            every = predictor_of(self.source).predict_at_every(self.prompts)
        longest = self.law.context_length if self.law else self.prompts.x.shape[1]
        trained = trained_lengths(self.source, lengths, longest)
        rows, losses, wild = list[dict[str, object]](), list[np.ndarray](), list[int]()
        for length in progress(lengths, "learners at each number of pairs"):
            some = self.prompts.prefix(length)
            own = learner_of(self.source)(some) if every is None else every[:, length]
            if not moderate(own):
                if len(lengths) == 1:
                    require_moderate(own)
                wild.append(length)
                own = torch.full_like(own, torch.nan)
            at_length, loss = rows_at(own, some.to(torch.float64), self.law, self.names)
            note = OVERFLOW if length in wild else ""
            rows += [{"n_pairs": length} | row | {"note": note} for row in at_length]
            if length in trained and length not in wild:
                losses.append(loss)
        if len(wild) == len(lengths):
            require_moderate(torch.tensor(torch.inf))
        kept = [n for n in trained if n not in wild] or [n for n in lengths if n not in wild][-1:]
        return LearnerComparison(
            rows=pd.DataFrame(rows),
            means=mean_losses(losses, (MODEL, *self.names)),
            trained=(kept[0], kept[-1]),
            n_prompts=len(self.prompts),
            one_pass=every is not None,
            notes=tuple(filter(None, [*notes, overflow_note(wild)])),
        )


def moderate(predictions: Tensor) -> bool:
    """True if all predictions are finite and their squares do not overflow."""
    return bool(predictions.detach().abs().max() <= LARGEST)


def overflow_note(lengths: Sequence[int]) -> str:
    """Sentence on the numbers of pairs at which predictions overflow; empty if there are none.

    Example:
        >>> overflow_note([1, 2])
        "The model's predictions overflow after 1, 2 pairs, which have no numbers and enter no mean."
    """
    after = ", ".join(map(str, lengths))
    start = OVERFLOW[0].upper() + OVERFLOW[1:]
    return f"{start} after {after} pairs, which have no numbers and enter no mean." if after else ""


def trained_lengths(source: Source | Learner, lengths: Sequence[int], longest: int) -> list[int]:
    """Numbers of pairs within those of a checkpoint's training; the largest if there are none.

    A model without a known training counts as trained up to `longest`, the task's own number.
    """
    shortest = min(getattr(source, "shortest_trained", None) or 0, longest)
    inside = [length for length in lengths if shortest <= length <= longest]
    return inside or list(lengths[-1:])


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
            exact = risk[:, index].mean() <= EXACT * zero
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
        exact = own.mean() <= EXACT * zero.mean()
        ratio = (np.nan, np.nan) if exact else ratio_and_sem(columns[0], own)
        pairs = zip(with_sem("loss", "ratio"), (*mean_and_sem(own), *ratio), strict=True)
        few = {"median_loss": np.median(own), "carried_by_few": bool(carried_by_few(own))}
        rows.append({"learner": name} | {key: float(value) for key, value in pairs} | few)
    return pd.DataFrame(rows)


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
