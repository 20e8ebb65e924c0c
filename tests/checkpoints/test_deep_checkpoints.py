"""Checkpoints of models of several layers come back as they were saved, and bad ones are refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import mechinterp
from mechinterp.checkpoints import native
from mechinterp.checkpoints.deep import DeepCheckpoint, deep_shapes, load_saved, save_deep
from mechinterp.checkpoints.errors import CheckpointError
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.icl.prompts import generator_for, sample_prompts
from mechinterp.icl.sparse_predictors import preprocess_then_optimise
from mechinterp.models.constructions_sparse import preprocess_then_optimise_model
from mechinterp.models.deep import predict_deep
from mechinterp.training.deep import initial_deep_weights
from tests.conftest import CHECKPOINTS, assert_same

CONFIG = ExperimentConfig(
    task=TaskConfig(d_x=3, d_y=2, context_length=8, sparsity=1),
    model=ModelConfig(n_layers=2, n_heads=2, d_model=6, score="relu/L", context_only=True),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_deep(tmp_path / "model", CONFIG, initial_deep_weights(CONFIG), step=0)
    return tmp_path / "model"


@pytest.mark.parametrize("d_model", [None, 6])
def test_a_model_comes_back_as_it_was(tmp_path: Path, d_model: int | None):
    config = replace(CONFIG, model=replace(CONFIG.model, d_model=d_model, d_head=3))
    weights = initial_deep_weights(config).to(torch.float64)
    start = initial_deep_weights(replace(config, seed=1))
    save_deep(tmp_path / "model", config, weights, step=7, snapshots={0: start, 7: weights})
    for checkpoint in (load_saved(tmp_path / "model"), mechinterp.load(tmp_path / "model")):
        assert isinstance(checkpoint, DeepCheckpoint)
        expected = "DeepCheckpoint(model: 2 layers of 2 heads, d_x=3, context_length=8, step 7)"
        assert repr(checkpoint) == expected
        assert (checkpoint.config, checkpoint.history) == (config, None)
        assert_same(checkpoint.weights, weights)
        assert list(checkpoint.snapshots) == [0, 7]
        assert_same(checkpoint.snapshots[0], start)
        assert_same(checkpoint.model.deep_weights, weights)


def test_files_carry_the_names_and_shapes_of_the_hooked_model(folder: Path):
    tensors = load_file(folder / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == deep_shapes(CONFIG)
    parameters = dict(load_saved(folder).model.named_parameters())
    assert {name: tuple(t.shape) for name, t in parameters.items()} == deep_shapes(CONFIG)


def test_the_construction_is_a_checkpoint(tmp_path: Path):
    task = TaskConfig(d_x=5, context_length=12, sparsity=2, nonzeros="signs")
    model = ModelConfig(
        n_layers=3, n_heads=5, d_head=5, d_model=11, score="linear/L", context_only=True
    )
    weights = preprocess_then_optimise_model([0.8, 0.8], d_x=5)
    save_deep(tmp_path / "model", ExperimentConfig(task=task, model=model), weights, step=0)
    checkpoint = load_saved(tmp_path / "model")
    prompts = sample_prompts(task, 16, generator=generator_for(0, "eval", 0), dtype=torch.float64)
    expected = preprocess_then_optimise(prompts, steps=2, eta=0.8)[2]
    assert (predict_deep(checkpoint.weights, prompts) - expected).abs().max() <= 1e-12
    assert (checkpoint.model.predict(prompts) - expected).abs().max() <= 1e-12


def test_checkpoints_of_one_layer_are_read_as_before():
    checkpoint = load_saved(CHECKPOINTS / "softmax-h2-s0")
    assert isinstance(checkpoint, native.Checkpoint)


def test_the_reader_of_one_layer_refuses_several(folder: Path):
    with pytest.raises(
        CheckpointError, match=r"model.context_only must be false for weights of one"
    ):
        native.load(folder)


def test_broken_files_are_refused(folder: Path):
    file = folder / "model.safetensors"
    good = load_file(file)
    name = "blocks.1.attn.W_K"
    bad = {
        f"{name} is missing": {n: t for n, t in good.items() if n != name},
        r"unembed.W_U must have shape \(6, 2\), got \(6, 1\)": good
        | {"unembed.W_U": good["unembed.W_U"][:, :1].contiguous()},
        "W_in must hold finite numbers, got 30 NaN": good
        | {"W_in": torch.full_like(good["W_in"], torch.nan)},
        "must hold floating-point numbers, got torch.int32": good | {name: good[name].int()},
        "the weights must have one dtype": good | {name: good[name].double()},
    }
    for message, tensors in bad.items():
        save_file(tensors, file)
        with pytest.raises(CheckpointError, match=message):
            load_saved(folder)


def test_weights_of_another_config_are_not_saved(tmp_path: Path, folder: Path):
    weights, path = initial_deep_weights(CONFIG), tmp_path / "other"
    plain = ExperimentConfig(task=CONFIG.task)
    reads = {"W_in": weights.W_in, "W_U": weights.W_U}
    wrong = {
        "already holds a checkpoint": (folder, CONFIG, weights),
        "model.context_only must be true": (path, plain, weights),
        "scale must be 1/sqrt": (path, CONFIG, replace(weights, scale=1.0)),
        "score must be the config's 'relu/L', got 'softmax'": (
            path,
            CONFIG,
            replace(weights, score="softmax"),
        ),
        "score_slope must be the config's 1.0, got 2.0": (
            path,
            CONFIG,
            replace(weights, score_slope=2.0),
        ),
        "W_in is missing": (path, CONFIG, replace(weights, **dict.fromkeys(reads))),
        "blocks.1.attn.W_K has no place": (
            path,
            replace(CONFIG, model=replace(CONFIG.model, n_layers=1)),
            weights,
        ),
    }
    for message, (where, config, given) in wrong.items():
        with pytest.raises(CheckpointError, match=message):
            save_deep(where, config, given, step=0)


def test_a_config_without_the_later_fields_is_that_of_before():
    document = json.loads((CHECKPOINTS / "softmax-h2-s0" / "config.json").read_text())
    assert "context_only" not in document["experiment"]["model"]
    assert load_saved(CHECKPOINTS / "softmax-h2-s0").config.model == ModelConfig(n_heads=2)
