"""Layers with norms, MLPs, positions and ends under names of the table, made from models whose predictions are known."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mechinterp.analysis.circuits.patterns import Classification, classify
from mechinterp.checkpoints.errors import CheckpointError
from mechinterp.checkpoints.hints import Hints
from mechinterp.checkpoints.loading import load
from mechinterp.checkpoints.named_layers import read_named_layers
from mechinterp.checkpoints.names import layout_of
from mechinterp.checkpoints.native import Checkpoint
from mechinterp.config import ModelConfig
from mechinterp.icl.prompts import sample_prompts
from mechinterp.models.weights import Weights, tensor_shapes
from tests.checkpoints.wild_files import LAYOUTS, State

SHIPPED = Path(__file__).parents[2] / "checkpoints"
SPELLINGS = {
    "minGPT": {
        "attn": "blocks.{l}.attn.{x}.weight",
        "q": "query",
        "k": "key",
        "v": "value",
        "o": "proj",
        "norm1": "blocks.{l}.ln1",
        "norm2": "blocks.{l}.ln2",
        "mlp_in": "blocks.{l}.mlp.0",
        "mlp_out": "blocks.{l}.mlp.2",
        "final": "ln_f",
        "positions": "pos_emb",
    },
    "encoder": {
        "attn": "layers.{l}.self_attn.{x}.weight",
        "q": "q_proj",
        "k": "k_proj",
        "v": "v_proj",
        "o": "o_proj",
        "norm1": "layers.{l}.norm1",
        "norm2": "layers.{l}.norm2",
        "mlp_in": "layers.{l}.linear1",
        "mlp_out": "layers.{l}.linear2",
        "final": "norm",
        "positions": "pos_embedding",
    },
}


def random_weights(model: ModelConfig, seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    shapes = tensor_shapes(model, 3, 1)
    found = {n: torch.randn(s, generator=generator) / 2 for n, s in shapes.items()}
    return Weights(model, 3, 1, found)


def written(weights: Weights, names: dict[str, str], *, packed: bool = False) -> State:
    """The weights under somebody's names, matrices as torch.nn.Linear holds them."""
    t, state = weights.tensors, {}

    def linear(name: str, W: Tensor, b: Tensor | None) -> None:
        state[f"{name}.weight"] = W.T.contiguous()
        if b is not None:
            state[f"{name}.bias"] = b

    for number in range(weights.n_layers):
        at = f"blocks.{number}"
        rows = {}
        for x in "QKV":
            rows[x.lower()] = t[f"{at}.attn.W_{x}"].mT.flatten(0, 1)
        rows["o"] = t[f"{at}.attn.W_O"].flatten(0, 1).T
        if packed:
            rows = {"c_attn": torch.cat([rows[x] for x in "qkv"]), "c_proj": rows["o"]}
        for x, matrix in rows.items():
            spelled = names["attn"].format(l=number, x=names.get(x, x))
            state[spelled] = matrix.contiguous()
            if weights.model.biases:
                biases = {x: t[f"{at}.attn.b_{x.upper()}"].flatten() for x in "qkvo"}
                biases |= {"c_attn": torch.cat([biases[x] for x in "qkv"]), "c_proj": biases["o"]}
                state[spelled.replace("weight", "bias")] = biases[x]
        for norm, here in (("norm1", "ln1"), ("norm2", "ln2")):
            if f"{at}.{here}.w" in t:
                name = names[norm].format(l=number)
                state |= {
                    f"{name}.weight": t[f"{at}.{here}.w"],
                    f"{name}.bias": t[f"{at}.{here}.b"],
                }
        if weights.model.d_mlp is not None:
            for part, here in (("mlp_in", "in"), ("mlp_out", "out")):
                bias = t.get(f"{at}.mlp.b_{here}")
                linear(names[part].format(l=number), t[f"{at}.mlp.W_{here}"], bias)
    if weights.model.final_norm:
        state |= {f"{names['final']}.{k}": t[f"ln_final.{k[0]}"] for k in ("weight", "bias")}
    if weights.model.n_positions is not None:
        state[names["positions"]] = t["pos_embed.W_pos"][None]
    if weights.model.d_model is not None:
        linear("read_in", t["W_in"], t.get("b_in"))
        linear("read_out", t["unembed.W_U"], t.get("unembed.b_U"))
    return state


MODELS = {
    "GPT": ModelConfig(
        n_layers=2, n_heads=2, d_head=4, d_model=8, d_mlp=16, norm="before", final_norm=True,
        biases=True, attend_to_self=True, layout="in_turn", n_positions=30, activation="gelu",
    ),
    "no norms": ModelConfig(
        n_layers=2, n_heads=2, d_head=4, d_model=8, d_mlp=16, biases=True, attend_to_self=True,
    ),
    "no positions, no biases": ModelConfig(
        n_layers=1, n_heads=2, d_head=4, d_model=8, d_mlp=16, norm="after", attend_to_self=True,
    ),
    "no MLPs": ModelConfig(n_layers=3, n_heads=2, d_head=4, d_model=8, score="linear/L"),
}  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("names", SPELLINGS)
@pytest.mark.parametrize("model", MODELS)
def test_layers_predict_as_they_did(model: str, names: str, packed: bool):
    weights = random_weights(MODELS[model])
    state = written(weights, SPELLINGS[names], packed=packed)
    config = weights.model
    settings = {"n_heads": 2, "activation": config.activation, "layout": config.layout}
    settings |= {"residual": True, "norm_first": config.norm == "before"}
    hints = Hints(score=config.score, attend_to_self=config.attend_to_self)
    layout = layout_of(state)
    assert not layout.unknown
    found = read_named_layers(state, layout, Path("x.pt"), hints=hints, settings=settings)
    assert "readings" not in found.assumed
    prompts = sample_prompts(found.task, 16, seed=0, dtype=torch.float32)
    true = Checkpoint(Path("y"), found.config, 0, weights).predictor.run(prompts, [[]])
    torch.testing.assert_close(found.predictor.run(prompts, [[]]), true, rtol=1e-5, atol=1e-5)


def behind_an_mlp(name: str) -> State:
    """A shipped model's heads as modules, and behind them an MLP that is linear in effect: relu(R a) - relu(-R a)."""
    weights = load(SHIPPED / name).weights.circuits
    state = LAYOUTS["modules of heads"](weights)
    generator = torch.Generator().manual_seed(0)
    R = torch.linalg.qr(torch.randn(6, 6, generator=generator))[0]
    state |= {"W": torch.cat([R, -R]), "b": torch.zeros(12), "bp": torch.zeros(6)}
    return state | {"Wp": torch.cat([R.T, -R.T], 1)}


@pytest.mark.parametrize(
    ("name", "true"), [("softmax-h1-s0", "kernel_regression"), ("softmax-h2-s0", "debiased_gd")]
)
def test_heads_behind_an_mlp(tmp_path: Path, name: str, true: str):
    torch.save(behind_an_mlp(name), tmp_path / "x.pt")
    found = load(tmp_path / "x.pt", score="softmax")
    assert found.assumed["model.residual"] is False
    assert found.config.model.d_model == 18
    result = classify(found)
    assert isinstance(result, Classification)
    assert result.pattern == true
    assert "R² = 1.000 of the prediction on held-out prompts" in result.reason
    # The loss does not tell the score.
    asked = classify(load(tmp_path / "x.pt"))
    assert asked.pattern == "undetermined"
    assert "--score" in asked.reason


def test_a_curved_mlp_leaves_the_heads_without_labels(tmp_path: Path):
    state = behind_an_mlp("softmax-h2-s0")
    generator = torch.Generator().manual_seed(1)
    state |= {"W": torch.randn(12, 6, generator=generator) * 3}
    state |= {
        "b": torch.randn(12, generator=generator),
        "Wp": torch.randn(6, 12, generator=generator),
    }
    torch.save(state, tmp_path / "x.pt")
    result = classify(load(tmp_path / "x.pt", score="softmax"))
    assert result.pattern == "undetermined"
    assert not isinstance(result, Classification)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn.proj.weight": None}, "an output projection is needed beside"),
        ({"Wp": None}, "an MLP needs both of its matrices, got one"),
        ({"Wp": torch.ones(6)}, "Wp must be a matrix"),
        ({"W": torch.full((12, 6), torch.nan)}, "W must hold finite numbers"),
        ({"mlp.0.weight": torch.ones(12, 6)}, "is a second tensor for mlp_in.weight"),
        ({"read_in.weight": torch.ones(6, 6)}, "a read-in needs a read-out beside it, got none"),
        (
            {"read_out.weight": torch.ones(1, 5)},
            r"read_out.weight must have shape \(6, 1\), got \(5, 1\)",
        ),
    ],
)
def test_parts_that_do_not_fit(tmp_path: Path, changes: dict[str, Tensor | None], words: str):
    state = behind_an_mlp("softmax-h2-s0") | changes
    torch.save({n: t for n, t in state.items() if t is not None}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path / "x.pt")
