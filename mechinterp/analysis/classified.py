"""Common part of all classifications: nearest learner, loss, task and verdict."""

from dataclasses import asdict, dataclass
from typing import ClassVar

import plotly.graph_objects as go

from mechinterp.analysis.learners.baseline_comparison import TaskLoss, task_doubt
from mechinterp.analysis.learners.nearest import Nearby
from mechinterp.analysis.verdict import Verdict
from mechinterp.config import TaskConfig
from mechinterp.display import Result
from mechinterp.icl.given import PromptsTask, no_law

LEFT_OUT = (
    "Left out, because the law of the prompts is unknown: {parts}. Ridge regression has the penalty that is best on "
    "these prompts; state their law by task= in Python (--task is the law of the training)."
)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Classified(Result):
    """Label of a model, with the fields that all kinds of models share."""

    pattern: str
    reason: str
    """One sentence: the number that decided."""
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

    needs_law: ClassVar = "the best step size, the distance to the solution manifold, components"
    """Parts of the result that need the law of the prompts."""
    heads_title: ClassVar[str]
    """Heading above the lines of the heads."""

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
    def of_a_row(self) -> dict[str, object]:
        """Columns about the heads in a table of many models."""
        return {}

    @property
    def notes(self) -> list[str]:
        """Notes below the tables, shown only with all tables."""
        return []

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
        """The pattern."""
        return self.pattern

    @property
    def loss_text(self) -> str:
        """Loss of the model, next to ridge regression and predicting 0."""
        on = "the given prompts" if isinstance(self.task, PromptsTask) else "its task"
        return f"Loss on {on}: {self.loss}."

    @property
    def told_first(self) -> list[str]:
        """The verdict, the loss, and the task that all numbers refer to."""
        told = [*str(self.verdict).splitlines(), self.loss_text, f"Task: {self.task.in_words}."]
        return [*told, self.left_out] if self.left_out else told

    def __repr__(self) -> str:
        return "\n".join([f"{type(self).__name__}({self.pattern})", *self.told_first])

    def document(self, heads: list[dict], evidence: dict[str, object]) -> dict:
        """Fields of the JSON document; evidence that every model has is added."""
        of_all = {
            "loss": asdict(self.loss),
            "task": self.task.in_words,
            **({"left_out": self.left_out} if self.left_out else {}),
            "best_factor": self.best_factor,
            "best_factor_sem": self.best_factor_sem,
            "n_prompts": self.n_prompts,
            "learners": self.near.records(),
        }
        return {
            "pattern": self.pattern,
            "reason": self.reason,
            "heads": heads,
            "evidence": evidence | of_all,
            "verdict": asdict(self.verdict),
        }
