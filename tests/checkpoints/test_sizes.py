"""Sizes that a config.json claims: held against the weights, and never what a loop or a batch is made of first."""

import json
from pathlib import Path

import pytest

from mechinterp.checkpoints.checkpoint import save
from mechinterp.checkpoints.io.errors import CheckpointError
from mechinterp.checkpoints.load import load
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.training.general.trainer import initial_deep_weights
from tests.checkpoints.test_archives import little
from tests.conftest import Run


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    config = ExperimentConfig(
        task=TaskConfig(d_x=3), model=ModelConfig(n_layers=2, context_only=True, score="linear")
    )
    save(tmp_path / "deep", config, initial_deep_weights(config), step=0)
    return tmp_path / "deep"


def claims(folder: Path, section: str, name: str, value: int) -> None:
    document = json.loads((folder / "config.json").read_text())
    document["experiment"][section][name] = value
    (folder / "config.json").write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("section", "name", "value", "words"),
    [
        ("model", "n_layers", 10**9, "model.n_layers must be <= 1048576, got 1000000000"),
        ("model", "n_layers", 2**20, "model.n_layers must be that of the weights, 2, got 1048576"),
        ("model", "n_layers", 1, "model.n_layers must be that of the weights, 2, got 1"),
        ("task", "context_length", 2**63, "task.context_length must be <= 1048576, got 9223"),
        ("task", "d_x", 2**63, "task.d_x must be <= 1048576, got 9223"),
        ("task", "d_y", 10**30, "task.d_y must be <= 1048576, got 1000"),
        ("model", "n_heads", 2**63, "model.n_heads must be <= 1048576, got 9223"),
        ("model", "d_head", 2**63, "model.d_head must be <= 1048576, got 9223"),
        ("model", "d_model", 2**63, "model.d_model must be <= 1048576, got 9223"),
    ],
)
def test_a_size_that_no_weights_have(
    deep: Path, run: Run, section: str, name: str, value: int, words: str
):
    load(deep)
    claims(deep, section, name, value)
    with little(), pytest.raises(CheckpointError, match=words):
        load(deep)
    for command in ("info", "classify"):
        assert words in run(command, deep).err


def test_a_context_length_that_is_asked_for(deep: Path, run: Run):
    ran = run("ablate", deep, "--context-length", 2**63)
    ran.assert_refused(f"task.context_length must be <= 1048576, got {2**63}")
