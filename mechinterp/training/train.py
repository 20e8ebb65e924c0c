"""Training of many models into one run folder, skipping finished ones.

A run folder contains one `training-<n>.safetensors` per pack in training and one checkpoint folder per finished model.
Nothing in it is overwritten: without `resume` it must be free, with `resume` its configs must equal the requested ones.
Only one process at a time may train there.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from mechinterp.checkpoints.checkpoint import Checkpoint, load
from mechinterp.checkpoints.io.atomic import delete_leftovers
from mechinterp.checkpoints.io.errors import CheckpointError
from mechinterp.checkpoints.io.locks import entries, locked, require_free, settle
from mechinterp.checkpoints.native.folder import (
    FILES,
    document_file,
    named_config,
    read_document,
    read_history,
)
from mechinterp.checkpoints.native.history import require_own_table
from mechinterp.config import ExperimentConfig
from mechinterp.training.jobs import (
    LOCK_NAME,
    STATE_NAME,
    Engine,
    delete_free_locks,
    is_finished,
    pack_jobs,
    require_same,
    state_files,
    train_here,
)
from mechinterp.training.state import stored_models
from mechinterp.training.trained import Progress

LOCK = ".lock"
RESULTS = "results.parquet"
"""Name of a sweep's table in the run folder, written by `analysis.results`."""


@dataclass(frozen=True)
class TrainingSummary:
    """Summary of a training run."""

    checkpoints: tuple[Path, ...]
    """Folders of the requested models, finished now or earlier."""
    steps: int
    """Number of updates made in this call, summed over packs."""
    seconds: float
    """Time of these steps in seconds, including writing files, without start-up."""
    loss: float
    """Mean of the final `eval_loss` over the saved models, unit y^2."""
    diverged: Mapping[str, int | None] = field(default_factory=dict)
    """Models that diverged and were not saved, with the logged step at which the divergence was noticed (None for training
    without logged steps)."""


@torch.inference_mode(False)
def train_models(
    models: Mapping[str, ExperimentConfig],
    run_folder: str | Path,
    *,
    resume: bool = False,
    engine: Engine = train_here,
    on_log: Callable[[Progress], None] | None = None,
) -> TrainingSummary:
    """Train models into `run_folder/<name>`, in packs where possible; finished models are skipped.

    A model that diverges is not saved, and the others continue.

    Args:
        engine: Function that trains packs: `train_here`, or `train_on_ray` from training/ray.py. Set its other arguments
            with functools.partial.
    Raises:
        CheckpointError: If the folder contains another run, another process trains there, a stored config
            differs from the requested one, or a file cannot be read or written.
    See also:
        `train`, `sweep_frame`.
    Example:
        >>> import tempfile
        >>> from mechinterp import override, preset
        >>> config = override(preset("softmax-h2"), "train.steps=20", "train.n_eval_prompts=64")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     train_models({"short": config}, folder).steps
        20
    """
    run_folder = Path(run_folder)
    with locked(run_folder / LOCK):
        delete_free_locks(run_folder)
        if resume:
            _require_resumable(models, run_folder)
        else:
            _require_free(models, run_folder)
        delete_leftovers(run_folder, _is_of_run)
        for name, config in models.items():
            if is_finished(run_folder / name):
                _, trained = read_document(document_file(run_folder / name))
                require_same(run_folder / name, trained, config)
        steps, seconds = 0, 0.0
        diverged: dict[str, int | None] = {}
        for outcome in engine(pack_jobs(models, run_folder), on_log):
            steps, seconds = steps + outcome.steps, seconds + outcome.seconds
            diverged |= outcome.diverged
        checkpoints = tuple(run_folder / name for name in models if name not in diverged)
        losses = [_final_loss(folder) for folder in checkpoints]
    loss = sum(losses) / len(losses) if losses else float("nan")
    return TrainingSummary(checkpoints, steps, seconds, loss, diverged)


def train_one(
    config: ExperimentConfig,
    folder: str | Path,
    *,
    resume: bool = False,
    engine: Engine = train_here,
    on_log: Callable[[Progress], None] | None = None,
) -> TrainingSummary:
    """Train one model into its checkpoint folder; the arguments are those of `train_models`.

    Raises:
        CheckpointError: As in `train_models`, and if the model diverges.
    """
    models = {".": config}
    summary = train_models(models, folder, resume=resume, engine=engine, on_log=on_log)
    require_finite(models, Path(folder), summary)
    return summary


def train(
    config: ExperimentConfig | str,
    *,
    out: str | Path,
    device: str = "cpu",
    resume: bool = False,
    on_log: Callable[[Progress], None] | None = None,
) -> Checkpoint:
    """Train one model and return its checkpoint, as `mechinterp train` does.

    Args:
        config: A config, or the name of a preset or config file.
        out: Checkpoint folder. With `resume`, a model that is finished there is loaded and not trained again.
        resume: True: continue a stopped run.
        on_log: Called at every logged step with the progress.
    Raises:
        ValueError: If the preset or config file does not exist.
        CheckpointError: If the folder is not free, another process trains there, the model diverges, or the stored
            config differs.
    See also:
        `preset`, `train_models`.
    Example:
        >>> import tempfile
        >>> from mechinterp import override, preset
        >>> config = override(preset("softmax-h2"), "train.steps=20", "train.n_eval_prompts=64")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     train(config, out=f"{folder}/short")
        Checkpoint(short: 2 heads, d_x=5, context_length=40, step 20)
    """
    if isinstance(config, str):
        config = named_config(config)
    train_one(config, out, resume=resume, engine=partial(train_here, device=device), on_log=on_log)
    return load(out)


def require_finite(
    models: Mapping[str, ExperimentConfig], run_folder: Path, summary: TrainingSummary
) -> None:
    """Refuse a run in which models diverged.

    Raises:
        CheckpointError: If a model diverged; the message names all of them, with their step sizes.
    """
    if not summary.diverged:
        return
    lost = (
        f"{name} (train.learning_rate {models[name].train.learning_rate:g}"
        + (")" if step is None else f", noticed at step {step})")
        for name, step in summary.diverged.items()
    )
    raise CheckpointError(
        f"{run_folder}: weights must stay finite, those of {', '.join(lost)} did not; the other models are "
        "saved. Try a smaller step size with --resume."
    )


def _require_free(models: Mapping[str, ExperimentConfig], run_folder: Path) -> None:
    table = run_folder / RESULTS
    states = [*state_files(run_folder), *([table] if os.path.lexists(table) else [])]
    targets = [run_folder / name for name in models]
    occupied = states or [target for target in targets if _is_occupied(target)]
    if occupied:
        raise CheckpointError(
            f"{occupied[0]}: already exists and is not overwritten; choose another --out, or --resume."
        )


def _require_resumable(models: Mapping[str, ExperimentConfig], run_folder: Path) -> None:
    """Refuse to overwrite files that are not from this run; half-written checkpoints are deleted."""
    require_own_table(run_folder / RESULTS)
    started = {name for file in state_files(run_folder) for name in stored_models(file)}
    for name in models:
        target = run_folder / name
        settle(target)
        if is_finished(target):
            continue
        if name in started:
            require_free(target, FILES)
        elif _is_occupied(target):
            others = [entry for entry in entries(target) if entry != LOCK]
            reason = f"already holds {others[0]}, which is" if others else "is a file and"
            raise CheckpointError(f"{target}: {reason} not of this run; it is not overwritten.")


def _is_of_run(name: str) -> bool:
    return name in (LOCK, RESULTS) or any(rule.fullmatch(name) for rule in (STATE_NAME, LOCK_NAME))


def _is_occupied(target: Path) -> bool:
    if not target.is_dir():
        return os.path.lexists(target)
    return any(entry != LOCK for entry in entries(target))


def _final_loss(folder: Path) -> float:
    document, config = read_document(document_file(folder))
    history = read_history(folder, config, document["step"])
    return float("nan") if history is None else float(history["eval_loss"].iloc[-1])
