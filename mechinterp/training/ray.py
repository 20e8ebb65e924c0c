"""Packs of a run as Ray tasks, on all machines of a cluster.

A task trains a pack in the run folder, which all machines must share. If a machine is lost, another one resumes its
pack from the state saved there.
"""

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

from mechinterp.checkpoints.io.files import CheckpointError, one_line
from mechinterp.training.run import OnLog, Progress
from mechinterp.training.run_folder import Models
from mechinterp.training.train import Jobs, TrainingSummary, train_job

# Ray replaces these names by the machine's own network address, but not other loopback addresses.
REPLACED = ("localhost", "127.0.0.1", "::1")
LOOPBACK = "127.0.0.2" if sys.platform == "linux" else None
RETRIES = 8
"""Number of restarts of a pack after its machine was lost."""


def train_on_ray(
    jobs: Jobs,
    on_log: OnLog | None = None,
    *,
    address: str | None = None,
    device: str = "auto",
    memory: int | None = None,
) -> Iterator[TrainingSummary]:
    """Train packs as Ray tasks with one CPU each, and one GPU if GPUs are used; yields outcomes as they finish.

    Args:
        on_log: Called when a pack is done, with the updates of all packs so far.
        address: Address of the cluster; None: RAY_ADDRESS, else a new cluster on this machine.
        device: "cuda", "cpu", or "auto" (GPUs if the cluster has any).
        memory: Memory limit of a task in bytes, which Ray reserves for it; None: no limit.
    Raises:
        ValueError: If Ray is not installed, the cluster does not exist, or it lacks the requested GPUs.
        CheckpointError: If a pack fails, or is lost more than RETRIES times.
    """
    if not jobs:
        return
    total = sum(map(_updates, jobs.values()))
    with _cluster(address) as ray:
        kind = _device(device, ray.cluster_resources().get("GPU", 0))
        gpus = 1 if kind == "cuda" else 0
        options = {"num_cpus": 1, "num_gpus": gpus, "memory": memory, "max_retries": RETRIES}
        task = ray.remote(**options)(train_anywhere)
        given = device if kind == "cuda" else kind
        # Absolute but not resolved: a link may have another target on another machine.
        tasks = {
            task.remote(file.absolute(), models, given, memory): file
            for file, models in jobs.items()
        }
        start, done = time.monotonic(), 0
        for file, pack in _as_they_come(ray, tasks):
            done += _updates(jobs[file])
            if on_log is not None:
                rate, lost = done / (time.monotonic() - start), tuple(pack.diverged)
                on_log(Progress(done, total, len(jobs[file]), pack.loss, rate, lost))
            yield pack


def train_anywhere(
    file: Path, models: Models, device: str, memory: int | None = None
) -> TrainingSummary:
    """`train_job` in a Ray worker.

    Raises:
        CheckpointError: If this machine cannot access the run folder.
    """
    folder = file.parent
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: not there on every machine; a run folder must lie on storage that all machines share."
        )
    torch.set_num_threads(1)
    return train_job(file, models, device=device, memory=memory, wait=True)


def _device(device: str, n_gpus: float) -> str:
    if device == "cuda" and not n_gpus:
        raise ValueError("--device cuda needs a cluster with GPUs; there are none.")
    return "cuda" if device != "cpu" and n_gpus else "cpu"


def _updates(models: Models) -> int:
    return next(iter(models.values())).train.steps


@contextmanager
def _cluster(address: str | None) -> Iterator[ModuleType]:
    """Context with a Ray connection; an existing connection is used and stays open."""
    try:
        import ray
    except ModuleNotFoundError:
        raise ValueError("--engine ray needs Ray: pip install ray.") from None
    ours = not ray.is_initialized()
    if ours:
        try:
            _connect(ray, address or os.environ.get("RAY_ADDRESS"))
        except OSError as error:
            raise ValueError(f"--address {address}: no Ray there ({one_line(error)}).") from None
    try:
        yield ray
    finally:
        if ours:
            ray.shutdown()


def _connect(ray: ModuleType, address: str | None) -> None:
    """Connect to a cluster, or start one that is reachable from this machine only."""
    settings: dict[str, object] = {"include_dashboard": False, "log_to_driver": False}
    if address is not None:
        _require_listener(ray, address)
        ray.init(address=address, **settings)
        return
    # "local": without it Ray joins the cluster that was last started on this machine.
    ray.init(address="local", _node_ip_address=LOOPBACK, **settings)


def _require_listener(ray: ModuleType, address: str) -> None:
    """Refuse an address without a listener, which Ray itself would try for a quarter of an hour."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    if not port.isdigit():
        return
    socket.create_connection((host, int(port)), timeout=10).close()
    if host not in REPLACED:
        return
    own = ray.util.get_node_ip_address()
    try:
        socket.create_connection((own, int(port)), timeout=10).close()
    except OSError:
        raise ValueError(
            f"--address {address}: Ray goes to {own}:{port} in its place, and nobody listens there; start the "
            f"cluster with --node-ip-address {own}, or with {LOOPBACK or own} for this machine alone."
        ) from None


def _as_they_come(
    ray: ModuleType, tasks: dict[object, Path]
) -> Iterator[tuple[Path, TrainingSummary]]:
    """State files of the jobs with their summaries, in the order in which they finish."""
    while tasks:
        (done, *_), _ = ray.wait(list(tasks))
        file = tasks.pop(done)
        try:
            yield file, ray.get(done)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError as error:
            reason = str(error).strip().partition("\n")[0]
            raise CheckpointError(
                f"{file}: lost more than {RETRIES} times ({reason}); go on with --resume."
            ) from None
