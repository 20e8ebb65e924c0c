"""Snapshots lie in one file, [step, ...] by name; folders with a file per step are still read."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mechinterp.checkpoints.checkpoint import Checkpoint, load
from mechinterp.checkpoints.io.files import CheckpointError
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, TrainConfig, override
from mechinterp.training.train import train
from tests.conftest import assert_same, refused, without_hashes

CONFIG = ExperimentConfig(
    task=TaskConfig(d_x=2, context_length=4),
    model=ModelConfig(n_layers=2, n_heads=1, d_mlp=3),
    train=TrainConfig(steps=10, batch_size=8, log_every=5, snapshot_every=4, n_eval_prompts=8),
)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(CONFIG, out=tmp_path_factory.mktemp("run") / "model").path


@pytest.fixture
def trained(stored: Path, tmp_path: Path) -> Checkpoint:
    """A copy, to be spoilt."""
    return load(shutil.copytree(stored, tmp_path / "model"))


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
    without_hashes(trained.path)
    old = load(trained.path)
    again = trained.path.parent / "again"
    old.save_pretrained(again)
    assert (again / "snapshots.safetensors").is_file()
    assert not (again / "snapshots").exists()
    for checkpoint in (old, load(again)):
        assert list(checkpoint.snapshots) == [0, 4, 8]
        for step, weights in trained.snapshots.items():
            assert_same(checkpoint.snapshots[step], weights)


def spoil(trained: Checkpoint, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]):
    stored = change(load_file(snapshot_file(trained)))
    kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(kept, snapshot_file(trained))


W_V = "blocks.0.attn.W_V"
FAULTS = {
    "no steps": ("step", lambda step: None, ("whole numbers",)),
    "broken steps": ("step", lambda step: step + 0.5, ("whole numbers",)),
    "falling steps": ("step", lambda step: step[[0, 2, 1]], ("rise", [0, 8, 4])),
    "negative step": ("step", lambda step: step - 4, ("rise", [-4, 0, 4])),
    "rows": (W_V, lambda rows: rows[:2].clone(), ("3 rows", "(2,")),
    "shape": (W_V, lambda rows: rows.repeat(1, 1, 1, 2), ((1, 3, 3), (1, 3, 6))),
    "missing": (W_V, lambda rows: None, ("missing",)),
    "not finite": (W_V, lambda rows: rows * torch.nan, ("finite", "9 NaN")),
}


@pytest.mark.parametrize(("name", "change", "words"), FAULTS.values(), ids=FAULTS)
def test_bad_snapshots_are_refused_in_one_line(trained, name: str, change, words: tuple):
    spoil(trained, lambda stored: stored | {name: change(stored[name])})
    with refused(snapshot_file(trained), name, *words, error=CheckpointError):
        _ = load(trained.path).snapshots


def test_a_file_that_is_none_is_refused(trained: Checkpoint):
    snapshot_file(trained).write_bytes(snapshot_file(trained).read_bytes()[:-10])
    with refused("snapshots.safetensors", "not a readable", error=CheckpointError):
        _ = load(trained.path).snapshots
    snapshot_file(trained).unlink()
    snapshot_file(trained).mkdir()
    with refused("regular file", "folder", error=CheckpointError):
        _ = load(trained.path).snapshots
