"""Many models in one run folder: which are finished, and training of the rest.

A run folder holds one `training-<n>.safetensors` per pack while it trains and one checkpoint folder per
model when it is done. Nothing in it is overwritten: without `resume` it must be free, with `resume` its
configs must equal those asked for. One process at a time trains there.
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
"""The table of a sweep, which `analysis.results` makes; it lies in the run folder."""


@dataclass(frozen=True)
class TrainingSummary:
    """What a training run left behind."""

    checkpoints: tuple[Path, ...]
    """Folders of the models asked for, finished earlier or now."""
    steps: int
    """Updates made now, summed over packs."""
    seconds: float
    """Time spent in those steps and in writing; start-up left out."""
    loss: float
    """Mean over the saved models of the final `eval_loss`, unit y^2."""
    diverged: Mapping[str, int | None] = field(default_factory=dict)
    """Models that were not saved, with the logged step at which their weights were found not to be finite;
    None where training is no sequence of steps."""


@torch.inference_mode(False)
def train_models(
    models: Mapping[str, ExperimentConfig],
    run_folder: str | Path,
    *,
    resume: bool = False,
    engine: Engine = train_here,
    on_log: Callable[[Progress], None] | None = None,
) -> TrainingSummary:
    """Train models into `run_folder/<name>`, those that can in one pack; finished ones are skipped.

    A model that diverges is not saved, and the others go on.

    Args:
        engine: Where packs are trained: `train_here`, or `train_on_ray` of training/ray.py; further
            arguments are given with functools.partial.
    Raises:
        CheckpointError: If the folder holds another run or another process trains there, what is resumed
            differs from what is asked for, or a file cannot be read or written.
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
        CheckpointError: As `train_models` does, and if the model diverges.
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
    """The checkpoint of a model that is trained now, as `mechinterp train` does.

    Args:
        config: A config, or the name of a preset or config file.
        out: The checkpoint folder. A model that is finished there is not trained again with `resume`.
        resume: Whether to go on where a stopped run left off.
        on_log: Called at every logged step with the progress.
    Raises:
        ValueError: If there is no such preset or config file.
        CheckpointError: If the folder is taken or another process trains there, the model diverges, or what
            is resumed has another config.
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
        CheckpointError: If there is one; the message names them all, with their step sizes.
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
    """Refuse names that the run will write and that are somebody else's; half-written checkpoints are deleted."""
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
