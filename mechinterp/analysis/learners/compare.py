"""Simple learners of linear regression, and a model beside them on the same prompts.

`LEARNERS` is the table of learners. `compare_learners` gives each of them its fitted scalar, its distance to the model,
its loss and its excess risk; `fit_learners` and `baselines` are calls of it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import methodcaller
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechinterp import figures
from mechinterp.analysis.learners.nearest import NEAR
from mechinterp.analysis.number_format import explained, with_error
from mechinterp.analysis.result import Table, records
from mechinterp.analysis.stats import (
    best_factor,
    estimates,
    mean_and_sem,
    ratio_and_sem,
    require_moderate,
)
from mechinterp.config import TaskConfig, TaskLike
from mechinterp.display import Result, frame_of, with_sem
from mechinterp.icl.predictors import (
    PENALTIES,
    PromptsTask,
    debiased_gd,
    dmmse,
    nadaraya_watson,
    no_law,
    ridge,
    vanilla_gd,
    zero_prediction,
)
from mechinterp.icl.prompts import Prompts, draw_prompts, prompt_chunks
from mechinterp.icl.sparse_predictors import gradient_descent, preprocess_then_optimise
from mechinterp.models.run.evaluation import evaluation_prompts, require_number, task_for
from mechinterp.models.run.predictor import (
    Learner,
    Predictor,
    Source,
    is_learner,
    learner_of,
    predictor_of,
)
from mechinterp.progress import progress

STEPS = 128
"""Largest number of steps of GD and of Algorithm 1."""
EXACT = 1e-9
"""A learner counts as exact if its risk is below this fraction of the risk of predicting 0; no
ratio to it is given."""
KERNEL_PROMPTS = 8192
"""Largest number of prompts that omega of the kernel head is fitted to."""
CONTEXT_LENGTHS = tuple(range(10, 101, 10))
N_PROMPTS, N_SLOWER = 20_000, 4096
"""Prompts at each context length: for one layer of attention and functions, and for all other
models, which are slower."""
LEFT_OUT = (
    "Left out, because the law of the prompts is unknown: longer contexts, the posterior mean under a pool. Ridge has the "
    "penalty that is best on these prompts; state their law by task= in Python (--task is the law of the training)."
)
STEP = 1e-4
"""Step of the differences that give derivatives with respect to omega, in units of 1 / E x_i^2."""
Known = Float[np.ndarray, "prompt d_y"]


@dataclass(frozen=True)
class SimpleLearner:
    """Learner with at most one scalar that is fitted or chosen."""

    predict: Callable[..., Tensor]
    """Function of prompts and their task: predictions [batch, d_y], or [setting, batch, d_y] if there are `settings`. The
    kernel head takes omega as a third argument."""
    factor: str = ""
    """Name of the factor on the prediction that is fitted to the model by least squares; empty if there is none."""
    settings: Sequence[float] = ()
    """Settings of which the one with the smallest excess risk is taken, which favours the learner."""


LEARNERS = {
    "zero": SimpleLearner(lambda prompts, task: zero_prediction(prompts)),
    "vanilla_gd": SimpleLearner(lambda prompts, task: vanilla_gd(prompts, eta=1.0), factor="eta"),
    "debiased_gd": SimpleLearner(lambda prompts, task: debiased_gd(prompts, eta=1.0), factor="eta"),
    "kernel_head": SimpleLearner(
        lambda prompts, task, omega: nadaraya_watson(prompts, omega=omega, mu=1.0), factor="mu"
    ),
    "ridge": SimpleLearner(lambda prompts, task: ridge(prompts, penalty=task.posterior_penalty)),
    "dmmse": SimpleLearner(
        lambda prompts, task: dmmse(prompts, pool=task.pool(), noise_var=task.noise_var)
    ),
    "least squares": SimpleLearner(lambda prompts, task: ridge(prompts, penalty=0)),
    "ridge at its best": SimpleLearner(
        lambda prompts, task: torch.stack([ridge(prompts, penalty=each) for each in PENALTIES]),
        settings=PENALTIES,
    ),
    "GD": SimpleLearner(
        lambda prompts, task: gradient_descent(prompts, steps=STEPS), settings=range(STEPS + 1)
    ),
    "Algorithm 1": SimpleLearner(
        lambda prompts, task: preprocess_then_optimise(prompts, steps=STEPS),
        settings=range(STEPS + 1),
    ),
}
"""Learners by name. Ridge has the task's own penalty; dmmse needs a task with a pool."""
FITTED = ("zero", "vanilla_gd", "debiased_gd", "kernel_head", "ridge")
"""Learners for any task; a task with a pool adds dmmse."""
BASELINES = {
    "zero": LEARNERS["zero"],
    "least squares": LEARNERS["least squares"],
    "ridge": LEARNERS["ridge at its best"],
    "GD": LEARNERS["GD"],
    "Algorithm 1": LEARNERS["Algorithm 1"],
}
"""Learners for any task; a task with a pool adds dMMSE."""


@dataclass(frozen=True, eq=False, repr=False)
class LearnerComparison(Result):
    """Distances, losses and excess risks of learners beside a model, at each context length.

    All see the same prompts, so that differences are paired. Losses are against the noisy query response, risks against
    the response without noise; unit y^2.
    """

    learners: tuple[str, ...]
    context_length: Int[np.ndarray, " length"]
    n_prompts: int
    factor: Float[np.ndarray, "length learner"]
    """Least-squares step size eta of vanilla and debiased GD; mu times the sign of `kernel_omega`
    for the kernel head; NaN for the others.

    (-omega, -mu) predicts nearly the same as (omega, mu), hence the sign.
    """
    factor_sem: Float[np.ndarray, "length learner"]
    """Standard error of `factor` over prompts; that of mu covers the fit of omega."""
    kernel_omega: Float[np.ndarray, " length"]
    """Fitted omega of the kernel head, unit 1/x^2. If -omega fits as well, its
    sign is a matter of chance. NaN without a kernel head."""
    tuned: Float[np.ndarray, "length learner"]
    """The chosen penalty or number of steps; NaN if there is none to choose."""
    r2: Float[np.ndarray, "length learner"]
    """1 - mean (model - learner)^2 / mean model^2."""
    r2_sem: Float[np.ndarray, "length learner"]
    rms: Float[np.ndarray, "length learner"]
    """Root mean square of model minus learner, unit y."""
    rms_sem: Float[np.ndarray, "length learner"]
    lead: Float[np.ndarray, " length"]
    """Mean squared distance to the model of the second-best learner minus that of the best."""
    lead_sem: Float[np.ndarray, " length"]
    """Standard error of `lead`, paired over prompts."""
    loss: Float[np.ndarray, "length learner"]
    """Loss of the learner."""
    loss_sem: Float[np.ndarray, "length learner"]
    loss_gap: Float[np.ndarray, "length learner"]
    """Loss of the model minus loss of the learner."""
    loss_gap_sem: Float[np.ndarray, "length learner"]
    """Standard error of `loss_gap`, paired over prompts."""
    risk: Float[np.ndarray, "length learner"]
    """Excess risk, unit y^2."""
    risk_sem: Float[np.ndarray, "length learner"]
    ratio: Float[np.ndarray, "length learner"]
    """Excess risk of the model divided by that of the learner; NaN if the learner makes no error.
    """
    ratio_sem: Float[np.ndarray, "length learner"]
    """Standard error of `ratio`, paired over prompts, by the delta method."""
    model_loss: Float[np.ndarray, " length"]
    """Loss of the model, unit y^2."""
    model_loss_sem: Float[np.ndarray, " length"]
    model_risk: Float[np.ndarray, " length"]
    """Excess risk of the model, unit y^2."""
    model_risk_sem: Float[np.ndarray, " length"]

    def __repr__(self) -> str:
        nearest = [self.learners[each] for each in self.rms.argmin(1)]
        near = zip(self.context_length, nearest, strict=True)
        return f"LearnerComparison(nearest: {', '.join(f'{name} at L = {length}' for length, name in near)})"

    def to_frame(self) -> pd.DataFrame:
        """One row per context length and learner."""
        names = with_sem("r2", "rms", "loss", "loss_gap", "risk", "ratio")
        return self._frame(*with_sem("factor"), "tuned", *names)

    def _frame(self, *names: str) -> pd.DataFrame:
        return frame_of(self, *names, context_length=self.context_length, learner=self.learners)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LearnerFits(LearnerComparison):
    """Distances of a model to closed-form learners, each fitted to the model at every context
    length."""

    trained_length: int
    """Context length of the verdict: the task's own."""
    left_out: str = ""
    """Sentence on the parts that need the law of given prompts; empty if the law is known."""
    COLUMNS: ClassVar = dict.fromkeys((*FITTED, "dmmse"), "R² of the learner on the predictions.")

    @property
    def best(self) -> str:
        """Learner closest to the model at the trained context length."""
        return self.learners[self.rms[self._trained].argmin()]

    @property
    def verdict(self) -> str:
        """Sentence: the closest learner, its distance, and the next learner."""
        at, rms = self._trained, self.rms[self._trained]
        best, runner_up = np.argsort(rms)[:2]
        name, r2 = self.learners[best], self.r2[at]
        if np.isnan(r2[best]):
            return "The model predicts 0 on every prompt."
        factor = with_error(self.factor[at, best], self.factor_sem[at, best])
        letter = LEARNERS[name].factor
        fitted = f", {letter} = {factor}" if letter else ""
        clear = self.lead[at] > 2 * self.lead_sem[at]
        closest = (
            f"No learner is close (R² < {NEAR:g}); nearest:" if r2[best] < NEAR else "Closest to"
        )
        return (
            f"{closest} {name}{fitted}: {explained(r2[best], self.r2_sem[at, best])}, "
            f"rms {with_error(rms[best], self.rms_sem[at, best])} at L = {self.trained_length}; "
            f"next {self.learners[runner_up]}, R² = {r2[runner_up]:.4f}"
            f"{'' if clear else '; the difference is not significant'}."
        )

    @property
    def _trained(self) -> int:
        return self.context_length.tolist().index(self.trained_length)

    def __repr__(self) -> str:
        return f"LearnerFits({' '.join(self.sentences())})"

    def to_frame(self) -> pd.DataFrame:
        """One row per context length and learner."""
        names = with_sem("factor", "r2", "rms", "loss", "loss_gap")
        return self._frame(*names, "kernel_omega", *with_sem("model_loss"))

    def sentences(self) -> list[str]:
        """The verdict, and the parts that are left out."""
        return [self.verdict, *filter(None, [self.left_out])]

    def tables(self) -> dict[str, Table]:
        """Fits at the trained context length, R^2 over all lengths, and all numbers of all lengths."""
        frame = self.to_frame()
        trained = frame[frame["context_length"] == self.trained_length]
        over_length = frame.pivot(index="context_length", columns="learner", values="r2")
        over_length = over_length[list(self.learners)].rename_axis(None, axis=1).reset_index()
        title = (
            f"Fits at L = {self.trained_length}; loss gap is the model's loss minus the learner's"
        )
        quiet = (
            *("context_length", "rms", "rms_sem", "loss_sem", "kernel_omega"),
            *("model_loss", "model_loss_sem"),
        )
        return {
            "fits_at_trained_length": Table(trained, title, quiet=quiet),
            "r2_over_length": Table(over_length, "R² over context length"),
            "fits": Table(frame, "All numbers", brief=False),
        }

    def to_document(self) -> dict:
        """Fields of the JSON document."""
        names = ("best", "verdict", "trained_length", "n_prompts")
        fields = {name: getattr(self, name) for name in names}
        fields |= {name: float(getattr(self, name)[self._trained]) for name in with_sem("lead")}
        fields |= {"left_out": self.left_out} if self.left_out else {}
        return fields | {"fits": records(self.to_frame())}

    def figures(self) -> dict[str, go.Figure]:
        """Distance and loss over the context length."""
        return {"fit_distance": self.plot_distance(), "fit_loss": self.plot()}

    def plot(self) -> go.Figure:
        """Loss of the model and of the fitted learners over the context length."""
        names = (figures.MODEL, *self.learners)
        loss = np.column_stack([self.model_loss, self.loss])
        sem = np.column_stack([self.model_loss_sem, self.loss_sem])
        return figures.lines(
            self.context_length,
            figures.named(names, loss.T, sem.T),
            title="Loss over context length: the model and the learners fitted to it",
            x_title="context length L",
            y_title="loss (y²)",
        )

    def plot_distance(self) -> go.Figure:
        """Root mean square distance from the model to each fitted learner over the context length."""
        return figures.lines(
            self.context_length,
            figures.named(self.learners, self.rms.T, self.rms_sem.T),
            title="Distance from the model to each learner",
            x_title="context length L",
            y_title="rms of model − learner (y)",
            log_y=True,
        )


def fit_learners(
    source: Source | Learner,
    task: TaskLike | None = None,
    *,
    prompts: Prompts | None = None,
    context_lengths: Sequence[int] = CONTEXT_LENGTHS,
    n_prompts: int | None = None,
    seed: int = 0,
) -> LearnerFits:
    """Fits of zero, vanilla GD, debiased GD, a kernel head and ridge to a model's predictions.

    Step sizes and mu are least squares on the model's predictions. omega of the kernel head is a line search, over
    either sign. Ridge is the task's Bayes predictor, with nothing fitted; a task
    with a pool has a sixth learner, dmmse.

    Args:
        source: Weights, a checkpoint, a hooked model, or a function from prompts to predictions
            (which needs a task). Of a function with predictions after every layer, the last ones
            are used.
        context_lengths: Numbers of pairs; the task's own is added. The default lengths are cut to
            the model's positions. A causal model whose tokens come in turn is run once for all.
        task: Law of the prompts; None means the model's own. With given prompts the law is then
            unknown, and ridge has the penalty that is best on them.
        prompts: Given prompts, whose length is the longest; None draws them.
        n_prompts: Number of prompts per context length, at least 8; None means 20,000, or 4,096 for
            models of several layers and modules.
    Raises:
        ValueError: If a function comes without a task or prompts, or there are too few prompts.
    Source:
        He et al. 2025, arXiv 2503.12734, section 4 (vanilla, debiased GD, Bayes) and eq. (4.12).
    See also:
        `classify`, `name_algorithm`, `compare_priors`.
    Example:
        >>> from mechinterp.models.constructions.one_layer import debiased_gradient_step
        >>> fits = fit_learners(debiased_gradient_step(0.88, 0.05, d_x=5), context_lengths=[40], n_prompts=4096)
        >>> fits.best, round(float(fits.factor[0, 2]), 2)
        ('debiased_gd', 0.88)
    """
    task = task_for(source, task, "fit_learners", prompts)
    if n_prompts is None:
        fast = is_learner(source) or predictor_of(source).is_one_attention
        n_prompts = N_PROMPTS if fast else N_SLOWER
    given = task if isinstance(task, PromptsTask) else None
    require_number(n_prompts if given is None else len(given.prompts), 2)  # fitted: omega and mu
    if context_lengths is CONTEXT_LENGTHS and given is not None:
        context_lengths = [n for n in CONTEXT_LENGTHS if n < task.context_length]
    elif context_lengths is CONTEXT_LENGTHS and not is_learner(source):
        predictor = predictor_of(source)
        context_lengths = [n for n in CONTEXT_LENGTHS if _has_room(predictor, task, n)]
    names = FITTED if task.n_tasks is None else (*FITTED, "dmmse")
    found = compare_learners(
        source,
        sorted({*context_lengths, task.context_length}),
        {name: LEARNERS[name] for name in names},
        task=task,
        draw=partial(_drawn, task, n_prompts, seed),
    )
    left_out = LEFT_OUT if no_law(task) else ""
    return LearnerFits(**vars(found), trained_length=task.context_length, left_out=left_out)


def _has_room(predictor: Predictor, task: TaskConfig, length: int) -> bool:
    """True if a model has enough positions for this number of pairs; else it raises when it runs."""
    try:
        with torch.no_grad():
            predictor.predict(draw_prompts(task, 2, context_length=length))
    except ValueError:
        return False
    return True


def _drawn(task: TaskConfig, n_prompts: int, seed: int, length: int) -> Iterable[Prompts]:
    """Prompts of this many pairs, in chunks."""
    if isinstance(task, PromptsTask):
        return [task.prompts.shortened(length)]
    return prompt_chunks(task, n_prompts, seed=seed, context_length=length)


@dataclass(frozen=True, eq=False, repr=False)
class Baselines(LearnerComparison):
    """Excess risk of learners, each at its best setting for these prompts, next to the model's."""

    def __repr__(self) -> str:
        return f"Baselines({self.sentences()[0]})"

    def sentences(self) -> list[str]:
        """Excess risk of the model, and its ratio to each learner that makes an error."""
        names = ("predicting 0" if name == "zero" else name for name in self.learners)
        ratios = [
            f"{with_error(ratio, sem)} times that of {name}"
            for name, ratio, sem in zip(names, self.ratio[0], self.ratio_sem[0], strict=True)
            if not np.isnan(ratio)
        ]
        risk = with_error(self.model_risk[0], self.model_risk_sem[0])
        return [f"The model's excess risk is {risk} y²: {'; '.join(ratios)}."]

    def to_frame(self) -> pd.DataFrame:
        """One row per learner."""
        return self._frame("tuned", *with_sem("risk", "ratio")).drop(columns="context_length")

    def plot(self) -> go.Figure:
        """Excess risk of the model and of each learner; predicting 0 is left out, because it would
        dwarf the others."""
        shown = self.to_frame().query("learner != 'zero'")
        risks = np.array([*self.model_risk, *shown["risk"]])
        errors = np.array([*self.model_risk_sem, *shown["risk_sem"]])
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
        >>> found = baselines(load("softmax-h2-s0"), n_prompts=256)
        >>> dict(zip(found.learners, found.ratio[0] > 1))["ridge"]
        np.True_
    """
    stated = task if task is not None or is_learner(source) else predictor_of(source).task
    lawless = prompts is not None and stated is None
    law = None if lawless else task_for(source, task, "baselines")
    drawn_from = source if law is None or task is None else law
    prompts = evaluation_prompts(drawn_from, prompts, n_prompts=n_prompts, seed=seed, fitted=1)
    predictions = learner_of(source)(prompts)
    pool = law is not None and law.n_tasks is not None
    found = compare_learners(
        lambda _: predictions,
        [prompts.x.shape[1]],
        BASELINES | ({"dMMSE": LEARNERS["dmmse"]} if pool else {}),
        task=law or PromptsTask.of(prompts),
        draw=lambda length: [prompts.to(torch.float64)],
    )
    return Baselines(**vars(found))


def compare_learners(
    source: Source | Learner,
    lengths: Sequence[int],
    learners: Mapping[str, SimpleLearner],
    *,
    task: TaskConfig,
    draw: Callable[[int], Iterable[Prompts]],
) -> LearnerComparison:
    """Learners beside a model at several context lengths.

    A causal model whose tokens come in turn is run once for all lengths.

    Args:
        lengths: Numbers of pairs, rising.
        learners: Entries of `LEARNERS`, or further ones, by name.
        task: Law of the prompts: penalty of ridge, pool of dmmse.
        draw: Function that gives the prompts of a length, in chunks.
    Raises:
        ValueError: If predictions overflow.
    Source:
        Derived here.
    Example:
        >>> from functools import partial
        >>> from mechinterp.icl.prompts import draw_prompts
        >>> task = TaskConfig(d_x=3)
        >>> draw = lambda length: [draw_prompts(task, 64, context_length=length, dtype=torch.float64)]
        >>> named = {name: LEARNERS[name] for name in ("ridge", "least squares")}
        >>> compare_learners(partial(ridge, penalty=0.3), [4, 8], named, task=task, draw=draw)
        LearnerComparison(nearest: ridge at L = 4, ridge at L = 8)
    """
    model, rows = learner_of(source), []
    whole = _in_one_pass(source, draw(lengths[-1]))
    for length in progress(lengths, "fitting learners at each context length"):
        if whole is None:
            chunks = partial(draw, length)
            predicted = torch.cat([model(prompts).double() for prompts in chunks()])
        else:
            chunks = partial(map, methodcaller("prefix", length), [each for each, _ in whole])
            predicted = torch.cat([every[:, length].double() for _, every in whole])
        require_moderate(predicted)
        rows.append(_compared_at(predicted.numpy(force=True), chunks, task, learners))
    columns: dict[str, Any] = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    return LearnerComparison(tuple(learners), np.array(lengths), len(predicted), **columns)


def _in_one_pass(
    source: Source | Learner, chunks: Iterable[Prompts]
) -> list[tuple[Prompts, Float[Tensor, "batch n_pairs d_y"]]] | None:
    """Chunks of prompts with the predictions at every x; None if one pass does not give them."""
    whole = []
    for prompts in () if is_learner(source) else chunks:
        every = predictor_of(source).predict_at_every(prompts)
        if every is None:
            return None
        whole.append((prompts, every))
    return whole or None


def _compared_at(
    model: Known,
    chunks: Callable[[], Iterable[Prompts]],
    task: TaskConfig,
    learners: Mapping[str, SimpleLearner],
) -> dict[str, Any]:
    """All columns at one context length."""
    omega, more = np.nan, dict[str, tuple[float, ...]]()
    if "kernel_head" in learners:
        first = next(iter(chunks()))[:KERNEL_PROMPTS]
        omega, through_omega = _kernel_omega(model[: len(first)], first)
        more["kernel_head"] = (omega,)
    parts = [
        (
            prompts.y_query.double(),
            prompts.y_query_clean.double(),
            *(
                each.predict(prompts, task, *more.get(n, ())).double()
                for n, each in learners.items()
            ),
        )
        for prompts in chunks()
    ]
    target, clean, *shapes = (
        torch.cat(each, -2).numpy(force=True) for each in zip(*parts, strict=True)
    )
    learned, fits = [], []
    for (name, learner), shape in zip(learners.items(), shapes, strict=True):
        factor = sem = tuned = np.nan
        if learner.settings:
            best = int(np.square(shape - clean).mean((1, 2)).argmin())
            shape, tuned = shape[best], learner.settings[best]
        if learner.factor:
            factor, sem = best_factor(shape, model)
            if name in more:
                sem = _kernel_factor_sem(shape, model, factor, through_omega)
        learned.append(shape if np.isnan(factor) else factor * shape)
        fits.append((-factor if name in more and omega < 0 else factor, sem, tuned))
    columns = dict(zip(("factor", "factor_sem", "tuned"), np.array(fits, float).T, strict=True))
    return {**columns, "kernel_omega": omega, **_measures(model, learned, target, clean)}


def _measures(
    model: Known, learned: Sequence[Known], target: Known, clean: Known
) -> dict[str, np.ndarray | float]:
    """Distances to the model, losses and risks, with standard errors over prompts."""
    squares, losses, risks = (
        np.stack([np.square(each - other).mean(1) for each in learned], 1)
        for other in (model, target, clean)
    )
    loss, risk = (np.square(model - each).mean(1) for each in (target, clean))
    exact = risks.mean(0) <= EXACT * np.square(clean).mean()
    ratios = [
        (np.nan, np.nan) if skip else ratio_and_sem(risk, each)
        for skip, each in zip(exact, risks.T, strict=True)
    ]
    unexplained, unexplained_sem = ratio_and_sem(squares, np.square(model).mean(1))
    distance, distance_sem = mean_and_sem(squares)
    rms = np.sqrt(distance)
    best, second = np.argsort(squares.mean(0))[:2]
    return estimates(
        r2=(1 - unexplained, unexplained_sem),
        rms=(rms, distance_sem / np.maximum(2 * rms, np.finfo(float).tiny)),
        lead=mean_and_sem(squares[:, second] - squares[:, best]),
        loss=mean_and_sem(losses),
        loss_gap=mean_and_sem(loss[:, None] - losses),
        risk=mean_and_sem(risks),
        ratio=tuple(np.array(ratios, float).T),
        model_loss=mean_and_sem(loss),
        model_risk=mean_and_sem(risk),
    )


def _kernel_omega(
    prediction: Known, prompts: Prompts
) -> tuple[float, Float[np.ndarray, " prompt"]]:
    """Fits omega of the kernel head closest to a model's predictions; mu is fitted for each omega.

    Returns:
        omega, and the influence of each prompt on the best mu through omega, times the number of
        prompts.
    """
    from scipy.optimize import minimize_scalar  # slow import

    @cache
    def fitted(omega: float) -> tuple[float, float]:
        """The best mu and the mean squared distance."""
        shape = nadaraya_watson(prompts, omega=omega, mu=1.0).double().numpy(force=True)
        factor, _ = best_factor(shape, prediction)
        return factor, float(np.square(prediction - factor * shape).mean())

    top = 2 / prompts.x.square().mean().item() / prompts.x.shape[2] ** 0.5
    both = [
        minimize_scalar(
            lambda omega: fitted(float(omega))[1],
            bounds=bounds,
            method="bounded",
            options={"xatol": 1e-4},
        ).x
        for bounds in ((0.0, top), (-top, 0.0))
    ]
    omega = float(min(both, key=lambda omega: fitted(float(omega))[1]))
    return omega, _through_omega(prompts, prediction, omega, fitted(omega)[0])


def _through_omega(
    prompts: Prompts, prediction: Known, omega: float, factor: float
) -> Float[np.ndarray, " prompt"]:
    """Influence of each prompt on the best mu through the best omega, times the number of prompts.

    (omega, mu) minimise D = mean |f - mu s(omega)|^2. A prompt with 1 / n more weight moves them by
    -H^-1 psi_i / n, where H has the second derivatives of D, and psi_i the first derivatives of the
    prompt's own |f_i - mu s_i|^2. The result is the motion of mu minus its motion at a fixed omega.
    """
    prompts, step = prompts.to(torch.float64), STEP / prompts.x.square().mean().item()
    below, s, above = (
        nadaraya_watson(prompts, omega=omega + change, mu=1.0).numpy(force=True)
        for change in (-step, 0.0, step)
    )
    ds, dds = (above - below) / (2 * step), (above - 2 * s + below) / step**2
    left = prediction - factor * s
    by_omega, by_mu = -2 * factor * (left * ds).mean(1), -2 * (left * s).mean(1)
    omega_twice = 2 * factor * (factor * ds**2 - left * dds).mean()
    mixed, mu_twice = 2 * (factor * s * ds - left * ds).mean(), 2 * (s**2).mean()
    determinant = omega_twice * mu_twice - mixed**2
    if not determinant > 0:  # no prediction depends on omega, or the search ended at its bound
        return np.zeros(len(s))
    return mixed * (by_omega - mixed / mu_twice * by_mu) / determinant


def _kernel_factor_sem(
    shape: Known, prediction: Known, factor: float, through_omega: Float[np.ndarray, " first"]
) -> float:
    """Standard error of the kernel head's mu over prompts, including their influence through omega.

    Args:
        through_omega: Influence through omega as returned by `_kernel_omega`, for the prompts that
            omega was fitted to.
    """
    residual = (shape * (prediction - factor * shape)).mean(1) / np.square(shape).mean()
    influence = residual / len(residual)
    influence[: len(through_omega)] += through_omega / len(through_omega)
    return float(np.sqrt(len(influence)) * influence.std(ddof=1))
