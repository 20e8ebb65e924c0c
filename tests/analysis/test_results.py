"""The table of a sweep: what was asked for, and what came of it."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from mechinterp.analysis.comparison import sweep_frame
from mechinterp.checkpoints.checkpoint import save
from mechinterp.checkpoints.io.errors import CheckpointError
from mechinterp.checkpoints.native.folder import COLUMNS
from mechinterp.checkpoints.native.history import write_own_table
from mechinterp.config import ExperimentConfig, TaskConfig, override, value_of
from mechinterp.models.constructions.one_layer import debiased_gradient_step, kernel_head, zero_head
from mechinterp.models.heads import stack

BASE = ExperimentConfig(task=TaskConfig(noise_var=0.2))
MODELS = {
    "step": override(BASE, "model.n_heads=3", "seed=4", "train.snapshot_every=10"),
    "lost": override(BASE, "train.learning_rate=1"),
    "kernel": override(
        BASE, "model.n_heads=1", "model.d_head=6", "task.supports=[[0, 1, 2, 3, 4]]"
    ),
}


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Three heads of which two make a step of size 0.88, and a kernel head, with the history of the first."""
    step = stack([debiased_gradient_step(0.88, 0.02, d_x=5), zero_head(d_x=5)])
    columns = {"step": [0, 7], "head": [0, 0]} | {name: [0.0, 0.0] for name in COLUMNS}
    losses = {"loss": [float("nan"), 0.25], "eval_loss": [1.0, 0.5]}
    history = pd.DataFrame(columns | losses)
    save(tmp_path / "step", MODELS["step"], step, step=7, history=history)
    save(tmp_path / "kernel", MODELS["kernel"], kernel_head(omega=0.5, mu=1.5, d_x=5), step=9)
    return tmp_path


@pytest.mark.slow
def test_a_row_holds_the_config_and_what_was_found(run_folder: Path):
    frame = sweep_frame(MODELS, run_folder, diverged={"lost": 100})
    assert frame["name"].tolist() == list(MODELS)
    assert frame["id"].tolist() == [config.id for config in MODELS.values()]
    for field in ("seed", "task.noise_var", "task.covariance.kind", "train.learning_rate"):
        assert frame[field].tolist() == [value_of(config, field) for config in MODELS.values()]
    assert frame["steps"].tolist() == [7, 100, 9]
    assert frame["diverged"].tolist() == [False, True, False]
    assert frame["pattern"].fillna("none").tolist() == ["debiased_gd", "none", "kernel_regression"]
    assert frame["loss"].tolist()[0] == 0.25
    assert frame["eval_loss"].tolist()[0] == 0.5
    assert frame[["loss", "eval_loss"]].isna().all(axis=1).tolist() == [False, True, True]
    assert frame["labels"].tolist() == [["positive", "negative", "dummy"], None, ["positive"]]
    # mu omega of both heads adds up to eta = 0.88, with |omega| = 0.02.
    assert frame["omega"][0] == pytest.approx([0.02, -0.02, 0], rel=1e-6)
    assert frame["mu"][0] == pytest.approx([22, -22, 0], rel=1e-6)
    assert (frame["omega"][2], frame["mu"][2]) == (pytest.approx([0.5]), pytest.approx([1.5]))


@pytest.mark.slow
def test_the_table_is_the_same_after_a_trip_through_its_file(run_folder: Path):
    frame = sweep_frame(MODELS, run_folder, diverged={"lost": None})
    file = run_folder / "results.parquet"
    write_own_table(file, frame)
    stored = pd.read_parquet(file)
    assert stored.columns.tolist() == frame.columns.tolist()
    assert stored["steps"].isna().tolist() == [False, True, False]
    assert str(stored["train.snapshot_every"].dtype) == "Int64"
    assert stored["train.snapshot_every"].dropna().tolist() == [10]
    assert stored["model.d_head"].dropna().tolist() == [6]
    assert [None if mu is None else mu.tolist() for mu in stored["mu"]] == frame["mu"].tolist()
    # One that is there is replaced: it is made anew whenever the run goes on.
    again = sweep_frame({"step": MODELS["step"]}, run_folder)
    write_own_table(file, again)
    assert len(pd.read_parquet(file)) == 1


@pytest.mark.slow
def test_a_model_that_is_missing_or_cannot_be_written_is_named(run_folder: Path):
    with pytest.raises(CheckpointError, match=r"/lost: a checkpoint is a folder"):
        sweep_frame(MODELS, run_folder)
    frame = sweep_frame({"step": replace(MODELS["step"])}, run_folder)
    with pytest.raises(CheckpointError, match=r"results\.parquet: cannot be written \("):
        write_own_table(run_folder / "step" / "config.json" / "results.parquet", frame)
