"""Jobs of a run: each trains a group of models together, from their state file if there is one, to checkpoints.

A job can be started again at any time, in any process that can access the run folder.
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
"""Memory that libraries allocate on their first call, in bytes."""


@dataclass(frozen=True)
class PackJob:
    """Models to train together, and the file with their training state."""

    file: Path
    models: Mapping[str, ExperimentConfig]


@dataclass(frozen=True)
class Outcome:
    """Result of training one pack."""

    steps: int
    """Number of updates made in this call."""
    seconds: float
    """Time of these steps, including writing files."""
    loss: float
    """Mean of the last `eval_loss` over the models that did not diverge, unit y^2."""
    diverged: Mapping[str, int | None]
    """Models that diverged and are not saved, with the logged step at which the divergence was noticed."""


OnLog = Callable[[Progress], None]
Engine = Callable[[Sequence[PackJob], OnLog | None], Iterator[Outcome]]


def pack_jobs(models: Mapping[str, ExperimentConfig], run_folder: Path) -> list[PackJob]:
    """All unfinished jobs: interrupted packs first, then new ones.

    Raises:
        CheckpointError: If a state file cannot be read, or contains a model or config that is not requested.
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
    """State files of interrupted packs."""
    files = run_folder.glob("training-*.safetensors")
    return sorted(file for file in files if STATE_NAME.fullmatch(file.name))


def is_finished(folder: Path) -> bool:
    """True if the model is saved."""
    return (folder / "config.json").exists()


def require_same(where: Path, there: ExperimentConfig, here: ExperimentConfig) -> None:
    """Refuse to resume with a config that differs from the stored one.

    Raises:
        CheckpointError: If they differ; the message names the first differing field.
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
        memory: Upper limit on the memory of the process, in bytes; None: no limit.
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
    """Train a pack from its stored state, and save its models beside the state file.

    Args:
        wait: True: wait while another process trains the pack; False: raise.
    Raises:
        CheckpointError: If another process trains it, it would need more memory, or a file cannot be read or
            written.
    """
    # An earlier process may still be writing: a worker that outlived its run, or a machine that seemed lost.
    with locked(job.file.with_name(f".{job.file.stem}.lock"), wait=wait):
        delete_leftovers(job.file.parent, job.file.name.__eq__)
        run_folder = job.file.parent
        left = {n: config for n, config in job.models.items() if not is_finished(run_folder / n)}
        # A repeated job may have nothing to do: its models are saved, only its outcome was lost.
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
    """Delete the lock files of packs whose process was killed."""
    for file in run_folder.glob(".training-*.lock"):
        if LOCK_NAME.fullmatch(file.name):
            with suppress(CheckpointError), locked(file):
                pass


def _device(job: PackJob, config: ExperimentConfig, device: str) -> str:
    """Device to train on; "auto" is a GPU if PyTorch has one. Training on moments runs on the CPU only."""
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
    """Train a model of linear attention on moments, which takes seconds and needs no state file."""
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
