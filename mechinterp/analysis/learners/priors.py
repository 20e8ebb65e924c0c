"""Does a model predict as the posterior mean under its pool of tasks (dMMSE), or as ridge, and does it know new tasks?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechinterp import figures
from mechinterp.analysis.estimates import mean_and_sem, ratio_and_sem, require_moderate
from mechinterp.config import TaskConfig
from mechinterp.display import Result
from mechinterp.icl.pools import Pool, dmmse
from mechinterp.icl.predictors import ridge
from mechinterp.icl.prompts import Prompts, generator_for, task_pool
from mechinterp.models.evaluation import evaluation_prompts
from mechinterp.models.predictor import Source, learner_of, task_for
from mechinterp.progress import ProgressCallback, no_progress

KINDS = ("pool", "new")
"""Prompts with tasks of the pool, and with fresh ones."""
MOST_LENGTHS = 16
CLEAR = 2.0
"""Standard errors from 0.5 at which a relative distance counts as nearer to one side."""
OFF_THE_LINE = 0.5
"""Unexplained part from which a model is nothing between the two."""
FORGETS, KNOWS = 2.0, 1.5
"""Excess risk on new tasks over that of ridge: at least, for a model that memorises; at most, for one that generalises."""


@dataclass(frozen=True, eq=False)
class Closeness:
    """How near predictions f are to dMMSE and to ridge; of each kind of prompts, and of lengths or steps."""

    distance_dmmse: Float[np.ndarray, "*axes"]
    """Mean of |f - dMMSE|^2 / d_x, unit y^2."""
    distance_dmmse_sem: Float[np.ndarray, "*axes"]
    distance_ridge: Float[np.ndarray, "*axes"]
    """Mean of |f - ridge|^2 / d_x, unit y^2."""
    distance_ridge_sem: Float[np.ndarray, "*axes"]
    relative: Float[np.ndarray, "*axes"]
    """distance_dmmse / (distance_dmmse + distance_ridge): 0 at dMMSE, 1 at ridge."""
    relative_sem: Float[np.ndarray, "*axes"]
    weight_dmmse: Float[np.ndarray, "*axes"]
    """a of the nearest mixture a dMMSE + (1 - a) ridge, by least squares."""
    weight_dmmse_sem: Float[np.ndarray, "*axes"]
    unexplained: Float[np.ndarray, "*axes"]
    """Mean squared distance to that mixture, over that between dMMSE and ridge."""
    unexplained_sem: Float[np.ndarray, "*axes"]
    risk: Float[np.ndarray, "*axes"]
    """Excess risk of the model, unit y^2; its loss is larger by the variance of the noise."""
    risk_sem: Float[np.ndarray, "*axes"]
    risk_dmmse: Float[np.ndarray, "*axes"]
    risk_dmmse_sem: Float[np.ndarray, "*axes"]
    risk_ridge: Float[np.ndarray, "*axes"]
    risk_ridge_sem: Float[np.ndarray, "*axes"]

    def columns(self) -> dict[str, np.ndarray]:
        """Every number by name, as one column."""
        return {field.name: getattr(self, field.name).ravel() for field in fields(self)}


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
        found = self.overall
        if found.unexplained[0] > OFF_THE_LINE:
            return "neither"
        over_ridge = found.risk[1] / found.risk_ridge[1]
        if found.relative[0] + CLEAR * found.relative_sem[0] < 0.5 and over_ridge >= FORGETS:
            return "memorises"
        if found.relative[1] - CLEAR * found.relative_sem[1] > 0.5 and over_ridge <= KNOWS:
            return "generalises"
        return "neither"

    def __repr__(self) -> str:
        found = self.overall
        told = [
            f"{kind}: relative {found.relative[i]:.3g} ± {found.relative_sem[i]:.1g}, "
            f"weight {found.weight_dmmse[i]:.3g} ± {found.weight_dmmse_sem[i]:.1g}, "
            f"risk {found.risk[i]:.3g} (dMMSE {found.risk_dmmse[i]:.3g}, ridge {found.risk_ridge[i]:.3g})"
            for i, kind in enumerate(KINDS)
        ]
        return f"PriorComparison({self.strategy}, pool of {self.n_tasks}; {'; '.join(told)})"

    def to_frame(self) -> pd.DataFrame:
        """One row per kind of tasks and context length."""
        kinds = np.repeat(KINDS, len(self.context_length))
        lengths = np.tile(self.context_length, len(KINDS))
        return pd.DataFrame({"tasks": kinds, "context_length": lengths, **self.at_length.columns()})

    def summary_frame(self) -> pd.DataFrame:
        """One row per kind of tasks, means over the context lengths."""
        return pd.DataFrame({"tasks": KINDS, **self.overall.columns()})

    def plot(self) -> go.Figure:
        """Relative distance over the context length, on prompts of the pool and on new ones."""
        found = self.at_length
        return figures.lines(
            self.context_length,
            {f"{kind} tasks": found.relative[i] for i, kind in enumerate(KINDS)},
            errors={f"{kind} tasks": found.relative_sem[i] for i, kind in enumerate(KINDS)},
            levels=[0.5],
            title="Nearer to the pool's posterior (0) or to ridge (1)",
            x_title="context length L",
            y_title="relative distance",
        )

    def plot_risks(self) -> go.Figure:
        """Excess risk of the model, dMMSE and ridge over the context length, on both kinds of prompts."""
        found = self.at_length
        named = {"model": "risk", "dMMSE": "risk_dmmse", "ridge": "risk_ridge"}
        keys = [(name, i) for i in range(len(KINDS)) for name in named]
        return figures.lines(
            self.context_length,
            {f"{name}, {KINDS[i]} tasks": getattr(found, named[name])[i] for name, i in keys},
            errors={
                f"{name}, {KINDS[i]} tasks": getattr(found, f"{named[name]}_sem")[i]
                for name, i in keys
            },
            title="Excess risk on tasks of the pool and on new ones",
            x_title="context length L",
            y_title="excess risk (y²)",
        )


def compare_priors(
    source: Source | Callable[[Prompts], Tensor],
    task: TaskConfig | None = None,
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
        context_lengths: None: up to 16 from 1 to the task's own. They share covariates, noise and query.
        n_prompts: Of each kind.
        progress: Optional progress callback.
    Raises:
        ValueError: If there is no task, it has no pool and none is given, a context length is below 1, or the predictions overflow.
    Source:
        Raventos et al. 2023, arXiv 2306.15063, for the two predictors and their distances; the regression is derived here.
    Example:
        >>> from functools import partial
        >>> task = TaskConfig(d_x=3, context_length=4, n_tasks=4)
        >>> found = compare_priors(partial(ridge, penalty=task.posterior_penalty), task, n_prompts=64)
        >>> found.overall.relative.round(6).tolist(), found.strategy
        ([1.0, 1.0], 'generalises')
    """
    setting = setting_of(source, task, pool, "compare_priors")
    model, lengths = learner_of(source), lengths_of(setting.task, context_lengths)
    samples = [setting.sample(kind, n_prompts, lengths, seed, progress) for kind in KINDS]
    parts = [each.predicted(model).squares() for each in samples]
    return PriorComparison(
        n_tasks=len(setting.pool),
        context_length=np.array(lengths),
        at_length=stacked([closeness(squares) for squares in parts]),
        overall=stacked([closeness(squares.mean(1)) for squares in parts]),
    )


@dataclass(frozen=True, eq=False)
class Setting:
    """A task and the pool that models are compared with."""

    task: TaskConfig
    pool: Pool
    own: bool
    """Whether the pool is the task's."""

    def sample(
        self,
        kind: str,
        n_prompts: int,
        lengths: Sequence[int],
        seed: int,
        progress: ProgressCallback,
    ) -> "Sample":
        """Prompts of one kind with dMMSE and ridge at each context length."""
        full = evaluation_prompts(
            self.task,
            n_prompts=n_prompts,
            seed=seed,
            context_length=max(lengths),
            new_tasks=kind == "new" or not self.own,
        )
        if kind == "pool" and not self.own:
            rows = torch.randint(
                len(self.pool), (n_prompts,), generator=generator_for(seed, "pool", 0)
            )
            full = with_tasks(full, self.pool[rows])
        prompts = [replace(full, x=full.x[:, :length], y=full.y[:, :length]) for length in lengths]
        return Sample(
            prompts,
            [
                dmmse(each, pool=self.pool, noise_var=self.task.noise_var)
                for each in progress(prompts, f"dMMSE on {kind} tasks")
            ],
            [ridge(each, penalty=self.task.posterior_penalty) for each in prompts],
        )


@dataclass(frozen=True, eq=False)
class Sample:
    """The same prompts at several context lengths, with dMMSE, ridge and perhaps a model's predictions."""

    prompts: list[Prompts]
    dmmse: list[Tensor]
    ridge: list[Tensor]
    model: list[Tensor] | None = None

    def predicted(self, model: Callable[[Prompts], Tensor]) -> "Sample":
        """With the predictions of a model."""
        found = [model(prompts).double() for prompts in self.prompts]
        require_moderate(torch.cat(found))
        return self.given(found)

    def given(self, predictions: list[Tensor]) -> "Sample":
        """With predictions, one tensor for each context length."""
        return replace(self, model=predictions)

    def squares(self) -> Float[np.ndarray, "prompt length square"]:
        """Per prompt and length: |f - dMMSE|^2 / d_x, |f - ridge|^2 / d_x, <f - ridge, dMMSE - ridge>, |dMMSE - ridge|^2, |f - ridge|^2,
        and the squared errors of the model, dMMSE and ridge."""
        assert self.model is not None
        rows = []
        for prompts, D, R, f in zip(self.prompts, self.dmmse, self.ridge, self.model, strict=True):
            d_x, target = prompts.x.shape[2], prompts.y_query_clean
            near = [(f - D).square() / d_x, (f - R).square() / d_x]
            line = [(f - R) * (D - R), (D - R).square(), (f - R).square()]
            errors = [(each - target).square() for each in (f, D, R)]
            rows.append(torch.stack([each.mean(1) for each in (*near, *line, *errors)], 1))
        return torch.stack(rows, 1).numpy(force=True)


def closeness(squares: Float[np.ndarray, "prompt *axes square"]) -> Closeness:
    """What `Sample.squares` say, as means over prompts."""
    to_dmmse, to_ridge, inner, gap, norm, *errors = np.moveaxis(squares, -1, 0)
    found: dict[str, np.ndarray] = {}

    def keep(name: str, estimate: tuple[np.ndarray, np.ndarray]) -> None:
        found[name], found[f"{name}_sem"] = estimate

    keep("distance_dmmse", mean_and_sem(to_dmmse))
    keep("distance_ridge", mean_and_sem(to_ridge))
    keep("relative", _ratios(to_dmmse, to_dmmse + to_ridge))
    keep("weight_dmmse", _ratios(inner, gap))
    # By least squares the mean changes with the weight in second order only: its standard error needs no term for it.
    weight = found["weight_dmmse"]
    keep("unexplained", _ratios(norm - 2 * weight * inner + weight**2 * gap, gap))
    for name, each in zip(("risk", "risk_dmmse", "risk_ridge"), errors, strict=True):
        keep(name, mean_and_sem(each))
    return Closeness(**found)


def _ratios(numerator: np.ndarray, denominator: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ratios of means over the first axis with their standard errors, each of the other axes by itself."""
    shape = numerator.shape[1:]
    columns = [each.reshape(len(each), -1).T for each in (numerator, denominator)]
    pairs = [ratio_and_sem(top, bottom) for top, bottom in zip(*columns, strict=True)]
    ratio, sem = (np.array(each, dtype=float).reshape(shape) for each in zip(*pairs, strict=True))
    return ratio, sem


def stacked(parts: Sequence[Closeness]) -> Closeness:
    """Several as one, with a new first axis."""
    names = [field.name for field in fields(Closeness)]
    return Closeness(**{name: np.stack([getattr(part, name) for part in parts]) for name in names})


def with_tasks(prompts: Prompts, beta: Float[Tensor, "batch d_x d_y"]) -> Prompts:
    """The prompts with other task vectors, and the same covariates and noise."""
    change = beta.to(prompts.x) - prompts.beta
    at_query = (prompts.x_query[:, None] @ change)[:, 0]
    return replace(
        prompts,
        y=prompts.y + prompts.x @ change,
        y_query=prompts.y_query + at_query,
        y_query_clean=prompts.y_query_clean + at_query,
        beta=prompts.beta + change,
    )


def setting_of(
    source: Source, task: TaskConfig | None, pool: Pool | None, analysis: str
) -> Setting:
    """The task and pool of a comparison.

    Raises:
        ValueError: If one is missing, or the pool is of other sizes than the task.
    """
    if task is None and learner_of(source) is source:
        raise ValueError(f"{analysis} needs a task when the model is a function of prompts.")
    task = task_for(source, task, analysis)
    if pool is None:
        if task.n_tasks is None:
            raise ValueError(
                f"{analysis} needs a pool: task.n_tasks must be a number where no pool is given, got null."
            )
        return Setting(task, task_pool(task), own=True)
    if not len(pool) or tuple(pool.shape[1:]) != (task.d_x, task.d_y):
        raise ValueError(
            f"pool must be of shape [M, d_x, d_y] = [M, {task.d_x}, {task.d_y}], got {list(pool.shape)}."
        )
    return Setting(task, pool.to("cpu", torch.float64), own=False)


def lengths_of(task: TaskConfig, context_lengths: Sequence[int] | None) -> list[int]:
    """The context lengths of a comparison, rising.

    Raises:
        ValueError: If one is below 1, or there are none.
    """
    if context_lengths is None:
        longest = task.context_length
        found = np.linspace(1, longest, min(longest, MOST_LENGTHS)).round()
        return sorted({int(length) for length in found})
    if not context_lengths or min(context_lengths) < 1:
        raise ValueError(f"context_lengths must be >= 1, got {list(context_lengths)}.")
    return sorted(set(context_lengths))
