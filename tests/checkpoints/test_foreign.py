"""Formats of other people's code are read head by head, predict what that code predicts, and what is assumed is listed."""

import json
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from mechinterp.checkpoints.io.files import CheckpointError
from mechinterp.checkpoints.load import convert
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts, draw_prompts
from mechinterp.models.heads import predict
from tests.checkpoints.files import assert_refused, hugging_face, loaded, saved
from tests.checkpoints.files import read as load
from tests.checkpoints.foreign_files import (
    arrays,
    attention_module,
    merged,
    random_heads,
    softmax_paper_state,
    whole_run,
)
from tests.checkpoints.test_archives import peak
from tests.conftest import assert_same, by_head
from tests.models.test_layered_models import encoder, garg

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
STATED = {"score": "softmax", "columns": "x,y", "scale": 0.5, "sign": "plus", "attend_to_self": False, "model": {"positions": "none"}}  # fmt: skip
"""What one layer of attention alone leaves open."""
NOT_UNDERSTOOD = {"doubt", "readings"}
"""What is assumed of random weights besides, which predict nothing."""


def prompts_of(task: TaskConfig, dtype: torch.dtype = torch.float32) -> Prompts:
    return draw_prompts(task, 64, seed=0, dtype=dtype)


# The papers' code, whose names say all of the model, and nothing of the task but its sizes.


def test_the_tasks_of_the_papers_are_assumed(tmp_path: Path):
    one = loaded(tmp_path, softmax_paper_state(random_heads(n_heads=3, d_x=4)))
    assert (one.format, one.task) == ("softmax-paper", TaskConfig(d_x=4))
    names = {name.partition(".")[0] for name in one.assumed}
    assert names - NOT_UNDERSTOOD == {"task", "train", "seed", "step"}
    assert not {"task.d_x", "task.d_y"} & set(one.assumed)
    several = loaded(tmp_path, whole_run(softmax_paper_state(random_heads(d_x=6, d_y=2))))
    expected = {"context_length": 48, "beta_var": 1.0, "noise_var": 0.4, "query_noise": False}
    assert several.task == TaskConfig(d_x=6, d_y=2, **expected)
    assert {several.assumed[f"task.{name}"] for name in expected} == {48, 1.0, 0.4, False}
    supports = ((0, 1, 2, 3), (2, 3, 4, 5))
    told = load(tmp_path / "x.pt", task={"supports": supports})
    assert told.task.supports == supports
    assert "task.supports" not in told.assumed
    task = loaded(tmp_path, merged(random_heads())).task
    assert (task.d_x, task.d_y, task.context_length) == (3, 1, 31)
    assert (task.beta_var, task.noise_var, task.query_noise) == (1, 0, False)
    assert task.covariance.eigenvalues == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize(("bias", "to_self", "d_y"), [(False, True, 1), (True, False, 2)])
@pytest.mark.parametrize("apart", [False, True])
def test_torchs_module_predicts_as_it_does(tmp_path: Path, apart: bool, bias: bool, to_self: bool, d_y: int):  # fmt: skip
    module = attention_module(5, width=6, n_heads=3, bias=bias).double()
    state = {f"model.attn.{name}": tensor for name, tensor in module.state_dict().items()}
    if apart:
        parts = state.pop("model.attn.in_proj_weight").chunk(3)
        state |= {f"model.attn.{x}_proj_weight": W for x, W in zip("qkv", parts, strict=True)}
    hints = {"columns": "x,y", "attend_to_self": to_self, "model": {"positions": "none"}}
    checkpoint = loaded(tmp_path, state, n_heads=3, d_y=d_y, **hints)
    prompts = prompts_of(checkpoint.task, torch.float64)
    keys = prompts.tokens if to_self else prompts.context_tokens
    with torch.no_grad():
        output, _ = module(prompts.tokens[:, -1:], keys, keys)
    y_hat = predict(checkpoint.weights, prompts)
    torch.testing.assert_close(y_hat, output[:, 0, -d_y:], rtol=1e-6, atol=1e-6)
    assert "attn_scale" not in checkpoint.assumed  # its code settles the factor on the scores


# Plain arrays.


def test_arrays_of_two_precisions_are_read_in_the_higher_one(tmp_path: Path):
    weights = random_heads()
    mixed = loaded(tmp_path, by_head(weights) | {"W_K": weights.W_K[0].double()}, **STATED)
    assert mixed.weights.dtype == torch.float64


def test_arrays_with_a_config_assume_nothing(tmp_path: Path):
    def stated(config: object, **changes: np.ndarray) -> Path:
        text = config if isinstance(config, str) else json.dumps(config)
        np.savez(tmp_path / "c.npz", config=np.array(text), **(arrays(random_heads()) | changes))
        return tmp_path / "c.npz"

    config = {"task": {"d_x": 3, "noise_var": 0.2}, "model": {"n_heads": 2, "score": "1+tanh"}}
    checkpoint = load(stated(config))
    assert (checkpoint.assumed, checkpoint.step) == ({}, 0)
    assert (checkpoint.weights.model.score, checkpoint.task.noise_var) == ("1+tanh", 0.2)
    wide = np.zeros((2, 4, 4), np.float32)
    wide[:, :, 3] = 1
    assert load(stated(config, W_O=wide)).weights.W_O.shape == (1, 2, 4, 4)
    for bad, words in (
        ("{", "config must be JSON"),
        ("[" * 100_000, "config must be JSON"),
        ([1], "JSON object, got list"),
        ({"seed": "x"}, "seed must be an integer"),
        ({"task": {"d_x": 2}}, "must have shape"),
        ({"task": {"d_x": 3}, "model": {"biases": True}}, "b_Q is missing"),
    ):
        assert_refused(words, load, stated(bad))
    assert_refused("b_Q is not", load, stated(config, b_Q=np.zeros((2, 4), np.float32)))


# One matrix.


@pytest.mark.parametrize("room", [0, 1])
def test_one_square_matrix_is_a_merged_step(tmp_path: Path, room: int):
    W = nn.functional.pad(0.8 * torch.eye(5), (0, room, 0, room))
    np.save(tmp_path / "W.npy", W.double().numpy())
    checkpoint = load(tmp_path / "W.npy", task={"noise_var": 0.0}, d_x=5)
    assert (checkpoint.format, checkpoint.task.d_x) == ("one-matrix", 5)
    assert checkpoint.config.model.score == "linear/L"
    prompts = prompts_of(checkpoint.task, torch.float64)
    step = torch.einsum("blx,bly->bxy", prompts.x, prompts.y) / prompts.x.shape[1]
    expected = 0.8 * torch.einsum("bx,bxy->by", prompts.x_query, step)
    torch.testing.assert_close(checkpoint.predictor.predict(prompts), expected)
    for hints, words in (({}, "d_x must be"), ({"d_x": 10}, "got 10"), ({"d_x": 5, "d_y": 2}, "d_y must be 1")):  # fmt: skip
        assert_refused(words, load, tmp_path / "W.npy", **hints)


# Folders with somebody else's config.json.


def test_a_folder_of_shards_is_named_after_itself_and_holds_each_tensor_once(tmp_path: Path):
    state = attention_module(5, width=4, n_heads=2, bias=True).state_dict()
    folder = hugging_face(tmp_path / "hf", {"nhead": 2}, state, shards=2)
    checkpoint = load(folder)
    assert (checkpoint.format, checkpoint.name) == ("torch-attention", "hf")
    assert_refused("n_heads must be the file's 2, got 4", load, folder, n_heads=4)
    save_file(state, folder / "model-1.safetensors")
    assert_refused("holds tensors that another shard holds", load, folder)


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"weight_map": {"a": "../model-0.safetensors"}}, "got '../model-0"),
        ({"weight_map": {"a": "/etc/x.safetensors"}}, "got '/etc/x"),
        ({"weight_map": {"a": "model.pt"}}, "got 'model.pt'"),
        ({"weight_map": {"a": "gone.safetensors"}}, "gone.safetensors"),
        ({"weight_map": {"a": "model-0.safetensors"}}, "a is in none of the files"),
        ({"weight_map": {"a": 1}}, "weight_map must name a file"),
        ({"weight_map": {str(i): f"{i}.safetensors" for i in range(200)}}, "got 200"),
        ([], "weight_map must name a file"),
    ],
)
def test_shards_are_plain_names_beside_their_index(tmp_path: Path, named: object, words: str):
    folder = hugging_face(tmp_path / "hf", {}, by_head(random_heads()), shards=2)
    (folder / "model.safetensors.index.json").write_text(json.dumps(named))
    assert_refused(words, load, folder)


def test_a_foreign_folder_without_weights_or_heads(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    assert_refused(r"must have model\.safetensors", load, tmp_path)
    state = attention_module(0, width=4, n_heads=2, bias=False).state_dict()
    save_file(state, tmp_path / "model.safetensors")
    for text, words in (
        ('{"n_heads": "x"}', "n_heads must be an integer >= 1, got 'x'"),
        ('{"n_heads": 2, "nhead": 4}', "n_heads = 2, nhead = 4"),
        # A config.json with one of our own fields is ours, and broken.
        ('{"experiment": {}}', "'format_version' is missing"),
    ):
        (tmp_path / "config.json").write_text(text)
        assert_refused(words, load, tmp_path)


# Layers of torch and Hugging Face.

RELU = {
    "norm": "after",
    "activation": "relu",
    "context_keys": True,
    "passes": 1,
    "positions": "none",
}
"""What torch's encoder layers are by default, and no file says."""


def test_the_task_of_a_gpt2_is_gargs_and_stated(tmp_path: Path):
    checkpoint = loaded(tmp_path, garg().state_dict(), n_heads=4)
    expected = TaskConfig(d_x=3, context_length=6, beta_var=1.0, noise_var=0.0, query_noise=False)
    assert checkpoint.task == expected
    assumed = dict(checkpoint.assumed)
    shown = {"model.activation": "gelu_new", "model.norm_eps": 1e-5, "step": 0, "model.passes": 1}
    assert {name: assumed.pop(name) for name in shown} == shown
    assert assumed.pop("model.tokens").startswith("x_1, y_1")
    assert assumed.pop("unused") == ["_backbone.wte.weight"]  # beside a read-in
    assert (assumed["task.context_length"], assumed["task.beta_var"]) == (6, 1)
    laws = {f"task.covariance.{n}" for n in asdict(expected.covariance)}
    names = {f"task.{name}" for name in asdict(expected)} - {
        "task.d_x",
        "task.d_y",
        "task.covariance",
    }
    names |= laws - {"task.covariance.matrix", "task.covariance.scale"}
    assert assumed.keys() - NOT_UNDERSTOOD == names


@pytest.mark.slow
def test_a_stated_task_holds_and_fits_the_positions(tmp_path: Path):
    state = garg().state_dict()
    task = {"noise_var": 0.5, "covariance": {"kind": "kms", "rho": 0.3}, "context_length": 9}
    checkpoint = loaded(tmp_path, state, n_heads=4, task=task)
    assert (checkpoint.task.noise_var, checkpoint.task.context_length) == (0.5, 9)
    assert checkpoint.task.covariance.rho == 0.3
    names = ("noise_var", "context_length", "covariance.kind", "covariance.rho")
    assert not {f"task.{name}" for name in names} & set(checkpoint.assumed)
    state["_backbone.wpe.weight"] = torch.randn(8, 16)
    assert loaded(tmp_path, state, n_heads=4).task.context_length == 3
    words = r"task.context_length must be <= 3, .* 8 positions allow, got 4\."
    assert_refused(words, loaded, tmp_path, state, n_heads=4, task={"context_length": 4})


def test_a_table_of_words_beside_a_read_out_is_not_read(tmp_path: Path):
    state = garg().state_dict()
    words = {"lm_head.weight": torch.zeros(7, 16)}
    both = [
        loaded(tmp_path, each, n_heads=4, model={"passes": 1}) for each in (state, state | words)
    ]
    assert_same(both[1].weights, both[0].weights)


def test_sizes_of_layers_without_a_read_in_are_stated(tmp_path: Path):
    file = saved(tmp_path, encoder(4).state_dict())
    for sizes in ({"d_x": 2}, {"task": {"d_y": 2}}):
        stated = load(file, n_heads=2, attend_to_self=True, model=RELU, **sizes)
        assert (stated.task.d_x, stated.task.d_y) == (2, 2)
        assert not {"task.d_x", "task.d_y"} & set(stated.assumed)
    words = "residual must be the file's True, got False"
    assert_refused(words, load, file, n_heads=2, model={"residual": False})


@pytest.mark.slow
def test_a_folder_that_an_earlier_version_wrote_is_read(tmp_path: Path):
    """Such a folder has the names of the owner's file, and in its config.json what was said of it."""
    said = {"context_length": 9, "covariance": {"kind": "kms", "rho": 0.3}}
    state = {f"net.{name}": tensor for name, tensor in encoder(4).state_dict().items()}
    settings = {"nhead": 2, "norm_first": True, "activation": "gelu"}
    folder = hugging_face(tmp_path / "now", settings, state)
    expected = load(folder, task=said, d_y=2, attend_to_self=False)
    stated = settings | {"attend_to_self": False, "mechinterp_task": {"d_x": 2, "d_y": 2, **said}}
    old = hugging_face(tmp_path / "old", stated, state)
    checkpoint = load(old)
    assert (checkpoint.config, checkpoint.assumed) == (expected.config, expected.assumed)
    assert_same(checkpoint.weights, expected.weights)
    other = load(old, task={"context_length": 5}, d_y=2, attend_to_self=False)
    assert (other.task.context_length, other.task.covariance.rho) == (5, 0.3)
    assert_refused("attend_to_self must be the file's False", load, old, attend_to_self=True)


def test_a_place_that_is_no_npz_is_refused(tmp_path: Path):
    np.savez(tmp_path / "x.npz", **arrays(random_heads()))
    checkpoint = load(tmp_path / "x.npz", **STATED)
    for place, words in (("x.npz", "already exists"), ("x.npy", "must end in"), ("x.npz/y.npz", "cannot be written")):  # fmt: skip
        assert_refused(words, convert, checkpoint, "npz", tmp_path / place)


# Bounds.


@pytest.mark.slow
def test_64_choices_take_less_than_half_a_gigabyte_and_10_seconds(tmp_path: Path):
    draw = {"generator": torch.Generator().manual_seed(0)}
    shapes = dict.fromkeys(("q", "k", "v", "proj"), (64, 64))
    shapes |= {"mlp.0": (256, 64), "mlp.2": (64, 256)}
    layers = [(f"blocks.{n}.{name}", shape) for n in range(2) for name, shape in shapes.items()]
    state = {f"{name}.weight": torch.randn(shape, **draw) / 8 for name, shape in layers}
    state |= {f"blocks.{n}.ln{i}.weight": torch.ones(64) for n in range(2) for i in (1, 2)}
    for name, shape in {"read_in": (64, 6), "read_out": (1, 64)}.items():
        state[f"{name}.weight"] = torch.randn(shape, **draw)
    before, start = peak(), time.process_time()
    assert len(loaded(tmp_path, state, n_heads=2).readings) == 64
    assert time.process_time() - start < 10
    assert peak() - before < 5e8


def test_readings_are_refused_where_too_many_are_open(tmp_path: Path):
    generator = torch.Generator().manual_seed(0)
    state = {f"W{x}": torch.randn(17, 17, generator=generator) for x in "qkvo"}
    with pytest.raises(CheckpointError, match=r"at most 64 readings .*--orientation.*--output-col"):
        loaded(tmp_path, state, n_heads=1, d_x=10, d_y=1)
