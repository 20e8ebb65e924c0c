"""Every refusal of a file that names one of its tensors offers --map, with all names that are known."""

import ast
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import mechinterp
from mechinterp.checkpoints.foreign import layout
from mechinterp.checkpoints.foreign.names import KNOWN
from mechinterp.checkpoints.io.errors import CheckpointError
from mechinterp.checkpoints.load import load
from mechinterp.checkpoints.native.exchange import hooked_state
from tests.checkpoints.foreign_files import attention_module, random_heads, softmax_paper_state
from tests.checkpoints.wild_files import LAYOUTS

ROOM = Path(mechinterp.__file__).parent / "checkpoints" / "foreign"
State = dict[str, Tensor | None]
ones = torch.ones
PAPER = softmax_paper_state(random_heads())
LENS = hooked_state(random_heads(d_head=2), n_ctx=6)
TORCH = attention_module(0, width=4, n_heads=2, bias=True).state_dict()
HEADS = LAYOUTS["modules of heads"](random_heads())
LINEAR = LAYOUTS["modules {x}_proj"](random_heads(n_heads=1))
ENCODER = nn.TransformerEncoder(
    nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2
).state_dict()
SEQUENTIAL = nn.Sequential(nn.Linear(3, 4), nn.TransformerEncoderLayer(4, 2, 8)).state_dict()
BARE = {f"layers.{n}.{x}_proj.weight": ones(4, 4) for n in (0, 1) for x in "qkv"}
ENDS = {"read_in.weight": ones(4, 4), "read_out.weight": ones(1, 4)}
Q, V, W_K = "attention_layer.q_proj.weight", "attention_layer.v_proj.weight", "blocks.0.attn.W_K"
REFUSED: dict[str, tuple[State, State, dict[str, object]]] = {
    # Names.
    "x_proj.weight is not among the tensors of format softmax-paper": (
        PAPER,
        {"attention_layer.x_proj.weight": ones(1)},
        {},
    ),
    "or names that can be told": (PAPER, {Q: None}, {}),
    "a file of format gpt2 must hold h.0.attn.c_attn.weight": (PAPER, {}, {"format": "gpt2"}),
    "3.weight is not among the tensors of such a model": (
        SEQUENTIAL,
        {"2.weight": ones(4, 4), "3.weight": ones(1, 4)},
        {},
    ),
    "gates are not read, got gate.weight": (TORCH, {"gate.weight": ones(4)}, {}),
    "a model of word tokens (wte.weight [9, 4])": (TORCH, {"wte.weight": ones(9, 4)}, {}),
    "to_q.weight and attn.q_proj.weight stand for the same part": (
        {"attn.to_q.weight": ones(4, 4)} | LINEAR,
        {},
        {},
    ),
    # Numbers.
    "must hold finite numbers, got 32": (PAPER, {V: torch.full((8, 4), torch.nan)}, {}),
    "mine must hold floating-point numbers": ({"mine": ones(4, 4).int()}, {}, {"n_heads": None}),
    "must hold floating-point numbers": (PAPER, {V: ones(8, 4).int()}, {}),
    # Shapes of attention.
    "o_proj.weight must have shape (4, 8), got (5, 8)": (
        PAPER,
        {"attention_layer.o_proj.weight": ones(5, 8)},
        {},
    ),
    f"{Q} must be a matrix": (PAPER, {Q: ones(8)}, {}),
    f"{Q} must have 4 rows for each head": (PAPER, {Q: ones(9, 4)}, {}),
    "in_proj_weight must have 3 times as many rows": (TORCH, {"in_proj_weight": ones(8, 4)}, {}),
    "out_proj.bias must have one axis": (TORCH, {"out_proj.bias": ones(4, 1, 1)}, {}),
    "kq.weight must have 4 rows for each head": (
        {"kq.weight": ones(6, 4), "value.weight": ones(8, 4)},
        {},
        {},
    ),
    "heads must be numbered from 0 on, got attn.heads.1.query.weight": (
        HEADS,
        {"attn.heads.0.query.weight": None},
        {},
    ),
    "attn.heads.1.query.weight must have the shape (4, 4) of the other heads": (
        HEADS,
        {"attn.heads.1.query.weight": ones(5, 4)},
        {},
    ),
    "grouped or multi-query attention is not read: got 4 rows of queries, 2 of keys, 4 of values (attn.k": (
        LINEAR,
        {"attn.k_proj.weight": ones(2, 4)},
        {},
    ),
    "OV must have 2 heads, got 1": ({"QK": ones(2, 4, 4), "OV": ones(1, 4, 1)}, {}, {}),
    "attn.q_proj.weight must read tokens of >= 2 entries, got 1": (
        {f"attn.{x}_proj.weight": ones(1, 1) for x in "qkvo"},
        {},
        {"n_heads": 1},
    ),
    "norm.bias has no matrix beside it": (ENCODER, {"norm.bias": ones(4)}, {}),
    # Layers.
    "layers must be alike, got layers.0.linear1.bias in some": (
        ENCODER,
        {"layers.1.linear1.bias": None},
        {},
    ),
    "an output projection is needed beside layers.0.q_proj.weight": (BARE, {}, {"n_heads": 1}),
    "feed_forward.0.weight is a second tensor for mlp_in.weight, as layers.0.linear1.weight is": (
        ENCODER,
        {"layers.0.feed_forward.0.weight": ones(8, 4)},
        {},
    ),
    "an MLP needs both of its matrices, got layers.1.linear1.weight alone": (
        ENCODER,
        {"layers.1.linear2.weight": None},
        {},
    ),
    "layers.0.linear1.weight must be a matrix": (ENCODER, {"layers.0.linear1.weight": ones(8)}, {}),
    "read_in.weight, a read-in, needs a read-out": (ENCODER, {"read_in.weight": ones(4, 4)}, {}),
    "read_out.weight must have shape (1, 4), got (1, 5)": (
        ENCODER | ENDS,
        {"read_out.weight": ones(1, 5)},
        {},
    ),
    "a read-in of two layers needs both, got read_in.0.weight alone": (
        ENCODER | ENDS,
        {"read_in.weight": None, "read_in.0.weight": ones(4, 4)},
        {},
    ),
    # HookedTransformer.
    "head.weight is not among the tensors of an attention-only Hooked": (
        LENS,
        {"head.weight": ones(1)},
        {},
    ),
    "no LayerNorm, got ln_final.b": (LENS, {"ln_final.b": ones(4)}, {}),
    f"{W_K} must have three axes": (LENS, {W_K: ones(4, 2)}, {}),
    "unembed.W_U must read the y entries": (LENS, {"unembed.W_U": ones(4, 1)}, {}),
    "pos_embed.W_pos must be zero": (LENS, {"pos_embed.W_pos": ones(6, 4)}, {}),
    "blocks.0.attn.mask must be causal": (LENS, {"blocks.0.attn.mask": ones(6, 6)}, {}),
}


def message(file: Path, words: str) -> str:
    state, changes, hints = REFUSED[words]
    torch.save({n: t for n, t in (state | changes).items() if t is not None}, file)
    with pytest.raises(CheckpointError) as error:
        load(file, **{"n_heads": 2, **hints})
    return str(error.value)


@pytest.mark.parametrize("words", REFUSED)
def test_a_refusal_that_names_a_tensor_says_how_to_tell_what_it_is(tmp_path: Path, words: str):
    said = message(tmp_path / "x.pt", words)
    assert said.startswith(f"{tmp_path / 'x.pt'}: ")
    assert words in said
    assert said.endswith(
        f"; say what it is by --map THEIRS=KNOWN (map=), such as --map my_queries=q_proj, KNOWN being one of {', '.join(KNOWN)}."
    )


BY_HAND = "must hold {numbers} numbers, got {held}"
"""A tensor in memory whose numbers are repeated; the readers of files refuse it before."""


def test_the_files_above_reach_every_such_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Wherever a tensor is refused by name, one of them ends there."""
    reached = set()
    create = layout.TensorError.__init__

    def note(self: layout.TensorError, what: str, rule: str) -> None:
        frame = sys._getframe(1)
        while "foreign" not in frame.f_code.co_filename:  # the type checks of tests lie between
            frame = frame.f_back
        reached.add((Path(frame.f_code.co_filename).name, frame.f_lineno))
        create(self, what, rule)

    monkeypatch.setattr(layout.TensorError, "__init__", note)
    for words in REFUSED:
        message(tmp_path / "x.pt", words)
    for file in ROOM.glob("*.py"):
        text = file.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Raise) and "TensorError" in ast.dump(node):
                lines = range(node.lineno, node.end_lineno + 1)
                there = any((file.name, line) in reached for line in lines)
                assert there or BY_HAND in ast.get_source_segment(text, node), (file.name, lines)
