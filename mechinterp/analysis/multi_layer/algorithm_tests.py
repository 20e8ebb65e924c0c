"""Prompts on which algorithms differ, and identities that only some of them satisfy.

An identity compares predictions for prompts with those for others made of them, such as prompts with
x rotated. It is evidence only where the prompts so made are as likely under the law of the task as
those they are made of, and where the model still does its task.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mechinterp.analysis.stats import r2_and_sem
from mechinterp.config import CovarianceConfig, TaskConfig
from mechinterp.icl.prompts import Prompts, generator_for, sample_prompts
from mechinterp.models.run.predictor import Predictor

CONDITION = 30.0
"""Largest over smallest eigenvalue of the covariance with a wide spread."""
SCALES = (0.5, 2.0)
USELESS = 0.95
"""A model whose excess risk is above this share of that of predicting 0 has left what it can do."""


@dataclass(frozen=True, eq=False)
class Setting:
    """Prompts, and what the model predicts for them; None: it takes no such prompts."""

    prompts: Prompts
    predictions: Tensor | None

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


@dataclass(frozen=True)
class IdentityTest:
    """R^2 between the two sides of an identity; NaN: not answered."""

    r2: float
    r2_sem: float


NOT_ANSWERED = IdentityTest(float("nan"), float("nan"))


def relative_risk(predictions: Tensor, target: Tensor) -> float:
    """Mean squared difference from the target over that of 0."""
    return ((predictions - target).square().mean() / target.square().mean()).item()


def predicted(predictor: Predictor, prompts: Prompts) -> Tensor:
    """The model's predictions in float64, without gradients."""
    with torch.no_grad():
        return predictor.predict(prompts).detach().cpu().double()


def isotropic(task: TaskConfig) -> bool:
    """Whether Sigma is a multiple of I."""
    covariance = task.covariance
    spread = covariance.kind == "kms" and covariance.rho != 0
    return not (spread or len(set(covariance.eigenvalues)) > 1)


def settings_of(
    predictor: Predictor, prompts: Prompts, task: TaskConfig, seed: int
) -> dict[str, Setting]:
    """The prompts, others of half and of twice their length, and of a covariance with a wide spread."""
    n = prompts.x.shape[1]
    laws = {"half length": (task, max(1, n // 2)), "double length": (task, 2 * n)}
    if task.d_x > 1:
        eigenvalues = np.geomspace(1, CONDITION, task.d_x)
        mean_one = tuple((eigenvalues / eigenvalues.mean()).tolist())
        wide = CovarianceConfig(kind="eigenvalues", eigenvalues=mean_one)
        laws["wide spread"] = (replace(task, covariance=wide), n)
    found = {"own length": Setting(prompts, predicted(predictor, prompts))}
    for step, (name, (law, length)) in enumerate(laws.items(), start=1):
        drawn = sample_prompts(
            law,
            len(prompts),
            generator=generator_for(seed, "eval", step),
            context_length=length,
            dtype=torch.float64,
        )
        try:
            found[name] = Setting(drawn, predicted(predictor, drawn))
        except ValueError:  # The model has no room for them.
            found[name] = Setting(drawn, None)
    return found


def identity_tests(
    predictor: Predictor, prompts: Prompts, task: TaskConfig, seed: int
) -> dict[str, IdentityTest]:
    """Whether the predictions satisfy what those of linear and of equivariant algorithms do."""
    own = predicted(predictor, prompts)
    dense = task.sparsity is None
    found = {"linear in y: sum": _sum_test(predictor, prompts, own) if dense else NOT_ANSWERED}
    for scale in SCALES:
        scaled = replace(prompts, y=scale * prompts.y, y_query_clean=scale * prompts.y_query_clean)
        # Entries of fixed size have no other scale.
        found[f"linear in y: times {scale:g}"] = (
            NOT_ANSWERED if task.nonzeros == "signs" else _test(predictor, scaled, scale * own)
        )
    same = dense and task.supports is None and isotropic(task)
    found["same when x is rotated"] = (
        _test(predictor, _rotated(prompts, seed), own) if same else NOT_ANSWERED
    )
    return found


def _sum_test(predictor: Predictor, prompts: Prompts, own: Tensor) -> IdentityTest:
    noise = prompts.y - prompts.x @ prompts.beta
    beta = prompts.beta.roll(1, 0)
    clean = (prompts.x_query[:, None] @ beta)[:, 0]
    other = replace(prompts, y=prompts.x @ beta + noise.roll(1, 0), y_query_clean=clean, beta=beta)
    # The sum is divided by the root of 2, which leaves the variance of y as it was.
    root = 0.5**0.5
    added = replace(
        prompts,
        y=root * (prompts.y + other.y),
        y_query_clean=root * (prompts.y_query_clean + clean),
    )
    return _test(predictor, added, root * (own + predicted(predictor, other)))


def _rotated(prompts: Prompts, seed: int) -> Prompts:
    d_x, generator = prompts.x.shape[2], generator_for(seed, "init", 0)
    noise = torch.randn(len(prompts), d_x, d_x, generator=generator, dtype=torch.float64)
    R = torch.linalg.qr(noise).Q
    return replace(prompts, x=prompts.x @ R, x_query=(prompts.x_query[:, None] @ R)[:, 0])


def _test(predictor: Predictor, prompts: Prompts, expected: Tensor) -> IdentityTest:
    predictions = predicted(predictor, prompts)
    if not relative_risk(predictions, prompts.y_query_clean) < USELESS:
        return NOT_ANSWERED
    return IdentityTest(*r2_and_sem(predictions, expected))
