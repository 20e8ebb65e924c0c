"""Loss and excess risk of a model over the number of examples before the query, beside learners."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int

from mechinterp import figures
from mechinterp.analysis.learners.compare import LEARNERS
from mechinterp.analysis.learners.priors import spread_lengths
from mechinterp.analysis.number_format import with_error
from mechinterp.analysis.stats import (
    carried_by_few,
    estimates,
    mean_and_sem,
    ratio_and_sem,
    require_moderate,
)
from mechinterp.config import TaskLike
from mechinterp.display import Result, frame_of, with_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import evaluation_prompts, task_for
from mechinterp.models.run.predictor import (
    Learner,
    Source,
    is_learner,
    predictions_after,
    predictor_of,
)

BESIDE = {"ridge": "ridge", "dMMSE": "dmmse", "least squares": "least squares", "zero": "zero"}
"""Learners beside the model, by their name in the table; dMMSE needs a task with a pool."""


@dataclass(frozen=True, eq=False, repr=False)
class ErrorCurve(Result):
    """Squared errors after each number of pairs, of the model and of learners on the same prompts."""

    n_pairs: Int[np.ndarray, " length"]
    """Number of pairs before the predicted x."""
    learners: tuple[str, ...]
    """The model first, then ridge, dMMSE for a task with a pool, least squares and zero."""
    loss: Float[np.ndarray, "learner length"]
    """Mean squared error against y, noise included; unit y^2."""
    loss_sem: Float[np.ndarray, "learner length"]
    risk: Float[np.ndarray, "learner length"]
    """Mean squared error against y without noise (excess risk); unit y^2. Equal to `loss` if the
    task vectors are unknown."""
    risk_sem: Float[np.ndarray, "learner length"]
    trained: tuple[int, int]
    """First and last of the lengths that the means are over: those of the model's training, if known."""
    mean_loss: Float[np.ndarray, " learner"]
    """Mean of `loss` over the lengths of `trained`."""
    mean_loss_sem: Float[np.ndarray, " learner"]
    over_best: float
    """Mean loss of the model divided by that of the Bayes predictor: dMMSE with a pool, else ridge."""
    over_best_sem: float
    one_pass: bool
    """True if one pass gave all lengths, by the prefix check; False: one run per length."""
    carried_by_few: bool
    """True if the worst 1% of the prompts make up more than half of the model's `mean_loss`."""

    @property
    def best(self) -> str:
        """The Bayes predictor that `over_best` divides by."""
        return "dMMSE" if "dMMSE" in self.learners else "ridge"

    @property
    def headline(self) -> str:
        """Loss of the model divided by that of the Bayes predictor."""
        return f"{with_error(self.over_best, self.over_best_sem)} times {self.best}"

    def __repr__(self) -> str:
        return f"ErrorCurve({self._over_lengths}: loss {self.headline})"

    @property
    def _over_lengths(self) -> str:
        first, last = self.trained
        return f"after {last} pairs" if first == last else f"mean over {first} to {last} pairs"

    def sentences(self) -> list[str]:
        """Mean losses over the lengths, and how they were computed."""
        losses = ", ".join(
            f"{name} {with_error(*pair)}"
            for name, *pair in zip(self.learners, self.mean_loss, self.mean_loss_sem, strict=True)
            if name != "least squares"
        )
        how = "One pass gives all lengths" if self.one_pass else "Each length is a run of its own"
        few = "The worst 1% of the prompts make up more than half of the model's loss."
        return [
            f"Loss ({self._over_lengths}; y², noise included): {losses}.",
            f"The model's loss is {self.headline}. {how}.",
            *([few] if self.carried_by_few else []),
        ]

    def to_frame(self) -> pd.DataFrame:
        """One row per learner and number of pairs."""
        return frame_of(
            self, *with_sem("loss", "risk"), learner=self.learners, n_pairs=self.n_pairs
        )

    def figures(self) -> dict[str, go.Figure]:
        """Loss, then excess risk."""
        return {"error_curve": self.plot(), "risk_curve": self.plot_risk()}

    def plot(self) -> go.Figure:
        """Loss over the number of examples."""
        return self._plot("loss", "Loss over the number of in-context examples")

    def plot_risk(self) -> go.Figure:
        """Excess risk over the number of examples; predicting 0 is left out."""
        return self._plot("risk", "Excess risk over the number of in-context examples")

    def _plot(self, what: str, title: str) -> go.Figure:
        values, errors = getattr(self, what), getattr(self, f"{what}_sem")
        # Least squares has errors of any size at d_x pairs, and would hide the other curves.
        shown = values <= 2 * values[list(self.learners).index("zero")].max()
        curves = figures.named(self.learners, np.where(shown, values, np.nan), errors)
        return figures.lines(
            self.n_pairs,
            curves,
            title=title,
            x_title="in-context examples",
            y_title=f"{'loss' if what == 'loss' else 'excess risk'} (y²)",
        )


def error_curve(
    source: Source | Learner,
    prompts: Prompts | None = None,
    lengths: Sequence[int] | None = None,
    *,
    task: TaskLike | None = None,
    n_prompts: int | None = None,
    seed: int = 0,
) -> ErrorCurve:
    """Loss and excess risk after each number of pairs, beside ridge, dMMSE, least squares and zero.

    After k pairs a model predicts the y of the next x. A causal model whose tokens come in turn does
    so for all k in one pass; that is checked once per model by cutting prompts. Any other model runs
    once per length. Ridge has the penalty noise_var / beta_var of the task.

    Args:
        source: Weights, a checkpoint, a hooked model, or a function from prompts to predictions.
        prompts: Given prompts; None draws them.
        lengths: Numbers of pairs, from 0; None means all for one pass, and else up to 16, from 1.
        task: Law of the prompts; None means the model's own.
        n_prompts: Number of prompts; None means the default for the model.
    Raises:
        ValueError: If there is no task, a length is not in 0 to L, or predictions overflow.
    Source:
        Garg et al. 2022, arXiv 2208.01066, figure 2; Raventos et al. 2023, arXiv 2306.15063, figure 2.
    See also:
        `compare_priors`, `baselines`, `over_steps`.
    Example:
        >>> from functools import partial
        >>> from mechinterp.icl.predictors import ridge
        >>> from mechinterp.config import TaskConfig
        >>> task = TaskConfig(d_x=3, context_length=6)
        >>> curve = error_curve(partial(ridge, penalty=task.posterior_penalty), task=task, lengths=[1, 6])
        >>> round(curve.over_best, 6), curve.one_pass
        (1.0, False)
    """
    law = task_for(source, task, "error_curve", prompts)
    prompts = evaluation_prompts(
        law if is_learner(source) or task is not None else source,
        prompts,
        n_prompts=n_prompts,
        seed=seed,
    )
    every = None if is_learner(source) else predictor_of(source).predict_at_every(prompts)
    longest = prompts.x.shape[1]
    if lengths is None:
        lengths = spread_lengths(1, longest) if every is None else range(longest + 1)
    if not lengths or min(lengths) < 0 or max(lengths) > longest:
        raise ValueError(f"lengths must lie in 0 to {longest}, got {list(lengths)}.")
    lengths = sorted(set(lengths))
    shortest = min(getattr(source, "shortest_trained", None) or 0, lengths[-1])
    inside = [index for index, length in enumerate(lengths) if length >= shortest]
    own = predictions_after(source, prompts, lengths) if every is None else every[:, lengths]
    require_moderate(own)
    exact = prompts.to(torch.float64)
    beside = [name for name in BESIDE if name != "dMMSE" or law.n_tasks is not None]
    learned = (partial(LEARNERS[BESIDE[name]].predict, task=law) for name in beside)
    curves = [predictions_after(learner, exact, lengths) for learner in learned]
    predicted = torch.stack([own.double(), *curves], 1)
    clean = exact.y_of_every_x if exact.beta is None else exact.every_x @ exact.beta
    losses, risks = (
        (predicted - target[:, None, lengths]).square().mean(3).numpy(force=True)
        for target in (exact.y_of_every_x, clean)
    )  # [prompt, learner, length]
    names = ("model", *beside)
    means = losses[..., inside].mean(2)
    best = names.index("dMMSE" if "dMMSE" in names else "ridge")
    return ErrorCurve(
        n_pairs=np.array(lengths),
        learners=names,
        trained=(lengths[inside[0]], lengths[-1]),
        one_pass=every is not None,
        carried_by_few=bool(carried_by_few(means[:, 0])),
        **estimates(
            loss=mean_and_sem(losses),
            risk=mean_and_sem(risks),
            mean_loss=mean_and_sem(means),
            over_best=ratio_and_sem(means[:, 0], means[:, best]),
        ),
    )
