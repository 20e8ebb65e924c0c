"""Known formats as rows of a table: how names identify a format, what its code fixes, and its task.

The names of all formats are in one table, `names.toml`. A row adds what the code of the format does
with the tensors. Layers that match no row have no fixed settings."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from mechinterp.checkpoints.foreign.folded import is_products, of_products
from mechinterp.checkpoints.foreign.kinds import WORD_MODEL, require_known_kind
from mechinterp.checkpoints.foreign.layout import Layout, layout_of
from mechinterp.checkpoints.foreign.names import (
    ATTENTION,
    Tensors,
    is_harmless,
    piece_of,
    shown,
)
from mechinterp.checkpoints.foreign.options import Hints
from mechinterp.checkpoints.foreign.refusals import TensorError, require_numbers
from mechinterp.checkpoints.foreign.stacks import unstacked
from mechinterp.config.model import NAMES

PREFIX = "blocks.0.attn."
MASK = PREFIX + "mask"
ZERO = {
    "words": "tokens must be vectors (x, y) that enter by start_at_layer=0; with an embedding it is a model of word tokens",
    "positions": "tokens are vectors (x, y), without added positions",
    "read_out": "the model has no bias after its read-out",
    "mlp_in": "the model has no MLP",
    "mlp_out": "the model has no MLP",
}
"""Parts that our model does not have, but every HookedTransformer has, with the reason why they
must be zero."""
HEADS = tuple(f"attention_layer.{x}_proj.weight" for x in "qkvo")
PACKED = ("in_proj_weight", "out_proj.weight")
UNPACKED = (*(f"{x}_proj_weight" for x in "qkv"), "out_proj.weight")
MERGED = ("kq.weight", "value.weight")
SEPARATE = ("key.weight", "query.weight", "value.weight")
LINEAR = (
    (*SEPARATE, "out.weight"),
    ("q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight"),
)
TASK = {"beta_var": 1.0, "query_noise": False}


def _several(d_x: int, d_y: int, score: str) -> dict[str, object]:
    """Task of the softmax paper for several responses."""
    return {"context_length": 8 * d_x, **TASK, "noise_var": 0.4} if d_y > 1 else {}


def _eigenvalues(d_x: int, d_y: int, score: str) -> dict[str, object]:
    """Task of the linear-attention paper."""
    law = {"kind": "eigenvalues", "eigenvalues": [1 / d_x] * d_x}
    task = {"context_length": 31, **TASK, "noise_var": 0.0, "covariance": law}
    return task if score in ("linear", "linear/L") else {}


def _points(d_x: int, d_y: int, score: str) -> dict[str, object]:
    """Task of the code of Garg et al."""
    return {"context_length": 2 * d_x, **TASK, "noise_var": 0.0}


def _twenty_pairs(d_x: int, d_y: int, score: str) -> dict[str, object]:
    """Task of the code of Ahn et al."""
    return {"context_length": 20, **TASK, "noise_var": 0.0}


@dataclass(frozen=True)
class Format:
    """Known properties of the files whose tensors have these names."""

    name: str
    marks: tuple[tuple[str, ...], ...] = ()
    """Sets of names; a file with all names of one set, after a prefix that ends in a dot, has this
    format."""
    parts: tuple[str, ...] | None = None
    """All parts that a file of this format may hold; None: any."""
    only_stated: bool = False
    """True: other files have the same names, so the format must be stated (--format)."""
    patterns: tuple[str, ...] = ()
    """For formats without `marks`: patterns, each of which must match at least one name."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Values of choices that the format's code fixes, by name; a scale of None is 1/sqrt(d_head).
    """
    assumed: Mapping[str, object] = field(default_factory=dict)
    """Values of choices that are assumed without trying others, by name."""
    turns: bool = False
    """True: rotary positions are possible and tried, as a file has no trace of them."""
    wide_heads: bool = False
    """True: queries of each head have the width of a token, which gives the number of heads."""
    tries: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Values to try, by name, in an order other than that for unknown layers."""
    task: Callable[[int, int, str], dict[str, object]] | None = None
    """Fields of the task to assume, by d_x, d_y and score; None: the task of the softmax paper."""
    beside: Mapping[str, object] = field(default_factory=dict)
    """Further assumptions, by the name under which they are shown."""


CAUSAL = {"attend_to_self": True, "context_keys": False}
IN_TURN = {"layout": "in_turn", "norm": "before", "residual": True, "positions": "none"}
X_FIRST = {"columns": "x,y", "sign": "plus", "output_column": None}
SOFTMAX = {"score": "softmax", "scale": None}
IN_OUT = {"orientation": "in,out", "output_column": None}
PADDED = "y padded with zeros to d_x; predicted at x_query"
PUBLISHED = {"score": "linear", "scale": 1.0, "attend_to_self": True, **X_FIRST}
FORMATS = (
    Format(
        "softmax-paper",
        (HEADS,),
        ATTENTION,
        fixed={**SOFTMAX, **X_FIRST, "attend_to_self": False},
        wide_heads=True,
        task=_several,
    ),
    Format(
        "torch-attention",
        (PACKED, UNPACKED),
        fixed={**SOFTMAX, "sign": "plus", "output_column": None},
        assumed={"attend_to_self": False},
    ),
    Format("linear-paper", (MERGED,), ATTENTION, fixed=PUBLISHED, task=_eigenvalues),
    Format("arrays", (NAMES,), ATTENTION, fixed=IN_OUT, turns=True),
    Format("arrays", (("QK", "OV"),), ATTENTION, fixed={**IN_OUT, "scale": 1.0}, turns=True),
    Format(
        "gpt2",
        patterns=(
            *(r"attn\.c_attn\.weight$", r"\.ln_1\.weight$", r"\.c_attn\.bias$"),
            *(r"wpe\.weight$", r"ln_f\.weight$", r"read_in\.weight$"),
        ),
        fixed={**SOFTMAX, **X_FIRST, **IN_TURN, **CAUSAL},
        assumed={"activation": "gelu_new", "norm_eps": 1e-5},
        task=_points,
        beside={"model.tokens": f"x_1, y_1, ..., x_L, y_L, x_query; {PADDED}"},
    ),
    Format(
        "torch-encoder",
        patterns=(r"self_attn\.in_proj_weight$", r"(?:linear|norm)[12]\.weight$"),
        fixed={**SOFTMAX, **X_FIRST, "residual": True},
        assumed={"norm_eps": 1e-5, "attend_to_self": True},
        tries={"norm": ("after", "before"), "context_keys": (True, False)},
        beside={"model.tokens": "(x_1, y_1), ..., (x_L, y_L), (x_query, 0); predicted at the last"},
    ),
    Format(
        "linear-paper", (SEPARATE,), ATTENTION, only_stated=True, fixed=PUBLISHED, task=_eigenvalues
    ),
    Format("torch-attention", LINEAR, only_stated=True, turns=True),
)
OWN_LAYERS = FORMATS[-1]
HOOKED = Format(
    "transformer-lens",
    parts=ATTENTION,
    patterns=(r"^blocks\.\d+\.attn\.W_[QKVO]$",),
    fixed={**X_FIRST, **IN_OUT},
    assumed={**SOFTMAX, "attend_to_self": False},
    beside={"normalization": None},
)
BARE = Format("linear-paper", task=_eigenvalues, turns=True)
LAYERED = Format("named-layers", turns=True)
PRODUCTS = Format(
    "linear-transformer",
    fixed={
        **{"score": "linear/L", "scale": 1.0, "sign": "minus", "columns": "x,y"},
        **{"attend_to_self": False, "context_keys": True, "orientation": "in,out"},
        **{"norm": None, "positions": "none", "residual": True, "output_column": None},
    },
    task=_twenty_pairs,
)
"""Layers of one P on values and one Q on scores, whose prediction is minus the last entry (Ahn et al. 2023)."""
ONE_MATRIX = Format("one-matrix", fixed={**PUBLISHED, "score": "linear/L", "attend_to_self": False})
"""Merged step y_l x_l W x: a single square matrix."""
OTHERS = {
    "gpt2": "h.0.attn.c_attn.weight",
    "torch-encoder": "self_attn.in_proj_weight and linear1 or norm1 beside it",
}
"""Tensors that identify the formats without marks, in words."""
NAMED = tuple(dict.fromkeys(row.name for row in (HOOKED, *FORMATS)))
"""Formats of external files."""
ARRAYS = "arrays W_Q, W_K, W_V [head, d_model, d_head] and W_O [head, d_head, d_y] in .npz are read for any layer"


def recognised(tensors: Tensors, hints: Hints) -> tuple[Format, Layout, dict[str, Tensor]]:
    """Format of a file, its parts, and its tensors by the names that the parts refer to.

    Raises:
        ValueError: If the tensors form no layer of attention, or do not have the stated format.
    """
    known = {n: tensor for n, tensor in tensors.items() if not is_harmless(n, tensor)}
    if is_products(known):
        known = of_products(known, hints.d_x)
        return PRODUCTS, layout_of(known), known
    known = unstacked(known)
    form = _row(known, hints)
    if form is HOOKED:
        known, stated = hooked_layer(tensors)
        form = replace(form, fixed={**form.fixed, **stated})
    elif form is ONE_MATRIX:
        known = _of_one_matrix(known, hints)
    layout = layout_of(known)
    strange = [p.name for p in layout.pieces if form.parts and p.part not in form.parts]
    strange = [*layout.unknown, *strange]
    require_known_kind(known, layout)
    _require_attention(known, layout)
    listed = ", ".join(map(shown, (strange or layout.lacking or sorted(tensors))[:12])) or "none"
    offer = _may_attend([known[n] for n in strange if n in known], layout)
    if strange and (form.parts or layout.layers) and not layout.lacking:
        what = "such a model" if form is LAYERED else f"format {form.name}"
        verb = "is" if len(strange) == 1 else "are"
        drop = f"; if the model does without, drop it by --map {shown(strange[0])}=unused"
        raise TensorError("", f"{listed} {verb} not among the tensors of {what}{drop}", offer=offer)
    if strange or layout.lacking or not layout.layers:
        rule = f"must hold the tensors of a format known here ({', '.join(NAMED)})"
        raise TensorError(
            "", f"{rule}, or names that can be recognised ({ARRAYS}); got {listed}", offer=offer
        )
    return form, layout, known


def _may_attend(unmatched: list[Tensor], layout: Layout) -> bool:
    """True if one of these tensors may be a matrix of attention, so that a known name can help.

    Without any known name three matrices are needed, of which two (queries and keys) have one shape or one is packed.
    """
    shapes = [tuple(t.shape) for t in unmatched if t.ndim > 1 and min(t.shape[-2:]) > 1]
    if any(piece.part in ATTENTION for piece in layout.pieces):
        return bool(shapes)
    packed = any(3 * min(shape[-2:]) == max(shape[-2:]) for shape in shapes)
    return packed or (len(shapes) > 2 and len(set(shapes)) < len(shapes))


OF_PERCEPTRON = re.compile(r"(?:\w+\.)?\d+\.(?:weight|bias)|(?:.*[./])?mlp[./][^./]+")
"""Names of the layers of a torch.nn.Sequential, and of tensors inside an MLP."""


def _require_attention(tensors: Tensors, layout: Layout) -> None:
    """Refuse a file of nothing but an MLP."""
    perceptron = all(p.part in ("mlp_in", "mlp_out", "read_in", "read_out") for p in layout.pieces)
    others = [n for n in layout.unknown if not OF_PERCEPTRON.fullmatch(n)]
    # Layers of a Sequential may also be attention whose parts have numbers.
    numbered = [tensors[n] for n in layout.unknown if "mlp" not in n]
    if not tensors or others or not perceptron or _may_attend(numbered, layout):
        return
    listed = ", ".join(map(shown, sorted(tensors)[:8]))
    raise ValueError(f"a model must have attention, as every analysis reads it; got {listed}.")


def _row(tensors: Tensors, hints: Hints) -> Format:
    """The row of a file, by the stated format or else by its names."""
    wanted = hints.format
    # A stack of encoder layers holds modules of attention, so rows without marks come first.
    rows = [HOOKED, *sorted(FORMATS, key=lambda row: bool(row.marks))]
    rows = [row for row in rows if (row.name == wanted if wanted else not row.only_stated)]
    for row in rows:
        if _matches(row, tensors, stated=wanted is not None):
            return LAYERED if row is OWN_LAYERS else row
    if wanted is not None:
        if not rows:
            named = ", ".join(NAMED)
            raise ValueError(f"format must be one of external files ({named}), got {wanted!r}.")
        sets = [", ".join(marks) for row in rows for marks in row.marks] or [OTHERS[wanted]]
        raise TensorError(f"a file of format {wanted}", f"must hold {' or '.join(sets)}")
    shapes = [tuple(tensor.shape) for tensor in tensors.values()]
    lone = len(shapes) == 1 and len(shapes[0]) == 2 and shapes[0][0] == shapes[0][1] > 1
    return ONE_MATRIX if lone else LAYERED


def _matches(row: Format, tensors: Tensors, *, stated: bool) -> bool:
    """Compare the names of a file with a format.

    Args:
        stated: True: the user states this format; a GPT-2 may then lack some tensors of Hugging
            Face's GPT-2.
    """
    if row is HOOKED and not stated and not _attention_between_zeros(tensors):
        return False
    if row.patterns:
        fits = [any(re.search(each, name) for name in tensors) for each in row.patterns]
        if row.name != "gpt2":
            return all(fits) or (stated and row is HOOKED)
        shapes = [t.shape for name, t in tensors.items() if name.endswith("attn.c_attn.weight")]
        by_columns = all(len(shape) == 2 and shape[1] == 3 * shape[0] for shape in shapes)
        return fits[0] and (stated or (by_columns and all(fits)))
    for marks in row.marks:
        for name in tensors:
            prefix = name.removesuffix(marks[0])
            held = [prefix + mark for mark in marks]
            dotted = name.endswith(marks[0]) and (prefix == "" or prefix.endswith("."))
            if dotted and all(each in tensors for each in held):
                return row.name != "arrays" or (
                    any(tensors[each].ndim == 3 for each in held) and _attention_alone(tensors)
                )
    return False


def _attention_between_zeros(tensors: Tensors) -> bool:
    """True unless names show several layers, norms or a read-in, or words that are not zero."""
    pieces = [piece for name in tensors if (piece := piece_of(name)) is not None]
    several = len({p.layer for p in pieces if p.part in ATTENTION}) > 1
    between = any(p.part == "read_in" or "norm" in p.part for p in pieces)
    words = any(p.part == "words" and tensors[p.name].any() for p in pieces)
    return not (several or between or words)


def _attention_alone(tensors: Tensors) -> bool:
    """True if no name stands for another part, such as a read-in or a second layer."""
    pieces = [piece for name in tensors if (piece := piece_of(name)) is not None]
    return {piece.part for piece in pieces} <= set(ATTENTION) and len(
        {p.layer for p in pieces}
    ) == 1


def _of_one_matrix(tensors: Tensors, hints: Hints) -> dict[str, Tensor]:
    """One square matrix as a merged head whose OV circuit passes on y.

    d_x says whether the matrix acts on x alone or on x and y.

    Raises:
        ValueError: If d_x is not stated, or d_x or d_y does not fit the matrix.
    """
    ((name, W),) = tensors.items()
    require_numbers(W, name)
    if hints.d_x not in (len(W) - 1, len(W)):
        got = "no --d-x (d_x=)" if hints.d_x is None else hints.d_x
        raise ValueError(f"d_x must be {len(W) - 1} (the matrix acts on x and y) or {len(W)} (on x alone), got {got}.")  # fmt: skip
    if hints.d_y not in (None, 1):
        raise ValueError(f"d_y must be 1 for a single matrix, got {hints.d_y}.")
    W = W if hints.d_x == len(W) - 1 else pad(W, (0, 1, 0, 1))
    OV = W.new_zeros(1, len(W), len(W))
    OV[0, -1, -1] = 1
    return {"QK": W[None], "OV": OV}


def hooked_layer(
    tensors: Tensors, d_y: int | None = None
) -> tuple[dict[str, Tensor], dict[str, bool]]:
    """Attention of a HookedTransformer or a Bridge, and `attend_to_self` if a stored mask shows it.

    If there is a read-out, outputs are cut to the y entries, whose number is the read-out's width.

    Args:
        d_y: Number of responses; None: the width of the read-out.
    Raises:
        ValueError: If the tensors are not a causal one-layer model that predicts the y entries,
            without positions,
    norms and MLP.
    """
    kept = {n: t for n, t in tensors.items() if n != MASK and not is_harmless(n, t)}
    layout = layout_of(kept)
    _require_attention_alone(layout, tensors)
    attention = {p.name: tensors[p.name] for p in layout.layers[0] if p.part in ATTENTION}
    if (read_out := layout.ends.get(("read_out", "weight"))) is not None:
        d_y = _read_responses(read_out.name, tensors, d_y)
        written = {p.name for p in layout.layers[0] if p.part == "o"}
        attention |= {name: attention[name][..., -d_y:] for name in written}
    return attention, _mask_says(tensors)


def _require_attention_alone(layout: Layout, tensors: Tensors) -> None:
    words = layout.ends.get(("words", "weight"))
    if words is not None and len(layout.layers) != 1 and len(tensors[words.name]) > 1:
        raise ValueError(f"{WORD_MODEL.format(words.name, list(tensors[words.name].shape))}")
    if len(layout.layers) != 1:
        raise ValueError(f"the model must have one layer, got {len(layout.layers)}.")
    norms = (piece.name for piece in layout.pieces if "norm" in piece.part)
    if strange := [*layout.unknown, *norms]:
        rule = "is not among the tensors of an attention-only HookedTransformer of one layer"
        raise TensorError(strange[0], rule)
    # Whatever shows that it is a model of words comes first.
    for part, reason in ZERO.items():
        for piece in layout.pieces:
            if piece.part == part and (part, piece.kind) != ("read_out", "weight"):
                require_zero(piece.name, tensors[piece.name], reason)
    for name in (PREFIX + each for each in NAMES):
        if name not in tensors or tensors[name].ndim != 3:
            got = f"shape {tuple(tensors[name].shape)}" if name in tensors else "nothing"
            raise TensorError(name, f"must have three axes, head first, got {got}")


def _read_responses(name: str, tensors: Tensors, d_y: int | None) -> int:
    """Number of responses of a read-out, which must copy the last entries."""
    read_out, d_model = tensors[name], tensors[PREFIX + "W_Q"].shape[1]
    d_y = (read_out.shape[1] if read_out.ndim == 2 else 1) if d_y is None else d_y
    expected = torch.eye(d_model, dtype=torch.float32, device="cpu")[:, d_model - d_y :]
    if d_y >= d_model or not torch.equal(read_out.to(expected), expected):
        rule = f"must copy the y entries, [d_model, d_y] = {list(expected.shape)} with ones"
        got = f"at y and zeros elsewhere, got another of shape {list(read_out.shape)}"
        raise TensorError(name, f"{rule} {got}")
    return d_y


def require_zero(name: str, tensor: Tensor, reason: str) -> None:
    """Refuse a tensor with nonzero entries, as our model has no such part."""
    if tensor.any():
        largest = tensor.to(torch.complex128).abs().max().item()
        raise TensorError(name, f"must be zero ({reason}), got entries up to {largest:.3g}")


def _mask_says(tensors: Tensors) -> dict[str, bool]:
    """`attend_to_self` as a stored mask shows it; empty without a mask, or with the empty one of
    version 3.5.0 and later."""
    mask = tensors.get(MASK)
    if mask is None or mask.numel() == 0:
        return {}
    allowed = torch.ones(mask.shape, dtype=torch.bool, device=mask.device)
    for diagonal, attends in ((-1, False), (0, True)):
        if mask.ndim == 2 and torch.equal(mask.bool(), allowed.tril(diagonal)):
            return {"attend_to_self": attends}
    rule = "must be causal, mask.tril(-1) or mask.tril()"
    raise TensorError(MASK, f"{rule}, got another of shape {list(mask.shape)}")
