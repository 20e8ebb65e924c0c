"""Files of models that cannot be, and hints that contradict a file: one line that names the file, the rule and the value.

A refusal that names a tensor offers --map, with all names that are known.
"""

import ast
import math
import re
import traceback
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import mechinterp
from mechinterp.checkpoints.foreign.names import KNOWN
from mechinterp.checkpoints.foreign.options import COLUMNS, Hints
from mechinterp.checkpoints.foreign.read import Stored, read_foreign
from mechinterp.checkpoints.foreign.tensors import TensorError
from mechinterp.checkpoints.io.errors import CheckpointError
from mechinterp.checkpoints.load import FORMATS
from mechinterp.checkpoints.native.exchange import hooked_state
from mechinterp.config import SCORES
from tests.checkpoints.files import read as load
from tests.checkpoints.foreign_files import (
    LAYER_NAMES,
    attention_module,
    linear_layers_state,
    merged_state,
    random_heads,
    separate_state,
    softmax_paper_state,
)
from tests.checkpoints.wild_files import LAYOUTS
from tests.models.test_layered_models import garg

ROOM = Path(mechinterp.__file__).parent / "checkpoints" / "foreign"
State = dict[str, Tensor | None]
ones, zeros = torch.ones, torch.zeros


def layer() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)


def squares(names: str) -> State:
    return {names.format(x=x): ones(4, 4) for x in "qkvo"}


ATTENTION = attention_module(0, width=4, n_heads=2, bias=True)
PAPER = softmax_paper_state(random_heads())
LENS = hooked_state(random_heads(d_head=2), n_ctx=6)
TORCH, ARRAYS = ATTENTION.state_dict(), random_heads().tensors
HEADS = LAYOUTS["modules of heads"](random_heads())
LINEAR, OWN = squares("attn.{x}_proj.weight"), linear_layers_state(ATTENTION, LAYER_NAMES[0])
MERGED = merged_state(ones(2, 4, 4), ones(2, 4, 4))
SEPARATE = separate_state(ones(2, 1, 4), ones(2, 1, 4), ones(2, 4, 4))
ENCODER = nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False).state_dict()
WITH_ENDS = ENCODER | {"read_in.weight": ones(4, 4), "read_out.weight": ones(1, 4)}
GPT2 = {n.removeprefix("_backbone."): t for n, t in garg().state_dict().items()}
BARE = squares("layers.0.W_{x}.weight")
WORDS = {name: tensor for name, tensor in GPT2.items() if "read" not in name}
OLD_LENS = {f"attn_blocks.0.attn.W_{x}": ones(2, 3, 6) for x in "QKV"}
W_K, MASK = "blocks.0.attn.W_K", "blocks.0.attn.mask"

# What a refusal says that names a tensor, and the change of a good file that leads to it.
PAPERS: dict[str, State] = {
    "x_proj.weight is not among the tensors of format softmax": {"x_proj.weight": ones(1)},
    "or names that can be recognised": {"q_proj.weight": None},
    "must hold finite numbers, got 32 NaN": {"v_proj.weight": torch.full((8, 4), torch.nan)},
    "v_proj.weight must hold floating-point numbers": {"v_proj.weight": ones(8, 4).int()},
    "o_proj.weight must have shape (8, 4) as [in, out], got (8, 5)": {"o_proj.weight": ones(5, 8)},
    "q_proj.weight must be a matrix": {"q_proj.weight": ones(8)},
    "q_proj.weight must have 4 rows for each head, got 9": {"q_proj.weight": ones(9, 4)},
}
TORCHS: dict[str, State] = {
    "gates are not read from a file, got gate.weight": {"gate.weight": ones(4)},
    "learned extra keys and values are not read from a file, got bias_k": {"bias_k": ones(1, 1, 4)},
    "a model of word tokens (wte.weight [9, 4])": {"wte.weight": ones(9, 4)},
    "in_proj_weight must have 3 times as many rows": {"in_proj_weight": ones(8, 4)},
    "in_proj_bias must have 3 times as many rows": {"in_proj_bias": ones(4)},
    "out_proj.bias must have one axis": {"out_proj.bias": ones(4, 1, 1)},
    "out_proj.bias must have shape (4,), got (1,)": {"out_proj.bias": ones(1)},
}
LINEARS: dict[str, State] = {
    "to_q.weight stand for the same part": {"to_q.weight": ones(4, 4)},
    "grouped keys (4 rows of queries, 2 of keys)": {"k_proj.weight": ones(2, 4)},
    "k_proj.weight must have shape (4, 4) as [in, out], got (3, 4)": {"k_proj.weight": ones(4, 3)},
    "o_proj.weight must have shape (4, 4) as [in, out], got (4, 5)": {"o_proj.weight": ones(5, 4)},
    "o_proj.bias must have shape (4,), got (3,)": {"o_proj.bias": ones(3)},
}
MERGEDS: dict[str, State] = {
    "kq.weight must have 4 rows for each head, got 6": {"kq.weight": ones(6, 4)},
    "value.weight must have shape (4, 4) as [in, out], got (4, 8)": {"kq.weight": ones(4, 4)},
}
HEADS_APART: dict[str, State] = {
    "must be numbered from 0 on, got attn.heads.1.query": {"0.query.weight": None},
    "must have the shape (4, 4) of the other heads, got (4, 5)": {"1.query.weight": ones(5, 4)},
}
ARRAYS_APART: dict[str, State] = {
    "W_K must have shape (4, 8) as [in, out], got (4, 6)": {"W_K": ones(2, 4, 3)},
    "W_O must have shape (8, 4) as [in, out], got (8, 5)": {"W_O": ones(2, 4, 5)},
    "W_O must have shape (8, 4) as [in, out], got (2, 4)": {"W_O": ones(2, 4)},
    "W_Q must be a matrix, got shape (0, 4, 4)": {"W_Q": ones(0, 4, 4)},
    "W_Q must be a matrix, got shape ()": {"W_Q": torch.tensor(1.0)},
    "b_Q must have shape (8,), got (4,)": {"b_Q": ones(4)},
    "b_O must have shape (1,), got (2,)": {"b_O": ones(2)},
    "W_Q and QK stand for the same part": {"QK": ones(2, 4, 4)},
}
ALONE: dict[str, State] = {
    "QK must have shape (4, 10) as [in, out], got (4, 8)": {
        "QK": ones(2, 4, 5),
        "OV": ones(2, 4, 1),
    },
    "OV must have 1 heads, got 2": {"QK": ones(4, 4), "OV": ones(2, 4, 1)},
    "OV must have shape (4, 8) as [in, out], got (4, 12)": {
        "QK": ones(2, 4, 4),
        "OV": ones(2, 4, 6),
    },
    r"got a, b\x1b[2J\n<b>": {"a": ones(1), "b\x1b[2J\n<b>": ones(1)},
    "mine must hold floating-point numbers": {"mine": ones(4, 4).int()},
    "a model of word tokens (embed.W_E [6, 9])": OLD_LENS | {"embed.W_E": ones(6, 9)},
    "a model of word tokens (wte.weight [50257, 16])": WORDS,
}
OF_ONE_HEAD: dict[str, State] = {
    "an output projection is needed with layers.0.W_q.weight": {
        "layers.0.W_o.weight": None,
        **{f"layers.1.W_{x}.weight": ones(4, 4) for x in "qkv"},
    },
    "state-space models (Mamba) are not read from a file, got layers.0.A_log": {
        "layers.0.A_log": ones(4, 4)
    },
    "(Mamba) are not read from a file, got layers.0.conv1d": {
        "layers.0.conv1d.weight": ones(4, 1, 4)
    },
    "gates are not read from a file, got layers.0.W_g": {"layers.0.W_g": ones(4, 4)},
    "low-rank blocks) are not read from a file, got layers.0.E;": {"layers.0.E": ones(8, 20)},
    "low-rank blocks) are not read from a file, got layers.0.E_": {"layers.0.E_block": ones(8, 20)},
    "features of kernels are not read from a file, got": {
        "layers.0.feature_map.weight": ones(4, 4)
    },
    "recurrent layers are not read from a file, got lstm": {"lstm.weight_ih_l0": ones(4, 4)},
    "relative positions are not read from a file, got attn.rel": {"attn.relative_bias": ones(4, 4)},
    "relative positions are not read from a file, got attn.RPE": {
        "attn.RPE.relative.weight": ones(8, 1)
    },
    "W_q.weight must read tokens of >= 2 entries, got 1": {name: ones(1, 1) for name in BARE},
}
ENCODERS: dict[str, State] = {
    "norm.bias is a bias without a weight": {"norm.bias": ones(4)},
    "must have the same parts, got layers.0.linear1.bias in some": {"layers.1.linear1.bias": None},
    "0.weight stand for the same part": {"layers.0.feed_forward.0.weight": ones(8, 4)},
    "two matrices, got only layers.1.linear1.weight": {"layers.1.linear2.weight": None},
    "layers.0.linear1.weight must be a matrix": {"layers.0.linear1.weight": ones(8)},
    "linear2.weight must have shape (8, 4) as [in, out], got (9, 4)": {
        "layers.1.linear2.weight": ones(4, 9)
    },
    "read_in.weight, a read-in, needs a read-out": {"read_in.weight": ones(4, 4)},
}
ENDS: dict[str, State] = {
    "read_out.weight must have shape (4, 1) as [in, out], got (5, 1)": {
        "read_out.weight": ones(1, 5)
    },
    "two layers needs both, got only read_in.0.weight": {
        "read_in.weight": None,
        "read_in.0.weight": ones(4, 4),
    },
}
GPT2S: dict[str, State] = {
    "wpe.weight must be a matrix, got shape (0, 16);": {"wpe.weight": zeros(0, 16)},
    "wpe.weight must have shape (20, 16), got (20, 9);": {"wpe.weight": zeros(20, 9)},
    "h.0.ln_2.weight must have shape (16,), got (9,);": {"h.0.ln_2.weight": zeros(9)},
    "_read_in.bias must have shape (16,), got (9,);": {"_read_in.bias": zeros(9)},
    r"head\n.weight is not among the tensors of format gpt2;": {"head\n.weight": zeros(0)},
    f"{'h' * 97}... is not among the tensors of format gpt2;": {"h" * 300: zeros(0)},
    "got h.03.ln_1.bias; state its part": {"h.03.ln_1.bias": zeros(0)},
}
LENSES: dict[str, State] = {
    "head.weight is not among the tensors of an attention-only Hooked": {"head.weight": ones(1)},
    "blocks.0.ln1.w is not among the tensors of an attention-only Hooked": {
        "blocks.0.ln1.w": ones(4)
    },
    "W_K must have three axes, head first, got nothing": {W_K: None},
    "W_K must have three axes, head first, got shape": {W_K: ones(4, 2)},
    "W_K must have shape (4, 4) as [in, out], got (4, 6)": {W_K: ones(2, 4, 3)},
    "b_Q must have shape (4,), got (10,)": {"blocks.0.attn.b_Q": ones(2, 5)},
    "embed.W_E must be zero (tokens must be vectors": {"embed.W_E": ones(1, 4)},
    "without added positions), got entries up to 0.5;": {"pos_embed.W_pos": ones(6, 4) / -2},
    "without added positions), got entries up to 1;": {"pos_embed.W_pos": ones(6, 4).bool()},
    "unembed.b_U must be zero (the model has no bias": {"unembed.b_U": ones(1)},
    "W_out must be zero (the model has no MLP)": {"blocks.0.mlp.W_out": ones(20, 4)},
    "at y and zeros elsewhere, got another of shape [4, 1]": {"unembed.W_U": ones(4, 1)},
    "at y and zeros elsewhere, got another of shape [4];": {"unembed.W_U": ones(4)},
    "at y and zeros elsewhere, got another of shape [4, 4]": {"unembed.W_U": torch.eye(4)},
    "mask.tril(-1) or mask.tril(), got another of shape [6, 6]": {MASK: ones(6, 6)},
    "or mask.tril(), got another of shape [9, 9]": {MASK: ones(9, 9).tril(-1).triu(-3)},
    "or mask.tril(), got another of shape [6];": {MASK: ones(6)},
}
NAMED = (
    *(
        (PAPER, "attention_layer.", 2, PAPERS),
        (TORCH, "", 2, TORCHS),
        (LINEAR, "attn.", 2, LINEARS),
    ),
    *((MERGED, "", None, MERGEDS), (HEADS, "attn.heads.", 2, HEADS_APART), ({}, "", None, ALONE)),
    *((ARRAYS, "", None, ARRAYS_APART), (BARE, "", 1, OF_ONE_HEAD), (ENCODER, "", 2, ENCODERS)),
    *((WITH_ENDS, "", 2, ENDS), (GPT2, "", 4, GPT2S), (LENS, "", 2, LENSES)),
)
CHANGED: dict[str, tuple[State, dict[str, object]]] = {
    words: (good | {prefix + name: t for name, t in changes.items()}, {"n_heads": n_heads})
    for good, prefix, n_heads, refused in NAMED
    for words, changes in refused.items()
} | {"a file of format gpt2 must hold h.0.attn.c_attn.weight;": (PAPER, {"format": "gpt2"})}
HOW = (
    "; state its part by --map THEIRS=KNOWN (map=), such as --map my_queries=q_proj, where KNOWN is one of "
    f"{', '.join(KNOWN)}."
)


def refusal(state: State, hints: dict[str, object]) -> CheckpointError:
    tensors = {name: tensor for name, tensor in state.items() if tensor is not None}
    with pytest.raises(CheckpointError) as error:
        read_foreign([Stored(Path("x.pt"), tensors, {})], Hints(**hints))
    assert str(error.value).startswith("x.pt: ")
    return error.value


@pytest.mark.parametrize("words", CHANGED)
def test_a_refusal_that_names_a_tensor_says_how_to_tell_what_it_is(words: str):
    message = str(refusal(*CHANGED[words]))
    assert words in message
    assert message.endswith(HOW) or "--map" not in message


@pytest.mark.slow
def test_the_files_above_reach_every_such_refusal():
    """Wherever a tensor is refused by name, one of them ends there."""
    reached = set()
    for state, hints in CHANGED.values():
        error = refusal(state, hints)
        while error is not None and not isinstance(error, TensorError):
            error = error.__context__
        if error is None:  # a kind of model, or numbers, that no name can help
            continue
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reached.add((Path(frame.filename).name, frame.lineno))
    for file in ROOM.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Raise) and "TensorError" in ast.dump(node):
                lines = range(node.lineno, node.end_lineno + 1)
                assert any((file.name, line) in reached for line in lines), (file.name, lines)


# What a refusal says that names no tensor, the file and the hints.
REFUSED: dict[str, tuple[State, dict[str, object]]] = {
    "n_heads is not stated in the file; give --n-heads (n_heads=).": (OWN, {}),
    "n_heads must divide the width 4, got 3": (OWN, {"n_heads": 3}),
    "n_heads must divide the width 7, got 2": (MERGED | {"value.weight": ones(7, 4)}, {}),
    "n_heads must divide the width 3, got 2": (
        SEPARATE | {"key.weight": ones(3, 4), "query.weight": ones(3, 4)},
        {},
    ),
    "n_heads must be the file's 2, got 3": (PAPER, {"n_heads": 3}),
    "d_x must be the weights' 3, got 2": (PAPER, {"d_x": 2}),
    "d_y must be the weights' 1, got 2": (PAPER, {"d_y": 2}),
    "task.d_x must be the weights' 3, got 2": (PAPER, {"task": {"d_x": 2}}),
    "task.d_x must be the weights' 3, got 1": (PAPER, {"d_x": 3, "task": {"d_x": 1}}),
    "scale must be the file's 0.5, got 1.0": (PAPER, {"scale": 1.0}),
    "attend_to_self must be the file's False, got True": (PAPER, {"attend_to_self": True}),
    "a file of format arrays must hold W_Q, W_K, W_V, W_O or QK": (PAPER, {"format": "arrays"}),
    "must hold self_attn.in_proj_weight and": (TORCH, {"format": "torch-encoder", "n_heads": 2}),
    "format must be one of external files (transformer-lens, ": (PAPER, {"format": "native"}),
    "Unknown field 'task.noise'; known: ": (PAPER, {"task": {"noise": 1}}),
    "W_Q must stay finite under the scale, got 1e+06": (
        ARRAYS | {"W_Q": ARRAYS["W_Q"] * 1e36},
        {"scale": 1e6},
    ),
    "must have one layer, got 2": (LENS | {"blocks.1.attn.W_Q": ones(2, 4, 2)}, {}),
    "attend_to_self must be the file's True, got False": (
        GPT2,
        {"n_heads": 4, "attend_to_self": False},
    ),
    "task.context_length must be <= 0, the most that 2 positions allow, got 1.": (
        GPT2 | {"wpe.weight": zeros(2, 16)},
        {"n_heads": 4},
    ),
    "x.pt: a model of classes or words: 4 outputs for tokens of 3 entries": (
        GPT2 | {"_read_out.weight": zeros(4, 16), "_read_out.bias": zeros(4)},
        {"n_heads": 4},
    ),
    "layer 3 of 4 is missing.": (GPT2 | {"h.4.attn.c_attn.weight": zeros(0)}, {"n_heads": 4}),
    "d_y must lie in 1 to 3, as tokens are d_x + d_y = 4 wide, got 4.": (
        ENCODER,
        {"n_heads": 2, "d_y": 4},
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_is_refused(words: str):
    assert words in str(refusal(*REFUSED[words]))


def test_hints_that_agree_with_the_file_are_taken():
    agreeing = {"n_heads": 2, "d_x": 3, "d_y": 1, "scale": 0.5, "attend_to_self": False}
    told = Hints(**agreeing, format="softmax-paper", task={"d_x": 3})
    stored = [Stored(Path("x.pt"), PAPER, {})]
    given, bare = (read_foreign(stored, hints).weights for hints in (told, Hints()))
    assert torch.equal(given.W_Q, bare.W_Q)


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        ({"format": "onnx"}, f"format must be one of {', '.join(FORMATS)}, got 'onnx'"),
        ({"d_x": 0}, "d_x must be an integer >= 1, got 0"),
        ({"n_heads": -1}, "n_heads must be an integer >= 1, got -1"),
        ({"output_column": -1}, "output_column must be an integer >= 0, got -1"),
        ({"scale": 0.0}, "scale must be a positive number, got 0"),
        ({"scale": math.inf}, "scale must be a positive number, got inf"),
        ({"scale": math.nan}, "scale must be a positive number, got nan"),
        ({"score_slope": 0}, "score_slope must be a positive number, got 0"),
        ({"output_scale": 0}, "output_scale must be a positive number, got 0"),
        ({"score": "sigmoid"}, f"score must be one of {'; '.join(SCORES)}, got 'sigmoid'"),
        ({"columns": "xy"}, f"columns must be one of {'; '.join(COLUMNS)}, got 'xy'"),
        ({"model": {"norm": "both"}}, "got norm=both"),
        ({"model": {"depth": 2}}, "model must have fields of norm=before; norm=after; "),
        ({"map": ["mine_q"]}, "map must have entries THEIRS=KNOWN, got 'mine_q'"),
    ],
    ids=str,
)
def test_a_hint_out_of_range_is_a_value_error(hint: dict, words: str):
    with pytest.raises(ValueError, match=re.escape(words)):
        load("gone.pt", **hint)
