"""Which pattern the heads of a one-layer model form, and with it which learner the model implements.

Every label comes with the numbers that earned it, and a model that is not clearly one thing is
`undetermined`, with the number that is in between.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp import figures
from mechinterp.analysis.circuits import Circuits, HasWeights, circuits, weights_of
from mechinterp.analysis.estimates import ratio_and_sem
from mechinterp.analysis.manifold import nearest_on_manifold
from mechinterp.config import TaskConfig
from mechinterp.icl.predictors import debiased_gd, nadaraya_watson
from mechinterp.icl.prompts import Prompts, generator_for, sample_prompts
from mechinterp.models.functional import AttentionWeights, head_outputs
from mechinterp.models.scores import score_derivative_at_zero
from mechinterp.theory.softmax import debiased_step_size


@dataclass(frozen=True)
class Thresholds:
    """Where the definitions draw their lines."""

    share: float = 0.01
    """A head is active if its share of the heads' output is above this."""
    qk_diagonal: float = 0.8
    """Least `qk_diagonal` of a head that is not unstructured; 99.9% of random heads (d_x = 5) lie below."""
    ov_last_entry: float = 0.9
    """Least `ov_last_entry` of a head that is not unstructured."""
    omega_entry: float = 0.1
    """Entries of omega or mu below this fraction of the largest have no sign."""
    omega_spread: float = 0.25
    """Most `omega_spread` of homogeneous heads."""
    zero_sum: float = 0.05
    """Most `zero_sum` of heads whose mu cancel."""
    substitution_r2: float = 0.9
    """Least R^2 with which the closed form must stand in for the model."""


@dataclass(frozen=True, eq=False, repr=False)
class Classification:
    """Label of a model and of its heads, with the evidence."""

    pattern: str
    """"kernel_regression", "debiased_gd" or "undetermined"."""
    reason: str
    """One sentence: what decided, with its number."""
    labels: tuple[str, ...]
    """Per head: "positive", "negative", "mismatched", "mixed", "unstructured" or "dummy"."""
    share: Float[np.ndarray, " head"]
    """Standard deviation of a head's output over prompts, divided by the sum of that over heads."""
    circuits: Circuits
    sign_matching: bool
    """Whether omega and mu of every active head have the same sign."""
    omega_spread: float
    """max/min |omega_mean| over active heads, minus 1."""
    zero_sum: float
    """|sum mu| / sum |mu| over active heads."""
    eta: Float[np.ndarray, " d_y"]
    """sum over active heads of mu * omega_mean, times f'(0): the step size the model takes; unit 1/x^2."""
    eta_optimal: float
    """Best debiased step size for the task, 1/(1 + (1 + s^2) d/L); NaN unless x is isotropic."""
    gamma: float
    """|omega| of the nearest point of the solution manifold, unit 1/x^2; NaN without both signs."""
    manifold_distance: float
    """Distance of (omega, mu) to the solution manifold, each relative to its norm; NaN without both signs."""
    substitution_r2: float
    """Share of the prediction's mean square explained by the closed form built from omega and mu alone."""
    substitution_r2_sem: float

    def __repr__(self) -> str:
        return f"Classification({self.pattern}: {self.reason})"

    def to_frame(self) -> pd.DataFrame:
        """One row per head: label, share and circuit scalars."""
        frame = self.circuits.to_frame()
        frame.insert(1, "label", list(self.labels))
        frame.insert(2, "share", self.share)
        return frame

    def plot(self) -> go.Figure:
        """Heads in the plane of omega and mu."""
        return figures.head_scatter(
            self.circuits.omega_mean,
            self.circuits.mu.mean(1),
            labels=self.labels,
            title=f"Heads: {self.pattern}",
        )


def classify(
    source: AttentionWeights | HasWeights,
    task: TaskConfig | None = None,
    *,
    n_prompts: int = 4096,
    seed: int = 0,
    thresholds: Thresholds | None = None,
) -> Classification:
    """The pattern of a one-layer, one-task model.

    The label depends on QK and OV only: not on the order of heads, nor on how a circuit is split into
    W_Q and W_K, or W_V and W_O.

    Args:
        source: Weights, a checkpoint, or a hooked model.
        task: Law of the prompts used to weigh the heads; None: a checkpoint's own, else the softmax
            paper's setting for the model's d_x.
        n_prompts: Prompts behind `share` and `substitution_r2`.
    Raises:
        ValueError: If the model has more than one response, or another d_x than the task.
    Source:
        He et al. 2025, arXiv 2503.12734, sections 3 and 4: observations 1-2 and eq. (4.6)-(4.11).
    Example:
        >>> from mechinterp.models.constructions import debiased_gradient_step
        >>> classify(debiased_gradient_step(0.88, 0.05, d_x=5)).pattern
        'debiased_gd'
    """
    weights = weights_of(source)
    task = task_of(source, weights) if task is None else task
    limits = Thresholds() if thresholds is None else thresholds
    if weights.d_y != 1 or task.d_y != 1:
        raise ValueError(
            f"classify takes one-task models (d_y = 1) in this version, got d_y = {weights.d_y}."
        )
    if weights.d_x != task.d_x:
        raise ValueError(f"The task's d_x must be the model's, {weights.d_x}, got {task.d_x}.")
    prompts = sample_prompts(
        task, n_prompts, generator=generator_for(seed, "eval", 0), dtype=torch.float64
    )
    return _classification(weights, task, prompts, limits)


def task_of(source: AttentionWeights | HasWeights, weights: AttentionWeights) -> TaskConfig:
    """The task a checkpoint was trained on, else the softmax paper's setting for the model's d_x and d_y."""
    config = getattr(source, "config", None)
    return TaskConfig(d_x=weights.d_x, d_y=weights.d_y) if config is None else config.task


def _classification(
    weights: AttentionWeights, task: TaskConfig, prompts: Prompts, limits: Thresholds
) -> Classification:
    outputs = head_outputs(weights, prompts)
    found = circuits(weights)
    share = _share(outputs)
    labelled = [_head_label(found, share, head, limits) for head in range(weights.n_heads)]
    labels = tuple(label for label, _ in labelled)
    active = np.array([label != "dummy" for label in labels])
    omega, mu = found.omega_mean[active], found.mu[active, 0]
    sizes = np.abs(omega)
    eta = float(omega @ mu) * score_derivative_at_zero(weights.score, weights.score_slope)
    both_signs = {"positive", "negative"} <= set(labels)
    gamma, distance = nearest_on_manifold(omega, mu, task) if both_signs else (np.nan, np.nan)
    learned = debiased_gd(prompts, eta=eta) if both_signs else _smoothed(prompts, found, active)
    prediction = outputs.sum(1)
    unexplained, r2_sem = ratio_and_sem(
        (prediction - learned).square().mean(1).numpy(), prediction.square().mean(1).numpy()
    )
    numbers = {
        "omega_spread": _ratio(np.ptp(sizes), sizes.min()) if active.any() else np.nan,
        "zero_sum": _ratio(abs(mu.sum()), np.abs(mu).sum()),
        "substitution_r2": float(1 - unexplained),
    }
    pattern, reason = _model_label(labelled, numbers, limits)
    return Classification(
        pattern=pattern,
        reason=reason,
        labels=labels,
        share=share,
        circuits=found,
        sign_matching=set(labels) <= {"positive", "negative", "dummy"} and bool(active.any()),
        eta=np.array([eta]),
        eta_optimal=_optimal_step(task),
        gamma=gamma,
        manifold_distance=distance,
        substitution_r2_sem=float(r2_sem),
        **numbers,
    )


def _ratio(part: float, whole: float) -> float:
    """part / whole, infinite if only the whole is 0, NaN if both are."""
    if whole == 0:
        return float("inf") if part else float("nan")
    return float(part / whole)


def _share(outputs: Float[Tensor, "batch head d_y"]) -> np.ndarray:
    spread = outputs.var(0).sum(-1).sqrt()
    return (spread / spread.sum().clamp_min(torch.finfo(spread.dtype).tiny)).numpy()


def _head_label(
    found: Circuits, share: np.ndarray, head: int, limits: Thresholds
) -> tuple[str, str]:
    """A head's label and, for a head that fits no pattern, the number that says why."""
    if share[head] <= limits.share:
        return "dummy", ""
    for name in ("qk_diagonal", "ov_last_entry"):
        value = getattr(found, name)[head]
        if value < getattr(limits, name):
            return "unstructured", f"{name} {value:.3f} is below {getattr(limits, name):g}"
    omega, mu = found.omega[head], found.mu[head]
    for name, values in (("omega", omega), ("mu", mu)):
        if len(_signs(values, limits.omega_entry)) > 1:
            return "mixed", f"{name} runs from {values.min():.3g} to {values.max():.3g}"
    signs = _signs(omega, limits.omega_entry)
    if signs != _signs(mu, limits.omega_entry):
        return "mismatched", f"omega is {omega.mean():.3g} and mu is {mu.mean():.3g}"
    return ("positive" if signs == {1} else "negative"), ""


def _signs(values: np.ndarray, fraction: float) -> set[int]:
    return {int(sign) for sign in np.sign(values[np.abs(values) > fraction * np.abs(values).max()])}


def _model_label(
    labelled: list[tuple[str, str]], numbers: dict[str, float], limits: Thresholds
) -> tuple[str, str]:
    """The pattern and a sentence with the number that decided."""
    for head, (label, why) in enumerate(labelled):
        if why:
            return "undetermined", f"head {head} is {label}: {why}"
    kinds = {label for label, _ in labelled} - {"dummy"}
    if not kinds:
        return "undetermined", "no head is active"
    r2 = numbers["substitution_r2"]
    pattern = "kernel_regression" if len(kinds) == 1 else "debiased_gd"
    if pattern == "debiased_gd":
        for name in ("omega_spread", "zero_sum"):
            if numbers[name] > getattr(limits, name):
                return (
                    "undetermined",
                    f"{name} {numbers[name]:.3f} is above {getattr(limits, name):g}",
                )
    if not r2 >= limits.substitution_r2:
        return (
            "undetermined",
            f"substitution_r2 of {pattern} {r2:.3f} is below {limits.substitution_r2:g}",
        )
    if pattern == "kernel_regression":
        return (
            pattern,
            f"all active heads are {kinds.pop()}; the kernel smoother explains R² = {r2:.4f}",
        )
    return pattern, (
        f"heads of both signs, zero_sum {numbers['zero_sum']:.3f}, omega_spread "
        f"{numbers['omega_spread']:.3f}; one debiased step explains R² = {r2:.4f}"
    )


def _smoothed(prompts: Prompts, found: Circuits, active: np.ndarray) -> Tensor:
    """The reduced predictor (3.2): every active head as a kernel smoother with its own omega and mu."""
    prediction = torch.zeros_like(prompts.y_query)
    for head in np.flatnonzero(active):
        omega, mu = torch.from_numpy(found.omega[head]), torch.from_numpy(found.mu[head])
        prediction = prediction + nadaraya_watson(prompts, omega=omega, mu=mu)
    return prediction


def _optimal_step(task: TaskConfig) -> float:
    if task.covariance.kind != "identity":
        return float("nan")
    ratio = task.noise_var / task.signal_var
    return debiased_step_size(d_x=task.d_x, context_length=task.context_length, noise_var=ratio)
