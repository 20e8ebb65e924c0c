"""Packs of models that are trained together, decided by their configs and one constant alone.

A pack is trained from its state file, where there is one, to the checkpoints of its models; it can be begun
again at any time, in any process that sees the run folder.
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
from mechinterp.memory import peak_memory, prompt_bytes, require_memory
from mechinterp.training.general.trainer import DeepRun
from mechinterp.training.linear.trainer import train_linear
from mechinterp.training.one_layer.batches import CHUNK_BYTES
from mechinterp.training.one_layer.trainer import Pack, pack_key
from mechinterp.training.run import Progress, train_run
from mechinterp.training.state import stored_models

LANES = 32
"""Sums that the compiled step keeps side by side; `kernel.LANES`, which is not imported before it is needed."""
STATE_NAME = re.compile(r"training-[0-9]{1,9}\.safetensors")
LOCK_NAME = re.compile(r"\.training-[0-9]{1,9}\.lock")
PACK_HEADS = 512
"""Heads of a pack, unless one model has more."""
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


def shares_a_pack(config: ExperimentConfig) -> bool:
    """Whether the compiled step trains such a model, with others beside it.

    Example:
        >>> shares_a_pack(ExperimentConfig())
        True
    """
    return config.train.optimizer == "adam" and config.trains_compiled


def packs(models: Mapping[str, ExperimentConfig]) -> list[dict[str, ExperimentConfig]]:
    """Models that train together, in the order in which they are named.

    Linear attention that is trained on moments is alone: it samples no prompts that could be shared. So is a
    model that the compiled step does not train, whose layers are no axis that models could lie along.

    Example:
        >>> models = {f"{seed}": ExperimentConfig(seed=seed) for seed in range(300)}
        >>> [len(pack) for pack in packs(models)]
        [256, 44]
    """
    full: list[dict[str, ExperimentConfig]] = []
    filling: dict[object, tuple[int, dict[str, ExperimentConfig]]] = {}
    for name, config in models.items():
        key: object = pack_key(config) if shares_a_pack(config) else name
        n_heads, pack = filling.get(key, (PACK_HEADS, {}))
        if n_heads + config.model.n_heads > PACK_HEADS:
            n_heads, pack = 0, {}
            full.append(pack)
        pack[name] = config
        filling[key] = n_heads + config.model.n_heads, pack
    return full


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
        left = {
            name: config
            for name, config in pack.items()
            if name not in started and not is_finished(run_folder / name)
        }
        if left:
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
    with locked(lock_of(job.file), wait=wait):
        delete_leftovers(job.file.parent, job.file.name.__eq__)
        return _train_job(job, on_log, device=device, memory=memory)


def lock_of(file: Path) -> Path:
    """The lock of the pack whose state lies in a file."""
    return file.with_name(f".{file.stem}.lock")


def delete_free_locks(run_folder: Path) -> None:
    """Delete the locks of packs that processes which were killed have left."""
    for file in run_folder.glob(".training-*.lock"):
        if LOCK_NAME.fullmatch(file.name):
            with suppress(CheckpointError), locked(file):
                pass


def _train_job(job: PackJob, on_log: OnLog | None, *, device: str, memory: int | None) -> Outcome:
    run_folder = job.file.parent
    left = {n: config for n, config in job.models.items() if not is_finished(run_folder / n)}
    # Nothing may be left for a job that is run again: its outcome was lost, and not its work.
    if not left:
        job.file.unlink(missing_ok=True)
        return Outcome(0, 0.0, float("nan"), {})
    name, config = next(iter(left.items()))
    if config.train.optimizer != "adam":
        return _train_on_moments(run_folder, name, config, on_log)
    if memory is not None:
        _require_memory(job, memory)
    if shares_a_pack(config):
        require_memory(pack_bytes(job.models), f"{job.file}: training {len(job.models)} models")
    kind: type[Pack | DeepRun] = Pack if shares_a_pack(config) else DeepRun
    if job.file.exists():
        pack = kind.restore(job.file, device=device)
    else:
        pack = kind(left, device=device)
        pack.save(job.file)
    first_step = pack.step
    seconds = train_run(pack, job.file, on_log=on_log)
    for name, trained in pack.results().items():
        if name in left and name not in pack.diverged:
            trained.save(run_folder / name, shared=True)
    job.file.unlink()
    losses = pack.rows["eval_loss"][-1]
    loss = losses[torch.isfinite(losses)].mean().item()
    return Outcome(pack.step - first_step, seconds, loss, pack.diverged)


def pack_bytes(models: Mapping[str, ExperimentConfig]) -> int:
    """Memory that training a pack of one-layer models adds to a process on the CPU, at most.

    Example:
        >>> models = {f"{seed}": ExperimentConfig(seed=seed) for seed in range(256)}
        >>> f"{pack_bytes(models) / 2**20:.0f} MiB"
        '35 MiB'
    """
    config, n_models = next(iter(models.values())), len(models)
    task, train = config.task, config.train
    n_heads = sum(config.model.n_heads for config in models.values())
    head = config.d_model * 3 * config.d_head + config.d_head * task.d_y
    n_rows = 2 + train.steps // train.log_every
    # Weights, gradients and Adam's moments, and the sums of the compiled step.
    floats = n_heads * (8 * head + LANES * config.d_model * (task.d_x + task.d_y))
    # Snapshots are there as they were trained and as they are named, W_O in full width, and those of one model, while
    # it is written, as one tensor and as the bytes of its file. Rows of the history are there twice.
    named, most = 4 * config.d_model * config.d_head, max(c.model.n_heads for c in models.values())
    floats += len(train.snapshot_steps) * (n_heads * (head + named) + 2 * most * named)
    floats += 2 * n_rows * (2 * n_models + 4 * n_heads)
    # A chunk of prompts, with what it is made from.
    batch = max(train.batch_size, train.n_eval_prompts) * prompt_bytes(task)
    return 4 * floats + 4 * min(batch, CHUNK_BYTES)


def _require_memory(job: PackJob, memory: int) -> None:
    config = next(iter(job.models.values()))
    if not shares_a_pack(config):
        raise CheckpointError(f"{job.file}: --memory is for packs of one-layer models.")
    needed = peak_memory() + FIRST_USE_BYTES + pack_bytes(job.models)
    if needed > memory:
        raise CheckpointError(
            f"{job.file}: may need {needed / 1e9:.2f} GB with {len(job.models)} models and "
            f"{len(config.train.snapshot_steps)} snapshots of each; --memory allows {memory / 1e9:.2f} GB."
        )


def _train_on_moments(
    run_folder: Path, name: str, config: ExperimentConfig, on_log: OnLog | None
) -> Outcome:
    """Train a model of linear attention; it takes seconds and needs no state."""
    start, steps = time.monotonic(), config.train.steps
    try:
        trained = train_linear(config)
    except FloatingPointError:
        return Outcome(0, 0.0, float("nan"), {name: None})
    except RuntimeError as error:
        raise CheckpointError(f"{run_folder / name}: {error}") from None
    trained.save(run_folder / name, shared=True)
    seconds = time.monotonic() - start
    final = trained.history.iloc[-1]
    if on_log is not None:
        on_log(Progress(steps, steps, 1, float(final["loss"]), steps / seconds))
    return Outcome(steps, seconds, float(final["eval_loss"]), {})
