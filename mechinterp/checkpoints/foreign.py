"""One-layer models as other people's code leaves them: which format a file has, and what its tensors mean.

Each reader turns a file's tensors into the heads' W_Q, W_K, W_V and W_O, and says what the file states.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from mechinterp.checkpoints import exchange, names
from mechinterp.checkpoints.errors import CheckpointError
from mechinterp.checkpoints.hints import COLUMNS, ORIENTATIONS, SIGNS, Hints
from mechinterp.checkpoints.names import require_full_keys
from mechinterp.checkpoints.native import Checkpoint
from mechinterp.checkpoints.outside import (
    OneLayer,
    checkpoint_of,
    numbers,
    require_shape,
    settle,
)
from mechinterp.checkpoints.readings import compare_readings
from mechinterp.models.constructions import factored_scores, factored_values
from mechinterp.models.functional import BIASES, NAMES

LAYERED = ("torch-encoder", "gpt2")
PROJECTIONS = tuple(f"attention_layer.{x}_proj.weight" for x in "qkvo")
PACKED = ("in_proj_weight", "out_proj.weight")
UNPACKED = (*(f"{x}_proj_weight" for x in "qkv"), "out_proj.weight")
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
NAMED = "names"
"""A layer whose names are in the table of names; what is read becomes torch-attention or linear-paper."""
HEADS = ("n_head", "num_heads", "num_attention_heads", "n_heads", "nhead")
ARRAYS = "arrays W_Q, W_K, W_V [head, d_model, d_head] and W_O [head, d_head, d_y] in .npz are read for any layer"


def read_foreign(
    tensors: Mapping[str, Tensor], file: Path, *, hints: Hints, settings: Mapping[str, object]
) -> Checkpoint:
    """The checkpoint that the tensors of a file are.

    Args:
        settings: What a config.json beside the file says, {} without one.
    Raises:
        CheckpointError: If they fit no format or several, or are not those of such a model.
    """
    tensors = names.mapped(tensors, hints.map or (), file)
    name = hints.format or detect(tensors, file)
    if name == exchange.FORMAT:
        return exchange.read_state(tensors, file, hints=hints)
    ignored = [each for each, tensor in tensors.items() if _is_harmless(each, tensor)]
    tensors = {each: tensor for each, tensor in tensors.items() if each not in ignored}
    found = _read(tensors, file, name=name, hints=hints, settings=settings)
    return replace(found, assumed={**found.assumed, "ignored": ignored}) if ignored else found


def _is_harmless(name: str, tensor: Tensor) -> bool:
    """Whether a tensor changes no prediction: a mask (GPT-2 calls it bias), weights of a loss, a log."""
    return bool(names.HARMLESS.fullmatch(name)) or (name.endswith("bias") and tensor.ndim == 4)


def _read(
    tensors: Mapping[str, Tensor],
    file: Path,
    *,
    name: str,
    hints: Hints,
    settings: Mapping[str, object],
) -> Checkpoint:
    if name in LAYERED:
        for option in {"score", "score_slope", "columns", "sign"} & set(hints.given):
            raise CheckpointError(
                f"{file}: {option} is known of format {name} and not to be given."
            )
        from mechinterp.checkpoints.layered import read_layered

        return read_layered(tensors, file, format=name, hints=hints, settings=settings)
    if name == NAMED:
        try:
            return _read_named(tensors, file, hints, settings)
        except RuntimeError as error:  # what torch says of shapes or kinds that no check has met
            if "allocate memory" in str(error):
                raise
            raise CheckpointError(f"{file}: its matrices do not fit together.") from None
    if name not in READERS:
        raise CheckpointError(f"{file}: format must be that of other people's files, got {name!r}.")
    layers: list[Layer] = [({}, name, _without_prefix(tensors, name, file))]
    return _tried(layers, file, hints, settings)


Layer = tuple[dict[str, str | float | None], str, dict[str, Tensor]]
"""What is said of how it is read, the format, and its tensors by that format's names."""


def _tried(
    layers: Sequence[Layer], file: Path, hints: Hints, settings: Mapping[str, object]
) -> Checkpoint:
    """The checkpoint that one layer's tensors are, of the readings that predict best."""
    candidates: list[tuple[dict[str, str | float | None], Checkpoint]] = []
    faults: list[CheckpointError] = []
    for first, name, tensors in layers:
        unsaid = _unsaid(name, tensors, hints)
        for values in product(*unsaid.values()):
            said = first | dict(zip(unsaid, values, strict=True))
            # Only softmax has both; with other scores it is as the format has it.
            if said.get("score", hints.score) != "softmax" and said.pop("attend_to_self", False):
                continue
            full = replace(hints, **said)  # type: ignore[arg-type]
            try:
                layer = READERS[name](tensors, file, full, settings)
                candidates.append((said, checkpoint_of(file, layer, full)))
            except CheckpointError as error:
                faults.append(error)
    if not candidates:
        raise faults[0]
    if not any(said for said, _ in candidates):
        return candidates[0][1]
    sizes = list(dict.fromkeys((each.task.d_x, each.task.d_y) for _, each in candidates))
    found = [
        _best([(s, each) for s, each in candidates if (each.task.d_x, each.task.d_y) == size])
        for size in sizes
    ]
    predicting = [each for each in found if each.readings[0].predicts]
    if len(predicting) > 1:
        listed = " or ".join(f"d_x = {d_x}" for d_x, _ in sizes)
        raise CheckpointError(
            f"{file}: the orientation of its matrices is not in the file, {listed} predict both; give --d-x (d_x=) or "
            f"--orientation (orientation=), one of {'; '.join(ORIENTATIONS)}."
        )
    return (predicting or found)[0]


def _read_named(
    tensors: Mapping[str, Tensor], file: Path, hints: Hints, settings: Mapping[str, object]
) -> Checkpoint:
    """A layer of attention whose names the table of names has."""
    layout = names.layout_of(tensors)
    names.require_known_kind(tensors, layout, file)
    if not layout.attention_alone:
        from mechinterp.checkpoints.named_layers import read_named_layers

        return read_named_layers(tensors, layout, file, hints=hints, settings=settings)
    tries = ORIENTATIONS if layout.open_axes else ORIENTATIONS[:1]
    if hints.orientation is not None:
        tries = (hints.orientation,)
    layers: list[Layer] = []
    n_heads, fault = hints.n_heads, None
    beside: dict[str, object] = {}
    for axes in tries:
        try:
            found, shown = names.attention_matrices(layout.layers[0], tensors, file, axes=axes)
        except CheckpointError as error:
            fault = fault or error
            continue
        n_heads = settle(file, "n_heads", shown, hints.n_heads)
        found, left_out = _without_positions(found, hints)
        beside |= left_out
        name = "torch-attention" if "out.weight" in found else "linear-paper"
        said: dict[str, str | float | None] = {"orientation": axes} if len(tries) > 1 else {}
        layers.append((said, name, found))
    if fault is not None and not layers:
        raise fault
    checkpoint = _tried(layers, file, replace(hints, n_heads=n_heads), settings)
    return replace(checkpoint, assumed={**checkpoint.assumed, **beside}) if beside else checkpoint


def _without_positions(
    found: dict[str, Tensor], hints: Hints
) -> tuple[dict[str, Tensor], dict[str, object]]:
    """The layer on the columns (x, y) where the reader says both sizes and tokens are wider: the rest are positions.

    What the heads read of them is left out, and its part of the norm of queries, keys and values is said.
    """
    width = found["query.weight"].shape[1]
    size = (hints.d_x or 0) + (hints.d_y or 0)
    if None in (hints.d_x, hints.d_y) or size >= width or "out.weight" not in found:
        return found, {}
    read = {f"{name}.weight": found[f"{name}.weight"] for name in ("query", "key", "value")}
    norms = [(t[:, size:].norm() / t.norm().clamp(min=1e-30)).item() for t in read.values()]
    kept = {name: t[:, :size].contiguous() for name, t in read.items()}
    for name in {"out.weight", "out.bias"} & set(found):
        kept[name] = found[name][:size] if len(found[name]) == width else found[name]
    said: dict[str, object] = {"model.position_columns_left_out": width - size}
    return {**found, **kept}, said | {"model.position_columns_share": max(norms)}


def _unsaid(
    format: str, tensors: Mapping[str, Tensor], hints: Hints
) -> dict[str, tuple[str | float | None, ...]]:
    """What neither the file nor the reader says: the argument of `load`, and what it can be, most usual first.

    A scale that is None is 1/sqrt(d_head).
    """
    own = format == "arrays" or any(set(marks) <= set(tensors) for marks in LINEAR)
    # The names query, key and value are everybody's; the format is the paper's if the reader says so.
    bare = format == "linear-paper" and "kq.weight" not in tensors and hints.format is None
    found: dict[str, tuple[str | float | None, ...]] = {}
    if own or bare:
        found["score"] = ("linear", "linear/L", "softmax") if bare else ("softmax", "linear/L")
    if (own or bare) and "QK" not in tensors:
        found["scale"] = (1.0, None) if bare else (None, 1.0)
    if own or bare or format == "torch-attention":
        found["columns"] = COLUMNS
    if own or bare:
        found["attend_to_self"] = (False, True)
        found["sign"] = SIGNS
    return {name: values for name, values in found.items() if name not in hints.given}


def _best(
    candidates: Sequence[tuple[dict[str, str | float | None], Checkpoint]],
) -> Checkpoint:
    """The checkpoint of the reading that predicts best, with all readings and the task of the first."""
    told = []
    for said, checkpoint in candidates:
        told.append(
            {n: checkpoint.config.d_head**-0.5 if v is None else v for n, v in said.items()}
        )
    usual = candidates[0][1]
    heads = [each.weights.circuits for _, each in candidates]
    readings = compare_readings(list(zip(told, heads, strict=True)), usual.task)
    first = readings[0]
    (best,) = (row for row, each in enumerate(heads) if each is first.weights)
    checkpoint = candidates[best][1]
    assumed = {n: v for n, v in checkpoint.assumed.items() if not n.startswith("task.")}
    assumed |= {n: v for n, v in usual.assumed.items() if n.startswith("task.")}
    assumed |= {f"model.{name}": value for name, value in first.said.items() if name != "scale"}
    if "scale" in first.said:
        assumed["attn_scale"] = 1 / float(first.said["scale"])
    assumed["readings"] = [
        {**each.said, "loss": each.loss, "loss_sem": each.loss_sem, "stands": each.stands}
        for each in readings
    ]
    config = replace(checkpoint.config, task=usual.task)
    return replace(checkpoint, config=config, assumed=assumed, readings=readings)


def detect(tensors: Mapping[str, Tensor], file: Path) -> str:
    """The format that a file's tensors have by their names.

    Raises:
        CheckpointError: If they fit none.
    """
    layered = _layered_format(tensors)
    if layered is not None:
        return layered
    if any(exchange.WEIGHT.fullmatch(name) for name in tensors):
        return exchange.FORMAT
    for name in MARKS:
        if _fits(tensors, name):
            return name
    useful = {name: tensor for name, tensor in tensors.items() if not _is_harmless(name, tensor)}
    layout = names.layout_of(useful)
    if layout.attention_alone and layout.has_attention:
        return NAMED
    names.require_known_kind(useful, layout, file)
    for name in MARKS:
        prefix = _prefix(tensors, name)
        if prefix is not None and all(each.startswith(prefix) for each in tensors):
            return name
    if layout.has_attention and not layout.unknown:
        return NAMED
    known = sorted(
        {piece.part for layer in layout.layers for piece in layer} | {p for p, _ in layout.ends}
    )
    unknown = layout.unknown or tuple(sorted(tensors))
    shown = ", ".join(unknown[:6]) + (", ..." if len(unknown) > 6 else "")
    read = f"recognised are {', '.join(names.TITLES[part] for part in known)}; " if known else ""
    raise CheckpointError(
        f"{file}: must hold the tensors of a format known here ({', '.join((exchange.FORMAT, *MARKS, *LAYERED))}), or "
        f"names that can be told; {read}got {shown or 'none'}; say which parts they are by --map THEIRS=KNOWN (map=), "
        f"such as --map my_queries=q_proj; {ARRAYS}."
    )


def _fits(tensors: Mapping[str, Tensor], format: str) -> bool:
    """Whether all tensors of a file, but for harmless ones, are those of a format behind one prefix."""
    prefix = _prefix(tensors, format)
    return prefix is not None and all(
        name.startswith(prefix) and name.removeprefix(prefix) in KNOWN[format]
        for name, tensor in tensors.items()
        if not _is_harmless(name, tensor)
    )


def _layered_format(tensors: Mapping[str, Tensor]) -> str | None:
    from mechinterp.checkpoints.layered_tensors import layered_format

    return layered_format(list(tensors))


def _prefix(tensors: Mapping[str, Tensor], format: str) -> str | None:
    """What stands before the names of a format, such as "module."; None if they are not there."""
    for marks in MARKS[format]:
        for name in tensors:
            prefix = name.removesuffix(marks[0])
            dotted = prefix == "" or prefix.endswith(".")
            if name.endswith(marks[0]) and dotted and all(prefix + m in tensors for m in marks):
                return prefix
    return None


def _without_prefix(tensors: Mapping[str, Tensor], format: str, file: Path) -> dict[str, Tensor]:
    prefix = _prefix(tensors, format)
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
    matrices, biases = (_linear_layers if own else _attention_module)(tensors, names, file)
    n_heads, width = _stated_heads(file, hints, settings), len(matrices[0])
    if width % n_heads:
        raise CheckpointError(f"{file}: n_heads must divide the width {width}, got {n_heads}.")
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
    tensors: Mapping[str, Tensor], names: tuple[str, ...], file: Path
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The weights of the linear layers q, k, v and o, and their biases by Q, K, V and O; o may write y alone."""
    biases = {x: name.replace("weight", "bias") for x, name in zip("QKVO", names, strict=True)}
    biases = {x: name for x, name in biases.items() if name in tensors}
    _require_known(tensors, (*names, *biases.values()), "torch-attention", file)
    numbers(tensors, (*names, *biases.values()), file)
    matrices = _two_axes(tensors, names, file)
    queries, keys, values = (len(matrix) for matrix in matrices[:3])
    require_full_keys(queries, keys, values, file)
    (width, d_model), n_out = matrices[0].shape, min(len(matrices[3]), matrices[0].shape[1])
    shapes = ((width, d_model),) * 3 + ((n_out, width),)
    for name, tensor, shape in zip(names, matrices, shapes, strict=True):
        require_shape(file, name, tensor, shape)
    for x, name in biases.items():
        require_shape(file, name, tensors[name], (n_out if x == "O" else width,))
    return matrices, {x: tensors[name] for x, name in biases.items()}


def _stated_heads(file: Path, hints: Hints, settings: Mapping[str, object]) -> int:
    first = None
    for name in HEADS:
        value = settings.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(
                f"{file}: {name} of config.json must be an integer >= 1, got {value!r}."
            )
        first = settle(file, name, first, value)
    n_heads = settle(file, "n_heads", first, hints.n_heads)
    if n_heads is None:
        raise CheckpointError(f"{file}: n_heads is not in the file; give --n-heads (n_heads=).")
    return n_heads


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
