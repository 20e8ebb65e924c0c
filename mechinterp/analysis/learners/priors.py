"""Memorisation or generalisation: distances of a model to the posterior mean under its pool (dMMSE)
and to ridge, on prompts with tasks of the pool and with new tasks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechinterp import figures
from mechinterp.analysis.learners.pool_tasks import (
    CLOSENESS_COLUMNS,
    DROPPED_ONE_IN,
    ERROR_COLUMN,
    PREDICTORS,
    TASK_KINDS,
    closeness,
    lengths_of,
    setting_of,
    trimmed_closeness,
)
from mechinterp.analysis.number_format import digits, with_error
from mechinterp.analysis.result import Table
from mechinterp.analysis.stats import carried_by_few
from mechinterp.config import TaskLike
from mechinterp.display import Result
from mechinterp.icl.predictors import Pool
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.predictor import Source, learner_of

CLEAR_DISTANCE = 2.0
"""Number of standard errors by which a relative distance must differ from 0.5."""
OFF_THE_LINE = 0.5
"""Largest `unexplained` on tasks of the pool of a model that memorises. A model that generalises
has no such limit: for a large pool dMMSE and ridge are so close that any error is far from the line
between them."""
MEMORISING = 2.0
"""Smallest excess risk on new tasks, divided by that of ridge, of a model that memorises."""
GENERALISING = 1.5
"""Largest excess risk on new tasks, divided by that of ridge, of a model that generalises."""
DROPPED_AT_CHECK = 100
"""The strategy must be the same without the worst prompts, one in this number."""
STRATEGIES = {
    "memorises": "memorises them",
    "generalises": "generalises as ridge regression does",
    "neither": "neither memorises them nor generalises as ridge regression does",
    "undetermined": "is undetermined: the worst 1% of the prompts decide between "
    "memorising them and generalising as ridge regression does",
}


@dataclass(frozen=True, eq=False, repr=False)
class PriorComparison(Result):
    """Distances of predictions f to dMMSE and to ridge, at each context length and averaged over the lengths.

    The columns of the frames are in `COLUMNS`, each with its standard error; `tasks` is "pool" or "new".
    """

    COLUMNS: ClassVar = CLOSENESS_COLUMNS
    UNITS: ClassVar = {
        "y²": (
            *("distance_dmmse", "distance_ridge", "risk", "risk_dmmse", "risk_ridge"),
            *(f"median_risk_{name}" for name in PREDICTORS),
        )
    }
    n_tasks: int
    """Size of the pool."""
    context_length: Int[np.ndarray, " length"]
    at_length: pd.DataFrame
    """One row per kind of tasks and context length."""
    overall: pd.DataFrame
    """One row per kind: means over the lengths, for all prompts."""
    trimmed: pd.DataFrame
    """As `overall`, without the 0.1% of the prompts with the largest error of the model
    (none of fewer than 1,000). Model, dMMSE and ridge are compared on the remaining prompts."""
    median_risk: Float[np.ndarray, "kind predictor"]
    """Median over prompts of the squared error of the model, dMMSE and ridge; unit y^2."""
    carried_by_few: Bool[np.ndarray, " kind"]
    strategy: str
    """"memorises", "generalises", "neither" or "undetermined", by `trimmed`.

    A model memorises if it is nearer to dMMSE on prompts of the pool, its `unexplained` there is at
    most 0.5, and its excess risk on new tasks is at least twice that of ridge. It generalises if it
    is nearer to ridge on new tasks and its excess risk there is at most 1.5 times that of ridge.
    "Nearer" means by two standard errors. It is undetermined if the answer changes without the
    worst 1% of the prompts."""

    @property
    def headline(self) -> str:
        """The strategy."""
        return self.strategy

    def __repr__(self) -> str:
        return f"PriorComparison({' '.join(self.sentences())})"

    @property
    def _over_lengths(self) -> str:
        first, last = self.context_length[[0, -1]]
        return f"L = {first}" if first == last else f"mean over L = {first} to {last}"

    def sentences(self) -> list[str]:
        """The strategy, the distances to dMMSE and ridge, the risks, and means that few prompts
        dominate."""
        trimmed, where = self.trimmed, ("tasks of the pool", "new tasks")
        pairs = zip(trimmed.relative, trimmed.relative_sem, where, strict=True)
        near = ", ".join(f"{with_error(value, sem)} on {of}" for value, sem, of in pairs)
        rows = zip(trimmed.risk, trimmed.risk_dmmse, trimmed.risk_ridge, where, strict=True)
        risks = ", ".join(
            f"{digits(own)} on {of} (dMMSE {digits(dmmse)}, ridge {digits(ridge)})"
            for own, dmmse, ridge, of in rows
        )
        few = [
            f"The worst 1% of the prompts make up more than half of the risk on {of}: the mean over all prompts is "
            f"{digits(self.overall.risk[i])}, the median {digits(self.median_risk[i, 0])}."
            for i, of in enumerate(where)
            if self.carried_by_few[i]
        ]
        return [
            f"With a pool of {self.n_tasks} tasks the model {STRATEGIES[self.strategy]}.",
            f"Relative distance, 0 at the pool's posterior mean (dMMSE) and 1 at ridge regression "
            f"({self._over_lengths}): {near}.",
            f"Excess risk (y², without the worst 0.1% of the prompts): {risks}.",
            *few,
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
        return self.at_length.copy()

    def summary_frame(self) -> pd.DataFrame:
        """One row per kind of tasks: means over the lengths, without the worst 0.1% of the prompts
        and over all prompts."""
        named = {"trimmed": self.trimmed, "all": self.overall}
        frame = pd.concat(
            [each.assign(prompts=name) for name, each in named.items()], ignore_index=True
        )
        medians = dict(zip(PREDICTORS, self.median_risk.T, strict=True))
        few = {f"median_risk_{name}": np.tile(risk, 2) for name, risk in medians.items()}
        return frame.assign(**few, carried_by_few=np.tile(self.carried_by_few, 2))

    def plot(self) -> go.Figure:
        """Relative distance over the context length, on prompts of the pool and on new ones."""
        return figures.lines(
            self.context_length,
            self._curves({"": "relative"}),
            levels=[0.5],
            title="Nearer to the pool's posterior (0) or to ridge (1)",
            x_title="context length L",
            y_title="relative distance",
        )

    def plot_risks(self) -> go.Figure:
        """Excess risk of the model, dMMSE and ridge over the context length, on both kinds of prompts."""
        named = {"model, ": "risk", "dMMSE, ": "risk_dmmse", "ridge, ": "risk_ridge"}
        return figures.lines(
            self.context_length,
            self._curves(named),
            title="Excess risk on tasks of the pool and on new ones",
            x_title="context length L",
            y_title="excess risk (y²)",
        )

    def _curves(self, named: Mapping[str, str]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Columns over the context length with their standard errors, on both kinds of prompts."""
        return {
            f"{prefix}{kind} tasks": (rows[column].to_numpy(), rows[f"{column}_sem"].to_numpy())
            for kind, rows in self.at_length.groupby("tasks", sort=False)
            for prefix, column in named.items()
        }


def compare_priors(
    source: Source | Callable[[Prompts], Tensor],
    *,
    task: TaskLike | None = None,
    pool: Pool | None = None,
    context_lengths: Sequence[int] | None = None,
    n_prompts: int = 4096,
    seed: int = 0,
) -> PriorComparison:
    """Distances of a model to the pool's posterior mean and to ridge, on tasks of the pool and on new ones.

    It takes no given prompts, as it needs prompts of both kinds.

    Args:
        source: Weights, a checkpoint, a hooked model, or a function from prompts (in float64) to
            predictions, which needs a task.
        task: Law of the prompts; None means the model's own.
        pool: Task vectors; None means those of the task.
        context_lengths: Lengths to compare at; they share covariates and noise, and the query too, unless one pass of a
            causal model gives all. None: up to 16, from 1 or the shortest length of a training to the task's own.
        n_prompts: Number of prompts of each kind.
    Raises:
        ValueError: If there is no task, no pool, a context length is below 1, or the predictions overflow.
    Source:
        Raventos et al. 2023, arXiv 2306.15063, for the two predictors and their distances; the regression is derived here.
    See also:
        `ablate`, `over_steps`, `mechinterp.icl.dmmse`, `TaskConfig.pool`.
    Example:
        >>> from functools import partial
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.predictors import ridge
        >>> task = TaskConfig(d_x=3, context_length=4, n_tasks=4)
        >>> model = partial(ridge, penalty=task.posterior_penalty)
        >>> found = compare_priors(model, task=task, n_prompts=64)
        >>> found.overall.relative.round(6).tolist(), found.strategy
        ([1.0, 1.0], 'generalises')
    """
    setting = setting_of(source, task, pool, "compare_priors")
    model, lengths = learner_of(source), lengths_of(source, setting.task, context_lengths)
    samples = [setting.sample(kind, n_prompts, lengths, seed, source) for kind in TASK_KINDS]
    by_kind = [
        each.squares(each.own or [model(prompts) for prompts in each.prompts]) for each in samples
    ]
    squares = np.stack(by_kind, 1)  # [prompt, kind, length, square]
    over_lengths = squares.mean(2)
    errors = over_lengths[..., ERROR_COLUMN:]
    trimmed, more = (
        trimmed_closeness(over_lengths, one_in) for one_in in (DROPPED_ONE_IN, DROPPED_AT_CHECK)
    )
    strategy = _strategy(trimmed)
    return PriorComparison(
        n_tasks=len(setting.pool),
        context_length=np.array(lengths),
        at_length=closeness(squares, context_length=lengths),
        overall=closeness(over_lengths),
        trimmed=trimmed,
        median_risk=np.median(errors, axis=0),
        carried_by_few=carried_by_few(errors[..., 0]),
        strategy=strategy if _strategy(more) == strategy else "undetermined",
    )


def _strategy(found: pd.DataFrame) -> str:
    """Strategy of a model for one set of means."""
    over_ridge = found.risk[1] / found.risk_ridge[1]
    near = found.relative[0] + CLEAR_DISTANCE * found.relative_sem[0] < 0.5
    if near and found.unexplained[0] <= OFF_THE_LINE and over_ridge >= MEMORISING:
        return "memorises"
    if (
        found.relative[1] - CLEAR_DISTANCE * found.relative_sem[1] > 0.5
        and over_ridge <= GENERALISING
    ):
        return "generalises"
    return "neither"
