"""Labels of heads, and of the model they form, from their numbers. Each label comes with its
reason."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch

from mechinterp.analysis.one_layer.head_statistics import (
    Faithfulness,
    Form,
    Heads,
    Scales,
    Thresholds,
)
from mechinterp.analysis.one_layer.linear_components import LEARNED, Components
from mechinterp.checkpoints.foreign.options import option
from mechinterp.checkpoints.foreign.score import Reading, not_understood

# At least one of these numbers must be beyond random weights for a model to be structured.
STRUCTURE = ("qk_diagonal_best", "ov_last_entry_best", "substitution_r2")

LIMITS = {"support_leak": "leak", "theta_spread": "omega_spread"}
"""Names of the limits of numbers whose limit has another name."""


@dataclass(frozen=True, eq=False, repr=False)
class Evidence:
    """Numbers that decide the label of a model."""

    form: Form
    """Idealised form of the QK x blocks."""
    scales: Scales
    """Sums of omega and mu over heads."""
    substitution: Faithfulness
    """Part of the prediction that remains when every head is replaced by its idealised circuit
    (omega, mu)."""
    learner: Faithfulness
    """Part of the prediction that the closed-form learner of omega and mu explains."""
    alignment: float
    """Smallest cosine between an active head's QK x block and its form."""
    p_values: dict[str, float]
    """Fraction of randomly initialised models that are at least as structured, by the name of the
    number."""
    components: Components | None
    """Principal components of x that a step of linear attention uses; None for all other models."""
    bare: bool
    """True if heads are linear, compare x with x and read y only; the random weights then have this
    form too."""


def head_labels(heads: Heads, form: Form, limits: Thresholds) -> list[tuple[str, str]]:
    """Label of each head; for a head that fits no pattern, also the number that decided."""
    return [_head_label(heads, form, head, limits) for head in range(len(heads.share))]


def model_label(
    heads: Heads, labelled: list[tuple[str, str]], evidence: Evidence, limits: Thresholds
) -> tuple[str, str]:
    """Pattern of a model, and a sentence with the number that decided.

    Args:
        heads: Groups of equal heads; `labelled` has their labels.
    """
    kinds = {label for label, _ in labelled} - {"dummy"}
    if not kinds:
        return "undetermined", "no head is active, or the active heads cancel each other"
    if np.isnan(evidence.substitution.r2):
        return "undetermined", "the predictions are all 0, or not finite"
    chance = {name: evidence.p_values[name] for name in STRUCTURE}
    # Bare heads are a step whatever their weights; whether the step solves the task is decided
    # below.
    if not evidence.bare and not any(p <= limits.p_value for p in chance.values()):
        numbers = ", ".join(f"{name} p = {p:.2g}" for name, p in chance.items())
        return "unstructured", f"random weights reach the same values: {numbers}"
    if evidence.scales.unserved:
        missing = ", ".join(map(str, evidence.scales.unserved))
        return "undetermined", f"no head serves response {missing}"
    if evidence.form.kind == "matrix":
        return _linear(evidence, limits)
    if len(kinds) == 1 and kinds <= {"positive", "negative"}:
        sentence = f"all active heads are {next(iter(kinds))}; the kernel smoother explains R² = {evidence.substitution.r2:.4f}"
        return _if_explained("kernel_regression", sentence, evidence, limits)
    if heads.mu.shape[1] > 1:
        return _several_tasks(heads, labelled, evidence, limits)
    for name, (label, why) in zip(heads.names, labelled, strict=True):
        if why:
            explained = f"idealised heads explain R² = {evidence.substitution.r2:.4f}"
            return "undetermined", f"head {name} is {label}: {why}; {explained}"
    too_large = _above(evidence, limits, "omega_spread", "zero_sum")
    if too_large:
        return "undetermined", too_large
    return _if_explained(*_one_task(evidence), evidence, limits)


def agreed_label(
    patterns: Sequence[str],
    reason: str,
    readings: Sequence[Reading],
    step: torch.Tensor | None = None,
) -> tuple[str, str]:
    """Label on which the readings of a file agree; otherwise `undetermined`, with the option that
    decides.

    Args:
        patterns: Labels of the remaining readings, in their order.
        reason: Reason of the first label.
        step: Matrix of the step under the first reading, for linear heads.
    """
    possible = [reading for reading in readings if reading.stands]
    if not readings[0].predicts:
        off = "" if step is None else f"; {_off_identity(step)}"
        return "undetermined", not_understood(readings) + off
    if len(set(patterns)) == 1:
        return patterns[0], reason + _of_one_score(patterns[0], possible)
    labelled = list(zip(patterns, possible, strict=True))
    best = {pattern: reading for pattern, reading in reversed(labelled)}
    named = "; ".join(f"{pattern} for {reading!r}" for pattern, reading in reversed(best.items()))
    options = " and ".join(map(option, _deciding(labelled)))
    return (
        "undetermined",
        f"the file does not state {options}, which decides the label: {named} (loss / loss of predicting 0)",
    )


def _of_one_score(pattern: str, possible: Sequence[Reading]) -> str:
    """Addition to a reason without a label if several scores remain: the score that the reason is
    about."""
    first, *others = dict.fromkeys(each.said.get("score") for each in possible)
    if pattern != "undetermined" or not others:
        return ""
    return f" with score {first}; undetermined with {' and '.join(map(str, others))} too; state --score"


def _deciding(labelled: Sequence[tuple[str, Reading]]) -> list[str]:
    """Settings in which readings with different labels differ; a setting that differs alone is
    preferred."""
    differing = [
        {name for name, _ in one.said.items() ^ other.said.items()}
        for (label, one), (another, other) in combinations(labelled, 2)
        if label != another
    ]
    alone = [names for names in differing if len(names) == 1]
    return sorted(set.union(*(alone or differing)))


def _off_identity(M: torch.Tensor) -> str:
    """Fraction of the matrix of a step, by norm, that is not a multiple of the identity, as text."""
    rest = M - M.diagonal().mean() * torch.eye(len(M), dtype=M.dtype, device=M.device)
    return f"{float(rest.norm() / M.norm()):.0%} of its matrix is not a multiple of the identity"


def _linear(evidence: Evidence, limits: Thresholds) -> tuple[str, str]:
    """Label of linear heads: a step by some matrix, named only if the step has learned the task."""
    used, task_p = evidence.components, evidence.p_values["task_r2"]
    if used is not None and used.learned.max() <= LEARNED:
        why = f"its step has learned at most {used.learned.max():.2g} of any component (limit {LEARNED:g})"
        return "undetermined", f"linear attention; {why}"
    pattern, sentence = _if_explained("linear_gd", _linear_sentence(evidence), evidence, limits)
    if pattern == "linear_gd" and not task_p <= limits.p_value:
        chance = f"random weights do the task as well: task_r2 p = {task_p:.2g}"
        return "undetermined", f"{sentence}; {chance}"
    return pattern, sentence


def _linear_sentence(evidence: Evidence) -> str:
    used, explained = evidence.components, f"explains R² = {evidence.learner.r2:.4f}"
    if used is None:
        return f"linear attention; one preconditioned step {explained}"
    if used.n_components is None:
        off = f"entries of its matrix between two principal directions of x predict {used.off_diagonal:.2g} of E y²"
        matrix = _off_identity(evidence.scales.step[0])
        return f"linear attention; one preconditioned step {explained}; {off}, and {matrix}"
    count = f"{used.n_components} of {len(used.learned)} components"
    return f"linear attention; one preconditioned step on {count} {explained}"


def _one_task(evidence: Evidence) -> tuple[str, str]:
    """Label and sentence for heads of both signs whose mu cancel: a debiased step, with or without
    preconditioner."""
    numbers = f"heads of both signs, zero_sum {evidence.scales.zero_sum:.3f}, omega_spread {evidence.scales.omega_spread:.3f}"
    explained = f"debiased step explains R² = {evidence.learner.r2:.4f}"
    form = evidence.form
    if form.kind == "scalar":
        return "debiased_gd", f"{numbers}; one {explained}"
    shape = f"one matrix with isotropy {form.isotropy:.3f} for all heads"
    if not np.isnan(form.rotation):
        shape = f"omega times one rotation by up to {form.rotation:.0f} degrees for all heads"
    return "preconditioned_gd", f"{numbers}; QK is {shape}; one such {explained}"


def _several_tasks(
    heads: Heads, labelled: list[tuple[str, str]], evidence: Evidence, limits: Thresholds
) -> tuple[str, str]:
    """Label for several responses and heads of both signs or of mixed sign."""
    active = heads.where(np.array([label != "dummy" for label, _ in labelled]))
    sizes, leak = np.abs(active.mu), active.task_leak.max()
    smallest = (sizes.min(1) / sizes.max(1)).min()
    too_large = _above(evidence, limits, "zero_sum")
    if too_large:
        return "undetermined", too_large
    uneven = _above(evidence, limits, "omega_spread")
    clean = all(label in ("positive", "negative") for label, _ in labelled if label != "dummy")
    explained = f"one debiased step per response explains R² = {evidence.learner.r2:.4f}"
    if clean and leak <= limits.leak and not uneven:
        sentence = f"each active head serves one response, leak up to {leak:.3f}; {explained}"
        return _if_explained("task_heads", sentence, evidence, limits)
    if clean and smallest >= 0.5 and not uneven:
        full = all(len(s) == heads.blocks.shape[1] for s in evidence.scales.supports)
        even = full and evidence.scales.theta_spread <= limits.equal
        pattern = "debiased_gd" if even else "weighted_preconditioned_gd"
        sentence = f"opposite heads serve all responses, mu within {1 - smallest:.0%}; {explained}"
        return _if_explained(pattern, sentence, evidence, limits)
    if clean and uneven and (leak <= limits.leak or smallest >= 0.5):
        return "undetermined", uneven
    too_large = _above(evidence, limits, "support_leak", "theta_spread")
    if too_large:
        return "undetermined", f"heads serve several responses and {too_large}"
    odd = [
        f"; head {name} is {label}"
        for name, (label, _) in zip(heads.names, labelled, strict=True)
        if label == "unstructured"
    ]
    beyond = f"theta off its supports up to {evidence.scales.support_leak:.3f}"
    sentence = f"heads serve several responses{''.join(odd)}; {beyond}; {explained}"
    return _if_explained("superposition", sentence, evidence, limits)


def _above(evidence: Evidence, limits: Thresholds, *names: str) -> str:
    """Sentence about the first of these numbers that exceeds its limit; empty if none does."""
    for name in names:
        value, limit = getattr(evidence.scales, name), getattr(limits, LIMITS.get(name, name))
        if np.isnan(value):
            return f"{name} is not defined"
        if value > limit:
            return f"{name} is {value:.3f}, above the limit {limit:g}"
    return ""


def _if_explained(
    pattern: str, sentence: str, evidence: Evidence, limits: Thresholds
) -> tuple[str, str]:
    """The pattern, unless idealised heads or the closed form leave too much of the prediction
    unexplained."""
    for name in ("substitution", "learner"):
        r2 = getattr(evidence, name).r2
        if not r2 >= limits.substitution_r2:
            # A huge ratio means that predictions overflow.
            ratio = f"{r2:.3f}" if abs(r2) < 1e6 else f"{r2:.1e} (the predictions overflow)"
            why = f"{name}_r2 is {ratio} for {pattern}, below the limit {limits.substitution_r2:g}"
            return "undetermined", why
    clear, r2 = limits.ov_last_entry, evidence.substitution.r2
    if evidence.alignment < clear and not r2 >= 1 - limits.equal:
        why = f"the cosine of a QK x block with its form is {evidence.alignment:.3f}, below the limit {clear:g}"
        explained = f"idealised heads explain R² = {r2:.3f}, below the limit {1 - limits.equal:g}"
        return "undetermined", f"{why}, and {explained}"
    return pattern, sentence


def _head_label(heads: Heads, form: Form, head: int, limits: Thresholds) -> tuple[str, str]:
    if heads.share[head] <= limits.share:
        return "dummy", ""
    blocks = heads.blocks[head : head + 1]
    name = "qk_diagonal" if form.kind in ("scalar", "diagonal", "matrix") else "alignment"
    aligned = heads.qk_diagonal[head] if name == "qk_diagonal" else form.alignment(blocks)[0]
    last_entry = heads.ov_last_entry[head]
    for label, value, limit in (
        (name, aligned, limits.qk_diagonal),
        ("ov_last_entry", last_entry, limits.ov_last_entry),
    ):
        if value < limit:
            return "unstructured", f"{label} is {value:.3f}, below the limit {limit:g}"
    omega, mu = form.omega(blocks)[0].numpy(), heads.mu[head]
    for label, values in (("omega", omega), ("mu", mu)):
        if len(_signs(values, limits.leak)) > 1:
            return "mixed", f"{label} runs from {values.min():.3g} to {values.max():.3g}"
    signs = _signs(omega, limits.leak)
    if signs != _signs(mu, limits.leak):
        return "mismatched", f"omega is {omega.mean():.3g} and mu is {mu.mean():.3g}"
    return ("positive" if signs == {1} else "negative"), ""


def _signs(values: np.ndarray, fraction: float) -> set[int]:
    return {int(sign) for sign in np.sign(values[np.abs(values) > fraction * np.abs(values).max()])}
