"""Label of a one-layer model and of its heads: the rules.

Numbers of the heads come from head_statistics, their idealised form from qk_form, and the step of the model from scales;
thresholds has the limits. `head_decisions` labels the heads, and `model_decision` the model: it picks the pattern that the
signs of the heads suggest, and lists the numbers that this pattern needs, each with its limit (`Criterion`). `decided` gives the
pattern if all limits hold. `Decision` writes the sentence.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.evidence import Criterion
from mechinterp.analysis.one_layer.descent import DESCENDS
from mechinterp.analysis.one_layer.head_statistics import HeadStatistics
from mechinterp.analysis.one_layer.linear_components import LEARNED, Components
from mechinterp.analysis.one_layer.qk_form import QKForm
from mechinterp.analysis.one_layer.scales import Scales
from mechinterp.analysis.one_layer.substitution import Faithfulness
from mechinterp.analysis.one_layer.thresholds import Thresholds
from mechinterp.config import TaskConfig

EVEN = 0.5
"""Heads serve all responses alike if the smallest |mu| of each head is at least this fraction of its largest."""
NOISE_OF_WEIGHTS = 4.0
"""Weights of coordinates count as even if their spread is below this multiple of the step's off-diagonal entries."""
SIGNED = {"positive", "negative"}
"""Labels of heads whose omega and mu have one sign."""
STRUCTURE = ("qk_diagonal_best", "ov_last_entry_best", "substitution_r2")
"""Numbers of which at least one must be beyond random weights for a model to be structured."""
ASSUMED = "; the covariance of x is not stated, so that descent is measured with the identity"


@dataclass(frozen=True, eq=False, repr=False)
class Evidence:
    """Numbers that decide the label of a model."""

    form: QKForm
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
    compared: dict[str, float]
    """Numbers that are compared with randomly initialised models, by name."""
    p_values: dict[str, float]
    """Fraction of randomly initialised models that are at least as structured, by the name of the
    number."""
    components: Components | None
    """Principal components of x that a step of linear attention uses; None for all other models."""
    bare: bool
    """True if heads are linear, compare x with x and read y only; the random weights then have this
    form too."""


@dataclass(frozen=True)
class Decision:
    """Label of a head or of a model, and the numbers that decided it."""

    label: str
    text: str = ""
    """Description of the heads; or the part that is missing, if no number decided."""
    checks: tuple[Criterion, ...] = ()
    """Numbers that the label needs, in the order of the rules."""

    @property
    def failed(self) -> Criterion | None:
        """The first number that breaks its limit."""
        return next((each for each in self.checks if not each.holds), None)

    @property
    def reason(self) -> str:
        """Sentence: the description of the heads, and the number that decided; or all numbers, if they keep their limits."""
        deciding = self.checks if self.failed is None else (self.failed,)
        numbers = ", ".join(map(str, deciding))
        return "; ".join(filter(None, (self.text, numbers)))


def decided(pattern: str, text: str, *checks: Criterion) -> Decision:
    """The pattern if all its numbers keep their limits; otherwise "undetermined"."""
    holds = all(each.holds for each in checks)
    if not holds:
        return Decision("undetermined", f"no {pattern}: {text}", checks)
    return Decision(pattern, text, checks)


def head_decisions(heads: HeadStatistics, form: QKForm, limits: Thresholds) -> list[Decision]:
    """Label of each head."""
    return [_head_decision(heads, form, head, limits) for head in range(len(heads.share))]


def _head_decision(heads: HeadStatistics, form: QKForm, head: int, limits: Thresholds) -> Decision:
    if heads.share[head] <= limits.share:
        return Decision("dummy")
    block = heads.blocks[head : head + 1]
    name, aligned = "qk_diagonal", heads.qk_diagonal[head]
    if form.kind == "common":
        name, aligned = "alignment", form.alignment(block)[0]
    circuits = (
        Criterion(name, aligned, limits.qk_diagonal, least=True),
        Criterion("ov_last_entry", heads.ov_last_entry[head], limits.ov_last_entry, least=True),
    )
    omega, mu = form.omega(block)[0].numpy(), heads.mu[head]
    signs = (
        Criterion("omega_of_other_sign", _of_other_sign(omega), limits.leak),
        Criterion("mu_of_other_sign", _of_other_sign(mu), limits.leak),
    )
    for label, checks in (("unstructured", circuits), ("mixed", signs)):
        if not all(each.holds for each in checks):
            return Decision(label, checks=checks)
    sign = np.sign(_largest(omega))
    if sign != np.sign(_largest(mu)):
        return Decision("mismatched", "omega and mu have different signs")
    return Decision("positive" if sign > 0 else "negative")


def _largest(values: np.ndarray) -> float:
    """The entry of the largest size, with its sign."""
    return float(values[np.abs(values).argmax()])


def _of_other_sign(values: np.ndarray) -> float:
    """Size of the largest entry whose sign is not that of the largest of all, relative to that one."""
    largest = _largest(values)
    return float(np.max(-values / largest, initial=0)) if largest else 0.0


def assumed_covariance(decision: Decision, task: TaskConfig) -> str:
    """Sentence for a label that rests on the covariance of x, if nobody stated it; else empty."""
    deciding = decision.checks if decision.failed is None else (decision.failed,)
    rests = any(each.name == "descent" for each in deciding)
    return ASSUMED if rests and "covariance" not in task.given else ""


def model_decision(
    heads: HeadStatistics, labelled: list[Decision], evidence: Evidence, limits: Thresholds
) -> Decision:
    """Pattern of a model, and the numbers that decided.

    Args:
        heads: Groups of equal heads; `labelled` has their labels.
    """
    kinds = {each.label for each in labelled} - {"dummy"}
    scales = evidence.scales
    if not kinds:
        return Decision("undetermined", "no head is active, or the active heads cancel each other")
    if np.isnan(evidence.substitution.r2):
        return Decision("undetermined", "the predictions are all 0, or not finite")
    least_p = np.nanmin([evidence.p_values[name] for name in STRUCTURE])
    structure = Criterion("least_p", float(least_p), limits.p_value)
    # Bare heads are a step whatever their weights; whether the step solves the task is decided
    # below.
    if not evidence.bare and not structure.holds:
        return Decision("unstructured", "random weights reach the same values", (structure,))
    if scales.unserved:
        missing = ", ".join(map(str, scales.unserved))
        return Decision("undetermined", f"no head serves response {missing}")
    explained = _explained(evidence, limits)
    if evidence.form.kind == "matrix":
        return _linear(evidence, explained, limits)
    if len(kinds) == 1 and kinds <= SIGNED:
        return decided("kernel_regression", f"all active heads are {kinds.pop()}", *explained)
    zero_sum = Criterion("zero_sum", scales.zero_sum, limits.zero_sum)
    omega_spread = Criterion("omega_spread", scales.omega_spread, limits.omega_spread)
    if heads.mu.shape[1] > 1:
        return _several_tasks(heads, labelled, evidence, (zero_sum, omega_spread), limits)
    for name, each in zip(heads.names, labelled, strict=True):
        if each.label not in SIGNED | {"dummy"}:
            text = ": ".join(filter(None, (f"head {name} is {each.label}", each.text)))
            return Decision("undetermined", text, each.checks)
    pattern, text = _one_task(evidence.form)
    # Heads whose omega and mu have one sign add up to a positive multiple of I.
    descends = [] if pattern == "debiased_gd" else [_descends(evidence, DESCENDS)]
    does_it = _does_the_task(evidence, limits)
    return decided(pattern, text, omega_spread, zero_sum, *descends, *explained, does_it)


def _explained(evidence: Evidence, limits: Thresholds) -> list[Criterion]:
    """Idealised heads and the closed form must explain the prediction. QK x blocks must have their form, unless the
    idealised heads explain nearly all of it."""
    r2 = [
        Criterion(f"{name}_r2", getattr(evidence, name).r2, limits.substitution_r2, least=True)
        for name in ("substitution", "learner")
    ]
    if evidence.substitution.r2 >= 1 - limits.equal:
        return r2
    return [*r2, Criterion("alignment", evidence.alignment, limits.ov_last_entry, least=True)]


def _descends(evidence: Evidence, limit: float) -> Criterion:
    """The step must not ascend: `DESCENDS` in every direction, or in no direction below -`DESCENDS`."""
    return Criterion("descent", evidence.scales.descent, limit, least=True)


def _does_the_task(evidence: Evidence, limits: Thresholds) -> Criterion:
    """Few models with random weights may have as small a loss: a step that is too long does not descend."""
    return Criterion("task_r2_p", evidence.p_values["task_r2"], limits.p_value)


def _linear(evidence: Evidence, explained: list[Criterion], limits: Thresholds) -> Decision:
    """Label of linear heads: a step by some matrix, named only if the step has learned the task."""
    used, learned = evidence.components, []
    text = "linear attention; one preconditioned step"
    if used is not None:
        learned = [Criterion("learned", float(used.learned.max()), LEARNED, least=True)]
        if used.n_components is None:
            text += (
                f"; entries of its matrix between two principal directions of x predict {used.off_diagonal:.2g} of E y², "
                f"and {off_identity(evidence.scales.step[0])}"
            )
        else:
            text += f" on {used.n_components} of {len(used.learned)} components"
    descends, does_it = _descends(evidence, -DESCENDS), _does_the_task(evidence, limits)
    return decided("linear_gd", text, *learned, *explained, descends, does_it)


def off_identity(M: Float[Tensor, "d_x d_x"]) -> str:
    """Fraction of the matrix of a step, by norm, that is not a multiple of the identity, as text."""
    rest = M - M.diagonal().mean() * torch.eye(len(M), dtype=M.dtype, device=M.device)
    return f"{float(rest.norm() / M.norm()):.0%} of its matrix is not a multiple of the identity"


def _one_task(form: QKForm) -> tuple[str, str]:
    """Pattern and text for heads of both signs whose mu cancel: a debiased step, with or without preconditioner."""
    if form.kind == "scalar":
        return "debiased_gd", "heads of both signs"
    shape = f"one matrix with isotropy {form.isotropy:.3f} for all heads"
    if not np.isnan(form.rotation):
        shape = f"omega times one rotation by up to {form.rotation:.0f} degrees for all heads"
    return "preconditioned_gd", f"heads of both signs; QK is {shape}"


def _off_diagonal(heads: HeadStatistics) -> float:
    """Root mean square of the off-diagonal entries of the responses' steps, relative to the mean of the diagonal; the largest
    over responses. It is as large as the noise of the diagonal if a circuit has noise on all entries."""
    steps = torch.einsum("hn,hij->nij", torch.from_numpy(heads.mu), heads.blocks)
    d_x = steps.shape[-1]
    off = steps - torch.diag_embed(steps.diagonal(dim1=1, dim2=2))
    size = (off.square().sum((1, 2)) / max(1, d_x * (d_x - 1))).sqrt()
    return float((size / steps.diagonal(dim1=1, dim2=2).mean(1).abs()).max())


def _several_tasks(
    heads: HeadStatistics,
    labelled: list[Decision],
    evidence: Evidence,
    even: tuple[Criterion, Criterion],
    limits: Thresholds,
) -> Decision:
    """Label for several responses and heads of both signs or of mixed sign.

    Args:
        even: Checks of zero_sum and omega_spread.
    """
    scales, explained = evidence.scales, _explained(evidence, limits)
    ascends_nowhere = _descends(evidence, -DESCENDS)
    does_it = _does_the_task(evidence, limits)
    active = heads.where(np.array([each.label != "dummy" for each in labelled]))
    sizes = np.abs(active.mu)
    task_leak = Criterion("task_leak", float(active.task_leak.max()), limits.leak)
    smallest = (sizes.min(1) / sizes.max(1)).min()
    if {each.label for each in labelled} <= SIGNED | {"dummy"}:
        if task_leak.holds:
            text = "each active head serves one response"
            return decided(
                "task_heads", text, *even, task_leak, ascends_nowhere, *explained, does_it
            )
        if smallest >= EVEN:
            full = all(len(each) == heads.blocks.shape[1] for each in scales.supports)
            noise = NOISE_OF_WEIGHTS * _off_diagonal(active)
            uniform = full and scales.theta_spread <= max(limits.equal, noise)
            pattern = "debiased_gd" if uniform else "weighted_preconditioned_gd"
            text = f"opposite heads serve all responses, mu within {1 - smallest:.0%}"
            descends = [] if uniform else [_descends(evidence, DESCENDS)]
            return decided(pattern, text, *even, *descends, *explained, does_it)
    odd = [
        f"; head {name} is unstructured"
        for name, each in zip(heads.names, labelled, strict=True)
        if each.label == "unstructured"
    ]
    steps = (
        Criterion("support_leak", scales.support_leak, limits.leak),
        Criterion("theta_spread", scales.theta_spread, limits.omega_spread),
    )
    text = f"heads serve several responses{''.join(odd)}"
    return decided("superposition", text, even[0], *steps, ascends_nowhere, *explained, does_it)
