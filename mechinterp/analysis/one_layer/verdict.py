"""Verdict on one layer of attention: formula, certainty, and the learners that are ruled out."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from mechinterp.analysis.labels import LEARNERS, PAIRS, PATTERNS
from mechinterp.analysis.learners.nearest import Nearby
from mechinterp.analysis.number_format import beside, digits, explained
from mechinterp.analysis.one_layer.effective_step import Scales
from mechinterp.analysis.one_layer.head_statistics import Form
from mechinterp.analysis.verdict import (
    NOTHING_EXCLUDED,
    Verdict,
    calibration_text,
    chance_text,
    is_behind,
    nearest_learners,
    none_of,
    spelled_out,
)

MOST_NUMBERS = 8


def heads_verdict(classified: Any) -> Verdict:
    """The verdict on one layer of attention.

    Args:
        classified: A `Classification`; its type cannot be imported here, because its file imports
            this one.
    """
    pattern, learner, near = classified.pattern, classified.learner, classified.near
    chance = (
        f"; {chance_text(classified.p_values['task_r2'], classified.n_random, 'random weights')}"
    )
    if pattern in ("undetermined", "unstructured"):
        computes = f"{none_of('formulas', pattern)}: {spelled_out(classified.reason)}"
        return nearest_learners(computes, near, chance=chance, doubt=classified.task_doubt)
    label = PATTERNS[pattern]
    if pattern == "kernel_regression":
        active = np.array([label != "dummy" for label in classified.labels])
        omega, mu = classified.omega_form[active], classified.circuits.mu[active]
        computes = _smoother(classified.form, omega, mu, classified.kernel)
    else:
        used, d_x = classified.components, classified.scales.step.shape[1]
        computes = f"{label.text} ({pattern}): {_step(pattern, classified.scales)}"
        if used is not None and used.n_components is not None:
            computes += f"; it uses {used.n_components} of {d_x} principal directions of x"
    sure = (
        f"this formula, with nothing fitted, explains {explained(learner.r2, learner.r2_sem)} of "
        f"{classified.caveat or 'the predictions'}{chance}{calibration_text(label) if classified.calibrated else ''}"
    )
    others = [n for n, name in enumerate(near.learners) if name not in label.cases]
    behind = [n for n in others if is_behind(near.lead[n], near.lead_sem[n])]
    alike = "; ".join(_other(near, n) for n in others if n not in behind)
    is_not = _other(near, behind[0]) if behind else NOTHING_EXCLUDED
    return Verdict(computes, sure, is_not, alike, classified.task_doubt)


def _other(near: Nearby, n: int) -> str:
    """Another learner with its R², and how much lower that is than the R² of the formula."""
    name, lead = near.learners[n], beside(near.lead[n], near.lead_sem[n])
    scaled = "the formula" if name == "ridge" else "both"
    return f"{LEARNERS[name]}, R² = {near.r2[n]:.4f}, {lead} ({scaled} at the best factor)"


def _smoother(
    form: Form, omega: Float[np.ndarray, " head"], mu: Float[np.ndarray, "head d_y"], kernel: str
) -> str:
    similar = "x_lᵀΩx" if form.kind == "common" else "x_l·x"
    if len(omega) == 1:
        weight = kernel.format(s=f"{digits(omega[0])} {similar}")
        return (
            f"an average of y_l over {PAIRS} (kernel_regression): ŷ = {_vector(mu[0])} Σ_l w_l y_l, "
            f"w_l ∝ {weight}, Σ_l w_l = 1"
        )
    pairs = zip(omega[:MOST_NUMBERS], mu, strict=False)
    scales = "; ".join(f"μ = {_vector(m)}, ω = {digits(o)}" for o, m in pairs)
    more = "; ..." if len(omega) > MOST_NUMBERS else ""
    return (
        f"a sum over heads h of averages of y_l over {PAIRS} (kernel_regression): ŷ = Σ_h μ_h Σ_l w_hl y_l, "
        f"w_hl ∝ {kernel.format(s=f'ω_h {similar}')}, Σ_l w_hl = 1; {scales}{more}"
    )


def _step(pattern: str, scales: Scales) -> str:
    """Formula of one gradient step, by the matrix of each response: a multiple of I, diagonal, or
    any other."""
    step = scales.step.numpy()
    one = len(step) == 1
    y, mark = ("y_l", "") if one else ("y_ln", "_n")
    moment = f"(1/L) Σ_l {y} " + ("x_l" if pattern == "linear_gd" else "(x_l − x̄)")
    diagonals = np.diagonal(step, axis1=1, axis2=2)
    diagonal = not (step * (1 - np.eye(step.shape[1]))).any()
    if diagonal and np.allclose(diagonals, diagonals[:, :1], rtol=1e-9, atol=0):
        best = scales.eta_optimal
        beside = "" if np.isnan(best) else f" (best step size for the task: {digits(best)})"
        eta = digits(diagonals[0, 0]) if one else "η_n"
        values = "" if one else f", η = {_list(diagonals[:, 0])}"
        return f"ŷ{mark} = {eta} {moment}·x{values}{beside}"
    if diagonal:
        names = ["Θ"] if one else [f"Θ_{n}" for n in range(len(step))]
        rows = ", ".join(f"{n} = diag{_list(row)}" for n, row in zip(names, diagonals, strict=True))
        return f"ŷ{mark} = xᵀΘ{mark} {moment}, {rows}"
    sizes = np.linalg.svd(step)[1]
    span = "; ".join(f"{digits(row.min())} to {digits(row.max())}" for row in sizes)
    return f"ŷ{mark} = xᵀΓ{mark} {moment}, singular values of Γ{mark} {span}"


def _vector(values: Sequence[float] | np.ndarray) -> str:
    return digits(values[0]) if len(values) == 1 else _list(values)


def _list(values: Sequence[float] | np.ndarray) -> str:
    """A few numbers one by one; more numbers by their range."""
    if len(values) > MOST_NUMBERS:
        return f"{len(values)} numbers from {digits(min(values))} to {digits(max(values))}"
    return f"({', '.join(f'{value:.2f}' for value in values)})"
