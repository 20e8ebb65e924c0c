"""Checkpoints of models of several layers come back as they were saved, and bad ones are refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import mechinterp
from mechinterp.checkpoints.checkpoint import Checkpoint, load, save
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.icl.prompts import generator_for, sample_prompts
from mechinterp.icl.sparse_predictors import preprocess_then_optimise
from mechinterp.models.constructions.sparse import preprocess_then_optimise_model
from mechinterp.models.shapes import tensor_shapes
from mechinterp.models.weights import Weights
from mechinterp.training.general.trainer import initial_deep_weights
from tests.checkpoints.files import assert_refused
from tests.conftest import CHECKPOINTS, assert_same

CONFIG = ExperimentConfig(
    task=TaskConfig(d_x=3, d_y=2, context_length=8, sparsity=1),
    model=ModelConfig(n_layers=2, n_heads=2, d_model=6, score="relu/L", context_only=True),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "model", CONFIG, initial_deep_weights(CONFIG), step=0)
    return tmp_path / "model"


@pytest.mark.parametrize("d_model", [None, 6])
def test_a_model_comes_back_as_it_was(tmp_path: Path, d_model: int | None):
    config = replace(CONFIG, model=replace(CONFIG.model, d_model=d_model, d_head=3))
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
    expected = tensor_shapes(CONFIG.model, CONFIG.task.d_x, CONFIG.task.d_y)
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
    prompts = sample_prompts(task, 16, generator=generator_for(0, "eval", 0), dtype=torch.float64)
    expected = preprocess_then_optimise(prompts, steps=2, eta=0.8)[2]
    assert (checkpoint.predictor.predict(prompts) - expected).abs().max() <= 1e-12
    assert (checkpoint.model.predict(prompts) - expected).abs().max() <= 1e-12


def test_one_class_reads_models_of_one_layer_and_of_several(folder: Path):
    for path, n_layers in ((CHECKPOINTS / "softmax-h2-s0", 1), (folder, 2)):
        checkpoint = Checkpoint.from_pretrained(path)
        assert (type(checkpoint), checkpoint.weights.n_layers) == (Checkpoint, n_layers)
        assert checkpoint.step == load(path).step


def test_saved_again_it_is_the_same(folder: Path, tmp_path: Path):
    checkpoint = Checkpoint.from_pretrained(folder)
    checkpoint.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        folder / "model.safetensors"
    ).read_bytes()
    assert load(tmp_path / "again").config == checkpoint.config


def test_broken_files_are_refused(folder: Path):
    file = folder / "model.safetensors"
    good = load_file(file)
    name = "blocks.1.attn.W_K"
    bad = {
        r"unembed.W_U must have shape \(6, 2\), got \(6, 1\)": good
        | {"unembed.W_U": good["unembed.W_U"][:, :1].contiguous()},
        "the weights must have one dtype": good | {name: good[name].double()},
    }
    for message, tensors in bad.items():
        save_file(tensors, file)
        assert_refused(message, load, folder)


def test_weights_of_another_config_are_not_saved(tmp_path: Path, folder: Path):
    weights, path = initial_deep_weights(CONFIG), tmp_path / "other"

    def of(**changes: object) -> Weights:
        return replace(weights, model=replace(weights.model, **changes))

    def config(**changes: object) -> ExperimentConfig:
        return replace(CONFIG, model=replace(CONFIG.model, **changes))

    causal = {"context_only": False, "score": "softmax", "d_head": 3}
    narrow = initial_deep_weights(config(d_model=None, d_head=3))
    wrong = {
        "already holds a checkpoint": (folder, CONFIG, weights),
        "context_only must be the config's False, got True": (
            path,
            config(**causal),
            of(score="softmax"),
        ),
        "scale must be 1/sqrt": (path, CONFIG, replace(weights, scale=1.0)),
        "d_model must be the config's 6, got None": (path, CONFIG, narrow),
        "n_layers must be the config's 1, got 2": (path, config(n_layers=1), weights),
    }
    for message, (where, there, given) in wrong.items():
        assert_refused(message, save, where, there, given, step=0)
    assert not path.exists()


def test_a_config_without_the_later_fields_is_that_of_before():
    document = json.loads((CHECKPOINTS / "softmax-h2-s0" / "config.json").read_text())
    assert "context_only" not in document["experiment"]["model"]
    assert load(CHECKPOINTS / "softmax-h2-s0").config.model == ModelConfig(n_heads=2)
