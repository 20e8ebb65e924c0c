"""Readings of a file that its owner's recorded predictions prove, leave open or refute."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mechinterp.analysis.one_layer.classify import classify
from mechinterp.checkpoints.foreign.options import Hints
from mechinterp.checkpoints.foreign.read import read_proven
from mechinterp.checkpoints.foreign.readings.recorded import read_recording, recording_of
from mechinterp.checkpoints.io.files import NotUnderstoodError
from mechinterp.checkpoints.load import convert, load
from mechinterp.models.run.predictor import predictor_of
from tests.checkpoints.files import assert_refused, saved
from tests.checkpoints.foreign_files import LAYOUTS, random_heads, softmax_paper_state
from tests.checkpoints.recordings import recorded
from tests.checkpoints.strangers import D_X, LENGTH, Kind, prediction, random_weights
from tests.conftest import Run

Predict = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention(
    x: Tensor,
    y: Tensor,
    x_query: Tensor,
    *,
    state: dict[str, Tensor],
    score: str,
    factor: float = 1.0,
    scale: float | None = None,
) -> Tensor:
    """Two heads in plain torch: the query reads the pairs, and the prediction is the last entry."""
    tokens = torch.cat([x, y[..., None]], -1)
    query = torch.cat([x_query, torch.zeros(len(x), 1)], -1)
    W = {n: state[f"attn.{p}.weight"] for n, p in zip("qkvo", ("q_proj", "k_proj", "v_proj", "out_proj"), strict=True)}  # fmt: skip
    q = (query @ W["q"].T).unflatten(-1, (2, -1))
    k, v = ((tokens @ W[n].T).unflatten(-1, (2, -1)) for n in "kv")
    scores = torch.einsum("bhd,blhd->bhl", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    pattern = scores.softmax(-1) if score == "softmax" else scores
    pattern = pattern / x.shape[1] if score == "linear/L" else pattern
    z = torch.einsum("bhl,blhd->bhd", pattern, v).flatten(1)
    return factor * (z @ W["o"].T)[:, -1:]


HEADS = random_heads()
STATE = LAYOUTS["modules {x}_proj"](HEADS)
WAYS = {score: partial(attention, state=STATE, score=score) for score in ("softmax", "linear", "linear/L")}  # fmt: skip


def recording(folder: Path, predict: Predict, *, length: int = 10, **more: object) -> Path:
    return recorded(folder / f"batch{length}.npz", predict, d_x=3, length=length, **more)


@pytest.mark.parametrize(("target", "name"), [("native", "n"), ("npz", "n.npz"), ("transformer-lens", "n")])  # fmt: skip
def test_grounds_are_kept_in_every_format(tmp_path: Path, target: str, name: str):
    batches = [recording(tmp_path, WAYS["softmax"], length=each) for each in (10, 17)]
    before = load(saved(tmp_path, STATE), n_heads=2, predictions=batches)
    assert before.proven["model.score"] == "softmax"
    convert(before, target, tmp_path / name)
    after = load(tmp_path / name)
    assert before.known
    for ground in ("known", "proven", "stated"):
        assert getattr(after, ground) == json.loads(json.dumps(dict(getattr(before, ground))))


def test_a_ground_of_another_name_is_refused(tmp_path: Path):
    load(saved(tmp_path, STATE), n_heads=2).save_pretrained(tmp_path / "n")
    config = tmp_path / "n" / "config.json"
    config.write_text(config.read_text().replace('"known":', '"certain":'))
    assert_refused("grounds must hold", load, tmp_path / "n")


@pytest.mark.parametrize("score", WAYS)
def test_the_reading_that_gives_the_recorded_predictions_is_proven(tmp_path: Path, score: str):
    file = saved(tmp_path, STATE)
    batches = [recording(tmp_path, WAYS[score], length=each) for each in (10, 17)]
    checkpoint = load(file, n_heads=2, predictions=batches)
    proven = checkpoint.proven
    assert (proven["model.score"], proven["model.attend_to_self"]) == (score, False)
    assert proven["model.scale"] == pytest.approx(0.5)
    assert not {name for name in checkpoint.assumed if name.startswith(("model.", "attn"))}
    assert "undetermined" not in checkpoint.assumed
    assert (checkpoint.task.d_x, checkpoint.task.context_length) == (3, 10)
    assert checkpoint.assumed["task.context_length"] == 10
    record = read_recording(batches[1])
    ours = predictor_of(checkpoint.weights.to(torch.float64)).predict(record.prompts)
    assert record.difference(ours[:, None]) < 1e-5


def test_one_length_leaves_the_number_of_keys_open_and_a_second_settles_it(tmp_path: Path):
    file, batch = saved(tmp_path, STATE), recording(tmp_path, WAYS["linear/L"])
    one = load(file, n_heads=2, predictions=batch)
    assert "--score" in one.assumed["undetermined"]
    assert {each.tried["score"] for each in one.readings} == {"linear", "linear/L"}
    assert "model.score" not in one.proven
    assert one.proven["model.sign"] == "plus"
    two = load(
        file, n_heads=2, predictions=[batch, recording(tmp_path, WAYS["linear/L"], length=5)]
    )
    assert two.proven["model.score"] == "linear/L"
    assert not two.readings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Kind(2, norm="rms", mlp=True, activation="relu"), {"norm": "before", "rms_norm": True}),
        (Kind(positions="adjacent", passes=2), {"positions": "rotary", "passes": 2}),
        (Kind(2, norm="after", mlp=True, activation="silu"), {"norm": "after", "activation": "silu"}),
        (Kind(2, layout="in_turn", positions="waves"), {"layout": "in_turn", "positions": "sinusoidal"}),
    ],
)  # fmt: skip
def test_layers_are_proven_by_predictions_alone(tmp_path: Path, kind: Kind, names: dict):
    """The weights are random, so that no loss decides."""
    model = random_weights(kind)
    batch = recorded(tmp_path / "batch.npz", model, d_x=D_X, length=LENGTH)
    checkpoint = load(saved(tmp_path, model.state_dict()), n_heads=2, predictions=batch)
    assert {name: checkpoint.proven[f"model.{name}"] for name in names} == names
    ours, theirs = prediction(checkpoint, model)
    assert (ours - theirs).abs().max() < 1e-3 * theirs.std()


@pytest.mark.slow
def test_a_factor_that_would_explain_the_difference_is_found_and_named(tmp_path: Path):
    file = saved(tmp_path, STATE)
    for factor, words in (
        ({"factor": 0.3}, "--output-scale 0.3:?"),
        ({"scale": 0.83}, "--scale 0.83"),
    ):
        batch = recording(tmp_path, partial(attention, state=STATE, score="softmax", **factor))
        with pytest.raises(NotUnderstoodError, match=rf"R² = .*{words}") as error:
            load(file, n_heads=2, predictions=batch)
        assert str(error.value).isprintable()

    def larger(x: Tensor, y: Tensor, x_query: Tensor) -> Tensor:
        return WAYS["softmax"](1.7 * x, y, 1.7 * x_query)

    assert_refused(r"a factor 1\.7 on the x", load, file, n_heads=2, predictions=recording(tmp_path, larger))  # fmt: skip

    def bent(x: Tensor, y: Tensor, x_query: Tensor) -> Tensor:
        return WAYS["softmax"](x, y, x_query).sin()

    assert_refused("no single factor", load, file, n_heads=2, predictions=recording(tmp_path, bent))


def test_half_precision_is_said_and_has_its_own_bound(tmp_path: Path):
    def rounded(x: Tensor, y: Tensor, x_query: Tensor) -> Tensor:
        return WAYS["softmax"](x, y, x_query).bfloat16().float()

    file = saved(tmp_path, STATE)
    checkpoint = load(file, n_heads=2, predictions=recording(tmp_path, rounded))
    assert "to half precision" in checkpoint.proven["predictions"]

    def off(x: Tensor, y: Tensor, x_query: Tensor) -> Tensor:
        exact = WAYS["softmax"](x, y, x_query)
        return exact + 2e-3 * exact.std() * torch.cos(37 * x_query[:, :1])

    assert_refused("no reading gives", load, file, n_heads=2, predictions=recording(tmp_path, off))


def test_predictions_that_prove_nothing_or_contradict_are_refused(tmp_path: Path, run: Run):
    file, batch = saved(tmp_path, STATE), recording(tmp_path, WAYS["softmax"])
    few = recorded(tmp_path / "few.npz", WAYS["softmax"], d_x=3, length=4, n_prompts=31)
    assert_refused("32 distinct prompts, got 31", load, file, n_heads=2, predictions=few)

    def constant(x: Tensor, y: Tensor, x_query: Tensor) -> Tensor:
        return torch.ones(len(x), 1)

    equal = recorded(tmp_path / "equal.npz", constant, d_x=3, length=4)
    assert_refused("equal ones prove nothing", load, file, n_heads=2, predictions=equal)
    every = recorded(tmp_path / "every.npz", lambda x, y, x_query: y.cumsum(1)[:, [0, *range(4)]], d_x=3, length=4)  # fmt: skip
    assert_refused("see their own y", load, file, n_heads=2, predictions=every)
    for hints in ({"d_x": 2}, {"d_y": 2}, {"task": {"context_length": 40}}):
        assert_refused("as in the recorded", load, file, n_heads=2, predictions=batch, **hints)
    np.savez(tmp_path / "lacking.npz", x=np.ones((40, 3, 2)), y=np.ones((40, 3)))
    assert_refused(
        "x_query is missing", load, file, n_heads=2, predictions=tmp_path / "lacking.npz"
    )
    assert_refused("got nothing", load, file, n_heads=2, predictions=tmp_path / "no.npz")
    assert_refused("only for files", load, "softmax-h2-s0", predictions=batch)
    paths = [saved(tmp_path, STATE).rename(tmp_path / f"step_{n}.pt") for n in (1,)]
    paths.append(saved(tmp_path, STATE).rename(tmp_path / "step_2.pt"))
    assert_refused("one model", load, paths, n_heads=2, predictions=batch)


def test_predictions_at_every_x_prove_tokens_in_turn(tmp_path: Path):
    model = random_weights(Kind(2, layout="in_turn"))

    def every(x: Tensor, y: Tensor, x_query: Tensor) -> Tensor:
        rows = [model(x[:, :n], y[:, :n], x[:, n]) for n in range(LENGTH)]
        return torch.stack([*rows, model(x, y, x_query)], 1)

    batch = recorded(tmp_path / "batch.npz", every, d_x=D_X, length=LENGTH)
    checkpoint = load(saved(tmp_path, model.state_dict()), n_heads=2, predictions=batch)
    assert checkpoint.proven["model.layout"] == "in_turn"


def test_a_state_dict_in_memory_is_proven_and_copied():
    generator = torch.Generator().manual_seed(0)
    x, x_query = torch.randn(32, 6, 3, generator=generator), torch.randn(32, 3, generator=generator)
    y = torch.randn(32, 6, generator=generator)
    record = recording_of(x, y, x_query, WAYS["softmax"](x, y, x_query))
    state = {name: tensor.clone() for name, tensor in STATE.items()}
    checkpoint = read_proven(state, [record], Hints(n_heads=2))
    state["attn.v_proj.weight"].zero_()
    assert checkpoint.proven["model.score"] == "softmax"
    torch.testing.assert_close(checkpoint.weights.OV, HEADS.OV)
    with pytest.raises(NotUnderstoodError, match="no reading gives"):
        read_proven(state, [record], Hints(n_heads=2))


def test_what_is_known_stated_and_assumed_is_said(tmp_path: Path):
    checkpoint = load(saved(tmp_path, softmax_paper_state(random_heads())))
    assert checkpoint.known["model.score"] == "softmax"
    assert not {name for name in checkpoint.assumed if name.startswith("model.")}
    checkpoint = load(saved(tmp_path, STATE), n_heads=2, score="softmax", scale=0.5)
    assert checkpoint.stated == {"model.score": "softmax", "model.scale": 0.5}
    assert {"model.columns", "model.sign"} <= checkpoint.assumed.keys()
    words = checkpoint.in_words
    places = [
        words.index(ground)
        for ground in ("; assumed: ", "stated: score, scale", "known: ", "format ")
    ]
    assert places == sorted(places)  # what may be wrong comes first
    for one, other in (("known", "assumed"), ("stated", "assumed"), ("known", "stated")):
        assert not getattr(checkpoint, one).keys() & getattr(checkpoint, other).keys()


@pytest.mark.slow
def test_commands_take_predictions_of_one_file(tmp_path: Path, run: Run):
    file, batch = saved(tmp_path, STATE), recording(tmp_path, WAYS["softmax"])
    options = ("--n-heads", 2, "--predictions", batch)
    document = run("classify", file, *options, "--json").done().document[0]
    assert document["proven"]["model.score"] == "softmax"
    assert document["pattern"] == classify(load(file, n_heads=2, predictions=batch)).label
    other = recording(
        tmp_path, partial(attention, state=STATE, score="softmax", factor=2.0), length=6
    )
    run("classify", file, "--n-heads", 2, "--predictions", other).assert_refused("R² =", "--output-scale 2")  # fmt: skip
    twin = file.rename(tmp_path / "one.pt"), saved(tmp_path, STATE).rename(tmp_path / "two.pt")
    run("classify", *twin, *options).assert_refused("one file", "--predictions")
