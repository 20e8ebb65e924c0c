"""Table of a sweep: one row per model with its config, its losses and its heads."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import pandas as pd

from mechinterp.analysis.one_layer.classify import N_PROMPTS, classify
from mechinterp.checkpoints.checkpoint import load
from mechinterp.config import ExperimentConfig
from mechinterp.fields import flatten

MEASURED = ("steps", "diverged", "loss", "eval_loss", "pattern", "labels", "omega", "mu")


def sweep_frame(
    models: Mapping[str, ExperimentConfig],
    run_folder: str | Path,
    *,
    diverged: Mapping[str, int | None] | None = None,
    n_prompts: int = N_PROMPTS,
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
    See also:
        `train_models`, `load_run`.
    Example:
        >>> from mechinterp.checkpoints.checkpoint import load
        >>> models = {name: load(f"checkpoints/{name}").config for name in ("softmax-h1-s0", "softmax-h2-s0")}
        >>> sweep_frame(models, "checkpoints")[["name", "model.n_heads", "pattern"]]
                    name  model.n_heads            pattern
        0  softmax-h1-s0              1  kernel_regression
        1  softmax-h2-s0              2        debiased_gd
    """
    lost = diverged or {}
    rows = []
    for name, config in models.items():
        row = {"name": name, "id": config.id, **flatten(asdict(config)), "diverged": name in lost}
        ran = {"steps": lost[name]} if name in lost else _ran(Path(run_folder) / name, n_prompts)
        rows.append(row | ran)
    names = [*(name for name in rows[0] if name not in MEASURED), *MEASURED]
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
    label = classify(checkpoint, n_prompts=n_prompts)
    return {"steps": checkpoint.step, **losses, "pattern": label.pattern, **label.of_a_row}
