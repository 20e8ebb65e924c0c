"""Training of many models into one run folder, skipping finished ones.

A run folder contains one `training-<n>.safetensors` per pack in training and one checkpoint folder per finished model.
Nothing in it is overwritten: without `resume` it must be free, with `resume` its configs must equal the requested ones.
Only one process at a time may train there. A job trains the models of one pack, from their state file if there is one.
It can be started again at any time, in any process that can access the run folder.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import nan
from pathlib import Path

import torch

from mechinterp.checkpoints.checkpoint import Checkpoint, checkpoint_of, load
from mechinterp.checkpoints.io.files import CheckpointError, delete_leftovers
from mechinterp.checkpoints.io.locks import locked
from mechinterp.checkpoints.native.document import named_config, read_document
from mechinterp.checkpoints.native.folder import document_file
from mechinterp.checkpoints.native.tensors import require_fit
from mechinterp.config import ExperimentConfig
from mechinterp.memory import peak_memory, require_memory
from mechinterp.models.weights import Weights
from mechinterp.training.general.trainer import DeepRun
from mechinterp.training.linear_models import moments_bytes, train_linear
from mechinterp.training.one_layer.step import Pack, pack_bytes, shares_a_pack
from mechinterp.training.run import OnLog, Progress, TrainingRun, train_run
from mechinterp.training.run_folder import (
    LOCK,
    Models,
    delete_free_locks,
    final_loss,
    is_finished,
    is_of_run,
    pack_jobs,
    require_free_run,
    require_resumable,
    require_same,
)
from mechinterp.training.state import stored_origin

FIRST_USE_BYTES = 96_000_000
"""Memory that libraries allocate on their first call, in bytes."""


@dataclass(frozen=True)
class TrainingSummary:
    """Summary of the training of one pack, or of all packs of a run."""

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


Jobs = Mapping[Path, Models]
"""Models to train together, by the file with their training state."""
Engine = Callable[[Jobs, OnLog | None], Iterator[TrainingSummary]]


def train_here(
    jobs: Jobs,
    on_log: OnLog | None = None,
    *,
    device: str = "cpu",
    memory: int | None = None,
    start: Checkpoint | None = None,
) -> Iterator[TrainingSummary]:
    """Train packs in this process, one after another.

    Args:
        device: "cpu", "cuda" or "auto".
        memory: Upper limit on the memory of the process, in bytes; None: no limit.
        start: Checkpoint whose weights the one model starts from; None: random weights.
    Raises:
        CheckpointError: If a pack would need more memory, or a file cannot be read or written.
    """
    for file, models in jobs.items():
        yield train_job(file, models, on_log, device=device, memory=memory, start=start)


def train_job(
    file: Path,
    models: Models,
    on_log: OnLog | None = None,
    *,
    device: str = "cpu",
    memory: int | None = None,
    wait: bool = False,
    start: Checkpoint | None = None,
) -> TrainingSummary:
    """Train a pack from its state file, if there is one, and save its models beside that file.

    Args:
        start: Checkpoint whose weights the one model starts from; None: random weights.
        wait: True: wait while another process trains the pack; False: raise.
    Raises:
        CheckpointError: If another process trains it, it would need more memory, or a file cannot be read or
            written.
    """
    # An earlier process may still be writing: a worker that outlived its run, or a machine that seemed lost.
    with locked(file.with_name(f".{file.stem}.lock"), wait=wait):
        delete_leftovers(file.parent, file.name.__eq__)
        left = {n: each for n, each in models.items() if not is_finished(file.parent / n)}
        # A repeated job may have nothing to do: its models are saved, only its summary was lost.
        if not left:
            file.unlink(missing_ok=True)
            return TrainingSummary((), 0, 0.0, nan)
        config = next(iter(left.values()))
        device = _device(file, config, device)
        _require_memory(file, models, memory)
        if config.train.optimizer != "adam":
            _require_no_start(config, start)
            return _train_on_moments(file.parent, left, on_log)
        run = _started(file, left, start, device)
        first_step = run.step
        seconds = train_run(run, file, on_log=on_log)
        saved = [name for name in left if name not in run.diverged]
        for name, trained in run.results().items():
            if name in saved:
                trained.save(file.parent / name)
        file.unlink()
        losses = run.rows["eval_loss"][-1]
        loss = losses[torch.isfinite(losses)].mean().item()
        folders = tuple(file.parent / name for name in saved)
        return TrainingSummary(folders, run.step - first_step, seconds, loss, run.diverged)


def _started(
    file: Path, models: Models, start: Checkpoint | None, device: str
) -> TrainingRun[Weights]:
    """The run in a state file, or a new one, which is written there.

    Raises:
        CheckpointError: If the stored run started elsewhere, or the start does not fit the config.
    """
    origin = {} if start is None else origin_of(start)
    stored = stored_origin(file) if file.exists() else origin
    if start is not None and stored != origin:
        raise CheckpointError(
            f"{file}: start must be that of the stored run, {stored}, got {origin}."
        )
    first = next(iter(models.values()))
    kind: type[Pack | DeepRun] = Pack if shares_a_pack(first) else DeepRun
    if file.exists():
        return kind.restore(file, device=device)
    if start is not None:
        require_fit(file.parent, start.weights, first)
    weights = None if start is None else start.weights
    run = kind(models, device=device, start=weights, origin=origin)
    run.save(file)
    return run


def origin_of(start: Checkpoint) -> dict[str, object]:
    """Origin of a model whose training started from a checkpoint, as its folder stores it."""
    return {**start.origin, "started_from": start.name, "started_at_step": start.step}


def _require_no_start(config: ExperimentConfig, start: Checkpoint | None) -> None:
    if start is not None:
        raise ValueError(
            f"start needs train.optimizer adam, got {config.train.optimizer}, which trains from random weights."
        )


@torch.inference_mode(False)
def train_models(
    models: Models,
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
        `train`, `models_frame`.
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
            require_resumable(models, run_folder)
        else:
            require_free_run(models, run_folder)
        delete_leftovers(run_folder, is_of_run)
        for name, config in models.items():
            if is_finished(run_folder / name):
                _, trained = read_document(document_file(run_folder / name))
                require_same(run_folder / name, trained, config)
        steps, seconds = 0, 0.0
        diverged: dict[str, int | None] = {}
        for pack in engine(pack_jobs(models, run_folder), on_log):
            steps, seconds = steps + pack.steps, seconds + pack.seconds
            diverged |= pack.diverged
        checkpoints = tuple(run_folder / name for name in models if name not in diverged)
        losses = [final_loss(folder) for folder in checkpoints]
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
    require_no_divergence(models, Path(folder), summary)
    return summary


def train(
    config: ExperimentConfig | str,
    *,
    out: str | Path,
    start: Checkpoint | None = None,
    device: str = "cpu",
    resume: bool = False,
    on_log: Callable[[Progress], None] | None = None,
) -> Checkpoint:
    """Train one model and return its checkpoint, as `mechinterp train` does.

    With `start` it is a new training with steps and moments of its own, from the weights of a checkpoint; the new
    checkpoint's `origin` names it. Heads that are zero in all their weights, as in a model that `prune` saved, stay zero.

    Args:
        config: A config, or the name of a preset or config file.
        start: Checkpoint whose weights the training starts from, of the config's architecture; None: random weights.
        out: Checkpoint folder. With `resume`, a model that is finished there is loaded and not trained again.
        resume: True: continue a stopped run.
        on_log: Called at every logged step with the progress.
    Raises:
        ValueError: If the preset or config file does not exist, `start` is no checkpoint, or the optimizer is not
            Adam, which alone starts from given weights.
        CheckpointError: If the folder is not free, another process trains there, the model diverges, the stored
            config or start differs, or the weights of `start` do not fit the config.
    See also:
        `preset`, `train_models`, `prune`.
    Example:
        >>> import tempfile
        >>> from mechinterp import override, preset
        >>> config = override(preset("softmax-h2"), "train.steps=20", "train.n_eval_prompts=64")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     train(config, out=f"{folder}/short")
        Checkpoint(short: 2 heads, d_x=5, context_length=40, step 20)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     short = train(config, out=f"{folder}/short")
        ...     train(config, out=f"{folder}/longer", start=short).origin
        {'started_from': 'short', 'started_at_step': 20}
    """
    if isinstance(config, str):
        config = named_config(config)
    if start is not None:
        checkpoint_of(start, "start")
    engine = partial(train_here, device=device, start=start)
    train_one(config, out, resume=resume, engine=engine, on_log=on_log)
    return load(out)


def require_no_divergence(models: Models, run_folder: Path, summary: TrainingSummary) -> None:
    """Refuse a run in which models diverged.

    Raises:
        CheckpointError: If a model diverged; the message names all of them, with their step sizes.
    """
    if not summary.diverged:
        return
    causes = {
        name: f"train.learning_rate {models[name].train.learning_rate:g}"
        + ("" if step is None else f", noticed at step {step}")
        for name, step in summary.diverged.items()
    }
    if len(models) == 1:
        (cause,) = causes.values()
        raise CheckpointError(
            f"{run_folder}: weights must stay finite, they did not ({cause}). Try a smaller step size with --resume."
        )
    lost = (f"{name} ({cause})" for name, cause in causes.items())
    raise CheckpointError(
        f"{run_folder}: weights must stay finite, those of {', '.join(lost)} did not; the other models are "
        "saved. Try a smaller step size with --resume."
    )


def _device(file: Path, config: ExperimentConfig, device: str) -> str:
    """Device to train on; "auto" is a GPU if PyTorch has one. Training on moments runs on the CPU only."""
    if config.train.optimizer == "adam":
        return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if device not in ("auto", "cpu"):
        raise CheckpointError(
            f"{file}: --device must be auto or cpu where train.optimizer is {config.train.optimizer}, got {device}."
        )
    return "cpu"


def _require_memory(file: Path, models: Models, limit: int | None) -> None:
    """Refuse a pack that needs more memory than is available, or than the limit of the process."""
    config = next(iter(models.values()))
    if shares_a_pack(config):
        needed = pack_bytes(models)
        require_memory(needed, f"{file}: training {len(models)} models")
    elif config.train.optimizer != "adam":
        needed = moments_bytes(config)
    elif limit is None:
        return  # DeepRun compares its own estimate with the memory that is available
    else:
        raise CheckpointError(f"{file}: --memory is not for models of several layers.")
    needed += peak_memory() + FIRST_USE_BYTES
    if limit is not None and needed > limit:
        raise CheckpointError(
            f"{file}: may need {needed / 1e9:.2f} GB with {len(models)} models and "
            f"{len(config.train.snapshot_steps)} snapshots of each; --memory allows {limit / 1e9:.2f} GB."
        )


def _train_on_moments(run_folder: Path, models: Models, on_log: OnLog | None) -> TrainingSummary:
    """Train a model of linear attention on moments, which takes seconds and needs no state file."""
    ((name, config),) = models.items()
    start, steps = time.monotonic(), config.train.steps
    try:
        trained = train_linear(config)
    except FloatingPointError:
        return TrainingSummary((), 0, 0.0, nan, {name: None})
    except RuntimeError as error:
        raise CheckpointError(f"{run_folder / name}: {error}") from None
    trained.save(run_folder / name)
    seconds = time.monotonic() - start
    final = trained.history.iloc[-1]
    if on_log is not None:
        on_log(Progress(steps, steps, 1, float(final["loss"]), steps / seconds))
    return TrainingSummary((run_folder / name,), steps, seconds, float(final["eval_loss"]))
