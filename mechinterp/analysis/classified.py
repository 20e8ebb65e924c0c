"""Common part of all classifications: label, nearest learner, loss, task, and the verdict, which says
what the model computes, how certain that is, and which learners are ruled out."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import numpy as np
import plotly.graph_objects as go

from mechinterp.analysis.labels import Label
from mechinterp.analysis.learners.nearest import NEAR_R2, Nearby, TaskLoss, task_doubt
from mechinterp.analysis.number_format import p_text
from mechinterp.config import TaskConfig
from mechinterp.display import Result
from mechinterp.icl.given import PromptsTask, no_law

HIGH = 0.1
"""Largest upper bound of the fraction of wrong labels at which a label without an error is
mentioned."""
Z95 = 1.959964
"""Normal quantile of a two-sided 95% interval."""
LEFT_OUT = (
    "Left out, because the law of the prompts is unknown: {parts}. Ridge regression has the penalty that is best on "
    "these prompts; state their law by task= (--task)."
)
"""Sentence on the parts that are left out."""
NOTHING_EXCLUDED = "no other learner predicts clearly worse"


@dataclass(frozen=True)
class Verdict:
    """Verdict on a model, in three to five lines."""

    computes: str
    """Formula with its numbers."""
    sure: str
    """R² of the formula, success of random weights, and how often the label is wrong."""
    is_not: str
    """Best learner among those that explain the predictions clearly less, and the difference."""
    alike: str = ""
    """Learners that explain the predictions equally well; empty if there are none."""
    doubt: str = ""
    """Reason why the task may be another one than assumed; empty if there is none."""

    @property
    def lines(self) -> dict[str, str]:
        """Texts by heading; empty texts are left out."""
        texts = {
            "What it computes": self.computes,
            "How sure": self.sure,
            "What predicts as well": self.alike,
            "What it is not": self.is_not,
            "What to doubt": self.doubt,
        }
        return {heading: text for heading, text in texts.items() if text}

    def __str__(self) -> str:
        return "\n".join(f"{heading}: {text}." for heading, text in self.lines.items())


def nearest_learners(computes: str, near: Nearby, *, chance: str = "", doubt: str = "") -> Verdict:
    """Verdict on a model without a formula: the nearest simple learner, and the next ones."""
    sure = f"{near.sentence}{chance}"
    if not near.is_near:
        return Verdict(computes, sure, "close to any simple learner", doubt=doubt)
    r2, sem, rest = near.r2, near.r2_sem, range(1, len(near.learners))
    behind = [n for n in rest if is_behind(r2[0] - r2[n], math.hypot(sem[0], sem[n]))]
    return Verdict(
        computes,
        sure,
        is_not=f"{near.in_words(behind[0])} (clearly lower)" if behind else NOTHING_EXCLUDED,
        alike="; ".join(near.in_words(n) for n in rest if n not in behind),
        doubt=doubt,
    )


def is_behind(lead: float, sem: float, least: float = 0.0) -> bool:
    """True if a learner explains less than the winner, by more than the standard error and by more
    than `least`.

    An undefined R² counts as behind. So does one that is lower by 0.5 or more whatever its error:
    if predictions explode on a few prompts, the error is as large as the difference.

    Example:
        >>> is_behind(0.0027, 0.0004), is_behind(-0.0003, 0.0002), is_behind(99.0, 97.0)
        (True, False, True)
    """
    return not lead <= min(max(2 * sem, least), NEAR_R2)


def chance_text(p: float, n_random: int, weights: str) -> str:
    """Number of models with random weights that do the task as well, with the p-value.

    Args:
        p: (k + 1) / (n_random + 1), where k random models reach the loss.
        weights: Kind of random weights, as text.
    Example:
        >>> chance_text(1 / 401, 400, "random weights")
        'none of 400 models with random weights does the task as well (p < 0.0025)'
        >>> chance_text(12 / 401, 400, "random weights")
        '11 of 400 models with random weights do the task as well (p = 0.03)'
    """
    if np.isnan(p):
        return f"models with {weights} were not compared, because the loss is not defined"
    count = round(p * (n_random + 1)) - 1
    many = f"{count or 'none'} of {n_random} models with {weights}"
    verb = "does" if count < 2 else "do"
    return f"{many} {verb} the task as well ({p_text(p, n_random)})"


def upper_limit(wrong: int, named: int) -> float:
    """Upper end of Wilson's 95% interval for a fraction.

    Example:
        >>> round(upper_limit(0, 293), 4), round(upper_limit(3, 24), 4)
        (0.0129, 0.31)
    """
    share, z2 = wrong / named, Z95**2
    spread = Z95 * math.sqrt(share * (1 - share) / named + z2 / (4 * named**2))
    return (share + z2 / (2 * named) + spread) / (1 + z2 / named)


def calibration_text(label: Label) -> str:
    """Fraction of calibration models that got this label although it is wrong.

    Empty if there is no error and too few models to bound the fraction by `HIGH`.

    Example:
        >>> from mechinterp.analysis.labels import ALGORITHM_LABELS
        >>> calibration_text(ALGORITHM_LABELS["newton"])
        ''
    """
    if not label.named:
        return ""
    limit = upper_limit(label.wrong, label.named)
    if not label.wrong and limit > HIGH:
        return ""
    return (
        f"; the label was wrong for {label.wrong} of {label.named} calibration models that got it "
        f"(95% upper bound {limit:.1%})"
    )


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Classified(Result):
    """Label of a model, with the fields that all kinds of models share."""

    label: str
    reason: str
    """Sentence with the number that decided."""
    near: Nearby
    """R² of simple learners against the prediction, nearest first."""
    loss: TaskLoss
    best_factor: float
    """Factor on the prediction that minimises the loss; 1 at the optimum of the task that a model
    was trained on."""
    best_factor_sem: float
    task: TaskConfig
    """Law of the prompts."""
    n_prompts: int
    trained_here: bool = False
    """True if this package trained the model, so that its task is certain."""
    reading_doubt: str = ""
    """Why the file of the model may have been read wrongly; empty if nothing suggests it."""

    needs_law: ClassVar = "the best step size, components"
    """Parts of the result that need the law of the prompts."""
    heads_title: ClassVar[str]
    """Heading above the lines of the heads."""

    def relabelled(self, label: str, reason: str) -> "Classified":
        """This result with the label of the whole file, if the file has several readings."""
        return replace(self, label=label, reason=reason)

    @property
    def verdict(self) -> Verdict:
        """Sentences: what the model computes, how certain that is, and which learners are ruled
        out."""
        raise NotImplementedError

    def plot(self) -> go.Figure:
        """Figure of the heads."""
        raise NotImplementedError

    @property
    def brief(self) -> str:
        """The R² behind the label, or why there is none, for a line in a list of models."""
        raise NotImplementedError

    @property
    def evidence(self) -> dict[str, Any]:
        """Numbers behind the label by name, of any shape; a standard error has the name of its number with `_sem`."""
        raise NotImplementedError

    @property
    def row(self) -> dict[str, object]:
        """Row of this model in a table of many models: label, reason, and evidence that is a single number or word, None for other
        evidence."""
        numbers = {name: _single(value) for name, value in self.whole_evidence.items()}
        return numbers | {"pattern": self.label, "reason": self.reason}

    def head_lines(self, rows: int) -> list[str]:
        """One line per head, at most `rows`, in the columns of `heads_title`."""
        raise NotImplementedError

    @property
    def task_doubt(self) -> str:
        """Why the model may have been trained on another task, or read wrongly; empty if nothing
        suggests it."""
        if self.trained_here or self.reading_doubt:
            return self.reading_doubt
        factor = (self.best_factor, self.best_factor_sem)
        r2 = (self.loss.scaled_r2, self.loss.scaled_r2_sem)
        return task_doubt(factor, r2)

    @property
    def left_out(self) -> str:
        """Sentence on the parts that need the law of given prompts; empty if the law is known."""
        return LEFT_OUT.format(parts=self.needs_law) if no_law(self.task) else ""

    @property
    def headline(self) -> str:
        """The label."""
        return self.label

    @property
    def loss_text(self) -> str:
        """Loss of the model, next to ridge regression and predicting 0."""
        on = "the given prompts" if isinstance(self.task, PromptsTask) else "its task"
        return f"Loss on {on}: {self.loss}."

    @property
    def summary(self) -> list[str]:
        """The verdict, the loss, and the task that all numbers refer to."""
        lines = [*str(self.verdict).splitlines(), self.loss_text, f"Task: {self.task.in_words}."]
        return [*lines, self.left_out] if self.left_out else lines

    def __repr__(self) -> str:
        return "\n".join([f"{type(self).__name__}({self.label})", *self.summary])

    @property
    def whole_evidence(self) -> dict[str, Any]:
        """Evidence of this kind of model, then the evidence that every model has."""
        return self.evidence | {
            "loss": asdict(self.loss),
            "task": self.task.in_words,
            **({"left_out": self.left_out} if self.left_out else {}),
            "best_factor": self.best_factor,
            "best_factor_sem": self.best_factor_sem,
            "n_prompts": self.n_prompts,
            "learners": self.near.records(),
        }

    def document(self, heads: list[dict]) -> dict:
        """Fields of the JSON document."""
        return {
            "pattern": self.label,
            "reason": self.reason,
            "heads": heads,
            "evidence": self.whole_evidence,
            "verdict": asdict(self.verdict),
        }


def _single(value: object) -> object:
    """A single number, word or truth value; the entry of a list with one entry; None for anything else."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, bool | int | float | str) else None
