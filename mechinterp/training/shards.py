"""Shards of a sweep: parts for the jobs of an array, each in a folder of its own, and their merge.

A shard has whole packs, so that its models have the bits of one run of the whole sweep."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import pyarrow.parquet as pq

from mechinterp.checkpoints.io.files import CheckpointError, read_json, write_new, writing
from mechinterp.checkpoints.io.locks import locked
from mechinterp.config import ExperimentConfig, from_dict
from mechinterp.training.one_layer.step import packs
from mechinterp.training.run_folder import LOCK, RESULTS, is_finished

PLAN = "shards.json"
"""File of a sharded sweep with its number of shards and its models."""
Shard = tuple[int, int]
"""Number of a shard, from 0, and the number of shards."""


def shard_named(text: str | None, environment: Mapping[str, str] = os.environ) -> Shard | None:
    """Shard of a text i/n. None: that of the running SLURM array, or no shard.

    Raises:
        ValueError: If the text is no such pair.
    Example:
        >>> shard_named("1/4"), shard_named(None, {})
        ((1, 4), None)
    """
    if text is None:
        if "SLURM_ARRAY_TASK_COUNT" not in environment:
            return None
        of = {name: int(environment.get(f"SLURM_ARRAY_TASK_{name}", 1)) for name in ("ID", "MIN")}
        step = int(environment.get("SLURM_ARRAY_TASK_STEP", 1))
        return (of["ID"] - of["MIN"]) // step, int(environment["SLURM_ARRAY_TASK_COUNT"])
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if not match or int(match[1]) >= int(match[2]):
        raise ValueError(f"--shard must be i/n with i from 0 to n - 1, got {text!r}.")
    return int(match[1]), int(match[2])


def shard_of(models: Mapping[str, ExperimentConfig], shard: Shard) -> dict[str, ExperimentConfig]:
    """Models of a shard: every n-th pack, in the order of `models`.

    Example:
        >>> models = {str(seed): ExperimentConfig(seed=seed) for seed in range(3)}
        >>> [len(shard_of(models, (number, 2))) for number in (0, 1)]
        [3, 0]
    """
    number, n_shards = shard
    names = {name for pack in packs(models)[number::n_shards] for name in pack}
    return {name: config for name, config in models.items() if name in names}


def shard_folder(models: Mapping[str, ExperimentConfig], out: Path, shard: Shard) -> Path:
    """Folder of a shard, after a check against the plan that the first shard writes.

    Raises:
        CheckpointError: If the sweep there has other models or another number of shards.
    """
    configs = {name: config.to_dict() for name, config in models.items()}
    text = json.dumps({"shards": shard[1], "models": configs})
    with writing(out), locked(out / f"{LOCK}.plan", wait=True):
        if not (out / PLAN).exists():
            write_new(out / PLAN, lambda file: file.write_text(text, encoding="utf-8"))
    there = _plan(out)
    if there["shards"] != shard[1]:
        rule = f"this sweep has {there['shards']} shards and keeps them"
        raise CheckpointError(f"{out}: {rule}, got {shard[1]}.")
    if there != json.loads(text):
        raise CheckpointError(f"{out}: holds the shards of a sweep with other models.")
    return out / f"shard-{shard[0]}"


def merge_shards(out: Path) -> tuple[dict[str, ExperimentConfig], dict[str, int | None]]:
    """Move the models of all shards into `out`, as one run leaves them. A merge that was killed
    goes on where it stopped.

    Returns:
        The configs of all models in the order of the sweep, and the diverged ones with their step.
    Raises:
        CheckpointError: If there are no shards, or one is not finished.
    """
    plan = _plan(out)
    names = list(plan["models"])
    folders = [out / f"shard-{number}" for number in range(plan["shards"])]
    diverged = {n: step for folder in folders for n, step in _diverged(folder / RESULTS).items()}
    places = {name: [f / name for f in (out, *folders) if is_finished(f / name)] for name in names}
    missing = [name for name in names if not places[name] and name not in diverged]
    if missing:
        text = (
            f"{len(missing)} of {len(names)} models are not finished, {missing[0]!r} is the first"
        )
        raise CheckpointError(f"{out}: {text}; continue their shards with --resume.")
    with writing(out), locked(out / LOCK):
        for name in names:
            if name not in diverged and places[name][0] != out / name:
                os.rename(places[name][0], out / name)
    configs = {name: from_dict(document) for name, document in plan["models"].items()}
    return configs, {name: diverged[name] for name in names if name in diverged}


def delete_shards(out: Path) -> None:
    """Delete the plan of a merged sweep, and the folders and tables of its shards."""
    with writing(out):
        for number in range(_plan(out)["shards"]):
            folder = out / f"shard-{number}"
            (folder / RESULTS).unlink(missing_ok=True)
            if folder.is_dir() and not os.listdir(folder):
                folder.rmdir()
        (out / PLAN).unlink()


def _plan(out: Path) -> dict:
    if not (out / PLAN).exists():
        raise CheckpointError(f"{out}: must be the folder of a sharded sweep; has no {PLAN}.")
    plan = read_json(out / PLAN)
    if not isinstance(plan, dict) or plan.keys() != {"shards", "models"}:
        raise CheckpointError(f"{out / PLAN}: not a plan of shards.")
    return plan


def _diverged(table: Path) -> dict[str, int | None]:
    if not table.exists():
        return {}
    rows = pq.read_table(table, columns=["name", "diverged", "steps"]).to_pylist()
    return {row["name"]: row["steps"] for row in rows if row["diverged"]}
