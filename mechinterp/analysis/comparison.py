"""Several models side by side: pattern, scales and loss on shared prompts, averaged over the seeds
of a setting."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float, Int

from mechinterp import figures
from mechinterp.analysis.learners.losses import shared_losses
from mechinterp.analysis.one_layer.classification import Classification
from mechinterp.analysis.one_layer.classify import classify_attention
from mechinterp.analysis.stats import mean_and_sem
from mechinterp.checkpoints.checkpoint import Checkpoint, checkpoint_of
from mechinterp.config import ExperimentConfig
from mechinterp.display import Result
from mechinterp.fields import flatten
from mechinterp.progress import ProgressCallback, no_progress

SEEDS = ("seed", "train.data_seed")
SEED_IN_NAME = re.compile(r"[-_. ]*(seed|s)?[-_. ]*\d+$")
MAX_POINTS = 200  # largest number of points of a curve


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Result):
    """Labels and losses of several models; models that differ in nothing but seeds share a setting."""

    names: tuple[str, ...]
    settings: tuple[str, ...]
    """Setting of each model."""
    seeds: Int[np.ndarray, " model"]
    fields: pd.DataFrame
    """One row per setting, with the config fields in which settings differ."""
    found: tuple[Classification, ...]
    loss: Float[np.ndarray, " model"]
    """Mean squared error on prompts of the model's own task; models of one task share the prompts.
    Unit y^2."""
    loss_sem: Float[np.ndarray, " model"]
    """Standard error of `loss` over prompts."""
    curves: tuple[Float[np.ndarray, "_ 2"], ...]
    """Step and eval_loss of each model's history; empty without a history."""
    COLUMNS: ClassVar = {
        "eta": "Step size of the model, Σ mu·omega times f'(0), unit 1/x^2.",
        "mu_abs": "Sum of |mu| over heads; unchanged when a head is split in two.",
        "omega_abs": "Mean |omega| of heads that are not dummies, unit 1/x^2.",
    }

    def __repr__(self) -> str:
        patterns = pd.Series([each.pattern for each in self.found]).value_counts()
        listed = ", ".join(f"{name} {count}" for name, count in patterns.items())
        models, settings = len(self.names), len(self.fields)
        return f"Comparison({models} models of {settings} settings: {listed})"

    def to_frame(self) -> pd.DataFrame:
        """One row per model."""
        columns = {
            "checkpoint": self.names,
            "setting": self.settings,
            "seed": self.seeds,
            "pattern": [each.pattern for each in self.found],
            "loss": self.loss,
            "loss_sem": self.loss_sem,
            "omega_abs": [_active_mean(np.abs(e.omega_form), e.labels) for e in self.found],
            "mu_abs": [np.abs(each.circuits.mu.mean(1)).sum() for each in self.found],
            "eta": [each.scales.eta.mean() for each in self.found],
        }
        return pd.DataFrame(columns)

    def settings_frame(self) -> pd.DataFrame:
        """One row per setting and pattern: means over the models, with standard errors."""
        frame, rows = self.to_frame(), []
        for (setting, pattern), models in frame.groupby(["setting", "pattern"], sort=False):
            total = int((frame["setting"] == setting).sum())
            row = {"setting": setting, "pattern": pattern, "models": len(models), "of": total}
            for name in ("loss", "omega_abs", "mu_abs", "eta"):
                row |= {name: models[name].mean(), f"{name}_sem": models[name].sem()}
            rows.append(row)
        return pd.DataFrame(rows)

    def plot(self) -> go.Figure:
        """Heads of all models in the plane of omega and mu."""
        points = [(each.omega_form, each.circuits.mu.mean(1)) for each in self.found]
        return figures.runs(
            self._grouped(points),
            title="Heads of all models",
            x_title="omega (1/x²)",
            y_title="mu",
            markers=True,
        )

    def plot_curves(self) -> go.Figure:
        """Loss of all models with a history over training."""
        curves = [_thinned(curve[curve[:, 0] > 0]).T for curve in self.curves]
        return figures.runs(
            self._grouped([(step, loss) for step, loss in curves]),
            title="Loss during training, each model on prompts it never sees",
            x_title="step",
            y_title="eval_loss (y²)",
            log=True,
        )

    def plot_means(self) -> go.Figure:
        """Mean loss of each setting, with its standard error over the models."""
        losses = self.to_frame().groupby("setting", sort=False)["loss"]
        return figures.bars(
            list(losses.groups),
            {"loss": (losses.mean().to_numpy(), losses.sem().fillna(0.0).to_numpy())},
            title="Mean loss of each setting, with its standard error over models",
            y_title="loss (y²)",
        )

    def mean_curves(self) -> dict[str, Float[np.ndarray, "3 step"]]:
        """Step, mean loss and its standard error over the models, for settings whose models log the
        same steps."""
        shared = {}
        for setting in self.fields["setting"]:
            chosen = np.array(self.settings) == setting
            curves = [curve for curve, own in zip(self.curves, chosen, strict=True) if own]
            steps = curves[0][:, 0]
            alike = all(np.array_equal(curve[:, 0], steps) for curve in curves)
            if len(curves) > 1 and len(steps) and alike:
                mean, sem = mean_and_sem(np.stack([curve[:, 1] for curve in curves]))
                shared[setting] = _thinned(np.stack([steps, mean, sem], 1)).T
        return shared

    def plot_mean_curves(self) -> go.Figure:
        """Mean loss over training, with error bars over the models; needs models that log the same
        steps."""
        return figures.runs(
            {name: {name: tuple(curve)} for name, curve in self.mean_curves().items()},
            title="Mean loss during training, with its standard error over models",
            x_title="step",
            y_title="eval_loss (y²)",
        )

    def _grouped(self, drawn: Sequence[tuple]) -> Mapping[str, Mapping[str, tuple]]:
        groups: dict[str, dict[str, tuple]] = {name: {} for name in self.fields["setting"]}
        for row, (name, setting) in enumerate(zip(self.names, self.settings, strict=True)):
            if len(drawn[row][0]):
                groups[setting][f"{name} ({row})"] = drawn[row]
        return groups


def compare(
    checkpoints: Sequence[Checkpoint],
    *,
    n_prompts: int = 4096,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> Comparison:
    """Labels and losses of several one-layer models, and the agreement of seeds of one setting.

    Args:
        n_prompts: Number of prompts for each classification; losses use five times as many.
        progress: Optional progress callback.
    Raises:
        ValueError: If there is no checkpoint.
    Example:
        >>> from mechinterp import load
        >>> models = [load(f"checkpoints/softmax-h2-s{seed}") for seed in (0, 1)]
        >>> compare(models, n_prompts=256).settings_frame()["setting"].tolist()
        ['softmax-h2']
    """
    if not checkpoints:
        raise ValueError("compare needs at least one checkpoint, got none.")
    for each in checkpoints:
        checkpoint_of(each, "compare")
    own = [_setting(checkpoint.config) for checkpoint in checkpoints]
    groups = {each: [row for row, other in enumerate(own) if other == each] for each in own}
    titles = _titles([[checkpoints[row].name for row in rows] for rows in groups.values()])
    title_of = dict(zip(groups, titles, strict=True))
    loss, loss_sem = np.zeros((2, len(checkpoints)))
    for rows in progress(list(groups.values()), "measuring losses"):
        models = {str(row): checkpoints[row] for row in rows}
        task = checkpoints[rows[0]].config.task
        losses = shared_losses(models, task, n_prompts=5 * n_prompts, seed=seed)
        loss[rows], loss_sem[rows] = losses.loss[0], losses.loss_sem[0]
    return Comparison(
        names=tuple(checkpoint.name for checkpoint in checkpoints),
        settings=tuple(title_of[each] for each in own),
        seeds=np.array([checkpoint.config.seed for checkpoint in checkpoints]),
        fields=_fields(titles, [json.loads(setting) for setting in groups]),
        found=tuple(
            classify_attention(each, n_prompts=n_prompts, seed=seed)
            for each in progress(checkpoints, "classifying models")
        ),
        loss=loss,
        loss_sem=loss_sem,
        curves=tuple(checkpoint.loss_curve for checkpoint in checkpoints),
    )


def _setting(config: ExperimentConfig) -> str:
    """The config without its seeds, as JSON text."""
    fields = flatten(asdict(config))
    return json.dumps({name: value for name, value in fields.items() if name not in SEEDS})


def _titles(names: list[list[str]]) -> list[str]:
    """Common name of the models of each setting without the seed; a number if they have no common
    name."""
    titles: list[str] = []
    for group in names:
        stems = {SEED_IN_NAME.sub("", name) for name in group} if len(group) > 1 else set(group)
        title = stems.pop() if len(stems) == 1 else f"setting {len(titles) + 1}"
        titles.append(title if title not in titles else f"{title} ({len(titles) + 1})")
    return titles


def _fields(titles: list[str], settings: list[dict]) -> pd.DataFrame:
    """One row per setting: its name, and the fields in which settings differ."""
    fields = pd.DataFrame(settings, dtype=object)
    fields = fields.map(lambda value: value if isinstance(value, str) else json.dumps(value))
    fields = fields.loc[:, fields.nunique() > 1]
    fields.insert(0, "setting", titles)
    return fields


def _active_mean(values: np.ndarray, labels: Sequence[str]) -> float:
    """Mean over the heads that are not dummies; NaN if there are none."""
    chosen = [value for value, label in zip(values, labels, strict=True) if label != "dummy"]
    return float(np.mean(chosen)) if chosen else float("nan")


def _thinned(curve: Float[np.ndarray, "row column"]) -> Float[np.ndarray, "point column"]:
    """At most MAX_POINTS rows, evenly spaced on a logarithmic axis; the last row is kept."""
    if len(curve) <= MAX_POINTS:
        return curve
    rows = np.geomspace(1, len(curve), MAX_POINTS).round().astype(int) - 1
    return curve[np.unique(rows)]
