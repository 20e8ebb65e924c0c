"""Trained models by name."""

import os
from pathlib import Path

import pytest

from mechinterp import load
from mechinterp.checkpoints import shipped
from mechinterp.checkpoints.io.files import CheckpointError
from tests.checkpoints.files import assert_refused

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
