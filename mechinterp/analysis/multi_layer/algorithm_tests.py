"""Prompts on which algorithms differ, and identities that only some of them satisfy.

An identity compares predictions for prompts with those for others made of them, such as prompts with
x rotated. It is evidence only where the prompts so made are as likely under the law of the task as
those they are made of, and where the model still does its task.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechinterp.analysis.stats import best_factor, without_worst
from mechinterp.config import CovarianceConfig, TaskConfig
from mechinterp.icl.algorithm import Algorithm
from mechinterp.icl.given import PromptsTask, no_law
from mechinterp.icl.prompts import Prompts, covariance_matrix, generator_for, sample_prompts

CONDITION = 30.0
"""Largest over smallest eigenvalue of the covariance with a wide spread."""
SCALES = (0.5, 2.0)
USELESS = 0.95
"""A model whose excess risk is above this share of that of predicting 0 has left what it can do."""
ROOT = 0.5**0.5
"""Times the sum of two independent values, which leaves the variance as it was."""
ORDER = "same when the pairs change places"
"""The identity that online learners do not satisfy."""
Predict = Callable[[Prompts], Tensor]


@dataclass(frozen=True, eq=False)
class Setting:
    """Prompts, and what the model predicts for them; None: it takes no such prompts."""

    prompts: Prompts
    predictions: Tensor | None
    scale: float = 1.0
    """Pairs over those of the model's own length."""

    @property
    def relative_risk(self) -> float:
        """Excess risk over that of predicting 0; NaN without predictions."""
        if self.predictions is None:
            return float("nan")
        return relative_risk(self.predictions, self.prompts.y_query_clean)

    @property
    def useful(self) -> bool:
        """Whether the model still does its task."""
        return self.relative_risk < USELESS

    @property
    def known(self) -> Tensor:
        """The predictions of a model that takes the prompts."""
        assert self.predictions is not None
        return self.predictions


def setting_of(prompts: Prompts, predictions: Tensor, scale: float = 1.0) -> Setting:
    """Prompts without the thousandth on which the model errs most, and its predictions for the others."""
    stay = torch.from_numpy(np.flatnonzero(_without_worst(predictions, prompts.y_query_clean)))
    return Setting(prompts[stay], predictions[stay], scale)


def _without_worst(predictions: Tensor, target: Tensor) -> Bool[np.ndarray, " prompt"]:
    return without_worst((predictions - target).square().mean(1).numpy())


@dataclass(frozen=True, eq=False)
class IdentityTest:
    """Squared differences between the two sides of an identity, per prompt; NaN: not answered, 0: left out."""

    error: Float[np.ndarray, " prompt"]
    size: Float[np.ndarray, " prompt"]


def relative_risk(predictions: Tensor, target: Tensor) -> float:
    """Mean squared difference from the target over that of 0."""
    return ((predictions - target).square().mean() / target.square().mean()).item()


def scaled_risk(predictions: Tensor, target: Tensor) -> tuple[float, float, float]:
    """Relative risk of the predictions times their best factor, that factor and its standard error; NaN where all
    predictions are 0."""
    with np.errstate(invalid="ignore", over="ignore"):
        factor, sem = best_factor(predictions, target)
    return relative_risk(factor * predictions, target), factor, sem


def isotropic(task: TaskConfig) -> bool:
    """Whether Sigma is a multiple of I."""
    Sigma = covariance_matrix(task.covariance, task.d_x)
    return bool((Sigma == Sigma[0, 0] * np.eye(task.d_x)).all())


def other_settings(
    predict: Predict, prompts: Prompts, task: TaskConfig, seed: int
) -> dict[str, Setting]:
    """Half as many prompts, of half and of twice the length, and of a covariance with a wide spread.

    A thousandth more are drawn, so that half as many stay without the worst thousandth. Of given prompts without a
    law there are those of half the length alone.
    """
    n, half = prompts.x.shape[1], len(prompts) // 2
    many = half + half // 999
    if no_law(task):
        shorter = prompts[:many].shortened(max(1, n // 2))
        return {"half length": setting_of(shorter, predict(shorter), shorter.x.shape[1] / n)}
    stated = task.law if isinstance(task, PromptsTask) and task.law is not None else task
    laws = {"half length": (stated, max(1, n // 2)), "double length": (stated, 2 * n)}
    if task.d_x > 1:
        eigenvalues = np.geomspace(1, CONDITION, task.d_x)
        mean_one = tuple((eigenvalues / eigenvalues.mean()).tolist())
        wide = CovarianceConfig(kind="eigenvalues", eigenvalues=mean_one)
        laws["wide spread"] = (replace(stated, covariance=wide), n)
    settings = {}
    for step, (name, (law, length)) in enumerate(laws.items(), start=1):
        drawn = sample_prompts(
            law,
            many,
            generator=generator_for(seed, "eval", step),
            context_length=length,
            dtype=torch.float64,
        )
        try:
            settings[name] = setting_of(drawn, predict(drawn), length / n)
        except ValueError:  # The model has no room for them.
            settings[name] = Setting(drawn, None)
    return settings


def satisfies(member: Algorithm, test: str) -> bool:
    """Whether an algorithm satisfies an identity: all are linear in x_query and take the pairs in any order."""
    if test.startswith("linear in y"):
        return member.linear_in_y
    return member.equivariant if test == "same when x is rotated" else True


def identity_tests(
    predict: Predict, own: Setting, task: TaskConfig, seed: int
) -> dict[str, IdentityTest]:
    """Whether the predictions satisfy what those of algorithms do, on the prompts that scores are taken on.

    Without a law of the prompts only the order of the pairs is asked: others may make prompts that are not of it.
    """
    prompts, known = own.prompts[1::2], own.known[1::2]
    lawful = not no_law(task)
    # A sum of sparse task vectors, or of two of a pool, is no task vector.
    dense, clean = task.sparsity is None and task.n_tasks is None, prompts.y_query_clean
    made: dict[str, tuple[Prompts, Tensor] | None] = {}
    made["linear in y: sum"] = _summed(predict, prompts, known) if dense and lawful else None
    for scale in SCALES:
        scaled = replace(prompts, y=scale * prompts.y, y_query_clean=scale * clean)
        # Entries of fixed size have no other scale.
        fixed = task.nonzeros == "signs" or task.n_tasks is not None or not lawful
        made[f"linear in y: times {scale:g}"] = None if fixed else (scaled, scale * known)
    same = lawful and dense and task.supports is None and isotropic(task)
    made["same when x is rotated"] = (_rotated(prompts, seed), known) if same else None
    order = torch.randperm(
        prompts.x.shape[1], generator=generator_for(seed, "init", 2), device="cpu"
    )
    shuffled = replace(prompts, x=prompts.x[:, order], y=prompts.y[:, order])
    made[ORDER] = (shuffled, known)
    made["linear in x_query"] = _query_summed(predict, prompts, known) if lawful else None
    return {name: _test(predict, pair, len(prompts)) for name, pair in made.items()}


def _summed(predict: Predict, prompts: Prompts, known: Tensor) -> tuple[Prompts, Tensor]:
    own = prompts.task_vectors("an identity")
    noise, beta = prompts.y - prompts.x @ own, own.roll(1, 0)
    clean = (prompts.x_query[:, None] @ beta)[:, 0]
    other = replace(prompts, y=prompts.x @ beta + noise.roll(1, 0), y_query_clean=clean, beta=beta)
    added = replace(
        prompts,
        y=ROOT * (prompts.y + other.y),
        y_query_clean=ROOT * (prompts.y_query_clean + clean),
    )
    return added, ROOT * (known + predict(other))


def _query_summed(predict: Predict, prompts: Prompts, known: Tensor) -> tuple[Prompts, Tensor]:
    x = prompts.x_query.roll(1, 0)
    clean = (x[:, None] @ prompts.task_vectors("an identity"))[:, 0]
    other = replace(prompts, x_query=x, y_query_clean=clean)
    added = replace(
        prompts,
        x_query=ROOT * (prompts.x_query + x),
        y_query_clean=ROOT * (prompts.y_query_clean + clean),
    )
    return added, ROOT * (known + predict(other))


def _rotated(prompts: Prompts, seed: int) -> Prompts:
    d_x, generator = prompts.x.shape[2], generator_for(seed, "init", 0)
    noise = torch.randn(
        len(prompts), d_x, d_x, generator=generator, dtype=torch.float64, device="cpu"
    )
    R = torch.linalg.qr(noise).Q
    return replace(prompts, x=prompts.x @ R, x_query=(prompts.x_query[:, None] @ R)[:, 0])


def _test(predict: Predict, pair: tuple[Prompts, Tensor] | None, n_prompts: int) -> IdentityTest:
    nothing = np.full(n_prompts, np.nan)
    if pair is None:
        return IdentityTest(nothing, nothing)
    prompts, expected = pair
    predictions, target = predict(prompts), prompts.y_query_clean
    stay = _without_worst(predictions, target)
    if not relative_risk(predictions[stay], target[stay]) < USELESS:
        return IdentityTest(nothing, nothing)
    sides = (predictions - expected, expected)
    # A prompt that is left out adds nothing to either sum.
    return IdentityTest(*(np.where(stay, side.square().mean(1).numpy(), 0.0) for side in sides))
