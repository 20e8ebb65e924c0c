"""Models of other kinds, which names and shapes show and which are refused by name."""

import re

import torch

from mechinterp.checkpoints.foreign.tensors.layout import Layout
from mechinterp.checkpoints.foreign.tensors.names import ATTENTION, TABLE, TORCH, Tensors, shown
from mechinterp.checkpoints.foreign.tensors.refusals import HOOK

QUANTIZED = (torch.int8, torch.uint8)
OF_LIBRARIES = "recurrent layers of transformers and flash-linear-attention"
"""Kind of models that become modules, as names.toml names it."""
AS_MODULE = "make a module of them and hook it: hook_module(recurrent_module(FILE))"
WORD_MODEL = "a model of word tokens ({} {}); tokens must be numbers (x, y)."


class RecurrentError(ValueError):
    """Weights of recurrent layers of libraries, which become a module and no checkpoint."""


def require_known_kind(tensors: Tensors, layout: Layout) -> None:
    """Refuse models of other kinds, as names and shapes show them.

    Raises:
        ValueError: If it is a model of words, or has relative positions, gates, grouped keys or
            the like.
    """
    for piece in layout.pieces:
        if piece.part in ATTENTION and tensors[piece.name].dtype in QUANTIZED:
            raise ValueError(
                f"{shown(piece.name)} is quantized ({tensors[piece.name].dtype}); write floating-point numbers, the integers times their scale, or {HOOK}."
            )
    if grouped := _grouped(tensors, layout):
        raise ValueError(f"grouped keys ({grouped}) are not read from a file; {HOOK}.")
    for what_else, mark in TABLE["other_models"].items():
        for name in tensors:
            if re.search(mark, name) or re.search(mark, name.lower()):
                line = f"{what_else} are not read from a file, got {shown(name)}"
                if what_else == OF_LIBRARIES:
                    raise RecurrentError(f"{line}; {AS_MODULE}.")
                raise ValueError(f"{line}; {HOOK}.")
    ends = [layout.ends.get((name, "weight")) for name in ("read_in", "read_out")]
    sizes = [tensors[p.name].shape for p in ends if p is not None and p.axes == TORCH]
    if len(sizes) == 2 and all(len(size) == 2 for size in sizes) and sizes[1][0] > sizes[0][1]:
        raise ValueError(
            f"a model of classes or words: {sizes[1][0]} outputs for tokens of {sizes[0][1]} entries (x, y), so that they are no y."
        )
    words = layout.ends.get(("words", "weight"))
    if words is not None and ("read_in", "weight") not in layout.ends:
        shape = list(tensors[words.name].shape)
        if shape[0] == 1:  # the placeholder in files for HookedTransformer
            return
        read_out = layout.ends.get(("read_out", "weight"))
        n_written = min(tensors[read_out.name].shape, default=0) if read_out is not None else 0
        if words.name.endswith("W_E") and 0 < n_written < shape[0] - 1 and shape[0] <= shape[-1]:
            raise ValueError(
                f"{words.name} {shape} is a table of words, or reads numbers; if tokens are {shape[0]} numbers (x, y), state --map {words.name}=read_in; word tokens are not read."
            )
        raise ValueError(WORD_MODEL.format(words.name, shape))


def _grouped(tensors: Tensors, layout: Layout) -> str:
    """Sizes of queries and keys if several heads share keys, else an empty text."""
    for layer in layout.layers[:1]:
        found = {p.part: tensors[p.name] for p in layer if p.kind == "weight" and p.head is None}
        if not {"q", "k"} <= found.keys() or any(found[x].ndim != 2 for x in "qk"):
            continue
        shapes = sorted(tuple(sorted(found[x].shape)) for x in "qk")
        (q_rows, q_in), (k_rows, k_in) = (tuple(found[x].shape) for x in "qk")
        if q_in == k_in and 0 < k_rows < q_rows and q_rows % k_rows == 0:
            return f"{q_rows} rows of queries, {k_rows} of keys"
        if q_rows == k_rows and 0 < k_in < q_in and q_in % k_in == 0 and shapes[0] != shapes[1]:
            return f"{q_in} columns of queries, {k_in} of keys"
    return ""
