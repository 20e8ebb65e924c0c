"""Jobs of a run: the models of one are trained together, from their state file, where there is one, to checkpoints.

A job can be begun again at any time, in any process that sees the run folder.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from mechinterp.checkpoints.io.atomic import delete_leftovers
from mechinterp.checkpoints.io.errors import CheckpointError
from mechinterp.checkpoints.io.locks import locked
from mechinterp.config import ExperimentConfig, differences
from mechinterp.memory import peak_memory, require_memory
from mechinterp.training.general.trainer import DeepRun
from mechinterp.training.linear.trainer import moments_bytes, train_linear
from mechinterp.training.one_layer.pack import Pack, pack_bytes, packs, shares_a_pack
from mechinterp.training.run import train_run
from mechinterp.training.state import stored_models
from mechinterp.training.trained import Progress

STATE_NAME = re.compile(r"training-[0-9]{1,9}\.safetensors")
LOCK_NAME = re.compile(r"\.training-[0-9]{1,9}\.lock")
FIRST_USE_BYTES = 96_000_000
"""What libraries take when they are first called."""


@dataclass(frozen=True)
class PackJob:
    """Models to train together, and the file that holds their state meanwhile."""

    file: Path
    models: Mapping[str, ExperimentConfig]


@dataclass(frozen=True)
class Outcome:
    """What came of a pack."""

    steps: int
    """Updates made now."""
    seconds: float
    """Time spent in those steps and in writing."""
    loss: float
    """Mean over the models of the last `eval_loss`, those that diverged left out; unit y^2."""
    diverged: Mapping[str, int | None]
    """Models that are not saved, with the logged step at which that was found."""


OnLog = Callable[[Progress], None]
Engine = Callable[[Sequence[PackJob], OnLog | None], Iterator[Outcome]]


def pack_jobs(models: Mapping[str, ExperimentConfig], run_folder: Path) -> list[PackJob]:
    """Everything that is not finished: packs that were stopped, then the others.

    Raises:
        CheckpointError: If a state file cannot be read, or holds other models than those asked for.
    """
    jobs = [PackJob(file, stored_models(file)) for file in state_files(run_folder)]
    for job in jobs:
        for name, config in job.models.items():
            if name not in models:
                raise CheckpointError(f"{job.file}: holds {name!r}, which is not part of this run.")
            require_same(job.file, config, models[name])
    started = {name for job in jobs for name in job.models}
    number = max((int(job.file.stem.partition("-")[2]) for job in jobs), default=-1) + 1
    for pack in packs(models):
        names = [n for n in pack if n not in started and not is_finished(run_folder / n)]
        if left := {name: pack[name] for name in names}:
            jobs.append(PackJob(run_folder / f"training-{number}.safetensors", left))
            number += 1
    return jobs


def state_files(run_folder: Path) -> list[Path]:
    """The states of packs that were stopped."""
    files = run_folder.glob("training-*.safetensors")
    return sorted(file for file in files if STATE_NAME.fullmatch(file.name))


def is_finished(folder: Path) -> bool:
    """Whether a model is saved."""
    return (folder / "config.json").exists()


def require_same(where: Path, there: ExperimentConfig, here: ExperimentConfig) -> None:
    """Refuse to go on with another config than that of the beginning.

    Raises:
        CheckpointError: If they differ; the message names the first field that does.
    """
    changed = differences(there, here)
    if changed:
        name, (old, new) = next(iter(changed.items()))
        raise CheckpointError(
            f"{where}: cannot be resumed with another config: {name} is {old} there, {new} here."
        )


def train_here(
    jobs: Sequence[PackJob],
    on_log: OnLog | None = None,
    *,
    device: str = "cpu",
    memory: int | None = None,
) -> Iterator[Outcome]:
    """Train packs in this process, one after another.

    Args:
        device: "cpu", "cuda" or "auto".
        memory: Bytes that the process may come to use; None: as many as it takes.
    Raises:
        CheckpointError: If a pack would need more memory, or a file cannot be read or written.
    """
    for job in jobs:
        yield train_job(job, on_log, device=device, memory=memory)


def train_job(
    job: PackJob,
    on_log: OnLog | None = None,
    *,
    device: str = "cpu",
    memory: int | None = None,
    wait: bool = False,
) -> Outcome:
    """Train a pack from where it was stopped, and save its models beside its state file.

    Args:
        wait: Whether to wait for another process that trains it.
    Raises:
        CheckpointError: If another process trains it, it would need more memory, or a file cannot be read or
            written.
    """
    # Whatever ran before may still be writing: a worker that outlives its run, a machine that seems lost.
    with locked(job.file.with_name(f".{job.file.stem}.lock"), wait=wait):
        delete_leftovers(job.file.parent, job.file.name.__eq__)
        run_folder = job.file.parent
        left = {n: config for n, config in job.models.items() if not is_finished(run_folder / n)}
        # Nothing may be left for a job that is run again: its outcome was lost, and not its work.
        if not left:
            job.file.unlink(missing_ok=True)
            return Outcome(0, 0.0, float("nan"), {})
        config = next(iter(left.values()))
        device = _device(job, config, device)
        if memory is not None:
            _require_memory(job, config, memory)
        if config.train.optimizer != "adam":
            return _train_on_moments(run_folder, left, on_log)
        if shares_a_pack(config):
            require_memory(pack_bytes(job.models), f"{job.file}: training {len(job.models)} models")
        kind: type[Pack | DeepRun] = Pack if shares_a_pack(config) else DeepRun
        if job.file.exists():
            run = kind.restore(job.file, device=device)
        else:
            run = kind(left, device=device)
            run.save(job.file)
        first_step = run.step
        seconds = train_run(run, job.file, on_log=on_log)
        for name, trained in run.results().items():
            if name in left and name not in run.diverged:
                trained.save(run_folder / name)
        job.file.unlink()
        losses = run.rows["eval_loss"][-1]
        loss = losses[torch.isfinite(losses)].mean().item()
        return Outcome(run.step - first_step, seconds, loss, run.diverged)


def delete_free_locks(run_folder: Path) -> None:
    """Delete the locks of packs that processes which were killed have left."""
    for file in run_folder.glob(".training-*.lock"):
        if LOCK_NAME.fullmatch(file.name):
            with suppress(CheckpointError), locked(file):
                pass


def _device(job: PackJob, config: ExperimentConfig, device: str) -> str:
    """The device itself, of "auto" a GPU where PyTorch can use one; training on moments is for the processor."""
    if config.train.optimizer == "adam":
        return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if device not in ("auto", "cpu"):
        raise CheckpointError(
            f"{job.file}: --device must be auto or cpu where train.optimizer is {config.train.optimizer}, got {device}."
        )
    return "cpu"


def _require_memory(job: PackJob, config: ExperimentConfig, memory: int) -> None:
    if config.train.optimizer != "adam":
        needed = moments_bytes(config)
    elif shares_a_pack(config):
        needed = pack_bytes(job.models)
    else:
        raise CheckpointError(f"{job.file}: --memory is not for models of several layers.")
    needed += peak_memory() + FIRST_USE_BYTES
    if needed > memory:
        raise CheckpointError(
            f"{job.file}: may need {needed / 1e9:.2f} GB with {len(job.models)} models and "
            f"{len(config.train.snapshot_steps)} snapshots of each; --memory allows {memory / 1e9:.2f} GB."
        )


def _train_on_moments(
    run_folder: Path, models: Mapping[str, ExperimentConfig], on_log: OnLog | None
) -> Outcome:
    """Train a model of linear attention; it takes seconds and needs no state."""
    ((name, config),) = models.items()
    start, steps = time.monotonic(), config.train.steps
    try:
        trained = train_linear(config)
    except FloatingPointError:
        return Outcome(0, 0.0, float("nan"), {name: None})
    except RuntimeError as error:
        raise CheckpointError(f"{run_folder / name}: {error}") from None
    trained.save(run_folder / name)
    seconds = time.monotonic() - start
    final = trained.history.iloc[-1]
    if on_log is not None:
        on_log(Progress(steps, steps, 1, float(final["loss"]), steps / seconds))
    return Outcome(steps, seconds, float(final["eval_loss"]), {})
