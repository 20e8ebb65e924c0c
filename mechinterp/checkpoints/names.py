"""Names that people give to the tensors of attention models, as data: a row for each spelling.

A name is read as a part of the model (the queries of head 2 in layer 0), whatever the path before it. What is found
is brought to matrices [out, in] of one layer each, as torch.nn.Linear holds them.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mechinterp.checkpoints.errors import CheckpointError
from mechinterp.checkpoints.hints import ORIENTATIONS

WORDS = {"q": ("query", "queries"), "k": ("key", "keys"), "v": ("value", "values")}
PROJECTIONS = (
    *("{x}", "{X}", "{word}", "{words}", "{Word}"),
    *("{x}_proj", "{word}_proj", "proj_{x}", "{word}_projection", "{x}_projection"),
    *("W_{x}", "W_{X}", "w_{x}", "W{x}", "W{X}", "w{x}", "W_{word}", "w_{word}", "w_{x}s"),
    *("to_{x}", "to_{word}", "to_{words}", "to{words}"),
    *("{x}_linear", "linear_{x}", "{word}_linear", "linear_{word}", "{words}_linear"),
    *("{x}_lin", "fc_{x}", "{word}_layer", "{word}_net"),
)
"""Spellings of the queries, keys and values: {x} q, {X} Q, {word} query, {words} queries, {Word} Query."""
ROWS: dict[str, tuple[str, ...]] = {
    "o": (
        *("o", "O", "out", "output", "o_proj", "out_proj", "output_proj", "proj_o", "proj_out"),
        *("W_o", "W_O", "w_o", "Wo", "WO", "wo", "W_out", "w_out", "to_out", "to_out.0"),
        *("out_linear", "linear_out", "output_linear", "o_linear", "linear_o", "o_lin", "out_lin"),
        *("fc_o", "fc_out", "fc", "dense", "output.dense", "proj", "c_proj", "linear"),
        *("unifyheads", "unify_heads", "out_projection", "output_projection", "output_layer"),
    ),
    "qkv": (
        *("qkv", "to_qkv", "Wqkv", "W_qkv", "w_qkv", "qkv_proj", "proj_qkv", "c_attn", "in_proj"),
        *("qkv_linear", "linear_qkv", "W_pack", "attn_qkv", "query_key_value_proj"),
    ),
    "kv": ("kv", "to_kv", "kv_proj", "Wkv", "W_kv"),
    "norm1": (
        *("ln1", "ln_1", "norm1", "norm_1", "layernorm1", "layer_norm1", "layer_norm_1"),
        *("attn_norm", "ln_attn", "attention_norm", "input_layernorm"),
    ),
    "norm2": (
        *("ln2", "ln_2", "norm2", "norm_2", "layernorm2", "layer_norm2", "layer_norm_2"),
        *("mlp_norm", "ffn_norm", "ln_mlp", "post_attention_layernorm"),
    ),
    "mlp_in": (
        *("mlp.c_fc", "mlp.fc1", "mlp.0", "mlp.fc_in", "mlp.up_proj", "mlp.net.0", "mlp.linear1"),
        *("ff.0", "ffn.0", "ffwd.net.0", "feed_forward.0", "feedforward.0", "ff.net.0", "ffn.fc1"),
        *("feed_forward.linear1", "feed_forward.w_1", "linear1", "fc1", "W"),
    ),
    "mlp_out": (
        *("mlp.c_proj", "mlp.fc2", "mlp.2", "mlp.3", "mlp.fc_out", "mlp.down_proj", "mlp.net.2"),
        *("mlp.linear2", "ff.2", "ff.3", "ffn.2", "ffn.3", "ffwd.net.2", "feed_forward.2"),
        *("feed_forward.3", "feedforward.2", "ff.net.2", "ffn.fc2", "feed_forward.linear2"),
        *("feed_forward.w_2", "linear2", "fc2", "Wp"),
    ),
    "final_norm": ("ln_f", "final_norm", "norm_f", "ln_final", "final_layer_norm", "norm"),
    "read_in": (
        *("_read_in", "read_in", "input_proj", "input_projection", "embed_in", "input_layer"),
        *("token_proj", "embed_proj", "input_linear"),
    ),
    "read_out": (
        *("_read_out", "read_out", "head", "pred_head", "output_head", "readout", "regressor"),
        *("lm_head", "prediction_head", "final_linear"),
    ),
    "positions": (
        *("wpe", "pos_emb", "pos_embed", "pos_embedding", "position_embedding", "W_pos"),
        *("position_embeddings", "positional_embedding", "pos_encoding.weight"),
    ),
    "words": (
        *("wte", "tok_emb", "token_emb", "token_embedding", "tok_embed", "word_embedding"),
        *("token_embedding_table", "word_embeddings", "W_E", "embed_tokens", "tok_embeddings"),
        *("embedding", "embed", "embeddings"),
    ),
}
TITLES = {
    "q": "queries",
    "k": "keys",
    "v": "values",
    "o": "outputs of heads",
    "qkv": "queries, keys and values in one matrix",
    "kv": "keys and values in one matrix",
    "norm1": "norms before attention",
    "norm2": "norms before the MLP",
    "mlp_in": "inputs of the MLP",
    "mlp_out": "outputs of the MLP",
    "final_norm": "a final norm",
    "read_in": "a read-in",
    "read_out": "a read-out",
    "positions": "positions",
    "words": "embeddings of words",
}
LINEARS = {f"linears.{i}": part for i, part in enumerate("qkvo")}
"""Modules in a list, as in the Annotated Transformer."""
BARE_BIASES = {"b": "mlp_in", "bp": "mlp_out"}
HEAD_LISTS = ("heads", "head", "attn_heads", "attention_heads", "sa_heads", "att_heads")
NUMBERED = re.compile(r"(?:h|layers?|blocks?|attn|attention|trans_block|transformer_block)_?(\d+)")
NUMBERED_HEAD = re.compile(r"heads?_?(\d+)")
TORCH, TRANSPOSED = ORIENTATIONS
KINDS = {
    "weight": ("weight", TORCH),
    "kernel": ("weight", TRANSPOSED),
    "w": ("weight", TRANSPOSED),
    "bias": ("bias", None),
    "b": ("bias", None),
    "scale": ("weight", None),
    "alpha": ("weight", None),
    "beta": ("bias", None),
    "embedding": ("weight", None),
}
"""Last parts of a name: what it is, and the order of a matrix's axes."""
HARMLESS = re.compile(
    r"(?:.*[./])?(?:(?:attn_|attention_|causal_|src_|tgt_)?mask|tril|masked_bias|position_ids|num_batches_tracked"
    r"|pos_weight|class_weights?|loss_weights?|loss_?(?:history|curve)?|losses|(?:train|val|test|eval)_loss(?:es)?"
    r"|step|epoch|(?:loss_fn|criterion|metrics?)[./].*)",
    re.IGNORECASE,
)
"""Buffers and logs that change no prediction."""


INNER = ("q", "k", "v", "qkv", "kv")
ATTENTION = ("o", *INNER)
ENDS = ("read_in", "read_out", "positions", "words", "final_norm")


def _parts() -> dict[str, str]:
    found = {}
    for x, (word, words) in WORDS.items():
        for row in PROJECTIONS:
            spelled = row.format(x=x, X=x.upper(), word=word, words=words, Word=word.capitalize())
            found[spelled] = x
    for part, spellings in ROWS.items():
        found |= dict.fromkeys(spellings, part)
    return found | LINEARS


PARTS = _parts()


@dataclass(frozen=True)
class Piece:
    """What one name stands for."""

    name: str
    part: str
    """A key of ROWS, or q, k, v."""
    kind: str
    """weight or bias."""
    axes: str | None
    """One of ORIENTATIONS, None where the name does not say it."""
    layer: int | None
    head: int | None
    path: tuple[str, ...]
    """What stands before, without the numbers."""


def piece_of(name: str) -> Piece | None:
    """What a name stands for, None if no row has it.

    Example:
        >>> piece = piece_of("blocks.3.attn.heads.0.to_q.weight")
        >>> piece.part, piece.layer, piece.head, piece.axes
        ('q', 3, 0, 'out,in')
    """
    words = name.replace("/", ".").split(".")
    kind, axes = "weight", None
    if len(words) > 1 and words[-1] in KINDS:
        kind, axes = KINDS[words.pop()]
    for count in (3, 2, 1):
        part = PARTS.get(".".join(words[-count:]))
        if part is not None and len(words) >= count:
            return _placed(name, part, kind, axes, words[:-count])
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


def mapped(tensors: Mapping[str, Tensor], rows: Iterable[str], file: Path) -> dict[str, Tensor]:
    """The tensors with each row "theirs=known" applied to the parts of their names.

    Raises:
        CheckpointError: If a row fits no name, or makes two names one.
    """
    found = dict(tensors)
    for row in rows:
        theirs, _, known = row.partition("=")
        pattern = re.compile(rf"(^|[./])({re.escape(theirs)})(?=$|[./])")
        renamed = {pattern.sub(rf"\g<1>{known}", name): tensor for name, tensor in found.items()}
        if list(renamed) == list(found):
            raise CheckpointError(f"{file}: map must name a part of a tensor's name, got {row!r}.")
        if len(renamed) < len(found):
            raise CheckpointError(f"{file}: map must keep the names apart, got {row!r}.")
        found = renamed
    return found


@dataclass(frozen=True)
class Layout:
    """The parts that a file's names stand for."""

    layers: tuple[tuple[Piece, ...], ...]
    """Attention, norms and MLP of every layer."""
    ends: dict[tuple[str, str], Piece]
    """Read-in, read-out, positions, words and final norm by part and kind."""
    unknown: tuple[str, ...]

    @property
    def attention_alone(self) -> bool:
        """Whether there is nothing but one layer of attention."""
        parts = {piece.part for layer in self.layers for piece in layer}
        return len(self.layers) == 1 and not (self.ends or self.unknown) and parts <= set(ATTENTION)

    @property
    def has_attention(self) -> bool:
        """Whether every layer has queries, keys and values."""
        found = [{piece.part for piece in layer if piece.kind == "weight"} for layer in self.layers]
        wanted = ({"q", "k", "v"}, {"qkv"}, {"q", "kv"})
        return bool(found) and all(any(each <= parts for each in wanted) for parts in found)

    @property
    def open_axes(self) -> bool:
        """Whether the names leave open which end of a matrix is where."""
        pieces = [piece for layer in self.layers for piece in layer if piece.kind == "weight"]
        return any(piece.axes is None and piece.part in ATTENTION for piece in pieces)


def layout_of(names: Iterable[str]) -> Layout:
    """The parts that these names stand for."""
    read = {name: piece_of(name) for name in names}
    pieces = [piece for piece in read.values() if piece is not None]
    unknown = [name for name, piece in read.items() if piece is None]
    paths = {piece.path for piece in pieces if piece.part in INNER}
    layers: dict[int, list[Piece]] = {}
    ends: dict[tuple[str, str], Piece] = {}
    for piece in pieces:
        outside = piece.part == "o" and piece.path not in paths
        if piece.part == "final_norm" and piece.layer is not None:
            unknown.append(piece.name)
        elif piece.part in ENDS or outside:
            key = ("read_out" if outside else piece.part, piece.kind)
            if key in ends or piece.layer is not None:
                unknown.append(piece.name)
            else:
                ends[key] = piece
        else:
            layers.setdefault(-1 if piece.layer is None else piece.layer, []).append(piece)
    return Layout(
        layers=tuple(tuple(layers[number]) for number in sorted(layers)),
        ends=ends,
        unknown=tuple(unknown),
    )


def attention_matrices(
    pieces: Iterable[Piece], tensors: Mapping[str, Tensor], file: Path, *, axes: str = TORCH
) -> tuple[dict[str, Tensor], int | None]:
    """query, key, value and out .weight [out, in] and .bias of one layer, and its number of heads if it shows.

    Args:
        axes: One of ORIENTATIONS, where the names do not say it.
    Raises:
        CheckpointError: If the matrices do not fit together.
    """
    found: dict[tuple[str, str], dict[int | None, tuple[Piece, Tensor]]] = {}
    for piece in pieces:
        if piece.part in ATTENTION:
            heads = found.setdefault((piece.part, piece.kind), {})
            if piece.head in heads:
                other = heads[piece.head][0].name
                raise CheckpointError(f"{file}: {other} and {piece.name} stand for the same part.")
            heads[piece.head] = (piece, tensors[piece.name])
    n_heads: int | None = None
    matrices: dict[tuple[str, str], Tensor] = {}
    packed = _packed_axes(found)
    for (part, kind), heads in found.items():
        turned = {h: _turned(p, t, axes, packed, file) for h, (p, t) in heads.items()}
        numbers = [h for h in turned if h is not None]
        if numbers and (len(numbers) < len(turned) or sorted(numbers) != list(range(len(turned)))):
            names = ", ".join(piece.name for piece, _ in list(heads.values())[:3])
            raise CheckpointError(f"{file}: heads must be numbered from 0 on, got {names}.")
        deep = next(iter(turned.values())).ndim == 3
        if numbers or deep:
            stacked = turned[None] if deep else torch.stack(_alike(turned, heads, file))
            if n_heads not in (None, len(stacked)):
                raise CheckpointError(
                    f"{file}: {next(iter(heads.values()))[0].name} must have {n_heads} heads, got "
                    f"{len(stacked)}; grouped or multi-query attention is not read."
                )
            n_heads = len(stacked)
            joined = stacked.flatten(0, 1)
            if part == "o" and kind == "weight":
                joined = stacked.transpose(0, 1).flatten(1)
            elif part == "o":
                joined = stacked.sum(0)
            matrices[part, kind] = joined
        else:
            matrices[part, kind] = turned[None]
    return _unpacked(matrices, found, file), n_heads


def _alike(
    turned: Mapping[int | None, Tensor],
    heads: Mapping[int | None, tuple[Piece, Tensor]],
    file: Path,
) -> list[Tensor]:
    order = sorted(turned, key=lambda head: -1 if head is None else head)
    shape = turned[order[0]].shape
    for head in order:
        if turned[head].shape != shape:
            raise CheckpointError(
                f"{file}: {heads[head][0].name} must have the shape {tuple(shape)} of the other heads, got "
                f"{tuple(turned[head].shape)}."
            )
    return [turned[head] for head in order]


def _packed_axes(
    found: Mapping[tuple[str, str], Mapping[int | None, tuple[Piece, Tensor]]],
) -> str | None:
    """The axes that shapes tell where queries, keys and values are one matrix: a Conv1D of GPT-2 is [in, out]."""
    qkv, out = (found.get((part, "weight"), {}).get(None) for part in ("qkv", "o"))
    if qkv is None or qkv[1].ndim != 2:
        return None
    (rows, columns), square = qkv[1].shape, out is None or out[1].ndim != 2
    if square:
        return TRANSPOSED if columns == 3 * rows else TORCH if rows == 3 * columns else None
    assert out is not None
    if rows == 3 * out[1].shape[1]:
        return TORCH
    return TRANSPOSED if columns == 3 * out[1].shape[0] else None


def _turned(piece: Piece, tensor: Tensor, axes: str, packed: str | None, file: Path) -> Tensor:
    """A tensor as [out, in], with an axis of heads in front where it has one."""
    if piece.kind == "bias":
        if tensor.ndim not in (1, 2):
            raise CheckpointError(
                f"{file}: {piece.name} must have one axis, got shape {tuple(tensor.shape)}."
            )
        return tensor.flatten()
    order = packed or piece.axes or axes
    if tensor.ndim == 3 and piece.head is None and 0 not in tensor.shape:
        if piece.axes == TRANSPOSED and piece.part != "o":  # flax: [in, head, d_head]
            return tensor.permute(1, 2, 0)
        if piece.axes == TRANSPOSED:  # and [head, d_head, out]
            return tensor.mT
        return tensor.mT if order == TRANSPOSED else tensor
    if tensor.ndim != 2 or 0 in tensor.shape:
        raise CheckpointError(
            f"{file}: {piece.name} must be a matrix, got shape {tuple(tensor.shape)}."
        )
    return tensor.mT if order == TRANSPOSED else tensor


def _unpacked(
    matrices: Mapping[tuple[str, str], Tensor],
    found: Mapping[tuple[str, str], Mapping[int | None, tuple[Piece, Tensor]]],
    file: Path,
) -> dict[str, Tensor]:
    """The matrices by query, key, value and out."""
    parts: dict[tuple[str, str], Tensor] = {}
    for (part, kind), matrix in matrices.items():
        if part not in ("qkv", "kv"):
            parts[part, kind] = matrix
            continue
        if len(matrix) % len(part):
            name = next(iter(found[part, kind].values()))[0].name
            raise CheckpointError(
                f"{file}: {name} must have {len(part)} times as many rows as a head is wide, got {len(matrix)}."
            )
        for x, rows in zip(part, matrix.chunk(len(part)), strict=True):
            parts[x, kind] = rows
    if ("o", "weight") in parts:
        queries, keys, values = (len(parts[x, "weight"]) for x in "qkv")
        require_full_keys(queries, keys, values, file)
    full = {"q": "query", "k": "key", "v": "value", "o": "out"}
    return {f"{full[part]}.{kind}": matrix.contiguous() for (part, kind), matrix in parts.items()}


def require_full_keys(queries: int, keys: int, values: int, file: Path) -> None:
    """Refuse keys or values of fewer rows than the queries, which several heads share.

    Raises:
        CheckpointError: If there are fewer.
    """
    if 0 < min(keys, values) < queries and queries % min(keys, values) == 0:
        raise CheckpointError(
            f"{file}: keys and values must be as wide as queries; grouped or multi-query attention is not read: got "
            f"{queries} rows of queries, {keys} of keys, {values} of values."
        )


def require_known_kind(tensors: Mapping[str, Tensor], layout: Layout, file: Path) -> None:
    """Refuse what names tell to be another kind of model, by its name.

    Raises:
        CheckpointError: If it is a model of words, or has relative or rotary positions.
    """
    words = layout.ends.get(("words", "weight"))
    if words is not None and ("read_in", "weight") not in layout.ends:
        size = tensors[words.name].shape[0] if tensors[words.name].ndim else 0
        raise CheckpointError(
            f"{file}: a model of word tokens ({words.name}, {size} words); numbers (x, y) are needed as tokens."
        )
    for name in tensors:
        lower = name.lower()
        for mark, what in OTHER_MODELS.items():
            if mark in lower:
                raise CheckpointError(f"{file}: {what} are not read, got {name}.")


OTHER_MODELS = {
    "relative": "relative positions",
    "rpe.": "relative positions",
    "rotary": "rotary positions",
    "inv_freq": "rotary positions",
    "fourier_proj": "tokens of random Fourier features",
    "cls_token": "class tokens",
    "conv1.": "convolutions",
    "lstm": "recurrent layers",
}
"""Parts of names, in lower case, that tell a model of another kind."""
