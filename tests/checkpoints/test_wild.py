"""Files as other people write them, made from models whose label is known: the true label, or what decides."""

from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import Tensor

from mechinterp.analysis.one_layer.classify import classify
from mechinterp.checkpoints.foreign.tensors import attention_matrices, layout_of
from mechinterp.checkpoints.io.errors import CheckpointError
from mechinterp.models.heads import AttentionWeights
from tests.checkpoints.files import assert_refused, assert_same_circuits, loaded, saved
from tests.checkpoints.files import read as load
from tests.checkpoints.foreign_files import random_heads
from tests.checkpoints.wild_files import LAYOUTS, linear_layers, matrices
from tests.conftest import sampled

pytestmark = pytest.mark.usefixtures("small_null")
N_PROMPTS = 64
SHIPPED = Path(__file__).parents[2] / "checkpoints"
MODELS = ("softmax-h1-s0", "softmax-h2-s0", "linear-h1-s0", "two-tasks-h2-s0")


@cache
def known(name: str) -> tuple[AttentionWeights, str]:
    """The heads of a shipped model and its label; of linear ones with the scale of the scores in W_Q."""
    checkpoint = load(SHIPPED / name)
    return checkpoint.weights.circuits, classify(checkpoint, n_prompts=N_PROMPTS).pattern


def require_true_or_asked(file: Path, name: str, **hints: object) -> None:
    """The true label, or none, with an option that decides; with all options the true one."""
    weights, true = known(name)
    task = load(SHIPPED / name).task
    sizes = {"n_heads": weights.n_heads, "d_y": weights.d_y}
    result = classify(load(file, **sizes), n_prompts=N_PROMPTS)
    assert result.pattern in (true, "undetermined"), result.reason
    assert result.pattern == true or "--" in result.reason, result.reason
    # No option says a slope of linear scores; that of the shipped model is 1/L.
    score = {"linear": "linear/L"}.get(weights.score, weights.score)
    stated = {"score": score, "scale": weights.scale, "columns": "x,y", "sign": "plus"}
    stated |= {"attend_to_self": weights.attend_to_self, **sizes, **hints}
    told = load(file, task={"context_length": task.context_length}, **stated)
    assert_same_circuits(told.weights.circuits, weights)
    assert classify(told, task, n_prompts=N_PROMPTS).pattern == true


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_spelling(layout: str):
    """Every row of the table of names leads to the same matrices."""
    weights, _ = known("softmax-h2-s0")
    state = LAYOUTS[layout](weights)
    layout_found = layout_of(state)
    assert not layout_found.ends
    assert not layout_found.unknown
    assert not layout_found.lacking
    assert layout_found.open_axes is layout.startswith("parameters")
    axes = "in,out" if layout == "parameters [in, out]" else "out,in"
    (layer,) = layout_found.layers
    read = attention_matrices(layer, state, axes)
    apart = layout == "flax" or layout.partition(",")[0].endswith("heads")
    shown = {matrix.n_heads for matrix in read.values()} - {None}
    assert shown == ({2} if apart and "output unify" not in layout else set())
    names = {"query": "q", "key": "k", "value": "v", "out": "o"}
    true = matrices(weights)
    assert {n.removesuffix(".weight") for n in read} == set(names)
    for name, x in names.items():
        sign = -1 if layout == "haiku" and x == "o" else 1
        assert torch.equal(read[f"{name}.weight"].tensor.T, sign * true[x]), name


KINDS = (
    "modules {x}_proj",
    "parameters [in, out]",
    "modules of heads",
    "outputs of heads",
    "haiku",
)


RARE = dict.fromkeys(MODELS, (pytest.mark.slow,)) | {
    MODELS[3]: (pytest.mark.slow, pytest.mark.exhaustive)
}
LIGHT = {"softmax-h2-s0": (KINDS[0], KINDS[-1]), MODELS[2]: KINDS[:1]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if layout in LIGHT.get(name, ()) else RARE[name])
        for name in MODELS
        for layout in KINDS
    ],
)
def test_every_kind_of_model(tmp_path: Path, name: str, layout: str):
    weights, _ = known(name)
    options = {"parameters [in, out]": {"orientation": "in,out"}, "haiku": {"sign": "minus"}}
    file = saved(tmp_path, LAYOUTS[layout](weights))
    require_true_or_asked(file, name, **options.get(layout, {}))


def standing(file: Path, name: str) -> list[tuple[str, bool, Tensor, Tensor]]:
    """Score, self-attention and circuits of the readings on which the label rests."""
    weights, _ = known(name)
    checkpoint = load(file, n_heads=weights.n_heads, d_y=weights.d_y)
    heads = [each.weights.circuits for each in checkpoint.readings if each.stands]
    return [(w.score, w.attend_to_self, w.QK, w.OV) for w in heads]


@cache
def under_usual_names(name: str) -> list[tuple[str, bool, Tensor, Tensor]]:
    with TemporaryDirectory() as folder:
        return standing(saved(Path(folder), LAYOUTS["modules {x}_proj"](known(name)[0])), name)


ONE_OF_A_KIND = {layout.split()[0]: layout for layout in LAYOUTS}.values()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    sampled(
        product(MODELS, LAYOUTS),
        keep=lambda case: case[0] == MODELS[2] and case[1] in ONE_OF_A_KIND,
    ),
)
def test_the_label_rests_on_the_same_under_all_names(tmp_path: Path, name: str, layout: str):
    true = under_usual_names(name)
    rivals = standing(saved(tmp_path, LAYOUTS[layout](known(name)[0])), name)
    assert len(rivals) == len(true)
    for one, other in zip(true, rivals, strict=True):
        assert one[:2] == other[:2]
        torch.testing.assert_close(one[2:], other[2:])


def test_readings_that_are_one_model_count_once(tmp_path: Path):
    """Where d_head is 1 both scales are one, and with symmetric matrices both orientations."""
    heads = random_heads(n_heads=2, d_head=1)
    file = saved(tmp_path, LAYOUTS["modules {x}_proj"](heads))
    checkpoint = load(file, n_heads=2, score="softmax", columns="x,y", sign="plus")
    assert [each.said["attend_to_self"] for each in checkpoint.readings] in (
        [True, False],
        [False, True],
    )
    symmetric = {f"W{x}": torch.diag(torch.tensor([1.0, 2, 3, 4])) for x in "qkvo"}
    hints = {"score": "softmax", "columns": "x,y", "sign": "plus", "attend_to_self": False}
    checkpoint = loaded(tmp_path, symmetric, n_heads=1, scale=1.0, **hints)
    assert len(checkpoint.readings) == 1


@pytest.mark.slow
def test_a_factor_on_the_output(tmp_path: Path):
    """Code that multiplies what attention adds keeps larger matrices."""
    weights, true = known("linear-h1-s0")
    task = load(SHIPPED / "linear-h1-s0").task
    state = LAYOUTS["modules {x}_proj"](weights)
    state["attn.out_proj.weight"] = state["attn.out_proj.weight"] * 10
    file = saved(tmp_path, state)
    hints = {"n_heads": 1, "score": weights.score, "scale": weights.scale, "columns": "x,y"}
    hints |= {"task": {"context_length": task.context_length}, "score_slope": weights.score_slope}
    unread = classify(load(file, **hints), n_prompts=64)
    assert unread.pattern == "undetermined"
    assert "--output-scale" in unread.reason
    told = load(file, output_scale=0.1, **hints)
    torch.testing.assert_close(told.weights.circuits.OV, weights.OV)
    assert classify(told, task, n_prompts=64).pattern == true


def test_how_layers_are_joined_is_not_said_of_attention_alone(tmp_path: Path):
    file = saved(tmp_path, LAYOUTS["modules {x}_proj"](known("linear-h1-s0")[0]))
    with pytest.raises(CheckpointError, match=r"model \(norm\) needs layers with norms or MLPs"):
        load(file, n_heads=1, model={"norm": "before"})


@pytest.mark.slow
def test_orientation_and_sign_are_told_by_the_loss(tmp_path: Path):
    for layout, option, value in (
        ("parameters [in, out]", "orientation", "in,out"),
        ("parameters [out, in]", "orientation", "out,in"),
        ("haiku", "sign", "minus"),
    ):
        weights, _ = known("softmax-h2-s0")
        file = saved(tmp_path, LAYOUTS[layout](weights))
        checkpoint = load(file, score="softmax", n_heads=2)
        assert checkpoint.assumed[f"model.{option}"] == value
        torch.testing.assert_close(checkpoint.weights.circuits.OV, weights.OV)


@pytest.mark.slow
def test_a_row_for_one_run(tmp_path: Path):
    weights, _ = known("softmax-h2-s0")
    state = linear_layers("to_{x}", "to_out")(weights)
    renamed = {n.replace("to_", "mine_"): t for n, t in state.items()}
    file = saved(tmp_path, renamed)
    assert_refused(r"--map", load, file, n_heads=2)
    rows = [f"mine_{x}=to_{x}" for x in ("q", "k", "v", "out")]
    checkpoint = load(file, n_heads=2, score="softmax", map=rows)
    torch.testing.assert_close(checkpoint.weights.circuits.QK, weights.QK)
    with pytest.raises(
        CheckpointError, match="map must name whole words of a tensor's name, got 'a=b'"
    ):
        load(file, n_heads=2, map=["a=b"])
    assert_refused("map must give different names", load, file, n_heads=2, map=["mine_q=mine_k"])


@pytest.mark.slow
def test_columns_of_positions_are_left_out_and_named(tmp_path: Path):
    weights, true = known("softmax-h2-s0")
    state = LAYOUTS["haiku"](weights)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in state.items():
        axis = 1 if "linear" in name else 0
        extra = 1e-3 * torch.randn(4, 12, generator=generator)
        state[name] = torch.cat([tensor, extra.T if axis else extra], axis)
    checkpoint = loaded(tmp_path, state, d_x=5, d_y=1, n_heads=2, score="softmax")
    assert checkpoint.assumed["model.position_columns_left_out"] == 4
    assert 0 < checkpoint.assumed["model.position_columns_share"] < 0.05
    assert classify(checkpoint, n_prompts=N_PROMPTS).pattern == true
