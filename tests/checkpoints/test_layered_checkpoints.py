"""State dicts of layered models are read, or refused in one line that names the file, the rule and the value."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.foreign.options import Hints
from mechinterp.checkpoints.foreign.read import Stored, read_foreign
from mechinterp.checkpoints.foreign.settings import settled
from mechinterp.checkpoints.io.errors import CheckpointError, naming
from mechinterp.checkpoints.load import convert
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import sample_prompts
from mechinterp.models.run.predictor import predictor_of
from tests.checkpoints.files import assert_refused
from tests.checkpoints.files import read as load
from tests.conftest import assert_same
from tests.models.test_layered_models import encoder, garg

FILE = Path("x.pt")
NOT_UNDERSTOOD = ("understood", "doubt", "readings")
"""What is assumed of random weights besides, which predict nothing."""


def read(
    state: Mapping[str, Tensor],
    *,
    settings: Mapping[str, object] | None = None,
    file: Path = FILE,
    **hints: object,
) -> Checkpoint:
    """The checkpoint of a state dict, as the loader asks for it."""
    with naming(file):
        stated = settled(settings or {})
    return read_foreign([Stored(file, state, stated)], Hints(**hints))


def changed(state: Mapping[str, Tensor], **changes: Tensor | None) -> dict[str, Tensor]:
    return {name: t for name, t in {**state, **changes}.items() if t is not None}


def test_the_task_of_a_gpt2_is_gargs_and_stated():
    checkpoint = read(garg().state_dict(), n_heads=4)
    sizes = "3 layers of 4 heads with MLPs, d_x=3, context_length=6"
    assert repr(checkpoint) == f"Checkpoint(x.pt: {sizes})"
    assert checkpoint.model is checkpoint.model
    expected = TaskConfig(d_x=3, context_length=6, beta_var=1.0, noise_var=0.0, query_noise=False)
    assert checkpoint.task == expected
    stated = dict(checkpoint.assumed)
    assert stated.pop("model.tokens").startswith("x_1, y_1")
    assert stated.pop("model.activation") == "gelu_new"
    assert stated.pop("model.norm_eps") == 1e-5
    assert stated.pop("step") == 0
    assert stated["task.context_length"] == 6
    assert stated["task.beta_var"] == 1
    names = {f"task.{name}" for name in asdict(expected)} - {"task.d_x", "task.d_y"}
    names = names - {"task.covariance"} | {
        f"task.covariance.{n}" for n in asdict(expected.covariance) if n not in ("matrix", "scale")
    }
    assert stated.pop("model.passes") == 1
    stated = {name: value for name, value in stated.items() if name not in NOT_UNDERSTOOD}
    assert set(stated) == names


def test_the_assumed_context_is_never_longer_than_the_positions():
    state = changed(garg().state_dict(), **{"_backbone.wpe.weight": torch.randn(8, 16)})
    assert read(state, n_heads=4).task.context_length == 3
    task = {"context_length": 4}
    words = r"x.pt: task.context_length must be <= 3, the most that 8 positions allow, got 4\."
    assert_refused(words, read, state, n_heads=4, task=task)


def test_what_the_reader_says_of_the_task_holds():
    task = {"noise_var": 0.5, "covariance": {"kind": "kms", "rho": 0.3}, "context_length": 9}
    checkpoint = read(garg().state_dict(), n_heads=4, task=task)
    assert (checkpoint.task.noise_var, checkpoint.task.context_length) == (0.5, 9)
    assert checkpoint.task.covariance.rho == 0.3
    stated = {
        "task.noise_var",
        "task.context_length",
        "task.covariance.kind",
        "task.covariance.rho",
    }
    assert not stated & set(checkpoint.assumed)
    assert checkpoint.assumed["task.beta_var"] == 1


@pytest.mark.slow
def test_older_buffers_and_word_embeddings_are_left_out():
    state = garg().state_dict()
    buffers = {
        f"_backbone.h.{layer}.attn.{name}": tensor
        for layer in range(3)
        for name, tensor in (
            ("bias", torch.ones(1, 1, 20, 20, dtype=torch.uint8)),
            ("masked_bias", torch.tensor(-1e4)),
        )
    }
    checkpoint = read(state | buffers, n_heads=4)
    for without in (state, changed(state, **{"_backbone.wte.weight": None})):
        assert_same(read(without, n_heads=4).weights, checkpoint.weights)


@pytest.mark.slow
@pytest.mark.parametrize("stem", ["", "transformer.", "model._backbone.", "module._backbone."])
def test_other_names_of_the_same_gpt2(stem: str):
    state = {
        name.replace("_backbone.", stem).replace("_read", "read"): tensor
        for name, tensor in garg().state_dict().items()
    }
    extra = {"lm_head.weight": torch.zeros(7, 16)} if stem == "transformer." else {}
    again, before = read(state | extra, n_heads=4), read(garg().state_dict(), n_heads=4)
    assert_same(again.weights, before.weights)


RELU = {"norm": "after", "activation": "relu"}
"""What torch's encoder layers are by default, and no file says."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "stem", ["", "encoder.", "net.encoder.layers.0.", "net.encoder.layers.", "blocks."]
)
def test_encoders_under_several_names(stem: str):
    stack = encoder(4)
    numbered = stem.endswith(("layers.", "blocks."))
    source = stack.layers if numbered else stack.layers[0]
    state = {stem + name: tensor for name, tensor in source.state_dict().items()}
    open_norm = stem == "encoder."
    hints = {} if open_norm else {"attend_to_self": True, "model": RELU}
    checkpoint = read(state, n_heads=2, **hints)
    assert checkpoint.weights.n_layers == (2 if numbered else 1)
    assert (checkpoint.format, checkpoint.task.d_x, checkpoint.task.d_y) == ("torch-encoder", 3, 1)
    assert checkpoint.task == TaskConfig(d_x=3)
    if open_norm:
        assert checkpoint.assumed["model.norm"] == "after"
        assert checkpoint.assumed["model.attend_to_self"] is True
    assert checkpoint.assumed["task.d_y"] == 1
    prompts = sample_prompts(checkpoint.task, 4, seed=0)
    with torch.no_grad():
        expected = (stack if numbered else stack.layers[0])(prompts.tokens)[:, -1, 3:]
    torch.testing.assert_close(checkpoint.model.predict(prompts), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "hints", [{"d_x": 2}, {"d_y": 2}, {"task": {"d_x": 2}}, {"task": {"d_y": 2}}]
)
def test_one_size_of_an_encoders_tokens_gives_the_other(hints: dict):
    checkpoint = read(encoder(4).state_dict(), n_heads=2, model=RELU, **hints)
    assert (checkpoint.task.d_x, checkpoint.task.d_y) == (2, 2)
    assert not {"task.d_x", "task.d_y"} & set(checkpoint.assumed)


@pytest.mark.slow
def test_an_encoder_with_ends_and_a_last_norm():
    state = {f"encoder.{name}": t for name, t in encoder(8, bias=False).state_dict().items()}
    state |= {"encoder.norm.weight": torch.ones(8), "_read_in.weight": torch.randn(8, 5)}
    state |= {"_read_out.weight": torch.randn(2, 8), "_read_out.bias": torch.randn(2)}
    checkpoint = read(state, n_heads=2, model=RELU)
    assert (checkpoint.task.d_x, checkpoint.task.d_y) == (3, 2)
    assert "task.d_y" not in checkpoint.assumed
    for name, given in {"ln_final.w": "encoder.norm.weight", "b_in": None}.items():
        expected = torch.zeros(8) if given is None else state[given]
        assert torch.equal(checkpoint.weights.tensors[name], expected)
    for name in ("in", "out"):
        ours = {"in": "W_in", "out": "unembed.W_U"}[name]
        assert torch.equal(checkpoint.weights.tensors[ours], state[f"_read_{name}.weight"].T)
    assert torch.equal(checkpoint.weights.tensors["unembed.b_U"], state["_read_out.bias"])


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)


@pytest.mark.slow
def test_numbered_modules_are_read_once_their_parts_are_stated():
    torch.manual_seed(0)
    inside = (encoder_layer(), encoder_layer(), nn.LayerNorm(8))
    module = nn.Sequential(nn.Linear(6, 8), *inside, nn.Linear(8, 1)).eval()
    with pytest.raises(CheckpointError, match=r"0\.weight, .* state its part by --map"):
        read(module.state_dict(), n_heads=2)
    parts = ["0=read_in", "3=final_norm", "4=read_out"]
    hints = {"n_heads": 2, "model": RELU, "attend_to_self": True, "map": parts}
    checkpoint = read(module.state_dict(), **hints)
    assert (checkpoint.task.d_x, checkpoint.weights.n_layers) == (5, 2)
    prompts = sample_prompts(checkpoint.task, 4, seed=0)
    with torch.no_grad():
        expected = module(prompts.tokens)[:, -1]
    torch.testing.assert_close(checkpoint.model.predict(prompts), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["n_head", "num_attention_heads", "num_heads"])
def test_heads_and_the_architecture_from_the_settings(key: str):
    settings = {key: 2, "activation_function": "relu", "layer_norm_epsilon": 0.1}
    checkpoint = read(garg().state_dict(), settings=settings)
    model = checkpoint.config.model
    assert (model.n_heads, model.activation, model.norm_eps) == (2, "relu", 0.1)
    assert not {"model.activation", "model.norm_eps"} & set(checkpoint.assumed)
    settings = {key: 2, "norm_first": True, "activation": "gelu"}
    model = read(encoder(4).state_dict(), settings=settings, attend_to_self=False).config.model
    assert (model.norm, model.activation, model.attend_to_self) == ("before", "gelu", False)


SAID = {"context_length": 9, "covariance": {"kind": "kms", "rho": 0.3}}


def written_encoder() -> tuple[dict[str, Tensor], Checkpoint]:
    """An encoder's file of which much is said, and what is read from it."""
    state = {f"net.{name}": tensor for name, tensor in encoder(4).state_dict().items()}
    settings = {"nhead": 2, "norm_first": True, "activation": "gelu"}
    return state, read(state, settings=settings, task=SAID, d_y=2, attend_to_self=False)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["native", "npz"])
def test_a_converted_model_is_the_same(tmp_path: Path, target: str):
    for name, written in {
        "garg": read(garg().state_dict(), n_heads=4),
        "encoder": written_encoder()[1],
    }.items():
        out = tmp_path / (f"{name}.npz" if target == "npz" else name)
        convert(written, target, out)
        checkpoint = load(out)
        assert checkpoint.config == written.config
        assert checkpoint.assumed == json.loads(json.dumps(dict(written.assumed)))
        assert_same(checkpoint.weights, written.weights)
        assert "task.noise_var" in checkpoint.assumed
        assert_refused("it is not overwritten", convert, written, target, out)
        assert_refused("only for files that do not state it", load, out, attend_to_self=True)
        with pytest.raises(CheckpointError, match="needs one layer of attention, got several"):
            convert(written, "transformer-lens", tmp_path / "lens")


@pytest.mark.slow
def test_a_folder_that_an_earlier_version_wrote_is_read(tmp_path: Path):
    """Such a folder has the names of the owner's file, and in its config.json what was said of it."""
    state, expected = written_encoder()
    stated = {"n_head": 2, "norm_first": True, "activation": "gelu", "attend_to_self": False}
    document = {**stated, "mechinterp_task": {"d_x": 2, "d_y": 2, **SAID}}
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text(json.dumps(document))
    save_file(state, tmp_path / "old" / "model.safetensors")
    checkpoint = load(tmp_path / "old")
    assert (checkpoint.config, checkpoint.assumed) == (expected.config, expected.assumed)
    assert {"task.noise_var", "model.norm_eps"} <= set(checkpoint.assumed)
    assert_same(checkpoint.weights, expected.weights)
    other = load(tmp_path / "old", task={"context_length": 5}, d_y=2, attend_to_self=False)
    assert (other.task.context_length, other.task.covariance.rho) == (5, 0.3)
    with pytest.raises(CheckpointError, match="attend_to_self must be the file's False, got True"):
        load(tmp_path / "old", attend_to_self=True)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "n_heads"), [(garg(), 4), (encoder(4), 2)])
def test_a_model_without_a_head_predicts_as_one_with_it_masked(model: nn.Module, n_heads: int):
    checkpoint = read(model.state_dict(), n_heads=n_heads)
    head = (1, n_heads // 2)
    without = checkpoint.weights.without([head])
    for name, tensor in checkpoint.weights.tensors.items():
        expected = tensor.clone()
        if name == "attn.W_O":
            expected[head] = 0
        assert torch.equal(without.tensors[name], expected), name
    prompts = sample_prompts(checkpoint.task, 4, seed=0)
    full, masked = checkpoint.predictor.run(prompts, [[], [head]])
    torch.testing.assert_close(predictor_of(without).predict(prompts), masked)
    assert not torch.allclose(masked, full, atol=1e-4)


def test_a_scale_that_such_layers_have_is_taken():
    assert read(garg().state_dict(), n_heads=4, scale=0.5).weights.n_heads == 4
    hints = {"n_heads": 1, "scale": 0.5, "attend_to_self": True, "model": RELU}
    assert read(encoder(4).state_dict(), **hints).weights.n_heads == 1


def test_what_the_reader_says_of_the_architecture():
    checkpoint = read(
        encoder(4).state_dict(), n_heads=2, model={"norm": "before", "activation": "gelu"}
    )
    model = checkpoint.config.model
    assert (model.norm, model.activation) == ("before", "gelu")
    assert not {"model.norm", "model.activation"} & checkpoint.assumed.keys()
    with pytest.raises(CheckpointError, match="residual must be the file's True, got False"):
        read(garg().state_dict(), n_heads=4, model={"residual": False})


def test_a_norm_without_a_bias_is_read():
    state = {f"enc.{name}": t for name, t in encoder(4).layers[0].state_dict().items()}
    checkpoint = read(changed(state, **{"enc.norm1.bias": None}), n_heads=2)
    assert not checkpoint.weights.tensors["ln1.b"][0].any()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"n_head": 8}, "n_heads must be the file's 8, got 4."),
        (
            {"activation_function": "sine"},
            "model.activation must be one of relu, gelu, gelu_new, silu, tanh, got 'sine'.",
        ),
        ({"layer_norm_epsilon": "small"}, "layer_norm_epsilon must be a number >= 0, got 'small'."),
        ({"layer_norm_epsilon": -1}, "layer_norm_epsilon must be a number >= 0, got -1."),
        ({"mechinterp_task": {"noise": 1}}, "Unknown field 'task.noise'; known: "),
        ({"scale_attn_weights": False}, "scale_attn_weights must be True, got False."),
        ({"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx must be False, got True."),
    ],
)
def test_settings_of_another_model_are_refused(settings: dict, words: str):
    assert_refused(re.escape(words), read, garg().state_dict(), settings=settings, n_heads=4)


def test_whether_the_query_is_a_key_must_be_true_or_false():
    settings = {"nhead": 2, "attend_to_self": "yes"}
    with pytest.raises(CheckpointError, match="attend_to_self must be true or false, got 'yes'"):
        read(encoder(4).state_dict(), settings=settings)


@pytest.mark.parametrize("value", ["four", 4.0, True, [4], 0, -2])
def test_heads_must_be_a_whole_number(value: object):
    with pytest.raises(CheckpointError, match="n_head must be an integer >= 1, got"):
        read(garg().state_dict(), settings={"n_head": value})


@pytest.mark.parametrize(
    "text",
    ["model: [", "model: &a [*a", "x: !!python/object/apply:os.system ['false']\n- 1", "a" * 2**17],
)
def test_a_broken_config_beside_the_weights_ends_in_one_line(tmp_path: Path, text: str):
    torch.save(garg().state_dict(), tmp_path / "state.pt")
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.yaml: ") as error:
        load(tmp_path / "state.pt")
    assert "\n" not in str(error.value)
