"""Format of a file: its names and shapes are compared with the rows of the table."""

import re
from dataclasses import replace

from torch import Tensor

from mechinterp.checkpoints.foreign.options import Hints
from mechinterp.checkpoints.foreign.tensors.formats import (
    BY_NAMES,
    HOOKED,
    LAYERED,
    NAMED,
    ONE_MATRIX,
    OWN_LAYERS,
    PRODUCTS,
    Format,
)
from mechinterp.checkpoints.foreign.tensors.kinds import require_known_kind
from mechinterp.checkpoints.foreign.tensors.layout import Layout, layout_of
from mechinterp.checkpoints.foreign.tensors.lens import hooked_layer
from mechinterp.checkpoints.foreign.tensors.names import (
    ATTENTION,
    TENSOR_KINDS,
    Tensors,
    is_harmless,
    piece_of,
    shown,
)
from mechinterp.checkpoints.foreign.tensors.products import is_products, of_one_matrix, of_products
from mechinterp.checkpoints.foreign.tensors.refusals import TensorError
from mechinterp.checkpoints.foreign.tensors.stacks import unstacked

_AS_ARRAYS = "arrays W_Q, W_K, W_V [head, d_model, d_head] and W_O [head, d_head, d_y] in .npz are read for any layer"
NORM_WORDS = "norm|ln|rms"
"""Parts of words that name norms."""
OF_PERCEPTRON = re.compile(r"(?:\w+\.)?\d+\.(?:weight|bias)|(?:.*[./])?mlp[./][^./]+")
"""Names of the layers of a torch.nn.Sequential, and of tensors inside an MLP."""


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
        known = of_one_matrix(known, hints)
    layout = layout_of(known)
    strange = [p.name for p in layout.pieces if form.attention_alone and p.part not in ATTENTION]
    strange = [*layout.unknown, *strange]
    require_known_kind(known, layout)
    _require_attention(known, layout)
    _require_heads(layout)
    listed = ", ".join(map(shown, (strange or layout.lacking or sorted(tensors))[:12])) or "none"
    offer = _may_attend([known[n] for n in strange if n in known], layout)
    if strange and (form.attention_alone or layout.layers) and not layout.lacking:
        what = "such a model" if form is LAYERED else f"format {form.name}"
        verb = "is" if len(strange) == 1 else "are"
        drop = f"; {_norm_among(strange, known)}if the model does without, drop it by --map {shown(strange[0])}=unused"
        raise TensorError("", f"{listed} {verb} not among the tensors of {what}{drop}", offer=offer)
    if strange or layout.lacking or not layout.layers:
        rule = f"must hold the tensors of a format known here ({', '.join(NAMED)})"
        raise TensorError(
            "", f"{rule}, or names that can be recognised ({_AS_ARRAYS}); got {listed}", offer=offer
        )
    return form, layout, known


def _norm_among(strange: list[str], tensors: Tensors) -> str:
    """Advice on stating a norm, if one of these tensors looks like one; else empty."""
    for name in strange:
        module, _, last = name.replace("/", ".").rpartition(".")
        if (
            name in tensors
            and tensors[name].ndim == 1
            and TENSOR_KINDS.get(last, ("",))[0] == "weight"
        ):
            stem = module.rpartition(".")[2]
            if re.search(NORM_WORDS, stem, re.IGNORECASE):
                return f"a norm is stated by --map {shown(stem)}=norm1 (before attention), norm2 or final_norm; "
    return ""


def _may_attend(unmatched: list[Tensor], layout: Layout) -> bool:
    """True if one of these tensors may be a matrix of attention, so that a known name can help.

    Without any known name three matrices are needed, of which two (queries and keys) have one shape or one is packed.
    """
    shapes = [tuple(t.shape) for t in unmatched if t.ndim > 1 and min(t.shape[-2:]) > 1]
    if any(piece.part in ATTENTION for piece in layout.pieces):
        return bool(shapes)
    packed = any(3 * min(shape[-2:]) == max(shape[-2:]) for shape in shapes)
    return packed or (len(shapes) > 2 and len(set(shapes)) < len(shapes))


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


def _require_heads(layout: Layout) -> None:
    """Refuse lists such as W_q.0.weight that may be of heads or of layers: heads share one output projection."""
    if any(piece.part == "o" for piece in layout.pieces):
        return
    for piece in layout.pieces:
        found = re.search(r"(\w+)[./](\d+)[./](\w+)$", piece.name)
        if piece.head is not None and found is not None and found[3] in TENSOR_KINDS:
            stem, rest = f"{found[1]}.{found[2]}", f"{found[2]}.{piece.part}_proj"
            raise ValueError(
                f"{shown(piece.name)} may be one of several heads or of several layers; state each by --map, such as --map {shown(stem)}=heads.{rest} or --map {shown(stem)}=layers.{rest}."
            )


def _row(tensors: Tensors, hints: Hints) -> Format:
    """The row of a file, by the stated format or else by its names."""
    wanted = hints.format
    rows = [row for row in BY_NAMES if (row.name == wanted if wanted else not row.only_stated)]
    for row in rows:
        if _matches(row, tensors, stated=wanted is not None):
            return LAYERED if row is OWN_LAYERS else row
    if wanted is not None:
        if not rows:
            named = ", ".join(NAMED)
            raise ValueError(f"format must be one of external files ({named}), got {wanted!r}.")
        sets = [", ".join(marks) for row in rows for marks in row.marks]
        sets = sets or [rows[0].identified_by]
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
