"""Name of a model's algorithm with its evidence: the answer of `name_algorithm`."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float

from mechinterp import figures
from mechinterp.analysis.evidence import NUMBER_COLUMNS, Number, limited
from mechinterp.analysis.multi_layer.fits import FitScores
from mechinterp.analysis.multi_layer.naming_prompts import USELESS
from mechinterp.analysis.multi_layer.naming_rules import (
    REASONS,
    UNDETERMINED,
    Limits,
    Measured,
    Named,
    WhyNot,
)
from mechinterp.analysis.number_format import digits, with_error
from mechinterp.analysis.result import Table, records
from mechinterp.analysis.stats import ratio_and_sem
from mechinterp.display import Result, with_sem

UNSURE = ("frequency", "readings")
"""Rules by which the answer is "undetermined" although the numbers single out one algorithm."""
LEAST_SQUARES = "recursive_least_squares"
"""Label whose penalty is constant or falls with the number of pairs."""
PENALTY_ERRORS = 2
"""A difference of at least this many standard errors decides between the two penalties."""
OWN_COLUMN = 0
"""Column of the last prediction at the model's own length."""


@dataclass(frozen=True, eq=False, repr=False)
class Naming(Named, Result):
    """Name of a model's algorithm, with a row for each learner.

    `label` is the mechanism, else the function if it is a learner without steps; a label of `icl.algorithms`,
    "undetermined" or "unstructured". Function and mechanism are "undetermined" if several algorithms are left, or none.
    """

    frequency: Mapping[str, float]
    """Fraction of resamples of the scored prompts with each label, largest first."""
    measured: Measured
    risks: Mapping[str, tuple[int, float]]
    """Number of pairs, and excess risk of the model over that of predicting 0, by setting. Settings from 0.95 on are not
    evidence."""
    n_layers: int
    n_prompts: int
    followed: str = ""
    """Algorithm whose steps are put in."""
    steps: pd.DataFrame | None = None
    """Effects of its steps; None if they were not put in."""
    scalar_sems: Float[np.ndarray, " _"] = field(default_factory=lambda: np.zeros(0))
    """Standard errors over prompts of the scalars of a label without steps; empty for other labels."""
    left_out: str = ""
    """Parts that need the law of given prompts, if it is not known."""
    of_readings: str = ""
    """Reason of the label of a file with several readings; empty if the reason is that of this reading."""

    COLUMNS: ClassVar = NUMBER_COLUMNS | {
        "learner": "Algorithm by its label, or algorithm with a scaled read-out, which gives no label.",
        "scalars": "Fitted numbers, layer by layer: of all layers if the prediction after each is known.",
        "r2": "1 - mean (model - learner)^2 / mean model^2 for the last prediction; fitted and scored on different prompts.",
        **{
            f"layer_{n}_r2": f"R² after layer {n}, relative to the last prediction."
            for n in range(99)
        },
        "half_length_r2": "R² at half the model's own length; empty if the learner is not near at its own.",
        "double_length_r2": "R² at twice the model's own length.",
        "wide_spread_r2": "R² with eigenvalues of the covariance of x from 1 to 30.",
        "less_noise_r2": "R² with a hundredth of the noise variance.",
        "more_noise_r2": "R² with ten times the noise variance; for functions of prompts.",
        "much_noise_r2": "R² with a hundred times the noise variance; for functions of prompts.",
        "other_drift_r2": "R² on prompts of a task that drifts (rho 0.9), or of a fixed one if the task drifts; for algorithms along the pairs.",
        "steps_r2": "Least R² over layers of the prediction with the learner's step in place of what the layer adds at the query.",
        "exchanged_r2": "Least R² over layers of the change of the prediction if the learner's prediction so far is exchanged with that of another prompt; without an error, as a fit decides its spread.",
        "why_not": "What keeps the learner from being the label; empty for the label.",
        "test": "Identity that some algorithms satisfy.",
        "mismatch": "Least fraction of the model that breaks the identity.",
    }

    def __repr__(self) -> str:
        return f"Naming({self.label}: {self.reason})"

    def relabelled(self, label: str, reason: str) -> "Naming":
        """This answer with the label on which the readings of a file agree, and the reason."""
        of_readings = reason if reason != self.reason else ""
        if label == self.label:
            return replace(self, of_readings=of_readings)
        why_not = {name: each or WhyNot("readings") for name, each in self.why_not.items()}
        return replace(
            self,
            label=label,
            function=UNDETERMINED,
            mechanism=UNDETERMINED,
            why_not=why_not,
            scalar_sems=np.zeros(0),
            of_readings=of_readings,
        )

    @property
    def members(self) -> list[str]:
        """Labels of the algorithms that were fitted; none for a model that does not do its task."""
        return [each.label for each in self.measured.last.learners if each.label]

    def _row(self, learner: str) -> tuple[FitScores, int]:
        """Scores of a learner and its row there: for all layers if the prediction after each is known."""
        path = self.measured.path
        scores = path if path is not None and learner in path.names else self.measured.last
        return scores, scores.names.index(learner)

    def scalars(self, learner: str) -> Float[np.ndarray, " _"]:
        """Fitted numbers of a learner, in the order of `Algorithm.names`."""
        scores, row = self._row(learner)
        return scores.scalars[row]

    def _least_layer(self, learner: str) -> tuple[float, float]:
        """Smallest R² of a learner at the model's own length, over layers if the prediction after each is known, and its
        standard error."""
        scores, row = self._row(learner)
        r2 = scores.r2()[row, : scores.n_own]
        at = int(r2.argmin())
        return float(r2[at]), float(scores.r2_sem()[row, at])

    def explained(self, learner: str) -> tuple[float, float]:
        """R² of an algorithm for the last prediction, and its standard error."""
        r2, sem = self.table.loc[learner, ["r2", "r2_sem"]]
        return float(r2), float(sem)

    def lead(self, first: str, second: str) -> tuple[float, float]:
        """R² of a learner minus that of another for the last prediction, and its standard error, paired.

        The error is that for these two: that another learner may be nearest on other prompts, and the fits, are left out.
        """
        last = self.measured.last
        near, far = (last.error[last.names.index(name), OWN_COLUMN] for name in (first, second))
        lead, sem = ratio_and_sem(far - near, last.size[OWN_COLUMN])
        return float(lead), float(sem)

    @property
    def order(self) -> list[str]:
        """Algorithms by R² of the last prediction, largest first."""
        return [name for name in self._by_r2().index if name in self.members]

    def _by_r2(self) -> pd.DataFrame:
        """The table with the largest R² first; equal to rounding, in the order of the algorithms."""
        return self.table.sort_values(
            "r2", key=lambda c: c.round(6), ascending=False, kind="stable"
        )

    @property
    def nearest(self) -> str:
        """The label, or a label that changes with the prompts; else the learner of the last prediction, else the algorithm
        of the largest R²; "" if none was fitted."""
        unsure = [n for n, each in self.why_not.items() if each and each.rule in UNSURE]
        known = (self.label, *unsure, self.function, *self.order, "")
        return next(name for name in known if name in (*self.members, ""))

    @property
    def why(self) -> str:
        """Rule that decided."""
        if self.of_readings:
            return "readings"
        if not self.measured.useful:
            scale = self.measured.scale
            return "logit" if scale.two_values else "scale" if scale.helps else "useless"
        reason = self.why_not[self.nearest]
        if reason is None:
            return "mechanism" if self.mechanism == self.label else "function"
        return reason.rule

    @property
    def reason(self) -> str:
        """One sentence: what decided, with its number, and for "undetermined" what to run next."""
        if self.of_readings:
            return self.of_readings
        if not self.measured.useful:
            return self._useless()
        name, reason = self.nearest, self.why_not[self.nearest]
        r2, sem = self.explained(name)
        text = f"{name} at R² {r2:.4f} ± {sem:.1g}"
        if reason is not None:
            same = reason.rule == "far" and math.isclose(reason.value, r2)
            text = (
                f"nearest: {text}, limit {reason.limit:g}"
                if same
                else f"nearest: {text}, but {reason}"
            )
        elif self.mechanism != self.label:
            how = f" ({self.measured.path_how})" if self.measured.path is None else ""
            text += f", path not identified{how}"
        else:
            text += f", after every layer {with_error(*self._least_layer(name))} or more"
            if self.steps is not None:
                text += f", with its steps put in {self.steps.steps_r2.min():.2f}"
        parts = [text]
        if self.why != "frequency":
            share = self.frequency.get(self.label, 0.0)
            parts.append(f"{self.label} in {share:.0%} of resamples")
        if self.function not in (UNDETERMINED, self.label, name):
            parts.append(f"as a function {self.function}")
        after = REASONS[reason.rule][1] if reason is not None else ""
        if self.label == UNDETERMINED and after:
            parts.append(f"next: {after}")
        return "; ".join(parts)

    def _useless(self) -> str:
        if self.measured.without_targets:
            return "the targets are 0 on all prompts, so that no error has a size; next: give prompts with their y_query"
        scale = self.measured.scale
        text = f"the model's excess risk is {self.measured.relative_risk:.3g} times that of predicting 0"
        best = f"(ridge regression {scale.ridge:.3g})"
        if scale.two_values:
            low, high = scale.two_values
            return (
                f"{text} {best}, but the responses are {low:g} or {high:g}: if the output is a logit, squared error is the "
                f"wrong loss for it; next: give a function that turns the logit z into the expected response, "
                f"{low:g} + {high - low:g} sigmoid(z)"
            )
        if not scale.helps:
            return f"{text} {best}, and no factor on its predictions takes it half of the way to ridge regression"
        return (
            f"{text}; with its predictions times {scale.factor:.3g} it is {scale.risk:.3g} times {best}: "
            "is the output scaled? (`read=`)"
        )

    @cached_property
    def table(self) -> pd.DataFrame:
        """Scalars, R² with its standard error in each column, effects of the steps, and `why_not`, by learner.

        Standard errors are over the scored half of the prompts. They leave out the fit of the scalars on the other half.
        At the own length, and after each layer, the fit adds little. In other settings the spread over seeds may be two to
        four times the error (docs/trust.md).
        """
        last, path = self.measured.last.table(), self.measured.path
        known = [last] if path is None else [path.table(), last]
        frame = pd.concat(known)
        frame = frame[~frame.index.duplicated()].assign(**last[["r2", "r2_sem"]])
        frame = frame[["scalars", "r2", "r2_sem", *frame.columns.drop(["scalars", "r2", "r2_sem"])]]
        if self.steps is not None:
            frame = frame.join(self._least_steps(self.steps).to_frame(self.followed).T)
        reasons = {name: reason or "" for name, reason in self.why_not.items()}
        frame["why_not"] = [str(reasons.get(name, "gives no label")) for name in frame.index]
        return frame.rename_axis("learner")

    def _least_steps(self, steps: pd.DataFrame) -> pd.Series:
        """Least effects of the steps over layers; the standard error is that of the layer with the least `steps_r2`."""
        r2, sem = with_sem("steps_r2")
        return steps.min().mask(steps.columns == sem, steps.loc[steps[r2].idxmin(), sem])

    def to_frame(self) -> pd.DataFrame:
        """One row per learner, the label first, then the nearest."""
        if not self.measured.useful:
            nothing = {"learner": "predicting 0", "scalars": "", "r2": np.nan, "r2_sem": np.nan}
            return pd.DataFrame([nothing | {"why_not": "the model does not do its task"}])
        return (
            self._by_r2().sort_values("why_not", key=lambda c: c != "", kind="stable").reset_index()
        )

    def test_frame(self) -> pd.DataFrame:
        """One row per identity that was tested."""
        rows = [
            (name, each.mismatch(), each.mismatch_sem())
            for name, each in self.measured.tests.items()
        ]
        return pd.DataFrame(rows, columns=["test", *with_sem("mismatch")])

    def sentences(self) -> list[str]:
        """The label with its reason, and parts that were left out."""
        numbers = (
            zip(self._scalar_names, self.scalars(self.label), self.scalar_sems, strict=True)
            if len(self.scalar_sems)
            else ()
        )
        listed = ", ".join(f"{name} {with_error(value, sem)}" for name, value, sem in numbers)
        texts = [f"Its numbers: {listed}." if listed else "", self.left_out]
        texts += self._of_recurrence()
        return [f"The label is {self.label}: {self.reason}.", *filter(None, texts)]

    def _of_recurrence(self) -> list[str]:
        """Sentences on the read-out and on the penalty of a learner along the pairs."""
        numbers = {number.name: number for number in self.numbers}
        texts = []
        if self.label != UNDETERMINED and "read_out" in numbers:
            factor = digits(numbers["read_out"].value)
            texts.append(f"Its predictions are {factor} times its estimate.")
        penalty = numbers.get("constant_penalty")
        if self.label == LEAST_SQUARES and penalty and np.isfinite(penalty.sem):
            gain, sem = penalty.value, penalty.sem
            more = with_error(abs(gain), sem)
            if abs(gain) <= PENALTY_ERRORS * sem:
                texts.append(
                    f"Its penalty may be constant or fall as alpha^L: R² at other lengths differs by {more}."
                )
            else:
                law, other = (
                    ("is constant", "that falls as alpha^L")
                    if gain > 0
                    else ("falls as alpha^L", "that is constant")
                )
                texts.append(
                    f"Its penalty {law}: R² at other lengths is {more} higher than with one {other}."
                )
        return texts

    @property
    def _scalar_names(self) -> tuple[str, ...]:
        """Names of the label's scalars."""
        learner = next(each for each in self.measured.last.learners if each.label == self.label)
        return learner.names(self.n_layers)

    def scalar_frame(self) -> pd.DataFrame:
        """Scalars of a label without steps with their standard errors, one row each; empty for other labels."""
        if not len(self.scalar_sems):
            return pd.DataFrame(columns=["scalar", "value", "sem"])
        columns = {"value": self.scalars(self.label), "sem": self.scalar_sems}
        return pd.DataFrame({"scalar": self._scalar_names, **columns})

    def tables(self) -> dict[str, Table]:
        """Learners, the numbers behind the label, and identities, if any were tested."""
        frame, title = self.to_frame(), "Learners, and what keeps each from being the label"
        quiet = tuple(column for column in frame if column.endswith("_sem"))
        tables = {"algorithms": Table(frame, title, quiet=quiet)}
        numbers = self.evidence_frame()
        tables["algorithm_evidence"] = Table(numbers, "Evidence for the name", brief=False)
        if self.measured.tests:
            tables["identities"] = Table(self.test_frame(), "Identities")
        return tables

    def figures(self) -> dict[str, go.Figure]:
        """The paths, if there are any."""
        return {"algorithm_path": self.plot()} if len(self.path) else {}

    @property
    def numbers(self) -> list[Number]:
        """Numbers behind the label: of the model, of the nearest algorithm, and of the resamples."""
        measured = self.measured
        sem = measured.relative_risk_sem
        risk = limited("relative_risk", measured.relative_risk, USELESS, sem=sem)
        if not self.nearest:
            return [risk]
        numbers = [risk, *self._of_nearest(self.nearest, Limits())]
        values = self.scalars(self.nearest)
        sems = self.scalar_sems if len(self.scalar_sems) else np.full(len(values), np.nan)
        pairs = zip(values.tolist(), sems.tolist(), strict=True)
        return numbers + [Number("scalars", *pair, entry=n) for n, pair in enumerate(pairs)]

    def _of_nearest(self, name: str, limits: Limits) -> Iterator[Number]:
        """Numbers of the nearest algorithm that the rules compare with limits, and the effect of its steps."""
        r2, sem = self.explained(name)
        yield limited("r2", r2, limits.explained, least=True, sem=sem)
        scores, _ = self._row(name)
        if scores is self.measured.path:
            r2, sem = self._least_layer(name)
            yield limited("least_layer_r2", r2, limits.explained, least=True, sem=sem)
        if name in scores.progress:
            yield limited("progress", scores.progress[name].least, limits.progress, least=True)
        if name in scores.rests:
            share, _ = scores.rests[name].share(most=self.measured.is_function)
            yield limited("rest", share, limits.rest_of(self.measured.is_function))
        learner = next(each for each in scores.learners if each.label == name)
        if learner.factor != 1:
            yield Number("read_out", learner.factor)
        if name == LEAST_SQUARES and name in self.measured.last.by_length:
            yield Number("constant_penalty", *self.measured.last.by_length[name])
        if self.label != UNDETERMINED:
            share = self.frequency.get(self.label, 0.0)
            yield limited("label_frequency", share, limits.frequency, least=True)
        if self.steps is not None and self.followed == name:
            least = self._least_steps(self.steps)
            yield Number("steps_r2", *least[[*with_sem("steps_r2")]])

    def evidence_frame(self) -> pd.DataFrame:
        """One row per number behind the label, with its error and its limit."""
        rows = pd.DataFrame([number.row for number in self.numbers])
        return rows[["evidence", "value", "sem", "limit", "how"]]

    def evidence(self) -> dict:
        """Numbers behind the label, for the JSON document."""
        evidence: dict[str, object] = {
            "function": self.function,
            "mechanism": self.mechanism,
            "frequency": dict(self.frequency),
            "relative_risk": self.measured.relative_risk,
            "relative_risk_sem": self.measured.relative_risk_sem,
        }
        if self.nearest:
            r2, sem = self.explained(self.nearest)
            evidence |= {"algorithm": self.nearest, "r2": r2, "r2_sem": sem}
            evidence |= {"scalars": self.scalars(self.nearest)}
        if len(self.scalar_sems):
            evidence |= {"scalar_sems": self.scalar_sems}
        tables = {"algorithms": self.to_frame(), "tests": self.test_frame()}
        return evidence | {name: records(frame) for name, frame in tables.items()}

    @property
    def path(self) -> pd.DataFrame:
        """R² after each layer of the algorithms whose path is nearer to the model's than 0 is, one row each."""
        r2 = self.table.reindex(self.members)[self._by_layer]
        return r2[(r2 >= 0).all(axis=1) & bool(r2.size)]

    @property
    def _by_layer(self) -> list[str]:
        """Columns with the R² after each layer; of a single layer that is the last prediction."""
        if self.measured.path is None:
            return []
        return ["r2"] if self.n_layers == 1 else [f"layer_{n}_r2" for n in range(self.n_layers)]

    def plot(self) -> go.Figure:
        """R² of each algorithm after each layer."""
        sems = self.table[[f"{name}_sem" for name in self._by_layer]]
        return figures.lines(
            np.arange(self.n_layers),
            {name: (r2.to_numpy(), sems.loc[name].to_numpy()) for name, r2 in self.path.iterrows()},
            title="R² of each algorithm with the model's prediction after each layer",
            x_title="after layer (the first is 0)",
            y_title="R²",
        )
