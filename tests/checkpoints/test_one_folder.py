"""A folder is one model: config.json lists the SHA-256 of the files that the package writes beside it."""

import json
import shutil
from hashlib import sha256
from pathlib import Path

import pandas as pd
import pytest
import torch

from mechinterp import load
from mechinterp.checkpoints.io.files import CheckpointError
from mechinterp.checkpoints.native.folder import outline_of
from tests.conftest import CHECKPOINTS, refused

NAMES = ("softmax-h2-s0", "softmax-h2-s1")
FILES = ("model.safetensors", "history.parquet", "snapshots.safetensors")


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two models of one architecture, written with hashes."""
    for name in NAMES:
        load(name).save_pretrained(tmp_path / name, card="a card")
    return [tmp_path / name for name in NAMES]


def whole(folder: Path) -> None:
    """Read all that a folder has."""
    checkpoint = load(folder)
    assert checkpoint.history is not None
    assert len(checkpoint.snapshots) == len(checkpoint.steps) > 1


def test_config_lists_the_files_that_are_written_with_it(folders: list[Path]):
    folder = folders[0]
    listed = json.loads((folder / "config.json").read_text())["files"]
    assert listed == {name: sha256((folder / name).read_bytes()).hexdigest() for name in FILES}
    whole(folder)
    assert outline_of(folder).history.equals(load(folder).history)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_model_is_refused(name: str, folders: list[Path]):
    one, other = folders
    shutil.copy(other / name, one / name)
    with refused(name, "SHA-256", error=CheckpointError):
        whole(one)
    if name == "model.safetensors":
        with refused(name, error=CheckpointError):
            outline_of(one)
    if name == "history.parquet":
        with refused(name, error=CheckpointError):
            outline_of(one).history  # noqa: B018


@pytest.mark.parametrize("name", FILES)
def test_a_folder_that_was_copied_in_part_is_refused(name: str, folders: list[Path]):
    (folders[0] / name).unlink()
    with refused(name, error=CheckpointError):
        whole(folders[0])


def test_a_card_may_change_and_a_folder_without_hashes_is_read(folders: list[Path]):
    folder = folders[0]
    (folder / "README.md").write_text("another card")
    whole(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["files"]
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(folders[1] / "model.safetensors", folder / "model.safetensors")
    assert torch.equal(load(folder).weights.W_O, load(NAMES[1]).weights.W_O)


@pytest.mark.parametrize("name", NAMES)
def test_published_folders_are_read(name: str):
    assert "files" not in json.loads((CHECKPOINTS / name / "config.json").read_text())
    whole(CHECKPOINTS / name)


@pytest.mark.parametrize("files", [["model.safetensors"], {"model.safetensors": 3}, "none"])
def test_a_list_of_files_that_is_wrong_is_refused(files: object, folders: list[Path]):
    config = json.loads((folders[0] / "config.json").read_text())
    (folders[0] / "config.json").write_text(json.dumps(config | {"files": files}))
    with refused("files" if not isinstance(files, dict) else "SHA-256", error=CheckpointError):
        load(folders[0])


def test_an_edited_history_is_refused(folders: list[Path]):
    file = folders[0] / "history.parquet"
    pd.read_parquet(file).assign(loss=0.0).to_parquet(file, index=False)
    with refused("history.parquet", error=CheckpointError):
        load(folders[0]).history  # noqa: B018
