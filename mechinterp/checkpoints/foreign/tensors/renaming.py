"""Known names that the user gives to the tensors of a file, and tensors that are not used."""

import re
from collections.abc import Mapping

from torch import Tensor

from mechinterp.checkpoints.foreign.tensors.layout import layout_of
from mechinterp.checkpoints.foreign.tensors.names import (
    TENSOR_KINDS,
    Tensors,
    is_harmless,
    is_mask,
    shown,
)

UNUSED, _AS_MASK = DROPPED = ("unused", "mask")
"""Known names whose tensors are dropped; a mask must look like one."""


def mapped(tensors: Tensors, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Tensors renamed by `names`, {theirs: known}; those mapped to `unused` or `mask` are dropped.

    The key is a whole name, or whole words of names. Words before the last one stay. The ending,
    such as weight or kernel, stays too, unless both sides end in such a word.

    Raises:
        ValueError: If a key matches no name, two tensors would get the same name, or a tensor is
            no mask.
    Example:
        >>> import torch
        >>> list(mapped({"block.final.kernel": torch.zeros(1)}, {"block.final": "o_proj"}))
        ['block.o_proj.kernel']
    """
    named = dict(tensors)
    for theirs, known in names.items():
        pattern = _whole_words(theirs)
        if not any(map(pattern.search, named)):
            listed = ", ".join(map(shown, [*named][:8]))
            raise ValueError(
                f"map must name whole words of a tensor's name, got {theirs!r}; the names are {listed}."
            )
        if known == _AS_MASK:
            _require_masks({n: t for n, t in named.items() if pattern.search(n)}, theirs)
        if known in DROPPED:
            named = {name: t for name, t in named.items() if not pattern.search(name)}
            continue
        words = re.split(r"[./]", theirs)
        kind = words.pop() if len(words) > 1 and words[-1] in TENSOR_KINDS else ""
        path = theirs.removesuffix(kind).rstrip("./").removesuffix(words[-1])
        whole = kind and known.rpartition(".")[2] in TENSOR_KINDS
        after = "" if whole else theirs[len(path) + len(words[-1]) :]
        new = (path + known + after).replace("\\", r"\\")
        renamed = {pattern.sub(rf"\g<1>{new}", name): tensor for name, tensor in named.items()}
        if len(renamed) < len(named):
            raise ValueError(
                f"map must give different names to different tensors, got {theirs}={known}."
            )
        named = renamed
    return named


def _require_masks(tensors: Tensors, theirs: str) -> None:
    """Refuse a tensor that is no square of booleans, of 0 and 1, or of 0 and -inf."""
    for name, tensor in tensors.items():
        square = tensor.ndim > 1 and tensor.shape[-1] == tensor.shape[-2]
        if not (square and is_mask(tensor)):
            rule = "must be squares of booleans, of 0 and 1, or of 0 and -inf to be a mask"
            raise ValueError(
                f"{shown(name)} {rule}, got shape {list(tensor.shape)} of {tensor.dtype}; if the model does without, drop it by --map {shown(theirs)}=unused."
            )


def _whole_words(name: str) -> re.Pattern[str]:
    return re.compile(rf"(^|[./])({re.escape(name)})(?=$|[./])")


def unused_names(tensors: Tensors, names: Mapping[str, str]) -> list[str]:
    """Names of the tensors that no reading uses: buffers, a table of words beside a read-in, and those that the user drops."""
    dropped = [_whole_words(theirs) for theirs, known in names.items() if known in DROPPED]
    ends = layout_of(tensors).ends
    tables = [
        p.name for (part, _), p in ends.items() if part == "words" and ("read_in", "weight") in ends
    ]
    return [
        name
        for name, tensor in tensors.items()
        if is_harmless(name, tensor) or name in tables or any(each.search(name) for each in dropped)
    ]
