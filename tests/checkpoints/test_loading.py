"""What lies at a path, or has a name, is found; conversion overwrites nothing."""

import os
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch

from mechinterp.checkpoints import shipped
from mechinterp.checkpoints.checkpoint import save
from mechinterp.checkpoints.io.files import CheckpointError
from mechinterp.checkpoints.load import convert
from mechinterp.checkpoints.native.exchange import hooked_state
from mechinterp.checkpoints.native.folder import HISTORY_COLUMNS
from mechinterp.checkpoints.paths import checkpoint_paths
from mechinterp.config import ExperimentConfig, TaskConfig
from mechinterp.training.one_layer.step import initial_weights
from tests.checkpoints.files import assert_refused
from tests.checkpoints.files import read as load
from tests.conftest import assert_same

CONFIG = ExperimentConfig()
HISTORY = pd.DataFrame({"step": [0], "head": [0], **{name: [0.5] for name in HISTORY_COLUMNS}})


@pytest.fixture
def native(tmp_path: Path) -> Path:
    weights = initial_weights(CONFIG)
    folder = tmp_path / "all" / "native"
    save(folder, CONFIG, weights, step=3, history=HISTORY, snapshots={0: weights})
    return folder


@pytest.fixture
def state(tmp_path: Path) -> Path:
    torch.save(hooked_state(initial_weights(CONFIG), n_ctx=50), tmp_path / "state.pt")
    return tmp_path / "state.pt"


def test_native_to_native_is_a_copy(native: Path, tmp_path: Path):
    convert(load(native), "native", tmp_path / "copy")
    copy = load(tmp_path / "copy")
    pd.testing.assert_frame_equal(copy.history, HISTORY)
    assert list(copy.snapshots) == [0]
    assert (copy.config, copy.step, copy.assumed) == (CONFIG, 3, {})


@pytest.mark.parametrize("form", ["native", "transformer-lens"])
def test_a_weights_file_of_a_folder_of_ours_is_the_folder(native: Path, tmp_path: Path, form: str):
    convert(load(native), form, tmp_path / "folder")
    folder, file = load(tmp_path / "folder"), load(tmp_path / "folder" / "model.safetensors")
    for name in ("config", "step", "path", "format", "assumed"):
        assert getattr(file, name) == getattr(folder, name)
    assert_same(file.weights, folder.weights)
    assert list(file.snapshots) == list(folder.snapshots)
    words = "n_heads is only for files that do not state it"
    assert_refused(words, load, tmp_path / "folder" / "model.safetensors", n_heads=2)


def test_an_empty_folder_is_filled_and_a_full_one_is_not(native: Path, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    files = convert(load(native), "transformer-lens", tmp_path / "empty")
    assert [file.name for file in files] == [
        *("load.py", "model.safetensors", "transformer_lens.json")
    ]
    before = {file: file.read_bytes() for file in files}
    for target in ("native", "transformer-lens"):
        with pytest.raises(CheckpointError, match=r"empty: already holds .*; it is not"):
            convert(load(native), target, tmp_path / "empty")
    assert {file: file.read_bytes() for file in files} == before


def test_a_task_is_for_files_that_do_not_state_theirs(state: Path, tmp_path: Path):
    assert_refused(r"gone\.pt: .*does not exist", load, tmp_path / "gone.pt", task={})
    assert load(state, task={"noise_var": 0}).config.task == TaskConfig(noise_var=0)
    tensors = {k: v for k, v in torch.load(state).items() if "attn.W" in k}
    torch.save(tensors, tmp_path / "four.pt")
    assert load(tmp_path / "four.pt", task={"d_x": 5}).config.task == TaskConfig()
    words = r"four\.pt: task.d_x must be the weights' 5, got 4"
    assert_refused(words, load, tmp_path / "four.pt", task={"d_x": 4, "d_y": 1})


def test_a_folder_stands_for_the_checkpoints_in_it(native: Path, state: Path, tmp_path: Path):
    exchange = tmp_path / "all" / "exchange"
    convert(load(native), "transformer-lens", exchange)
    (tmp_path / "all" / "notes").mkdir()
    paths = checkpoint_paths([tmp_path / "all", state, exchange, native, tmp_path / "gone"])
    assert paths == [exchange, native, state, exchange, native, tmp_path / "gone"]
    alone = tmp_path / "all" / "alone"
    alone.mkdir()
    shutil.copy(state, alone)
    assert checkpoint_paths([tmp_path / "all", alone]) == [alone, exchange, native, alone]
    assert load(alone).name == "alone"


# Trained models by name.

ROOT = Path(__file__).parents[2]


def test_what_lies_at_a_path_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert shipped.shipped_path("softmax-h2-s0").is_dir()
    (tmp_path / "softmax-h2-s0").mkdir()
    assert shipped.shipped_path("softmax-h2-s0") == Path("softmax-h2-s0")
    assert_refused(r"softmax-h2-s0", load, "softmax-h2-s0")


def test_a_clone_has_all_trained_models_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert load("softmax-h3-s1").path == ROOT / "checkpoints" / "softmax-h3-s1"


def test_a_name_that_nothing_has_is_refused_with_those_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"^softmax-h9: .* does not exist, .*garg-gpt2, .*two-tasks-h4-s0; a clone",
    ):
        load("softmax-h9")


def test_bundled_files_are_links_to_those_of_the_clone():
    for name in shipped.bundled_names():
        for file in (shipped.BUNDLED / name).iterdir():
            assert file.is_symlink()
            assert os.path.samefile(file, ROOT / "checkpoints" / name / file.name)
