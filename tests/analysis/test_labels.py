"""Labels of models whose pattern is known by construction, with the numbers behind them, and what labels do not depend on."""

from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np
import pytest
import torch
from torch import Tensor

from analyses.lib.theory.softmax import manifold_mu
from mechinterp.analysis.circuits import circuits
from mechinterp.analysis.labels import NO_LABEL_TEXTS
from mechinterp.analysis.one_layer.classify import classify, classify_circuits
from mechinterp.analysis.one_layer.qk_form import QKForm, common_matrix
from mechinterp.analysis.one_layer.thresholds import Thresholds
from mechinterp.config import CovarianceConfig, ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.icl.prompts import covariance_matrix
from mechinterp.models.constructions.one_layer import (
    debiased_gradient_step,
    diagonal_heads,
    from_circuits,
    zero_head,
)
from mechinterp.models.heads import stack
from mechinterp.models.weights import Weights
from mechinterp.theory.softmax import debiased_step_size
from mechinterp.training.one_layer.step import initial_weights
from tests.conftest import changed, refused

pytestmark = pytest.mark.usefixtures("small_null")

PAPER = {"d_x": 5, "context_length": 40, "noise_var": 0.1}
KMS = TaskConfig(covariance=CovarianceConfig(kind="kms", rho=0.5))
TWO = TaskConfig(
    d_x=6,
    d_y=2,
    context_length=48,
    beta_var=1.0,
    noise_var=0.4,
    query_noise=False,
    supports=((0, 1, 2, 3), (2, 3, 4, 5)),
)
FREE = replace(TWO, supports=None)
EYE = torch.eye(5, dtype=torch.float64)
UNEVEN_3 = [0.15] * 3 + [0.2] * 3
UNEVEN = [0.15, 0.15, 0.2, 0.2, 0.15, 0.15]


def grouped(first: float, last: float, shared: float) -> list[float]:
    """omega on coordinates {0, 1}, {4, 5} and {2, 3}, in the order of the published table."""
    return [first, first, shared, shared, last, last]


def with_blocks(blocks: Tensor, mu: list[float], **law: object) -> Weights:
    """Heads of one response with these QK x blocks."""
    OV = torch.nn.functional.pad(torch.tensor(mu, dtype=torch.float64)[:, None], (5, 0))
    return from_circuits(torch.nn.functional.pad(blocks, (0, 1, 0, 1)), OV[:, :, None], **law)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=random)


def diagonal(*entries: float) -> Tensor:
    return torch.diag(torch.tensor(entries, dtype=torch.float64))


def best_preconditioner() -> Tensor:
    """(Sigma + ((tr Sigma + d s^2)/L) I)^-1 for KMS covariates, the optimal debiased one."""
    sigma = covariance_matrix(KMS.covariance, 5)
    return torch.from_numpy(np.linalg.inv(sigma + (5 + 5 * 0.1) / 40 * np.eye(5)))


def rotation() -> Tensor:
    matrix, _ = torch.linalg.qr(drawn(5, 5))
    return matrix * torch.linalg.det(matrix).sign()


def antisymmetric() -> Tensor:
    """A matrix at right angles to I and to all symmetric ones, of I's norm."""
    matrix = drawn(5, 5)
    matrix = matrix - matrix.T
    return matrix * 5**0.5 / matrix.norm()


def heads(omega: list, mu: list[float]) -> Weights:
    return diagonal_heads(omega, mu, d_x=5)


def pair(omega: float = 0.13, mu: float = 3.4) -> Weights:
    return heads([omega, -omega], [mu, -mu])


def two_responses(omega: list, mu: list) -> Weights:
    return diagonal_heads(omega, mu, d_x=6, d_y=2)


def opposite(omega: list[float], mu: list[float]) -> Weights:
    """A head of two responses with its exact opposite."""
    return two_responses([omega, [-o for o in omega]], [mu, [-m for m in mu]])


def uneven(first: list, second: list) -> Weights:
    """Four heads of two responses, each next to its opposite."""
    omega = [[sign * o for o in each] for each in first for sign in (1, -1)]
    return two_responses(omega, [[sign * m for m in each] for each in second for sign in (1, -1)])


def uneven_pair(omega: list[float], mu: list[list[float]]) -> Weights:
    return two_responses([[o] * 6 for o in omega], mu)


def reading_x(*values: float) -> Weights:
    """The pair, of which each head also reads the first entry of x with this value."""
    OV = pair().OV.clone()
    OV[: len(values), 0, 0] = torch.tensor(values)
    return from_circuits(pair().QK, OV)


def on_manifold(gamma: float, positive: list[float], negative: list[float]) -> Weights:
    """Heads on the solution manifold; the lists split mu_gamma over the heads of each sign."""
    total = manifold_mu(gamma, **PAPER)
    omega = [gamma] * len(positive) + [-gamma] * len(negative)
    mu = [total * share for share in positive] + [-total * share for share in negative]
    return diagonal_heads(omega, mu, d_x=5)


def cancelling(n_heads: int) -> Weights:
    """The pair with heads that attend at random and, if they are two, cancel each other."""
    junk = 0.3 * drawn(1, 6, 6, seed=1).expand(n_heads, -1, -1)
    OV = torch.tensor([1.0, -1.0]).double()[:n_heads, None, None].expand(-1, 6, 1)
    return stack([pair(), from_circuits(junk, OV)])


def mixed_omega() -> Weights:
    weights = pair(0.4, 2.0)
    weights.W_K[0, 0, 0, 0] *= -1
    return weights


def linear(weights: Weights, **law: object) -> Weights:
    return weights.with_model(**{"score": "linear", "score_slope": 1 / 40} | law)


def rectified(weights: Weights) -> Weights:
    return weights.with_model(score="relu/L", context_only=True)


AVERAGE = heads([0.0], [1.0])
SIX = torch.eye(6).double()[None]
READS_X = changed(AVERAGE, W_V=SIX, W_O=1 - SIX[:, :, 5:])
TABLE_2 = two_responses(
    [
        grouped(-0.0316, -0.0689, -0.0893),
        grouped(0.0779, 0.0, 0.0870),
        grouped(-0.0837, 0.0927, 0.0152),
    ],
    [[-3.9911, -7.0742], [6.9204, 2.3371], [-2.8739, 4.7399]],
)
MODE_1 = two_responses([grouped(0.423, 0.423, 0.505)], [[1.65, 1.65]])
MODE_2 = opposite(grouped(0.186, 0.186, 0.2024), [2.265, 2.265])
MODE_3 = two_responses(
    [
        *(grouped(0, 0.14, 0.14), grouped(0, -0.14, -0.14)),
        *(grouped(0.137, 0, 0.137), grouped(-0.137, 0, -0.137)),
    ],
    [[0, 3.216], [0, -3.246], [3.333, 0.118], [-3.381, -0.146]],
)
STEP_OF_TWO = debiased_gradient_step(0.9, 0.1, d_x=6, d_y=2)
DUMMIES = heads([7.0, -0.001, 0.3], [1e-6, 1e-7, -1e-5])


def task_heads(*mu: list[float]) -> Weights:
    """Heads of the third mode with other mu, each next to its opposite."""
    return two_responses(
        MODE_3.omega.tolist(), [[s * m for m in each] for each in mu for s in (1, -1)]
    )


def around(value: object, error: float) -> object:
    return pytest.approx(value, abs=error, nan_ok=True)


WEIGHTED, KERNEL = "weighted_preconditioned_gd", "kernel_regression"
PAIR, FOUR = "positive negative", "positive negative positive negative"
CANCEL = "no head is active, or the active heads cancel"
BEST = debiased_step_size(**PAPER)
EXACT_PAIR = {"eta": [0.8], "zero_sum": 0, "omega_spread": 0, "eta_optimal": BEST}
THETA = np.array([grouped(0.906, 0.009, 0.915), grouped(0.009, 0.927, 0.907)])
"""Published: task 1 has .906, .915 and .009 off its support, task 2 .927, .907 and .009."""
NORMS = np.linalg.norm(TABLE_2.omega.numpy(), axis=1)
OF_TABLE_2 = {
    "theta": around(THETA, 2e-3),
    "support_leak": around(0.009 / 0.91, 2e-3),
    "supports": TWO.supports,
}
PATHS = {
    "r2": "substitution.r2",
    "learner_r2": "learner.r2",
    "kind": "form.kind",
    "matrix": "form.matrix",
}
"""Numbers that are neither fields of the answer nor of its scales."""
LEANING, LESS = EYE + 0.55 * antisymmetric(), EYE + 0.7 * antisymmetric()
TWO_MATRICES = [0.1 * best_preconditioner(), -0.12 * diagonal(3, 1, 1, 1, 0.3)]
TURNED_STEPS = torch.stack([0.45 * EYE + 3 * antisymmetric(), 0.45 * EYE - 3 * antisymmetric()])
LAST_UNEVEN = (TABLE_2.omega @ diagonal(1, 1.6, 1, 1, 1, 1)).tolist()
FULL, PART = tuple(range(6)), (0, 1, 2, 3)


@dataclass(frozen=True)
class Case:
    """A model, its label, and numbers of the answer by their names."""

    weights: Weights
    pattern: str
    labels: str
    reason: str
    task: TaskConfig | None
    numbers: dict[str, object]


def case(
    weights: Weights,
    pattern: str,
    labels: str = "",
    *,
    reason: str = "",
    task: TaskConfig | None = None,
    **numbers: object,
) -> Case:
    return Case(weights, pattern, labels, reason, task, numbers)


def unclear(weights: Weights, labels: str = "", **given: object) -> Case:
    return case(weights, "undetermined", labels, **given)


ONE_RESPONSE = {
    "pair": case(
        debiased_gradient_step(0.8, 0.13, d_x=5),
        "debiased_gd",
        PAIR,
        **EXACT_PAIR,
        r2=around(1, 0.001),
        sign_matching=True,
    ),
    "on the manifold": case(
        on_manifold(0.13, [0.4, 0.6], [0.1, 0.2, 0.7]),
        "debiased_gd",
        eta=[2 * 0.13 * manifold_mu(0.13, **PAPER)],
    ),
    "nearly equal": case(
        heads([0.13, 0.134, -0.13], [3.0, 0.4, -3.4]),
        "debiased_gd",
        eta=[0.13 * 3 + 0.134 * 0.4 + 0.13 * 3.4],
    ),
    "slope": case(
        debiased_gradient_step(0.8, 0.05, d_x=5).with_model(score="1+Cx", score_slope=0.5),
        "debiased_gd",
        eta=[0.4],
        theta=np.full((1, 5), 0.4),
        step=0.4 * EYE[None].numpy(),
        r2=around(1, 0.001),
    ),
    "kernel": case(heads([0.5], [1.5]), KERNEL, "positive", r2=1),
    "negative kernel": case(heads([-0.5], [-1.5]), KERNEL, "negative"),
    "small entry": unclear(heads([[-0.4] * 4 + [0.01]], [-1.5]), "negative"),
    "one sign": case(heads([0.528, 0.575], [0.955, 0.507]), KERNEL, "positive positive"),
    "turned kernel": case(
        with_blocks(0.5 * rotation()[None], [1.5]),
        KERNEL,
        kind="common",
        matrix=around(rotation(), 1e-06),
    ),
    "wrong sign": unclear(heads([0.5], [-1.5]), "mismatched"),
    "no metric": unclear(
        with_blocks(0.3 * drawn(1, 5, 5, seed=3), [1.5]),
        reason="head 0 is unstructured; qk_diagonal",
    ),
    "one mismatched": unclear(
        heads([0.3, -0.3], [2, 2]), "positive mismatched", reason="head 1 is mismatched"
    ),
    "uneven omega": unclear(
        heads([0.13, -0.2], [3, -3]), PAIR, reason="omega_spread", omega_spread=0.2 / 0.13 - 1
    ),
    "uneven mu": unclear(heads([0.13, -0.13], [3, -2]), PAIR, reason="zero_sum", zero_sum=0.2),
    "large omega": unclear(heads([1.5, -1.5], [0.3, -0.3]), PAIR, reason="learner_r2"),
    "mixed": unclear(mixed_omega(), "mixed negative", reason="omega_of_other_sign"),
    "average": unclear(AVERAGE, "unstructured", reason="qk_diagonal"),
    "reads x": case(READS_X, "unstructured", "unstructured", reason="least_p", zero_sum=np.nan),
    "kernel and average": unclear(stack([heads([0.5], [1.5]), AVERAGE]), omega_spread=np.inf),
    "one head reads x": unclear(
        reading_x(3.0),
        reason=f" is {3.4 / np.hypot(3.4, 3.0):.3f}, below the limit 0.9",
    ),
    "zero": unclear(zero_head(d_x=5), "dummy", reason=CANCEL, sign_matching=False),
    "all cancel": unclear(heads([0.13, 0.13], [3.4, -3.4]), reason=CANCEL),
    "some cancel": case(
        cancelling(2), "debiased_gd", f"{PAIR} unstructured unstructured", sign_matching=False
    ),
    "one does not cancel": unclear(cancelling(1)),
    "dummies": case(
        stack([pair(), DUMMIES, zero_head(d_x=5)]),
        "debiased_gd",
        f"{PAIR} dummy dummy dummy dummy",
        omega_spread=0,
        share=around([0.5, 0.5, 0, 0, 0, 0], 0.02),
    ),
    # Both heads read x, so that idealised heads lose some of the prediction; a dummy that leans does not count.
    "leaning dummy": case(
        stack([reading_x(0.9, 0.9), with_blocks(0.1 * antisymmetric()[None], [0.0001])]),
        "debiased_gd",
        f"{PAIR} dummy",
        r2=around(0.925, 0.025),
    ),
    "leaning": unclear(
        with_blocks(0.1 * LEANING[None], [1.5]),
        "positive",
        reason=f" is {(1 + 0.55**2) ** (-0.5):.3f}",
        r2=around(0.925, 0.025),
    ),
    "one leaning": unclear(
        with_blocks(torch.stack([0.1 * EYE, 0.1 * LESS]), [0.7, 1.5]),
        "positive positive",
        reason=f" is {(1 + 0.7**2) ** (-0.5):.3f}",
    ),
    # The sum of both is .9 I, a step; alone none of them is near a multiple of I.
    "linear": case(
        linear(with_blocks(TURNED_STEPS, [1.0, 1.0])), "linear_gd", "unstructured unstructured"
    ),
    # The query's y is 0: its token adds nothing.
    "linear to itself": case(
        linear(heads([0.5], [1.0]), attend_to_self=True), "linear_gd", learner_r2=1
    ),
    "linear zero": unclear(linear(heads([0.5, -0.5], [1.0, 1.0])), reason="predictions are all 0"),
    # max(s, 0) - max(-s, 0) = s: heads of opposite omega and mu make a step of mu * omega.
    "rectified pair": case(rectified(pair(0.4, 2.0)), "linear_gd", eta=[0.8], learner_r2=1),
    # max(s, 0) = s/2 + |s|/2, of which a step has the first half alone.
    "rectified head": unclear(
        rectified(heads([0.4], [2.0])), eta=[0.4], learner_r2=around(0.5, 0.45)
    ),
}
OTHER_TASKS = {
    "larger responses": case(
        on_manifold(0.13, [1.0], [1.0]),
        "debiased_gd",
        task=TaskConfig(beta_var=20.0, noise_var=10.0),
        eta_optimal=BEST,
    ),
    "no optimum": case(pair(), "debiased_gd", task=KMS, eta_optimal=np.nan),
    "metric": case(
        with_blocks(0.4 * best_preconditioner()[None], [1.5]),
        KERNEL,
        "positive",
        task=KMS,
        kind="common",
        learner_r2=1,
    ),
    "two matrices": unclear(with_blocks(torch.stack(TWO_MATRICES), [5.0, -5.0]), task=KMS),
    "full supports": case(STEP_OF_TWO, "debiased_gd", task=replace(TWO, supports=(FULL, FULL))),
    "a full support": case(STEP_OF_TWO, WEIGHTED, task=replace(TWO, supports=(FULL, PART))),
}
WITH_SUPPORTS = {
    "mode 1": case(MODE_1, KERNEL, "positive"),
    "mode 2": case(MODE_2, WEIGHTED, PAIR),
    "mode 3": case(MODE_3, "task_heads", FOUR, task_leak=[0, 0, 0.118 / 3.333, 0.146 / 3.381]),
    "table 2": case(
        TABLE_2,
        "superposition",
        "negative positive mixed",
        **OF_TABLE_2,
        omega_spread=NORMS.max() / NORMS.min() - 1,
        eta_optimal=np.nan,
    ),
    "step": case(STEP_OF_TWO, WEIGHTED),
    "uneven theta": unclear(
        two_responses(LAST_UNEVEN, TABLE_2.mu.tolist()),
        reason="theta_spread",
        theta_spread=around(0.6, 0.0005),
    ),
    "wrong sign": unclear(
        task_heads([0, -3.2], [3.3, 0]),
        f"mismatched mismatched {PAIR}",
        reason="support_leak",
        support_leak=np.nan,
        theta_spread=np.nan,
    ),
    "leak below the limit": case(
        task_heads([-0.5, 3.2], [3.3, 0]),
        "task_heads",
        FOUR,
        task_leak=[0.5 / 3.2, 0.5 / 3.2, 0, 0],
    ),
    "leak above the limit": unclear(task_heads([0, 3.2], [3.3, 1.2]), reason="support_leak"),
}
WITHOUT_SUPPORTS = {
    "mode 1": case(MODE_1, KERNEL, "positive"),
    "mode 2": case(MODE_2, WEIGHTED, PAIR),
    "mode 3": case(MODE_3, "task_heads", FOUR),
    "table 2": case(TABLE_2, "superposition", "negative positive mixed"),
    "step": case(STEP_OF_TWO, "debiased_gd"),
    "half as much": case(opposite(UNEVEN, [2, 1]), WEIGHTED),
    "too little": unclear(opposite(UNEVEN, [2, 0.8]), reason="theta_spread", theta_spread=1 / 3),
    "not all serve all": case(
        uneven([UNEVEN_3, [0.2] * 3 + [0.14] * 3], [[2, 2], [2, 0.6]]),
        "superposition",
        task_leak=[1, 1, 0.3, 0.3],
    ),
    "uneven omega": unclear(
        uneven_pair([0.08, -0.16], [[3.4, 3.4], [-3.4, -3.4]]),
        reason="omega_spread",
        omega_spread=1,
    ),
    "uneven mu": unclear(
        uneven_pair([0.13, -0.13], [[3.4, 3.4], [-2.4, -2.4]]), reason="zero_sum", zero_sum=1 / 5.8
    ),
    "uneven mu of the second": unclear(
        uneven_pair([0.13, -0.13], [[3, 3], [-3, -2]]), zero_sum=0.2
    ),
    "uneven mu of the first": unclear(uneven_pair([0.13, -0.13], [[3, 3], [-2, -3]]), zero_sum=0.2),
    "omega of each response": case(
        uneven([[0.1] * 6, [0.2] * 6], [[4, 0], [0, 2]]), "task_heads", omega_spread=0
    ),
    "pushed away": unclear(opposite([0.13] * 6, [3.4, -3.4]), "mixed mixed", reason="support_leak"),
    "first unserved": unclear(opposite([0.13] * 6, [0, 3.4]), PAIR, unserved=(0,), zero_sum=np.nan),
    "second unserved": unclear(
        opposite([0.13] * 6, [3.4, 0]), PAIR, unserved=(1,), zero_sum=np.nan
    ),
    # Supports hold what is above half of the largest; the leak is relative to the mean on the support.
    "own supports": unclear(
        opposite([0.15, 0.15, 0.12, 0.12, 0.03, -0.13], [3, 3]),
        supports=(PART, PART),
        support_leak=0.13 / 0.135,
        theta_spread=0.15 / 0.12 - 1,
    ),
}
CASES = ONE_RESPONSE | OTHER_TASKS
for kind, their_task, cases in (("supports", TWO, WITH_SUPPORTS), ("free", FREE, WITHOUT_SUPPORTS)):
    CASES |= {f"{kind}: {name}": replace(each, task=their_task) for name, each in cases.items()}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_built_model_has_its_label_and_numbers(case: Case):
    found = classify(case.weights, task=case.task)
    assert found.label == case.pattern, found.reason
    assert not case.labels or " ".join(found.labels) == case.labels
    assert case.reason in found.reason
    assert all(each.holds for each in found.checks) or found.label in NO_LABEL_TEXTS
    for name, expected in case.numbers.items():
        holder = found.scales if hasattr(found.scales, name) else found
        is_exact = isinstance(expected, int | float | list | np.ndarray)
        value = attrgetter(PATHS.get(name, name))(holder)
        assert value == (around(expected, 1e-9) if is_exact else expected), name


def test_the_closed_form_stands_in_better_for_smaller_omega():
    models = (debiased_gradient_step(0.8, omega, d_x=5) for omega in (0.1, 0.05))
    gaps = [1 - classify(model).learner.r2 for model in models]
    # The predictions differ by O(omega^2), so their squared distance falls sixteenfold.
    assert gaps[0] / gaps[1] == pytest.approx(16, rel=0.1)


@pytest.mark.parametrize("task", [KMS, TaskConfig()])
def test_a_pair_with_one_matrix_is_a_preconditioned_step(task: TaskConfig):
    gamma = best_preconditioner()
    found = classify(with_blocks(torch.stack([0.1 * gamma, -0.1 * gamma]), [5.0, -5.0]), task=task)
    assert (found.label, found.labels) == ("preconditioned_gd", ("positive", "negative"))
    assert torch.allclose(found.scales.step[0], gamma)  # 0.1 * 5 twice
    size = gamma.norm() / 5**0.5
    assert found.scales.eta[0] == pytest.approx(size.item())
    assert found.form.isotropy == pytest.approx((gamma.trace() / 5 / size).item())
    assert found.learner.r2 > 0.99


def turned(degrees: float) -> Tensor:
    """Rotation of the first two coordinates."""
    angle = np.radians(degrees)
    matrix = EYE.clone()
    matrix[:2, :2] = torch.tensor([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    return matrix


def pair_of(matrix: Tensor, step: float = 0.8) -> Weights:
    """Two softmax heads with opposite multiples of one matrix; together a step of this size along the matrix."""
    return with_blocks(torch.stack([0.1 * matrix, -0.1 * matrix]), [5 * step, -5 * step])


SHIFT = EYE.roll(1, 0)
RANDOM = drawn(5, 5, seed=4)
TRACE_FREE = RANDOM - RANDOM.trace() / 5 * EYE
STATED = TaskConfig(covariance=CovarianceConfig())
WIDE = TaskConfig(
    covariance=CovarianceConfig(kind="eigenvalues", eigenvalues=(0.1, 0.1, 0.3, 1.5, 3))
)


@pytest.mark.parametrize(
    ("matrix", "descends"),
    [
        # The eigenvalues of a shift of five coordinates are roots of unity.
        (SHIFT, np.cos(0.8 * np.pi)),
        (TRACE_FREE / TRACE_FREE.norm() * 5**0.5, None),
        (diagonal(1, 1, 1, -0.5, -0.5), -0.5),
        (diagonal(1, 1, 1, 1, -0.1), -0.1),
        (diagonal(1, 1, 1, 0, 0), 0.0),
        (diagonal(1, 1, 1, 1, 0.04), 0.04),
        (-1.0 * diagonal(3, 1, 1, 1, 1), None),
        (turned(120), -0.5),
        (rotation(), None),
    ],
    ids=["shift", "free", "up", "slightly up", "half", "near half", "sign", "turned", "any turn"],
)
def test_a_common_matrix_that_ascends_is_no_descent(matrix: Tensor, descends: float | None):
    found = classify(pair_of(matrix), task=STATED)
    assert found.label == ("undetermined" if found.scales.descent < 0.05 else "preconditioned_gd")
    if descends is not None:
        assert found.scales.descent == pytest.approx(descends, abs=1e-12)
        assert found.label == "undetermined"
        assert found.reason.startswith("no preconditioned_gd")
        assert "; descent (" in found.reason


def test_a_rotation_that_descends_is_named():
    found = classify(pair_of(turned(60)), task=STATED)
    assert found.label == "preconditioned_gd"
    assert found.scales.descent == pytest.approx(0.5)
    assert found.form.rotation == pytest.approx(60)
    assert found.omega_form == pytest.approx([0.1, -0.1])


def test_descent_is_measured_where_x_has_unit_covariance():
    """A step by the inverse covariance descends evenly, and a step by the covariance along its large directions alone."""
    Sigma = torch.from_numpy(covariance_matrix(WIDE.covariance, 5))
    even, steep = (classify(pair_of(M), task=WIDE) for M in (torch.linalg.inv(Sigma), Sigma / 3))
    assert even.scales.descent == pytest.approx(1)
    assert steep.scales.descent == pytest.approx((0.1 / 3) ** 2)
    assert even.label == "preconditioned_gd"
    assert steep.label == "undetermined"
    assert not any("not stated" in each.reason for each in (even, steep))
    # Circuits alone state no covariance: the same matrix is measured with the identity.
    weights = pair_of(torch.linalg.inv(Sigma))
    alone = classify_circuits(weights.QK, weights.OV)
    assert alone.scales.descent == pytest.approx(0.1 / 3)
    assert "the covariance of x is not stated" in alone.reason
    assert alone.label == "undetermined"


@pytest.mark.parametrize(
    ("weights", "task"),
    [
        (pair_of(best_preconditioner(), 4.0), KMS),
        (debiased_gradient_step(6.0, 0.05, d_x=5), None),
        (linear(heads([6.0], [1.0])), None),
        (opposite([1.0] * 3 + [1.2] * 3, [2.4, 2.4]), replace(FREE, supports=(FULL, FULL))),
        (task_heads([0, 32], [33, 0]), TWO),
        (two_responses(TABLE_2.omega.tolist(), (10 * TABLE_2.mu).tolist()), TWO),
    ],
    ids=["common", "debiased", "linear", "weighted", "task heads", "superposed"],
)
def test_a_step_that_is_too_long_does_not_descend(weights: Weights, task: TaskConfig | None):
    found = classify(weights, task=task)
    assert found.label == "undetermined", found.reason


def test_linear_attention_that_ascends_is_no_descent():
    up = classify(linear(with_blocks(diagonal(0.9, 0.9, 0.9, 0.9, -0.1)[None], [1.0])))
    assert up.scales.descent == pytest.approx(-1 / 9)
    assert up.p_values["task_r2"] <= 0.01
    assert up.label == "undetermined"
    assert "descent (" in up.reason
    left_out = classify(linear(with_blocks(diagonal(0.9, 0.9, 0.9, 0.9, 0)[None], [1.0])))
    assert left_out.label == "linear_gd"


def test_noise_makes_no_weights_of_coordinates():
    """Noise on all entries spreads the diagonal, too; weights that stand out of it are weights."""
    noise = 0.004 * drawn(2, 6, 6, seed=3)
    for rows, pattern in (([0.15] * 6, "debiased_gd"), ([0.13] * 3 + [0.17] * 3, WEIGHTED)):
        plain = opposite(rows, [3.0, 3.0])
        QK = plain.QK.clone()
        QK[:, :6, :6] += noise
        found = classify(from_circuits(QK, plain.OV), task=FREE)
        assert found.scales.theta_spread > 0.05
        assert found.label == pattern, found.reason
        assert classify(plain, task=FREE).label == pattern


def test_responses_whose_step_ascends_are_no_descent():
    rows = [0.15] * 5 + [-0.02]
    found = classify(opposite(rows, [2.0, 1.8]), task=replace(FREE, supports=(FULL, FULL)))
    assert found.scales.descent == pytest.approx(-0.02 / 0.15)
    assert f"no {WEIGHTED}" in found.reason
    apart = uneven([rows, [0.2] * 6], [[2.5, 0], [0, 2]])
    found = classify(apart, task=FREE)
    assert found.scales.descent == pytest.approx(-0.02 / 0.15)
    assert "no task_heads" in found.reason
    # Off the stated support of a response there is nothing to ascend.
    part = classify(apart, task=replace(FREE, supports=(FULL[:5], FULL)))
    assert part.scales.descent == pytest.approx(1)
    assert part.label == "task_heads"


def test_linear_attention_is_one_step_with_its_matrix():
    blocks, mu = drawn(3, 5, 5, seed=1), [0.5, -0.2, 0.1]
    weights = with_blocks(blocks, mu, score="linear", score_slope=1 / 40)
    step = torch.einsum("h,hij->ij", torch.tensor(mu).double(), blocks)
    for one in (weights, weights.with_model(score="linear/L", score_slope=1.0)):
        found = classify(one)
        assert torch.allclose(found.scales.step[0], step)
        assert found.learner.r2 == pytest.approx(1, abs=1e-12)
        # A step by any matrix, but this one is drawn at random and predicts worse than 0.
        assert found.label == "undetermined"
        assert found.p_values["task_r2"] == 1


def linear_step(M: Tensor, noise: float = 0.0) -> Weights:
    """One linear head whose prediction is (1/L) sum_l y_l x_l^T M x, and noise on all of both circuits."""
    heads = with_blocks(M[None], [1.0])

    def noisy(circuit: Tensor, seed: int) -> Tensor:
        added = drawn(*circuit.shape, seed=seed)
        return circuit + noise * circuit.norm() * added / added.norm()

    return from_circuits(noisy(heads.QK, 0), noisy(heads.OV, 1), score="linear", score_slope=1 / 40)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 1e-5])
def test_a_step_is_linear_gd_if_its_matrix_descends_however_its_weights_are_rounded(noise: float):
    for seed in range(2):
        random = drawn(5, 5, seed=seed)
        found = classify(linear_step(0.9 * (EYE + 0.2 * random), noise))
        assert found.label == "linear_gd"
        assert found.learner.r2 == pytest.approx(1, abs=max(1e-12, 100 * noise))
        for size in (0.03, 1.0):
            M = size * (random - random.trace() / 5 * EYE)  # in no direction on average
            for matrix in (M, M + M.T):
                assert classify(linear_step(matrix, noise)).label == "undetermined"


def test_linear_heads_of_two_responses_are_a_step_unless_they_are_random():
    OV = torch.zeros(2, 7, 2, dtype=torch.float64)
    OV[0, 5, 0] = OV[1, 6, 1] = 1
    for block, pattern in (
        (drawn(2, 5, 5, seed=2), "undetermined"),
        (EYE.expand(2, -1, -1), "linear_gd"),
    ):
        QK = torch.nn.functional.pad(block, (0, 2, 0, 2))
        weights = from_circuits(QK, OV, score="linear", score_slope=1 / 40)
        found = classify(weights, task=TaskConfig(d_x=5, d_y=2))
        assert found.label == pattern
        assert (found.p_values["task_r2"] == 1) == (pattern == "undetermined")


def test_linear_attention_that_reads_x_is_not_a_step():
    weights = linear(heads([0.5], [1.0]))
    weights.W_V[0, 0, :5, 5] = 3.0
    found = classify(weights)
    assert found.label == "undetermined"
    assert "substitution_r2" in found.reason


def test_biases_add_a_constant_that_is_nobodys():
    weights = debiased_gradient_step(0.88, 0.13, d_x=5)
    zero = torch.zeros(2, 6, dtype=torch.float64)
    biased = changed(weights, b_Q=zero, b_K=zero, b_V=zero, b_O=torch.tensor([0.0]).double())
    assert classify(biased).reason == classify(weights).reason
    shifted = classify(changed(biased, b_O=torch.tensor([3.0]).double()))
    assert shifted.share == pytest.approx(classify(weights).share)
    assert shifted.label == "undetermined"
    assert "substitution_r2" in shifted.reason


@pytest.mark.slow
def test_circuits_alone_are_enough_and_are_read_with_their_law():
    weights = pair()
    QK, OV = weights.QK.numpy(), weights.OV.numpy()
    found = classify_circuits(QK, OV)
    assert found.label == "debiased_gd"
    as_given = circuits(weights)  # [layer, head, ...]
    assert classify_circuits(as_given.QK, as_given.OV).scales.eta == pytest.approx(found.scales.eta)
    wide = np.pad(OV, ((0, 0), (0, 0), (5, 0)))  # all d_model columns, of which the last is y
    assert classify_circuits(QK, wide).scales.eta == pytest.approx(found.scales.eta)
    two = classify_circuits(TABLE_2.QK, TABLE_2.OV, d_y=2, task=TWO)
    assert two.label == "superposition"
    assert classify_circuits(QK[::-1], OV[::-1]).labels == ("negative", "positive")
    graded = classify_circuits(weights.QK.requires_grad_(), weights.OV.requires_grad_())
    assert graded.label == "debiased_gd"
    sloped = classify_circuits(QK, OV, score="1+Cx", score_slope=0.5)
    assert sloped.scales.eta[0] == pytest.approx(0.5 * 2 * 0.13 * 3.4)
    to_self = classify_circuits(QK, OV, attend_to_self=True)
    expected = classify(weights.with_model(attend_to_self=True))
    assert to_self.learner.rms == pytest.approx(expected.learner.rms)
    assert to_self.learner.rms != pytest.approx(found.learner.rms)


@pytest.mark.slow
def test_prompts_and_limits_are_those_asked_for():
    weights = pair()
    before = classify(weights).learner.rms
    for prompts in ({"seed": 1}, {"n_prompts": 4096}):
        found = classify(weights, **prompts).learner.rms
        assert found != pytest.approx(before)
        by_circuits = classify_circuits(weights.QK, weights.OV, **prompts).learner.rms
        assert by_circuits == pytest.approx(found)
    wide, limits = CASES["uneven omega"].weights, Thresholds(omega_spread=0.6)
    assert classify(wide, thresholds=limits).label == "debiased_gd"
    found = classify_circuits(wide.QK, wide.OV, thresholds=limits)
    assert found.label == "debiased_gd"
    assert classify(MODE_3, task=TWO, thresholds=Thresholds(leak=0.04)).label != "task_heads"


def test_the_threshold_on_the_qk_circuit_is_above_random_heads():
    random = initial_weights(ExperimentConfig(model=ModelConfig(n_heads=20_000)))
    assert (random.qk_diagonal > Thresholds().qk_diagonal).float().mean() < 1e-3


GOOD = pair()
ONE = np.zeros((1, 6, 6))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: classify(GOOD, task=TaskConfig(d_y=2)), ["d_y = 1", "d_y = 2"]),
        (lambda: classify(GOOD, task=TaskConfig(d_x=3)), ["d_x = 5", "d_x = 3"]),
        (lambda: classify(GOOD, n_prompts=1), ["n_prompts", 8, 1]),
        (lambda: classify_circuits(ONE, np.zeros((2, 6, 1))), ["QK", "OV", "[1, 6, 6]"]),
        (lambda: classify_circuits(ONE, np.zeros((1, 6, 3)), 2), ["OV", "d_y = 2"]),
        (lambda: classify_circuits(np.nan * ONE, np.zeros((1, 6, 1))), ["QK", "finite"]),
        (lambda: classify_circuits(ONE[:, :1, :1], np.zeros((1, 1, 1))), ["d_y", "d_model"]),
        (lambda: classify_circuits(ONE[0], GOOD.OV), ["QK", "three axes", "[6, 6]"]),
        (
            lambda: classify_circuits(GOOD.QK, torch.zeros(2, 2, 6, 6)),
            ["OV", "one layer", "[2, 2, 6, 6]"],
        ),
    ],
)
def test_what_cannot_be_classified_is_refused(call, words: list):
    with refused(*words):
        call()


def two_shapes(apart: float) -> Tensor:
    """Two QK x blocks that leave I in one direction, and each other in a second one."""
    along, across = 0.5 * diagonal(1, -0.5, 0.5, -1, 0), 0.5 * diagonal(0, 1, -1, 0, 0)
    return torch.stack([0.1 * (EYE + along), -0.1 * (EYE + along + apart * across)])


def test_heads_count_by_their_share_in_the_common_matrix():
    first, second = diagonal(2, 1, 1, 1, 0.5), diagonal(2, 1.3, 1, 0.7, 0.7)
    blocks = torch.stack([0.1 * first, -0.1 * first, 0.1 * second, -0.1 * second])
    found = classify(with_blocks(blocks, [4.0, -4.0, 0.2, -0.2]))
    assert found.form.kind == "common"
    expected = common_matrix(blocks, torch.from_numpy(found.share))
    torch.testing.assert_close(found.form.matrix, expected)


def test_a_matrix_is_common_if_it_explains_most_squared_sines_of_the_deviations_from_i():
    far = classify(with_blocks(two_shapes(1.2), [4.0, -4.0]))
    assert 1 - far.form.isotropy**2 > 0.05
    assert 0.5 < far.form.shared < Thresholds().qk_diagonal
    assert far.form.kind == "scalar"
    blocks = two_shapes(0.5)
    found = classify(with_blocks(blocks, [4.0, -4.0]))
    common = QKForm("common", common_matrix(blocks, torch.from_numpy(found.share)))
    traces = blocks.diagonal(dim1=1, dim2=2).sum(1)
    cosines = traces / (5**0.5 * blocks.flatten(1).norm(dim=1))
    expected = 1 - (1 - common.alignment(blocks) ** 2).sum() / (1 - cosines**2).sum()
    assert found.form.shared == pytest.approx(float(expected))
