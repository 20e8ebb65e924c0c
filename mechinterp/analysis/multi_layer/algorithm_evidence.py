"""The label of the algorithm that a model's layers carry out, with all numbers behind it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Bool, Float, Int

from mechinterp import figures
from mechinterp.analysis.number_format import digits, with_error
from mechinterp.analysis.result import Table, records
from mechinterp.display import Result


@dataclass(frozen=True, eq=False, repr=False)
class AlgorithmEvidence(Result):
    """The label of a model's algorithm, and how well each candidate explains the model."""

    label: str
    """A label of `icl.algorithms`, "undetermined" or "unstructured"."""
    reason: str
    """One sentence: what decided, with its number."""
    candidates: tuple[str, ...]
    """Labels that the evidence leaves, the smaller of nested ones; one, if it decides."""
    members: tuple[str, ...]
    """Labels of the algorithms that were fitted."""
    linear_in_y: Bool[np.ndarray, " member"]
    equivariant: Bool[np.ndarray, " member"]
    """Whether a rotation of x leaves the member's prediction as it is."""
    has_path: Bool[np.ndarray, " member"]
    """Whether a member says what is predicted after each layer."""
    n_scalars: Int[np.ndarray, " member"]
    """Fitted numbers of each member."""
    scalars: tuple[Float[np.ndarray, " _"], ...]
    """Those fitted to the predictions, in the order of `Algorithm.names`."""
    path_scalars: tuple[Float[np.ndarray, " _"], ...]
    """Those fitted to what is read after each layer."""
    settings: tuple[str, ...]
    """Prompts of the scores: "own length", "half length", "double length", "wide spread"."""
    context_length: Int[np.ndarray, " setting"]
    """Pairs of each setting."""
    answered: Bool[np.ndarray, " setting"]
    """Whether the model still does its task there; other settings are not evidence."""
    relative_risk: Float[np.ndarray, " setting"]
    """Excess risk of the model over that of predicting 0; NaN where it takes no such prompts."""
    null_risk: Float[np.ndarray, " model"]
    """The same at the own length, of models whose weights are those of this one in random order."""
    r2: Float[np.ndarray, "member setting"]
    """1 - mean (model - member)^2 / mean model^2, on prompts that nothing was fitted to; NaN where
    the setting is not answered."""
    r2_sem: Float[np.ndarray, "member setting"]
    difference: Float[np.ndarray, "member member setting"]
    """R^2 of the first member minus that of the second."""
    difference_sem: Float[np.ndarray, "member member setting"]
    """Paired: the same prompts for both."""
    path_answered: bool
    """Whether what is read of the stream after each layer comes near to some member's path."""
    path_r2: Float[np.ndarray, "member layer"]
    """As r2, after each layer, over the mean square of the last prediction, with scalars fitted to
    the path; NaN for a member that has none."""
    path_r2_sem: Float[np.ndarray, "member layer"]
    path_difference: Float[np.ndarray, "member member layer"]
    path_difference_sem: Float[np.ndarray, "member member layer"]
    readout_r2: Float[np.ndarray, "member layer"]
    """R^2 with which a linear read-out of each layer's own, fitted on other prompts, finds a member's
    prediction after that layer in the stream."""
    others: tuple[str, ...]
    """Names of what members are mixed with: the members, and momentum."""
    mixture_gain: Float[np.ndarray, "member other"]
    """Share of what a member leaves unexplained that a mixture with another explains; NaN where it
    was not asked."""
    tests: tuple[str, ...]
    """Identities that were tested."""
    test_answer: tuple[str, ...]
    """"yes", "no", "unclear" or "not answered"."""
    test_r2: Float[np.ndarray, " test"]
    """R^2 between the two sides of the identity; NaN where it is not answered."""
    test_r2_sem: Float[np.ndarray, " test"]
    n_prompts: int

    def __repr__(self) -> str:
        return f"AlgorithmEvidence({self.label}: {self.reason})"

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
        if not self.answered[0]:
            return None
        return max(members, key=lambda m: self.r2[m, 0], default=None)

    def sentences(self) -> list[str]:
        """The label, how far the nearest algorithm is before the next, and the nearest path layer by layer."""
        told = [f"The label is {self.label}: {self.reason}."]
        best, other = self.best, self.runner_up
        if best is not None and other is not None:
            lead = with_error(self.difference[best, other, 0], self.difference_sem[best, other, 0])
            told.append(
                f"R² of {self.members[best]} minus that of {self.members[other]} is {lead}."
            )
        if not self.path_answered:
            return [
                *told,
                "What a linear read-out finds after the layers comes near to no algorithm's path.",
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
            "identities": Table(self.test_frame(), "Identities"),
        } | ({"path": Table(path, "After each layer", per="candidate")} if len(path) else {})

    def figures(self) -> dict[str, go.Figure]:
        """Paths, if there are any."""
        return {"algorithm_path": self.plot()} if self.drawn else {}

    def evidence(self) -> dict:
        """What earned the label: of the best algorithm, of the runner-up, and of all."""
        best, other = self.best, self.runner_up
        evidence: dict[str, object] = {
            "candidates": list(self.candidates),
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
                "lead": self.difference[best, other, 0],
                "lead_sem": self.difference_sem[best, other, 0],
            }
        tables = {"algorithms": self.to_frame(), "path": self.path_frame()}
        tables["tests"] = self.test_frame()
        return evidence | {name: records(frame) for name, frame in tables.items()}

    def to_frame(self) -> pd.DataFrame:
        """One row per algorithm and setting."""
        member, setting = (index.ravel() for index in np.indices(self.r2.shape))
        return pd.DataFrame(
            {
                "candidate": np.array(self.members)[member],
                "n_scalars": self.n_scalars[member],
                "prompts": np.array(self.settings)[setting],
                "context_length": self.context_length[setting],
                "answered": self.answered[setting],
                "r2": self.r2.ravel(),
                "r2_sem": self.r2_sem.ravel(),
            }
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

    def path_frame(self) -> pd.DataFrame:
        """One row per algorithm and layer, of those that are nearer than predicting 0 after each."""
        member, layer = (index.ravel() for index in np.indices(self.path_r2.shape))
        frame = pd.DataFrame(
            {
                "candidate": np.array(self.members)[member],
                "layer": layer,
                "path_r2": self.path_r2.ravel(),
                "path_r2_sem": self.path_r2_sem.ravel(),
                "readout_r2": self.readout_r2.ravel(),
            }
        )
        return frame[frame["candidate"].isin([self.members[m] for m in self.drawn])]

    @property
    def drawn(self) -> list[int]:
        """Members with a path that is nearer to the model's than 0 is, after every layer."""
        return np.flatnonzero((self.path_r2 >= 0).all(1)).tolist()

    def plot(self) -> go.Figure:
        """R^2 of each member after each layer."""
        return figures.lines(
            np.arange(1, self.path_r2.shape[1] + 1),
            {self.members[m]: self.path_r2[m] for m in self.drawn},
            errors={self.members[m]: self.path_r2_sem[m] for m in self.drawn},
            title="How near the stream after each layer is to what each algorithm predicts there",
            x_title="layers run",
            y_title="R²",
        )
