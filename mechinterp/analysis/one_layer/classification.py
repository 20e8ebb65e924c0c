"""What is found of a model that is one layer of attention: its label and those of its heads, with the evidence."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float

from mechinterp import figures
from mechinterp.analysis.learners.baseline_comparison import (
    Nearby,
    TaskLoss,
    standing_text,
    task_doubt,
)
from mechinterp.analysis.one_layer.circuits import Circuits
from mechinterp.analysis.one_layer.effective_step import Scales
from mechinterp.analysis.one_layer.head_statistics import Form
from mechinterp.analysis.one_layer.pca_components import Components
from mechinterp.analysis.one_layer.substitution import (
    Faithfulness,
)
from mechinterp.analysis.one_layer.verdict import heads_verdict
from mechinterp.analysis.verdict import Verdict
from mechinterp.config import TaskConfig
from mechinterp.display import Result


@dataclass(frozen=True, eq=False, repr=False)
class Classification(Result):
    """Label of a model and of its heads, with the evidence."""

    pattern: str
    """One of "kernel_regression", "debiased_gd", "preconditioned_gd", "weighted_preconditioned_gd",
    "task_heads", "superposition", "linear_gd", "unstructured", "undetermined"."""
    reason: str
    """One sentence: what decided, with its number."""
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
    form: Form
    """What QK x blocks are held against."""
    scales: Scales
    """How omega and mu add up over heads."""
    substitution: Faithfulness
    """What survives of the prediction with every head replaced by its idealised circuit (omega, mu)."""
    learner: Faithfulness
    """What the closed-form learner built from omega and mu alone explains of the prediction."""
    components: Components | None
    """Of one step of linear attention: which principal components of x it uses; None for all other models."""
    p_values: dict[str, float]
    """Fraction of randomly initialised models that are as structured, by the name of the number."""
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
    near: Nearby
    """What simple learners explain of the prediction, nearest first."""
    loss: TaskLoss
    best_factor: float
    """The factor on the prediction with the least loss; 1 at the optimum of the task that a model was trained on."""
    best_factor_sem: float
    task: TaskConfig
    """Law of the prompts."""
    n_prompts: int
    assumed: tuple[str, ...] = ()
    """Fields of the task that nobody stated."""

    @property
    def verdict(self) -> Verdict:
        """What the model computes, how sure that is, and what it is not."""
        active = np.array([label != "dummy" for label in self.labels])
        return heads_verdict(
            self.pattern,
            self.reason,
            form=self.form,
            scales=self.scales,
            n_components=None if self.components is None else self.components.n_components,
            omega=self.omega_form[active],
            mu=self.circuits.mu[active],
            kernel=self.kernel,
            learner=self.learner,
            near=self.near,
            p_value=self.p_values["task_r2"],
            n_random=self.n_random,
            calibrated=self.calibrated,
            caveat=self.caveat,
            doubt=self.task_doubt,
        )

    @property
    def task_doubt(self) -> str:
        """Why the task may be another one than was assumed; empty where nothing says so."""
        factor = (self.best_factor, self.best_factor_sem)
        r2 = (self.loss.scaled_r2, self.loss.scaled_r2_sem)
        return task_doubt(factor, r2, self.assumed)

    def __repr__(self) -> str:
        told = standing_text(self.loss, self.task, self.assumed)
        return f"Classification({self.pattern})\n{self.verdict}\n{told}"

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

    def plot(self) -> go.Figure:
        """Heads in the plane of omega and mu."""
        return figures.head_scatter(
            self.omega_form,
            self.circuits.mu.mean(1),
            labels=self.labels,
            title=f"Heads: {self.pattern}",
        )
