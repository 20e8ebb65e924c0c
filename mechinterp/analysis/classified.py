"""What is found of every model, whatever its label is: the nearest simple learner, its loss, its task and the verdict."""

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
    "Left out, as the law of the prompts is not known: {parts}. Ridge regression has the penalty that is best on "
    "these prompts; task= (--task) states the law."
)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Classified(Result):
    """Label of a model, with what is said of any."""

    pattern: str
    reason: str
    """One sentence: what decided."""
    near: Nearby
    """What simple learners explain of the prediction, nearest first."""
    loss: TaskLoss
    best_factor: float
    """The factor on the prediction with the least loss; 1 at the optimum of the task that a model was trained on."""
    best_factor_sem: float
    task: TaskConfig
    """Law of the prompts."""
    n_prompts: int
    trained_here: bool = False
    """Whether this package trained the model, so that its task is not in doubt."""
    reading_doubt: str = ""
    """Why the file of the model may have been read wrongly; empty where nothing says so."""

    needs_law: ClassVar = "the best step size, the distance to the solution manifold, components"
    """Parts that need the law of the prompts."""
    heads_title: ClassVar[str]
    """Above the lines of the heads of a model, or of many of its kind."""

    @property
    def verdict(self) -> Verdict:
        """What the model computes, how sure that is, and what it is not."""
        raise NotImplementedError

    def plot(self) -> go.Figure:
        """The heads."""
        raise NotImplementedError

    @property
    def brief(self) -> str:
        """What earned the label, or why there is none, as one of many models says it."""
        raise NotImplementedError

    @property
    def of_a_row(self) -> dict[str, object]:
        """What a row of a sweep's table says of the heads."""
        return {}

    @property
    def notes(self) -> list[str]:
        """What is said below all tables only."""
        return []

    def head_lines(self, rows: int) -> list[str]:
        """A line for each of so many heads, in the columns of `heads_title`."""
        raise NotImplementedError

    @property
    def task_doubt(self) -> str:
        """Why the model may have been trained on another task, or read wrongly; empty where nothing says so."""
        if self.trained_here or self.reading_doubt:
            return self.reading_doubt
        factor = (self.best_factor, self.best_factor_sem)
        r2 = (self.loss.scaled_r2, self.loss.scaled_r2_sem)
        return task_doubt(factor, r2)

    @property
    def left_out(self) -> str:
        """A sentence on the parts that need a law of given prompts; empty where it is known."""
        return LEFT_OUT.format(parts=self.needs_law) if no_law(self.task) else ""

    @property
    def loss_text(self) -> str:
        """The loss beside those of ridge regression and of predicting 0."""
        on = "the given prompts" if isinstance(self.task, PromptsTask) else "its task"
        return f"Loss on {on}: {self.loss}."

    @property
    def told_first(self) -> list[str]:
        """The verdict, the loss, and the task that it and every other number are of."""
        told = [*str(self.verdict).splitlines(), self.loss_text, f"Task: {self.task.in_words}."]
        return [*told, self.left_out] if self.left_out else told

    def __repr__(self) -> str:
        return "\n".join([f"{type(self).__name__}({self.pattern})", *self.told_first])

    def document(self, heads: list[dict], evidence: dict[str, object]) -> dict:
        """The fields of the JSON document, the evidence with what is said of any model."""
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
