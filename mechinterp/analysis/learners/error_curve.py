"""Loss and excess risk of a model over the number of examples before the query, beside learners."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from mechinterp.analysis.learners.compare import compare_learners
from mechinterp.analysis.learners.learner_comparison import LearnerComparison, few_text, sharp
from mechinterp.analysis.learners.pool_tasks import spread_lengths
from mechinterp.analysis.number_format import digits, with_error
from mechinterp.config import TaskLike
from mechinterp.figures import MODEL
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import prompts_and_law, require_prompts
from mechinterp.models.run.predictor import Learner, Source, is_learner, predictor_of

CURVE_LEARNERS = ("ridge", "least_squares", "zero")
"""Learners beside the model; a task with a pool adds dmmse, one that drifts the Kalman filter, one with
several noise levels adaptive ridge regression."""
FOR_ONE_PASS = 4
"""Number of prompts that show whether one pass gives all lengths."""
BAYES_LEARNERS = ("kalman", "dmmse", "adaptive_ridge", "ridge_with_intercept", "ridge")
"""Learners that the model's loss is divided by: the first that is compared."""


@dataclass(frozen=True, eq=False, repr=False)
class ErrorCurve(LearnerComparison):
    """Loss and excess risk after each number of pairs, of the model and of learners on the same prompts."""

    @property
    def best(self) -> str:
        """The Bayes predictor that `over_best` divides by."""
        return next(name for name in BAYES_LEARNERS if name in self.learners)

    @property
    def over_best(self) -> float:
        """Mean loss of the model divided by that of the Bayes predictor: dmmse with a pool, the Kalman
        filter with a drift, adaptive ridge with several noise levels, else ridge."""
        return float(self._mean(self.best).ratio)

    @property
    def over_best_sem(self) -> float:
        """Standard error of `over_best`, paired over prompts."""
        return float(self._mean(self.best).ratio_sem)

    @property
    def headline(self) -> str:
        """Loss of the model divided by that of the Bayes predictor; the loss itself if the ratio is
        not defined or not known to 20%."""
        best, own = self._mean(self.best), self._mean(MODEL)
        if sharp(best.ratio, best.ratio_sem):
            return f"{with_error(best.ratio, best.ratio_sem)} times {self.best}"
        if own.carried_by_few:
            return f"{digits(own.median_loss)} y² (median over prompts)"
        return f"{with_error(own.loss, own.loss_sem)} y²"

    def _mean(self, learner: str) -> pd.Series:
        return self.means.set_index("learner").loc[learner]

    @property
    def _over_lengths(self) -> str:
        first, last = self.trained
        return f"after {last} pairs" if first == last else f"mean over {first} to {last} pairs"

    def __repr__(self) -> str:
        return f"ErrorCurve({self._over_lengths}: loss {self.headline})"

    def sentences(self) -> list[str]:
        """Mean losses over the lengths, and how they were computed."""
        losses = ", ".join(
            f"{row.learner} {with_error(row.loss, row.loss_sem)}"
            for row in self.means.itertuples()
            if not row.carried_by_few
        )
        how = "One pass gives all lengths" if self.one_pass else "Each length is a run of its own"
        text = f"Loss ({self._over_lengths}; y², noise included): {losses}."
        return [text, f"The model's loss is {self.headline}. {how}.", *self.few, *self.notes]

    @property
    def few(self) -> list[str]:
        """Sentence on the mean losses that a few prompts decide."""
        rows = self.means[self.means.carried_by_few]
        return few_text("losses", zip(rows.learner, rows.median_loss, strict=True))


def error_curve(
    source: Source | Learner,
    prompts: Prompts | None = None,
    *,
    context_lengths: Sequence[int] | None = None,
    task: TaskLike | None = None,
    n_prompts: int | None = None,
    seed: int = 0,
) -> ErrorCurve:
    """Loss and excess risk after each number of pairs, beside ridge, dmmse, least squares and zero.

    After k pairs a model predicts the y of the next x. A causal model whose tokens come in turn does
    so for all k in one pass; that is checked once per model by cutting prompts. Any other model runs
    once per length. It is `compare_learners` with these learners and lengths.

    Args:
        source: Weights, a checkpoint, a hooked model, or a function from prompts to predictions.
        prompts: Given prompts; None draws them.
        context_lengths: Numbers of pairs, from 0; None means from the shortest of the training to
            that of the prompts: all of them for one pass, else up to 16. A model that was trained on
            one length, or whose training is unknown, starts at 0 for one pass, else at 1.
        task: Law of the prompts; None means the model's own.
        n_prompts: Number of prompts; None means the default for the model.
    Raises:
        ValueError: If there is no task, a length is not in 0 to L, or all predictions overflow.
    Source:
        Garg et al. 2022, arXiv 2208.01066, figure 2; Raventos et al. 2023, arXiv 2306.15063, figure 2.
    See also:
        `compare_learners`, `compare_priors`, `over_steps`.
    Example:
        >>> from functools import partial
        >>> from mechinterp.icl.predictors import ridge
        >>> from mechinterp.config import TaskConfig
        >>> task = TaskConfig(d_x=3, context_length=6)
        >>> model = partial(ridge, penalty=task.posterior_penalty)
        >>> curve = error_curve(model, task=task, context_lengths=[1, 6])
        >>> round(curve.over_best, 6), curve.one_pass
        (1.0, False)
    """
    require_prompts(prompts, "error_curve")
    lengths = usual_lengths(source, prompts, task) if context_lengths is None else context_lengths
    found = compare_learners(
        source,
        prompts,
        learners=CURVE_LEARNERS,
        context_lengths=lengths,
        task=task,
        n_prompts=n_prompts,
        seed=seed,
    )
    return ErrorCurve(**vars(found))


def usual_lengths(
    source: Source | Learner, prompts: Prompts | None, task: TaskLike | None
) -> Sequence[int]:
    """Default lengths of a curve: all of them if one pass gives them, else at most 16.

    Shorter lengths than those of a checkpoint's training are left out: predictions there are
    arbitrary, and those of linear attention may overflow.
    """
    given = prompts if prompts is None else prompts[:FOR_ONE_PASS]
    few, _ = prompts_and_law(
        source, given, analysis="error_curve", task=task, n_prompts=FOR_ONE_PASS, repeated=True
    )
    longest = few.x.shape[1]
    one_pass = not is_learner(source) and predictor_of(source).predict_at_every(few) is not None
    start = getattr(source, "shortest_trained", None)
    if start is None or start >= longest:
        start = 0 if one_pass else 1
    return range(start, longest + 1) if one_pass else spread_lengths(start, longest)
