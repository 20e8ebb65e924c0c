"""How many heads a layer of attention has, and whether its matrices fit together."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from mechinterp.checkpoints.foreign.matrices import Matrix
from mechinterp.checkpoints.foreign.options import HEAD_KEYS, Hints
from mechinterp.checkpoints.io.errors import CheckpointError

Value = TypeVar("Value", bool, int, float, str)


def number_of_heads(
    layer: Mapping[str, Matrix],
    file: Path,
    hints: Hints,
    settings: Mapping[str, object],
    n_heads: int | None,
) -> int:
    """The number of heads that the tensors show, a config file beside them states or the reader gives."""
    for name in HEAD_KEYS:
        value = settings.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(
                f"{file}: {name}, stated beside it, must be an integer >= 1, got {value!r}."
            )
        n_heads = settle(file, name, n_heads, value)
    query, value = layer["query.weight"].tensor, layer["value.weight"]
    width, inner = query.shape
    if n_heads is None and "out.weight" not in layer:  # each head writes a whole token, or y
        n_heads = whole_tokens(value, width, file)
    elif n_heads is None and math.gcd(inner, value.tensor.shape[1]) == 1:
        n_heads = 1
    n_heads = settle(file, "n_heads", n_heads, hints.n_heads)
    if n_heads is None:
        raise CheckpointError(f"{file}: n_heads is not in the file; give --n-heads (n_heads=).")
    return n_heads


def whole_tokens(value: Matrix, width: int, file: Path) -> int | None:
    """Number of heads whose values are whole tokens; None where values are narrower."""
    rows = value.tensor.shape[1]
    if rows < width and value.of == 1:
        return None
    if rows % width:
        raise CheckpointError(
            f"{file}: {value.name} must have {width} rows for each head, got {rows}."
        )
    return rows // width


def require_full_keys(layer: Mapping[str, Matrix], file: Path) -> None:
    """Refuse keys of fewer rows than the queries, which several heads share."""
    inner, keys, values = (layer[f"{n}.weight"].tensor.shape[1] for n in ("query", "key", "value"))
    fits = len(layer["key.weight"].tensor) == len(layer["query.weight"].tensor)
    if fits and keys < inner and inner % keys == 0:
        raise CheckpointError(
            f"{file}: keys must be as wide as queries; grouped or multi-query attention is not read: got {inner} rows "
            f"of queries, {keys} of keys, {values} of values."
        )


def require_attention(found: Mapping[str, Matrix], n_heads: int, width: int, file: Path) -> None:
    """Hold the matrices of one layer against each other."""
    query, key, value = (found[f"{name}.weight"] for name in ("query", "key", "value"))
    for matrix in found.values():
        if matrix.n_heads not in (None, n_heads):
            raise CheckpointError(
                f"{file}: {matrix.name} must have {n_heads} heads, got {matrix.n_heads}; grouped or multi-query "
                "attention is not read."
            )
    inner, values = query.tensor.shape[1], value.tensor.shape[1]
    query.require(file, (width, inner))
    key.require(file, (width, inner))
    value.require(file, (width, values))
    for size in (inner, values):
        if size % n_heads:
            raise CheckpointError(f"{file}: n_heads must divide the width {size}, got {n_heads}.")
    shapes = {"query.bias": (inner,), "key.bias": (inner,), "value.bias": (values,)}
    if "out.weight" in found:
        out = found["out.weight"]
        written = min(out.tensor.shape[1], width)
        out.require(file, (values, written))
        shapes["out.bias"] = (written,)
    else:  # each head writes a whole token, or less
        value.require(file, (width, min(values, n_heads * width)))
    for name in found.keys() & {*shapes, "out.bias"}:
        if name not in shapes:
            raise CheckpointError(f"{file}: {found[name].name} has no matrix beside it.")
        found[name].require(file, shapes[name])


def settle(file: Path, name: str, stated: Value | None, given: Value | None) -> Value | None:
    """What the file states or the reader gives.

    Raises:
        CheckpointError: If they differ.
    """
    if stated is None or given is None:
        return given if stated is None else stated
    close = name == "scale" and math.isclose(float(stated), float(given), rel_tol=1e-6)
    if not close and stated != given:
        raise CheckpointError(f"{file}: {name} must be the file's {stated}, got {given}.")
    return stated
