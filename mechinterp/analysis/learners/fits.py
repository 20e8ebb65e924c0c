"""Fits of closed-form learners to a model, over the context length."""

from collections.abc import Callable, Iterator, Sequence
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
from mechinterp.analysis.stats import estimates, mean_and_sem, ratio_and_sem, require_moderate
from mechinterp.config import TaskConfig, TaskLike
from mechinterp.display import Result, frame_of, with_sem
from mechinterp.icl.given import PromptsTask, no_law
from mechinterp.icl.pools import dmmse
from mechinterp.icl.predictors import (
    debiased_gd,
    nadaraya_watson,
    ridge,
    vanilla_gd,
    zero_prediction,
)
from mechinterp.icl.prompts import Prompts, prompt_chunks, sample_prompts, task_pool
from mechinterp.models.run.evaluation import require_number
from mechinterp.models.run.predictor import (
    Learner,
    Predictor,
    Source,
    is_learner,
    learner_of,
    predictor_of,
)
from mechinterp.models.run.task import task_for
from mechinterp.progress import ProgressCallback, no_progress

FITTED = {"vanilla_gd": "eta", "debiased_gd": "eta", "kernel_head": "mu"}
LEARNERS = ("zero", "vanilla_gd", "debiased_gd", "kernel_head", "ridge")
"""Learners for any task; a task with a pool adds dmmse."""
CONTEXT_LENGTHS = tuple(range(10, 101, 10))
N_PROMPTS, N_SLOWER, KERNEL_PROMPTS = 20_000, 4096, 8192
"""Prompts at each context length: for one layer of attention and functions, and for all other
models, which are slower; and prompts that omega is fitted to."""
LEFT_OUT = (
    "Left out, because the law of the prompts is unknown: longer contexts, the posterior mean under a pool. Ridge has the "
    "penalty that is best on these prompts; state their law by task= in Python (--task is the law of the training)."
)


@dataclass(frozen=True, eq=False, repr=False)
class LearnerFits(Result):
    """Distances of a model to closed-form learners, each fitted to the model at every context
    length.

    All learners and the model see the same prompts, so that differences are paired. Losses are
    against the noisy query response, in units of y^2.
    """

    context_length: Int[np.ndarray, " length"]
    trained_length: int
    """Context length of the verdict: the task's own."""
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
    sign is a matter of chance."""
    r2: Float[np.ndarray, "length learner"]
    """1 - mean (model - learner)^2 / mean model^2."""
    r2_sem: Float[np.ndarray, "length learner"]
    rms: Float[np.ndarray, "length learner"]
    """Root mean square of model minus learner, unit y."""
    rms_sem: Float[np.ndarray, "length learner"]
    loss: Float[np.ndarray, "length learner"]
    """Loss of the learner."""
    loss_sem: Float[np.ndarray, "length learner"]
    loss_gap: Float[np.ndarray, "length learner"]
    """Loss of the model minus loss of the learner."""
    loss_gap_sem: Float[np.ndarray, "length learner"]
    """Standard error of `loss_gap`, paired over prompts."""
    model_loss: Float[np.ndarray, " length"]
    """Loss of the model, unit y^2."""
    model_loss_sem: Float[np.ndarray, " length"]
    lead: float
    """Mean squared distance to the model of the second-best learner minus that of the best, at the
    trained length."""
    lead_sem: float
    """Standard error of `lead`, paired over prompts."""
    learners: tuple[str, ...] = LEARNERS
    left_out: str = ""
    """Sentence on the parts that need the law of given prompts; empty if the law is known."""
    COLUMNS: ClassVar = dict.fromkeys((*LEARNERS, "dmmse"), "R² of the learner on the predictions.")

    @property
    def best(self) -> str:
        """Learner closest to the model at the trained context length."""
        return self.learners[self.rms[self._trained].argmin()]

    @property
    def verdict(self) -> str:
        """Sentence: the closest learner, its distance, and the next learner."""
        best, runner_up = np.argsort(self.rms[self._trained])[:2]
        at = self._trained
        if np.isnan(self.r2[at, best]):
            return "The model predicts 0 on every prompt."
        name = self.learners[best]
        factor = with_error(self.factor[at, best], self.factor_sem[at, best])
        fitted = f", {FITTED[name]} = {factor}" if name in FITTED else ""
        clear = "" if self.lead > 2 * self.lead_sem else "; the difference is not significant"
        near = self.r2[at, best] >= NEAR
        closest = "Closest to" if near else f"No learner is close (R² < {NEAR:g}); nearest:"
        return (
            f"{closest} {name}{fitted}: {explained(self.r2[at, best], self.r2_sem[at, best])}, "
            f"rms {with_error(self.rms[at, best], self.rms_sem[at, best])} at L = {self.trained_length}; "
            f"next {self.learners[runner_up]}, R² = {self.r2[at, runner_up]:.4f}{clear}."
        )

    @property
    def _trained(self) -> int:
        return int(np.flatnonzero(self.context_length == self.trained_length)[0])

    def __repr__(self) -> str:
        return f"LearnerFits({' '.join(self.sentences())})"

    def to_frame(self) -> pd.DataFrame:
        """One row per context length and learner."""
        names = with_sem("factor", "r2", "rms", "loss", "loss_gap")
        names = (*names, "kernel_omega", *with_sem("model_loss"))
        return frame_of(self, *names, context_length=self.context_length, learner=self.learners)

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
        names = ("best", "verdict", "trained_length", "n_prompts", "lead", "lead_sem")
        fields = {name: getattr(self, name) for name in names}
        fields |= {"left_out": self.left_out} if self.left_out else {}
        return fields | {"fits": records(self.to_frame())}

    def figures(self) -> dict[str, go.Figure]:
        """Distance and loss over the context length."""
        return {"fit_distance": self.plot_distance(), "fit_loss": self.plot()}

    def plot(self) -> go.Figure:
        """Loss of the model and of the fitted learners over the context length."""
        names = (figures.MODEL, *self.learners)
        losses = [
            np.column_stack([getattr(self, f"model_{name}"), getattr(self, name)]).T
            for name in with_sem("loss")
        ]
        return figures.lines(
            self.context_length,
            figures.named(names, *losses),
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
    progress: ProgressCallback = no_progress,
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
        progress: Optional progress callback.
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
    model = learner_of(source)
    task = task_for(source, task, "fit_learners", prompts)
    if n_prompts is None:
        fast = is_learner(source) or predictor_of(source).is_one_attention
        n_prompts = N_PROMPTS if fast else N_SLOWER
    given = task if isinstance(task, PromptsTask) else None
    require_number(n_prompts if given is None else len(given.prompts), 2)  # fitted: omega and mu
    if context_lengths is CONTEXT_LENGTHS and given is not None:
        context_lengths = [n for n in CONTEXT_LENGTHS if n < task.context_length]
    if context_lengths is CONTEXT_LENGTHS and not is_learner(source):
        predictor = predictor_of(source)
        context_lengths = [n for n in CONTEXT_LENGTHS if _has_room(predictor, task, n)]
    lengths = sorted({*context_lengths, task.context_length})
    draw = partial(_drawn, task, n_prompts, seed)
    whole = _in_one_pass(source, draw(lengths[-1]))
    rows = []
    for length in progress(lengths, "fitting learners at each context length"):
        if whole is None:
            chunks = partial(draw, length)
            predicted = torch.cat([model(prompts).double() for prompts in chunks()])
        else:
            chunks = partial(map, methodcaller("prefix", length), [each for each, _ in whole])
            predicted = torch.cat([every[:, length].double() for _, every in whole])
        rows.append(_fit_at(predicted, chunks, task))
    at = lengths.index(task.context_length)
    squares = [row.pop("squares") for row in rows][at]
    best, runner_up = np.argsort(squares.mean(0))[:2]
    columns: dict[str, Any] = {n: np.array([row[n] for row in rows]) for n in rows[0]}
    return LearnerFits(
        context_length=np.array(lengths),
        trained_length=task.context_length,
        n_prompts=n_prompts if given is None else len(given.prompts),
        left_out=LEFT_OUT if no_law(task) else "",
        learners=LEARNERS if task.n_tasks is None else (*LEARNERS, "dmmse"),
        **columns,
        **estimates(lead=mean_and_sem(squares[:, runner_up] - squares[:, best])),
    )


def _has_room(predictor: Predictor, task: TaskConfig, length: int) -> bool:
    """True if a model has enough positions for this number of pairs."""
    weights = predictor.weights
    if weights is not None:
        most = weights.model.longest_context
        return most is None or length <= most
    try:  # an external model raises when it runs
        with torch.no_grad():
            predictor.predict(sample_prompts(task, 2, context_length=length))
    except ValueError:
        return False
    return True


def _drawn(task: TaskConfig, n_prompts: int, seed: int, length: int) -> Iterator[Prompts]:
    """Prompts of this many pairs, in chunks."""
    if isinstance(task, PromptsTask):
        return iter([task.prompts.shortened(length)])
    return prompt_chunks(task, n_prompts, seed=seed, context_length=length)


def _in_one_pass(
    source: Source | Learner, chunks: Iterator[Prompts]
) -> list[tuple[Prompts, Float[Tensor, "batch n_pairs d_y"]]] | None:
    """Chunks of prompts with the predictions at every x; None if one pass does not give them."""
    whole = []
    for prompts in () if is_learner(source) else chunks:
        every = predictor_of(source).predict_at_every(prompts)
        if every is None:
            return None
        whole.append((prompts, every))
    return whole or None


def _fit_at(
    predicted: Float[Tensor, "prompt d_y"],
    chunks: Callable[[], Iterator[Prompts]],
    task: TaskConfig,
) -> dict:
    """All columns of one context length, and the squared distances per prompt and learner."""
    require_moderate(predicted)
    prediction = predicted.numpy(force=True)
    first = next(iter(chunks()))[:KERNEL_PROMPTS]
    omega, through_omega = _kernel_omega(prediction[: len(first)], first)
    shapes, targets = [], []
    for prompts in chunks():
        learners = [
            zero_prediction(prompts),
            vanilla_gd(prompts, eta=1.0),
            debiased_gd(prompts, eta=1.0),
            nadaraya_watson(prompts, omega=omega, mu=1.0),
            ridge(prompts, penalty=task.posterior_penalty),
        ]
        if task.n_tasks is not None:
            learners.append(dmmse(prompts, pool=task_pool(task), noise_var=task.noise_var))
        shapes.append(torch.stack(learners, 1).double())
        targets.append(prompts.y_query.double())
    shape, target = torch.cat(shapes).numpy(), torch.cat(targets).numpy()
    factors = np.full((2, shape.shape[1]), np.nan)
    for index in map(LEARNERS.index, FITTED):
        factors[:, index] = _least_squares(shape[:, index], prediction)
    kernel = LEARNERS.index("kernel_head")
    factors[1, kernel] = _kernel_factor_sem(
        shape[:, kernel], prediction, factors[0, kernel], through_omega
    )
    learned = shape * np.where(np.isnan(factors[0]), 1, factors[0])[:, None]
    factors[0, kernel] *= -1 if omega < 0 else 1
    squares = np.square(prediction[:, None] - learned).mean(2)
    distance, distance_sem = mean_and_sem(squares)
    ratio, ratio_sem = ratio_and_sem(squares, np.square(prediction).mean(1))
    losses = np.square(learned - target[:, None]).mean(2)
    model_losses = np.square(prediction - target).mean(1)
    rms = np.sqrt(distance)
    numbers = estimates(
        factor=(factors[0], factors[1]),
        r2=(1 - ratio, ratio_sem),
        rms=(rms, distance_sem / np.maximum(2 * rms, np.finfo(float).tiny)),
        loss=mean_and_sem(losses),
        loss_gap=mean_and_sem(model_losses[:, None] - losses),
        model_loss=mean_and_sem(model_losses),
    )
    return {"kernel_omega": omega, "squares": squares, **numbers}


def _kernel_omega(
    prediction: Float[np.ndarray, "prompt d_y"], prompts: Prompts
) -> tuple[float, Float[np.ndarray, " prompt"]]:
    """Fits omega of the kernel head closest to a model's predictions; mu is fitted for each omega.

    Returns:
        omega, and the influence of each prompt on the best mu through omega, times the number of
        prompts.
    """
    top = 2 / prompts.x.square().mean().item() / prompts.x.shape[2] ** 0.5

    @cache
    def fitted(omega: float) -> tuple[float, Float[np.ndarray, " prompt"]]:
        """The best mu and the squared distance on each prompt."""
        shape = nadaraya_watson(prompts, omega=omega, mu=1.0).double().numpy()
        factor, _ = _least_squares(shape, prediction)
        return factor, np.square(prediction - factor * shape).mean(1)

    from scipy.optimize import minimize_scalar  # slow import

    def closest(low: float, high: float) -> float:
        found = minimize_scalar(
            lambda omega: float(fitted(float(omega))[1].mean()),
            bounds=(low, high),
            method="bounded",
            options={"xatol": 1e-4},
        )
        return float(found.x)

    both = closest(0.0, top), closest(-top, 0.0)
    omega = min(both, key=lambda omega: fitted(omega)[1].mean())
    return omega, _through_omega(prompts, prediction, omega, fitted(omega)[0])


def _through_omega(
    prompts: Prompts, prediction: Float[np.ndarray, "prompt d_y"], omega: float, factor: float
) -> Float[np.ndarray, " prompt"]:
    """Influence of each prompt on the best mu through the best omega, times the number of prompts.

    (omega, mu) minimise D = mean |f - mu s(omega)|^2. A prompt with 1 / n more weight moves them by
    -H^-1 psi_i / n, where H has the second derivatives of D, and psi_i the first derivatives of the
    prompt's own |f_i - mu s_i|^2. The result is the motion of mu minus its motion at a fixed omega.
    """
    x, y, query = (each.double() for each in (prompts.x, prompts.y, prompts.x_query))
    scores = torch.einsum("bli, bi -> bl", x, query)
    pattern = torch.softmax(omega * scores, dim=1)
    scores = scores - (pattern * scores).sum(1, keepdim=True)
    bend = scores.square() - (pattern * scores.square()).sum(1, keepdim=True)
    s, ds, dds = (
        torch.einsum("bl, bln -> bn", pattern * each, y).numpy()
        for each in (torch.ones_like(scores), scores, bend)
    )
    left = prediction - factor * s
    by_omega, by_mu = -2 * factor * (left * ds).mean(1), -2 * (left * s).mean(1)
    omega_twice = 2 * factor * (factor * ds**2 - left * dds).mean()
    mixed, mu_twice = 2 * (factor * s * ds - left * ds).mean(), 2 * (s**2).mean()
    determinant = omega_twice * mu_twice - mixed**2
    if not determinant > 0:  # no prediction depends on omega, or the search ended at its bound
        return np.zeros(len(s))
    return mixed * (by_omega - mixed / mu_twice * by_mu) / determinant


def _least_squares(
    shape: Float[np.ndarray, "prompt d_y"], prediction: Float[np.ndarray, "prompt d_y"]
) -> tuple[float, float]:
    """Least-squares factor of `shape` onto `prediction`, and its standard error."""
    factor, sem = ratio_and_sem((shape * prediction).mean(1), np.square(shape).mean(1))
    return float(factor), float(sem)


def _kernel_factor_sem(
    shape: Float[np.ndarray, "prompt d_y"],
    prediction: Float[np.ndarray, "prompt d_y"],
    factor: float,
    through_omega: Float[np.ndarray, " first"],
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
