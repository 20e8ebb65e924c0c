"""What files leave open or state beside their weights is read so, or tried: all through `load` and `classify`."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from mechinterp.analysis.one_layer.classify import agreed_label, classify
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.foreign import candidates
from mechinterp.checkpoints.foreign.score import Reading, advice, ranked
from mechinterp.checkpoints.io.errors import CheckpointError
from mechinterp.checkpoints.load import convert
from mechinterp.cli.commands import app
from mechinterp.cli.options import hints_of
from mechinterp.icl.prompts import sample_prompts
from mechinterp.models.constructions.one_layer import debiased_gradient_step
from tests.checkpoints.files import assert_refused, assert_same_circuits, loaded
from tests.checkpoints.files import read as load
from tests.checkpoints.wild_files import State
from tests.models.test_layered_models import garg

pytestmark = pytest.mark.usefixtures("small_null")
SHIPPED = Path(__file__).parents[2] / "checkpoints"


def require_same(checkpoint: Checkpoint, expected: Checkpoint) -> None:
    assert (checkpoint.config, checkpoint.step, checkpoint.path) == (
        expected.config,
        expected.step,
        expected.path,
    )
    assert (checkpoint.format, checkpoint.assumed) == (expected.format, expected.assumed)
    assert checkpoint.weights.tensors.keys() == expected.weights.tensors.keys()
    for name, tensor in expected.weights.tensors.items():
        assert torch.equal(checkpoint.weights.tensors[name], tensor), name


@pytest.mark.parametrize("name", ["kms-0.5-h2-s0", "d4s1-linear-h1x5-l4-noise0.1-s0"])
def test_a_weights_file_of_this_package_is_its_folder(name: str):
    folder = load(SHIPPED / name)
    file = load(SHIPPED / name / "model.safetensors")
    require_same(file, folder)
    assert list(file.snapshots) == list(folder.snapshots)
    assert (file.history is None) == (folder.history is None)
    with pytest.raises(CheckpointError, match="n_heads is only for files that do not state it"):
        load(SHIPPED / name / "model.safetensors", n_heads=2)


def test_a_weights_file_of_an_exchange_folder_is_its_folder(tmp_path: Path):
    convert(load(SHIPPED / "softmax-h2-s0"), "transformer-lens", tmp_path / "lens")
    require_same(load(tmp_path / "lens" / "model.safetensors"), load(tmp_path / "lens"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["config.json", "config.yaml", "folder"])
@pytest.mark.parametrize(("noise", "points"), [(1, "9"), ("1", 9), (1.0, "9")])
def test_noise_and_points_in_any_spelling(
    tmp_path: Path, layout: str, noise: object, points: object
):
    state = garg().state_dict()
    document: dict[str, object] = {"n_head": 4, "noise_std": noise, "n_points": points}
    if layout == "config.yaml":
        training = {"curriculum": {"points": {"end": points}}, "task_kwargs": {"noise_std": noise}}
        document = {"model": {"n_head": "4"}, "training": training}
    (tmp_path / (layout if layout != "folder" else "config.json")).write_text(json.dumps(document))
    file = tmp_path / "model.safetensors"
    save_file(state, file)
    checkpoint = load(tmp_path if layout == "folder" else file)
    assert (checkpoint.task.noise_var, checkpoint.task.context_length) == (1.0, 8)
    assert checkpoint.assumed["task.beta_var"] == checkpoint.task.beta_var == 1.0
    assert not {"task.noise_var", "task.context_length"} & checkpoint.assumed.keys()
    assert load(file, task={"noise_var": 2.0}).task.noise_var == 2


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        *(
            ({"noise_std": text}, f"noise_std must be a number >= 0, got '{text}'")
            for text in ("-1", "much", "inf", "nan")
        ),
        ({"noise_std": True}, "noise_std must be a number >= 0, got True"),
        ({"noise_std": [1]}, "noise_std must be a number >= 0, got "),
        ({"n_points": 1}, "n_points must be an integer >= 2, got 1"),
        ({"n_points": "many"}, "n_points must be an integer >= 2, got 'many'"),
    ],
)
def test_noise_and_points_that_are_none(tmp_path: Path, stated: dict, words: str):
    save_file(garg().state_dict(), tmp_path / "x.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"n_head": 4} | stated))
    assert_refused(words, load, tmp_path / "x.safetensors")


def test_a_context_longer_than_the_positions_is_assumed(tmp_path: Path):
    save_file(garg().state_dict(), tmp_path / "x.safetensors")
    (tmp_path / "config.json").write_text('{"n_head": 4, "n_points": 5000}')
    checkpoint = load(tmp_path / "x.safetensors")
    assert checkpoint.assumed["task.context_length"] == checkpoint.task.context_length == 6


def test_noise_stated_beside_one_layer_of_attention(tmp_path: Path):
    state = {"self_attn." + n: t for n, t in nn.MultiheadAttention(6, 2).state_dict().items()}
    save_file(state, tmp_path / "x.safetensors")
    (tmp_path / "config.json").write_text('{"n_heads": 2, "noise_std": 0.5, "n_points": 21}')
    checkpoint = load(tmp_path / "x.safetensors")
    assert (checkpoint.task.noise_var, checkpoint.task.context_length) == (0.25, 20)
    assert not {"task.noise_var", "task.context_length"} & checkpoint.assumed.keys()


@pytest.mark.slow
def test_readings_are_compared_on_as_many_prompts_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Without a residual the stream is three times as wide, and a prompt takes more of the budget.
    monkeypatch.setattr(candidates, "N_PRODUCTS", 2**24)
    generator = torch.Generator().manual_seed(0)
    shapes = {
        f"attn.heads.{h}.{x}.weight": (8, 3) for h in range(2) for x in ("key", "query", "value")
    }
    shapes |= {"attn.proj.weight": (3, 16), "attn.proj.bias": (3,), "fc1.weight": (16, 3)}
    shapes |= {"fc1.bias": (16,), "fc2.weight": (3, 16), "fc2.bias": (3,)}
    state = {n: torch.randn(s, generator=generator) / s[-1] ** 0.5 for n, s in shapes.items()}
    checkpoint = loaded(
        tmp_path, state, score="softmax", task={"context_length": 10, "noise_var": 0}
    )
    assert {each.said["residual"] for each in checkpoint.readings} == {True, False}


D_X, WIDTH = 10, 17
UNIFORM = {
    **{"context_length": 10, "noise_var": 0.0, "query_noise": False},
    **{"covariance": {"kind": "eigenvalues", "eigenvalues": [1 / 12] * D_X}},
}
"""Covariates uniform on (-.5, .5), by their covariance."""


def with_positions(
    folder: Path, *, omega: float, mu: float, layers: int = 1, y_first: bool = False
) -> Path:
    """A file of dm-haiku as the code of von Oswald et al. writes it, x W with tokens of x, y and six entries of a position.

    Its prediction is minus the last entry. In the entry of y it writes something else.
    """
    generator = torch.Generator().manual_seed(0)
    x = slice(1, D_X + 1) if y_first else slice(0, D_X)
    y, last = 0 if y_first else D_X, WIDTH - 1
    state = {}
    for layer in range(layers):
        key, value = torch.zeros(WIDTH, D_X + 1), torch.zeros(WIDTH, D_X + 1)
        query, linear = torch.zeros(WIDTH, D_X + 1), torch.zeros(D_X + 1, WIDTH)
        key[x, :D_X], query[x, :D_X] = torch.eye(D_X), omega * torch.eye(D_X)
        value[y, D_X] = linear[D_X, last] = 1
        linear[D_X, last] = -mu
        for read in (key, query, value):
            read[D_X + 1 :] = (1e-3 if layers == 1 else 0) * torch.randn(
                6, D_X + 1, generator=generator
            )
        linear[:, y] = 0.02 * torch.randn(D_X + 1, generator=generator) if layers == 1 else 0
        path = (
            "transformer/multi_head_attention"
            if layers == 1
            else f"transformer/~trans_block/layer_{layer}"
        )
        named = {"key": key, "query": query, "value": value, "linear": linear}
        state |= {f"{path}/{name}": {"w": tensor.numpy()} for name, tensor in named.items()}
    file = folder / "params.pkl"
    file.write_bytes(pickle.dumps(state))
    return file


HAIKU = {"d_x": D_X, "d_y": 1, "n_heads": 1, "score": "linear", "scale": 1.0, "task": UNIFORM}


@pytest.mark.slow
@pytest.mark.parametrize("y_first", [False, True])
def test_the_loss_says_which_entry_is_the_prediction(tmp_path: Path, y_first: bool):
    omega, mu = 0.614, 0.698
    file = with_positions(tmp_path, omega=omega, mu=mu, y_first=y_first)
    checkpoint = load(file, **HAIKU)
    assert checkpoint.assumed["model.output_column"] == WIDTH - 1
    assert checkpoint.assumed["model.sign"] == "minus"
    assert checkpoint.assumed["model.columns"] == ("y,x" if y_first else "x,y")
    # Every reading names its entry, that of y among them.
    assert {each.said["output_column"] for each in checkpoint.readings} == {0, D_X, WIDTH - 1}
    label = classify(checkpoint)
    assert label.pattern == "linear_gd"
    assert label.circuits.omega == pytest.approx(np.full((1, D_X), omega), rel=1e-6)
    assert label.circuits.mu == pytest.approx(np.array([[mu]]), rel=1e-6)
    told = load(file, **HAIKU, output_column=WIDTH - 1, sign="minus")
    assert "model.output_column" not in told.assumed
    torch.testing.assert_close(told.weights.circuits.OV, checkpoint.weights.circuits.OV)
    behind_x = load(file, **HAIKU, output_column=0 if y_first else D_X)
    assert not behind_x.readings[0].predicts


@pytest.mark.slow
def test_the_entry_of_the_prediction_of_several_layers(tmp_path: Path):
    omega, mu = 0.614, 0.35
    checkpoint = load(with_positions(tmp_path, omega=omega, mu=mu, layers=2), **HAIKU)
    assert checkpoint.assumed["model.output_column"] == WIDTH - 1
    assert checkpoint.assumed["model.sign"] == "minus"
    prompts = sample_prompts(checkpoint.task, 64, seed=3, dtype=torch.float32)
    moment = torch.einsum("blx,bln->bxn", prompts.x, prompts.y)
    step = torch.einsum("bx,bxn->bn", prompts.x_query, moment)
    checkpoint = load(
        checkpoint.path, **HAIKU, sign="minus", output_column=WIDTH - 1, attend_to_self=False
    )
    # Both layers add the same step, as neither changes y.
    torch.testing.assert_close(
        checkpoint.model.predict(prompts), 2 * mu * omega * step, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("hints", "words"),
    [
        ({"output_column": 17}, "output_column must lie in 0 to 16, got 17"),
        ({"output_column": 3, "format": "linear-paper"}, "must hold kq.weight"),
    ],
)
def test_an_entry_that_is_none(tmp_path: Path, hints: dict, words: str):
    file = with_positions(tmp_path, omega=0.6, mu=0.7)
    assert_refused(words, load, file, **HAIKU | hints)


def test_a_layer_that_writes_y_alone_has_no_other_entry(tmp_path: Path):
    state = {f"{x}_proj.weight": torch.eye(6) for x in "qkv"} | {
        "out_proj.weight": torch.ones(1, 6)
    }
    torch.save(state, tmp_path / "x.pt")
    words = (
        "output_column needs a layer that writes whole tokens, got one that writes 1 of 6 entries"
    )
    assert_refused(words, load, tmp_path / "x.pt", n_heads=2, output_column=0)


def test_the_options_that_decide_are_named_where_too_many_are_open(tmp_path: Path):
    generator = torch.Generator().manual_seed(0)
    state = {f"W{x}": torch.randn(17, 17, generator=generator) for x in "qkvo"}
    torch.save(state, tmp_path / "x.pt")
    words = (
        r"at most 64 readings are tried, got \d+; state some of .*--orientation.*--output-column"
    )
    assert_refused(words, load, tmp_path / "x.pt", n_heads=1, d_x=10, d_y=1)


def test_weights_of_positions_that_are_no_numbers(tmp_path: Path):
    state = {f"{x}_proj.weight": torch.ones(8, 8, dtype=torch.int64) for x in "qkv"}
    with pytest.raises(CheckpointError, match=r"q_proj.weight must hold floating-point numbers"):
        loaded(tmp_path, state | {"out_proj.weight": torch.ones(8, 8)}, n_heads=2, d_x=5, d_y=1)


def random_layer() -> State:
    generator = torch.Generator().manual_seed(0)
    return {
        f"{x}_proj.weight": torch.randn(6, 6, generator=generator) / 4
        for x in ("q", "k", "v", "out")
    }


@pytest.mark.slow
def test_nothing_is_understood_of_a_guessed_reading_that_predicts_nothing(tmp_path: Path):
    guessed = loaded(tmp_path, random_layer(), n_heads=2)
    assert not any(each.predicts for each in guessed.readings)
    result = classify(guessed)
    assert result.pattern == "undetermined"
    assert result.reason.startswith("this file was not understood: ")
    # Said in full, the same file is not understood either, as its only reading predicts nothing.
    hints = {"score": "softmax", "columns": "x,y", "sign": "plus", "attend_to_self": False}
    stated = load(tmp_path / "x.pt", n_heads=2, scale=1.0, **hints)
    assert [each.said for each in stated.readings] == [{}]
    assert classify(stated).pattern == "undetermined"
    # As a checkpoint of this package, or a hooked model, it is as random weights are.
    convert(stated, "native", tmp_path / "native")
    assert classify(load(tmp_path / "native")).pattern == "unstructured"
    assert classify(stated.model, stated.task).pattern == "unstructured"


def test_nothing_is_understood_of_an_encoder_that_predicts_nothing(tmp_path: Path):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(6, 2, 8)
    result = classify(loaded(tmp_path, layer.state_dict(), n_heads=2, task={"context_length": 10}))
    assert result.pattern == "undetermined"
    assert result.reason.startswith("this file was not understood: ")
    assert "--model norm=" in result.reason


def test_columns_of_positions_under_torchs_names(tmp_path: Path):
    with (with_positions(tmp_path, omega=0.614, mu=0.698)).open("rb") as file:
        state = {name.rpartition("/")[2]: inner["w"] for name, inner in pickle.load(file).items()}
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "linear": "out_proj"}
    torch.save(
        {f"{new}.weight": torch.from_numpy(state[old].T.copy()) for old, new in names.items()},
        tmp_path / "x.pt",
    )
    checkpoint, haiku = load(tmp_path / "x.pt", **HAIKU), load(tmp_path / "params.pkl", **HAIKU)
    assert checkpoint.assumed["model.output_column"] == WIDTH - 1
    assert_same_circuits(checkpoint.weights.circuits, haiku.weights.circuits)


def test_the_command_line_takes_the_entry_of_the_prediction(tmp_path: Path):
    file = with_positions(tmp_path, omega=0.614, mu=0.698)
    (tmp_path / "task.json").write_text(json.dumps(UNIFORM))
    sizes = ["--d-x", "10", "--d-y", "1", "--n-heads", "1", "--task", str(tmp_path / "task.json")]
    options = ["--score", "linear", "--scale", "1", "--output-column", "16", "--json"]
    result = CliRunner().invoke(app, ["classify", str(file), *sizes, *options])
    assert result.exit_code == 0, result.output
    (document,) = json.loads(result.stdout)
    assert document["pattern"] == "linear_gd"
    assert document["heads"][0]["mu"] == pytest.approx([0.698], rel=1e-5)
    assert document["heads"][0]["omega_mean"] == pytest.approx(0.614, rel=1e-5)
    assert "model.output_column" not in document["assumed"]


def test_a_reading_that_explodes_now_and_then_does_not_stand_beside_one_that_predicts():
    weights = debiased_gradient_step(0.88, 0.1, d_x=5)
    zero, good, tail = torch.ones(200), torch.full((200,), 0.5), torch.full((200,), 0.4)
    tail[0] = 2000.0
    # The mean of its errors is 10.4, and 10 the standard error of that: no difference is clear.
    choices = [{"sign": "plus"}, {"sign": "minus"}]
    errors = [(good, zero), (tail, zero)]
    first, second = ranked([(each, lambda: weights) for each in choices], errors)
    assert (first.predicts, first.stands) == (True, True)
    assert (second.predicts, second.ties, second.stands) == (False, False, False)


def test_a_reading_that_may_be_no_better_than_0_does_not_come_before_one_that_predicts():
    weights = debiased_gradient_step(0.88, 0.1, d_x=5)
    zero, good, tail = torch.ones(200), torch.full((200,), 0.2), torch.full((200,), 0.1)
    tail[:2] = 40.0
    # The mean of its errors is .5, the standard error of that .28.
    choices = [{"norm": "before"}, {"norm": "after"}]
    readings = ranked([(each, lambda: weights) for each in choices], [(tail, zero), (good, zero)])
    assert [each.said["norm"] for each in readings] == ["after", "before"]
    assert [each.predicts for each in readings] == [True, False]


def test_of_many_readings_that_predict_the_best_is_advised():
    weights = debiased_gradient_step(0.88, 0.1, d_x=5)
    losses = {("plus", True): 1.0, ("plus", False): 0.4, ("minus", False): 0.3}
    readings = [
        Reading({"sign": s, "residual": r}, lambda: weights, loss, 0.01, loss < 1, True, True)
        for (s, r), loss in losses.items()
    ]
    assert advice(readings) == (
        "sign minus, residual False predicts (0.3): --sign minus --model residual=false; so does another reading"
    )


def test_flags_of_the_command_line_are_read_in_any_case():
    for written in ("context_only=True", "context_only=true"):
        assert hints_of(model=[written]).model == {"context_only": True}


def test_a_reason_without_a_label_says_which_scores_the_file_leaves_open():
    weights = debiased_gradient_step(0.88, 0.1, d_x=5)
    readings = [
        Reading({"score": s}, lambda: weights, 0.5, 0.01, True, True, True)
        for s in ("linear/L", "softmax")
    ]
    label, reason = agreed_label(["undetermined"] * 2, "why", readings)
    assert (label, reason) == (
        "undetermined",
        "why with score linear/L; undetermined with softmax too; state --score",
    )
    assert agreed_label(["undetermined"], "why", readings[:1])[1] == "why"
