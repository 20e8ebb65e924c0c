"""Gradient descent on several kinds of features of the same prompts, step by step."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechinterp import figures
from mechinterp.analysis.number_format import digits, with_error
from mechinterp.analysis.result import Table, records
from mechinterp.analysis.stats import mean_and_sem
from mechinterp.display import Result, frame_of, with_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.icl.sparse_predictors import descend, excess_risk


@dataclass(frozen=True, eq=False, repr=False)
class DescentCurves(Result):
    """Excess risk of gradient descent on several kinds of features of the same prompts, step by
    step."""

    features: tuple[str, ...]
    """Names of the features."""
    risk: Float[np.ndarray, "features step"]
    """Mean squared distance to the noise-free target after 0, 1, ... steps, unit y^2."""
    risk_sem: Float[np.ndarray, "features step"]
    log_area: Float[np.ndarray, " features"]
    """Mean over steps 1, 2, ... of log excess risk minus that of the first features; negative means
    faster."""
    log_area_sem: Float[np.ndarray, " features"]
    """Standard error of `log_area`, paired over prompts, by the delta method."""

    @property
    def least_risk(self) -> Float[np.ndarray, " features"]:
        """Smallest excess risk of the descent, unit y^2."""
        return self.risk.min(1)

    @property
    def at_step(self) -> Int[np.ndarray, " features"]:
        """Step with the smallest excess risk."""
        return self.risk.argmin(1)

    def __repr__(self) -> str:
        rows = zip(self.features, self.least_risk, self.at_step, strict=True)
        least = ", ".join(f"{name} {risk:.3g}@{step}" for name, risk, step in rows)
        return f"DescentCurves(least excess risk: {least})"

    def sentences(self) -> list[str]:
        """The smallest excess risk, and the speed relative to the first features."""
        rows = zip(self.features, self.least_risk, self.at_step, strict=True)
        least = ", ".join(f"{digits(risk)} at step {step} on {name}" for name, risk, step in rows)
        areas = zip(self.features, self.log_area, self.log_area_sem, strict=True)
        faster = " and ".join(f"{with_error(*area)} for {name}" for name, *area in list(areas)[1:])
        return [
            f"Smallest excess risk (y²) of gradient descent on features of the context: {least}.",
            f"Log area, the mean over steps of log excess risk minus that of {self.features[0]}: {faster} "
            "(negative is faster).",
        ]

    def tables(self) -> dict[str, Table]:
        """Table of what descent reaches on each kind of features, and table of all steps."""
        title = (
            "Gradient descent on the features; log area: mean log risk minus that of the first row"
        )
        steps = Table(self.to_frame(), "Excess risk at every step", brief=False)
        return {"areas": Table(self.area_frame(), title), "descent": steps}

    def figures(self) -> dict[str, go.Figure]:
        """Descent step by step."""
        return {"descent": self.plot()}

    def to_document(self) -> dict:
        """Table of all steps as rows, and table of what descent reaches."""
        rows = {"rows": records(self.to_frame()), "areas": records(self.area_frame())}
        return {"analysis": "p-probe", "result": repr(self), **rows}

    def to_frame(self) -> pd.DataFrame:
        """One row per kind of features and step."""
        steps = range(self.risk.shape[1])
        return frame_of(self, *with_sem("risk"), features=self.features, step=steps)

    def area_frame(self) -> pd.DataFrame:
        """One row per kind of features: the smallest excess risk and the log area."""
        names = ("least_risk", "at_step", *with_sem("log_area"))
        return frame_of(self, *names, features=self.features)

    def plot(self) -> go.Figure:
        """Excess risk over steps, one curve per kind of features."""
        return figures.lines(
            np.arange(self.risk.shape[1]),
            figures.named(self.features, self.risk, self.risk_sem),
            title="Excess risk of gradient descent on the features of a layer",
            x_title="steps",
            y_title="excess risk (y²)",
            log_y=True,
        )


def descent_curves(
    features: Mapping[str, Float[Tensor, "batch pos _feature"]], prompts: Prompts, *, steps: int
) -> DescentCurves:
    """Excess risk of gradient descent on features of the context; the last position holds the
    query's features.

    Raises:
        ValueError: If `steps` is below 1.
    """
    if steps < 1:
        raise ValueError(f"steps must be >= 1, got {steps}.")
    n_responses, target = prompts.y.shape[2], prompts.to(torch.float64)
    squares = []
    for phi in features.values():
        columns = phi.double()[..., None].expand(-1, -1, -1, n_responses)
        path = descend(columns[:, :-1], target.y, columns[:, -1], steps=steps)
        squares.append(excess_risk(path, target).T.numpy(force=True))
    risk, risk_sem = mean_and_sem(np.stack(squares, 1))
    # d log(mean) = (value - mean) / mean, summed over steps.
    relative = np.stack([square[:, 1:] / square[:, 1:].mean(0) for square in squares], 1).mean(2)
    _, log_area_sem = mean_and_sem(relative - relative[:, :1])
    area = np.log(risk[:, 1:]).mean(1)
    return DescentCurves(tuple(features), risk, risk_sem, area - area[0], log_area_sem)
