"""Formats of other people's code are read head by head, predict what that code predicts, and what is assumed is listed."""

import json
import math
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mechinterp.checkpoints.io.files import CheckpointError
from mechinterp.checkpoints.load import convert
from mechinterp.checkpoints.native.exchange import hooked_state
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts, sample_prompts
from mechinterp.models.heads import predict
from mechinterp.models.weights import Weights
from tests.checkpoints.files import assert_refused, hugging_face, loaded, saved
from tests.checkpoints.files import read as load
from tests.checkpoints.foreign_files import (
    LAYER_NAMES,
    arrays,
    attention_module,
    biased,
    linear_layers_state,
    linear_output,
    merged_state,
    random_heads,
    separate_state,
    softmax_paper_state,
    whole_run,
    write_valid_files,
)
from tests.checkpoints.test_archives import peak
from tests.conftest import assert_close_to_rounding, assert_same, by_head, changed
from tests.models.test_layered_models import encoder, garg

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
STATED = {"score": "softmax", "columns": "x,y", "scale": 0.5, "sign": "plus", "attend_to_self": False, "model": {"positions": "none"}}  # fmt: skip
"""What one layer of attention alone leaves open."""


def prompts_of(task: TaskConfig, dtype: torch.dtype = torch.float32) -> Prompts:
    return sample_prompts(task, 64, seed=0, dtype=dtype)


def assert_circuits(actual: Weights, QK: Tensor, OV: Tensor):
    torch.testing.assert_close(actual.QK, QK, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(actual.OV, OV, rtol=1e-6, atol=1e-6)
    assert actual.scale == pytest.approx(actual.d_head**-0.5)


# The papers' code.


@pytest.mark.parametrize(("prefix", "whole"), [("", False), ("module.", True)])
def test_softmax_paper(tmp_path: Path, whole: bool, prefix: str):
    weights = random_heads(n_heads=3, d_x=4)
    state = {prefix + name: tensor for name, tensor in softmax_paper_state(weights).items()}
    checkpoint = loaded(tmp_path, whole_run(state) if whole else state)
    assert_circuits(checkpoint.weights, weights.QK, weights.OV)
    assert (checkpoint.format, checkpoint.task) == ("softmax-paper", TaskConfig(d_x=4))
    prompts = prompts_of(checkpoint.task)
    y_hat = predict(checkpoint.weights, prompts)
    assert_close_to_rounding(y_hat, predict(weights, prompts))
    # The code says all of the model, the file nothing of the task but its sizes.
    names = {name.partition(".")[0] for name in checkpoint.assumed}
    assert names - {"understood", "doubt", "readings"} == {"task", "train", "seed", "step"}
    assert not {"task.d_x", "task.d_y"} & set(checkpoint.assumed)


def test_softmax_paper_with_several_tasks(tmp_path: Path):
    weights = random_heads(n_heads=4, d_x=6, d_y=2)
    checkpoint = loaded(tmp_path, whole_run(softmax_paper_state(weights)))
    assert_circuits(checkpoint.weights, weights.QK, weights.OV)
    expected = {"context_length": 48, "beta_var": 1.0, "noise_var": 0.4, "query_noise": False}
    assert checkpoint.task == TaskConfig(d_x=6, d_y=2, **expected)
    assert {checkpoint.assumed[f"task.{name}"] for name in expected} == {48, 1.0, 0.4, False}
    supports = ((0, 1, 2, 3), (2, 3, 4, 5))
    told = load(tmp_path / "x.pt", task={"supports": supports})
    assert told.task.supports == supports
    assert "task.supports" not in told.assumed


@pytest.mark.parametrize("rank", [None, 1, 5])
def test_linear_paper(tmp_path: Path, rank: int | None):
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(3, 4, 4, generator=generator)
    if rank is None:
        QK = torch.randn(3, 4, 4, generator=generator)
        state = merged_state(QK, values)
    else:
        keys, queries = torch.randn(2, 3, rank, 4, generator=generator)
        QK, state = queries.mT @ keys, separate_state(keys, queries, values)
    checkpoint = loaded(tmp_path, state, format="linear-paper")
    circuits, task = checkpoint.weights, checkpoint.task
    assert_circuits(circuits, QK, values[:, -1, :, None])
    assert (circuits.model.score, circuits.model.attend_to_self) == ("linear", True)
    prompts = prompts_of(task)
    y_hat = linear_output(prompts.tokens, state, 3)[:, -1, -1:]
    assert_close_to_rounding(predict(circuits, prompts), y_hat)
    assert (task.d_x, task.d_y, task.context_length) == (3, 1, 31)
    assert (task.beta_var, task.noise_var, task.query_noise) == (1, 0, False)
    assert task.covariance.eigenvalues == pytest.approx([1 / 3] * 3)


# torch.nn.MultiheadAttention, and layers of four linear ones.


@pytest.mark.parametrize(("bias", "to_self", "d_y"), [(False, True, 1), (True, False, 2)])
@pytest.mark.parametrize("names", ["packed", "apart", *LAYER_NAMES])
def test_torch_attention(tmp_path: Path, names: object, bias: bool, to_self: bool, d_y: int):
    module = attention_module(5, width=6, n_heads=3, bias=bias).double()
    state = {f"model.attn.{name}": tensor for name, tensor in module.state_dict().items()}
    if names == "apart":
        parts = state.pop("model.attn.in_proj_weight").chunk(3)
        state |= {f"model.attn.{x}_proj_weight": W for x, W in zip("qkv", parts, strict=True)}
    own = names in LAYER_NAMES
    state = linear_layers_state(module, names) if own else state
    hints = {"score": "softmax", "sign": "plus", "columns": "x,y"} if own else {"columns": "x,y"}
    hints |= {"attend_to_self": to_self, "model": {"positions": "none"}}
    checkpoint = loaded(tmp_path, state, n_heads=3, d_y=d_y, **hints)
    assert checkpoint.format == "torch-attention"
    assert checkpoint.config.model.biases is bias
    assert checkpoint.weights.W_Q.shape == (1, 3, 6, 2)
    prompts = prompts_of(checkpoint.task, torch.float64)
    keys = prompts.tokens if to_self else prompts.context_tokens
    with torch.no_grad():
        output, _ = module(prompts.tokens[:, -1:], keys, keys)
    y_hat = predict(checkpoint.weights, prompts)
    torch.testing.assert_close(y_hat, output[:, 0, -d_y:], rtol=1e-6, atol=1e-6)
    # Unlike torch's module, other layers say nothing of the scores.
    assert ("attn_scale" in checkpoint.assumed) is own
    assert not own or checkpoint.assumed["attn_scale"] == pytest.approx(math.sqrt(2))


# Plain arrays.


@pytest.mark.parametrize(("suffix", "bias"), [(".npz", True), (".safetensors", False)])
def test_arrays(tmp_path: Path, suffix: str, bias: bool):
    weights = random_heads(d_y=2, d_head=3)
    weights = biased(weights) if bias else weights
    file, root = tmp_path / f"arrays{suffix}", math.sqrt(3)
    if suffix == ".npz":
        np.savez(file, **arrays(weights))
    else:
        save_file(by_head(weights), file)
    hints = {"columns": "x,y", "attend_to_self": False, "model": {"positions": "none"}}
    checkpoint = load(file, **hints)
    # W_O is narrower than a token and says d_y.
    assert (checkpoint.task.d_x, checkpoint.task.d_y) == (3, 2)
    assert "task.d_y" not in checkpoint.assumed
    assert_circuits(checkpoint.weights, weights.QK, weights.OV)
    prompts = prompts_of(checkpoint.task)
    y_hat = predict(checkpoint.weights, prompts)
    torch.testing.assert_close(y_hat, predict(weights, prompts))
    assert checkpoint.assumed["model.score"] == "softmax"
    assert checkpoint.assumed["attn_scale"] == pytest.approx(root)
    scaled = load(file, scale=2.0, **hints)
    assert "attn_scale" not in scaled.assumed
    names = ("W_Q", "b_Q") if bias else ("W_Q",)
    by_hand = changed(weights, **{name: by_head(weights)[name] * 2 * root for name in names})
    torch.testing.assert_close(scaled.weights.QK, by_hand.QK)
    y_hat = predict(scaled.weights, prompts)
    torch.testing.assert_close(y_hat, predict(by_hand, prompts), **CLOSE)


@pytest.mark.parametrize(("d_y", "wide"), [(1, False), (2, True)])
def test_circuits_as_arrays(tmp_path: Path, d_y: int, wide: bool):
    weights = random_heads(n_heads=3, d_x=4, d_y=d_y)
    stored = nn.functional.pad(weights.OV, (4, 0), value=1.0) if wide else weights.OV
    np.savez(tmp_path / "c.npz", QK=weights.QK.numpy(), OV=stored.numpy())
    hints = {name: value for name, value in STATED.items() if name != "scale"}
    checkpoint = load(tmp_path / "c.npz", **hints, **({"d_y": d_y} if wide else {}))
    assert_circuits(checkpoint.weights, weights.QK, weights.OV)
    prompts = prompts_of(checkpoint.task)
    y_hat = predict(checkpoint.weights, prompts)
    torch.testing.assert_close(y_hat, predict(weights, prompts), **CLOSE)


def test_half_precision_is_widened(tmp_path: Path):
    weights = random_heads()
    for dtype in (torch.float16, torch.bfloat16):
        heads = loaded(tmp_path, by_head(weights.to(dtype)), **STATED).weights
        assert heads.W_Q.dtype == torch.float32
        assert torch.equal(heads.W_Q, weights.W_Q.to(dtype).float())
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


def test_hooked_names_are_told_from_arrays(tmp_path: Path):
    state = hooked_state(random_heads(), n_ctx=8)
    assert loaded(tmp_path, state).format == "transformer-lens"
    assert_refused(r"embed\.W_E, pos_embed\.W_pos", loaded, tmp_path, state, format="arrays")


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


@pytest.mark.parametrize(("key", "shards"), [("num_attention_heads", 1), ("nhead", 2)])
def test_a_hugging_face_folder(tmp_path: Path, shards: int, key: str):
    state = attention_module(5, width=4, n_heads=2, bias=True).state_dict()
    folder = hugging_face(tmp_path / "hf", {key: 2}, state, shards=shards)
    expected, checkpoint = load(saved(tmp_path, state), n_heads=2), load(folder)
    assert (checkpoint.format, checkpoint.name) == ("torch-attention", "hf")
    assert checkpoint.path == folder
    assert_same(checkpoint.weights, expected.weights)
    assert_refused("n_heads must be the file's 2, got 4", load, folder, n_heads=4)
    if shards == 2:
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
    "context_only": True,
    "passes": 1,
    "positions": "none",
}
"""What torch's encoder layers are by default, and no file says."""
NOT_UNDERSTOOD = {"understood", "doubt", "readings"}
"""What is assumed of random weights besides, which predict nothing."""


def test_the_task_of_a_gpt2_is_gargs_and_stated(tmp_path: Path):
    checkpoint = loaded(tmp_path, garg().state_dict(), n_heads=4)
    expected = TaskConfig(d_x=3, context_length=6, beta_var=1.0, noise_var=0.0, query_noise=False)
    assert checkpoint.task == expected
    assumed = dict(checkpoint.assumed)
    shown = {"model.activation": "gelu_new", "model.norm_eps": 1e-5, "step": 0, "model.passes": 1}
    assert {name: assumed.pop(name) for name in shown} == shown
    assert assumed.pop("model.tokens").startswith("x_1, y_1")
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


@pytest.mark.slow
@pytest.mark.parametrize("stem", ["transformer.", "model._backbone."])
def test_other_names_of_the_same_gpt2_and_buffers(tmp_path: Path, stem: str):
    state = {
        name.replace("_backbone.", stem).replace("_read", "read"): tensor
        for name, tensor in garg().state_dict().items()
    }
    extra = {"lm_head.weight": torch.zeros(7, 16)} if stem == "transformer." else {}
    for layer in range(3):
        mask = torch.ones(1, 1, 20, 20, dtype=torch.uint8)
        extra |= {f"{stem}h.{layer}.attn.bias": mask}
        extra |= {f"{stem}h.{layer}.attn.masked_bias": torch.tensor(-1e4)}
    before = loaded(tmp_path, garg().state_dict(), n_heads=4)
    assert_same(loaded(tmp_path, state | extra, n_heads=4).weights, before.weights)


@pytest.mark.slow
@pytest.mark.parametrize("stem", ["encoder.", "net.encoder.layers.0.", "blocks."])
def test_encoders_under_several_names(tmp_path: Path, stem: str):
    stack = encoder(4)
    numbered = stem == "blocks."
    source = stack.layers if numbered else stack.layers[0]
    state = {stem + name: tensor for name, tensor in source.state_dict().items()}
    hints = {} if stem == "encoder." else {"attend_to_self": True, "model": RELU}
    checkpoint = loaded(tmp_path, state, n_heads=2, **hints)
    assert checkpoint.weights.n_layers == (2 if numbered else 1)
    assert checkpoint.config.model.attend_to_self
    assert checkpoint.assumed["task.d_y"] == 1
    prompts = prompts_of(checkpoint.task)
    if stem != "encoder.":
        with torch.no_grad():
            expected = (stack if numbered else stack.layers[0])(prompts.tokens)[:, -1, 3:]
        torch.testing.assert_close(checkpoint.model.predict(prompts), expected, **CLOSE)
    for sizes in ({"d_x": 2}, {"task": {"d_y": 2}}):
        other = load(tmp_path / "x.pt", n_heads=2, **{"model": RELU, **hints}, **sizes)
        assert (other.task.d_x, other.task.d_y) == (2, 2)
        assert not {"task.d_x", "task.d_y"} & set(other.assumed)


def test_an_encoder_with_ends_a_last_norm_and_one_without_biases(tmp_path: Path):
    stack = encoder(8, bias=False)
    state = {f"encoder.{name}": tensor for name, tensor in stack.state_dict().items()}
    state |= {"encoder.norm.weight": torch.rand(8) + 0.5, "_read_in.weight": torch.randn(8, 5)}
    state |= {"_read_out.weight": torch.randn(2, 8), "_read_out.bias": torch.randn(2)}
    hints = {"n_heads": 2, "attend_to_self": True, "model": RELU}
    checkpoint = loaded(tmp_path, state, **hints)
    assert (checkpoint.task.d_x, checkpoint.task.d_y) == (3, 2)
    assert "task.d_y" not in checkpoint.assumed
    prompts = prompts_of(checkpoint.task)
    with torch.no_grad():
        stream = stack(prompts.tokens @ state["_read_in.weight"].T)[:, -1]
        stream = nn.functional.layer_norm(stream, (8,), state["encoder.norm.weight"])
    expected = stream @ state["_read_out.weight"].T + state["_read_out.bias"]
    torch.testing.assert_close(checkpoint.model.predict(prompts), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_how_layers_are_joined_is_stated_by_the_file_or_the_reader(tmp_path: Path):
    settings = {"n_head": 4, "activation_function": "relu", "layer_norm_epsilon": 0.1}
    folder = hugging_face(tmp_path / "gpt2", settings, _apart(garg()))
    checkpoint = load(folder, model={"passes": 1})
    model = checkpoint.config.model
    assert (model.n_heads, model.activation, model.norm_eps) == (4, "relu", 0.1)
    assert not {"model.activation", "model.norm_eps"} & set(checkpoint.assumed)
    settings = {"nhead": 2, "norm_first": True, "activation": "gelu"}
    folder = hugging_face(tmp_path / "encoder", settings, _apart(encoder(4)))
    said = {"passes": 1, "context_only": True}
    model = load(folder, attend_to_self=False, model=said).config.model
    assert (model.norm, model.activation, model.attend_to_self) == ("before", "gelu", False)
    said |= {"norm": "before", "activation": "gelu"}
    checkpoint = loaded(tmp_path, encoder(4).state_dict(), n_heads=2, model=said)
    assert (checkpoint.config.model.norm, checkpoint.config.model.activation) == ("before", "gelu")
    assert not {"model.norm", "model.activation"} & checkpoint.assumed.keys()
    words = "residual must be the file's True, got False"
    assert_refused(
        words, loaded, tmp_path, garg().state_dict(), n_heads=4, model={"residual": False}
    )


def _apart(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.mark.slow
def test_a_folder_that_an_earlier_version_wrote_is_read(tmp_path: Path):
    """Such a folder has the names of the owner's file, and in its config.json what was said of it."""
    said = {"context_length": 9, "covariance": {"kind": "kms", "rho": 0.3}}
    state = {f"net.{name}": tensor for name, tensor in _apart(encoder(4)).items()}
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


# Conversion.

FORMS = ("softmax-paper", "linear-merged", "linear-separate", "transformer-lens", "torch-attention", "arrays", "circuits")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_conversion_keeps_the_predictions(tmp_path: Path, name: str):
    file, hints = write_valid_files(tmp_path)[name]
    checkpoint = load(file, **hints)
    prompts = prompts_of(checkpoint.task)
    expected = predict(checkpoint.weights, prompts)
    scale, model = expected.abs().max().item(), checkpoint.config.model
    has_place = model.score == "softmax" and not model.attend_to_self
    targets = ("native", "npz", *(["transformer-lens"] if has_place else []), "native")
    written = checkpoint
    for number, target in enumerate(targets):
        out = tmp_path / (f"{number}.npz" if target == "npz" else f"{number}")
        convert(written, target, out)
        own = "arrays" if target == "npz" else target
        written = load(out, format=own)
        y_hat = predict(written.weights, prompts)
        torch.testing.assert_close(y_hat, expected, rtol=1e-5, atol=1e-5 * scale)
        assert (written.format, written.config) == (own, checkpoint.config)
        assert written.assumed == json.loads(json.dumps(dict(checkpoint.assumed)))
        for hint in ({"task": {}}, {"n_heads": 2}, {"format": "softmax-paper"}):
            assert_refused(f"{next(iter(hint))} is only for files that do", load, out, **hint)
    if not has_place:
        lens = ("transformer-lens", tmp_path / "refused")
        assert_refused("softmax attention only", convert, checkpoint, *lens)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["native", "npz"])
def test_a_converted_model_of_layers_is_the_same(tmp_path: Path, target: str):
    for name, (module, n_heads) in {"garg": (garg(), 4), "encoder": (encoder(4), 2)}.items():
        written = loaded(tmp_path, module.state_dict(), n_heads=n_heads)
        out = tmp_path / (f"{name}.npz" if target == "npz" else name)
        convert(written, target, out)
        checkpoint = load(out)
        assert checkpoint.config == written.config
        assert checkpoint.assumed == json.loads(json.dumps(dict(written.assumed)))
        assert_same(checkpoint.weights, written.weights)
        assert_refused("it is not overwritten", convert, written, target, out)
        lens = ("transformer-lens", tmp_path / "lens")
        assert_refused("needs one layer of attention", convert, written, *lens)


def test_a_place_that_is_no_npz_is_refused(tmp_path: Path):
    np.savez(tmp_path / "x.npz", **arrays(random_heads()))
    checkpoint = load(tmp_path / "x.npz", **STATED)
    for place, words in (("x.npz", "already exists"), ("x.npy", "must end in"), ("x.npz/y.npz", "cannot be written")):  # fmt: skip
        assert_refused(words, convert, checkpoint, "npz", tmp_path / place)


# Bounds.


@pytest.mark.slow
def test_64_choices_take_less_than_a_gigabyte_and_20_seconds(tmp_path: Path):
    state, draw = {}, {"generator": torch.Generator().manual_seed(0)}
    shapes = dict.fromkeys(("q", "k", "v", "proj"), (64, 64)) | {
        "mlp.0": (256, 64),
        "mlp.2": (64, 256),
    }
    for layer in range(4):
        of_layer = {f"{x}.weight": torch.randn(shape, **draw) / 8 for x, shape in shapes.items()}
        of_layer |= {f"ln{i}.weight": torch.ones(64) for i in (1, 2)}
        state |= {f"blocks.{layer}.{name}": tensor for name, tensor in of_layer.items()}
    state |= {
        "read_in.weight": torch.randn(64, 6, **draw),
        "read_out.weight": torch.randn(1, 64, **draw),
    }
    before, start = peak(), time.process_time()
    assert len(loaded(tmp_path, state, n_heads=2).readings) == 64
    assert time.process_time() - start < 20
    assert peak() - before < 1e9


def test_readings_are_refused_where_too_many_are_open(tmp_path: Path):
    generator = torch.Generator().manual_seed(0)
    state = {f"W{x}": torch.randn(17, 17, generator=generator) for x in "qkvo"}
    with pytest.raises(CheckpointError, match=r"at most 64 readings .*--orientation.*--output-col"):
        loaded(tmp_path, state, n_heads=1, d_x=10, d_y=1)
