"""Files with recurrent layers of transformers and flash-linear-attention become modules that predict as the layers do."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mechinterp import ablate, hook_module, load, recurrent_module, response
from tests.conftest import Run, refused
from tests.models.test_delta_layers import HEADS, LAYERS, TASK, FlashLinear, Model, prompts

KEY_HEADS = {"Qwen3-Next": 2, "Qwen3.5": 2, "OLMo Hybrid": 4}
"""Number of heads of keys of the layers of transformers."""
FLASH = {
    "DeltaNet": FlashLinear("delta", conv="qkv"),
    "MesaNet": FlashLinear("mesa", conv="qk"),
    "SimpleGatedLinearAttention": FlashLinear("gated"),
    "SimpleGatedLinearAttention, convolution": FlashLinear("gated", conv="qkv"),
    "GatedLinearAttention": FlashLinear("gated by channel"),
    "GatedLinearAttention, convolution": FlashLinear("gated by channel", conv="qkv"),
}


def model_of(name: str, n_layers: int = 1) -> Model:
    """Read-in, layers and read-out; weights of gates and norms are random, so that every tensor counts."""
    model = Model(name if name in KEY_HEADS else "DeltaNet", n_layers)
    if name in FLASH:
        model.layers[0] = FLASH[name]
    if name == "OLMo Hybrid" and not hasattr(model.layers[0], "conv1d"):
        pytest.skip("this transformers gives OLMo Hybrid the names of flash-linear-attention")
    with torch.no_grad():
        for own, tensor in model.named_parameters():
            if own.rpartition(".")[2] in ("weight", "dt_bias") and tensor.ndim == 1:
                tensor.copy_(0.5 + torch.rand(len(tensor)))
    return model.eval()


def config_of(name: str) -> dict[str, object]:
    """Settings that differ from the defaults; norms of the stand-ins for flash-linear-attention add the smallest number."""
    if name in KEY_HEADS:
        return {"linear_num_key_heads": KEY_HEADS[name]}
    eps = {"norm_eps": torch.finfo(torch.float32).eps}
    by_channel = {"num_heads": HEADS, "gate_logit_normalizer": 2}
    return eps | by_channel if name.startswith("GatedLinear") else eps


@pytest.mark.parametrize("name", [*KEY_HEADS, *FLASH])
def test_file_predicts_as_the_layers_of_the_library(name: str, tmp_path: Path):
    model, file = model_of(name), tmp_path / "model.safetensors"
    save_file(model.state_dict(), file)
    (tmp_path / "config.json").write_text(json.dumps(config_of(name)))
    tokens = hook_module(model, task=TASK).hooked.inputs(prompts())
    for weights in (file, tmp_path):
        read = recurrent_module(weights)
        assert read.state_dict().keys() == model.state_dict().keys()
        torch.testing.assert_close(read(tokens)[:, -1], model(tokens), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["Qwen3-Next", "OLMo Hybrid"])
def test_every_tensor_of_the_file_counts(name: str):
    model = model_of(name)
    tokens = torch.randn(3, 8, 4)
    for own, tensor in model.state_dict().items():
        changed = {**model.state_dict(), own: tensor + 0.5}
        read = recurrent_module(changed, config=config_of(name))
        own_model = model_of(name)
        own_model.load_state_dict(changed)
        assert (read(tokens)[:, -1] - model(tokens)).abs().max() > 1e-4, own
        torch.testing.assert_close(read(tokens)[:, -1], own_model(tokens), rtol=1e-5, atol=1e-5)


def test_names_of_flash_linear_attention_are_read_with_its_defaults():
    """GatedDeltaNet of flash-linear-attention is the layer of OLMo Hybrid with three convolutions; strengths are doubled
    only if its config says so."""
    model, tokens = model_of("OLMo Hybrid"), torch.randn(3, 8, 4)
    flash = dict(model.state_dict())
    conv = flash.pop("layers.0.conv1d.weight")
    widths = [len(flash[f"layers.0.{x}_proj.weight"]) for x in "qkv"]
    for x, part in zip("qkv", conv.split(widths), strict=True):
        flash[f"layers.0.{x}_conv1d.weight"] = part.contiguous()
    single, double = (
        recurrent_module(flash, config={"num_heads": HEADS, "allow_neg_eigval": doubled})
        for doubled in (False, True)
    )
    torch.testing.assert_close(double(tokens)[:, -1], model(tokens), rtol=1e-6, atol=1e-6)
    theirs = {"linear_num_key_heads": 4, "linear_allow_neg_eigval": False}
    other = recurrent_module(model.state_dict(), config=theirs)
    torch.testing.assert_close(single(tokens), other(tokens))
    assert (single(tokens) - double(tokens)).abs().max() > 1e-3


def test_analyses_run_on_a_file():
    model = model_of("Qwen3-Next", n_layers=2)
    read = recurrent_module(model.state_dict(), config=config_of("Qwen3-Next"))
    hooked, own, drawn = hook_module(read, task=TASK), hook_module(model, task=TASK), prompts()
    assert (hooked.hooked.n_layers, hooked.hooked.n_heads) == (2, HEADS)
    assert hooked.model.unfollowed == {}
    torch.testing.assert_close(hooked.predict(drawn), own.predict(drawn), rtol=1e-5, atol=1e-6)
    names = [name for name in own.model.hook_dict if ".attn." in name]
    assert names == [name for name in hooked.model.hook_dict if ".attn." in name]
    for each, other in zip(*(noted(m, names) for m in (hooked, own)), strict=True):
        torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-5)
    assert response(hooked, n_prompts=256).reading == response(own, n_prompts=256).reading


def noted(hooked, names: list[str]) -> list[Tensor]:
    """Tensors at the hook points for the same prompts."""
    _, cache = hooked.hooked.run_noting(hooked.hooked.inputs(prompts()), names)
    return [cache[name] for name in names]


def test_a_layer_alone_acts_on_the_tokens():
    layer = LAYERS["Qwen3-Next"]()
    read = recurrent_module(layer.state_dict(), config=config_of("Qwen3-Next"))
    tokens = torch.randn(3, 8, 12)
    torch.testing.assert_close(read(tokens), layer(tokens), rtol=1e-6, atol=1e-6)


def test_a_layer_may_replace_the_stream():
    model = model_of("Qwen3-Next")
    read = recurrent_module(model.state_dict(), config=config_of("Qwen3-Next"), residual=False)
    tokens = torch.randn(3, 8, 4)
    expected = model.read_out(model.layers[0](model.read_in(tokens)))
    torch.testing.assert_close(read(tokens), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("Qwen3-Next", {}, ("linear_num_key_heads", "4 heads", "None")),
        ("Qwen3.5", {"linear_num_key_heads": 3}, ("linear_num_key_heads", "3")),
        ("OLMo Hybrid", {"linear_num_key_heads": 4, "hidden_act": "gelu"}, ("hidden_act", "gelu")),
        ("DeltaNet", {"qk_norm": "sum"}, ("qk_norm", "l2", "sum")),
        ("DeltaNet", {"qk_activation": "identity"}, ("qk_activation", "silu", "identity")),
        ("SimpleGatedLinearAttention", {"gate_fn": "relu"}, ("gate_fn", "swish", "relu")),
        ("GatedLinearAttention", {}, ("num_heads", "None")),
        ("GatedLinearAttention", {"num_heads": 4, "clamp_min": -1.0}, ("clamp_min", "None", "-1")),
        ("DeltaNet", {"norm_eps": "small"}, ("norm_eps", "> 0", "small")),
    ],
)
def test_settings_of_other_layers_are_refused(name: str, config: dict, words: tuple[str, ...]):
    with refused(*words):
        recurrent_module(model_of(name).state_dict(), config=config)


def test_other_tensors_are_refused():
    state = model_of("DeltaNet").state_dict()
    with refused("mlp", "DeltaNet", "hook_module"):
        recurrent_module({**state, "layers.0.mlp.0.weight": torch.ones(3, 12)})
    with refused("mlp.0.weight", "hook_module"):
        recurrent_module({**state, "mlp.0.weight": torch.ones(3, 12)})
    name = "layers.0.q_proj.weight"
    low_rank = {n: t for n, t in state.items() if n != name}
    low_rank |= {
        "layers.0.q_proj.0.weight": torch.ones(2, 12),
        "layers.0.q_proj.1.weight": torch.ones(20, 2),
    }
    with refused("one weight", "0.weight, 1.weight", "hook_module"):
        recurrent_module(low_rank)
    with refused("must be of", "in_proj_qkvz"):
        recurrent_module(
            {
                f"layer.{each}.weight": torch.ones(4, 4)
                for each in ("in_proj_qkvz", "in_proj_ba", "out_proj")
            }
        )
    with refused("weights must hold a layer", "head.weight"):
        recurrent_module({"head.weight": torch.ones(3, 12)})
    for own, words in {
        "layers.0.b_proj.weight": ("multiple of the 5 heads", "24"),
        "layers.0.o_norm.weight": ("one weight", "weight"),
    }.items():
        with refused(*words):
            changed = torch.ones(5, 12) if "b_proj" in own else torch.tensor(1.0)
            recurrent_module({**state, own: changed})
    for odd in ("layers..weight", "layers.0", ".".join("a" * 99)):
        with refused("name" if len(odd) < 99 else "64 modules"):
            recurrent_module({**state, odd: torch.ones(3, 12)})
    with refused("floating-point", "read_in.weight"):
        recurrent_module({**state, "read_in.weight": torch.ones(3, 12, dtype=torch.int64)})


def test_settings_beside_a_file_must_be_a_mapping(tmp_path: Path):
    save_file(model_of("DeltaNet").state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("[1]")
    with refused("config.json", "mapping"):
        recurrent_module(tmp_path)


@pytest.mark.parametrize("name", [*KEY_HEADS, "DeltaNet"])
def test_load_names_the_door_for_these_files(name: str, tmp_path: Path):
    file = tmp_path / "model.safetensors"
    save_file(model_of(name).state_dict(), file)
    with refused("recurrent layers", "recurrent_module"):
        load(file)


def test_commands_take_these_files_as_modules(run: Run, tmp_path: Path):
    model, file = model_of("Qwen3-Next"), tmp_path / "model.safetensors"
    save_file(model.state_dict(), file)
    (tmp_path / "config.json").write_text(json.dumps(config_of("Qwen3-Next")))
    (tmp_path / "task.json").write_text(
        json.dumps({"d_x": TASK.d_x, "context_length": TASK.context_length})
    )
    stated = ("--task", tmp_path / "task.json", "--n-prompts", 32, "--json", "--quiet")
    hooked = hook_module(model, task={"d_x": TASK.d_x, "context_length": TASK.context_length})
    shown = run("ablate", file, *stated).done().document
    assert (shown["path"], shown["format"]) == (str(file), "module")
    rises = ablate(hooked, n_prompts=32).to_frame()["rise"]
    found = [row["rise"] for row in shown["heads"]]
    assert found == pytest.approx(rises.tolist(), rel=1e-4, abs=1e-7)
    assert "module" in run("check", file, *stated).done().document["model"]
    run("ablate", file, "--score", "linear").assert_refused(str(file), "score", "hook_module")
    run("convert", file, "--to", "npz", "--out", tmp_path / "x.npz").assert_refused(
        "recurrent layers"
    )
