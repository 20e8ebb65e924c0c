"""Shards of a sweep, killed, resumed and merged, are one run of one process, bit by bit."""

import json
import os
import signal
from pathlib import Path

import pytest

from mechinterp.checkpoints.io.files import CheckpointError
from mechinterp.training.shards import PLAN, merge_shards, shard_named, shard_of
from mechinterp.training.sweep_file import load_sweep
from tests.conftest import Run, python, refused
from tests.training.test_sweep import assert_same_folders

TRAIN = {
    **{"steps": 40, "batch_size": 8, "log_every": 10},
    **{"snapshot_every": 10, "n_eval_prompts": 64},
}
CONFIG = {"task": {"d_x": 2, "context_length": 4}, "train": TRAIN}
GRID = {"train.learning_rate": [1e-3, 2e-3, 1e30], "seed": [0, 1]}


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    """Three packs of two models; those of the last diverge."""
    file = tmp_path / "grid.json"
    name = "lr{train.learning_rate}-s{seed}"
    file.write_text(json.dumps({"config": CONFIG, "grid": GRID, "name": name}))
    return file


KILLED = """
import os, signal
from mechinterp.training import run
from mechinterp import cli

run.SAVE_SECONDS = 0.0
saved = run.TrainingRun.save
def dies(self, file):
    saved(self, file)
    if self.step >= 20:
        os.kill(os.getpid(), signal.SIGKILL)
run.TrainingRun.save = dies
cli.main()
"""


@pytest.mark.slow
def test_a_killed_and_resumed_array_of_two_shards_is_one_run(run: Run, grid: Path, tmp_path: Path):
    whole, out = tmp_path / "whole", tmp_path / "out"
    asked = ("sweep", grid, "--device", "cpu", "-q", "--out")
    run(*asked, whole)
    array = {"ID": "7", "MIN": "7", "COUNT": "2"}  # the first of two
    slurm = {f"SLURM_ARRAY_TASK_{name}": value for name, value in array.items()}
    killed = python("-c", KILLED, *asked, out, env=os.environ | slurm)
    assert killed.code == -signal.SIGKILL
    assert list((out / "shard-0").glob("training-*.safetensors"))
    run("sweep", "--merge", out).assert_refused("not finished")
    other = run(*asked, out, "--shard", "0/3", "--resume")
    other.assert_refused(out, "2 shards", "3")
    for number, code in ((0, 2), (1, 0)):
        ran = run(*asked, out, "--shard", f"{number}/2", "--resume")
        assert (ran.code, "did not" in ran.err) == (code, code == 2)
    run("sweep", "--merge", out).done()
    assert_same_folders(out, whole)


def test_every_model_is_in_one_shard_and_packs_stay_whole(grid: Path):
    models = load_sweep(grid)
    shards = [shard_of(models, (number, 2)) for number in range(2)]
    assert sorted(name for shard in shards for name in shard) == sorted(models)
    assert [len(shard) for shard in shards] == [4, 2]


def test_a_shard_by_text_and_by_slurm():
    assert shard_named("2/4", {"SLURM_ARRAY_TASK_COUNT": "9"}) == (2, 4)
    of_slurm = {"ID": "30", "MIN": "10", "COUNT": "4", "STEP": "10"}
    assert shard_named(None, {f"SLURM_ARRAY_TASK_{n}": v for n, v in of_slurm.items()}) == (2, 4)
    for text in ("4/4", "-1/4", "1", "a/b"):
        with refused("i/n", text):
            shard_named(text)


def test_what_is_no_sweep_of_shards_is_refused(run: Run, grid: Path, tmp_path: Path):
    with refused(PLAN, error=CheckpointError):
        merge_shards(tmp_path)
    run("sweep", grid).assert_refused("--out")
    run("sweep", grid, "--merge", tmp_path).assert_refused("--merge")
