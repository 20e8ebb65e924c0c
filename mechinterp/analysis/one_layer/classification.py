"""Result of classifying a model that is one layer of attention: its label, the labels of its heads,
the evidence, and the verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float

from mechinterp import figures
from mechinterp.analysis.circuits import TOKEN_NUMBERS, Circuits, by_entry
from mechinterp.analysis.classified import (
    NOTHING_EXCLUDED,
    Classified,
    Verdict,
    calibration_text,
    chance_text,
    is_behind,
    nearest_learners,
)
from mechinterp.analysis.evidence import NUMBER_COLUMNS, Criterion, Number, require_text
from mechinterp.analysis.labels import LEARNER_TEXTS, NO_LABEL_TEXTS, PAIRS, PATTERNS, TEXTS
from mechinterp.analysis.learners.nearest import NEAR_R2, Nearby
from mechinterp.analysis.number_format import beside, cell, digits, explained
from mechinterp.analysis.one_layer.label_rules import Evidence
from mechinterp.analysis.one_layer.qk_form import QKForm
from mechinterp.analysis.one_layer.scales import Scales
from mechinterp.analysis.result import HEAD_COLUMNS, Band, Card, Table, known
from mechinterp.display import counted

ADDS = "adds the y of tokens, weighted by the similarity of token and query"
MOST_LISTED = 8
"""More numbers than this are shown by their range."""
NO_AVERAGE = ("{s}", "max({s}, 0)")
"""Weights of pairs that do not sum to 1."""
HEAD_P_VALUES = ("qk_diagonal", "ov_last_entry")
"""Numbers of heads that have a p-value under random heads."""
UNSHOWN = ("unserved", "step")
"""Scales that are no numbers of evidence."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Classification(Evidence, Classified):
    """Label of a model and of its heads, with the evidence.

    `label` is one of "kernel_regression", "debiased_gd", "preconditioned_gd", "weighted_preconditioned_gd",
    "task_heads", "superposition", "linear_gd", "unstructured", "undetermined".
    """

    heads_title: ClassVar = f"""Heads: share = part of the output; a head multiplies x·x by omega and y by mu
  head  label           share  omega (1/x²)  {"mu":>18}"""

    COLUMNS: ClassVar = HEAD_COLUMNS | {
        "share": "Standard deviation of a head's output over prompts, divided by the sum of these over heads.",
        "omega_form": "Factor of each head on the matrix that all heads share, if there is one; otherwise omega_mean.",
        "task_leak": "Second largest |mu_n| of a head divided by the largest; 0 for one response.",
        "label": "Kind of head: signs of omega and mu, or why the head has none.",
        **{name: known(Circuits)[name] for name in ("omega", "omega_mean", "mu", *TOKEN_NUMBERS)},
        **{f"{n}_p": f"Fraction of random heads that reach {n}." for n in HEAD_P_VALUES},
        **NUMBER_COLUMNS,
    }
    """Meanings of the columns that are no field."""
    checks: tuple[Criterion, ...]
    """Numbers that decided the label, with their limits; the first broken limit makes a model `undetermined`."""
    labels: tuple[str, ...]
    """Per head: "positive", "negative", "mismatched", "mixed", "unstructured" or "dummy"."""
    share: Float[np.ndarray, " head"]
    circuits: Circuits
    omega_form: Float[np.ndarray, " head"]
    task_leak: Float[np.ndarray, " head"]
    head_p_values: dict[str, Float[np.ndarray, " head"]]
    """P-values of each head's `qk_diagonal` and `ov_last_entry`: fraction of random heads that
    reach the value."""
    random_ranges: Mapping[str, tuple[float, float]]
    """5% and 95% quantiles of each number over randomly initialised models (or heads), by the name
    of the number."""
    n_random: int
    """Number of randomly initialised models behind the p-values. The smallest possible p-value is 1
    / (n_random + 1)."""
    kernel: str
    """Weight of a pair as a function of its score s, such as "exp({s})", up to a factor."""
    calibrated: bool
    """True if the calibration applies to this label: default limits, attention alone, and a task
    in the range of the calibration models (`PATTERNS_RANGE`)."""
    caveat: str = ""
    """Note if the numbers do not describe the model's own prediction; else empty."""

    @property
    def sign_matching(self) -> bool:
        """True if omega and mu of every active head have the same sign."""
        return {"dummy"} < {"dummy", *self.labels} <= {"positive", "negative", "dummy"}

    @property
    def verdict(self) -> Verdict:
        """Sentences: what the model computes, how certain that is, and which learners are ruled out."""
        pattern, near, p = self.label, self.near, self.p_values["task_r2"]
        chance = f"; {chance_text(p, self.n_random, 'random weights')}"
        if pattern in NO_LABEL_TEXTS:
            computes = f"{NO_LABEL_TEXTS[pattern].format(kind='formulas')}: {self.reason}"
            return nearest_learners(computes, near, chance=chance, doubt=self.task_doubt)
        label, used = PATTERNS[pattern], self.components
        if pattern == "kernel_regression":
            active = np.array(self.labels) != "dummy"
            computes = _smoother(
                self.form, self.omega_form[active], self.circuits.mu[0][active], self.kernel
            )
        else:
            computes = f"{label.text} ({pattern}): {_step(pattern, self.scales)}"
            if used is not None and used.n_components is not None:
                count = f"{used.n_components} of {len(used.learned)}"
                computes += f"; it uses {count} principal directions of x"
        sure = (
            f"this formula, with nothing fitted, explains {explained(self.learner.r2, self.learner.r2_sem)} of "
            f"{self.caveat or 'the predictions'}{chance}{calibration_text(label) if self.calibrated else ''}"
        )
        others = [n for n, name in enumerate(near.learners) if name not in label.cases]
        behind = [n for n in others if is_behind(near.lead[n], near.lead_sem[n])]
        close = [n for n in others if n not in behind and near.r2[n] >= NEAR_R2]
        alike = "; ".join(_other(near, n) for n in close)
        is_not = _other(near, behind[0]) if behind else NOTHING_EXCLUDED
        return Verdict(computes, sure, is_not, alike, self.task_doubt)

    def _columns(self) -> dict[str, np.ndarray]:
        """Numbers of the heads by name, [head] or [head, entry]."""
        scales = self.circuits
        columns = {"share": self.share, "omega": scales.omega[0]}
        columns |= {"omega_mean": scales.omega_mean[0], "omega_form": self.omega_form}
        columns["mu"] = scales.mu[0]
        for name in TOKEN_NUMBERS:
            columns[name] = getattr(scales, name)[0]
            if name in self.head_p_values:
                columns[f"{name}_p"] = self.head_p_values[name]
        return columns | {"task_leak": self.task_leak}

    def to_frame(self) -> pd.DataFrame:
        """One row per head: label, share and circuit scalars, with p-values under random heads."""
        frame = pd.DataFrame(by_entry(self._columns()))
        frame.insert(0, "head", range(len(frame)))
        frame.insert(1, "label", list(self.labels))
        return frame

    def sentences(self) -> list[str]:
        """The verdict, the loss, the pattern with its reason, and the kinds of heads."""
        labels = list(dict.fromkeys(self.labels))
        kinds = ", ".join(f"{self.labels.count(label)} {label}" for label in labels)
        return [
            *self.summary,
            f"The pattern is {self.label}: {self.reason}.",
            f"{counted(len(self.labels), 'head')}: {kinds}.",
        ]

    def tables(self) -> dict[str, Table]:
        """The evidence, and all numbers of the heads."""
        return {
            "pattern": Table(self.evidence_frame(), "Evidence", least_p=1 / self.n_random),
            "heads": Table(
                self.to_frame(), "Heads", least_p=1 / (len(self.labels) * self.n_random)
            ),
        }

    @property
    def brief(self) -> str:
        """The R² behind the label, or the reason why there is none."""
        if self.label in NO_LABEL_TEXTS:
            return f"; {self.reason}"
        return f", {explained(self.learner.r2, self.learner.r2_sem)}"

    def head_lines(self, rows: int) -> list[str]:
        """A line per head, in the columns of `heads_title`."""
        values = zip(self.labels, self.share, self.omega_form, self.circuits.mu[0], strict=True)
        return [
            f"  {head:>4}  {label:<12}  {digits(share):>7}  {digits(omega):>12}  {_each_or_range(mu):>18}"
            for head, (label, share, omega, mu) in enumerate(values)
        ]

    @property
    def row(self) -> dict[str, object]:
        """Row of this model in a table of many models: as of every model, and labels and scales of the heads, and sums over
        heads."""
        mu, active = self.circuits.mu[0].mean(1), np.array(self.labels) != "dummy"
        return {
            **super().row,
            "labels": list(self.labels),
            "omega": self.circuits.omega_mean[0].tolist(),
            "mu": mu.tolist(),
            "omega_abs": np.abs(self.omega_form)[active].mean() if active.any() else np.nan,
            "mu_abs": np.abs(mu).sum(),
            "eta": self.scales.eta.mean(),
        }

    def figures(self) -> dict[str, go.Figure]:
        """The evidence."""
        return {"evidence": self.plot()}

    @property
    def evidence(self) -> dict[str, Any]:
        """Numbers behind the pattern by name, of any shape; a standard error has the name of its number with `_sem`."""
        of_components = ("n_components", "learned", "off_diagonal")
        return {
            "sign_matching": self.sign_matching,
            "checks": [asdict(each) | {"holds": each.holds} for each in self.checks],
            **{name: value for name, value in vars(self.scales).items() if name not in UNSHOWN},
            **{f"substitution_{name}": value for name, value in asdict(self.substitution).items()},
            **{f"learner_{name}": value for name, value in asdict(self.learner).items()},
            **{name: getattr(self.components, name, None) for name in of_components},
            "form": self.form.kind,
            **{name: getattr(self.form, name) for name in ("isotropy", "shared", "rotation")},
            **{name: getattr(self, name) for name in ("p_values", "n_random", "random_ranges")},
        }

    def evidence_frame(self) -> pd.DataFrame:
        """One row per number behind the pattern, with its error, its limit, and its range and p-value under random weights."""
        return pd.DataFrame([number.row for number in self.numbers])

    @property
    def numbers(self) -> list[Number]:
        """Numbers behind the pattern, in the order of the page."""
        for name in self.compared:
            require_text(name)
        checks = {each.name: each for each in self.checks}
        known = {name: each.value for name, each in checks.items()} | self.compared | self.evidence
        return [
            Number(
                name=name,
                value=value,
                sem=known.get(f"{name}_sem", np.nan),
                check=checks.get(name),
                band=self._band(name, value),
                p_value=self.p_values.get(name, np.nan),
                entry=n if np.ndim(known[name]) else None,
            )
            for name in TEXTS["numbers"]
            if known.get(name) is not None
            for n, value in enumerate(np.ravel(known[name]).tolist())
        ]

    def cards(self) -> list[Card]:
        """One card per head, with the numbers for which random heads have a range."""
        ranged = {n: v for n, v in self._columns().items() if n in self.random_ranges}
        cards = []
        for head, label in enumerate(self.labels):
            meaning = TEXTS["heads"][label]
            # A score without normalisation attends to opposite tokens with negative weights: omega
            # and mu can flip together.
            if self.kernel in NO_AVERAGE and label in ("positive", "negative"):
                meaning = ADDS
            facts, bands = {}, {}
            for name, values in ranged.items():
                for column, of_heads in by_entry({name: values}).items():
                    facts[column] = cell(of_heads[head])
                    if (band := self._band(name, of_heads[head])) is not None:
                        bands[column] = band
            color = figures.head_color(head)
            cards.append(Card(f"head {head}", label, meaning, color, facts, bands))
        return cards

    def _band(self, name: str, value: float) -> Band | None:
        """Range of a number under random weights; None without a finite number or range."""
        low, high = self.random_ranges.get(name, (np.nan, np.nan))
        return Band(float(value), low, high) if np.isfinite([value, low, high]).all() else None

    def to_document(self) -> dict:
        """Pattern, heads, evidence and verdict."""
        columns = {name: values.tolist() for name, values in self._columns().items()}
        heads = [
            {"layer": 0, "head": head, "label": label} | {n: v[head] for n, v in columns.items()}
            for head, label in enumerate(self.labels)
        ]
        return self.document(heads)

    def plot(self) -> go.Figure:
        """Numbers behind the label, beside their limits and their ranges under random weights."""
        shown = [each for each in self.numbers if each.band or each.check]
        numbers = {each.column: (each.value, each.sem) for each in shown}
        ranges = {each.column: (each.band.low, each.band.high) for each in shown if each.band}
        bounds = {each.column: each.check.limit for each in shown if each.check}
        title, random = f"Evidence: {self.label}", "random weights, 5% to 95%"
        return figures.beside_ranges(numbers, ranges, bounds, title=title, range_name=random)


def _each_or_range(values: Float[np.ndarray, " d_y"]) -> str:
    """One number per response; for more than three responses, their range."""
    if len(values) > 3:
        return f"{digits(values.min())} to {digits(values.max())}"
    return ", ".join(map(digits, values))


def _other(near: Nearby, n: int) -> str:
    """Another learner with its R², and how much lower that is than the R² of the formula."""
    name, lead = near.learners[n], beside(near.lead[n], near.lead_sem[n])
    scaled = "the formula" if name == "ridge" else "both"
    return f"{LEARNER_TEXTS[name]}, R² = {near.r2[n]:.4f}, {lead} ({scaled} at the best factor)"


def _smoother(
    form: QKForm, omega: Float[np.ndarray, " head"], mu: Float[np.ndarray, "head d_y"], kernel: str
) -> str:
    similar = "x_lᵀΩx" if form.kind == "common" else "x_l·x"
    if len(omega) == 1:
        weight = kernel.format(s=f"{digits(omega[0])} {similar}")
        return (
            f"an average of y_l over {PAIRS} (kernel_regression): ŷ = {_vector(mu[0])} Σ_l w_l y_l, "
            f"w_l ∝ {weight}, Σ_l w_l = 1"
        )
    pairs = zip(omega[:MOST_LISTED], mu, strict=False)
    scales = "; ".join(f"μ = {_vector(m)}, ω = {digits(o)}" for o, m in pairs)
    more = "; ..." if len(omega) > MOST_LISTED else ""
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
    if len(values) > MOST_LISTED:
        return f"{len(values)} numbers from {digits(min(values))} to {digits(max(values))}"
    return f"({', '.join(f'{value:.2f}' for value in values)})"
