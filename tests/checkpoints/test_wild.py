"""Files as other people write them, made from models whose label is known: the true label, or what decides."""

from functools import cache
from pathlib import Path

import pytest
import torch

from mechinterp.analysis.circuits.patterns import classify
from mechinterp.checkpoints.errors import CheckpointError
from mechinterp.checkpoints.loading import load
from mechinterp.checkpoints.named_matrices import attention_matrices
from mechinterp.checkpoints.names import layout_of
from mechinterp.models.functional import AttentionWeights
from tests.checkpoints.wild_files import LAYOUTS, State, linear_layers, matrices

SHIPPED = Path(__file__).parents[2] / "checkpoints"
MODELS = ("softmax-h1-s0", "softmax-h2-s0", "linear-h1-s0", "two-tasks-h2-s0")


@cache
def known(name: str) -> tuple[AttentionWeights, str]:
    """The heads of a shipped model and its label; of linear ones with the scale of the scores in W_Q."""
    checkpoint = load(SHIPPED / name)
    return checkpoint.weights.circuits, classify(checkpoint, n_prompts=256).pattern


def save(state: State, folder: Path) -> Path:
    torch.save(state, folder / "x.pt")
    return folder / "x.pt"


def require_true_or_asked(file: Path, name: str, **hints: object) -> None:
    """The true label, or none, with an option that decides; with all options the true one."""
    weights, true = known(name)
    task = load(SHIPPED / name).task
    sizes = {"n_heads": weights.n_heads, "d_y": weights.d_y}
    found = classify(load(file, **sizes), n_prompts=256)
    assert found.pattern in (true, "undetermined"), found.reason
    assert found.pattern == true or "--" in found.reason, found.reason
    said = {"score": weights.score, "scale": weights.scale, "columns": "x,y", "sign": "plus"}
    said |= {"attend_to_self": weights.attend_to_self, **sizes, **hints}
    told = load(file, task={"context_length": task.context_length}, **said)
    torch.testing.assert_close(told.weights.circuits.QK, weights.QK)
    torch.testing.assert_close(told.weights.circuits.OV, weights.OV)
    assert classify(told, task, n_prompts=256).pattern == true


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_spelling(layout: str):
    """Every row of the table of names leads to the same matrices."""
    weights, _ = known("softmax-h2-s0")
    state = LAYOUTS[layout](weights)
    layout_found = layout_of(state)
    assert layout_found.attention_alone
    assert layout_found.has_attention
    assert layout_found.open_axes is layout.startswith("parameters")
    axes = "in,out" if layout == "parameters [in, out]" else "out,in"
    (layer,) = layout_found.layers
    found, n_heads = attention_matrices(layer, state, Path("x.pt"), axes=axes)
    apart = layout == "flax" or layout.partition(",")[0].endswith("heads")
    assert n_heads == (2 if apart and "output unify" not in layout else None)
    names = {"query": "q", "key": "k", "value": "v", "out": "o"}
    true = matrices(weights)
    assert {n.removesuffix(".weight") for n in found} == set(names)
    for name, x in names.items():
        sign = -1 if layout == "haiku" and x == "o" else 1
        assert torch.equal(found[f"{name}.weight"], sign * true[x]), name


KINDS = (
    "modules {x}_proj",
    "parameters [in, out]",
    "modules of heads",
    "outputs of heads",
    "haiku",
)


@pytest.mark.parametrize("layout", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model(tmp_path: Path, name: str, layout: str):
    weights, _ = known(name)
    said = {"parameters [in, out]": {"orientation": "in,out"}, "haiku": {"sign": "minus"}}
    file = save(LAYOUTS[layout](weights), tmp_path)
    require_true_or_asked(file, name, **said.get(layout, {}))


def test_orientation_and_sign_are_told_by_the_loss(tmp_path: Path):
    for layout, option, value in (
        ("parameters [in, out]", "orientation", "in,out"),
        ("parameters [out, in]", "orientation", "out,in"),
        ("haiku", "sign", "minus"),
    ):
        weights, _ = known("softmax-h2-s0")
        file = save(LAYOUTS[layout](weights), tmp_path)
        found = load(file, score="softmax", n_heads=2)
        assert found.assumed[f"model.{option}"] == value
        torch.testing.assert_close(found.weights.circuits.OV, weights.OV)


def test_a_row_for_one_run(tmp_path: Path):
    weights, _ = known("softmax-h2-s0")
    state = linear_layers("to_{x}", "to_out")(weights)
    renamed = {n.replace("to_", "mine_"): t for n, t in state.items()}
    file = save(renamed, tmp_path)
    with pytest.raises(CheckpointError, match=r"--map"):
        load(file, n_heads=2)
    rows = [f"mine_{x}=to_{x}" for x in ("q", "k", "v", "out")]
    found = load(file, n_heads=2, score="softmax", map=rows)
    torch.testing.assert_close(found.weights.circuits.QK, weights.QK)
    with pytest.raises(CheckpointError, match="map must name a part of a tensor's name, got 'a=b'"):
        load(file, n_heads=2, map=["a=b"])
    with pytest.raises(CheckpointError, match="map must keep the names apart"):
        load(file, n_heads=2, map=["mine_q=mine_k"])
    with pytest.raises(ValueError, match="map must hold rows THEIRS=KNOWN, got 'mine_q'"):
        load(file, n_heads=2, map=["mine_q"])


def test_columns_of_positions_are_left_out_and_named(tmp_path: Path):
    weights, true = known("softmax-h2-s0")
    state = LAYOUTS["haiku"](weights)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in state.items():
        axis = 1 if "linear" in name else 0
        extra = 1e-3 * torch.randn(4, 12, generator=generator)
        state[name] = torch.cat([tensor, extra.T if axis else extra], axis)
    file = save(state, tmp_path)
    found = load(file, d_x=5, d_y=1, n_heads=2, score="softmax")
    assert found.assumed["model.position_columns_left_out"] == 4
    assert 0 < found.assumed["model.position_columns_share"] < 0.05
    assert classify(found, n_prompts=256).pattern == true
