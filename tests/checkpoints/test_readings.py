"""What files leave open is tried: the loss decides, or the label waits for the option that decides."""

import pickle
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from mechinterp.analysis.multi_layer.naming import name_algorithm
from mechinterp.analysis.one_layer.classification import Classification
from mechinterp.analysis.one_layer.classify import classify
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.foreign.described import MOST_READINGS_SHOWN
from mechinterp.checkpoints.foreign.readings import losses, search
from mechinterp.checkpoints.foreign.readings.agreed import agreed_label, readings_note
from mechinterp.checkpoints.foreign.readings.doubts import advice, tied
from mechinterp.checkpoints.foreign.readings.losses import Reading, ranked
from mechinterp.checkpoints.load import convert
from mechinterp.checkpoints.modules.weights import ProvenPredictor
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import draw_prompts
from mechinterp.models.constructions.descent import gradient_descent_model
from mechinterp.models.constructions.one_layer import debiased_gradient_step
from mechinterp.models.weights import Weights
from tests.checkpoints.files import assert_refused, assert_same_circuits, loaded, saved
from tests.checkpoints.files import read as load
from tests.checkpoints.foreign_files import (
    LAYOUTS,
    State,
    matrices,
    random_heads,
    softmax_paper_state,
)
from tests.conftest import CHECKPOINTS, Run

pytestmark = pytest.mark.usefixtures("small_null")
FEW = {"n_prompts": 64}


def shipped(name: str) -> Checkpoint:
    return load(CHECKPOINTS / name)


def heads_of(name: str) -> Weights:
    return shipped(name).weights


@cache
def label_of(name: str) -> str:
    return classify(shipped(name), **FEW).label


def as_circuits(weights: Weights, file: Path) -> Path:
    np.savez(file, QK=weights.QK.numpy(), OV=weights.OV.numpy())
    return file


def as_layers(weights: Weights) -> State:
    """Layers query, key and value, with the scale of the scores that no file says in the query."""
    OV = pad(weights.OV, (weights.d_x, 0)).mT
    queries = weights.W_Q[0] * (1 if weights.model.score == "softmax" else weights.scale)
    state = {"query": queries.mT, "key": weights.W_K[0].mT, "value": OV}
    return {f"{name}.weight": heads.flatten(0, 1).contiguous() for name, heads in state.items()}


# Shipped models under names that leave much open.

PAIRS = (
    *(("softmax-h2-s0", "modules {x}_proj"), ("linear-h1-s0", "haiku")),
    *(("linear-h1-s0", "layers"), ("softmax-h1-s0", "parameters [in, out]")),
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), PAIRS)
def test_the_label_is_the_true_one_or_an_option_is_asked_for(tmp_path: Path, name: str, form: str):
    weights, true = heads_of(name), label_of(name)
    state = as_layers(weights) if form == "layers" else LAYOUTS[form](weights)
    hints = {} if form == "layers" else {"n_heads": weights.n_heads}
    result = classify(loaded(tmp_path, state, **hints), **FEW)
    assert result.label in (true, "undetermined"), result.reason
    assert result.label == true or "--" in result.reason, result.reason


@pytest.mark.slow
def test_readings_are_told_with_their_loss_and_kept(tmp_path: Path):
    checkpoint = load(as_circuits(heads_of("softmax-h1-s0"), tmp_path / "h1.npz"))
    told = {reading.tried["score"]: reading for reading in checkpoint.readings if reading.stands}
    # A lower loss is not the model's own score: this one was trained with softmax.
    assert told["linear/L"].loss < told["softmax"].loss < 1
    assert torch.equal(checkpoint.weights.W_Q, checkpoint.readings[0].weights.W_Q)
    assert checkpoint.assumed["model.score"] == checkpoint.config.model.score == "linear/L"
    losses = [each.loss for each in checkpoint.readings]
    assert [each["loss"] for each in checkpoint.assumed["readings"]] == losses[:MOST_READINGS_SHOWN]
    result = classify(checkpoint, **FEW)
    assert result.label == "undetermined"
    for part in ("--score", "linear_gd", "kernel_regression"):
        assert part in result.reason
    named = name_algorithm(checkpoint, n_prompts=32)
    assert (named.label, named.why) == ("undetermined", "readings")
    assert "--score" in named.reason
    assert "--score" in readings_note(checkpoint)
    # A file of open score is not written as if it were said.
    assert_refused("state the score", convert, checkpoint, "native", tmp_path / "out")
    again = pickle.loads(pickle.dumps(checkpoint))
    assert [each.loss for each in again.readings] == losses
    OV, expected = (each.readings[1].weights.OV for each in (again, checkpoint))
    assert torch.equal(OV, expected)


@pytest.mark.slow
def test_numbers_of_a_file_of_open_score_say_whose_they_are(tmp_path: Path, run: Run):
    file = as_circuits(heads_of("softmax-h1-s0"), tmp_path / "h1.npz")
    shown = run("ablate", file, "--n-prompts", 16).done().out
    assert shown.index("--score") < shown.index("L0H0")
    stated = run("ablate", file, "--n-prompts", 16, "--score", "softmax").done().out
    assert "--score" not in stated


@pytest.mark.slow
def test_layers_whose_readings_have_two_names_are_undetermined_in_every_part():
    """A second reading of a model of two layers that predicts 0 after them."""
    model = gradient_descent_model([0.5, 0.3], d_x=2)
    names = ("linear", "linear/L")
    of_zero = model.with_tensors({"attn.W_O": 0 * model.W_O})
    readings = tuple(
        Reading({"score": name}, lambda own=own: own, 0.2, 0.01, True, True, True)
        for name, own in zip(names, (model, of_zero), strict=True)
    )
    task = TaskConfig(d_x=2)
    source = ProvenPredictor(own=model, task=task, law_stated=True, readings=readings)
    found = classify(source, n_prompts=32)
    assert found.label == found.algorithm.label == "undetermined"
    assert found.reason == found.algorithm.reason
    assert "--score" in found.reason
    assert (
        classify(replace(source, readings=readings[:1]), n_prompts=32).label == "gradient_descent"
    )


@pytest.mark.slow
@pytest.mark.parametrize("orientation", ["out,in", "in,out"])
def test_the_loss_tells_the_orientation(tmp_path: Path, orientation: str):
    weights = heads_of("softmax-h2-s0")
    file = saved(tmp_path, LAYOUTS[f"parameters [{orientation.replace(',', ', ')}]"](weights))
    checkpoint = load(file, score="softmax", n_heads=2, scale=weights.scale)
    assert checkpoint.assumed["model.orientation"] == orientation
    assert_same_circuits(checkpoint.weights, weights)


def test_scale_is_told_by_the_loss(tmp_path: Path):
    """With one score, the scale that training has settled predicts best."""
    checkpoint = shipped("linear-separate-s2")
    weights = checkpoint.weights
    law = {"task": checkpoint.config.to_dict()["task"], "score": "linear/L"}
    read_back = loaded(tmp_path, as_layers(weights), **law)
    torch.testing.assert_close(read_back.weights.QK, weights.QK)
    assert read_back.assumed["attn_scale"] == 1


@pytest.mark.slow
def test_a_loss_that_is_not_clear_is_looked_at_on_more_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Eight prompts leave open what 512 tell."""
    file = as_circuits(heads_of("softmax-h1-s0"), tmp_path / "x.npz")
    monkeypatch.setattr(losses, "N_PROMPTS", 8)
    monkeypatch.setattr(losses, "LEAST_PROMPTS", 8)
    for again, clear in ((1, False), (64, True)):
        monkeypatch.setattr(search, "AGAIN", again)
        readings = load(file, score="softmax").readings
        assert min(each.loss for each in readings) < 0.95
        assert any(each.predicts for each in readings) is clear


def test_readings_that_are_one_model_count_once(tmp_path: Path):
    """Where d_head is 1 both scales are one, and with symmetric matrices both orientations."""
    state = LAYOUTS["modules {x}_proj"](random_heads(n_heads=2, d_head=1))
    hints = {"score": "softmax", "columns": "x,y", "sign": "plus", "model": {"positions": "none"}}
    readings = loaded(tmp_path, state, n_heads=2, **hints).readings
    assert sorted(each.tried["attend_to_self"] for each in readings) == [False, True]
    symmetric = {f"W{x}": torch.diag(torch.tensor([1.0, 2, 3, 4])) for x in "qkvo"}
    checkpoint = loaded(tmp_path, symmetric, n_heads=1, scale=1.0, attend_to_self=False, **hints)
    assert len(checkpoint.readings) == 1


# Ranks and reasons, from losses.

STEP = debiased_gradient_step(0.88, 0.1, d_x=5)
ZERO = torch.ones(200)


def tailed(most: float, size: float, count: int) -> Tensor:
    errors = torch.full((200,), most)
    errors[:count] = size
    return errors


def test_readings_that_tie_are_named_with_the_option_that_decides():
    zero = 1 + 0.1 * torch.rand(64, generator=torch.Generator().manual_seed(0))
    choices = (("before", False), ("before", True), ("after", False))
    candidates = [({"norm": norm, "context_keys": each}, object) for norm, each in choices]
    errors = [(zero * share, zero) for share in (0.2, 0.2, 0.9)]
    words = tied(ranked(candidates, errors))
    assert "--model context_keys=" in words
    assert "norm" not in words
    assert tied(ranked(candidates[:1], errors[:1])) == ""


def test_a_reading_that_explodes_now_and_then_does_not_stand_beside_one_that_predicts():
    # The mean of the errors of minus is 10.4, and 10 the standard error of that: no difference is clear.
    errors = [(tailed(0.5, 0.5, 0), ZERO), (tailed(0.4, 2000.0, 1), ZERO)]
    first, second = ranked([({"sign": each}, lambda: STEP) for each in ("plus", "minus")], errors)
    assert (first.predicts, first.stands) == (True, True)
    assert (second.predicts, second.ties, second.stands) == (False, False, False)


def test_a_reading_whose_loss_is_no_number_is_no_rival_of_its_score():
    zero = torch.ones(256)
    errors = [(factor * zero, zero) for factor in (float("nan"), 0.2, 0.5)]
    readings = ranked([({"score": "linear"}, lambda: STEP)] * 3, errors)
    assert [each.loss for each in readings[:2]] == pytest.approx([0.2, 0.5])
    assert [each.stands for each in readings] == [True, False, False]


def test_a_reading_that_may_be_no_better_than_0_does_not_come_before_one_that_predicts():
    # The mean of the errors of the first is .5, the standard error of that .28.
    errors = [(tailed(0.1, 40.0, 2), ZERO), (tailed(0.2, 0.2, 0), ZERO)]
    readings = ranked([({"norm": each}, lambda: STEP) for each in ("before", "after")], errors)
    assert [(each.tried["norm"], each.predicts) for each in readings] == [("after", True), ("before", False)]  # fmt: skip


def test_advice_and_reasons_name_the_options_that_are_open():
    losses = {("plus", True): 1.0, ("plus", False): 0.4, ("minus", False): 0.3}
    readings = [
        Reading({"sign": s, "residual": r}, lambda: STEP, loss, 0.01, loss < 1, True, True)
        for (s, r), loss in losses.items()
    ]
    assert "--sign minus --model residual=false" in advice(readings)
    readings = [
        Reading({"score": s}, lambda: STEP, 0.5, 0.01, True, True, True)
        for s in ("linear/L", "softmax")
    ]
    label, reason = agreed_label(["undetermined"] * 2, "why", readings)
    assert label == "undetermined"
    assert reason.endswith("state --score")
    assert agreed_label(["undetermined"], "why", readings[:1])[1] == "why"


# Nothing predicts, or something else than what a known format settles.


@pytest.mark.slow
def test_nothing_is_understood_of_random_weights(tmp_path: Path):
    torch.manual_seed(0)
    state = {f"{x}_proj.weight": torch.randn(6, 6) / 4 for x in ("q", "k", "v", "out")}
    guessed = loaded(tmp_path, state, n_heads=2)
    assert not any(each.predicts for each in guessed.readings)
    result = classify(guessed, **FEW)
    assert result.label == "undetermined"
    for word in ("in doubt", "--score", "--columns", "--task"):
        assert word in result.reason
    # Said in full, the same file is not understood either, as its only reading predicts nothing.
    hints = {"score": "softmax", "columns": "x,y", "sign": "plus", "attend_to_self": False}
    stated = load(tmp_path / "x.pt", n_heads=2, scale=1.0, **hints)
    assert [each.tried for each in stated.readings] == [{}]
    assert classify(stated, **FEW).label == "undetermined"
    # As a checkpoint of this package, or a hooked model, it is as random weights are.
    convert(stated, "native", tmp_path / "native")
    assert classify(load(tmp_path / "native"), **FEW).label == "unstructured"
    assert classify(stated.model, task=stated.task, **FEW).label == "unstructured"
    layer = nn.TransformerEncoderLayer(6, 2, 8).state_dict()
    result = classify(loaded(tmp_path, layer, n_heads=2, task={"context_length": 10}), **FEW)
    assert result.label == "undetermined"
    assert "--model norm=" in result.reason


DOUBTS = {
    "columns y,x": (lambda n, t: t if "o_proj" in n else t.roll(1, 1), {"columns": "y,x"}),
    "sign minus": (lambda n, t: -t if "o_proj" in n else t, {"sign": "minus"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("named", DOUBTS)
def test_a_settled_choice_that_predicts_nothing_is_doubted(tmp_path: Path, named: str):
    change, decides = DOUBTS[named]
    state = softmax_paper_state(heads_of("softmax-h2-s0"))
    assert not loaded(tmp_path, state).readings
    file = saved(tmp_path, {name: change(name, t) for name, t in state.items()})
    checkpoint = load(file)
    assert checkpoint.format == "softmax-paper"
    assert [each.predicts for each in checkpoint.readings] == [False, True]
    assert f"{named} predicts" in checkpoint.doubt
    result = classify(checkpoint, **FEW)
    assert result.label == "undetermined"
    assert result.reason.endswith(f"--{named}")
    told = load(file, **decides)
    assert not told.readings
    assert classify(told, **FEW).label == "debiased_gd"


# Widths, factors and matrices that no format has.


@pytest.mark.slow
def test_values_narrower_or_wider_than_queries(tmp_path: Path):
    weights = heads_of("softmax-h2-s0")
    rows = matrices(weights)
    # OV of a head with one response has rank 1.
    rows |= {"v": weights.OV[..., 0], "o": pad(torch.ones(1, 2), (0, 0, weights.d_x, 0))}
    state = {f"attn.to_{'out' if x == 'o' else x}.weight": t for x, t in rows.items()}
    checkpoint = loaded(tmp_path, state, n_heads=2, score="softmax")
    assert_same_circuits(checkpoint.weights, weights)
    # Queries of 6 and values of 7 rows have no other common number of heads than one.
    weights = heads_of("softmax-h1-s0")
    rows = matrices(weights)
    rows["v"], rows["o"] = pad(rows["v"], (0, 0, 0, 1)), pad(rows["o"], (0, 1))
    state = {f"layers.0.W_{x}.weight": tensor for x, tensor in rows.items()}
    assert_same_circuits(loaded(tmp_path, state, score="softmax").weights, weights)


@pytest.mark.slow
def test_a_factor_on_the_output_is_asked_for(tmp_path: Path):
    """Code that multiplies what attention adds keeps larger matrices."""
    weights, task = heads_of("linear-h1-s0"), shipped("linear-h1-s0").task
    state = LAYOUTS["modules {x}_proj"](weights)
    state["attn.out_proj.weight"] = state["attn.out_proj.weight"] * 10
    hints = {"n_heads": 1, "score": weights.model.score, "scale": weights.scale, "columns": "x,y"}
    hints |= {
        "task": {"context_length": task.context_length},
        "score_slope": weights.model.score_slope,
    }
    unread = classify(loaded(tmp_path, state, **hints), **FEW)
    assert unread.label == "undetermined"
    assert "--output-scale" in unread.reason
    told = load(tmp_path / "x.pt", output_scale=0.1, **hints)
    assert classify(told, task=task, **FEW).label == label_of("linear-h1-s0")


@pytest.mark.slow
def test_a_step_by_a_matrix_far_from_the_identity_says_how_far(tmp_path: Path):
    turn = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(0)))[0]
    turn = 0.4 * turn + 0.5 * torch.eye(5)  # no direction ascends
    np.save(tmp_path / "W.npy", turn.numpy())
    hints = {"d_x": 5, "orientation": "in,out", "task": {"noise_var": 0.0}}
    result = classify(load(tmp_path / "W.npy", **hints), **FEW)
    rest = turn - turn.diagonal().mean() * torch.eye(5)
    assert result.label == "linear_gd"
    assert result.loss.r2 > 0.1  # a step by this matrix does the task
    assert f"{float(rest.norm() / turn.norm()):.0%} of its matrix" in result.reason


# Columns of positions, and predictions in another entry than y's.

D_X, WIDTH = 10, 17
UNIFORM = {
    **{"context_length": 10, "noise_var": 0.0, "query_noise": False},
    **{"covariance": {"kind": "eigenvalues", "eigenvalues": [1 / 12] * D_X}},
}
"""Covariates uniform on (-.5, .5), by their covariance."""
HAIKU = {"d_x": D_X, "d_y": 1, "n_heads": 1, "score": "linear", "scale": 1.0, "task": UNIFORM}
OMEGA, MU = 0.614, 0.698


def with_positions(*, layers: int = 1, y_first: bool = False) -> State:
    """A file of dm-haiku as the code of von Oswald et al. writes it, x W with tokens of x, y and six entries of a position.

    Its prediction is minus the last entry. In the entry of y it writes something else.
    """
    generator = torch.Generator().manual_seed(0)
    x = slice(1, D_X + 1) if y_first else slice(0, D_X)
    y, last = 0 if y_first else D_X, WIDTH - 1
    state = {}
    for layer in range(layers):
        key, value, query = torch.zeros(3, WIDTH, D_X + 1)
        linear = torch.zeros(D_X + 1, WIDTH)
        key[x, :D_X], query[x, :D_X] = torch.eye(D_X), OMEGA * torch.eye(D_X)
        value[y, D_X], linear[D_X, last] = 1, -MU
        if layers == 1:
            for read in (key, query, value):
                read[D_X + 1 :] = 1e-3 * torch.randn(6, D_X + 1, generator=generator)
            linear[:, y] = 0.02 * torch.randn(D_X + 1, generator=generator)
        path = "multi_head_attention" if layers == 1 else f"~trans_block/layer_{layer}"
        named = {"key": key, "query": query, "value": value, "linear": linear}
        state |= {f"transformer/{path}/{name}/w": tensor for name, tensor in named.items()}
    return state


@pytest.mark.slow
@pytest.mark.parametrize("y_first", [False, True])
def test_the_loss_says_which_entry_is_the_prediction(tmp_path: Path, y_first: bool):
    checkpoint = loaded(tmp_path, with_positions(y_first=y_first), **HAIKU)
    said = {"output_column": WIDTH - 1, "sign": "minus", "columns": "y,x" if y_first else "x,y"}
    assert {name: checkpoint.assumed[f"model.{name}"] for name in said} == said
    assert checkpoint.assumed["model.position_columns_left_out"] == WIDTH - D_X - 1
    assert 0 < checkpoint.assumed["model.position_columns_share"] < 0.05
    # Every reading names its entry, that of y among them.
    assert {each.tried["output_column"] for each in checkpoint.readings} == {0, D_X, WIDTH - 1}
    label = classify(checkpoint, **FEW)
    assert label.label == "linear_gd"
    assert label.circuits.omega == pytest.approx(np.full((1, 1, D_X), OMEGA), rel=1e-6)
    assert label.circuits.mu == pytest.approx(np.array([[[MU]]]), rel=1e-6)
    file = tmp_path / "x.pt"
    told = load(file, **HAIKU, output_column=WIDTH - 1, sign="minus")
    assert "model.output_column" not in told.assumed
    assert_same_circuits(told.weights, checkpoint.weights)
    assert not load(file, **HAIKU, output_column=0 if y_first else D_X).readings[0].predicts
    refused = {"output_column": 17}, {"output_column": 3, "format": "linear-paper"}
    for hints, words in zip(refused, ("got 17", "must hold kq.weight"), strict=True):
        assert_refused(words, load, file, **HAIKU | hints)


@pytest.mark.slow
def test_the_entry_of_the_prediction_of_several_layers(tmp_path: Path):
    checkpoint = loaded(tmp_path, with_positions(layers=2), **HAIKU)
    assert checkpoint.assumed["model.output_column"] == WIDTH - 1
    assert checkpoint.assumed["model.position_columns_left_out"] == WIDTH - D_X - 1
    assert checkpoint.assumed["model.sign"] == "minus"
    prompts = draw_prompts(checkpoint.task, 64, seed=3, dtype=torch.float32)
    moment = torch.einsum("blx,bln->bxn", prompts.x, prompts.y)
    step = torch.einsum("bx,bxn->bn", prompts.x_query, moment)
    told = {"sign": "minus", "output_column": WIDTH - 1, "attend_to_self": False}
    ours = load(tmp_path / "x.pt", **HAIKU, **told).model.predict(prompts)
    # Both layers add the same step, as neither changes y.
    torch.testing.assert_close(ours, 2 * MU * OMEGA * step, rtol=1e-4, atol=1e-5)


# Several layers, and MLPs behind heads.


PLAIN = {"context_keys": True, "positions": "none", "passes": 1, "norm": "none"}


@pytest.mark.parametrize("n_layers", [1, 3])
def test_layers_run_once_whatever_predicts_better(tmp_path: Path, n_layers: int):
    """Running them again goes on with the descent, so that it would predict better."""
    model = gradient_descent_model([0.3] * n_layers, d_x=3)
    state = {}
    for name, stack in {"q": model.W_Q * model.scale, "k": model.W_K, "v": model.W_V, "o": model.W_O}.items():  # fmt: skip
        state |= {f"layers.{n}.W_{name}": W[0].float() for n, W in enumerate(stack)}
    hints = {"n_heads": 1, "scale": 1.0, "d_x": 3, "d_y": 1, "score": "linear/L"}
    hints |= {"orientation": "in,out", "attend_to_self": False}
    once = loaded(tmp_path, state, **hints, model={"context_keys": True} if n_layers > 1 else None)
    assert once.weights.n_layers == n_layers
    said = {"passes": 2} | ({"context_keys": True} if n_layers > 1 else {"positions": "none"})
    if n_layers > 1:
        assert once.assumed["model.passes"] == 1
        twice = loaded(tmp_path, state, **hints, model=said)
        assert twice.weights.n_layers == 2 * n_layers
        assert "model.passes" not in twice.assumed


@pytest.mark.slow
def test_a_wrong_scale_is_named_with_the_value_to_type(tmp_path: Path):
    """Code with scores q.k * 2 / sqrt(d_head) keeps queries half as large."""
    rows = matrices(heads_of("softmax-h2-s0"))
    rows["q"] = rows["q"] / 2
    state = {f"attn.{n}_proj.weight": tensor for n, tensor in rows.items()}
    hints = {"n_heads": 2, "score": "softmax", "columns": "x,y", "attend_to_self": False}
    file, right = saved(tmp_path, state), 2 * 6**-0.5
    checkpoint = load(file, **hints, sign="plus", model={"positions": "none"})
    assert "scale of the scores" in checkpoint.doubt
    named = float(checkpoint.doubt.partition("--scale ")[2].split()[0])
    assert named == pytest.approx(right, rel=0.1)
    assert "--task" not in checkpoint.doubt
    assert "--scale" in classify(checkpoint, **FEW).task_doubt
    told = load(file, **hints, sign="plus", model={"positions": "none"}, scale=right)
    assert told.doubt == ""
    wide = {n: t * 6**0.25 if n.startswith(("attn.q", "attn.k")) else t for n, t in state.items()}
    wide["attn.q_proj.weight"] = 2 * wide["attn.q_proj.weight"]
    read = loaded(tmp_path, wide, **hints, sign="plus", model={"positions": "none"})
    assert read.assumed["attn_scale"] == pytest.approx(6)  # scores q.k / d_head are tried


def test_the_error_of_a_reading_s_loss_is_that_of_a_ratio():
    """Loss over that of 0: the delta method by hand, for four prompts."""
    error, zero = torch.tensor([0.5, 1.0, 0.0, 0.5]), torch.tensor([1.0, 2.0, 0.5, 0.5])
    (reading,) = ranked([({}, lambda: STEP)], [(error, zero)])
    assert reading.loss == pytest.approx(0.5)
    # error - loss * zero is 0, 0, -.25, .25: the standard deviation is sqrt(.125 / 3), and four prompts halve it.
    assert reading.loss_sem == pytest.approx((0.125 / 3) ** 0.5 / 2)


@pytest.mark.slow
def test_axes_of_bare_matrices_of_layers_are_tried(tmp_path: Path):
    model = gradient_descent_model([0.6, 0.5], d_x=3)
    # A basis of the head's own, so that turned matrices are another model.
    basis = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))[0]
    read, written = {"q": model.W_Q * model.scale, "k": model.W_K}, {"v": model.W_V, "o": model.W_O}
    turned = {}
    for name, stack in (read | written).items():
        own = basis if name in read else torch.eye(4)
        for layer, (W,) in enumerate(stack.float()):
            turned[f"layers.{layer}.W_{name}"] = own @ W.T
    hints = {"n_heads": 1, "scale": 1.0, "d_x": 3, "d_y": 1}
    hints |= {"task": {"noise_var": 0.0, "context_length": 20}}
    hints |= {"score": "linear/L", "model": PLAIN, "attend_to_self": False}
    checkpoint = loaded(tmp_path, turned, **hints)
    assert checkpoint.assumed["model.orientation"] == "out,in"
    assert checkpoint.readings[0].loss < 0.5


def behind_an_mlp(name: str, *, curved: bool = False) -> State:
    """A shipped model's heads as modules, and behind them an MLP that is linear in effect: relu(R a) - relu(-R a)."""
    state = LAYOUTS["modules of heads"](heads_of(name))
    generator = torch.Generator().manual_seed(0)
    R = torch.linalg.qr(torch.randn(6, 6, generator=generator))[0]
    state |= {"W": torch.cat([R, -R]), "b": torch.zeros(12), "bp": torch.zeros(6)}
    state |= {"Wp": torch.cat([R.T, -R.T], 1)}
    if curved:
        sizes = {"W": (12, 6), "b": (12,), "Wp": (6, 12)}
        state |= {part: torch.randn(size, generator=generator) for part, size in sizes.items()}
        state["W"] = state["W"] * 3
    return state


BEHIND = {"positions": "none", "passes": 1, "activation": "relu"}


@pytest.mark.slow
def test_heads_behind_an_mlp(tmp_path: Path):
    name, true = "softmax-h2-s0", "debiased_gd"
    hints = {"score": "softmax", "scale": 6**-0.5, "attend_to_self": False, "model": BEHIND}
    checkpoint = loaded(tmp_path, behind_an_mlp(name), **hints)
    assert checkpoint.assumed["model.residual"] is False
    assert checkpoint.config.model.d_model == 18
    result = classify(checkpoint, **FEW)
    assert isinstance(result, Classification)
    assert result.label == true
    # The loss does not tell the score.
    asked = classify(load(tmp_path / "x.pt", attend_to_self=False, model=BEHIND), **FEW)
    assert asked.label == "undetermined"
    assert "--score" in asked.reason
    # A curved MLP leaves the heads without labels.
    curved = classify(loaded(tmp_path, behind_an_mlp(name, curved=True), **hints), **FEW)
    assert curved.label == "undetermined"
    assert not isinstance(curved, Classification)
