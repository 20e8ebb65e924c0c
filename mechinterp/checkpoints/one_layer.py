"""Formats of one layer of attention: what their tensors are called, and the heads that they stand for.

Each reader turns a file's tensors into the heads' W_Q, W_K, W_V and W_O, and says what the file states.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from mechinterp.checkpoints.errors import CheckpointError
from mechinterp.checkpoints.hints import Hints
from mechinterp.checkpoints.named_matrices import require_full_keys
from mechinterp.checkpoints.outside import OneLayer, numbers, require_shape, stated_heads
from mechinterp.models.constructions import factored_scores, factored_values
from mechinterp.models.shapes import BIASES, NAMES

PROJECTIONS = tuple(f"attention_layer.{x}_proj.weight" for x in "qkvo")
PACKED = ("in_proj_weight", "out_proj.weight")
UNPACKED = (*(f"{x}_proj_weight" for x in "qkv"), "out_proj.weight")
DISTINCT = ("attention_layer.", "kq.", "in_proj_weight", "q_proj_weight", "W_", "QK", "OV")
"""What the names of a format begin with that only this format has; others are everybody's."""
# Somebody's own layer, of four torch.nn.Linear.
LINEAR = (
    ("query.weight", "key.weight", "value.weight", "out.weight"),
    ("q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight"),
)
EXTRA_KEYS = ("bias_k", "bias_v")
# What tells a format: each of these sets of names is enough, behind a prefix that ends in a dot. The first format that
# fits is taken: what torch's attention has is all that separate linear attention has, and an output.
MARKS: dict[str, tuple[tuple[str, ...], ...]] = {
    "softmax-paper": (PROJECTIONS,),
    "torch-attention": (PACKED, UNPACKED, *LINEAR),
    "linear-paper": (
        ("kq.weight", "value.weight"),
        ("key.weight", "query.weight", "value.weight"),
    ),
    "arrays": (NAMES, ("QK", "OV")),
}
KNOWN: dict[str, frozenset[str]] = {
    name: frozenset(each for marks in MARKS[name] for each in marks) for name in MARKS
}
KNOWN["torch-attention"] |= {"in_proj_bias", "out_proj.bias", *EXTRA_KEYS}
KNOWN["torch-attention"] |= {x.replace("weight", "bias") for marks in LINEAR for x in marks}
KNOWN["arrays"] |= set(BIASES)
ARRAYS = "arrays W_Q, W_K, W_V [head, d_model, d_head] and W_O [head, d_head, d_y] in .npz are read for any layer"


def prefix_of(tensors: Mapping[str, Tensor], format: str) -> str | None:
    """What stands before the names of a format, such as "module."; None if they are not there."""
    for marks in MARKS[format]:
        for name in tensors:
            prefix = name.removesuffix(marks[0])
            dotted = prefix == "" or prefix.endswith(".")
            if name.endswith(marks[0]) and dotted and all(prefix + m in tensors for m in marks):
                return prefix
    return None


def without_prefix(tensors: Mapping[str, Tensor], format: str, file: Path) -> dict[str, Tensor]:
    """The tensors by a format's own names.

    Raises:
        CheckpointError: If its names are not there, or others are beside them.
    """
    prefix = prefix_of(tensors, format)
    if prefix is None:
        wanted = " or ".join(", ".join(marks) for marks in MARKS[format])
        raise CheckpointError(f"{file}: a file of format {format} must hold {wanted}.")
    for name in tensors:
        if not name.startswith(prefix):
            raise CheckpointError(f"{file}: {name} is not among the tensors of format {format}.")
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def _require_known(
    tensors: Mapping[str, Tensor], known: tuple[str, ...], format: str, file: Path
) -> None:
    for name in tensors:
        if name not in known:
            raise CheckpointError(f"{file}: {name} is not among the tensors of format {format}.")


def _per_head(matrix: Float[Tensor, "rows d_model"], n_heads: int) -> Tensor:
    """[head, d_model, d_head] of a linear layer's weight, in which head h has the h-th block of rows."""
    return matrix.unflatten(0, (n_heads, -1)).mT.contiguous()


def _n_heads(rows: int, per_head: int, name: str, file: Path) -> int:
    if per_head < 1 or rows < 1 or rows % per_head:
        raise CheckpointError(
            f"{file}: {name} must have {per_head} rows for each head, got {rows}; {ARRAYS}."
        )
    return rows // per_head


def _two_axes(tensors: Mapping[str, Tensor], names: tuple[str, ...], file: Path) -> list[Tensor]:
    found = numbers(tensors, names, file)
    for name, tensor in zip(names, found, strict=True):
        if tensor.ndim != 2 or 0 in tensor.shape:
            raise CheckpointError(
                f"{file}: {name} must be a matrix, got shape {tuple(tensor.shape)}."
            )
    return found


def _softmax_paper(
    tensors: Mapping[str, Tensor], file: Path, hints: Hints, settings: Mapping[str, object]
) -> OneLayer:
    """Linear layers q, k, v of width n for each of H heads, o of width n H; the query is not among the keys."""
    _require_known(tensors, PROJECTIONS, "softmax-paper", file)
    q, k, v, o = _two_axes(tensors, PROJECTIONS, file)
    n, d_y = q.shape[1], o.shape[0]
    n_heads = _n_heads(q.shape[0], n, PROJECTIONS[0], file)
    for name, tensor in zip(PROJECTIONS[1:], (k, v, o), strict=True):
        require_shape(file, name, tensor, (d_y, n * n_heads) if tensor is o else (n * n_heads, n))
    if d_y >= n:
        raise CheckpointError(
            f"{file}: {PROJECTIONS[3]} must have fewer rows than the {n} entries of a token, got {d_y}; "
            "of a layer that writes whole tokens keep the rows of the responses, the last ones."
        )
    several = {"context_length": 8 * (n - d_y), "beta_var": 1.0}
    several |= {"noise_var": 0.4, "query_noise": False}
    return OneLayer(
        "softmax-paper",
        {
            **{f"W_{x}": _per_head(w, n_heads) for x, w in zip("QKV", (q, k, v), strict=True)},
            "W_O": o.mT.unflatten(0, (n_heads, n)).contiguous(),
        },
        d_y=d_y,
        scale=n**-0.5,
        score="softmax",
        columns="x,y",
        attend_to_self=False,
        task=several if d_y > 1 else {},
    )


def _linear_paper(
    tensors: Mapping[str, Tensor], file: Path, hints: Hints, settings: Mapping[str, object]
) -> OneLayer:
    """Scores x KQ x^T over all tokens, the query's own among them; of the output the rows of y are read."""
    merged = "kq.weight" in tensors
    names = ("kq.weight", "value.weight") if merged else MARKS["linear-paper"][1]
    _require_known(tensors, names, "linear-paper", file)
    *keys, value = _two_axes(tensors, names, file)
    n = value.shape[1]
    n_heads = _n_heads(value.shape[0], n, "value.weight", file)
    for name, tensor in zip(names, keys, strict=False):
        rows = n * n_heads if merged else keys[0].shape[0]
        require_shape(file, name, tensor, (rows, n))
    if merged:
        # The code multiplies kq with the keys: rows of its weight are the query's coordinates.
        QK = keys[0].unflatten(0, (n_heads, n))
        queries, keyed = factored_scores(QK)
    else:
        _n_heads(keys[0].shape[0], n_heads, "key.weight", file)
        keyed, queries = (_per_head(matrix, n_heads) for matrix in keys)
    score = "linear" if hints.score is None else hints.score
    linear = score in ("linear", "linear/L")
    scale = 1.0 if hints.format else None
    d_y = 1 if merged else _responses(hints, n)
    # Heads narrower than the responses are filled up with zeros.
    queries, keyed = (
        pad(matrix, (0, max(0, d_y - matrix.shape[2]))) for matrix in (queries, keyed)
    )
    OV = value.unflatten(0, (n_heads, n)).mT
    y_first = hints.columns == "y,x"
    W_V, W_O = factored_values(OV[..., :d_y] if y_first else OV[..., -d_y:], keyed.shape[2])
    eigenvalues = [1 / (n - d_y)] * (n - d_y) if n > d_y else []
    covariance = {"kind": "eigenvalues", "eigenvalues": eigenvalues}
    task: dict[str, object] = {"context_length": 31, "beta_var": 1.0, "noise_var": 0.0}
    task |= {"query_noise": False, "covariance": covariance}
    return OneLayer(
        "linear-paper",
        {"W_Q": queries, "W_K": keyed, "W_V": W_V, "W_O": W_O},
        d_y=d_y,
        scale=n**-0.5 if merged else scale,
        score=score,
        columns=hints.columns or "x,y",
        attend_to_self=linear if hints.attend_to_self is None or merged else hints.attend_to_self,
        merged_qk=merged,
        task=task if linear else {},
    )


def _responses(hints: Hints, d_model: int) -> int:
    """The number of responses that the reader says, by d_y or d_x; else 1."""
    given = {**(hints.task or {}), **hints.given}
    d_x, d_y = given.get("d_x"), given.get("d_y")
    if d_y is None and isinstance(d_x, int):
        d_y = d_model - d_x
    return d_y if isinstance(d_y, int) and 0 < d_y < d_model else 1


def _torch_attention(
    tensors: Mapping[str, Tensor], file: Path, hints: Hints, settings: Mapping[str, object]
) -> OneLayer:
    """torch.nn.MultiheadAttention, or an own layer: head h has the h-th block of rows of q, k and v."""
    for name in EXTRA_KEYS:
        if name in tensors:
            raise CheckpointError(
                f"{file}: the attention must have no learned extra key and value, got {name}."
            )
    names = next(marks for marks in MARKS["torch-attention"] if set(marks) <= set(tensors))
    own = names in LINEAR
    if own:
        matrices, biases = _linear_layers(tensors, names, file, hints)
    else:
        matrices, biases = _attention_module(tensors, names, file)
    width = len(matrices[0])
    n_heads = stated_heads(file, hints, settings, width=width, shown=None)
    found = {f"W_{x}": _per_head(w, n_heads) for x, w in zip("QKV", matrices[:3], strict=True)}
    found["W_O"] = matrices[3].mT.unflatten(0, (n_heads, -1)).contiguous()
    for x, bias in biases.items():
        found[f"b_{x}"] = bias if x == "O" else bias.unflatten(0, (n_heads, -1)).contiguous()
    if own:  # what is done with the scores, the file does not say
        return OneLayer("torch-attention", found)
    return OneLayer("torch-attention", found, scale=(width // n_heads) ** -0.5, score="softmax")


def _attention_module(
    tensors: Mapping[str, Tensor], names: tuple[str, ...], file: Path
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The weights q, k, v and o of torch.nn.MultiheadAttention, and its biases by Q, K, V and O."""
    packed = names == PACKED
    biases = tuple(name for name in ("in_proj_bias", "out_proj.bias") if name in tensors)
    _require_known(tensors, (*names, *biases), "torch-attention", file)
    numbers(tensors, (*names, *biases), file)
    matrices = _two_axes(tensors, names, file)
    E = matrices[0].shape[1]
    shapes = ((3 * E, E), (E, E)) if packed else ((E, E),) * 4
    for name, tensor, shape in zip(names, matrices, shapes, strict=True):
        require_shape(file, name, tensor, shape)
    found: dict[str, Tensor] = {}
    for name in biases:
        require_shape(file, name, tensors[name], (3 * E if name == "in_proj_bias" else E,))
    if "in_proj_bias" in biases:
        found |= dict(zip("QKV", tensors["in_proj_bias"].split(E), strict=True))
    if "out_proj.bias" in biases:
        found["O"] = tensors["out_proj.bias"]
    return [*(matrices[0].split(E) if packed else matrices[:3]), matrices[-1]], found


def _linear_layers(
    tensors: Mapping[str, Tensor], names: tuple[str, ...], file: Path, hints: Hints
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The weights of the linear layers q, k, v and o, and their biases by Q, K, V and O.

    o may write y alone, and more than a token has if the reader or a reading says which entry is the prediction.
    """
    biases = {x: name.replace("weight", "bias") for x, name in zip("QKVO", names, strict=True)}
    biases = {x: name for x, name in biases.items() if name in tensors}
    _require_known(tensors, (*names, *biases.values()), "torch-attention", file)
    numbers(tensors, (*names, *biases.values()), file)
    matrices = _two_axes(tensors, names, file)
    queries, keys, values = (len(matrix) for matrix in matrices[:3])
    require_full_keys(queries, keys, values, file)
    (width, d_model), n_out = matrices[0].shape, len(matrices[3])
    n_out = min(n_out, d_model) if hints.output_column is None else n_out
    shapes = ((width, d_model),) * 3 + ((n_out, width),)
    for name, tensor, shape in zip(names, matrices, shapes, strict=True):
        require_shape(file, name, tensor, shape)
    for x, name in biases.items():
        require_shape(file, name, tensors[name], (n_out if x == "O" else width,))
    return matrices, {x: tensors[name] for x, name in biases.items()}


def _arrays(
    tensors: Mapping[str, Tensor], file: Path, hints: Hints, settings: Mapping[str, object]
) -> OneLayer:
    """Heads by the project's own names, or their circuits QK (scale included) and OV."""
    circuits = "QK" in tensors
    biases = () if circuits else tuple(name for name in BIASES if name in tensors)
    names = ("QK", "OV") if circuits else (*NAMES, *biases)
    _require_known(tensors, names, "arrays", file)
    found = dict(zip(names, numbers(tensors, names, file), strict=True))
    if not circuits:
        return OneLayer("arrays", found)
    QK, OV = found["QK"], found["OV"]
    if QK.ndim != 3 or 0 in QK.shape:
        raise CheckpointError(
            f"{file}: QK must have shape [head, d_model, d_model], got {tuple(QK.shape)}."
        )
    n_heads, d_model, _ = QK.shape
    require_shape(file, "QK", QK, (n_heads, d_model, d_model))
    width = OV.shape[-1] if OV.ndim == 3 and 0 < OV.shape[-1] < d_model else d_model
    require_shape(file, "OV", OV, (n_heads, d_model, width))
    if hints.scale is not None:
        raise CheckpointError(
            f"{file}: scale is part of QK and not to be given, got {hints.scale}."
        )
    W_Q, W_K = factored_scores(QK)
    W_V, W_O = factored_values(OV, d_model)
    found = {"W_Q": W_Q, "W_K": W_K, "W_V": W_V, "W_O": W_O}
    return OneLayer("arrays", found, scale=d_model**-0.5)


Reader = Callable[[Mapping[str, Tensor], Path, Hints, Mapping[str, object]], OneLayer]
READERS: dict[str, Reader] = {
    "softmax-paper": _softmax_paper,
    "linear-paper": _linear_paper,
    "torch-attention": _torch_attention,
    "arrays": _arrays,
}
