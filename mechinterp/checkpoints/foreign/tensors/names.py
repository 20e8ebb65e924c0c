"""Common names for the tensors of attention models; `names.toml` has their spellings.

A name is read as a part of the model, such as the queries of head 2 in layer 0, whatever path
precedes it."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mechinterp.checkpoints.foreign.options import ORIENTATIONS

Tensors = Mapping[str, Tensor]
"""Tensors by name."""

WORDS = {"q": ("query", "queries"), "k": ("key", "keys"), "v": ("value", "values")}
TABLE = tomllib.loads(Path(__file__).with_name("names.toml").read_text(encoding="utf-8"))
PROJECTIONS, READ_IN = TABLE["projections"].split(), TABLE["read_in"].split()
ROWS = {
    **{part: spellings.split() for part, spellings in TABLE["parts"].items()},
    "read_mlp": [f"{name}.0" for name in READ_IN],
    "read_in": [*READ_IN, *(f"{name}.2" for name in READ_IN)],
}
"""Spellings of each part, read from names.toml."""
KNOWN = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "qkv", "kv", "QK", "OV", "norm1", "norm2"),
    *("mlp.0", "mlp.2", "final_norm", "read_in", "read_out", "pos_emb", "unused"),
)
"""Known names that the user can give to unknown tensors (--map), one per part; `unused` drops a
tensor."""
WEIGHTS: dict[str, str] = TABLE["weights"]
"""Name in `Weights` of the weight that a part stands for."""
LINEARS = {f"linears.{i}": part for i, part in enumerate("qkvo")}
"""Parts of modules in a list, as in the Annotated Transformer."""
BARE_BIASES = {word: part for part, words in TABLE["bare_biases"].items() for word in words.split()}
PARAMETERS = re.compile(r"(.*(?:in|[qkv])_proj)_(weight|bias)")
"""Parameters of torch.nn.MultiheadAttention, which are not modules."""
HEAD_LISTS = ("heads", "head", "attn_heads", "attention_heads", "sa_heads", "att_heads")
NUMBERED = re.compile(r"(?:h|layers?|blocks?|attn|attention|trans_block|transformer_block)_?(\d+)")
NUMBERED_HEAD = re.compile(r"heads?_?(\d+)")
TORCH, TRANSPOSED = ORIENTATIONS
TENSOR_KINDS: dict[str, tuple[str, str | None]] = {
    word: (kind.split()[0], kind.split()[1] if " " in kind else None)
    for kind, words in TABLE["kinds"].items()
    for word in words.split()
}
"""Last word of a name: the kind of tensor, and the order of a matrix's axes."""
MASKS, SINGLE_NUMBERS, BUFFERS = (
    set(TABLE[name].lower().split()) for name in ("masks", "single_numbers", "buffers")
)
"""Last words, in small letters, of names of tensors that may be dropped: masks, single numbers and other buffers."""
ROTARY = re.compile(TABLE["rotary_tables"].replace("\n", ""), re.IGNORECASE)
"""Names of tables of rotary positions."""


INNER = ("q", "k", "v", "qkv", "kv", "qk")
ATTENTION = ("o", *INNER)
COMPLETE = ({"q", "k", "v"}, {"qkv"}, {"q", "kv"}, {"qk", "v"})
"""Sets of parts that are enough for a layer of attention."""
_IN_LISTS = ("q", "k", "v")
"""Parts that a list may hold head by head."""
ENDS = ("read_mlp", "read_in", "read_out", "positions", "words", "final_norm")
_PART_OF = {
    row.format(x=x, X=x.upper(), word=word, words=words, Word=word.capitalize()): x
    for x, (word, words) in WORDS.items()
    for row in PROJECTIONS
}
_PART_OF |= {spelling: part for part, spellings in ROWS.items() for spelling in spellings}
_PART_OF |= LINEARS | {"OV": "v"}
"""Parts by the words that stand for them in names."""


def name_of(part: str, kind: str) -> str:
    """Name in `Weights` of a part's weight or bias.

    Example:
        >>> name_of("q", "weight"), name_of("q", "bias"), name_of("norm1", "bias")
        ('attn.W_Q', 'attn.b_Q', 'ln1.b')
    """
    return WEIGHTS[part] if kind == "weight" else bias_of(WEIGHTS[part])


def bias_of(weight: str) -> str:
    """Name of the bias beside a weight, such as mlp.b_in beside mlp.W_in."""
    path, dot, last = weight.rpartition(".")
    return f"{path}{dot}b{last[1:]}"


def weight_of(name: str) -> str:
    """Name of the weight that a bias belongs to; a weight's own name.

    Example:
        >>> weight_of("mlp.b_in"), weight_of("ln1.b"), weight_of("attn.W_O")
        ('mlp.W_in', 'ln1.w', 'attn.W_O')
    """
    path, dot, last = name.rpartition(".")
    first = {"b": "w" if last == "b" else "W"}.get(last[0], last[0])
    return f"{path}{dot}{first}{last[1:]}"


@dataclass(frozen=True)
class Piece:
    """Part of the model that a name stands for."""

    name: str
    part: str
    """A key of ROWS, or q, k, v."""
    kind: str
    """weight or bias."""
    axes: str | None
    """One of ORIENTATIONS; None if the name does not decide it."""
    layer: int | None
    head: int | None
    path: tuple[str, ...]
    """Words of the name before the part, without numbers."""


def piece_of(name: str) -> Piece | None:
    """Part that a name stands for; None if the table has no such name.

    Example:
        >>> piece = piece_of("blocks.3.attn.heads.0.to_q.weight")
        >>> piece.part, piece.layer, piece.head, piece.axes
        ('q', 3, 0, 'out,in')
    """
    words = PARAMETERS.sub(r"\1.\2", name).replace("/", ".").split(".")
    tries: list[tuple[list[str], str, str | None]] = [(words, "weight", None)]
    if len(words) > 1 and words[-1] in TENSOR_KINDS:
        tries.insert(0, (words[:-1], *TENSOR_KINDS[words[-1]]))
        if len(words) > 2 and words[-2].isdecimal() and _PART_OF.get(words[-3]) in _IN_LISTS:
            # A list of the heads' queries, such as W_q.0.weight
            tries.append(([*words[:-3], HEAD_LISTS[0], *words[-2:-4:-1]], *TENSOR_KINDS[words[-1]]))
    for path, kind, axes in tries:
        for count in (3, 2, 1):
            part = _PART_OF.get(".".join(path[-count:]))
            if part is not None and len(path) >= count:
                return _placed(name, part, kind, axes, path[:-count])
    if words[-1] in BARE_BIASES:
        return _placed(name, BARE_BIASES[words[-1]], "bias", None, words[:-1])
    return None


def _placed(name: str, part: str, kind: str, axes: str | None, path: list[str]) -> Piece:
    layer = head = None
    rest: list[str] = []
    for word in path:
        numbered, numbered_head = NUMBERED.fullmatch(word), NUMBERED_HEAD.fullmatch(word)
        if word.isdecimal() and rest and rest[-1] in HEAD_LISTS and head is None:
            head = int(word[:6])
            rest.pop()
        elif (word.isdecimal() or numbered) and layer is None:
            layer = int((numbered[1] if numbered else word)[:6])
        elif numbered_head and head is None:
            head = int(numbered_head[1][:6])
        else:
            rest.append(word)
    return Piece(name, part, kind, axes, layer, head, tuple(rest))


def is_harmless(name: str, tensor: Tensor) -> bool:
    """True if a tensor is not needed: a mask (`bias` in GPT-2), a table of angles, a single number
    such as a step.

    Both the name and the values must show it.

    Example:
        >>> import torch
        >>> is_harmless("attn.mask", torch.ones(9, 9).tril()), is_harmless("attn.mask", torch.randn(9, 9))
        (True, False)
        >>> is_harmless("step", torch.tensor(7)), is_harmless("step", torch.ones(6, 6))
        (True, False)
    """
    word = re.split("[./]", name.lower())[-1]
    if ROTARY.fullmatch(name) or word in BUFFERS:
        return True
    if word in MASKS or (name.endswith("bias") and tensor.ndim == 4):
        return is_mask(tensor)
    return word in SINGLE_NUMBERS and tensor.numel() <= 1


def is_mask(tensor: Tensor) -> bool:
    """True if a tensor is empty, or has square matrices of booleans, of 0 and 1, or of 0 and -inf."""
    if tensor.numel() == 0 or tensor.dtype == torch.bool:
        return True
    square = tensor.ndim > 1 and tensor.shape[-1] == tensor.shape[-2]
    zeros = tensor == 0
    return square and any(bool((zeros | (tensor == one)).all()) for one in (1, -torch.inf))


def shown(name: str) -> str:
    """A name from a file, cut to fit in one line."""
    return name if len(name) <= 100 else f"{name[:97]}..."
