"""What is found of a model that is one layer of attention: its label and those of its heads, with the evidence."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float

from mechinterp import figures
from mechinterp.analysis.classified import Classified
from mechinterp.analysis.labels import NO_LABEL
from mechinterp.analysis.number_format import cell, digits, explained, with_error
from mechinterp.analysis.one_layer.circuits import NUMBERS, Circuits
from mechinterp.analysis.one_layer.label_rules import Evidence
from mechinterp.analysis.one_layer.verdict import heads_verdict
from mechinterp.analysis.result import Band, Card, Table
from mechinterp.analysis.verdict import Verdict, spelled_out
from mechinterp.display import counted

MEANINGS = {
    "positive": "looks at tokens whose x is like the query's and adds their y",
    "negative": "looks at tokens whose x is unlike the query's and takes their y away",
    "mismatched": "omega and mu differ in sign: what it looks at and what it adds pull apart",
    "mixed": "entries of its omega, or of its mu, have both signs",
    "unstructured": "its circuits are not of the form that omega and mu describe",
    "dummy": "adds next to nothing to the prediction",
}
ADDS = "adds y weighted by how alike token and query are"
NO_AVERAGE = ("{s}", "max({s}, 0)")
SCALES = (
    *("omega_spread", "zero_sum", "eta", "eta_optimal"),
    *("theta", "supports", "support_leak", "theta_spread"),
)
HOW = {
    "pattern": "the first definition that all numbers below allow",
    "sign_matching": "omega and mu of every active head have the same sign",
    "omega_spread": "max/min |omega| over active heads, minus 1",
    "zero_sum": "|Σ mu| / Σ |mu|",
    "eta": "Σ mu·omega, times f'(0): the step",
    "optimal eta for the task": "1 / (1 + (1 + s²) d_x / L), s² the noise variance over the signal's",
    "R² with idealised heads": "of the model's predictions, by heads that keep omega and mu only",
    "R² of the closed form": "of the model's predictions, by the learner built from omega and mu",
    "R² on its task": "1 − loss / loss of predicting 0",
    "principal components used": "directions that are more than half learned",
    "learned part of each component": "eᵀ M e over its value at the optimum",
    "share of E y² predicted off the components": "by the entries of M between two directions",
}


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Classification(Evidence, Classified):
    """Label of a model and of its heads, with the evidence.

    `pattern` is one of "kernel_regression", "debiased_gd", "preconditioned_gd", "weighted_preconditioned_gd",
    "task_heads", "superposition", "linear_gd", "unstructured", "undetermined".
    """

    heads_title: ClassVar = f"""Heads: share of the output; omega and mu are what one multiplies x·x and y by
  head  label           share  omega (1/x²)  {"mu":>18}"""

    labels: tuple[str, ...]
    """Per head: "positive", "negative", "mismatched", "mixed", "unstructured" or "dummy"."""
    share: Float[np.ndarray, " head"]
    """Standard deviation of a head's output over prompts, divided by the sum of that over heads."""
    circuits: Circuits
    sign_matching: bool
    """Whether omega and mu of every active head have the same sign."""
    omega_form: Float[np.ndarray, " head"]
    """Mean over coordinates of each head's factor of the form: its factor on the common matrix, else omega_mean."""
    task_leak: Float[np.ndarray, " head"]
    """Second largest |mu_n| of a head over the largest; 0 for one response."""
    head_p_values: dict[str, Float[np.ndarray, " head"]]
    """Fraction of heads of such models that reach a head's `qk_diagonal` and `ov_last_entry`."""
    random_ranges: Mapping[str, tuple[float, float]]
    """Where randomly initialised models (or heads) lie, 5% to 95% of them, by the name of the number."""
    n_random: int
    """Randomly initialised models behind the p-values; the least that one can be is 1 / (n_random + 1)."""
    kernel: str
    """Weight of a pair by its score s, such as "exp({s})", up to a factor."""
    calibrated: bool
    """Whether the label was given as in the calibration: by the default limits, from attention alone."""
    caveat: str
    """What the numbers are of, where they are not of the model's own prediction."""

    @property
    def verdict(self) -> Verdict:
        """What the model computes, how sure that is, and what it is not."""
        return heads_verdict(self)

    def to_frame(self) -> pd.DataFrame:
        """One row per head: label, share and circuit scalars, with what random heads reach."""
        frame = self.circuits.to_frame()
        frame.insert(1, "label", list(self.labels))
        frame.insert(2, "share", self.share)
        if self.circuits.mu.shape[1] > 1:
            frame["task_leak"] = self.task_leak
        if self.form.kind == "common":
            frame.insert(int(frame.columns.get_loc("omega_mean")), "omega_form", self.omega_form)
        for name, values in self.head_p_values.items():
            frame.insert(int(frame.columns.get_loc(name)) + 1, f"{name}_p", values)
        if self.components is not None and self.components.n_components is not None:
            frame["n_components"] = self.components.n_components
        return frame

    def sentences(self) -> list[str]:
        """The pattern and why, the verdict, the loss, and the kinds of heads."""
        labels = list(dict.fromkeys(self.labels))
        kinds = ", ".join(f"{self.labels.count(label)} {label}" for label in labels)
        return [
            *self.told_first,
            f"The pattern is {self.pattern}: {self.reason}.",
            f"{counted(len(self.labels), 'head')}: {kinds}.",
        ]

    def tables(self) -> dict[str, Table]:
        """The evidence, and every number of the heads."""
        return {
            "pattern": Table(self.evidence_frame(), "Evidence"),
            "heads": Table(
                self.to_frame(), "Heads", least_p=1 / (len(self.labels) * self.n_random)
            ),
        }

    @property
    def brief(self) -> str:
        """What earned the label, or why there is none."""
        if self.pattern in NO_LABEL:
            return f"; {spelled_out(self.reason)}"
        return f", {explained(self.learner.r2, self.learner.r2_sem)}"

    def head_lines(self, rows: int) -> list[str]:
        """A line per head, in the columns of `heads_title`."""
        values = zip(self.labels, self.share, self.omega_form, self.circuits.mu, strict=True)
        return [
            f"  {head:>4}  {label:<12}  {digits(share):>7}  {digits(omega):>12}  {_each_or_range(mu):>18}"
            for head, (label, share, omega, mu) in enumerate(values)
        ]

    @property
    def of_a_row(self) -> dict[str, object]:
        """Labels and scales of the heads."""
        scales = self.circuits
        return {
            "labels": list(self.labels),
            "omega": scales.omega_mean.tolist(),
            "mu": scales.mu.mean(1).tolist(),
        }

    @property
    def notes(self) -> list[str]:
        """Where random weights lie in the numbers of the table and of the evidence."""
        ranges = [
            f"{name} {digits(low)} to {digits(high)}"
            for name, (low, high) in self.random_ranges.items()
            if low < high
        ]
        return [
            f"Of {self.n_random} models with random weights 90% lie within {', '.join(ranges)}."
        ]

    def figures(self) -> dict[str, go.Figure]:
        """Heads in the plane of omega and mu."""
        return {"heads": self.plot()}

    def evidence_frame(self) -> pd.DataFrame:
        """One row per number behind the pattern, beside that of random weights."""
        scales, used = self.scales, self.components
        values = {
            "pattern": self.pattern,
            "sign_matching": str(self.sign_matching).lower(),
            "omega_spread": cell(scales.omega_spread),
            "zero_sum": cell(scales.zero_sum),
            "eta": ", ".join(cell(eta) for eta in scales.eta),
            "optimal eta for the task": cell(scales.eta_optimal),
            "R² with idealised heads": with_error(self.substitution.r2, self.substitution.r2_sem),
            "R² of the closed form": with_error(self.learner.r2, self.learner.r2_sem),
            "R² on its task": cell(self.loss.r2),
        }
        if used is not None:
            n = used.n_components
            many = "–" if n is None else f"{n} of {len(used.learned)}"
            values["principal components used"] = many
            values["learned part of each component"] = ", ".join(map(cell, used.learned))
            values["share of E y² predicted off the components"] = cell(used.off_diagonal)
        bands = {
            "omega_spread": self._band("omega_spread", scales.omega_spread),
            "zero_sum": self._band("zero_sum", scales.zero_sum),
            "R² with idealised heads": self._band("substitution_r2", self.substitution.r2),
            "R² on its task": self._band("task_r2", self.loss.r2),
        }
        rows = [(n, v, next(iter(bands.get(n, ())), ""), HOW[n]) for n, v in values.items()]
        reach = "fraction of random models that reach it"
        rows += [
            (f"p of {name}", cell(p, "p_value", 1 / self.n_random), "", reach)
            for name, p in self.p_values.items()
        ]
        return pd.DataFrame(rows, columns=["evidence", "value", "random_weights", "how"])

    def cards(self) -> list[Card]:
        """What is known of each head, beside where heads with random weights lie."""
        scales, cards = self.circuits, []
        # A score that is no average looks at unlike tokens with weights below 0: omega and mu flip together.
        averages = self.kernel not in NO_AVERAGE
        for head, label in enumerate(self.labels):
            omega, mu, share = scales.omega_mean[head], scales.mu[head], self.share[head]
            diagonal, reads_y = scales.qk_diagonal[head], scales.ov_last_entry[head]
            facts = {
                "share of output": ("share", [share], f"{share:.1%}"),
                "omega (1/x²)": ("omega_mean", [omega], f"{omega:+.3g}"),
                "mu": ("mu", mu, ", ".join(f"{each:+.3g}" for each in mu)),
                "QK diagonal": ("qk_diagonal", [diagonal], cell(diagonal)),
                "OV reads y only": ("ov_last_entry", [reads_y], cell(reads_y)),
            }
            texts = {fact: text for fact, (_, _, text) in facts.items()}
            bands = {
                fact: tuple(band for value in values for band in self._band(name, value))
                for fact, (name, values, _) in facts.items()
            }
            told = averages or label not in ("positive", "negative")
            meaning = MEANINGS[label] if told else ADDS
            color = figures.head_color(head)
            cards.append(Card(f"head {head}", label, meaning, color, texts, bands))
        return cards

    def _band(self, name: str, value: float) -> tuple[Band, ...]:
        """The range of random weights beside a number; none where there is no number or no range."""
        low, high = self.random_ranges[name]
        return (Band(float(value), low, high),) if np.isfinite([value, low, high]).all() else ()

    def to_document(self) -> dict:
        """Pattern, heads, evidence and verdict."""
        scales = self.circuits
        columns = {
            "layer": [0] * len(self.labels),
            "head": range(len(self.labels)),
            "label": self.labels,
            "share": self.share,
            "omega": scales.omega.tolist(),
            "omega_mean": scales.omega_mean,
            "omega_form": self.omega_form,
            "mu": scales.mu.tolist(),
        }
        for name in NUMBERS:
            columns[name] = getattr(scales, name)
            if name in self.head_p_values:
                columns[f"{name}_p"] = self.head_p_values[name]
        columns["task_leak"] = self.task_leak
        rows = zip(*columns.values(), strict=True)
        heads = [dict(zip(columns, row, strict=True)) for row in rows]
        of_components = ("n_components", "learned", "off_diagonal")
        evidence = {
            "sign_matching": self.sign_matching,
            **{name: getattr(self.scales, name) for name in SCALES},
            **{f"substitution_{name}": value for name, value in asdict(self.substitution).items()},
            **{f"learner_{name}": value for name, value in asdict(self.learner).items()},
            **{name: getattr(self.components, name, None) for name in of_components},
            "form": self.form.kind,
            **{name: getattr(self.form, name) for name in ("isotropy", "shared", "rotation")},
            **{name: getattr(self, name) for name in ("p_values", "n_random", "random_ranges")},
        }
        return self.document(heads, evidence)

    def plot(self) -> go.Figure:
        """Heads in the plane of omega and mu."""
        return figures.head_scatter(
            self.omega_form,
            self.circuits.mu.mean(1),
            labels=self.labels,
            title=f"Heads: {self.pattern}",
        )


def _each_or_range(values: Float[np.ndarray, " d_y"]) -> str:
    """One number per response, of more than three their range."""
    if len(values) > 3:
        return f"{digits(values.min())} to {digits(values.max())}"
    return ", ".join(map(digits, values))
