"""Checkpoints of models of several layers come back as they were saved; sizes that a config.json claims are held against
the weights, and never what a loop or a batch is made of first."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import mechinterp
from mechinterp.checkpoints.checkpoint import Checkpoint, load, save
from mechinterp.checkpoints.io.errors import CheckpointError
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.icl.prompts import sample_prompts
from mechinterp.icl.sparse_predictors import preprocess_then_optimise
from mechinterp.models.constructions.sparse import preprocess_then_optimise_model
from mechinterp.models.shapes import tensor_shapes
from mechinterp.training.general.trainer import initial_deep_weights
from tests.checkpoints.test_archives import little
from tests.checkpoints.test_native import DEEP, claiming
from tests.conftest import CHECKPOINTS, Run, assert_same


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "model", DEEP, initial_deep_weights(DEEP), step=0)
    return tmp_path / "model"


@pytest.mark.parametrize("d_model", [None, 6])
def test_a_model_comes_back_as_it_was(tmp_path: Path, d_model: int | None):
    config = replace(DEEP, model=replace(DEEP.model, d_model=d_model, d_head=3))
    weights = initial_deep_weights(config).to(torch.float64)
    start = initial_deep_weights(replace(config, seed=1)).to(torch.float64)
    save(tmp_path / "model", config, weights, step=7, snapshots={0: start, 7: weights})
    for checkpoint in (load(tmp_path / "model"), mechinterp.load(tmp_path / "model")):
        expected = "Checkpoint(model: 2 layers of 2 heads, d_x=3, context_length=8, step 7)"
        assert repr(checkpoint) == expected
        assert (checkpoint.config, checkpoint.history) == (config, None)
        assert_same(checkpoint.weights, weights)
        assert list(checkpoint.snapshots) == [0, 7]
        assert_same(checkpoint.snapshots[0], start)
        assert_same(checkpoint.model.weights, weights)


def test_files_carry_the_names_and_shapes_of_the_hooked_model(folder: Path):
    tensors = load_file(folder / "model.safetensors")
    expected = tensor_shapes(DEEP.model, DEEP.task.d_x, DEEP.task.d_y)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == expected
    parameters = dict(load(folder).model.named_parameters())
    assert {name: tuple(t.shape) for name, t in parameters.items()} == expected


def test_the_construction_is_a_checkpoint(tmp_path: Path):
    task = TaskConfig(d_x=5, context_length=12, sparsity=2, nonzeros="signs")
    model = ModelConfig(
        n_layers=3, n_heads=5, d_head=5, d_model=11, score="linear/L", context_only=True
    )
    weights = preprocess_then_optimise_model([0.8, 0.8], d_x=5)
    save(tmp_path / "model", ExperimentConfig(task=task, model=model), weights, step=0)
    checkpoint = load(tmp_path / "model")
    prompts = sample_prompts(task, 16, seed=0, dtype=torch.float64)
    expected = preprocess_then_optimise(prompts, steps=2, eta=0.8)[2]
    assert (checkpoint.predictor.predict(prompts) - expected).abs().max() <= 1e-12
    assert (checkpoint.model.predict(prompts) - expected).abs().max() <= 1e-12


def test_saved_again_it_is_the_same(folder: Path, tmp_path: Path):
    checkpoint = Checkpoint.from_pretrained(folder)
    checkpoint.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        folder / "model.safetensors"
    ).read_bytes()
    assert load(tmp_path / "again").config == checkpoint.config


def test_a_config_without_the_later_fields_is_that_of_before():
    document = json.loads((CHECKPOINTS / "softmax-h2-s0" / "config.json").read_text())
    assert "context_only" not in document["experiment"]["model"]
    assert load(CHECKPOINTS / "softmax-h2-s0").config.model == ModelConfig(n_heads=2)


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
    folder: Path, run: Run, section: str, name: str, value: int, words: str
):
    load(folder)
    claiming(section, name, value)(folder)
    with little(), pytest.raises(CheckpointError, match=words):
        load(folder)
    for command in ("info", "classify"):
        assert words in run(command, folder).err


def test_a_context_length_that_is_asked_for(folder: Path, run: Run):
    ran = run("ablate", folder, "--context-length", 2**63)
    ran.assert_refused(f"task.context_length must be <= 1048576, got {2**63}")
