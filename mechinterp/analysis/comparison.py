"""Several models side by side, a row each: their config, label, scales and loss."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, cast

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float

from mechinterp import figures
from mechinterp.analysis.circuits import require_weights
from mechinterp.analysis.classified import Classified
from mechinterp.analysis.one_layer.classification import Classification
from mechinterp.analysis.one_layer.classify import N_LAYER_PROMPTS, classify
from mechinterp.analysis.result import Table
from mechinterp.analysis.stats import estimates, mean_and_sem
from mechinterp.checkpoints.checkpoint import Checkpoint, checkpoint_of, load
from mechinterp.checkpoints.modules.hooked import HookedModule
from mechinterp.config import ExperimentConfig
from mechinterp.display import Result, counted
from mechinterp.fields import flatten
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import learner_of
from mechinterp.progress import progress

SEEDS = ("seed", "train.data_seed")
SEED_IN_NAME = re.compile(r"[-_. ]*(seed|s)?[-_. ]*\d+$")
MAX_POINTS = 200
"""Largest number of points of a curve."""
MEANS = ("loss", "omega_abs", "mu_abs", "eta")
"""Columns that are averaged over the models of a setting."""
COMPARISON_COLUMNS = (
    "checkpoint",
    "seed",
    "pattern",
    "loss",
    "loss_sem",
    "omega_abs",
    "mu_abs",
    "eta",
)
"""Columns of the models of a comparison."""
MEASURED = ("steps", "diverged", "loss", "eval_loss", "pattern", "labels", "omega", "mu")


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Result):
    """Labels and losses of several models; models that differ in nothing but seeds share a setting."""

    models: pd.DataFrame
    """One row per model."""
    fields: pd.DataFrame
    """One row per setting: its name, and the config fields in which settings differ."""
    heads: tuple[tuple[np.ndarray, np.ndarray], ...]
    """omega and mu of the heads of each model."""
    curves: tuple[Float[np.ndarray, "_ 2"], ...]
    """Step and eval_loss of each model's history; empty without a history."""
    COLUMNS: ClassVar = {
        "checkpoint": "Folder or file.",
        "setting": "Models that differ in nothing but seeds, named by the common start of their names.",
        "pattern": "Pattern that the heads form together.",
        "seed": "Seed of the initial weights.",
        "step": "Number of updates.",
        "models": "Number of models of the setting with this pattern.",
        "of": "Number of models of the setting.",
        "omega_abs": "Mean |omega| of heads that are not dummies.",
        "mu_abs": "Sum of |mu| over heads; unchanged when a head is split in two.",
        "eta": "Step size of the model, Σ mu·omega times f'(0).",
        "loss": "Mean squared error on prompts of the model's own task; models of one task share the prompts.",
    }
    UNITS: ClassVar = {"1/x²": ("omega_abs", "eta"), "y²": ("loss",)}

    @property
    def verdict(self) -> str:
        """Number of models of each setting and pattern."""
        counts = [
            f"{setting}: {', '.join(f'{row.pattern} {row.models}' for row in rows.itertuples())}"
            for setting, rows in self.settings_frame().groupby("setting", sort=False)
        ]
        models, settings = counted(len(self.models), "model"), counted(len(self.fields), "setting")
        return f"{models} of {settings}: {'; '.join(counts)}."

    def __repr__(self) -> str:
        return f"Comparison({self.verdict})"

    def sentences(self) -> list[str]:
        """The verdict, and how to read the tables."""
        return [
            self.verdict,
            "Models that differ in nothing but seeds share a setting. A row holds its models of one pattern; means and "
            "standard errors are over models.",
        ]

    def to_frame(self) -> pd.DataFrame:
        """One row per model."""
        return self.models.copy()

    def settings_frame(self) -> pd.DataFrame:
        """One row per setting and pattern: means over the models, with standard errors."""
        ends = {"": "mean", "_sem": "sem"}
        means = {f"{n}{end}": (n, mean) for n in MEANS for end, mean in ends.items()}
        groups = self.models.groupby(["setting", "pattern"], sort=False)
        frame = groups.agg(models=("seed", "size"), **means).reset_index()
        frame.insert(3, "of", frame["setting"].map(self.models["setting"].value_counts()))
        return frame

    def tables(self) -> dict[str, Table]:
        """Settings, models, and the fields in which settings differ."""
        frames = {"settings": self.settings_frame(), "models": self.models, "fields": self.fields}
        return {name: Table(f) for name, f in frames.items() if name != "fields" or f.shape[1] > 1}

    def figures(self) -> dict[str, go.Figure]:
        """Heads, and training curves if there are any."""
        curves = {"curves": self.plot_curves()} if any(map(len, self.curves)) else {}
        return {"heads": self.plot(), **curves}

    def plot(self) -> go.Figure:
        """Heads of all models in the plane of omega and mu; in the published pattern they lie on two
        points, mirror images of each other."""
        return figures.runs(
            self._grouped(self.heads),
            title="Heads of all models",
            x_title="omega (1/x²)",
            y_title="mu",
            markers=True,
        )

    def plot_curves(self) -> go.Figure:
        """Loss of all models with a history over training."""
        return figures.runs(
            self._grouped([tuple(_thinned(curve[curve[:, 0] > 0]).T) for curve in self.curves]),
            title="Loss during training, each model on prompts it never sees",
            x_title="step",
            y_title="eval_loss (y²)",
            log=True,
        )

    def _grouped(self, drawn: Sequence[tuple]) -> Mapping[str, Mapping[str, tuple]]:
        groups: dict[str, dict[str, tuple]] = {name: {} for name in self.fields["setting"]}
        for row, model in self.models.iterrows():
            if len(drawn[row][0]):
                groups[model["setting"]][f"{model['checkpoint']} ({row})"] = drawn[row]
        return groups


def compare(
    checkpoints: Sequence[Checkpoint], *, n_prompts: int = 4096, seed: int = 0
) -> Comparison:
    """Labels and losses of several one-layer models, and the agreement of seeds of one setting.

    Losses are mean squared errors on prompts of the model's own task and context length, the same
    prompts for all models of one task. Curves show at most 200 steps of each model's history;
    settings may have different evaluation prompts. omega and mu are as in the report on one model.

    Args:
        n_prompts: Number of prompts for each classification; losses use five times as many.
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
    rows, heads = [], []
    for each in progress(checkpoints, "classifying models"):
        require_weights(each, "compare")
        found = cast("Classification", classify(each, n_prompts=n_prompts, seed=seed))
        prompts = evaluation_prompts(each, n_prompts=5 * n_prompts, seed=seed)
        losses = (learner_of(each)(prompts) - prompts.y_query).square().mean(1).double()
        heads.append((found.omega_form, np.array(found.row["mu"])))
        own = {"checkpoint": each.name, "seed": each.config.seed}
        loss = estimates(loss=mean_and_sem(losses.numpy(force=True)))
        rows.append(own | model_row(each, found) | loss)
    models = pd.DataFrame(rows, columns=[*COMPARISON_COLUMNS])
    configs = pd.DataFrame([_setting(each.config) for each in checkpoints], dtype=object)
    groups = models.groupby(configs.agg("; ".join, axis=1), sort=False)
    titles = _titles([names.tolist() for _, names in groups["checkpoint"]])
    models.insert(1, "setting", [titles[number] for number in groups.ngroup()])
    fields = configs.loc[groups.head(1).index, configs.nunique() > 1].reset_index(drop=True)
    fields.insert(0, "setting", titles)
    curves = tuple(checkpoint.loss_curve for checkpoint in checkpoints)
    return Comparison(models, fields, tuple(heads), curves)


def model_row(checkpoint: Checkpoint | HookedModule, found: Classified) -> dict[str, object]:
    """Row of a model in a table of models: where it is, its sizes, and what was found. Each table takes its columns."""
    return found.row | checkpoint.identity


def _setting(config: ExperimentConfig) -> dict[str, str]:
    """Fields of a config without its seeds, as texts."""
    fields = flatten(asdict(config)).items()
    texts = {name: v if isinstance(v, str) else json.dumps(v) for name, v in fields}
    return {name: text for name, text in texts.items() if name not in SEEDS}


def _titles(names: list[list[str]]) -> list[str]:
    """Common name of the models of each setting without the seed; a number if they have no common
    name."""
    titles: list[str] = []
    for group in names:
        stems = {SEED_IN_NAME.sub("", name) for name in group} if len(group) > 1 else set(group)
        title = stems.pop() if len(stems) == 1 else f"setting {len(titles) + 1}"
        titles.append(title if title not in titles else f"{title} ({len(titles) + 1})")
    return titles


def _thinned(curve: Float[np.ndarray, "row column"]) -> Float[np.ndarray, "point column"]:
    """At most MAX_POINTS rows, evenly spaced on a logarithmic axis; the last row is kept."""
    if len(curve) <= MAX_POINTS:
        return curve
    rows = np.geomspace(1, len(curve), MAX_POINTS).round().astype(int) - 1
    return curve[np.unique(rows)]


def models_frame(
    models: Mapping[str, ExperimentConfig],
    run_folder: str | Path,
    *,
    diverged: Mapping[str, int | None] | None = None,
    n_prompts: int = N_LAYER_PROMPTS,
) -> pd.DataFrame:
    """One row per model of a finished run, in the order of `models`.

    Columns are `name`, `id` and the config's fields by dotted name; then `steps` (updates made), `diverged`,
    the last `loss` and `eval_loss` of the history (unit y^2), `pattern`, and one entry per head in `omega`, `mu`
    (means over coordinates and responses) and `labels`.

    Args:
        diverged: Models without a checkpoint, with the step at which the divergence was noticed.
        n_prompts: Number of prompts for each classification.
    Raises:
        CheckpointError: If a model that has not diverged has no checkpoint, or a broken one.
        ValueError: If there is no model, or the folder is no path.
    See also:
        `train_models`, `load`.
    Example:
        >>> from mechinterp.checkpoints.checkpoint import load
        >>> models = {name: load(f"checkpoints/{name}").config for name in ("softmax-h1-s0", "softmax-h2-s0")}
        >>> models_frame(models, "checkpoints")[["name", "model.n_heads", "pattern"]]
                    name  model.n_heads            pattern
        0  softmax-h1-s0              1  kernel_regression
        1  softmax-h2-s0              2        debiased_gd
    """
    if not isinstance(run_folder, str | Path):
        raise ValueError(f"run_folder must be a path, got {run_folder!r}.")
    if not models:
        raise ValueError("models_frame needs at least one model, got none.")
    lost = diverged or {}
    rows, own = [], dict[str, object]()
    for name, config in models.items():
        own = {"name": name, "id": config.id, **flatten(asdict(config))}
        lasting = (
            {"steps": lost[name]} if name in lost else _ran(Path(run_folder) / name, n_prompts)
        )
        rows.append(own | {"diverged": name in lost} | lasting)
    names = [*own, *MEASURED]
    return pd.DataFrame({name: _column([row.get(name) for row in rows]) for name in names})


def _column(values: list[object]) -> pd.Series:
    """Series that keeps whole numbers whole if some are missing."""
    whole = all(value is None or type(value) is int for value in values)
    return pd.Series(
        values, dtype="Int64" if whole and any(v is not None for v in values) else None
    )


def _ran(folder: Path, n_prompts: int) -> dict[str, object]:
    """Steps, last losses, pattern and heads of a checkpoint."""
    checkpoint = load(folder)
    losses = {}
    if checkpoint.history is not None:
        losses = checkpoint.history.iloc[-1][["loss", "eval_loss"]].astype(float).to_dict()
    found = classify(checkpoint, n_prompts=n_prompts)
    return model_row(checkpoint, found) | {"steps": checkpoint.step, **losses}
