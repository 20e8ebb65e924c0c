"""Shipped models, saved under names that do not say their score: the true label, or the option that decides."""

import pickle
from dataclasses import asdict
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mechinterp.analysis.one_layer.classify import classify
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.foreign import candidates as cases
from mechinterp.checkpoints.foreign import score
from mechinterp.checkpoints.foreign.read import MOST_SHOWN
from mechinterp.checkpoints.foreign.score import ranked, tied
from mechinterp.checkpoints.io.errors import CheckpointError
from mechinterp.checkpoints.load import convert
from mechinterp.models.heads import AttentionWeights
from tests.checkpoints.files import assert_same_circuits
from tests.checkpoints.files import read as load
from tests.conftest import sampled

pytestmark = pytest.mark.usefixtures("small_null")
N_PROMPTS = 128
SHIPPED = Path(__file__).parents[2] / "checkpoints"
SOFTMAX = ("softmax-h1-s0", "softmax-h2-s0", "kms-0.3-h1-s0")
LINEAR = ("linear-h1-s0", "linear-merged-s0", "linear-separate-s2", "linear-rank1-s2")
OTHERS = ("tanh-h2-s0",)
SEVERAL = ("two-tasks-h2-s0", "two-tasks-h4-s0", "shared-tasks-h2-s0")


def shipped(name: str) -> Checkpoint:
    checkpoint = load(SHIPPED / name)
    assert isinstance(checkpoint, Checkpoint)
    return checkpoint


def as_circuits(weights: AttentionWeights, file: Path, *, y_first: bool = False) -> Path:
    turn = -weights.d_x if y_first else 0
    QK, OV = weights.QK.roll((turn, turn), (1, 2)), weights.OV.roll(turn, 1)
    np.savez(file, QK=QK.numpy(), OV=OV.numpy())
    return file


def as_layers(weights: AttentionWeights, file: Path) -> Path:
    """Layers query, key and value, with the scale of the scores that no file says in the query."""
    OV = torch.nn.functional.pad(weights.OV, (weights.d_x, 0)).mT
    queries = weights.W_Q * (1 if weights.score == "softmax" else weights.scale)
    state = {"query": queries.mT, "key": weights.W_K.mT, "value": OV}
    save_file(
        {f"{name}.weight": heads.flatten(0, 1).contiguous() for name, heads in state.items()}, file
    )
    return file


LAYOUTS = {"circuits": (as_circuits, ".npz"), "layers": (as_layers, ".safetensors")}


def stated_task(checkpoint: Checkpoint) -> dict:
    return asdict(checkpoint.task)


@cache
def label_of(name: str) -> str:
    return classify(shipped(name), n_prompts=N_PROMPTS).pattern


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "states_task"),
    sampled(
        [
            *((name, "circuits", True) for name in SOFTMAX + LINEAR + OTHERS + SEVERAL),
            *((name, "layers", True) for name in LINEAR),
            *((kind[0], "layers", False) for kind in (SOFTMAX, LINEAR, OTHERS, SEVERAL)),
        ],
        keep=lambda case: (
            case[0] in (SOFTMAX[0], LINEAR[0], SEVERAL[0]) and case[2] == (case[1] == "circuits")
        ),
    ),
)
def test_score_is_asked_for_not_guessed(tmp_path: Path, name: str, layout: str, states_task: bool):
    checkpoint, (write, suffix) = shipped(name), LAYOUTS[layout]
    file = write(checkpoint.weights.circuits, tmp_path / f"{name}{suffix}")
    task, true = stated_task(checkpoint), label_of(name)
    result = classify(load(file, task=task if states_task else None), n_prompts=N_PROMPTS)
    assert result.pattern in (true, "undetermined"), result.reason
    assert not states_task or result.pattern == true or "--score" in result.reason, result.reason
    if layout == "circuits":
        model = checkpoint.config.model
        hints = {"score": model.score, "score_slope": model.score_slope}
        told = load(file, task=task, columns="x,y", **hints)
        assert classify(told, n_prompts=N_PROMPTS).pattern == true


@pytest.mark.slow
def test_readings_are_told_with_their_loss(tmp_path: Path):
    file = as_circuits(shipped("softmax-h1-s0").weights.circuits, tmp_path / "h1.npz")
    checkpoint = load(file)
    told = {reading.said["score"]: reading for reading in checkpoint.readings if reading.stands}
    # A lower loss is not the model's own score: this one was trained with softmax.
    assert told["linear/L"].loss < told["softmax"].loss < 1
    assert torch.equal(checkpoint.weights.circuits.W_Q, checkpoint.readings[0].weights.circuits.W_Q)
    assert checkpoint.assumed["model.score"] == checkpoint.config.model.score == "linear/L"
    assert [each["loss"] for each in checkpoint.assumed["readings"]] == [
        r.loss for r in checkpoint.readings[:MOST_SHOWN]
    ]
    result = classify(checkpoint)
    assert result.pattern == "undetermined"
    for part in ("--score", "linear_gd for score linear/L", "kernel_regression for score softmax"):
        assert part in result.reason


@pytest.mark.slow
def test_y_as_the_first_column(tmp_path: Path):
    shipped_pair = shipped("softmax-h2-s0")
    file = as_circuits(shipped_pair.weights.circuits, tmp_path / "y.npz", y_first=True)
    checkpoint = load(file, score="softmax")
    assert checkpoint.assumed["model.columns"] == "y,x"
    assert_same_circuits(checkpoint.weights.circuits, shipped_pair.weights.circuits)
    assert classify(checkpoint).pattern == "debiased_gd"
    told = load(file, score="softmax", columns="y,x")
    assert not any("columns" in reading.said for reading in told.readings)
    assert classify(told).pattern == "debiased_gd"
    with_score_open = classify(load(file))
    assert (with_score_open.pattern, "--score" in with_score_open.reason) == ("undetermined", True)


@pytest.mark.slow
def test_wide_weights_with_y_first(tmp_path: Path):
    weights = shipped("softmax-h2-s0").weights.circuits
    wide = torch.nn.functional.pad(weights.W_O, (weights.d_x, 0))
    state = weights.tensors | {"W_O": wide}
    axes = {"W_Q": 1, "W_K": 1, "W_V": 1, "W_O": 2}
    turned = {n: t.roll(-weights.d_x, axes[n]).contiguous() for n, t in state.items()}
    save_file(turned, tmp_path / "wide.safetensors")
    checkpoint = load(tmp_path / "wide.safetensors", score="softmax", columns="y,x")
    assert_same_circuits(checkpoint.weights.circuits, weights)


def test_scale_is_told_by_the_loss(tmp_path: Path):
    """Of one score the scale that training has settled predicts best."""
    checkpoint = shipped("linear-separate-s2")
    file = as_layers(checkpoint.weights.circuits, tmp_path / "s.safetensors")
    read_back = load(file, task=stated_task(checkpoint), score="linear/L")
    torch.testing.assert_close(read_back.weights.circuits.QK, checkpoint.weights.circuits.QK)
    assert read_back.assumed["attn_scale"] == 1


@pytest.mark.slow
def test_a_loss_that_is_not_clear_is_looked_at_on_more_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Four prompts leave open what 256 tell."""
    file = as_circuits(shipped("softmax-h1-s0").weights.circuits, tmp_path / "x.npz")
    monkeypatch.setattr(cases, "N_PROMPTS", 4)
    monkeypatch.setattr(cases, "LEAST_PROMPTS", 4)
    for again, clear in ((1, False), (64, True)):
        monkeypatch.setattr(score, "AGAIN", again)
        readings = load(file, score="softmax").readings
        assert min(each.loss for each in readings) < 0.95
        assert any(each.predicts for each in readings) is clear


def test_readings_that_tie_are_named_with_the_option_that_decides():
    zero = 1 + 0.1 * torch.rand(64, generator=torch.Generator().manual_seed(0))
    candidates = [({"norm": norm, "context_only": each}, object) for norm, each in CANDIDATES]
    errors = [(zero * share, zero) for share in (0.2, 0.2, 0.9)]
    words = tied(ranked(candidates, errors))
    assert ("2 readings" in words, "--model context_only=" in words, "norm" in words) == (True, True, False)  # fmt: skip
    assert tied(ranked(candidates[:1], errors[:1])) == ""


CANDIDATES = (("before", False), ("before", True), ("after", False))


@pytest.mark.slow
def test_no_reading_predicts(tmp_path: Path):
    generator = torch.Generator().manual_seed(0)
    QK = torch.diag(torch.tensor([1.0, 1, 1, 1, 1, 0]))[None] * 50
    OV = torch.randn(1, 6, 1, generator=generator) * 50
    np.savez(tmp_path / "x.npz", QK=QK.numpy(), OV=OV.numpy())
    result = classify(load(tmp_path / "x.npz"))
    assert result.pattern == "undetermined"
    assert "no reading predicts better than 0" in result.reason
    for option in ("--score", "--columns", "--task"):
        assert option in result.reason


@pytest.mark.slow
def test_linear_step_that_learned_no_component_is_no_gradient_descent(tmp_path: Path):
    weights = shipped("linear-h1-s0").weights.circuits
    QK = weights.QK * 0.4
    np.savez(tmp_path / "x.npz", QK=QK.numpy(), OV=weights.OV.numpy())
    result = classify(load(tmp_path / "x.npz", score="linear/L", columns="x,y"))
    assert result.components is not None
    assert result.components.n_components == 0
    assert (result.pattern, "has learned" in result.reason) == ("undetermined", True)


@pytest.mark.slow
def test_a_file_of_open_score_is_not_written_as_if_it_were_said(tmp_path: Path):
    file = as_circuits(shipped("softmax-h1-s0").weights.circuits, tmp_path / "h1.npz")
    with pytest.raises(CheckpointError, match=r"state the score .* linear/L or softmax"):
        convert(load(file), "native", tmp_path / "out")
    convert(load(file, score="softmax"), "native", tmp_path / "out")
    assert classify(load(tmp_path / "out")).pattern == "kernel_regression"


@pytest.mark.slow
def test_a_file_with_several_readings_is_pickled_with_them(tmp_path: Path):
    file = as_circuits(shipped("softmax-h2-s0").weights.circuits, tmp_path / "x.npz")
    checkpoint = load(file)
    again = pickle.loads(pickle.dumps(checkpoint))
    assert len(again.readings) > 1
    assert [each.loss for each in again.readings] == [each.loss for each in checkpoint.readings]
    OV, expected = (each.readings[1].weights.circuits.OV for each in (again, checkpoint))
    assert torch.equal(OV, expected)
