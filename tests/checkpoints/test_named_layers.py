"""Layers with norms, MLPs, positions and ends under names of the table, made from models whose predictions are known."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from mechinterp.analysis.one_layer.classification import Classification
from mechinterp.analysis.one_layer.classify import classify
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.foreign.names import ROWS, piece_of
from mechinterp.checkpoints.foreign.options import Hints
from mechinterp.checkpoints.foreign.read import Stored, read_foreign
from mechinterp.checkpoints.foreign.settings import settled
from mechinterp.checkpoints.foreign.tensors import layout_of, parts_of
from mechinterp.config import ModelConfig
from mechinterp.icl.prompts import sample_prompts
from mechinterp.models.constructions.descent import gradient_descent_model
from mechinterp.models.shapes import tensor_shapes
from mechinterp.models.weights import Weights
from tests.checkpoints.files import loaded
from tests.checkpoints.files import read as load
from tests.checkpoints.wild_files import LAYOUTS, State
from tests.conftest import sampled

pytestmark = pytest.mark.usefixtures("small_null")
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
    "nanoGPT": {
        "attn": "transformer.h.{l}.attn.{x}.weight",
        "o": "c_proj",
        "norm1": "transformer.h.{l}.ln_1",
        "norm2": "transformer.h.{l}.ln_2",
        "mlp_in": "transformer.h.{l}.mlp.c_fc",
        "mlp_out": "transformer.h.{l}.mlp.c_proj",
        "final": "transformer.ln_f",
        "positions": "transformer.wpe.weight",
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
    tensors = {n: torch.randn(s, generator=generator) / 2 for n, s in shapes.items()}
    return Weights.of_names(model, 3, 1, tensors)


def written(weights: Weights, names: dict[str, str], *, packed: bool = False) -> State:
    """The weights under somebody's names, matrices as torch.nn.Linear holds them."""
    t, state = weights.by_name, {}

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
        W_pos = t["pos_embed.W_pos"]
        state[names["positions"]] = W_pos if "wpe" in names["positions"] else W_pos[None]
    if weights.model.d_model is not None:
        if "W_read" in t:
            linear("_read_in.0", t["W_read"], t.get("b_read"))
        linear("_read_in.2" if "W_read" in t else "_read_in", t["W_in"], t.get("b_in"))
        linear("_read_out", t["unembed.W_U"], t.get("unembed.b_U"))
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
    "two layers read in": ModelConfig(
        n_layers=1, n_heads=2, d_head=4, d_model=8, d_mlp=16, norm="before", biases=True,
        attend_to_self=True, layout="in_turn", d_read_in=5, activation="gelu",
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
    settings |= {"context_only": config.context_only, "positions": "none"}
    joins = {"norm": config.norm or "none", "passes": 1}
    hints = Hints(score=config.score, attend_to_self=config.attend_to_self, scale=0.5, model=joins)
    checkpoint = read_foreign([Stored(Path("x.pt"), state, settled(settings))], hints)
    assert checkpoint.format == "named-layers"
    assert len(checkpoint.readings) <= 1
    prompts = sample_prompts(checkpoint.task, 16, seed=0, dtype=torch.float32)
    true = Checkpoint(Path("y"), checkpoint.config, 0, weights).predictor.run(prompts, [[]])
    torch.testing.assert_close(checkpoint.predictor.run(prompts, [[]]), true, rtol=1e-5, atol=1e-5)


PARTS = {
    **{"norm1": "norm1", "norm2": "norm2", "mlp_in": "mlp_in", "mlp_out": "mlp_out"},
    **{"final_norm": "final", "positions": "positions"},
}


@pytest.mark.parametrize("part", PARTS)
def test_every_spelling_of_what_lies_around(part: str):
    weights, names = random_weights(MODELS["GPT"]), SPELLINGS["nanoGPT"]
    hints = {"axes": "out,in", "hints": Hints(n_heads=2), "settings": {}}
    state = written(weights, names)
    true = parts_of(state, layout_of(state), **hints)
    for spelling in ROWS[part]:
        layer = "" if part in ("final_norm", "positions") else "blocks.{l}."
        renamed = names | {PARTS[part]: f"{layer}{spelling}"}
        state = written(weights, renamed)
        layout = layout_of(state)
        assert not layout.unknown, spelling
        parts = parts_of(state, layout, **hints)
        for one, other in zip((*true.layers, true.ends), (*parts.layers, parts.ends), strict=True):
            assert one.keys() == other.keys(), spelling
            assert all(torch.equal(one[name], other[name]) for name in one), spelling


@pytest.mark.parametrize("part", ["read_mlp", "read_in", "read_out", "words", "o"])
def test_every_spelling_of_the_ends(part: str):
    for spelling in ROWS[part]:
        for name in (f"{spelling}.weight", f"net.{spelling}.weight", f"net/{spelling}/w"):
            piece = piece_of(name)
            assert piece is not None, name
            assert (piece.part, piece.kind) == (part, "weight"), name


def by_columns(state: State) -> State:
    """Matrices of layers [in, out], as Conv1D of GPT-2 holds them."""
    inside = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    return {n: t.T.contiguous() if n.endswith(inside) else t for n, t in state.items()}


def require_same_predictions(file: Path, weights: Weights, **hints: object) -> Checkpoint:
    checkpoint = load(file, scale=0.5, score="softmax", attend_to_self=True, n_heads=2, **hints)
    prompts = sample_prompts(checkpoint.task, 16, seed=0, dtype=torch.float32)
    true = Checkpoint(Path("y"), checkpoint.config, 0, weights).predictor.run(prompts, [[]])
    torch.testing.assert_close(checkpoint.predictor.run(prompts, [[]]), true, rtol=1e-5, atol=1e-5)
    return checkpoint


JOINED = {"norm": "before", "activation": "gelu", "layout": "in_turn"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "biases", "conv1d"),
    [
        *(("before", True, False), ("before", False, False), ("before", False, True)),
        *((None, True, False), (None, True, True)),
    ],
)
def test_nano_gpt(tmp_path: Path, norm: str | None, biases: bool, conv1d: bool):
    """With a head for words beside the read-out, and with all in one matrix of either orientation."""
    model = replace(MODELS["GPT"], norm=norm, biases=biases, final_norm=norm is not None)
    weights = random_weights(model)
    state = written(weights, SPELLINGS["nanoGPT"], packed=True)
    state = by_columns(state) if conv1d else state
    words = {n: torch.ones(50, 8) for n in ("transformer.wte.weight", "lm_head.weight")}
    masks = {"transformer.h.0.attn.bias": torch.ones(1, 1, 9, 9).tril()}
    torch.save(words | state | masks, tmp_path / "x.pt")
    joined = JOINED | {"norm": norm or "none", "passes": 1}
    readings = require_same_predictions(tmp_path / "x.pt", weights, model=joined).readings
    assert [each.said for each in readings] == [{}]  # nothing is left open
    # Without a read-out of its own the head for words is one.
    state = {n.replace("_read_out", "lm_head"): t for n, t in state.items()}
    torch.save(state, tmp_path / "x.pt")
    require_same_predictions(tmp_path / "x.pt", weights, model=joined)


@pytest.mark.slow
def test_positions_that_are_not_learned(tmp_path: Path):
    table = torch.tensor(
        [
            [(math.sin, math.cos)[i % 2](t / 10000 ** (i // 2 * 2 / 8)) for i in range(8)]
            for t in range(30)
        ]
    )
    weights = random_weights(MODELS["GPT"])
    weights = weights.with_tensors({"pos_embed.W_pos": table})
    state = written(weights, SPELLINGS["minGPT"])
    del state["pos_emb"]
    torch.save(state, tmp_path / "x.pt")
    joined = JOINED | {"positions": "sinusoidal", "passes": 1}
    hints = {"n_heads": 2, "task": {"context_length": 14}, "score": "softmax"}
    checkpoint = load(tmp_path / "x.pt", model=joined, attend_to_self=True, **hints)
    assert checkpoint.config.model.n_positions == 512
    W_pos = checkpoint.weights.tensors["pos_embed.W_pos"]
    torch.testing.assert_close(W_pos[:30], table)
    torch.save(state | {"pos_encoder.pe": table[:, None]}, tmp_path / "x.pt")
    require_same_predictions(tmp_path / "x.pt", weights, model=JOINED)
    bare = random_weights(replace(MODELS["GPT"], n_positions=None))
    torch.save(written(bare, SPELLINGS["minGPT"]), tmp_path / "x.pt")
    require_same_predictions(tmp_path / "x.pt", bare, model=JOINED | {"positions": "none"})


@pytest.mark.slow
def test_positions_that_the_file_does_not_say_are_tried(tmp_path: Path):
    bare = random_weights(replace(MODELS["GPT"], n_positions=None))
    torch.save(written(bare, SPELLINGS["minGPT"]), tmp_path / "x.pt")
    asked = load(tmp_path / "x.pt", n_heads=2, model=JOINED, score="softmax")
    assert {each.said["positions"] for each in asked.readings} == {"none", "sinusoidal"}


def descent_in_haiku(positions: int = 0) -> State:
    """Two steps of gradient descent, minus the prediction being kept in the y entry, with columns of positions."""
    model = gradient_descent_model([0.6, 0.5], d_x=3)
    stacks = {"query": model.W_Q * model.scale, "key": model.W_K, "value": model.W_V}
    state = {}
    for name, stack in (stacks | {"linear": model.W_O}).items():
        for layer, (W,) in enumerate(stack.float()):
            path = f"transformer/~trans_block/layer_{layer}/{name}"
            state[f"{path}/w"] = pad(W, (0, positions, 0, positions))
    return state


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("positions", sampled([0, 2], keep=lambda positions: positions == 2))
def test_several_layers_in_haiku(tmp_path: Path, positions: int):
    torch.save(descent_in_haiku(positions), tmp_path / "x.pt")
    task = {"noise_var": 0.0, "context_length": 20}
    hints = {"n_heads": 1, "task": task, "d_x": 3, "d_y": 1, "scale": 1.0}
    asked = load(tmp_path / "x.pt", **hints)
    assert asked.assumed["model.sign"] == "minus"
    assert asked.assumed.get("model.position_columns_left_out", 0) == positions
    joined = {"context_only": True, "positions": "none", "passes": 1, "norm": "none"}
    told = load(tmp_path / "x.pt", score="linear/L", model=joined, attend_to_self=False, **hints)
    assert len(told.readings) == (3 if positions else 2)
    assert told.assumed["model.sign"] == "minus"
    assert classify(told, n_prompts=64).pattern == "gradient_descent"


@pytest.mark.slow
def test_the_score_of_several_layers_is_asked_for(tmp_path: Path):
    torch.save(descent_in_haiku(), tmp_path / "x.pt")
    task = {"noise_var": 0.0, "context_length": 20}
    result = classify(load(tmp_path / "x.pt", n_heads=1, scale=1.0, task=task), n_prompts=64)
    assert result.pattern in ("gradient_descent", "undetermined")
    assert result.pattern == "gradient_descent" or "--score" in result.reason


@pytest.mark.slow
def test_axes_of_bare_matrices_of_layers_are_tried(tmp_path: Path):
    state = descent_in_haiku()
    names = {"query": "W_q", "key": "W_k", "value": "W_v", "linear": "W_o"}
    turned = {
        f"layers.{layer}.{names[name]}": state[f"transformer/~trans_block/layer_{layer}/{name}/w"].T
        for layer in range(2)
        for name in names
    }
    generator = torch.Generator().manual_seed(0)
    R = torch.linalg.qr(torch.randn(4, 4, generator=generator))[0]
    for layer in range(2):  # a basis of the head's own, so that turned matrices are another model
        for name in ("W_q", "W_k"):
            turned[f"layers.{layer}.{name}"] = R @ turned[f"layers.{layer}.{name}"]
    torch.save(turned, tmp_path / "x.pt")
    hints = {"n_heads": 1, "scale": 1.0, "score": "linear/L", "attend_to_self": False}
    checkpoint = load(tmp_path / "x.pt", model={"context_only": True}, **hints)
    assert checkpoint.assumed["model.orientation"] == "out,in"
    assert checkpoint.readings[0].loss < 0.5


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_factor_on_the_output_of_layers(tmp_path: Path):
    state = descent_in_haiku()
    torch.save({n: t * (10 if "linear" in n else 1) for n, t in state.items()}, tmp_path / "x.pt")
    hints = {"n_heads": 1, "scale": 1.0, "score": "linear/L", "attend_to_self": False}
    hints |= {"model": {"context_only": True}, "sign": "minus", "task": {"noise_var": 0.0}}
    assert classify(load(tmp_path / "x.pt", **hints), n_prompts=64).pattern != "gradient_descent"
    told = load(tmp_path / "x.pt", output_scale=0.1, **hints)
    assert classify(told, n_prompts=64).pattern == "gradient_descent"


def test_two_norms_without_an_mlp(tmp_path: Path):
    weights = random_weights(replace(MODELS["GPT"], n_positions=None, d_mlp=None))
    state = written(weights, SPELLINGS["minGPT"])
    ones = {f"blocks.{layer}.ln2.weight": torch.ones(8) for layer in range(2)}
    torch.save(state | ones, tmp_path / "x.pt")
    joined = {"positions": "none", "norm": "before", "layout": "in_turn", "activation": "relu"}
    require_same_predictions(tmp_path / "x.pt", weights, model=joined)


def behind_an_mlp(name: str) -> State:
    """A shipped model's heads as modules, and behind them an MLP that is linear in effect: relu(R a) - relu(-R a)."""
    weights = load(SHIPPED / name).weights.circuits
    state = LAYOUTS["modules of heads"](weights)
    generator = torch.Generator().manual_seed(0)
    R = torch.linalg.qr(torch.randn(6, 6, generator=generator))[0]
    state |= {"W": torch.cat([R, -R]), "b": torch.zeros(12), "bp": torch.zeros(6)}
    return state | {"Wp": torch.cat([R.T, -R.T], 1)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "true"), [("softmax-h1-s0", "kernel_regression"), ("softmax-h2-s0", "debiased_gd")]
)
def test_heads_behind_an_mlp(tmp_path: Path, name: str, true: str):
    checkpoint = loaded(tmp_path, behind_an_mlp(name), score="softmax", attend_to_self=False)
    assert checkpoint.assumed["model.residual"] is False
    assert checkpoint.config.model.d_model == 18
    result = classify(checkpoint, n_prompts=64)
    assert isinstance(result, Classification)
    assert result.pattern == true
    assert "R² = 1.000 of the prediction on held-out prompts" in result.reason
    # The loss does not tell the score.
    asked = classify(load(tmp_path / "x.pt", attend_to_self=False), n_prompts=64)
    assert asked.pattern == "undetermined"
    assert "--score" in asked.reason


@pytest.mark.slow
def test_a_curved_mlp_leaves_the_heads_without_labels(tmp_path: Path):
    state = behind_an_mlp("softmax-h2-s0")
    generator = torch.Generator().manual_seed(1)
    state |= {"W": torch.randn(12, 6, generator=generator) * 3}
    state |= {
        "b": torch.randn(12, generator=generator),
        "Wp": torch.randn(6, 12, generator=generator),
    }
    checkpoint = loaded(tmp_path, state, score="softmax", attend_to_self=False)
    result = classify(checkpoint, n_prompts=64)
    assert result.pattern == "undetermined"
    assert not isinstance(result, Classification)
