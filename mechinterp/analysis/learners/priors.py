"""Memorisation or generalisation: distances of a model to the posterior mean under its pool (dMMSE)
and to ridge, on prompts with tasks of the pool and with new tasks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechinterp import figures
from mechinterp.analysis.number_format import digits, with_error
from mechinterp.analysis.patching.pairing import with_task_vectors
from mechinterp.analysis.result import Table
from mechinterp.analysis.stats import (
    carried_by_few,
    estimates,
    mean_and_sem,
    require_moderate,
    without_worst,
)
from mechinterp.config import TaskConfig, TaskLike
from mechinterp.display import Result, frame_of, with_sem
from mechinterp.icl.predictors import (
    Pool,
    dmmse,
    require_pool,
    ridge,
)
from mechinterp.icl.prompts import Prompts, generator_for
from mechinterp.models.run.evaluation import evaluation_prompts, task_for
from mechinterp.models.run.predictor import Learner, Source, is_learner, learner_of, predictor_of
from mechinterp.progress import progress

KINDS = ("pool", "new")
"""Kinds of prompts: with tasks of the pool, and with fresh tasks."""
MOST_LENGTHS = 16
"""Largest number of default context lengths."""
ERROR = 5
"""Column of `Sample.squares` with the squared error of the model; the next columns are those of
dMMSE and ridge."""
CLEAR = 2.0
"""Number of standard errors by which a relative distance must differ from 0.5."""
OFF_THE_LINE = 0.5
"""Largest `unexplained` on tasks of the pool of a model that memorises. A model that generalises
has no such limit: for a large pool dMMSE and ridge are so close that any error is far from the line
between them."""
FORGETS, KNOWS = 2.0, 1.5
"""Excess risk on new tasks divided by that of ridge: smallest for a model that memorises, and
largest for one that generalises."""
FEW, MORE = 1000, 100
"""One prompt in FEW is dropped for the strategy. One in MORE is dropped to check that few prompts
do not decide it."""
PREDICTORS = ("model", "dmmse", "ridge")

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

    COLUMNS: ClassVar = {
        "carried_by_few": "True if the worst 1% of the prompts make up more than half of the model's overall.risk.",
        "tasks": "Tasks of the prompts: those of the pool, or new ones.",
        "context_length": "Number of pairs before the query.",
        "distance_dmmse": "Mean of |f - dMMSE|^2 / d_x.",
        "distance_ridge": "Mean of |f - ridge|^2 / d_x.",
        "relative": "distance_dmmse / (distance_dmmse + distance_ridge): 0 at dMMSE, 1 at ridge.",
        "weight_dmmse": "Weight a of the nearest mixture a dMMSE + (1 - a) ridge, by least squares.",
        "unexplained": "Mean squared distance to that mixture, divided by the mean squared distance between dMMSE and ridge.",
        "risk": "Excess risk of the model; the loss adds the variance of the noise.",
        "risk_dmmse": "Excess risk of dMMSE.",
        "risk_ridge": "Excess risk of ridge.",
        "prompts": "Prompts of the means: trimmed (without the worst 0.1%) or all.",
        **{
            f"median_risk_{name}": f"Median over prompts of the squared error of {name}."
            for name in PREDICTORS
        },
    }
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
        frame = pd.concat([each.assign(prompts=name) for name, each in named.items()])
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
    """Distances of a model to the pool's posterior mean and to ridge, on tasks of the pool and on
    new ones.

    It takes no given prompts, as it needs prompts of both kinds.

    Args:
        source: Weights, a checkpoint, a hooked model, or a function from prompts (in float64) to
            predictions, which needs a task.
        task: Law of the prompts; None means the model's own.
        pool: Task vectors; None means those of the task.
        context_lengths: Lengths to compare at; they share covariates and noise, and the query
            too, unless one pass of a causal model gives all lengths. None means up to 16 lengths,
            from 1 or the shortest length in a checkpoint's training to the task's own.
        n_prompts: Number of prompts of each kind.
    Raises:
        ValueError: If there is no task, no pool, a context length is below 1, or the predictions
            overflow.
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
    samples = [setting.sample(kind, n_prompts, lengths, seed, source) for kind in KINDS]
    by_kind = [
        each.squares(each.own or [model(prompts) for prompts in each.prompts]) for each in samples
    ]
    squares = np.stack(by_kind, 1)  # [prompt, kind, length, square]
    over_lengths = squares.mean(2)
    errors = over_lengths[..., ERROR:]
    trimmed, more = (trimmed_closeness(over_lengths, one_in) for one_in in (FEW, MORE))
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
    near = found.relative[0] + CLEAR * found.relative_sem[0] < 0.5
    if near and found.unexplained[0] <= OFF_THE_LINE and over_ridge >= FORGETS:
        return "memorises"
    if found.relative[1] - CLEAR * found.relative_sem[1] > 0.5 and over_ridge <= KNOWS:
        return "generalises"
    return "neither"


@dataclass(frozen=True, eq=False)
class PoolTask:
    """A task and the pool that models are compared with."""

    task: TaskConfig
    pool: Pool
    own: bool
    """True if the pool is the task's own."""

    def sample(
        self,
        kind: str,
        n_prompts: int,
        lengths: Sequence[int],
        seed: int,
        source: Source | Learner | None = None,
    ) -> "Sample":
        """Prompts of one kind with dMMSE and ridge at each context length.

        Args:
            source: Model whose predictions at every x come from one pass; its prompts of each length then end with the next
                x. None, or any other model: all lengths have the same query.
        """
        full = evaluation_prompts(
            self.task,
            n_prompts=n_prompts,
            seed=seed,
            context_length=max(lengths),
            new_tasks=kind == "new" or not self.own,
            fitted=1,  # one fitted scalar: the weight
        )
        if kind == "pool" and not self.own:
            rows = torch.randint(
                len(self.pool), (n_prompts,), generator=generator_for(seed, "pool", 0), device="cpu"
            )
            full = with_task_vectors(full, self.pool[rows].to(full.x))
        one_pass = source is not None and not is_learner(source)
        own = predictor_of(source).predict_at_every(full) if one_pass else None
        cut = full.shortened if own is None else full.prefix
        prompts = [cut(length) for length in lengths]
        memory = partial(dmmse, pool=self.pool, noise_var=self.task.noise_variance)
        return Sample(
            prompts,
            [memory(each) for each in progress(prompts, f"dMMSE on {kind} tasks")],
            [ridge(each, penalty=self.task.posterior_penalty) for each in prompts],
            None if own is None else [own[:, length] for length in lengths],
        )


@dataclass(frozen=True, eq=False)
class Sample:
    """The same prompts at several context lengths, with dMMSE and ridge."""

    prompts: list[Prompts]
    dmmse: list[Tensor]
    ridge: list[Tensor]
    own: list[Tensor] | None = None
    """Predictions of the model, if one pass gave them at every length."""

    def squares(self, predictions: list[Tensor]) -> Float[np.ndarray, "prompt length square"]:
        """Columns per prompt and length, for predictions f: |f - dMMSE|^2 / d_x, |f - ridge|^2 /
        d_x, <f - ridge, dMMSE - ridge>, |dMMSE - ridge|^2, |f - ridge|^2, and the squared errors of
        f, dMMSE and ridge.

        Raises:
            ValueError: If predictions overflow.
        """
        require_moderate(torch.cat(predictions))
        rows = []
        for prompts, D, R, f in zip(self.prompts, self.dmmse, self.ridge, predictions, strict=True):
            d_x, target, f = prompts.x.shape[2], prompts.y_query_clean, f.double()
            near = [(f - D).square() / d_x, (f - R).square() / d_x]
            line = [(f - R) * (D - R), (D - R).square(), (f - R).square()]
            errors = [(each - target).square() for each in (f, D, R)]
            rows.append(torch.stack([each.mean(1) for each in (*near, *line, *errors)], 1))
        return torch.stack(rows, 1).numpy(force=True)


def closeness(
    squares: Float[np.ndarray, "prompt kind *axes square"], few: int = 0, **axis: Sequence[int]
) -> pd.DataFrame:
    """Means over prompts of the `squares` of a sample, and ratios of these means, one row per kind and value of an axis.

    Args:
        few: Number of rows at the end that replace dropped prompts; they enter standard errors
            only.
    """
    to_dmmse, to_ridge, inner, gap, norm, *errors = np.moveaxis(squares, -1, 0)
    # The weight minimises a mean square, so its error changes that mean in second order only.
    # The standard error needs no term for it.
    weight, weight_sem = trimmed_ratio(inner, gap, few)
    one = np.ones_like(gap)
    means = (to_dmmse, to_ridge, *errors)
    names = ("distance_dmmse", "distance_ridge", "risk", "risk_dmmse", "risk_ridge")
    numbers = estimates(
        **{n: trimmed_ratio(each, one, few) for n, each in zip(names, means, strict=True)},
        relative=trimmed_ratio(to_dmmse, to_dmmse + to_ridge, few),
        weight_dmmse=(weight, weight_sem),
        unexplained=trimmed_ratio(norm - 2 * weight * inner + weight**2 * gap, gap, few),
    )
    columns = with_sem(*(name for name in PriorComparison.COLUMNS if name in numbers))
    return frame_of(SimpleNamespace(**numbers), *columns, tasks=KINDS[: gap.shape[1]], **axis)


def trimmed_closeness(
    squares: Float[np.ndarray, "prompt kind square"], one_in: int
) -> pd.DataFrame:
    """`closeness` without the worst prompts of each kind: 1 in `one_in`, by the model's error."""
    few = len(squares) // one_in
    kinds = [trimmed(kind, kind[:, ERROR], one_in) for kind in np.moveaxis(squares, 1, 0)]
    return closeness(np.stack(kinds, 1), few)


def trimmed(
    values: Float[np.ndarray, " prompt *axes"], sizes: Float[np.ndarray, " prompt"], one_in: int
) -> Float[np.ndarray, " prompt *axes"]:
    """Values in which the worst prompts are replaced: 1 in `one_in`, by `sizes`.

    First come the other prompts. Then comes the worst of these, once for each replaced prompt.
    These last rows enter standard errors only, as the standard error of a trimmed mean needs.
    """
    stay = without_worst(sizes, one_in)
    kept = values[stay]
    worst = kept[sizes[stay].argmax()]
    return np.concatenate([kept, np.repeat(worst[None], len(values) - len(kept), 0)])


def trimmed_ratio(
    numerator: Float[np.ndarray, " prompt *axes"],
    denominator: Float[np.ndarray, " prompt *axes"],
    few: int,
) -> tuple[Float[np.ndarray, "*axes"], Float[np.ndarray, "*axes"]]:
    """Ratios of means over the prompts without the last `few`, and their standard errors with these.

    With a denominator of ones they are means. NaN if the mean of the denominator is 0.
    """
    kept = len(numerator) - few
    size = denominator[:kept].mean(0)
    size = np.where(size, size, np.nan)
    ratio = numerator[:kept].mean(0) / size
    residual = (numerator - ratio * denominator) / size
    _, sem = mean_and_sem(residual[:kept])
    cut = np.square(residual[kept:]).sum(0) / len(numerator) ** 2
    return ratio, np.sqrt(np.square(sem) + cut)


def setting_of(source: Source, task: TaskLike | None, pool: Pool | None, analysis: str) -> PoolTask:
    """Task and pool of a comparison.

    Raises:
        ValueError: If there is no task or no pool, or the sizes of the pool differ from the task's.
    """
    task = task_for(source, task, analysis)
    if pool is None:
        if task.n_tasks is None:
            raise ValueError(
                f"{analysis} needs a pool: pass a pool, or a task with n_tasks, got n_tasks null."
            )
        return PoolTask(task, task.pool(), own=True)
    if task.drift != 1:
        raise ValueError(
            f"{analysis} needs a task that does not drift, got task.drift {task.drift}."
        )
    if len(task.noise_levels) > 1:
        raise ValueError(f"{analysis} needs one noise level, got task.noise_var {task.noise_var}.")
    require_pool(pool, task.d_x, task.d_y)
    return PoolTask(task, pool.to("cpu", torch.float64), own=False)


def lengths_of(
    source: Source, task: TaskConfig, context_lengths: Sequence[int] | None
) -> list[int]:
    """Context lengths of a comparison, rising: from the shortest of a checkpoint's training, or 1,
    to the task's own.

    Raises:
        ValueError: If a length is below 1, or there are none.
    """
    if context_lengths is not None:
        if not context_lengths or min(context_lengths) < 1:
            raise ValueError(f"context_lengths must be >= 1, got {list(context_lengths)}.")
        return sorted(set(context_lengths))
    longest = task.context_length
    # At lengths that a model was not trained on, its prediction is arbitrary; for linear attention
    # it is often huge.
    shortest = min(getattr(source, "shortest_trained", None) or 1, longest)
    return spread_lengths(shortest, longest)


def spread_lengths(shortest: int, longest: int) -> list[int]:
    """At most MOST_LENGTHS context lengths, evenly spaced.

    Example:
        >>> spread_lengths(1, 31)
        [1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31]
    """
    count = min(longest - shortest + 1, MOST_LENGTHS)
    return [int(length) for length in np.linspace(shortest, longest, count).round()]
