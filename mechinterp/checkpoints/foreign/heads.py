"""How many heads a layer of attention has, and whether its matrices fit together."""

import math
from collections.abc import Mapping
from typing import TypeVar

from mechinterp.checkpoints.foreign.layout import TensorError, shown
from mechinterp.checkpoints.foreign.matrices import Matrix
from mechinterp.checkpoints.foreign.options import HEAD_KEYS, Hints

GROUPED = "grouped or multi-query attention is not read"
Value = TypeVar("Value", bool, int, float, str)


def number_of_heads(
    layer: Mapping[str, Matrix], hints: Hints, settings: Mapping[str, object], n_heads: int | None
) -> int:
    """The number of heads that the tensors show, a config file beside them states or the reader gives."""
    for name in HEAD_KEYS:
        value = settings.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}, stated beside it, must be an integer >= 1, got {value!r}.")
        n_heads = settle(name, n_heads, value)
    query, value = layer["query.weight"].tensor, layer["value.weight"]
    width, inner = query.shape
    if n_heads is None and "out.weight" not in layer:  # each head writes a whole token, or y
        n_heads = whole_tokens(value, width)
    elif n_heads is None and math.gcd(inner, value.tensor.shape[1]) == 1:
        n_heads = 1
    n_heads = settle("n_heads", n_heads, hints.n_heads)
    if n_heads is None:
        raise ValueError("n_heads is not in the file; give --n-heads (n_heads=).")
    return n_heads


def whole_tokens(value: Matrix, width: int) -> int | None:
    """Number of heads whose values are whole tokens; None where values are narrower."""
    rows = value.tensor.shape[1]
    if rows < width and value.of == 1:
        return None
    if rows % width:
        raise TensorError(value.name, f"must have {width} rows for each head, got {rows}")
    return rows // width


def require_full_keys(layer: Mapping[str, Matrix]) -> None:
    """Refuse keys of fewer rows than the queries, which several heads share."""
    inner, keys, values = (layer[f"{n}.weight"].tensor.shape[1] for n in ("query", "key", "value"))
    fits = len(layer["key.weight"].tensor) == len(layer["query.weight"].tensor)
    if fits and keys < inner and inner % keys == 0:
        name, rows = shown(layer["key.weight"].name), f"{keys} of keys, {values} of values"
        rule = (
            f"must be as wide as queries; {GROUPED}: got {inner} rows of queries, {rows} ({name})"
        )
        raise TensorError("keys", rule)


def require_layer(matrices: Mapping[str, Matrix], n_heads: int, width: int) -> None:
    """Hold the matrices of one layer against each other."""
    for matrix in matrices.values():
        if matrix.n_heads not in (None, n_heads):
            rule = f"must have {n_heads} heads, got {matrix.n_heads}; {GROUPED}"
            raise TensorError(matrix.name, rule)
    inner, values, written, hidden, narrowed = (
        matrices[f"{name}.weight"].tensor.shape[1] if f"{name}.weight" in matrices else 0
        for name in ("query", "value", "out", "mlp_in", "mlp_out")
    )
    # Without an output projection each head writes a whole token, or less.
    most = values if "out.weight" in matrices else n_heads * width
    shapes: dict[str, tuple[int, ...]] = {
        "query.weight": (width, inner),
        "key.weight": (width, inner),
        "value.weight": (width, min(values, most)),
        "out.weight": (values, min(written, width)),
        "mlp_in.weight": (width, hidden),
        "mlp_out.weight": (hidden, min(narrowed, width)),
    }
    shapes |= {name.replace("weight", "bias"): shape[1:] for name, shape in shapes.items()}
    norms = (f"{norm}.{kind}" for norm in ("norm1", "norm2") for kind in ("weight", "bias"))
    require_shapes(matrices, shapes | dict.fromkeys(norms, (width,)) | {"value.bias": (values,)})
    for size in (inner, values):
        if size % n_heads:
            raise ValueError(f"n_heads must divide the width {size}, got {n_heads}.")


def require_shapes(matrices: Mapping[str, Matrix], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse other shapes than these, and biases that stand alone."""
    for name, matrix in matrices.items():
        if f"{name.rpartition('.')[0]}.weight" not in matrices:
            raise TensorError(matrix.name, "has no matrix beside it")
        matrix.require(shapes.get(name, tuple(matrix.tensor.shape)))


def settle(name: str, stated: Value | None, given: Value | None) -> Value | None:
    """What the file states or the reader gives.

    Raises:
        ValueError: If they differ.
    """
    if stated is None or given is None:
        return given if stated is None else stated
    close = name == "scale" and math.isclose(float(stated), float(given), rel_tol=1e-6)
    if not close and stated != given:
        raise ValueError(f"{name} must be the file's {stated}, got {given}.")
    return stated
