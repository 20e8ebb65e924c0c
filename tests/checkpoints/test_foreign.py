"""Files of other people's code are read head by head, and predict what that code predicts."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mechinterp.checkpoints.io.errors import CheckpointError
from mechinterp.checkpoints.load import convert
from mechinterp.checkpoints.native.exchange import hooked_state
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts, sample_prompts
from mechinterp.models.heads import AttentionWeights, predict
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
from tests.conftest import assert_close_to_rounding, assert_same


def prompts_of(task: TaskConfig) -> Prompts:
    return sample_prompts(task, 64, seed=0)


def assert_circuits(actual: AttentionWeights, QK: Tensor, OV: Tensor):
    torch.testing.assert_close(actual.QK, QK, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(actual.OV, OV, rtol=1e-6, atol=1e-6)
    assert actual.scale == pytest.approx(actual.W_Q.shape[2] ** -0.5)


# The softmax paper's code.


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_softmax_paper(tmp_path: Path, whole: bool, prefix: str):
    weights = random_heads(n_heads=3, d_x=4)
    state = {prefix + name: tensor for name, tensor in softmax_paper_state(weights).items()}
    checkpoint = loaded(tmp_path, whole_run(state) if whole else state)
    assert_circuits(checkpoint.weights.circuits, weights.QK, weights.OV)
    assert checkpoint.format == "softmax-paper"
    assert checkpoint.config.task == TaskConfig(d_x=4)
    prompts = prompts_of(checkpoint.config.task)
    assert_close_to_rounding(
        predict(checkpoint.weights.circuits, prompts), predict(weights, prompts)
    )
    # The code says all of the model, the file nothing of the task but its sizes.
    names = {name.partition(".")[0] for name in checkpoint.assumed}
    assert names - {"understood", "doubt", "readings"} == {"task", "train", "seed", "step"}
    assert not {"task.d_x", "task.d_y"} & set(checkpoint.assumed)


def test_softmax_paper_with_several_tasks(tmp_path: Path):
    weights = random_heads(n_heads=4, d_x=6, d_y=2)
    file = saved(tmp_path, whole_run(softmax_paper_state(weights)))
    checkpoint = load(file)
    assert_circuits(checkpoint.weights.circuits, weights.QK, weights.OV)
    expected = {"context_length": 48, "beta_var": 1.0, "noise_var": 0.4, "query_noise": False}
    assert checkpoint.config.task == TaskConfig(d_x=6, d_y=2, **expected)
    assert {checkpoint.assumed[f"task.{name}"] for name in expected} == {48, 1.0, 0.4, False}
    assert checkpoint.assumed["task.supports"] is None
    supports = ((0, 1, 2, 3), (2, 3, 4, 5))
    told = load(file, task={"supports": supports})
    assert told.config.task.supports == supports
    assert "task.supports" not in told.assumed


# The linear-attention paper's code.


def test_linear_paper_merged(tmp_path: Path):
    generator = torch.Generator().manual_seed(3)
    QK, values = torch.randn(2, 3, 4, 4, generator=generator)
    state = merged_state(QK, values)
    checkpoint = loaded(tmp_path, state)
    assert_circuits(checkpoint.weights.circuits, QK, values[:, -1, :, None])
    circuits, task = checkpoint.weights.circuits, checkpoint.task
    assert (circuits.score, circuits.attend_to_self) == ("linear", True)
    prompts = prompts_of(task)
    y_hat = linear_output(prompts.tokens, state, 3)[:, -1, -1:]
    torch.testing.assert_close(predict(circuits, prompts), y_hat, rtol=1e-5, atol=1e-5)
    assert (task.d_x, task.d_y, task.context_length) == (3, 1, 31)
    assert (task.beta_var, task.noise_var, task.query_noise) == (1, 0, False)
    assert task.covariance.eigenvalues == pytest.approx([1 / 3] * 3)
    assert checkpoint.format == "linear-paper"


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_linear_paper_separate(tmp_path: Path, rank: int):
    generator = torch.Generator().manual_seed(3)
    keys, queries = torch.randn(2, 3, rank, 4, generator=generator)
    values = torch.randn(3, 4, 4, generator=generator)
    state = separate_state(keys, queries, values)
    checkpoint = loaded(tmp_path, state, format="linear-paper")
    assert_circuits(checkpoint.weights.circuits, queries.mT @ keys, values[:, -1, :, None])
    prompts = prompts_of(checkpoint.config.task)
    y_hat = linear_output(prompts.tokens, state, 3)[:, -1, -1:]
    torch.testing.assert_close(
        predict(checkpoint.weights.circuits, prompts), y_hat, rtol=1e-5, atol=1e-4
    )


# torch.nn.MultiheadAttention.


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("attend_to_self", [False, True])
@pytest.mark.parametrize("d_y", [1, 2])
def test_torch_attention(tmp_path: Path, bias: bool, attend_to_self: bool, d_y: int):
    module = attention_module(5, width=6, n_heads=3, bias=bias)
    state = {f"model.attn.{name}": tensor for name, tensor in module.state_dict().items()}
    file = saved(tmp_path, state)
    checkpoint = load(file, n_heads=3, d_y=d_y, attend_to_self=attend_to_self)
    assert checkpoint.config.model.biases is bias
    assert checkpoint.weights.circuits.W_Q.shape == (3, 6, 2)
    prompts = prompts_of(checkpoint.config.task)
    query = prompts.tokens[:, -1:]
    keys = prompts.tokens if attend_to_self else prompts.context_tokens
    with torch.no_grad():
        output, _ = module(query, keys, keys)
    y_hat = predict(checkpoint.weights.circuits, prompts)
    torch.testing.assert_close(y_hat, output[:, 0, -d_y:], rtol=1e-5, atol=1e-5)
    assert "model.attend_to_self" not in checkpoint.assumed
    assert load(file, n_heads=3).assumed["model.attend_to_self"] is False


@pytest.mark.slow
def test_torch_attention_with_separate_matrices(tmp_path: Path):
    state = attention_module(5, width=4, n_heads=2, bias=False).state_dict()
    whole = loaded(tmp_path, state, n_heads=2)
    names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    state |= dict(zip(names, state.pop("in_proj_weight").split(4), strict=True))
    apart = loaded(tmp_path, state, n_heads=2)
    assert_same(apart.weights, whole.weights)


# Somebody's own layer of four linear ones.


@pytest.mark.slow
@pytest.mark.parametrize(("names", "bias"), [*zip(LAYER_NAMES, (False, True), strict=True)])
def test_linear_layers(tmp_path: Path, names: tuple[str, ...], bias: bool):
    module = attention_module(5, width=6, n_heads=3, bias=bias).double()
    state = linear_layers_state(module, names)
    checkpoint = loaded(tmp_path, state, n_heads=3, d_y=2)
    assert checkpoint.format == "torch-attention"
    assert checkpoint.config.model.biases is bias
    prompts = sample_prompts(checkpoint.task, 64, seed=0, dtype=torch.float64)
    context = prompts.context_tokens
    with torch.no_grad():
        output, _ = module(prompts.tokens[:, -1:], context, context)
    y_hat = predict(checkpoint.weights.circuits, prompts)
    torch.testing.assert_close(y_hat, output[:, 0, -2:], rtol=1e-6, atol=1e-6)
    # Unlike torch's module, such a file says nothing of the scores.
    assert checkpoint.assumed["model.score"] == "softmax"
    assert checkpoint.assumed["attn_scale"] == pytest.approx(math.sqrt(2))


@pytest.mark.slow
def test_linear_layers_wider_than_a_token_that_write_y_alone(tmp_path: Path):
    generator = torch.Generator().manual_seed(0)
    shapes = {"query": (12, 4), "key": (12, 4), "value": (12, 4), "out": (1, 12)}
    state = {
        f"{name}.weight": torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }
    state["value.bias"] = torch.randn(12, generator=generator, dtype=torch.float64)
    checkpoint = loaded(tmp_path, state, n_heads=2, scale=0.5)
    assert (checkpoint.task.d_x, checkpoint.task.d_y) == (3, 1)
    assert not {"attn_scale", "task.d_y"} & set(checkpoint.assumed)
    prompts = sample_prompts(checkpoint.task, 16, seed=0, dtype=torch.float64)
    q, k, v = (
        (tokens @ state[f"{name}.weight"].T + state.get(f"{name}.bias", 0)).unflatten(-1, (2, 6))
        for name, tokens in (
            ("query", prompts.tokens[:, -1:]),
            ("key", prompts.context_tokens),
            ("value", prompts.context_tokens),
        )
    )
    heads = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale=0.5
    )
    expected = heads.transpose(1, 2).flatten(2) @ state["out.weight"].T
    y_hat = predict(checkpoint.weights.circuits, prompts)
    torch.testing.assert_close(y_hat, expected[:, 0], rtol=1e-6, atol=1e-6)


# Plain arrays.


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".pt"])
@pytest.mark.parametrize("bias", [False, True])
def test_arrays(tmp_path: Path, suffix: str, bias: bool):
    weights = random_heads(d_y=2, d_head=3)
    weights = biased(weights) if bias else weights
    file = tmp_path / f"arrays{suffix}"
    if suffix == ".npz":
        np.savez(file, **arrays(weights))
    else:
        (save_file if suffix == ".safetensors" else torch.save)(weights.tensors, file)
    checkpoint = load(file)
    # W_O is narrower than a token and says d_y.
    assert (checkpoint.config.task.d_x, checkpoint.config.task.d_y) == (3, 2)
    assert "task.d_y" not in checkpoint.assumed
    assert_circuits(checkpoint.weights.circuits, weights.QK, weights.OV)
    prompts = prompts_of(checkpoint.config.task)
    torch.testing.assert_close(
        predict(checkpoint.weights.circuits, prompts), predict(weights, prompts)
    )
    assert checkpoint.assumed["model.score"] == "softmax"
    assert checkpoint.assumed["attn_scale"] == pytest.approx(math.sqrt(3))
    scaled = load(file, scale=2.0)
    torch.testing.assert_close(scaled.weights.circuits.QK, weights.QK * 2 * math.sqrt(3))
    assert "attn_scale" not in scaled.assumed
    if bias:
        scaled_by_hand = weights.with_tensors(
            {"b_Q": weights.b_Q * 2 * math.sqrt(3), "W_Q": weights.W_Q * 2 * math.sqrt(3)}
        )
        y_hat = predict(scaled.weights.circuits, prompts)
        torch.testing.assert_close(y_hat, predict(scaled_by_hand, prompts), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_arrays_as_wide_as_a_token(tmp_path: Path):
    weights = random_heads(d_x=3, d_y=2)
    wide = arrays(weights) | {"W_O": np.random.default_rng(0).normal(size=(2, 5, 5))}
    wide = {name: array.astype(np.float64) for name, array in wide.items()}
    np.savez(tmp_path / "wide.npz", **wide)
    one = load(tmp_path / "wide.npz")
    assert (one.assumed["task.d_y"], one.weights.circuits.W_Q.dtype) == (1, torch.float64)
    for sizes in ({"d_y": 2}, {"d_x": 3}, {"task": {"d_y": 2}}, {"d_x": 3, "d_y": 2}):
        two = load(tmp_path / "wide.npz", **sizes)
        assert "task.d_y" not in two.assumed
        torch.testing.assert_close(two.weights.circuits.W_O.numpy(), wide["W_O"][:, :, 3:])


@pytest.mark.slow
@pytest.mark.parametrize("d_y", [1, 2])
@pytest.mark.parametrize("wide", [False, True])
def test_circuits_as_arrays(tmp_path: Path, d_y: int, wide: bool):
    weights = random_heads(n_heads=3, d_x=4, d_y=d_y)
    OV = weights.OV
    stored = torch.nn.functional.pad(OV, (4, 0), value=1.0) if wide else OV
    np.savez(tmp_path / "c.npz", QK=weights.QK.numpy(), OV=stored.numpy())
    checkpoint = load(tmp_path / "c.npz", **({"d_y": d_y} if wide else {}))
    assert_circuits(checkpoint.weights.circuits, weights.QK, OV)
    prompts = prompts_of(checkpoint.config.task)
    expected = predict(weights, prompts)
    torch.testing.assert_close(
        predict(checkpoint.weights.circuits, prompts), expected, rtol=1e-5, atol=1e-5
    )
    assert_refused(r"scale must be the file\'s 1\.0, got 2\.0", load, tmp_path / "c.npz", scale=2.0)


@pytest.mark.slow
def test_half_precision_is_widened_and_other_kinds_are_refused(tmp_path: Path):
    weights = random_heads()
    for dtype in (torch.float16, torch.bfloat16):
        file = saved(tmp_path, weights.to(dtype).tensors)
        heads = load(file).weights.circuits
        assert heads.W_Q.dtype == torch.float32
        assert torch.equal(heads.W_Q, weights.W_Q.to(dtype).float())
    for dtype in (torch.int32, torch.complex64, torch.bool):
        file = saved(tmp_path, {n: t.to(dtype) for n, t in weights.tensors.items()})
        assert_refused(f"W_Q must hold floating-point numbers, got {dtype}", load, file)
    mixed = saved(tmp_path, weights.tensors | {"W_K": weights.W_K.double()})
    assert load(mixed).weights.dtype == torch.float64


# Folders with somebody else's config.json.


@pytest.mark.parametrize(
    ("key", "shards"),
    [("n_head", 1), ("num_heads", 1), ("num_attention_heads", 1), ("n_heads", 2), ("nhead", 2)],
)
def test_a_hugging_face_folder(tmp_path: Path, shards: int, key: str):
    module = attention_module(5, width=4, n_heads=2, bias=True)
    file = saved(tmp_path, module.state_dict())
    folder = hugging_face(tmp_path / "hf", {key: 2}, module.state_dict(), shards=shards)
    expected, checkpoint = load(file, n_heads=2), load(folder)
    assert (checkpoint.format, checkpoint.path, checkpoint.name) == (
        "torch-attention",
        folder,
        "hf",
    )
    assert_same(checkpoint.weights, expected.weights)
    assert_refused("n_heads must be the file's 2, got 4", load, folder, n_heads=4)
    convert(checkpoint, "native", tmp_path / "native")
    assert load(tmp_path / "native").format == "native"


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"weight_map": {"a": "../model-0.safetensors"}}, "files beside it, got '../model-0"),
        ({"weight_map": {"a": "/etc/x.safetensors"}}, "files beside it, got '/etc/x"),
        ({"weight_map": {"a": "model.pt"}}, "files beside it, got 'model.pt'"),
        ({"weight_map": {"a": "gone.safetensors"}}, "gone.safetensors: not a readable"),
        ({"weight_map": {"a": "model-0.safetensors"}}, "index.json: a is in none of the files"),
        ({"weight_map": {"a": 1}}, "weight_map must name a file for each tensor"),
        ({"weight_map": {str(i): f"{i}.safetensors" for i in range(200)}}, "100 files, got 200"),
        ([], "weight_map must name a file for each tensor"),
    ],
)
def test_shards_are_plain_names_beside_their_index(tmp_path: Path, named: object, words: str):
    folder = hugging_face(tmp_path / "hf", {}, random_heads().tensors, shards=2)
    (folder / "model.safetensors.index.json").write_text(json.dumps(named))
    with pytest.raises(CheckpointError) as error:
        load(folder)
    assert words in str(error.value)


def test_a_tensor_is_in_one_shard(tmp_path: Path):
    folder = hugging_face(tmp_path / "hf", {}, random_heads().tensors, shards=2)
    save_file(random_heads().tensors, folder / "model-1.safetensors")
    assert_refused("holds tensors that another shard holds", load, folder)


def test_a_foreign_folder_without_weights(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    assert_refused(r"must have model\.safetensors or model\.safetensors", load, tmp_path)
    (tmp_path / "config.json").write_text('{"n_heads": "x"}')
    save_file(
        attention_module(0, width=4, n_heads=2, bias=False).state_dict(),
        tmp_path / "model.safetensors",
    )
    assert_refused("n_heads must be an integer >= 1, got 'x'", load, tmp_path)
    (tmp_path / "config.json").write_text('{"n_heads": 2, "nhead": 4}')
    assert_refused("n_heads must be one number, got n_heads = 2, nhead = 4", load, tmp_path)
    # A config.json with one of our own fields is ours, and broken.
    (tmp_path / "config.json").write_text('{"experiment": {}}')
    assert_refused("field 'format_version' is missing", load, tmp_path)


# Hints.


def test_a_native_checkpoint_takes_no_hint_but_its_format(tmp_path: Path):
    file = saved(tmp_path, softmax_paper_state(random_heads()))
    for target in ("native", "transformer-lens", "npz"):
        out = tmp_path / (f"{target}.npz" if target == "npz" else target)
        convert(load(file), target, out)
        name = "arrays" if target == "npz" else target
        assert load(out, format=name).format == name
        for hint in ({"task": {}}, {"n_heads": 2}, {"scale": 0.5}, {"format": "softmax-paper"}):
            assert_refused(f"{next(iter(hint))} is only for files that do", load, out, **hint)


# Conversion.


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    *("softmax-paper", "linear-merged", "linear-separate", "transformer-lens", "torch-attention"),
    *("arrays", "circuits"),
])  # fmt: skip
def test_conversion_keeps_the_predictions(tmp_path: Path, name: str):
    file, hints = write_valid_files(tmp_path)[name]
    checkpoint = load(file, **hints)
    prompts = prompts_of(checkpoint.config.task)
    expected = predict(checkpoint.weights.circuits, prompts)
    scale = expected.abs().max().item()
    model = checkpoint.config.model
    has_place = model.score == "softmax" and not model.attend_to_self
    targets = ("native", "npz", *(["transformer-lens"] if has_place else []), "native")
    written = checkpoint
    for number, target in enumerate(targets):
        out = tmp_path / (f"{number}.npz" if target == "npz" else f"{number}")
        convert(written, target, out)
        written = load(out)
        y_hat = predict(written.weights.circuits, prompts)
        torch.testing.assert_close(y_hat, expected, rtol=1e-5, atol=1e-5 * scale)
        assert written.config == checkpoint.config
        assert written.assumed == json.loads(json.dumps(dict(checkpoint.assumed)))
    if not has_place:
        with pytest.raises(CheckpointError, match="HookedTransformer has softmax attention only"):
            convert(checkpoint, "transformer-lens", tmp_path / "refused")


@pytest.mark.slow
def test_npz_is_not_overwritten_and_ends_in_npz(tmp_path: Path):
    file, _ = write_valid_files(tmp_path)["arrays"]
    checkpoint = load(file)
    assert_refused(r"arrays\.npz: already exists; it is not", convert, checkpoint, "npz", file)
    assert_refused(r"out\.npy: must end in \.npz", convert, checkpoint, "npz", tmp_path / "out.npy")
    assert_refused(r"out\.npz: cannot be written", convert, checkpoint, "npz", file / "out.npz")


def stated(file: Path, config: object, **changes: np.ndarray) -> Path:
    text = config if isinstance(config, str) else json.dumps(config)
    np.savez(file, config=np.array(text), **(arrays(random_heads(n_heads=2)) | changes))
    return file


def test_arrays_with_a_config_assume_nothing(tmp_path: Path):
    config = {"task": {"d_x": 3, "noise_var": 0.2}, "model": {"n_heads": 2, "score": "1+tanh"}}
    checkpoint = load(stated(tmp_path / "c.npz", config))
    assert (checkpoint.assumed, checkpoint.step) == ({}, 0)
    assert (checkpoint.weights.circuits.score, checkpoint.config.task.noise_var) == ("1+tanh", 0.2)
    wide = np.zeros((2, 4, 4), np.float32)
    wide[:, :, 3] = 1
    assert load(stated(tmp_path / "w.npz", config, W_O=wide)).weights.circuits.W_O.shape == (
        2,
        4,
        1,
    )
    for bad, words in (
        ("{", "config must be JSON"),
        ("[" * 100_000, "config must be JSON"),
        ([1], "must hold a JSON object, got list"),
        ({"seed": "x"}, "seed must be an integer"),
        ({"task": {"d_x": 2}}, "must have shape"),
        ({"task": {"d_x": 3}, "model": {"biases": True}}, "b_Q is missing"),
    ):
        assert_refused(words, load, stated(tmp_path / "bad.npz", bad))
    with pytest.raises(CheckpointError, match="b_Q is not among the arrays of such a model"):
        load(stated(tmp_path / "more.npz", config, b_Q=np.zeros((2, 4), np.float32)))
    np.savez(tmp_path / "number.npz", config=np.array(1.0), **arrays(random_heads()))
    assert_refused("must hold a JSON object, got float", load, tmp_path / "number.npz")


def test_hooked_names_are_told_from_arrays(tmp_path: Path):
    state = hooked_state(random_heads(), n_ctx=8)
    assert loaded(tmp_path, state).format == "transformer-lens"
    with pytest.raises(
        CheckpointError,
        match=r"embed\.W_E, pos_embed\.W_pos, .* are not among the tensors of format arrays",
    ):
        loaded(tmp_path, state, format="arrays")
