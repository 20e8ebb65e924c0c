"""Folder of a run of training: its models, the state files of interrupted packs, and the locks."""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mechinterp.checkpoints.io.files import CheckpointError
from mechinterp.checkpoints.io.locks import entries, locked, require_free, settle
from mechinterp.checkpoints.native.document import read_document
from mechinterp.checkpoints.native.folder import FILES, document_file, read_history
from mechinterp.checkpoints.native.tables import require_own_table
from mechinterp.config import ExperimentConfig, differences
from mechinterp.training.one_layer.step import packs
from mechinterp.training.state import stored_models

LOCK = ".lock"
RESULTS = "results.parquet"
"""Name of a sweep's table in the run folder, written by `analysis.results`."""
STATE_NAME = re.compile(r"training-[0-9]{1,9}\.safetensors")
LOCK_NAME = re.compile(r"\.training-[0-9]{1,9}\.lock")
Models = Mapping[str, ExperimentConfig]
"""Configs by name of the model."""


def require_free_run(models: Models, run_folder: Path) -> None:
    """Refuse a folder with a run, a table or files in the place of the models."""
    table = run_folder / RESULTS
    states = [*state_files(run_folder), *([table] if os.path.lexists(table) else [])]
    targets = [run_folder / name for name in models]
    occupied = states or [target for target in targets if _is_occupied(target)]
    if occupied:
        raise CheckpointError(
            f"{occupied[0]}: already exists and is not overwritten; choose another --out, or --resume."
        )


def require_resumable(models: Models, run_folder: Path) -> None:
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


def is_of_run(name: str) -> bool:
    """True if a file of this name in a run folder is its table, a state file or a lock."""
    return name in (LOCK, RESULTS) or any(rule.fullmatch(name) for rule in (STATE_NAME, LOCK_NAME))


def _is_occupied(target: Path) -> bool:
    if not target.is_dir():
        return os.path.lexists(target)
    return any(entry != LOCK for entry in entries(target))


def final_loss(folder: Path) -> float:
    """Last `eval_loss` of a saved model; NaN without a history."""
    document, config = read_document(document_file(folder))
    history = read_history(folder, config, document["step"], document["files"])
    return float("nan") if history is None else float(history["eval_loss"].iloc[-1])


def pack_jobs(models: Models, run_folder: Path) -> dict[Path, Models]:
    """All unfinished jobs: interrupted packs first, then new ones.

    Raises:
        CheckpointError: If a state file cannot be read, or contains a model or config that is not requested.
    """
    jobs: dict[Path, Models] = {file: stored_models(file) for file in state_files(run_folder)}
    for file, stored in jobs.items():
        for name, config in stored.items():
            if name not in models:
                raise CheckpointError(f"{file}: holds {name!r}, which is not part of this run.")
            require_same(file, config, models[name])
    started = {name for stored in jobs.values() for name in stored}
    number = max((int(file.stem.partition("-")[2]) for file in jobs), default=-1) + 1
    for pack in packs(models):
        names = [n for n in pack if n not in started and not is_finished(run_folder / n)]
        if left := {name: pack[name] for name in names}:
            jobs[run_folder / f"training-{number}.safetensors"] = left
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


def delete_free_locks(run_folder: Path) -> None:
    """Delete the lock files of packs whose process was killed."""
    for file in run_folder.glob(".training-*.lock"):
        if LOCK_NAME.fullmatch(file.name):
            with suppress(CheckpointError), locked(file):
                pass
