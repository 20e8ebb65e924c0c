"""Files of models that cannot be, and hints that contradict a file: one line that names the file, the rule and the value.

A refusal that names a tensor offers --map, with all names that are known.
"""

import ast
import math
import traceback
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import mechinterp
from mechinterp.checkpoints.foreign.options import Hints
from mechinterp.checkpoints.foreign.read import read_foreign
from mechinterp.checkpoints.foreign.settings import Stored
from mechinterp.checkpoints.foreign.tensors.names import KNOWN
from mechinterp.checkpoints.foreign.tensors.refusals import TensorError
from mechinterp.checkpoints.io.files import CheckpointError
from mechinterp.checkpoints.native.exchange import hooked_state
from tests.checkpoints.files import read as load
from tests.checkpoints.foreign_files import (
    LAYOUTS,
    attention_module,
    merged,
    random_heads,
    softmax_paper_state,
)
from tests.conftest import by_head
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
TORCH, ARRAYS = ATTENTION.state_dict(), by_head(random_heads())
HEADS = LAYOUTS["modules of heads"](random_heads())
LINEAR, OWN = squares("attn.{x}_proj.weight"), LAYOUTS["modules {x}_proj"](random_heads())
MERGED = merged(random_heads())
ENCODER = nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False).state_dict()
WITH_ENDS = ENCODER | {"read_in.weight": ones(4, 4), "read_out.weight": ones(1, 4)}
GPT2 = {n.removeprefix("_backbone."): t for n, t in garg().state_dict().items()}
BARE = squares("layers.0.W_{x}.weight")
OLD_LENS = {f"attn_blocks.0.attn.W_{x}": ones(2, 3, 6) for x in "QKV"}
W_K, MASK = "blocks.0.attn.W_K", "blocks.0.attn.mask"
NO_OUTPUT = {f"layers.1.W_{x}.weight": ones(4, 4) for x in "qkv"} | {"layers.0.W_o.weight": None}

# What a refusal says that names a tensor, and the change of a good file that leads to it.
OF_PAPER: dict[str, State] = {
    "x_proj.weight is not among the tensors of format softmax": {"x_proj.weight": ones(1)},
    "or names that can be recognised": {"q_proj.weight": None},
    "must hold finite numbers, got 32 NaN": {"v_proj.weight": torch.full((8, 4), torch.nan)},
    "v_proj.weight must hold floating-point numbers": {"v_proj.weight": ones(8, 4).int()},
    "q_proj.weight must be a matrix": {"q_proj.weight": ones(8)},
    "q_proj.weight must have 4 rows for each head, got 9": {"q_proj.weight": ones(9, 4)},
    "o_proj.weight must have shape (8, 4) as [in, out], got (8, 5)": {"o_proj.weight": ones(5, 8)},
}
OF_TORCH: dict[str, State] = {
    "in_proj_weight must have 3 times as many rows": {"in_proj_weight": ones(8, 4)},
    "out_proj.bias must have one axis": {"out_proj.bias": ones(4, 1, 1)},
    "out_proj.bias must have shape (4,), got (1,)": {"out_proj.bias": ones(1)},
}
OF_LINEAR: dict[str, State] = {
    "to_q.weight stand for the same part": {"to_q.weight": ones(4, 4)},
    "grouped keys (4 rows of queries, 2 of keys)": {"k_proj.weight": ones(2, 4)},
    "k_proj.weight must be a matrix, got shape (0, 4)": {"k_proj.weight": ones(0, 4)},
    "k_proj.weight must be a matrix, got shape (4, 0)": {"k_proj.weight": ones(4, 0)},
}
OF_HEADS: dict[str, State] = {
    "must be numbered from 0 on, got attn.heads.1.query": {"0.query.weight": None},
    "must have the shape (4, 4) of the other heads, got (4, 5)": {"1.query.weight": ones(5, 4)},
}
OF_ARRAYS: dict[str, State] = {
    "W_K must have shape (4, 8) as [in, out], got (4, 6)": {"W_K": ones(2, 4, 3)},
    "W_Q must be a matrix, got shape (0, 4, 4)": {"W_Q": ones(0, 4, 4)},
    "W_Q and QK stand for the same part": {"QK": ones(2, 4, 4)},
}
ALONE: dict[str, State] = {
    "OV must have 1 heads, got 2": {"QK": ones(4, 4), "OV": ones(2, 4, 1)},
    r"got a, b\x1b[2J\n<b>": {"a": ones(1), "b\x1b[2J\n<b>": ones(1)},
    "a model of word tokens (embed.W_E [6, 9])": OLD_LENS | {"embed.W_E": ones(6, 9)},
}
OTHER_MODELS = {
    "gates": "W_g", "state-space models (Mamba)": "A_log", "(Mamba)": "conv1d.weight", "low-rank blocks)": "E_block",
    "features of kernels": "feature_map.weight", "recurrent layers": "lstm.weight_ih_l0", "relative positions": "RPE.relative.weight",
    "learned extra keys and values": "bias_k", "norms of queries and keys": "q_norm.weight", "gated MLPs": "mlp.gate_proj.weight",
}  # fmt: skip
OF_ONE_HEAD: dict[str, State] = {
    "an output projection is needed with layers.0.W_q.weight": NO_OUTPUT,
    "W_q.weight must read tokens of >= 2 entries, got 1": {name: ones(1, 1) for name in BARE},
    **{
        f"{words} are not read from a file, got layers.0.{name}": {f"layers.0.{name}": ones(8, 4)}
        for words, name in OTHER_MODELS.items()
    },
}
OF_ENCODER: dict[str, State] = {
    "norm.bias is a bias without a weight": {"norm.bias": ones(4)},
    "must have the same parts, got layers.0.linear1.bias in some": {"layers.1.linear1.bias": None},
    "two matrices, got only layers.1.linear1.weight": {"layers.1.linear2.weight": None},
    "read_in.weight, a read-in, needs a read-out": {"read_in.weight": ones(4, 4)},
}
OF_ENDS: dict[str, State] = {
    "two layers needs both, got only read_in.0.weight": {
        "read_in.weight": None,
        "read_in.0.weight": ones(4, 4),
    },
}
OF_GPT2: dict[str, State] = {
    "wpe.weight must have shape (20, 16), got (20, 9);": {"wpe.weight": zeros(20, 9)},
    r"head\n.weight is not among the tensors of format gpt2;": {"head\n.weight": zeros(0)},
    f"{'h' * 97}... is not among the tensors of format gpt2;": {"h" * 300: zeros(0)},
}
OF_LENS: dict[str, State] = {
    "head.weight is not among the tensors of an attention-only Hooked": {"head.weight": ones(1)},
    "W_K must have three axes, head first, got nothing": {W_K: None},
    "without added positions), got entries up to 0.5;": {"pos_embed.W_pos": ones(6, 4) / -2},
    "at y and zeros elsewhere, got another of shape [4, 1]": {"unembed.W_U": ones(4, 1)},
    "at y and zeros elsewhere, got another of shape [4];": {"unembed.W_U": ones(4)},
    "mask.tril(-1) or mask.tril(), got another of shape [6, 6]": {MASK: ones(6, 6)},
    "or mask.tril(), got another of shape [6];": {MASK: ones(6)},
}
NAMED = (
    *((PAPER, "attention_layer.", 2, OF_PAPER), (TORCH, "", 2, OF_TORCH), ({}, "", None, ALONE)),
    *((LINEAR, "attn.", 2, OF_LINEAR), (HEADS, "attn.heads.", 2, OF_HEADS)),
    *((ARRAYS, "", None, OF_ARRAYS), (BARE, "", 1, OF_ONE_HEAD), (ENCODER, "", 2, OF_ENCODER)),
    *((WITH_ENDS, "", 2, OF_ENDS), (GPT2, "", 4, OF_GPT2), (LENS, "", 2, OF_LENS)),
)
CHANGED: dict[str, tuple[State, dict[str, object]]] = {
    words: (good | {prefix + name: t for name, t in changes.items()}, {"n_heads": n_heads})
    for good, prefix, n_heads, refused in NAMED
    for words, changes in refused.items()
} | {
    "kq.weight must have 4 rows for each head, got 6": (MERGED | {"kq.weight": ones(6, 4)}, {}),
    "a file of format gpt2 must hold h.0.attn.c_attn.weight;": (PAPER, {"format": "gpt2"}),
}
NO_NAME_HELPS = ("finite", "floating", "not read from a file", "grouped", "word tokens")
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
    assert message.endswith(HOW) or "--map THEIRS" not in message
    assert not ("--map THEIRS" in message and any(each in words for each in NO_NAME_HELPS))


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
    "n_heads must divide the width 8, got 3": (OWN, {"n_heads": 3}),
    "n_heads must be the file's 2, got 3": (PAPER, {"n_heads": 3}),
    "d_x must be the weights' 3, got 2": (PAPER, {"d_x": 2}),
    "task.d_x must be the weights' 3, got 1": (PAPER, {"d_x": 3, "task": {"d_x": 1}}),
    "d_y must lie in 1 to 3": (ENCODER, {"n_heads": 2, "d_y": 4}),
    "scale must be the file's 0.5, got 1.0": (PAPER, {"scale": 1.0}),
    "attend_to_self must be the file's False, got True": (PAPER, {"attend_to_self": True}),
    "must hold self_attn.in_proj_weight and": (TORCH, {"format": "torch-encoder", "n_heads": 2}),
    "format must be one of external files (transformer-lens, ": (PAPER, {"format": "native"}),
    "Unknown field 'task.noise'; known: ": (PAPER, {"task": {"noise": 1}}),
    "W_Q must stay finite under the scale, got 1e+06": (
        ARRAYS | {"W_Q": ARRAYS["W_Q"] * 1e36},
        {"scale": 1e6},
    ),
    "got blocks.1.attn.W_Q": (LENS | {"blocks.1.attn.W_Q": ones(2, 4, 2)}, {}),
    "task.context_length must be <= 0, the most that 2 positions allow, got 1.": (
        GPT2 | {"wpe.weight": zeros(2, 16)},
        {"n_heads": 4},
    ),
    "classes or words: 4 outputs for tokens of 3": (
        GPT2 | {"_read_out.weight": zeros(4, 16), "_read_out.bias": zeros(4)},
        {"n_heads": 4},
    ),
    "layer 3 of 4 is missing.": (GPT2 | {"h.4.attn.c_attn.weight": zeros(0)}, {"n_heads": 4}),
    "model (norm) needs layers with norms or MLPs": (LINEAR, {"n_heads": 2, "model": {"norm": "after"}}),
    "writes whole tokens, got one that writes 1 of": (
        LINEAR | {"attn.o_proj.weight": ones(1, 4)},
        {"n_heads": 2, "output_column": 0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_is_refused(words: str):
    assert words in str(refusal(*REFUSED[words]))


def test_hints_that_agree_with_the_file_are_taken():
    agreeing = {"n_heads": 2, "d_x": 3, "d_y": 1, "scale": 0.5, "attend_to_self": False}
    told = Hints(**agreeing, format="softmax-paper", task={"d_x": 3})
    stored = [Stored(Path("x.pt"), PAPER, {})]
    given, bare = (read_foreign(stored, hints).weights for hints in (told, Hints()))
    assert torch.equal(given.W_Q, bare.W_Q)


def test_the_page_on_weights_names_every_option():
    page = (Path(mechinterp.__file__).parents[1] / "docs" / "how" / "settings.md").read_text()
    options = [f"--{each.name.replace('_', '-')}" for each in fields(Hints)]
    assert [option for option in options if option not in page] == []


HINTS: list[dict[str, object]] = [
    *({"format": "onnx"}, {"d_x": 0}, {"n_heads": -1}, {"output_column": -1}, {"scale": math.inf}),
    *({"scale": 0.0}, {"score_slope": math.nan}, {"output_scale": 0}, {"score": "sigmoid"}),
    *(
        {"columns": "xy"},
        {"model": {"norm": "both"}},
        {"model": {"depth": 2}},
        {"map": ["mine_q"]},
        {"map": {"mine": ""}},
    ),
]


@pytest.mark.parametrize("hint", HINTS, ids=str)
def test_a_hint_out_of_range_is_a_value_error(hint: dict):
    ((name, value),) = hint.items()
    shown = next(iter(value.items())) if isinstance(value, dict) else (value,)
    with pytest.raises(ValueError, match=name) as error:
        load("gone.pt", **hint)
    got = "=".join(map(str, shown)) if isinstance(value, dict) else str(shown[0])
    assert got.strip("[]") in str(error.value).partition("got ")[2]
