"""Checkpoints come back as they were saved, bad ones are refused, and a kill leaves a whole file."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from mechinterp.checkpoints.checkpoint import load, save
from mechinterp.checkpoints.io.atomic import write_atomically
from mechinterp.checkpoints.io.errors import CheckpointError
from mechinterp.checkpoints.native.folder import git_commit, outline_of
from mechinterp.checkpoints.native.tensors import state_dict
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, TrainConfig
from mechinterp.models.weights import weights_of_layer
from mechinterp.training.one_layer.pack import Pack
from mechinterp.training.one_layer.step import initial_weights
from tests.checkpoints.files import assert_refused
from tests.conftest import assert_same

CONFIG = ExperimentConfig(
    task=TaskConfig(d_x=3, d_y=2, context_length=8),
    model=ModelConfig(n_heads=2, d_head=4, score="1+Cx", score_slope=0.5),
    train=TrainConfig(
        steps=20, batch_size=16, log_every=10, snapshot_every=5, n_eval_prompts=16, data_seed=3
    ),
    seed=2,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of CONFIG with its initial weights."""
    save(tmp_path / "model", CONFIG, initial_weights(CONFIG), step=0)
    return tmp_path / "model"


def test_a_trained_model_comes_back_as_it_was(tmp_path: Path):
    pack = Pack({"model": CONFIG})
    while not pack.finished:
        pack.advance()
    trained = pack.results()["model"]
    save(
        tmp_path / "model",
        CONFIG,
        trained.weights,
        step=trained.step,
        history=trained.history,
        snapshots=trained.snapshots,
    )
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


def test_files_carry_transformer_lens_names_and_shapes(folder: Path):
    tensors = load_file(folder / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "blocks.0.attn.W_Q": (2, 5, 4),
        "blocks.0.attn.W_K": (2, 5, 4),
        "blocks.0.attn.W_V": (2, 5, 4),
        "blocks.0.attn.W_O": (2, 4, 5),
    }
    weights = initial_weights(CONFIG)
    assert torch.equal(tensors["blocks.0.attn.W_O"][:, :, 3:], weights.W_O)
    assert tensors["blocks.0.attn.W_O"][:, :, :3].abs().max() == 0


def test_config_file_names_its_origin(folder: Path):
    document = json.loads((folder / "config.json").read_text())
    assert document["format_version"] == 1
    assert document["git_commit"] == git_commit()
    assert document["experiment"]["task"]["d_x"] == 3
    assert isinstance(document["package_version"], str)


# Each of these spoils a good checkpoint; the words are what the message must hold besides the file.


def edit_config(**changes: object) -> Callable[[Path], None]:
    def spoil(folder: Path):
        document = json.loads((folder / "config.json").read_text())
        document = {k: v for k, v in (document | changes).items() if v is not None}
        (folder / "config.json").write_text(json.dumps(document))

    return spoil


def edit_experiment(group: str, field: str, value: object) -> Callable[[Path], None]:
    def spoil(folder: Path):
        document = json.loads((folder / "config.json").read_text())
        document["experiment"][group][field] = value
        (folder / "config.json").write_text(json.dumps(document))

    return spoil


def edit_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]):
    def spoil(folder: Path):
        file = folder / "model.safetensors"
        tensors = load_file(file)
        changed = change(tensors.pop(f"blocks.0.attn.{name}"))
        if changed is not None:
            tensors[f"blocks.0.attn.{name}"] = changed
        save_file(tensors, file)

    return spoil


def write_text(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def cut(folder: Path):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def with_entry(index: tuple[int, ...], value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[index] = value
        return tensor

    return change


BAD = {
    "no config": (remove("config.json"), "", "this has no config.json"),
    "no weights": (remove("model.safetensors"), "model.safetensors", "does not exist"),
    "bad JSON": (
        write_text("config.json", '{"step": \n'),
        "config.json",
        "not a readable JSON file",
    ),
    "a JSON list": (write_text("config.json", "[1]"), "config.json", "a JSON object, got list"),
    "no step": (edit_config(step=None), "config.json", "field 'step' is missing"),
    "no experiment": (edit_config(experiment=None), "config.json", "field 'experiment' is missing"),
    "no version": (edit_config(format_version=None), "config.json", "'format_version' is missing"),
    "newer": (edit_config(format_version=2), "config.json", "format_version must be 1, got 2"),
    "assumed": (edit_config(assumed=[1]), "config.json", "assumed must be a JSON object, got [1]"),
    "half a step": (edit_config(step=2.5), "config.json", "step must be an integer >= 0, got 2.5"),
    "step -1": (edit_config(step=-1), "config.json", "step must be an integer >= 0, got -1"),
    "text": (edit_config(experiment="x"), "config.json", "A config must be a JSON object, got 'x'"),
    "unknown field": (
        edit_experiment("model", "heads", 2),
        "config.json",
        "Unknown field 'model.heads'; known: model.n_layers, model.n_heads",
    ),
    "bad value": (edit_experiment("task", "d_x", 0), "config.json", "task.d_x must be >= 1, got 0"),
    "other n_heads": (
        edit_experiment("model", "n_heads", 3),
        "model.safetensors",
        "blocks.0.attn.W_Q must have shape (3, 5, 4), got (2, 5, 4)",
    ),
    "transposed": (
        edit_tensor("W_O", lambda tensor: tensor.mT.contiguous()),
        "model.safetensors",
        "blocks.0.attn.W_O must have shape (2, 4, 5), got (2, 5, 4)",
    ),
    "no W_K": (
        edit_tensor("W_K", lambda tensor: None),
        "model.safetensors",
        "blocks.0.attn.W_K is missing",
    ),
    "NaN": (
        edit_tensor("W_V", with_entry((0, 0, 0), torch.inf)),
        "model.safetensors",
        "blocks.0.attn.W_V must hold finite numbers, got 1 NaN or infinite",
    ),
    "integers": (
        edit_tensor("W_Q", lambda tensor: tensor.to(torch.int64)),
        "model.safetensors",
        "blocks.0.attn.W_Q must hold floating-point numbers, got torch.int64",
    ),
    "x read out": (
        edit_tensor("W_O", with_entry((0, 0, 0), -0.25)),
        "model.safetensors",
        "the x columns of blocks.0.attn.W_O must be zero, got 0.25",
    ),
    "cut short": (cut, "model.safetensors", "not a readable safetensors file"),
}


@pytest.mark.parametrize(("spoil", "file", "words"), BAD.values(), ids=BAD)
def test_a_bad_checkpoint_is_refused_on_one_line(
    folder: Path, spoil: Callable[[Path], None], file: str, words: str
):
    load(folder)
    spoil(folder)
    with pytest.raises(CheckpointError) as error:
        load(folder)
    message = str(error.value)
    assert message.startswith(f"{folder / file}: ")
    assert words in message
    assert "\n" not in message


OF_NUMBERS = {"integers", "x read out"}


@pytest.mark.parametrize("kind", sorted(BAD.keys() - OF_NUMBERS - {"no config"}))
def test_an_outline_is_refused_as_its_checkpoint_is(folder: Path, kind: str):
    spoil, _, _ = BAD[kind]
    spoil(folder)
    messages = []
    for read in (load, outline_of):
        with pytest.raises(CheckpointError) as error:
            read(folder)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_the_outline_of_a_folder_is_that_of_its_checkpoint(folder: Path):
    found, expected = outline_of(folder), load(folder).outline
    assert found is not None
    assert found.__dict__ == expected.__dict__
    assert outline_of(folder.parent) is None


def test_what_is_no_folder_is_refused(tmp_path: Path):
    file = tmp_path / "weights.bin"
    assert_refused(r"weights\.bin: a checkpoint is .*this does not exist", load, file)
    file.write_text("x")
    assert_refused(r"weights\.bin: a checkpoint is .*this is not a folder", load, file)


def test_a_bad_snapshot_or_history_is_refused_when_it_is_read(folder: Path):
    (folder / "snapshots").mkdir()
    (folder / "snapshots" / "5.safetensors").write_bytes(b"x")
    (folder / "history.parquet").write_bytes(b"x\ny")
    checkpoint = load(folder)
    with pytest.raises(CheckpointError, match=r"5\.safetensors: not a readable safetensors file"):
        _ = checkpoint.snapshots
    with pytest.raises(CheckpointError, match=r"history\.parquet: not a readable parquet file"):
        _ = checkpoint.history


def test_a_checkpoint_is_not_overwritten(folder: Path):
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    with pytest.raises(CheckpointError, match="model: already holds a checkpoint"):
        save(folder, CONFIG, initial_weights(replace(CONFIG, seed=9)), step=1)
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"W_K": torch.full((2, 5, 4), torch.nan)}, "W_K must hold finite numbers, got 40 NaN"),
        (
            {"W_K": torch.ones(2, 5, 4, dtype=torch.float64)},
            "one dtype, got torch.float32, torch.float64",
        ),
        ({"scale": 0.4}, r"scale must be 1/sqrt\(d_head\) = 0\.5, got 0\.4"),
        ({"score": "softmax"}, "score must be the config's '1[+]Cx', got 'softmax'"),
        ({"score_slope": 0.6}, "score_slope must be the config's 0.5, got 0.6"),
        ({"attend_to_self": True}, "attend_to_self must be the config's False, got True"),
        (
            {"b_O": torch.zeros(2), **{f"b_{x}": torch.zeros(2, 4) for x in "QKV"}},
            "biases must be the config's False, got True",
        ),
    ],
)
def test_weights_of_another_kind_are_not_saved(tmp_path: Path, changes: dict, words: str):
    weights = replace(initial_weights(CONFIG), **changes)
    assert_refused(f"model: .*{words}", save, tmp_path / "model", CONFIG, weights, step=0)
    assert not (tmp_path / "model").exists()


def test_weights_of_another_shape_are_not_saved(tmp_path: Path):
    with pytest.raises(CheckpointError, match="n_heads must be the config's 2, got 1"):
        save(tmp_path / "model", CONFIG, initial_weights(CONFIG)[:1], step=0)
    assert not (tmp_path / "model").exists()


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="model: cannot be written") as error:
        save(tmp_path / "file" / "model", CONFIG, initial_weights(CONFIG), step=0)
    assert "\n" not in str(error.value)


def test_config_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(self, *arguments, **options):
        raise OSError("disk full")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", fail)
    weights, history = initial_weights(CONFIG), pd.DataFrame({"step": [0]})
    with pytest.raises(CheckpointError, match=r"model: cannot be written \(disk full\)"):
        save(tmp_path / "model", CONFIG, weights, step=0, history=history, snapshots={0: weights})
    assert not (tmp_path / "model").exists()


def test_a_write_that_fails_half_way_leaves_the_old_file(tmp_path: Path):
    file = tmp_path / "weights.safetensors"
    save_file(state_dict(weights_of_layer(initial_weights(CONFIG))), file)
    before = file.read_bytes()

    def fail_half_way(target: Path):
        other = initial_weights(replace(CONFIG, seed=9))
        save_file(state_dict(weights_of_layer(other)), target)
        target.write_bytes(target.read_bytes()[:100])
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(file, fail_half_way)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


WRITE_FOR_EVER = """
import itertools, pathlib, sys
from mechinterp.checkpoints.io.atomic import write_atomically

def write(target, value):
    with target.open("wb") as file:
        for _ in range(512):
            file.write(bytes([value]) * 4096)

for number in itertools.count():
    write_atomically(pathlib.Path(sys.argv[1]), lambda target: write(target, number % 251))
"""


@pytest.mark.slow
def test_a_kill_while_writing_leaves_a_whole_file(tmp_path: Path):
    file = tmp_path / "state"
    for delay in (0.0, 0.03):
        file.unlink(missing_ok=True)
        process = subprocess.Popen([sys.executable, "-c", WRITE_FOR_EVER, str(file)])
        try:
            deadline = time.monotonic() + 20
            while not file.exists() and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(delay)
        finally:
            process.kill()
            assert process.wait() == -signal.SIGKILL
        content = file.read_bytes()
        assert len(content) == 512 * 4096
        assert len(set(content)) == 1
