"""P-probing: gradient descent on the features of a layer.

If the first layer reweights covariates as Algorithm 1 does, then a few steps of descent on its output get further than
on the raw x. The step size is 1 / lambda_max of each prompt for every curve, so that the comparison is fair.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechinterp import figures
from mechinterp.analysis.number_format import with_error
from mechinterp.analysis.probing.target_functions import reweighted
from mechinterp.analysis.result import Table
from mechinterp.analysis.stats import mean_and_sem, require_finite
from mechinterp.config import TaskLike
from mechinterp.display import Result, frame_of, with_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.icl.sparse_predictors import descend, excess_risk
from mechinterp.memory import chunks, together
from mechinterp.models.run.evaluation import prompts_and_law
from mechinterp.models.run.predictor import Source, predictor_of

RAW, IDEAL = "raw x", "reweighted x"
"""Names of the features that every model is compared with."""


@dataclass(frozen=True, eq=False, repr=False)
class DescentCurves(Result):
    """Excess risk of gradient descent on several kinds of features of the same prompts, step by
    step."""

    COLUMNS: ClassVar = {
        "step": "Number of steps of gradient descent on the features.",
        "least_risk": "Smallest excess risk of the descent.",
        "at_step": "Step with the smallest excess risk.",
        "features": "Names of the features.",
        "risk": "Mean squared distance to the noise-free target after 0, 1, ... steps.",
        "log_area": "Mean over steps 1, 2, ... of log excess risk minus that of the first features; negative means faster.",
        "log_area_sem": "Standard error of log_area, paired over prompts, by the delta method.",
    }
    UNITS: ClassVar = {"y²": ("risk", "least_risk")}
    features: tuple[str, ...]
    risk: Float[np.ndarray, "features step"]
    risk_sem: Float[np.ndarray, "features step"]
    log_area: Float[np.ndarray, " features"]
    log_area_sem: Float[np.ndarray, " features"]

    @property
    def least_risk(self) -> Float[np.ndarray, " features"]:
        """Smallest excess risk of the descent, unit y^2."""
        return self.risk.min(1)

    @property
    def least_risk_sem(self) -> Float[np.ndarray, " features"]:
        """Standard error of `least_risk`, for this number of steps."""
        return self.risk_sem[np.arange(len(self.risk_sem)), self.at_step]

    @property
    def at_step(self) -> Int[np.ndarray, " features"]:
        """Step with the smallest excess risk."""
        return self.risk.argmin(1)

    def __repr__(self) -> str:
        rows = zip(self.features, self.least_risk, self.at_step, strict=True)
        least = ", ".join(f"{name} {risk:.3g}@{step}" for name, risk, step in rows)
        areas = zip(self.features[1:], self.log_area[1:], self.log_area_sem[1:], strict=True)
        faster = ", ".join(f"{name} {with_error(*area)}" for name, *area in areas)
        return f"DescentCurves(least excess risk: {least}; log area: {faster})"

    def tables(self) -> dict[str, Table]:
        """Table of all steps, and table of what descent reaches on each kind of features."""
        title = (
            "Gradient descent on the features; log area: mean log risk minus that of the first row"
        )
        steps = Table(self.to_frame(), "Excess risk at every step", brief=False)
        return {"descent": steps, "areas": Table(self.area_frame(), title)}

    def to_frame(self) -> pd.DataFrame:
        """One row per kind of features and step."""
        steps = range(self.risk.shape[1])
        return frame_of(self, *with_sem("risk"), features=self.features, step=steps)

    def area_frame(self) -> pd.DataFrame:
        """One row per kind of features: the smallest excess risk and the log area."""
        names = (*with_sem("least_risk"), "at_step", *with_sem("log_area"))
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


def p_probe(
    models: Mapping[str, Source] | Source,
    prompts: Prompts | None = None,
    *,
    layer: int = 1,
    steps: int = 32,
    task: TaskLike | None = None,
    n_prompts: int | None = None,
    seed: int = 0,
) -> DescentCurves:
    """Gradient descent on the stream of models before a layer, on raw x, and on reweighted x.

    Features of a context token must not contain its own response. So every token is run as a query:
    without its response, after the same context.

    Args:
        models: Models by name; or a single model, which gets the name "model".
        prompts: Prompts to use; None draws `n_prompts` of the first model's own task with `seed`.
        n_prompts: None means 4096, or 512 for models with norms or MLPs; more if probes of a wide
            stream need more.
        layer: Stream before this layer, counted from 0; the number of layers means the end.
        task: Law of drawn prompts; None means the first model's own.
        steps: Number of descent steps on (1/2L) sum_l (y_l - <u, phi_l>)^2, from zero.
    Raises:
        ValueError: If there is no model, a model has fewer layers, or `steps` is below 1.
    Source:
        After Chen, Zhao and Zou 2024, arXiv 2408.04532, of which only the name and the aim are
        known to us; the features are a choice made here.
    See also:
        `probe`.
    Example:
        >>> from mechinterp.models.constructions.sparse import preprocess_then_optimise_model
        >>> built = preprocess_then_optimise_model([0.5], d_x=4)
        >>> p_probe({"built": built}, n_prompts=64, steps=4).features
        ('raw x', 'reweighted x', 'built')
    """
    models = models if isinstance(models, Mapping) else {"model": models}
    if not models:
        raise ValueError("p_probe needs at least one model, got none.")
    first = next(iter(models.values()))
    prompts, _ = prompts_and_law(
        first, prompts, analysis="p_probe", task=task, n_prompts=n_prompts, seed=seed
    )
    features = {
        RAW: torch.cat([prompts.x, prompts.x_query[:, None]], dim=1),
        IDEAL: reweighted(prompts)[0],
    }
    for name, model in models.items():
        features[name] = predictor_of(model).query_streams(prompts, layer)
        require_finite(features[name].double().numpy(force=True))
    return descent_curves(features, prompts, steps=steps)


def _risks(
    phi: Float[Tensor, "batch pos feature"], prompts: Prompts, steps: int
) -> Float[np.ndarray, "batch step"]:
    """Excess risk of each prompt after every step, a chunk of prompts at a time."""
    n_pos, n_features = phi.shape[1:]
    side = min(n_pos, n_features)
    numbers = n_pos * n_features + 3 * side**2 + 4 * steps
    size = together(8 * prompts.y.shape[2] * numbers, f"descent on {n_features} features")
    parts = []
    for rows in chunks(len(prompts), size):
        columns = phi[rows].double()[..., None].expand(-1, -1, -1, prompts.y.shape[2])
        some = prompts[rows]
        path = descend(columns[:, :-1], some.y, columns[:, -1], steps=steps)
        parts.append(excess_risk(path, some).T.numpy(force=True))
    return np.concatenate(parts)


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
    squares = [_risks(phi, prompts.to(torch.float64), steps) for phi in features.values()]
    risk, risk_sem = mean_and_sem(np.stack(squares, 1))
    with np.errstate(divide="ignore", invalid="ignore"):  # NaN if a risk is 0
        # d log(mean) = (value - mean) / mean, summed over steps.
        relative = np.stack([each[:, 1:] / each[:, 1:].mean(0) for each in squares], 1).mean(2)
        area = np.log(risk[:, 1:]).mean(1)
        _, log_area_sem = mean_and_sem(relative - relative[:, :1])
        return DescentCurves(tuple(features), risk, risk_sem, area - area[0], log_area_sem)
