"""Excess risk of a model next to baselines: learners of linear regression at their best, on the
same prompts."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float

from mechinterp import figures
from mechinterp.analysis.number_format import with_error
from mechinterp.analysis.stats import estimates, mean_and_sem, ratio_and_sem, require_moderate
from mechinterp.config import TaskConfig, TaskLike
from mechinterp.display import Result, frame_of, with_sem
from mechinterp.icl.given import PENALTIES
from mechinterp.icl.pools import dmmse
from mechinterp.icl.predictors import ridge, zero_prediction
from mechinterp.icl.prompts import Prompts, task_pool
from mechinterp.icl.sparse_predictors import (
    excess_risk,
    gradient_descent,
    ols,
    preprocess_then_optimise,
)
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import Learner, Source, is_learner, learner_of, predictor_of
from mechinterp.models.run.task import task_for

STEPS = 128
EXACT = 1e-9
"""A learner counts as exact if its risk is below this fraction of the risk of predicting 0; no
ratio to it is given."""


@dataclass(frozen=True, eq=False, repr=False)
class Baselines(Result):
    """Excess risk of learners, each at its best setting for these prompts, next to the model's."""

    learners: tuple[str, ...]
    tuned: Float[np.ndarray, " learner"]
    """The chosen penalty or number of steps; NaN if there is none to choose."""
    risk: Float[np.ndarray, " learner"]
    """Excess risk, unit y^2."""
    risk_sem: Float[np.ndarray, " learner"]
    ratio: Float[np.ndarray, " learner"]
    """Excess risk of the model divided by that of the learner; NaN if the learner makes no error.
    """
    ratio_sem: Float[np.ndarray, " learner"]
    """Standard error of `ratio`, paired over prompts, by the delta method."""
    model_risk: float
    model_risk_sem: float

    def __repr__(self) -> str:
        values = zip(self.learners, self.ratio, self.ratio_sem, strict=True)
        ratios = ", ".join(f"{name} {with_error(*pair)}" for name, *pair in values)
        risk = with_error(self.model_risk, self.model_risk_sem)
        return f"Baselines(model {risk}, over {ratios})"

    def sentences(self) -> list[str]:
        """Excess risk of the model, and its ratio to each learner that makes an error."""
        ratios = [
            f"{with_error(ratio, sem)} times that of {'predicting 0' if name == 'zero' else name}"
            for name, ratio, sem in zip(self.learners, self.ratio, self.ratio_sem, strict=True)
            if not np.isnan(ratio)
        ]
        risk = with_error(self.model_risk, self.model_risk_sem)
        return [f"The model's excess risk is {risk} y²: {'; '.join(ratios)}."]

    def to_frame(self) -> pd.DataFrame:
        """One row per learner."""
        return frame_of(self, "tuned", *with_sem("risk", "ratio"), learner=self.learners)

    def plot(self) -> go.Figure:
        """Excess risk of the model and of each learner; predicting 0 is left out, because it would
        dwarf the others."""
        shown = self.to_frame().query("learner != 'zero'")
        risks = np.array([self.model_risk, *shown["risk"]])
        errors = np.array([self.model_risk_sem, *shown["risk_sem"]])
        return figures.bars(
            ["the model", *shown["learner"]],
            {"excess risk": (risks, errors)},
            title="Excess risk of the model, and of learners at their best on the same prompts",
            y_title="excess risk (y²)",
        )


def baselines(
    source: Source | Learner,
    prompts: Prompts | None = None,
    *,
    task: TaskLike | None = None,
    n_prompts: int | None = None,
    seed: int = 0,
) -> Baselines:
    """Zero, least squares, ridge at its best penalty, gradient descent and Algorithm 1 at their best step.

    Excess risk is the mean of (ŷ − x·β)² on the same prompts for all. Each learner has the penalty,
    or the number of steps up to 128, that is best on these prompts, which favours it. GD descends
    from zero with the step 1/λ_max of each prompt; Algorithm 1 does so on x reweighted by its
    correlations with y. Ratios are paired over prompts. If the model's task has a pool, the
    posterior mean under it (dMMSE) is added.

    Args:
        source: A model, or a function from prompts to predictions.
        prompts: Prompts to use; None draws `n_prompts` of the task with `seed`.
        task: Law of the prompts; None means the model's own, which a function does not have. It
            decides which prompts are drawn, and whether there is a pool. Given prompts need no
            task.
        n_prompts: None means 4096, or 512 for models with norms or MLPs; more if probes of a wide
            stream need more.
    Source:
        Algorithm 1 is our reading of Chen, Zhao and Zou 2024, arXiv 2408.04532.
    See also:
        `fit_learners`, `classify`.
    Example:
        >>> from mechinterp import load
        >>> from mechinterp.config import TaskConfig, TaskLike
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> prompts = sample_prompts(TaskConfig(), 256, generator=generator_for(0, "eval", 0))
        >>> found = baselines(load("checkpoints/softmax-h2-s0").model, prompts)
        >>> dict(zip(found.learners, found.ratio > 1))["ridge"]
        np.True_
    """
    stated = task if task is not None or is_learner(source) else predictor_of(source).task
    lawless = prompts is not None and stated is None
    law = None if lawless else task_for(source, task, "baselines")
    drawn_from = source if law is None or task is None else law
    prompts = evaluation_prompts(drawn_from, prompts, n_prompts=n_prompts, seed=seed, fitted=1)
    predictions = learner_of(source)(prompts).double()
    require_moderate(predictions)
    own = _errors(predictions, prompts)
    learners = _learners(prompts.to(torch.float64), law)
    zero = learners["zero"][1].mean()
    rows = []
    for setting, errors in learners.values():
        exact = errors.mean() <= EXACT * zero
        ratio = (np.nan, np.nan) if exact else ratio_and_sem(own, errors)
        rows.append([setting, *mean_and_sem(errors), *ratio])
    tuned, risk, risk_sem, ratios, ratios_sem = np.array(rows, dtype=float).T
    return Baselines(
        learners=tuple(learners),
        tuned=tuned,
        **estimates(risk=(risk, risk_sem), ratio=(ratios, ratios_sem)),
        **estimates(model_risk=mean_and_sem(own)),
    )


rivals, Rivals = baselines, Baselines  # names before 0.2.0


def _learners(prompts: Prompts, task: TaskConfig | None) -> dict[str, tuple[float, np.ndarray]]:
    """Chosen setting and squared errors on every prompt, for each learner by name."""
    penalised = torch.stack([ridge(prompts, penalty=penalty) for penalty in PENALTIES])
    steps = np.arange(STEPS + 1.0)
    learners = {
        "zero": (np.nan, _errors(zero_prediction(prompts), prompts)),
        "least squares": (np.nan, _errors(ols(prompts), prompts)),
        "ridge": _best(penalised, np.array(PENALTIES), prompts),
        "GD": _best(gradient_descent(prompts, steps=STEPS), steps, prompts),
        "Algorithm 1": _best(preprocess_then_optimise(prompts, steps=STEPS), steps, prompts),
    }
    if task is not None and task.n_tasks is not None:
        memory = dmmse(prompts, pool=task_pool(task), noise_var=task.noise_var)
        learners["dMMSE"] = (np.nan, _errors(memory, prompts))
    return learners


def _best(
    predictions: torch.Tensor, settings: np.ndarray, prompts: Prompts
) -> tuple[float, np.ndarray]:
    """Setting with the smallest mean squared error, and its errors."""
    errors = _errors(predictions, prompts)
    best = int(errors.mean(1).argmin())
    return float(settings[best]), errors[best]


def _errors(predictions: torch.Tensor, prompts: Prompts) -> np.ndarray:
    return excess_risk(predictions, prompts).numpy(force=True)
