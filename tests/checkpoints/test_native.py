"""Checkpoints come back as they were saved, bad ones are refused, and a kill leaves a whole file."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from mechinterp.checkpoints.checkpoint import load, save
from mechinterp.checkpoints.io.files import CheckpointError
from mechinterp.checkpoints.native.folder import WEIGHTS_FILE, outline_of
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, TrainConfig
from mechinterp.config.model import tensor_shapes
from mechinterp.models.weights import Weights
from mechinterp.training.general.trainer import initial_deep_weights
from mechinterp.training.one_layer.step import Pack, initial_weights
from tests.checkpoints.files import assert_refused
from tests.checkpoints.test_archives import little
from tests.conftest import assert_same, changed
from tests.training.test_trainer import finished

CONFIG = ExperimentConfig(
    task=TaskConfig(d_x=3, d_y=2, context_length=8),
    model=ModelConfig(n_heads=2, d_head=4, score="1+Cx", score_slope=0.5),
    train=TrainConfig(
        steps=20, batch_size=16, log_every=10, snapshot_every=5, n_eval_prompts=16, data_seed=3
    ),
    seed=2,
)
DEEP = ExperimentConfig(
    task=TaskConfig(d_x=3, d_y=2, context_length=8, sparsity=1),
    model=ModelConfig(n_layers=2, n_heads=2, d_model=6, score="relu/L", context_only=True),
)
ONE, TWO = initial_weights(CONFIG), initial_deep_weights(DEEP)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of CONFIG with its initial weights."""
    save(tmp_path / "model", CONFIG, ONE, step=0)
    return tmp_path / "model"


def test_a_trained_model_comes_back_as_it_was(tmp_path: Path):
    trained = finished(Pack({"model": CONFIG})).results()["model"]
    parts = {"history": trained.history, "snapshots": trained.snapshots}
    save(tmp_path / "model", CONFIG, trained.weights, step=trained.step, **parts)
    checkpoint = load(str(tmp_path / "model"))
    assert checkpoint.config == CONFIG
    assert (checkpoint.step, checkpoint.name) == (20, "model")
    assert repr(checkpoint) == "Checkpoint(model: 2 heads, d_x=3, context_length=8, step 20)"
    assert_same(checkpoint.weights, trained.weights)
    assert list(checkpoint.snapshots) == [0, 5, 10, 15, 20]
    for step, weights in checkpoint.snapshots.items():
        assert_same(weights, trained.snapshots[step])
    assert_same(checkpoint.snapshots[20], checkpoint.weights)
    pd.testing.assert_frame_equal(checkpoint.history, trained.history, check_exact=True)


# Each of these spoils a good checkpoint; the words are what the message must hold besides the file.

Spoil = Callable[[Path], object]
CONFIG_FILE = "config.json"


def edited(**changes: object) -> Spoil:
    """Fields of config.json become others; None leaves one out."""

    def spoil(folder: Path):
        document = json.loads((folder / CONFIG_FILE).read_text()) | changes
        kept = {name: value for name, value in document.items() if value is not None}
        (folder / CONFIG_FILE).write_text(json.dumps(kept))

    return spoil


def claiming(group: str, field: str, value: object) -> Spoil:
    """A field of the experiment becomes another."""

    def spoil(folder: Path):
        document = json.loads((folder / CONFIG_FILE).read_text())
        document["experiment"][group][field] = value
        (folder / CONFIG_FILE).write_text(json.dumps(document))

    return spoil


def holding(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Spoil:
    """A tensor becomes another; None leaves it out."""

    def spoil(folder: Path):
        tensors = load_file(folder / WEIGHTS_FILE)
        changed = change(tensors.pop(f"blocks.0.attn.{name}"))
        others = {} if changed is None else {f"blocks.0.attn.{name}": changed}
        save_file(tensors | others, folder / WEIGHTS_FILE)

    return spoil


def with_first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[0, 0, 0] = value
        return tensor

    return change


def cut(folder: Path):
    (folder / WEIGHTS_FILE).write_bytes((folder / WEIGHTS_FILE).read_bytes()[:-7])


BAD_CONFIGS: dict[str, Spoil] = {
    "field 'step' is missing": edited(step=None),
    "format_version must be 1, got 2": edited(format_version=2),
    "assumed must be a JSON object, got [1]": edited(assumed=[1]),
    "step must be an integer >= 0, got 2.5": edited(step=2.5),
    "A config must be a JSON object, got 'x'": edited(experiment="x"),
    "Unknown field 'model.heads'; known: model.n_layers, ": claiming("model", "heads", 2),
}
W_Q = "blocks.0.attn.W_Q"
BAD_WEIGHTS: dict[str, Spoil] = {
    "does not exist": lambda folder: (folder / WEIGHTS_FILE).unlink(),
    f"{W_Q} must have shape (3, 5, 4), got (2, 5, 4)": claiming("model", "n_heads", 3),
    f"{W_Q} must have shape (2, 5, 4), got (2, 4, 5)": holding("W_Q", lambda t: t.mT.contiguous()),
    "blocks.0.attn.W_K is missing": holding("W_K", lambda tensor: None),
    "W_V must hold finite numbers, got 1 NaN or infinite": holding("W_V", with_first(torch.inf)),
    f"{W_Q} must hold floating-point numbers, got torch.int64": holding("W_Q", torch.Tensor.long),
    "x columns of blocks.0.attn.W_O must be zero, got 0.25": holding("W_O", with_first(-0.25)),
    "not a readable safetensors file": cut,
}
BAD = {
    **{words: (CONFIG_FILE, spoil) for words, spoil in BAD_CONFIGS.items()},
    **{words: (WEIGHTS_FILE, spoil) for words, spoil in BAD_WEIGHTS.items()},
}
READ_WITH_NUMBERS = ("must hold floating-point", "x columns")
"""What an outline does not see."""


@pytest.mark.parametrize("words", BAD)
def test_a_bad_checkpoint_is_refused_on_one_line(folder: Path, words: str):
    file, spoil = BAD[words]
    load(folder)
    spoil(folder)
    message = assert_refused(re.escape(words), load, folder)
    assert message.startswith(f"{folder / file}: ")
    if not any(each in words for each in READ_WITH_NUMBERS):
        assert assert_refused(re.escape(words), outline_of, folder) == message


def test_the_outline_of_a_folder_is_that_of_its_checkpoint(folder: Path):
    assert vars(outline_of(folder)) == vars(load(folder).outline)
    assert outline_of(folder.parent) is None


def test_a_checkpoint_is_not_overwritten(folder: Path):
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    with pytest.raises(CheckpointError, match="model: already holds a checkpoint"):
        save(folder, CONFIG, initial_weights(replace(CONFIG, seed=9)), step=1)
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before


def one(**changes: torch.Tensor) -> tuple[ExperimentConfig, Weights]:
    return CONFIG, changed(ONE, **changes)


BIASES = {"b_O": torch.zeros(2), **{f"b_{x}": torch.zeros(2, 4) for x in "QKV"}}
NARROW = replace(DEEP, model=replace(DEEP.model, d_model=None, d_head=3))
NOT_SAVED: dict[str, tuple[ExperimentConfig, Weights]] = {
    "W_K must hold finite numbers, got 40 NaN": one(W_K=torch.full((2, 5, 4), torch.nan)),
    "one dtype, got torch.float32, torch.float64": one(W_K=torch.ones(2, 5, 4).double()),
    "scale must be 1/sqrt(d_head) = 0.5, got 0.4": (CONFIG, replace(ONE, scale=0.4)),
    "score must be the config's '1+Cx', got 'softmax'": (CONFIG, ONE.with_model(score="softmax")),
    "biases must be the config's False, got True": one(**BIASES),
    "n_heads must be the config's 2, got 1": (CONFIG, ONE[:1]),
    "d_model must be the config's 6, got None": (DEEP, initial_deep_weights(NARROW)),
}


@pytest.mark.parametrize("words", NOT_SAVED)
def test_weights_of_another_kind_are_not_saved(tmp_path: Path, words: str):
    assert_refused(
        f"model: .*{re.escape(words)}", save, tmp_path / "model", *NOT_SAVED[words], step=0
    )
    assert not (tmp_path / "model").exists()


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    save(tmp_path / "model", DEEP, TWO, step=0)
    return tmp_path / "model"


# Models of several layers.


@pytest.mark.parametrize("d_model", [None, 6])
def test_a_deep_model_comes_back_as_it_was(tmp_path: Path, d_model: int | None):
    config = replace(DEEP, model=replace(DEEP.model, d_model=d_model, d_head=3))
    weights = initial_deep_weights(config).to(torch.float64)
    start = initial_deep_weights(replace(config, seed=1)).to(torch.float64)
    save(tmp_path / "model", config, weights, step=7, snapshots={0: start, 7: weights})
    checkpoint = load(tmp_path / "model")
    assert (checkpoint.config, checkpoint.history) == (config, None)
    assert_same(checkpoint.weights, weights)
    assert list(checkpoint.snapshots) == [0, 7]
    assert_same(checkpoint.snapshots[0], start)
    assert_same(checkpoint.model.weights, weights)


def test_files_carry_the_names_and_shapes_of_the_hooked_model(deep: Path):
    tensors = load_file(deep / "model.safetensors")
    expected = tensor_shapes(DEEP.model, DEEP.task.d_x, DEEP.task.d_y)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == expected
    parameters = dict(load(deep).model.named_parameters())
    assert {name: tuple(t.shape) for name, t in parameters.items()} == expected


@pytest.mark.parametrize(
    ("section", "name", "value", "words"),
    [
        ("model", "n_layers", 2**20, "model.n_layers must be that of the weights, 2, got 1048576"),
        ("model", "n_layers", 1, "model.n_layers must be that of the weights, 2, got 1"),
        *(
            (section, name, 2**63, f"{section}.{name} must be <= 1048576, got 9223")
            for section, name in (
                *(("task", name) for name in ("context_length", "d_x", "d_y")),
                *(("model", name) for name in ("n_layers", "n_heads", "d_head", "d_model")),
            )
        ),
    ],
)
def test_a_size_that_no_weights_have(deep: Path, section: str, name: str, value: int, words: str):
    """Sizes are held against the weights, and are never what a loop or a batch is made of first."""
    load(deep)
    claiming(section, name, value)(deep)
    with little():
        assert_refused(words, load, deep)
