"""Files of odd layouts, from weights whose label is known: the true label, or the one option that decides."""

import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import pad

from mechinterp.analysis.one_layer.classify import classify
from mechinterp.checkpoints.io.errors import CheckpointError
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import sample_prompts
from mechinterp.models.heads import AttentionWeights
from tests.checkpoints.files import assert_refused, assert_same_circuits, loaded, saved
from tests.checkpoints.files import read as load
from tests.checkpoints.foreign_files import softmax_paper_state
from tests.checkpoints.wild_files import State, matrices
from tests.conftest import CHECKPOINTS, sampled

pytestmark = pytest.mark.usefixtures("small_null")
FEW = {"n_prompts": 64}


def heads_of(name: str) -> AttentionWeights:
    return load(CHECKPOINTS / name).weights.circuits


# What a known format settles is doubted where it predicts nothing.

DOUBTS = {
    "columns y,x": (lambda n, t: t if "o_proj" in n else t.roll(1, 1), {"columns": "y,x"}),
    "sign minus": (lambda n, t: -t if "o_proj" in n else t, {"sign": "minus"}),
}


@pytest.mark.parametrize("named", DOUBTS)
def test_a_settled_choice_that_predicts_nothing_is_doubted(tmp_path: Path, named: str):
    change, decides = DOUBTS[named]
    state = softmax_paper_state(heads_of("softmax-h2-s0"))
    file = saved(tmp_path, {name: change(name, t) for name, t in state.items()})
    checkpoint = load(file)
    assert checkpoint.format == "softmax-paper"
    assert [each.predicts for each in checkpoint.readings] == [False, True]
    option = f"--{named}"
    assert f"{named} predicts" in checkpoint.assumed["doubt"]
    result = classify(checkpoint, **FEW)
    assert result.pattern == "undetermined"
    assert result.reason.endswith(option)
    told = load(file, **decides)
    assert not told.readings
    assert classify(told, **FEW).pattern == "debiased_gd"


def test_a_format_that_predicts_is_not_doubted(tmp_path: Path):
    file = saved(tmp_path, softmax_paper_state(heads_of("softmax-h2-s0")))
    assert not load(file).readings
    assert "doubt" not in load(file).assumed


def encoder_with_a_read_out(*, norm_first: bool, activation: str) -> tuple[nn.Module, TaskConfig]:
    """torch's encoder with a read-out fitted by least squares: not trained, and predicting."""
    task = TaskConfig(d_x=1, context_length=20, noise_var=0.0)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(
            32, 4, 64, batch_first=True, norm_first=norm_first, activation=activation
        )
        stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        for parameter in stack.parameters():
            nn.init.normal_(parameter, 0.0, 0.3 if parameter.ndim > 1 else 1.0)
        model = nn.ModuleDict({"read_in": nn.Linear(2, 32), "encoder": stack}).eval()
        nn.init.normal_(model["read_in"].weight, 0.0, 1.0)
    prompts = sample_prompts(task, 4096, seed=9, dtype=torch.float32)
    with torch.no_grad():
        features = model["encoder"](model["read_in"](prompts.tokens))[:, -1].double()
        ones = torch.ones(len(features), 1, dtype=torch.float64)
        known = torch.cat([features, ones], 1)
        ridge = known.T @ known + torch.eye(33, dtype=torch.float64)
        fitted = torch.linalg.solve(ridge, known.T @ prompts.y_query.double())
        model["read_out"] = nn.Linear(32, 1)
        model["read_out"].weight.copy_(fitted[:-1].T)
        model["read_out"].bias.copy_(fitted[-1])
    return model, task


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm_first", "activation"),
    sampled([(True, "gelu"), (False, "relu"), (True, "relu")], keep=lambda case: not case[0]),
)
def test_the_loss_tells_where_the_norms_of_an_encoder_are(
    tmp_path: Path, norm_first: bool, activation: str
):
    model, task = encoder_with_a_read_out(norm_first=norm_first, activation=activation)
    file = saved(tmp_path, model.state_dict())
    checkpoint = load(file, n_heads=4, task={"context_length": 20, "noise_var": 0.0})
    assert checkpoint.format == "torch-encoder"
    assert checkpoint.assumed["model.norm"] == ("before" if norm_first else "after")
    assert checkpoint.assumed["model.activation"] == activation
    assert checkpoint.assumed["model.context_only"] is True
    assert checkpoint.readings[0].predicts
    prompts = sample_prompts(task, 16, seed=0, dtype=torch.float32)
    with torch.no_grad():
        output = model["read_out"](model["encoder"](model["read_in"](prompts.tokens))[:, -1])
    torch.testing.assert_close(checkpoint.model.predict(prompts), output, rtol=1e-4, atol=1e-4)


# Widths, columns and matrices that no format has.


def values_of_one_column(weights: AttentionWeights) -> State:
    """Queries and keys of width 6, values of width 1: OV of a head with one response has rank 1."""
    rows = matrices(weights)
    rows["v"] = weights.OV[..., 0]
    rows["o"] = pad(torch.ones(1, weights.n_heads), (0, 0, weights.d_x, 0))
    return {f"attn.to_{x}.weight" if x != "o" else "attn.to_out.weight": t for x, t in rows.items()}


@pytest.mark.slow
def test_values_narrower_than_queries(tmp_path: Path):
    weights = heads_of("softmax-h2-s0")
    file = saved(tmp_path, values_of_one_column(weights))
    checkpoint = load(file, n_heads=2, score="softmax")
    assert_same_circuits(checkpoint.weights.circuits, weights)
    assert classify(checkpoint, **FEW).pattern == "debiased_gd"


@pytest.mark.slow
def test_one_head_of_two_widths_needs_no_number_of_heads(tmp_path: Path):
    """Queries of 6 and values of 7 rows have no other common number of heads than one."""
    weights = heads_of("softmax-h1-s0")
    rows = matrices(weights)
    rows["v"], rows["o"] = pad(rows["v"], (0, 0, 0, 1)), pad(rows["o"], (0, 1))
    state = {f"layers.0.W_{x}.weight": tensor for x, tensor in rows.items()}
    read = loaded(tmp_path, state, score="softmax")
    assert_same_circuits(read.weights.circuits, weights)


@pytest.mark.parametrize("room", [0, 1])
def test_one_square_matrix_is_a_merged_step(tmp_path: Path, room: int):
    np.save(tmp_path / "W.npy", pad(0.8 * torch.eye(5), (0, room, 0, room)).double().numpy())
    checkpoint = load(tmp_path / "W.npy", task={"noise_var": 0.0}, d_x=5)
    assert (checkpoint.format, checkpoint.task.d_x, checkpoint.config.model.score) == (
        "one-matrix",
        5,
        "linear/L",
    )
    prompts = sample_prompts(checkpoint.task, 8, seed=0, dtype=torch.float64)
    step = torch.einsum("blx,bly->bxy", prompts.x, prompts.y) / prompts.x.shape[1]
    expected = 0.8 * torch.einsum("bx,bxy->by", prompts.x_query, step)
    torch.testing.assert_close(checkpoint.predictor.predict(prompts), expected)
    assert classify(checkpoint, **FEW).pattern == "linear_gd"


def test_a_matrix_of_another_size_than_the_stated_task_is_refused(tmp_path: Path):
    np.save(tmp_path / "W.npy", np.eye(21, dtype=np.float32))
    assert_refused("d_x must be 20 .* or 21 .*, got no --d-x", load, tmp_path / "W.npy")
    assert_refused("d_x must be 20 .* or 21 .*, got 10", load, tmp_path / "W.npy", d_x=10)
    assert_refused("d_y must be 1", load, tmp_path / "W.npy", d_x=21, d_y=2)


def test_a_step_by_a_matrix_far_from_the_identity_says_how_far(tmp_path: Path):
    turn = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(0)))[0]
    turn = 0.6 * turn + 0.5 * torch.eye(5)
    np.save(tmp_path / "W.npy", turn.numpy())
    result = classify(
        load(tmp_path / "W.npy", d_x=5, orientation="in,out", task={"noise_var": 0.0}), **FEW
    )
    rest = turn - turn.diagonal().mean() * torch.eye(5)
    assert result.pattern == "linear_gd"
    assert result.loss.r2 > 0.1  # a step by this matrix does the task
    assert (
        f"{float(rest.norm() / turn.norm()):.0%} of its matrix is not a multiple of the identity"
        in result.reason
    )


# Modules with names of their own.


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_module_with_own_names_and_positions(tmp_path: Path):
    """Every part under a name that is in no table, as the reader says what they are."""
    model, task = encoder_with_a_read_out(norm_first=True, activation="relu")
    state = model.state_dict()
    theirs = {
        "read_in": "gather", "read_out": "answer", "self_attn": "mixer", "linear1": "widen",
        "linear2": "narrow", "norm1": "calm_a", "norm2": "calm_b",
    }  # fmt: skip
    for known, own in theirs.items():
        state = {name.replace(known, own): t for name, t in state.items()}
    state = {
        n.replace("in_proj_", "three.").replace("out_proj", "back"): t for n, t in state.items()
    }
    state["clock"] = torch.zeros(1, 30, 32)
    file = saved(tmp_path, state)
    with pytest.raises(CheckpointError, match="state its part by --map THEIRS=KNOWN") as refused:
        load(file, n_heads=4)
    assert not str(refused.value).endswith("...")
    rows = [
        f"{own}={known}" for known, own in theirs.items() if own not in ("mixer", "narrow", "widen")
    ]
    rows += ["three=qkv", "back=o_proj", "widen=linear1", "narrow=linear2", "clock=pos_emb"]
    law = {"context_length": 20, "noise_var": 0.0}
    checkpoint = load(file, n_heads=4, map=rows, task=law, score="softmax")
    assert (checkpoint.assumed["model.norm"], checkpoint.assumed["model.context_only"]) == (
        "before",
        True,
    )
    prompts = sample_prompts(task, 16, seed=0, dtype=torch.float32)
    with torch.no_grad():
        output = model["read_out"](model["encoder"](model["read_in"](prompts.tokens))[:, -1])
    torch.testing.assert_close(checkpoint.model.predict(prompts), output, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_an_embedding_with_a_bias_is_a_read_in(tmp_path: Path):
    state = {f"attention.to_{x}.weight": torch.ones(6, 6) for x in ("q", "k", "v", "out")}
    state |= {"embedding.weight": torch.ones(6, 4), "embedding.bias": torch.ones(6)}
    state |= {"decoder.weight": torch.ones(1, 6)}
    checkpoint = loaded(tmp_path, state, n_heads=2, score="softmax", model={"layout": "pairs"})
    assert torch.equal(checkpoint.weights.tensors["W_in"], torch.ones(4, 6))
    assert torch.equal(checkpoint.weights.tensors["b_in"], torch.ones(6))


# Bounds.

MEASURED = """
import sys, time, torch
from mechinterp import load
from mechinterp.memory import peak_memory
start = time.process_time()
checkpoint = load(sys.argv[1], n_heads=2, anyway=True)
print(len(checkpoint.readings), time.process_time() - start, peak_memory() / 1024)
"""


@pytest.mark.slow
def test_64_choices_take_less_than_a_gigabyte_and_20_seconds(tmp_path: Path):
    width, state = 64, {}
    generator = torch.Generator().manual_seed(0)
    shapes = dict.fromkeys(("q", "k", "v", "proj"), (width, width))
    shapes |= {"mlp.0": (4 * width, width), "mlp.2": (width, 4 * width)}
    for layer, (x, shape) in product(range(4), shapes.items()):
        state[f"blocks.{layer}.{x}.weight"] = torch.randn(shape, generator=generator) / 8
    state |= {f"blocks.{n}.ln{i}.weight": torch.ones(width) for n in range(4) for i in (1, 2)}
    state |= {"read_in.weight": torch.randn(width, 6, generator=generator)}
    state |= {"read_out.weight": torch.randn(1, width, generator=generator)}
    file = saved(tmp_path, state)
    ran = subprocess.run(
        [sys.executable, "-c", MEASURED, file], capture_output=True, text=True, check=True
    )
    count, seconds, kilobytes = map(float, ran.stdout.split())
    assert count == 64
    assert seconds < 20
    assert kilobytes < 1e6
