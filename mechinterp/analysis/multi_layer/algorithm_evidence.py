"""The label of the algorithm that a model's layers carry out, with all numbers behind it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Bool, Float, Int

from mechinterp import figures
from mechinterp.analysis.multi_layer.algorithm_labels import OWN, Measured, identity_r2
from mechinterp.analysis.multi_layer.algorithm_scores import Scores
from mechinterp.analysis.multi_layer.algorithm_tests import IdentityTest
from mechinterp.analysis.number_format import digits, with_error
from mechinterp.analysis.result import Table, records
from mechinterp.analysis.stats import ratio_and_sem
from mechinterp.display import Result


@dataclass(frozen=True, eq=False, repr=False)
class AlgorithmEvidence(Result):
    """The label of a model's algorithm, and how well each candidate explains the model."""

    COLUMNS: ClassVar = {
        "candidate": "Algorithm that is fitted to the model.",
        "n_scalars": "Numbers of the algorithm that are fitted.",
        "prompts": "Those of the row: of the model's own length, of half and of twice that, or with a wide spread of x.",
        "r2": "1 - mean (model - learner)^2 / mean model^2, on prompts that nothing was fitted to.",
        "path_r2": "The same after the layer, against what is read there; over the mean square of the last prediction.",
        "control": "Learner that gives no label, or algorithm with a scaled read-out.",
        "least_path_r2": "The least path_r2 over layers.",
        "test": "Identity that some algorithms satisfy.",
        "answer": "Whether the two sides of the identity agree; not answered where the model leaves its task.",
        "label": "Label of resamples of the scored prompts.",
        "frequency": "Share of the resamples with the label.",
    }
    label: str
    """The mechanism where it is shown, else the function where it is a learner without a path; a label of
    `icl.algorithms`, "undetermined" or "unstructured"."""
    function: str
    """Which learner the last prediction is; "undetermined" where several or none are."""
    mechanism: str
    """Which algorithm the layers carry out; "undetermined" where it is not shown."""
    reason: str
    """One sentence: what decided, with its number, and for "undetermined" what to run next."""
    why: str
    """Which rule decided; `algorithm_reasons` has its sentence."""
    candidates: tuple[str, ...]
    """Labels that the evidence leaves, the smaller of nested ones; one, if it decides."""
    resampled: tuple[str, ...]
    """Labels of resamples of the scored prompts, most frequent first."""
    frequency: Float[np.ndarray, " resampled"]
    """Share of the resamples with each."""
    measured: Measured
    """Squared errors of every algorithm on every scored prompt."""
    test_answer: tuple[str, ...]
    """"yes", "no" (which rules out members that satisfy the identity) or "not answered"."""
    context_length: Int[np.ndarray, " setting"]
    """Pairs of each setting."""
    relative_risk: Float[np.ndarray, " setting"]
    """Excess risk of the model over that of predicting 0; NaN where it takes no such prompts."""
    answered: Bool[np.ndarray, " setting"]
    """Whether the model still does its task there; other settings are not evidence."""
    n_layers: int
    n_prompts: int
    left_out: str = ""
    """Parts that need a law of the prompts where given prompts come without one."""

    def __repr__(self) -> str:
        return f"AlgorithmEvidence({self.label}: {self.reason})"

    @property
    def members(self) -> tuple[str, ...]:
        """Labels of the algorithms that were fitted."""
        return tuple(str(member.label) for member in self.measured.members)

    @property
    def settings(self) -> tuple[str, ...]:
        """Prompts of the scores: "own length", "half length", "double length", "wide spread"."""
        return self.measured.function.columns

    @property
    def has_path(self) -> Bool[np.ndarray, " member"]:
        """Whether a member says what is predicted after each layer."""
        return np.array([member.has_path for member in self.measured.members])

    @property
    def n_scalars(self) -> Int[np.ndarray, " member"]:
        """Fitted numbers of each member."""
        return np.array([len(m.names(self.n_layers)) for m in self.measured.members])

    @property
    def scalars(self) -> tuple[Float[np.ndarray, " _"], ...]:
        """Those fitted to the last predictions at the own length, in the order of `Algorithm.names`."""
        return self.measured.function.scalars[: len(self.members)]

    @property
    def path_scalars(self) -> tuple[Float[np.ndarray, " _"], ...]:
        """Those fitted to the prediction after each layer; NaN where there is no path."""
        path = self.measured.path
        known = {} if path is None else dict(zip(path.names, path.scalars, strict=True))
        missing = [np.full(n, np.nan) for n in self.n_scalars]
        return tuple(known.get(*each) for each in zip(self.members, missing, strict=True))

    @property
    def null_risk(self) -> Float[np.ndarray, " model"]:
        """Relative risks of models with the same singular values in random directions."""
        return self.measured.null_risk

    @property
    def r2(self) -> Float[np.ndarray, "member setting"]:
        """1 - mean (model - member)^2 / mean model^2, on prompts that nothing was fitted to; NaN where
        the setting is not answered."""
        return self.measured.function.r2()[: len(self.members)]

    @property
    def r2_sem(self) -> Float[np.ndarray, "member setting"]:
        return self.measured.function.r2_sem()[: len(self.members)]

    def lead(self, first: int, second: int) -> tuple[float, float]:
        """R^2 of a member minus that of another at the own length, and its standard error, paired."""
        lead, sem = self.measured.function.lead(first, second)
        return float(lead[OWN]), float(sem[OWN])

    @property
    def path_answered(self) -> bool:
        """Whether the prediction after each layer is known."""
        return self.measured.path is not None

    @property
    def path_r2(self) -> Float[np.ndarray, "member layer"]:
        """As r2, after each layer, over the mean square of the last prediction, with scalars fitted to
        the path; NaN for a member that has none."""
        return self._by_member(Scores.r2)

    @property
    def path_r2_sem(self) -> Float[np.ndarray, "member layer"]:
        return self._by_member(Scores.r2_sem)

    def _by_member(self, of: Callable[[Scores], np.ndarray]) -> Float[np.ndarray, "member layer"]:
        path, missing = self.measured.path, np.full(self.n_layers, np.nan)
        known = {} if path is None else dict(zip(path.names, of(path), strict=True))
        return np.array([known.get(name, missing)[: self.n_layers] for name in self.members])

    @property
    def tests(self) -> tuple[str, ...]:
        """Identities that were tested."""
        return tuple(self.measured.tests)

    @property
    def test_r2(self) -> Float[np.ndarray, " test"]:
        """R^2 between the two sides of the identity; NaN where it is not answered."""
        return np.array([identity_r2(test) for test in self.measured.tests.values()])

    @property
    def test_r2_sem(self) -> Float[np.ndarray, " test"]:
        return np.array([_sem(test) for test in self.measured.tests.values()])

    @property
    def best(self) -> int | None:
        """The member that gave the label, else the nearest one; None where none was scored."""
        if self.label in self.members:
            return self.members.index(self.label)
        return self._nearest(range(len(self.members)))

    @property
    def runner_up(self) -> int | None:
        """The nearest of the other members at the own length."""
        return self._nearest([m for m in range(len(self.members)) if m != self.best])

    def _nearest(self, members: Sequence[int]) -> int | None:
        if not self.answered[OWN]:
            return None
        r2 = self.r2[:, OWN]
        return max(members, key=lambda m: r2[m], default=None)

    def sentences(self) -> list[str]:
        """The label, how far the nearest algorithm is before the next, and the nearest path layer by layer."""
        told = [f"The label is {self.label}: {self.reason}.", *filter(None, [self.left_out])]
        best, other = self.best, self.runner_up
        if best is not None and other is not None:
            lead = with_error(*self.lead(best, other))
            told.append(
                f"R² of {self.members[best]} minus that of {self.members[other]} is {lead}."
            )
        if not self.path_answered:
            return [
                *told,
                f"What is predicted after each layer is not known: {self.measured.path_how}.",
            ]
        paths = np.nan_to_num(self.path_r2, nan=-np.inf)
        nearest = [
            f"{self.members[int(column.argmax())]} (R² {digits(column.max())})"
            for column in paths.T
        ]
        return [*told, f"Layer by layer the nearest path is that of {', '.join(nearest)}."]

    def tables(self) -> dict[str, Table]:
        """Fits, identities, and paths if there are any."""
        path = self.path_frame()
        return {
            "algorithms": Table(self.to_frame(), "How near each algorithm comes"),
            "algorithm_controls": Table(self.control_frame(), "Controls"),
            "identities": Table(self.test_frame(), "Identities"),
            "label_frequencies": Table(self.frequency_frame(), "Labels of resampled prompts"),
        } | ({"path": Table(path, "After each layer", per="candidate")} if len(path) else {})

    def figures(self) -> dict[str, go.Figure]:
        """Paths, if there are any."""
        return {"algorithm_path": self.plot()} if self.drawn else {}

    def evidence(self) -> dict:
        """What earned the label: of the best algorithm, of the runner-up, and of all."""
        best, other = self.best, self.runner_up
        evidence: dict[str, object] = {
            "function": self.function,
            "mechanism": self.mechanism,
            "candidates": list(self.candidates),
            "frequency": dict(zip(self.resampled, self.frequency.tolist(), strict=True)),
            "relative_risk": self.relative_risk[0],
            "null_risk": self.null_risk,
        }
        if best is not None:
            walked = self.has_path[best] and self.path_answered
            evidence |= {"algorithm": self.members[best]}
            evidence |= {"r2": self.r2[best, 0], "r2_sem": self.r2_sem[best, 0]}
            evidence["scalars"] = (self.path_scalars if walked else self.scalars)[best]
        if best is not None and other is not None:
            evidence |= {
                "runner_up": self.members[other],
                "runner_up_r2": self.r2[other, 0],
                **dict(zip(("lead", "lead_sem"), self.lead(best, other), strict=True)),
            }
        tables = {"algorithms": self.to_frame(), "path": self.path_frame()}
        tables |= {"controls": self.control_frame(), "tests": self.test_frame()}
        return evidence | {name: records(frame) for name, frame in tables.items()}

    def to_frame(self) -> pd.DataFrame:
        """One row per algorithm and setting."""
        r2, sem = self.r2, self.r2_sem
        member, setting = (index.ravel() for index in np.indices(r2.shape))
        return pd.DataFrame(
            {
                "candidate": np.array(self.members)[member],
                "n_scalars": self.n_scalars[member],
                "prompts": np.array(self.settings)[setting],
                "context_length": self.context_length[setting],
                "answered": self.answered[setting],
                "r2": r2.ravel(),
                "r2_sem": sem.ravel(),
            }
        )

    def control_frame(self) -> pd.DataFrame:
        """One row per control: R^2 of the last prediction, and the least after a layer."""
        function, path = self.measured.function, self.measured.path
        last = dict(zip(function.names, function.r2()[:, OWN], strict=True))
        least = {}
        if path is not None:
            least = dict(zip(path.names, path.r2()[:, : self.n_layers].min(1), strict=True))
        names = [name for name in {**last, **least} if name not in self.members]
        columns = {"r2": last, "least_path_r2": least}
        return pd.DataFrame(
            {"control": names}
            | {column: [r2.get(name, np.nan) for name in names] for column, r2 in columns.items()}
        )

    def test_frame(self) -> pd.DataFrame:
        """One row per identity that was tested."""
        return pd.DataFrame(
            {
                "test": self.tests,
                "answer": self.test_answer,
                "r2": self.test_r2,
                "r2_sem": self.test_r2_sem,
            }
        )

    def frequency_frame(self) -> pd.DataFrame:
        """One row per label that some resample of the scored prompts has."""
        return pd.DataFrame({"label": self.resampled, "frequency": self.frequency})

    def path_frame(self) -> pd.DataFrame:
        """One row per algorithm and layer, of those that are nearer than predicting 0 after each."""
        path_r2 = self.path_r2
        member, layer = (index.ravel() for index in np.indices(path_r2.shape))
        frame = pd.DataFrame(
            {
                "candidate": np.array(self.members)[member],
                "layer": layer,
                "path_r2": path_r2.ravel(),
                "path_r2_sem": self.path_r2_sem.ravel(),
            }
        )
        return frame[frame["candidate"].isin([self.members[m] for m in self.drawn])]

    @property
    def drawn(self) -> list[int]:
        """Members with a path that is nearer to the model's than 0 is, after every layer."""
        return np.flatnonzero((self.path_r2 >= 0).all(1)).tolist()

    def plot(self) -> go.Figure:
        """R^2 of each member after each layer."""
        path_r2, sem = self.path_r2, self.path_r2_sem
        return figures.lines(
            np.arange(1, self.n_layers + 1),
            {self.members[m]: (path_r2[m], sem[m]) for m in self.drawn},
            title="How near the stream after each layer is to what each algorithm predicts there",
            x_title="layers run",
            y_title="R²",
        )


def _sem(test: IdentityTest) -> float:
    if not np.isfinite(test.size).all():
        return float("nan")
    return float(ratio_and_sem(test.error, test.size)[1])
