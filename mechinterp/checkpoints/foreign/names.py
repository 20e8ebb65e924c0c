"""Names that people give to the tensors of attention models, as data: a row for each spelling.

A name is read as a part of the model (the queries of head 2 in layer 0), whatever the path before it.
"""

import re
from dataclasses import dataclass

from mechinterp.checkpoints.foreign.options import ORIENTATIONS

WORDS = {"q": ("query", "queries"), "k": ("key", "keys"), "v": ("value", "values")}
PROJECTIONS = (
    *("{x}", "{X}", "{word}", "{words}", "{Word}"),
    *("{x}_proj", "{word}_proj", "proj_{x}", "{word}_projection", "{x}_projection"),
    *("W_{x}", "W_{X}", "w_{x}", "W{x}", "W{X}", "w{x}", "W_{word}", "w_{word}", "w_{x}s"),
    *("to_{x}", "to_{word}", "to_{words}", "to{words}"),
    *("{x}_linear", "linear_{x}", "{word}_linear", "linear_{word}", "{words}_linear"),
    *("{x}_lin", "fc_{x}", "{word}_layer", "{word}_net", "{word}_mat", "{x}_mat", "mat_{x}"),
)
"""Spellings of the queries, keys and values: {x} q, {X} Q, {word} query, {words} queries, {Word} Query."""
READ_IN = (
    *("_read_in", "read_in", "input_proj", "input_projection", "embed_in", "input_layer"),
    *("token_proj", "embed_proj", "input_linear", "front_linear", "in_linear", "encoder_input"),
)
SPELLINGS = {
    "o": (
        "o O out output o_proj out_proj output_proj proj_o proj_out W_o W_O w_o Wo WO wo W_out "
        "w_out to_out to_out.0 out_linear linear_out output_linear o_linear linear_o o_lin "
        "out_lin fc_o fc_out fc dense output.dense proj c_proj linear unifyheads unify_heads "
        "out_projection output_projection output_layer out_mat output_mat out_layer output_net"
    ),
    "qkv": (
        "qkv to_qkv Wqkv W_qkv w_qkv qkv_proj proj_qkv c_attn in_proj qkv_linear linear_qkv "
        "W_pack attn_qkv query_key_value_proj"
    ),
    "kv": "kv to_kv kv_proj Wkv W_kv",
    "qk": "kq QK W_QK KQ W_KQ W_kq W_qk",
    "norm1": (
        "ln1 ln_1 norm1 norm_1 layernorm1 layer_norm1 layer_norm_1 attn_norm ln_attn "
        "attention_norm input_layernorm"
    ),
    "norm2": (
        "ln2 ln_2 norm2 norm_2 layernorm2 layer_norm2 layer_norm_2 mlp_norm ffn_norm ln_mlp "
        "post_attention_layernorm"
    ),
    "mlp_in": (
        "mlp.c_fc mlp.fc1 mlp.0 mlp.fc_in mlp.up_proj mlp.net.0 mlp.linear1 mlp.W_in ff.0 ffn.0 "
        "ffwd.net.0 feed_forward.0 feedforward.0 ff.net.0 ffn.fc1 feed_forward.linear1 "
        "feed_forward.w_1 linear1 fc1 W linear_net.0"
    ),
    "mlp_out": (
        "mlp.c_proj mlp.fc2 mlp.2 mlp.3 mlp.fc_out mlp.down_proj mlp.net.2 mlp.W_out mlp.linear2 "
        "ff.2 ff.3 ffn.2 ffn.3 ffwd.net.2 feed_forward.2 feed_forward.3 feedforward.2 ff.net.2 "
        "ffn.fc2 feed_forward.linear2 feed_forward.w_2 linear2 fc2 Wp linear_net.2 linear_net.3"
    ),
    "final_norm": "ln_f final_norm norm_f ln_final final_layer_norm norm",
    "read_out": (
        "_read_out read_out head pred_head output_head readout regressor lm_head prediction_head "
        "final_linear back_linear decoder final_layer W_U"
    ),
    "positions": (
        "wpe pos_emb pos_embed pos_embedding position_embedding W_pos position_embeddings "
        "positional_embedding pos_encoding positional_encoding pe pos_encoder pos_enc"
    ),
    "words": (
        "wte tok_emb token_emb token_embedding tok_embed word_embedding token_embedding_table "
        "word_embeddings W_E embed_tokens tok_embeddings embedding embed embeddings"
    ),
}
ROWS = {
    **{part: names.split() for part, names in SPELLINGS.items()},
    "read_mlp": [f"{name}.0" for name in READ_IN],
    "read_in": [*READ_IN, *(f"{name}.2" for name in READ_IN)],
}
KNOWN = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "qkv", "kv", "QK", "OV", "norm1", "norm2"),
    *("mlp.0", "mlp.2", "final_norm", "read_in", "read_out", "pos_emb", "mask"),
)
"""A known name for each part that a user's own name can stand for; a mask is ignored."""
LINEARS = {f"linears.{i}": part for i, part in enumerate("qkvo")}
"""Modules in a list, as in the Annotated Transformer."""
BARE_BIASES = {
    **{"b": "mlp_in", "bp": "mlp_out", "b_in": "mlp_in", "b_out": "mlp_out", "b_U": "read_out"},
    **{f"b_{x}": x.lower() for x in "QKVOqkvo"},
}
PARAMETERS = re.compile(r"(.*(?:in|[qkv])_proj)_(weight|bias)")
"""Of torch.nn.MultiheadAttention, which are no modules of their own."""
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
    r"|step|epoch|IGNORE|(?:loss_fn|criterion|metrics?)[./].*)",
    re.IGNORECASE,
)
"""Buffers and logs that change no prediction."""


INNER = ("q", "k", "v", "qkv", "kv", "qk")
ATTENTION = ("o", *INNER)
ENDS = ("read_mlp", "read_in", "read_out", "positions", "words", "final_norm")


def _parts() -> dict[str, str]:
    found = {}
    for x, (word, words) in WORDS.items():
        for row in PROJECTIONS:
            spelled = row.format(x=x, X=x.upper(), word=word, words=words, Word=word.capitalize())
            found[spelled] = x
    for part, spellings in ROWS.items():
        found |= dict.fromkeys(spellings, part)
    return found | LINEARS | {"OV": "v"}


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
    words = PARAMETERS.sub(r"\1.\2", name).replace("/", ".").split(".")
    tries: list[tuple[list[str], str, str | None]] = [(words, "weight", None)]
    if len(words) > 1 and words[-1] in KINDS:
        tries.insert(0, (words[:-1], *KINDS[words[-1]]))
    for path, kind, axes in tries:
        for count in (3, 2, 1):
            part = PARTS.get(".".join(path[-count:]))
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


def is_harmless(name: str, n_axes: int) -> bool:
    """Whether a tensor changes no prediction: a mask (GPT-2 calls it bias), weights of a loss, a log."""
    return bool(HARMLESS.fullmatch(name)) or (name.endswith("bias") and n_axes == 4)
