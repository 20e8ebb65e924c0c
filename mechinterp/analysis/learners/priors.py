"""Does a model predict as the posterior mean under its pool of tasks (dMMSE), or as ridge, and does it know new tasks?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Int
from torch import Tensor

from mechinterp.analysis.learners.closeness import (
    KINDS,
    Closeness,
    closeness,
    lengths_of,
    setting_of,
)
from mechinterp.analysis.number_format import digits, with_error
from mechinterp.analysis.result import Table
from mechinterp.config import TaskLike
from mechinterp.display import Result
from mechinterp.icl.pools import Pool
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.predictor import Source, learner_of
from mechinterp.progress import ProgressCallback, no_progress

CLEAR = 2.0
"""Standard errors from 0.5 at which a relative distance counts as nearer to one side."""
OFF_THE_LINE = 0.5
"""Unexplained part from which a model is nothing between the two."""
FORGETS, KNOWS = 2.0, 1.5
"""Excess risk on new tasks over that of ridge: at least, for a model that memorises; at most, for one that generalises."""

STRATEGIES = {
    "memorises": "memorises them",
    "generalises": "generalises as ridge regression does",
    "neither": "neither memorises them nor generalises as ridge regression does",
}


@dataclass(frozen=True, eq=False, repr=False)
class PriorComparison(Result):
    """How near a model is to dMMSE and to ridge, at each context length and over all."""

    n_tasks: int
    """Size of the pool."""
    context_length: Int[np.ndarray, " length"]
    at_length: Closeness
    """[kind, length], the kinds being pool and new."""
    overall: Closeness
    """[kind]; means over the lengths."""

    @property
    def strategy(self) -> str:
        """ "memorises", "generalises" or "neither".

        It memorises if it is nearer to dMMSE on prompts of the pool and loses at least twice what ridge loses on new tasks;
        it generalises if it is nearer to ridge on new tasks and loses at most 1.5 times what ridge loses. "Nearer" is by two standard
        errors. A model that is far off the line between the two on prompts of the pool does neither.
        """
        overall = self.overall
        if overall.unexplained[0] > OFF_THE_LINE:
            return "neither"
        over_ridge = overall.risk[1] / overall.risk_ridge[1]
        if overall.relative[0] + CLEAR * overall.relative_sem[0] < 0.5 and over_ridge >= FORGETS:
            return "memorises"
        if overall.relative[1] - CLEAR * overall.relative_sem[1] > 0.5 and over_ridge <= KNOWS:
            return "generalises"
        return "neither"

    def __repr__(self) -> str:
        overall = self.overall
        told = [
            f"{kind}: relative {overall.relative[i]:.3g} ± {overall.relative_sem[i]:.1g}, "
            f"weight {overall.weight_dmmse[i]:.3g} ± {overall.weight_dmmse_sem[i]:.1g}, "
            f"risk {overall.risk[i]:.3g} (dMMSE {overall.risk_dmmse[i]:.3g}, ridge {overall.risk_ridge[i]:.3g})"
            for i, kind in enumerate(KINDS)
        ]
        return f"PriorComparison({self.strategy}, pool of {self.n_tasks}; {'; '.join(told)})"

    def sentences(self) -> list[str]:
        """What it does with the pool, how near it is to dMMSE and ridge, and what it loses beside them."""
        overall, where = self.overall, ("tasks of the pool", "new tasks")
        pairs = zip(overall.relative, overall.relative_sem, where, strict=True)
        near = ", ".join(f"{with_error(value, sem)} on {of}" for value, sem, of in pairs)
        rows = zip(overall.risk, overall.risk_dmmse, overall.risk_ridge, where, strict=True)
        risks = ", ".join(
            f"{digits(own)} on {of} (dMMSE {digits(dmmse)}, ridge {digits(ridge)})"
            for own, dmmse, ridge, of in rows
        )
        return [
            f"With a pool of {self.n_tasks} tasks the model {STRATEGIES[self.strategy]}.",
            f"Relative distance, 0 at the pool's posterior mean (dMMSE) and 1 at ridge regression: {near}.",
            f"Excess risk (y²): {risks}.",
        ]

    def tables(self) -> dict[str, Table]:
        """Means over the context lengths, and every length."""
        summary = Table(self.summary_frame(), "Means over the context lengths")
        return {"priors": Table(self.to_frame(), "By context length"), "prior_means": summary}

    def figures(self) -> dict[str, go.Figure]:
        """Relative distance, then risks."""
        return {"priors": self.plot(), "prior_risks": self.plot_risks()}

    def to_frame(self) -> pd.DataFrame:
        """One row per kind of tasks and context length."""
        return self.at_length.frame(context_length=self.context_length)

    def summary_frame(self) -> pd.DataFrame:
        """One row per kind of tasks, means over the context lengths."""
        return self.overall.frame()

    def plot(self) -> go.Figure:
        """Relative distance over the context length, on prompts of the pool and on new ones."""
        title = "Nearer to the pool's posterior (0) or to ridge (1)"
        return self.at_length.plot(self.context_length, title, "context length L")

    def plot_risks(self) -> go.Figure:
        """Excess risk of the model, dMMSE and ridge over the context length, on both kinds of prompts."""
        title = "Excess risk on tasks of the pool and on new ones"
        return self.at_length.plot_risks(self.context_length, title, "context length L")


def compare_priors(
    source: Source | Callable[[Prompts], Tensor],
    task: TaskLike | None = None,
    pool: Pool | None = None,
    *,
    context_lengths: Sequence[int] | None = None,
    n_prompts: int = 4096,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> PriorComparison:
    """Distances of a model from the pool's posterior mean and from ridge, on tasks of the pool and on new ones.

    Args:
        source: Weights, a checkpoint, a hooked model, or a function from prompts (in float64) to predictions, which needs a task.
        task: None: the model's own.
        pool: Task vectors; None: those of the task.
        context_lengths: None: up to 16, from 1 or the shortest of a checkpoint's training to the task's own. They share covariates, noise and query.
        n_prompts: Of each kind.
        progress: Optional progress callback.
    Raises:
        ValueError: If there is no task, it has no pool and none is given, a context length is below 1, or the predictions overflow.
    Source:
        Raventos et al. 2023, arXiv 2306.15063, for the two predictors and their distances; the regression is derived here.
    Example:
        >>> from functools import partial
        >>> from mechinterp.icl.predictors import ridge
        >>> task = TaskConfig(d_x=3, context_length=4, n_tasks=4)
        >>> found = compare_priors(partial(ridge, penalty=task.posterior_penalty), task, n_prompts=64)
        >>> found.overall.relative.round(6).tolist(), found.strategy
        ([1.0, 1.0], 'generalises')
    """
    setting = setting_of(source, task, pool, "compare_priors")
    model, lengths = learner_of(source), lengths_of(source, setting.task, context_lengths)
    samples = [setting.sample(kind, n_prompts, lengths, seed, progress) for kind in KINDS]
    by_kind = [each.squares([model(prompts) for prompts in each.prompts]) for each in samples]
    squares = np.stack(by_kind, 1)  # [prompt, kind, length, square]
    return PriorComparison(
        n_tasks=len(setting.pool),
        context_length=np.array(lengths),
        at_length=closeness(squares),
        overall=closeness(squares.mean(2)),
    )
