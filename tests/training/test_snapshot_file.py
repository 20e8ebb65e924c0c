"""Snapshots lie in one file, [step, ...] by name; folders with a file per step are still read."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mechinterp.checkpoints.checkpoint import Checkpoint, load
from mechinterp.checkpoints.io.errors import CheckpointError
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, TrainConfig, override
from mechinterp.training.train import train
from tests.conftest import assert_same
from tests.training.test_trainer import refused

CONFIG = ExperimentConfig(
    task=TaskConfig(d_x=2, context_length=4),
    model=ModelConfig(n_layers=2, n_heads=1, d_mlp=3),
    train=TrainConfig(steps=10, batch_size=8, log_every=5, snapshot_every=4, n_eval_prompts=8),
)


@pytest.fixture
def trained(tmp_path: Path) -> Checkpoint:
    return train(CONFIG, out=tmp_path / "model")


def snapshot_file(checkpoint: Checkpoint) -> Path:
    return checkpoint.path / "snapshots.safetensors"


@pytest.mark.slow
def test_a_run_leaves_one_file_of_snapshots(trained: Checkpoint):
    names = {"config.json", "history.parquet", "model.safetensors", "snapshots.safetensors"}
    assert {file.name for file in trained.path.iterdir()} == names
    stored = load_file(snapshot_file(trained))
    assert stored.pop("step").tolist() == [0, 4, 8]
    assert stored.keys() == trained.weights.by_name.keys()
    assert list(trained.snapshots) == [0, 4, 8]
    for row, weights in enumerate(trained.snapshots.values()):
        for name, tensor in weights.by_name.items():
            assert torch.equal(tensor, stored[name][row])
        for tensor in weights.tensors.values():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes  # and not all steps of it
    shorter = train(override(CONFIG, "train.steps=8"), out=trained.path.parent / "8")
    assert_same(shorter.weights, trained.snapshots[8])


def test_a_folder_with_a_file_per_step_is_still_read_and_saved_as_one_file(trained: Checkpoint):
    (trained.path / "snapshots").mkdir()
    for step, weights in trained.snapshots.items():
        save_file(weights.by_name, trained.path / "snapshots" / f"{step}.safetensors")
    snapshot_file(trained).unlink()
    old = load(trained.path)
    again = trained.path.parent / "again"
    old.save_pretrained(again)
    assert (again / "snapshots.safetensors").is_file()
    assert not (again / "snapshots").exists()
    for checkpoint in (old, load(again)):
        assert list(checkpoint.snapshots) == [0, 4, 8]
        for step, weights in trained.snapshots.items():
            assert_same(checkpoint.snapshots[step], weights)


def test_a_model_without_snapshots_has_no_such_file(trained: Checkpoint):
    snapshot_file(trained).unlink()
    bare = load(trained.path)
    assert bare.snapshots == {}
    bare.save_pretrained(trained.path.parent / "bare")
    assert not (trained.path.parent / "bare" / "snapshots.safetensors").exists()


def test_narrow_numbers_are_widened_as_those_of_the_model_are(trained: Checkpoint):
    spoil(trained, lambda stored: {n: t if n == "step" else t.half() for n, t in stored.items()})
    assert load(trained.path).snapshots[4].dtype == torch.float32


def spoil(trained: Checkpoint, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]):
    stored = change(load_file(snapshot_file(trained)))
    kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(kept, snapshot_file(trained))


W_V = "blocks.0.attn.W_V"
FAULTS = {
    "no steps": ("step", lambda step: None, "must hold whole numbers, one for each"),
    "broken steps": ("step", lambda step: step + 0.5, "must hold whole numbers, one for each"),
    "falling steps": (
        "step",
        lambda step: step[[0, 2, 1]],
        "must rise from 0 or later, got [0, 8, 4]",
    ),
    "negative step": ("step", lambda step: step - 4, "must rise from 0 or later, got [-4, 0, 4]"),
    "rows": (
        W_V,
        lambda rows: rows[:2].clone(),
        "must have 3 rows, one for each step, got shape (2,",
    ),
    "shape": (
        W_V,
        lambda rows: rows.repeat(1, 1, 1, 2),
        "must have shape (1, 3, 3), got (1, 3, 6)",
    ),
    "missing": (W_V, lambda rows: None, "is missing"),
    "not finite": (W_V, lambda rows: rows * torch.nan, "must hold finite numbers, got 9 NaN"),
}


@pytest.mark.parametrize(("name", "change", "message"), FAULTS.values(), ids=FAULTS)
def test_bad_snapshots_are_refused_in_one_line(trained, name: str, change, message: str):
    spoil(trained, lambda stored: stored | {name: change(stored[name])})
    with refused(f"{snapshot_file(trained)}: {name} {message}"):
        _ = load(trained.path).snapshots


def test_a_file_that_is_none_is_refused(trained: Checkpoint):
    snapshot_file(trained).write_bytes(snapshot_file(trained).read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"snapshots\.safetensors: not a readable safetens"):
        _ = load(trained.path).snapshots
    snapshot_file(trained).unlink()
    snapshot_file(trained).mkdir()
    with pytest.raises(CheckpointError, match="must be a regular file, got a folder"):
        _ = load(trained.path).snapshots
