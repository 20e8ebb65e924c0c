"""Frames of numbers that the response of a learner consists of."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float

Estimate = tuple[float, float]
"""Value and standard error."""
FRAME_MEANINGS: Mapping[str, Mapping[str, str | tuple[str, str]]] = {
    "symmetries": {
        "symmetry": "Change of the prompt that leaves the best answer as it is, or turns its sign.",
        "mismatch": "E (f - f')^2 / (2 E f^2), f' the prediction after the change that it should follow: 0 if it follows.",
        "bayes": "Mismatch of the Bayes learner.",
    },
    "filter": {
        "s": ("Eigenvalue of X^T X / L.", "x²"),
        "phi": ("Weight of a direction with this eigenvalue.", "1/x²"),
        "bayes": ("Weight that the Bayes learner gives it.", "1/x²"),
        "layer": "Number of the layer after which the filter is measured, from 0.",
    },
    "forms": {
        "form": "Form of the filter.",
        "left": "Part of the squared predictions that the best filter of this form leaves.",
    },
    "position": {
        "age": "Number of pairs after this one; 0 is the last pair.",
        "weight": ("Weight of the pair per similarity.", "1/x²"),
    },
    "similarity": {
        "u": ("Similarity of the pair's x and the query's, their scalar product.", "x²"),
        "weight": "Weight of the pair, times the number of pairs L.",
    },
    "order": {
        "changed": "Number of the pair that is exchanged for a fresh one, from 0.",
        "pair": "Number of the pair whose weight changes, from 0.",
        "size": "L^2 E (change of the weight)^2 / (2 E weight^2).",
        "slope": "Slope of the change of the weight with <q, x_i> <x_i, x_j> / L^2.",
    },
    "left": {
        "columns": "Columns of the fit; a plus sign adds to those of the rows before.",
        "left": "Part of the squared predictions that all of these leave.",
    },
    "scalars": {
        "name": "Name of the number.",
        "value": "The number.",
        "sem": "Standard error of the number over prompts.",
    },
}
"""Meaning of the columns of each frame, with the unit where there is one."""
OUTPUT = {"output": "Number of the response, from 0."}


@dataclass(frozen=True, eq=False, repr=False)
class KindFrames:
    """Measurements from which the class of a learner follows, each with its standard error.

    Frames of a task with several responses have a last column `output`.
    """

    symmetries: pd.DataFrame
    """symmetry, mismatch, mismatch_sem, bayes: E (f - f')^2 / (2 E f^2) under a change of the prompt."""
    position: pd.DataFrame
    """age, weight, weight_sem: weight of a pair per similarity; age 0 is the last pair."""
    left: pd.DataFrame
    """columns, left, left_sem: part of the squared predictions left as columns are added."""
    scalars: pd.DataFrame
    """name, value, sem: c, alpha, eta, gate, and further numbers."""
    sums_follow_law: bool
    """True: the sum of two y is again a response of the task, up to its size, so that the mismatch of sums says whether the
    learner is linear in y."""
    context_length: int

    def scalar(self, name: str, output: int = 0) -> Estimate:
        """Value of a scalar and its standard error.

        Raises:
            KeyError: If there is no such scalar.
        """
        rows = self.of_output(self.scalars, output).set_index("name")
        return float(rows["value"][name]), float(rows["sem"][name])

    def of_output(self, frame: pd.DataFrame, output: int = 0) -> pd.DataFrame:
        """Rows of one response."""
        if "output" not in frame:
            return frame
        return frame[frame.output == output].drop(columns="output").reset_index(drop=True)


@dataclass(frozen=True, eq=False, repr=False)
class Frames(KindFrames):
    """All measurements of what a learner does with its prompt, each with its standard error."""

    filter: pd.DataFrame
    """s, phi, phi_sem, bayes: weight phi(s) of a direction with eigenvalue s of X^T X / L; `layer` last."""
    differences: pd.DataFrame
    """s, difference, difference_sem: phi minus that of the Bayes learner, paired over prompts."""
    beside: pd.DataFrame
    """learner, s, phi: filters of ridge regression and of descent with as many steps as layers."""
    forms: pd.DataFrame
    """form, left, left_sem: part of the squared predictions that each form of the filter leaves."""
    similarity: pd.DataFrame
    """u, weight, weight_sem: weight of a pair times L, by its similarity u = <q, x_j>."""
    order: pd.DataFrame
    """changed, pair, size, size_sem, slope, slope_sem: effect of a fresh pair on another's weight."""
    by_gradient: bool
    """True: gradients with respect to y were projected; False: predictions were."""
    coordinates: Float[np.ndarray, "d_x d_x"] | None
    """Matrix R of the coordinates R x in which the filter is measured; None: those of x."""
    n_prompts: int
    """Number of prompts after trimming."""
    uses_sparsity: bool | None
    """For a sparse task: True if a rotation of x changes predictions as it changes the Bayes learner's; else None."""
    notes: tuple[str, ...]
    """Measurements that were not made, with the reason."""
