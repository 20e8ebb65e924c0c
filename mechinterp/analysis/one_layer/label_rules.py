"""Label of a one-layer model and of its heads: the numbers behind it, their limits, and the rules.

Numbers of the heads (`Heads`) come from their circuits and outputs; heads with equal QK circuits count as one head. The
QK circuits have an idealised form (`Form`): multiples of I, or of one matrix that all heads share. Sums over the heads
(`Scales`) give the step that the model makes.

Reading order: `Thresholds` has the limits. `read_heads`, `form_of` and `scales_of` compute the numbers. `head_decisions`
labels the heads, and `model_decision` the model: it picks the pattern that the signs of the heads suggest, and lists the
numbers that this pattern needs, each with its limit (`Criterion`). `named` gives the pattern if all limits hold. `Decision`
writes the sentence.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechinterp.analysis.circuits import Circuits
from mechinterp.analysis.labels import TEXTS
from mechinterp.analysis.one_layer.descent import DESCENDS, descent
from mechinterp.analysis.one_layer.linear_components import EQUAL, LEARNED, Components
from mechinterp.analysis.stats import loss_and_r2
from mechinterp.config import TaskConfig
from mechinterp.models.constructions.one_layer import from_circuits
from mechinterp.models.heads import share_of
from mechinterp.models.layers import is_normalised, score_derivative_at_zero
from mechinterp.models.weights import Weights, part_of
from mechinterp.theory.softmax import debiased_step_size


@dataclass(frozen=True)
class Thresholds:
    """Limits of the classifier; analyses/calibration/ measures how often labels are wrong under the
    defaults."""

    share: float = 0.01
    """A head is active if its share of the heads' output exceeds this. A larger limit ignores more
    heads."""
    qk_diagonal: float = 0.8
    """Smallest `qk_diagonal` of a structured head, or cosine of its QK x block with the heads' common matrix; 99.9% of
    random heads (d_x = 5) are below 0.8. It is also the smallest fraction of the heads' deviation from I that a common
    matrix must explain."""
    ov_last_entry: float = 0.9
    """Smallest `ov_last_entry` of a structured head. It is also the smallest cosine of a QK x block
    with its form, unless idealised heads explain all but the fraction `equal`."""
    omega_spread: float = 0.25
    """Largest spread (max/min - 1) of sizes that count as alike: |omega| of heads, theta on a support, singular values of
    a rotation."""
    zero_sum: float = 0.05
    """Largest `zero_sum` of heads whose mu cancel."""
    leak: float = 0.25
    """Parts below this fraction of the largest count as zero. Such entries of omega and mu have no
    sign, a head with such a `task_leak` serves one response, and theta with such a `support_leak`
    is confined to its supports."""
    equal: float = EQUAL
    """Relative difference below which two things count as equal: QK circuits of heads; a common
    matrix and I (squared sine of their angle); a metric and its symmetric part; theta on all
    coordinates; a step and its part along the principal components of x."""
    substitution_r2: float = 0.9
    """Smallest R^2 of the idealised heads, and of the closed form, against the model."""
    p_value: float = 0.01
    """Largest p-value at which a number counts as beyond random weights."""


ON_SUPPORT = 0.5
"""A coordinate belongs to the support if theta exceeds this fraction of its maximum."""
EVEN = 0.5
"""Heads serve all responses alike if the smallest |mu| of each head is at least this fraction of its largest."""
NOISE_OF_WEIGHTS = 4.0
"""Weights of coordinates count as even if their spread is below this multiple of the step's off-diagonal entries."""
SIGNED = {"positive", "negative"}
"""Labels of heads whose omega and mu have one sign."""
STRUCTURE = ("qk_diagonal_best", "ov_last_entry_best", "substitution_r2")
"""Numbers of which at least one must be beyond random weights for a model to be structured."""


@dataclass(frozen=True, eq=False)
class Heads:
    """Statistics of the heads of one layer, or of its groups of equal heads."""

    names: tuple[str, ...]
    """Numbers of the heads; a group joins its numbers by "+"."""
    blocks: Float[Tensor, "head d_x d_x"]
    """QK x blocks."""
    mu: Float[np.ndarray, "head d_y"]
    qk_diagonal: Float[np.ndarray, " head"]
    ov_last_entry: Float[np.ndarray, " head"]
    share: Float[np.ndarray, " head"]
    """Standard deviation of a head's output over prompts, divided by the sum of these over heads.
    """

    @property
    def task_leak(self) -> Float[np.ndarray, " head"]:
        """Second largest |mu_n| of each head divided by the largest; 0 for one response."""
        if self.mu.shape[1] == 1:
            return np.zeros(len(self.mu))
        second, first = np.sort(np.abs(self.mu), axis=1)[:, -2:].T
        return second / np.where(first == 0, 1, first)

    def where(self, mask: np.ndarray) -> "Heads":
        """The heads that the mask selects."""
        arrays = ("mu", "qk_diagonal", "ov_last_entry", "share")
        return Heads(
            names=tuple(name for name, chosen in zip(self.names, mask, strict=True) if chosen),
            blocks=self.blocks[torch.from_numpy(mask)],
            **{name: getattr(self, name)[mask] for name in arrays},
        )


@dataclass(frozen=True, eq=False)
class Form:
    """Idealised form of the QK x blocks of a model; leading axes, such as several models, are allowed."""

    kind: str
    """"scalar": omega_h I; "common": omega_h Omega; "diagonal": diag(omega_h); "matrix": unchanged.
    """
    matrix: Float[Tensor, "... d_x d_x"]
    """Omega, with norm sqrt(d_x); I unless the kind is "common"."""
    isotropy: float = np.nan
    """Cosine between I and the matrix nearest to all active blocks."""
    shared: float = np.nan
    """Fraction of the active blocks' squared deviation from multiples of I that one matrix
    explains."""
    rotation: float = np.nan
    """Largest rotation angle in degrees if Omega is a multiple of a rotation other than I, else
    NaN."""

    def omega(
        self, blocks: Float[Tensor, "*models head d_x d_x"]
    ) -> Float[Tensor, "*models head d_x"]:
        """Factors of blocks, per coordinate."""
        if self.kind != "common":
            return blocks.diagonal(dim1=-2, dim2=-1)
        d_x = blocks.shape[-1]
        inner = (blocks * self.matrix).sum((-2, -1)) / d_x
        return inner[..., None].expand(*inner.shape, d_x)

    def fitted(
        self, blocks: Float[Tensor, "*models head d_x d_x"]
    ) -> Float[Tensor, "*models head d_x d_x"]:
        """The idealised blocks."""
        if self.kind == "matrix":
            return blocks
        omega = self.omega(blocks)
        if self.kind == "diagonal":
            return torch.diag_embed(omega)
        return omega.mean(-1)[..., None, None] * self.matrix

    def alignment(self, blocks: Float[Tensor, "head d_x d_x"]) -> Float[np.ndarray, " head"]:
        """|Cosine| between each block and its idealised block; 0 for a zero block."""
        whole, fitted = blocks.flatten(1).norm(dim=1), self.fitted(blocks).flatten(1).norm(dim=1)
        return (fitted / whole.masked_fill(whole == 0, 1)).numpy()


def common_matrix(
    blocks: Float[Tensor, "*models head d_x d_x"], weight: Float[Tensor, "*models head"]
) -> Float[Tensor, "*models d_x d_x"]:
    """Matrix nearest to all blocks up to a factor per head, with Frobenius norm sqrt(d_x) and trace >= 0.

    It is the first principal component of the blocks, each scaled to unit norm times its weight, and
    I if all blocks are multiples of I.

    Example:
        >>> common_matrix(torch.stack([torch.eye(2), -3 * torch.eye(2)]), torch.ones(2)).abs().round(decimals=4)
        tensor([[1., 0.],
                [0., 1.]])
    """
    d_x = blocks.shape[-1]
    flat = blocks.flatten(-2)
    norms = flat.norm(dim=-1)
    # Few heads, many entries: the small Gram matrix of the heads gives the component.
    weighted = flat / norms.masked_fill(norms == 0, 1)[..., None] * weight[..., None]
    _, vectors = torch.linalg.eigh(weighted @ weighted.mT)
    component = (vectors[..., None, :, -1] @ weighted).squeeze(-2)
    component = component * (d_x**0.5 / component.norm(dim=-1, keepdim=True).clamp_min(1e-300))
    matrix = component.unflatten(-1, (d_x, d_x))
    trace = matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
    return torch.where(trace < 0, -1.0, 1.0)[..., None, None] * matrix


def spread_over_heads(
    sizes: Float[Tensor, "*models head"], mu: Float[Tensor, "*models head d_y"], *, serving: float
) -> Float[Tensor, "*models"]:
    """max/min - 1 of sizes over the heads that serve a response, the largest over responses.

    Args:
        serving: A head serves response n if |mu_n| exceeds this fraction of the head's largest
            |mu|.
    Example:
        >>> sizes, mu = torch.tensor([1.0, 1.5, 9.0]), torch.tensor([[1.0, 0], [2.0, 0], [0, 1.0]])
        >>> spread_over_heads(sizes, mu, serving=0.25).item()
        0.5
    """
    serves = mu.abs() > serving * mu.abs().amax(-1, keepdim=True)
    wide = sizes[..., None].expand_as(mu)
    largest = wide.masked_fill(~serves, 0).amax(-2)
    smallest = wide.masked_fill(~serves, torch.inf).amin(-2)
    return (largest / smallest - 1).amax(-1)


def equal_heads(
    QK: Float[Tensor, "head d_x d_model"], *, tolerance: float
) -> Int[np.ndarray, " head"]:
    """Number of each head's group, from 0; heads of a group have equal QK circuits.

    Such heads attend with one pattern, so their outputs add up or cancel as in a single head.

    Args:
        QK: The active rows, those of the query's x.
        tolerance: Largest distance between two circuits of a group, relative to the larger norm.
    Example:
        >>> equal_heads(torch.tensor([[[1.0]], [[2.0]], [[1.0]]]), tolerance=0.05).tolist()
        [0, 1, 0]
    """
    flat = QK.flatten(1)
    norms = flat.norm(dim=1)
    distance = torch.cdist(flat[None], flat[None], compute_mode="donot_use_mm_for_euclid_dist")[0]
    near = (distance <= tolerance * torch.maximum(norms[:, None], norms)).numpy()
    if near.sum() == len(near):
        return np.arange(len(near))
    from scipy.sparse.csgraph import connected_components  # slow import

    _, groups = connected_components(near, directed=False)
    return groups.astype(np.int64)


def rotation_angle(matrix: Float[np.ndarray, "d_x d_x"], *, spread: float) -> float:
    """Largest rotation angle in degrees of a multiple of a rotation; NaN for any other matrix, also
    a reflection.

    Args:
        spread: Largest max/min - 1 of the singular values.
    Example:
        >>> round(rotation_angle(np.array([[0.0, -2.0], [2.0, 0.0]]), spread=0.25))
        90
    """
    left, sizes, right = np.linalg.svd(matrix)
    if sizes[0] > (1 + spread) * sizes[-1] or np.linalg.det(left @ right) < 0:
        return float("nan")
    return float(np.degrees(np.abs(np.angle(np.linalg.eigvals(left @ right))).max()))


def is_definite(matrix: Float[Tensor, "d_x d_x"], *, tolerance: float) -> bool:
    """True if a matrix is (nearly) symmetric with eigenvalues of one sign, as a metric is.

    Args:
        tolerance: Largest part of its norm that the symmetric part lacks.
    Example:
        >>> is_definite(torch.tensor([[2.0, 1.0], [1.0, 2.0]]), tolerance=0.05)
        True
    """
    part = (matrix + matrix.T) / 2
    eigenvalues = torch.linalg.eigvalsh(part)
    return bool(
        part.norm() >= (1 - tolerance) * matrix.norm() and eigenvalues[0] * eigenvalues[-1] > 0
    )


def read_heads(
    heads: Circuits, outputs: Float[Tensor, "batch head d_y"], *, tolerance: float | None = None
) -> Heads:
    """Statistics of every head, or of the groups of heads that are equal within a tolerance; OV
    circuits and outputs are summed within a group."""
    d_x, d_y = heads.omega.shape[2], heads.mu.shape[2]
    QK, each_OV = torch.from_numpy(heads.QK[0])[:, :d_x], torch.from_numpy(heads.OV[0])
    groups = np.arange(len(QK)) if tolerance is None else equal_heads(QK, tolerance=tolerance)
    member = torch.from_numpy(groups[None] == np.unique(groups)[:, None]).to(torch.float64)
    size = each_OV.flatten(1).norm(dim=1).clamp_min(1e-300)
    average = member * size / (member @ size)[:, None]
    OV = torch.einsum("gh,hmn->gmn", member, each_OV)
    mu = OV[:, -d_y:].diagonal(dim1=1, dim2=2)
    blocks = torch.einsum("gh,hij->gij", average, QK[:, :, :d_x])
    return Heads(
        names=tuple("+".join(map(str, np.flatnonzero(row))) for row in member.numpy()),
        blocks=blocks,
        mu=mu.numpy(),
        qk_diagonal=part_of(blocks.diagonal(dim1=1, dim2=2), blocks).numpy(),
        ov_last_entry=part_of(mu, OV).numpy(),
        share=share_of(torch.einsum("gh,bhn->bgn", member, outputs)).numpy(),
    )


def form_of(active: Heads, score: str, limits: Thresholds) -> Form:
    """Form of the active groups of equal heads."""
    blocks, d_y = active.blocks, active.mu.shape[1]
    identity = torch.eye(blocks.shape[-1], dtype=blocks.dtype, device="cpu")
    if not blocks.any():
        return Form("scalar", identity)
    matrix = common_matrix(blocks, torch.from_numpy(active.share))
    isotropy = float(matrix.diagonal().mean())
    kinds = ("scalar", identity), ("common", matrix)
    off_identity, off_common = ((1 - Form(*kind).alignment(blocks) ** 2).sum() for kind in kinds)
    shared = float(1 - off_common / off_identity) if off_identity > 1e-12 else 0.0
    if not is_normalised(score) or d_y > 1:
        return Form("diagonal" if is_normalised(score) else "matrix", identity, isotropy, shared)
    metric = is_definite(matrix, tolerance=limits.equal)
    if not metric:
        # Unlike a metric, another matrix has no sign of its own: it is that of sum mu * omega.
        factors = Form("common", matrix).omega(blocks)[:, 0].numpy()
        matrix = -matrix if factors @ active.mu[:, 0] < 0 else matrix
    angle = np.nan if metric else rotation_angle(matrix.numpy(), spread=limits.omega_spread)
    alone = len(blocks) == 1 and (metric or not np.isnan(angle))
    if 1 - isotropy**2 > limits.equal and (
        alone or (len(blocks) > 1 and shared >= limits.qk_diagonal)
    ):
        return Form("common", matrix, isotropy, shared, angle)
    return Form("scalar", identity, isotropy, shared)


@dataclass(frozen=True, eq=False)
class Scales:
    """Numbers over the active groups of equal heads; omega is the factor of a head on its form."""

    omega_spread: float
    """max/min - 1 over heads of |omega_mean|. With several responses it is that of the norm of
    omega, over the heads that serve the same response."""
    zero_sum: float
    """|sum mu| / sum |mu|, the largest over responses."""
    unserved: tuple[int, ...]
    """Responses that no head serves: their sum of |mu|, relative to the largest, is below the limit
    `share`."""
    eta: Float[np.ndarray, " d_y"]
    """Step size of the model, f'(0) sum mu * omega_mean; unit 1/x^2."""
    eta_optimal: float
    """Best debiased step size for the task, 1/(1 + (1 + s^2) d/L); NaN unless x is isotropic."""
    theta: Float[np.ndarray, "d_y d_x"]
    """Step size of response n along each coordinate, f'(0) sum mu_n diag(QK); unit 1/x^2."""
    supports: tuple[tuple[int, ...], ...]
    """Supports that the task states; otherwise the coordinates where theta_n exceeds half of its
    maximum."""
    support_leak: float
    """Largest |theta_n| off the support divided by the mean on it; 0 for full supports."""
    theta_spread: float
    """max/min - 1 of theta_n on its support, the largest over responses."""
    step: Float[Tensor, "d_y d_x d_x"]
    """Matrix of the step, f'(0) sum mu_n times the idealised QK x blocks; unit 1/x^2."""
    descent: float
    """Smallest eigenvalue of the step's symmetric part divided by the largest |eigenvalue|, in coordinates in which the
    task's covariance of x is the identity; the smallest over responses. Negative if the step ascends in some direction."""


def scales_of(
    groups: Heads, form: Form, weights: Weights, task: TaskConfig, limits: Thresholds
) -> Scales:
    """Numbers of the active groups of equal heads.

    Source:
        He et al. 2025, arXiv 2503.12734, eq. (4.2)-(4.5) and (5.7) (theta).
    """
    model = weights.model
    slope = score_derivative_at_zero(
        model.score, model.score_slope, context_length=task.context_length
    )
    mu, fitted = groups.mu, form.fitted(groups.blocks)
    omega = form.omega(groups.blocks).numpy()
    means = omega.mean(1)
    sizes = np.abs(means) if task.d_y == 1 else np.linalg.norm(omega, axis=1)
    theta = slope * mu.T @ groups.blocks.diagonal(dim1=1, dim2=2).numpy()
    large = theta > ON_SUPPORT * np.abs(theta).max(1, keepdims=True)
    supports = task.supports or tuple(tuple(np.flatnonzero(row).tolist()) for row in large)
    leak, theta_spread = _on_supports(theta, supports)
    total = np.abs(mu).sum(0) if len(mu) else np.full(task.d_y, np.nan)
    with np.errstate(invalid="ignore"):  # NaN if all mu are 0
        zero_sum = np.abs(mu.sum(0)) / np.abs(mu).sum(0)
    tensors = torch.from_numpy(sizes), torch.from_numpy(mu)
    spread = spread_over_heads(*tensors, serving=limits.leak) if len(sizes) else np.nan
    step = slope * torch.einsum("gn,gij->nij", tensors[1], fitted)
    return Scales(
        omega_spread=float(spread),
        zero_sum=float(zero_sum.max()),
        unserved=tuple(np.flatnonzero(total <= limits.share * total.max()).tolist()),
        eta=slope * means @ mu,
        eta_optimal=_optimal_step(task),
        theta=theta,
        supports=supports,
        support_leak=leak,
        theta_spread=theta_spread,
        step=step,
        descent=descent(step, task),
    )


def _on_supports(theta: np.ndarray, supports: tuple[tuple[int, ...], ...]) -> tuple[float, float]:
    """Leak of theta off its supports and spread on them; NaN for an empty support."""
    leak, spread = 0.0, 0.0
    for row, support in zip(theta, supports, strict=True):
        on, off = row[list(support)], np.delete(row, list(support))
        if not len(on) or on.min() <= 0:
            return float("nan"), float("nan")
        leak = max(leak, float(np.abs(off).max(initial=0) / on.mean()))
        spread = max(spread, float(np.ptp(on) / on.min()))
    return leak, spread


def _optimal_step(task: TaskConfig) -> float:
    if task.covariance.kind != "identity" or task.supports is not None or task.drift != 1:
        return float("nan")
    ratio = task.noise_variance / task.signal_var
    step = debiased_step_size(d_x=task.d_x, context_length=task.context_length, noise_var=ratio)
    return step / task.covariance.scale


@dataclass(frozen=True)
class Faithfulness:
    """Agreement of a substitute's predictions with those of the model."""

    r2: float
    """1 - E|model - substitute|^2 / E|model|^2, over prompts and responses."""
    r2_sem: float
    rms: float
    """Root of the mean square of model - substitute, unit y."""
    rms_sem: float


def faithfulness(
    prediction: Float[Tensor, "batch d_y"], substitute: Float[Tensor, "batch d_y"]
) -> Faithfulness:
    """R^2 and error of a substitute's predictions, with standard errors over prompts.

    Example:
        >>> faithfulness(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [2.0]])).r2
        1.0
    """
    loss, sem, r2, r2_sem = loss_and_r2(substitute.numpy(), prediction.numpy())
    rms = loss**0.5
    return Faithfulness(r2, r2_sem, rms, sem / (2 * rms) if rms else 0.0)


def idealised(
    weights: Weights,
    x_blocks: Float[Tensor, "head d_x d_x"],
    mu: Float[Tensor, "head d_y"],
) -> Weights:
    """Heads that compare x with x by `x_blocks` and read y_n into prediction n by `mu`, and nothing
    else."""
    d_x, d_y = weights.d_x, weights.d_y
    return from_circuits(
        torch.nn.functional.pad(x_blocks, (0, d_y, 0, d_y)),
        torch.nn.functional.pad(torch.diag_embed(mu), (0, 0, d_x, 0)),
        score=weights.model.score,
        score_slope=weights.model.score_slope,
        attend_to_self=weights.model.attend_to_self,
    )


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


def require_text(number: str) -> None:
    """Refuses a number that nobody could read.

    Raises:
        ValueError: If texts.toml does not say what the number is.
    """
    if number not in TEXTS["numbers"]:
        raise ValueError(
            f"A number of a label needs a text in texts.toml, [numbers], got {number}."
        )


@dataclass(frozen=True)
class Criterion:
    """A number that a label needs, with its limit."""

    name: str
    """Name of the number; `TEXTS["numbers"]` has its meaning."""
    value: float
    limit: float
    least: bool = False
    """True: the value must be at least the limit. False: at most."""

    def __post_init__(self) -> None:
        require_text(self.name)

    @property
    def holds(self) -> bool:
        """True if the number keeps its limit; a number that is not defined does not."""
        return bool(self.value >= self.limit if self.least else self.value <= self.limit)

    @property
    def bound(self) -> str:
        """The limit with its direction, such as "≥ 0.98"."""
        return f"{'≥' if self.least else '≤'} {self.limit:g}"

    def __str__(self) -> str:
        """The number beside its limit, with its meaning if the limit is broken."""
        if self.holds:
            return f"{self.name} {self.value:.4g} (limit {self.bound})"
        name = f"{self.name} ({TEXTS['numbers'][self.name]})"
        if np.isnan(self.value):
            return f"{name} is not defined"
        # A huge number means that predictions overflow.
        value = f"{self.value:.3f}" if abs(self.value) < 1e6 else f"{self.value:.1e}"
        return f"{name} is {value}, {'below' if self.least else 'above'} the limit {self.limit:g}"


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


def named(pattern: str, text: str, *checks: Criterion) -> Decision:
    """The pattern if all its numbers keep their limits; otherwise "undetermined"."""
    holds = all(each.holds for each in checks)
    if not holds:
        return Decision("undetermined", f"no {pattern}: {text}", checks)
    return Decision(pattern, text, checks)


def head_decisions(heads: Heads, form: Form, limits: Thresholds) -> list[Decision]:
    """Label of each head."""
    return [_head_decision(heads, form, head, limits) for head in range(len(heads.share))]


def _head_decision(heads: Heads, form: Form, head: int, limits: Thresholds) -> Decision:
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


ASSUMED = "; the covariance of x is not stated, so that descent is measured with the identity"


def assumed_covariance(decision: Decision, task: TaskConfig) -> str:
    """Sentence for a label that rests on the covariance of x, if nobody stated it; else empty."""
    deciding = decision.checks if decision.failed is None else (decision.failed,)
    rests = any(each.name == "descent" for each in deciding)
    return ASSUMED if rests and "covariance" not in task.given else ""


def model_decision(
    heads: Heads, labelled: list[Decision], evidence: Evidence, limits: Thresholds
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
        return named("kernel_regression", f"all active heads are {kinds.pop()}", *explained)
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
    return named(pattern, text, omega_spread, zero_sum, *descends, *explained, does_it)


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
    return named("linear_gd", text, *learned, *explained, descends, does_it)


def off_identity(M: Float[Tensor, "d_x d_x"]) -> str:
    """Fraction of the matrix of a step, by norm, that is not a multiple of the identity, as text."""
    rest = M - M.diagonal().mean() * torch.eye(len(M), dtype=M.dtype, device=M.device)
    return f"{float(rest.norm() / M.norm()):.0%} of its matrix is not a multiple of the identity"


def _one_task(form: Form) -> tuple[str, str]:
    """Pattern and text for heads of both signs whose mu cancel: a debiased step, with or without preconditioner."""
    if form.kind == "scalar":
        return "debiased_gd", "heads of both signs"
    shape = f"one matrix with isotropy {form.isotropy:.3f} for all heads"
    if not np.isnan(form.rotation):
        shape = f"omega times one rotation by up to {form.rotation:.0f} degrees for all heads"
    return "preconditioned_gd", f"heads of both signs; QK is {shape}"


def _off_diagonal(heads: Heads) -> float:
    """Root mean square of the off-diagonal entries of the responses' steps, relative to the mean of the diagonal; the largest
    over responses. It is as large as the noise of the diagonal if a circuit has noise on all entries."""
    steps = torch.einsum("hn,hij->nij", torch.from_numpy(heads.mu), heads.blocks)
    d_x = steps.shape[-1]
    off = steps - torch.diag_embed(steps.diagonal(dim1=1, dim2=2))
    size = (off.square().sum((1, 2)) / max(1, d_x * (d_x - 1))).sqrt()
    return float((size / steps.diagonal(dim1=1, dim2=2).mean(1).abs()).max())


def _several_tasks(
    heads: Heads,
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
            return named("task_heads", text, *even, task_leak, ascends_nowhere, *explained, does_it)
        if smallest >= EVEN:
            full = all(len(each) == heads.blocks.shape[1] for each in scales.supports)
            noise = NOISE_OF_WEIGHTS * _off_diagonal(active)
            uniform = full and scales.theta_spread <= max(limits.equal, noise)
            pattern = "debiased_gd" if uniform else "weighted_preconditioned_gd"
            text = f"opposite heads serve all responses, mu within {1 - smallest:.0%}"
            descends = [] if uniform else [_descends(evidence, DESCENDS)]
            return named(pattern, text, *even, *descends, *explained, does_it)
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
    return named("superposition", text, even[0], *steps, ascends_nowhere, *explained, does_it)
