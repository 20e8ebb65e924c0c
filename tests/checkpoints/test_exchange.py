"""Weights go to HookedTransformer's names and back unchanged; what our model cannot be is refused."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mechinterp.checkpoints.checkpoint import save
from mechinterp.checkpoints.io.files import CheckpointError
from mechinterp.checkpoints.load import convert
from mechinterp.checkpoints.native.exchange import hooked_state
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, override
from mechinterp.config.model import NAMES
from mechinterp.icl.prompts import draw_prompts
from mechinterp.models.heads import predict
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.presets import preset
from mechinterp.training.one_layer.step import initial_weights
from tests.checkpoints.files import assert_refused
from tests.checkpoints.files import read as load
from tests.conftest import assert_close_to_rounding, assert_same

CONFIG = ExperimentConfig(
    task=TaskConfig(d_x=3, d_y=2, context_length=8, noise_var=0.3),
    model=ModelConfig(n_heads=2, d_head=4),
    seed=2,
)
ATTN = "blocks.0.attn."


@pytest.fixture
def native(tmp_path: Path) -> Path:
    save(tmp_path / "native", CONFIG, initial_weights(CONFIG), step=7)
    return tmp_path / "native"


@pytest.fixture
def exchange(native: Path, tmp_path: Path) -> Path:
    convert(load(native), "transformer-lens", tmp_path / "exchange")
    return tmp_path / "exchange"


def before_hashes(exchange: Path) -> None:
    """Take the hash out of the side-car file, as folders of older versions are."""
    side_car = exchange / "transformer_lens.json"
    settings = json.loads(side_car.read_text())
    del settings["files"]
    side_car.write_text(json.dumps(settings))


def write_state(file: Path, **changes: Tensor | None) -> Path:
    """The state dict of CONFIG's model in a file alone, with some tensors replaced or left out."""
    state = hooked_state(initial_weights(CONFIG), n_ctx=16)
    for key, tensor in changes.items():
        state[key] = tensor
    state = {key: tensor for key, tensor in state.items() if tensor is not None}
    if file.suffix == ".safetensors":
        save_file(state, file)
    else:
        torch.save(state, file)
    return file


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_round_trip_loses_nothing(tmp_path: Path, dtype: torch.dtype):
    native, exchange = tmp_path / "native", tmp_path / "exchange"
    save(native, CONFIG, initial_weights(CONFIG).to(dtype), step=7)
    convert(load(native), "transformer-lens", exchange)
    written = load(exchange)
    assert (written.format, written.assumed, written.step) == ("transformer-lens", {}, 7)
    assert (written.history, written.snapshots) == (None, {})
    convert(written, "native", tmp_path / "back")
    back, before = load(tmp_path / "back"), load(native)
    for checkpoint in (written, back):
        assert_same(checkpoint.weights, before.weights)
        assert checkpoint.config == CONFIG
    assert (back.format, back.step) == ("native", 7)
    file = "model.safetensors"
    assert (tmp_path / "back" / file).read_bytes() == (native / file).read_bytes()
    prompts = draw_prompts(CONFIG.task, 32, seed=0, dtype=dtype)
    expected = predict(before.weights, prompts)
    assert_close_to_rounding(written.model.predict(prompts), expected)


def test_weights_of_another_model_are_refused_and_a_folder_without_a_hash_is_read(exchange: Path):
    file = exchange / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {ATTN + "W_V": 2 * tensors[ATTN + "W_V"]}, file)
    assert_refused("model.safetensors.*SHA-256", load, exchange)
    before_hashes(exchange)
    load(exchange)


def test_files_hold_what_hooked_transformer_asks_for(exchange: Path):
    state = load_file(exchange / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        "embed.W_E": (2, 5),
        "pos_embed.W_pos": (1024, 5),
        **{ATTN + name: (2, 5, 4) for name in ("W_Q", "W_K", "W_V")},
        ATTN + "W_O": (2, 4, 5),
        **{ATTN + name: (2, 4) for name in ("b_Q", "b_K", "b_V")},
        ATTN + "b_O": (5,),
        "unembed.W_U": (5, 2),
        "unembed.b_U": (2,),
    }
    zero = {name for name, tensor in state.items() if not tensor.any()}
    assert zero == set(state) - {ATTN + name for name in NAMES} - {"unembed.W_U"}
    side_car = json.loads((exchange / "transformer_lens.json").read_text())
    expected = {"n_layers": 1, "n_heads": 2, "d_model": 5, "d_head": 4, "d_vocab": 2}
    expected |= {"n_ctx": 1024, "attn_scale": 2.0, "strict_causal": True}
    expected |= {"attention": "softmax", "readout": "y_entries", "format_version": 1, "step": 7}
    assert {name: side_car[name] for name in expected} == expected
    assert sorted(file.name for file in exchange.iterdir()) == [
        *("load.py", "model.safetensors", "transformer_lens.json")
    ]
    compile((exchange / "load.py").read_text(), "load.py", "exec")


def test_a_state_dict_alone_is_read_and_what_it_does_not_say_is_assumed(tmp_path: Path):
    checkpoint = load(
        write_state(tmp_path / "state.pt"),
        task={"noise_var": 0.3, "covariance": {"kind": "identity"}},
    )
    assert_same(checkpoint.weights, initial_weights(CONFIG))
    assert checkpoint.config.task == replace(CONFIG.task, context_length=40)
    assert checkpoint.config.model == CONFIG.model
    assumed = checkpoint.assumed
    stated = {"task.context_length": 40, "attn_scale": 2, "model.attend_to_self": False}
    assert {name: assumed[name] for name in stated} == stated
    assert assumed["task.covariance.rho"] == 0
    assert not {"task.noise_var", "task.covariance.kind"} & assumed.keys()
    assert checkpoint.history is None
    convert(checkpoint, "native", tmp_path / "native")
    assert load(tmp_path / "native").assumed == json.loads(json.dumps(checkpoint.assumed_and_doubt))
    convert(load(tmp_path / "native"), "transformer-lens", tmp_path / "exchange")
    assert load(tmp_path / "exchange").assumed == load(tmp_path / "native").assumed


def test_one_response_is_assumed_of_four_tensors_alone(tmp_path: Path):
    others = set(hooked_state(initial_weights(CONFIG), n_ctx=16)) - {ATTN + n for n in NAMES}
    one = torch.zeros(2, 4, 5)
    one[:, :, 4] = 1
    changes = dict.fromkeys(others) | {ATTN + "W_O": one}
    alone = load(write_state(tmp_path / "state.pt", **changes))
    assert (alone.config.task.d_x, alone.assumed["task.d_y"]) == (4, 1)


def test_stored_masks(tmp_path: Path):
    ones = torch.ones(16, 16, dtype=torch.bool)
    ignored = {ATTN + "IGNORE": torch.tensor(-torch.inf)}
    strict = load(write_state(tmp_path / "a.pt", **ignored, **{ATTN + "mask": ones.tril(-1)}))
    assert "model.attend_to_self" not in strict.assumed
    # From 3.5.0 on the stored mask is empty.
    empty = load(write_state(tmp_path / "b.pt", **{ATTN + "mask": ones[:0, :0]}))
    assert empty.assumed["model.attend_to_self"] is False


ONES = torch.ones(16, 16, dtype=torch.bool)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({ATTN + "W_O": torch.ones(2, 4, 5)}, "x columns of blocks.0.attn.W_O must be zero, got 1"),
        ({ATTN + "b_V": torch.ones(2, 4)}, r"b_V must be zero \(the side-car file states"),
        ({ATTN + "mask": ONES.tril()}, "mask must be strict causal, as the side-car file states"),
    ],
)
def test_weights_that_contradict_their_side_car_are_refused(
    exchange: Path, changes: dict[str, Tensor], words: str
):
    write_state(exchange / "model.safetensors", **changes)
    before_hashes(exchange)
    assert_refused(rf"exchange/model\.safetensors: .*{words}", load, exchange)


def test_some_of_the_biases_are_enough(tmp_path: Path):
    b_V = torch.randn(2, 4, generator=torch.Generator().manual_seed(4))
    left_out = dict.fromkeys(ATTN + name for name in ("b_Q", "b_K", "b_O"))
    some = load(write_state(tmp_path / "some.pt", **left_out, **{ATTN + "b_V": b_V}))
    assert not some.weights.tensors["attn.b_Q"].any()
    assert torch.equal(some.weights.tensors["attn.b_V"][0], b_V)


def test_a_model_that_attends_to_itself_has_no_place_in_the_script(tmp_path: Path):
    file = write_state(tmp_path / "state.pt", **{ATTN + "mask": ONES.tril()})
    checkpoint = load(file)
    assert checkpoint.weights.model.attend_to_self
    assert checkpoint.config.model.attend_to_self
    assert "model.attend_to_self" not in checkpoint.assumed
    lens = ("transformer-lens", tmp_path / "exchange")
    assert_refused("whose query attends to itself", convert, checkpoint, *lens)
    convert(checkpoint, "native", tmp_path / "native")
    assert load(tmp_path / "native").weights.model.attend_to_self
    assert_refused("attend_to_self must be the file's True", load, file, attend_to_self=False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("n_layers", 2), ("n_heads", 3), ("d_model", 6), ("attn_scale", math.sqrt(5))),
        *(("attn_scale", None), ("strict_causal", 1), ("attention", "linear"), ("readout", "all")),
    ],
)
def test_a_side_car_of_another_model_is_refused(exchange: Path, field: str, value: object):
    file = exchange / "transformer_lens.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(CheckpointError) as error:
        load(exchange)
    assert str(error.value).startswith(f"{file}: {field} must be ")
    assert str(error.value).endswith(f", got {value!r}.")


def test_a_merged_softmax_model_goes_to_transformer_lens_with_keys_that_are_the_tokens(
    tmp_path: Path,
):
    config = override(preset("softmax-h2"), "model.merged_qk=true")
    generator = torch.Generator().manual_seed(0)
    model = ICLTransformer(config.model, d_x=5, d_y=1, n_ctx=42)
    for name in ("W_QK", "W_V", "W_O"):
        torch.nn.init.normal_(getattr(model.blocks[0].attn, name), std=0.3, generator=generator)
    with torch.no_grad():
        model.blocks[0].attn.W_O[..., :5] = 0
    save(tmp_path / "model", config, model.weights, step=0)
    convert(load(tmp_path / "model"), "transformer-lens", tmp_path / "lens")
    there = load(tmp_path / "lens")
    assert not there.config.model.merged_qk
    assert torch.equal(there.weights.W_K[0], torch.eye(6).expand(2, 6, 6))
    assert_close_to_rounding(there.weights.QK, model.weights.QK)
