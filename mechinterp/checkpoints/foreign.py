"""Files of other people's code: which format their names show, and of what a file leaves open the reading that predicts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from torch import Tensor

from mechinterp.checkpoints import exchange, names
from mechinterp.checkpoints.errors import CheckpointError
from mechinterp.checkpoints.hints import COLUMNS, ORIENTATIONS, SIGNS, Hints
from mechinterp.checkpoints.layered_tensors import ENCODER, GPT2, layered_format
from mechinterp.checkpoints.named_matrices import attention_matrices
from mechinterp.checkpoints.native import Checkpoint
from mechinterp.checkpoints.one_layer import (
    ARRAYS,
    DISTINCT,
    KNOWN,
    LINEAR,
    MARKS,
    READERS,
    prefix_of,
    without_prefix,
)
from mechinterp.checkpoints.outside import checkpoint_of, numbers, settle, stated_task
from mechinterp.checkpoints.readings import Said, compare_readings, require_few
from mechinterp.config import ModelConfig

LAYERED = (ENCODER, GPT2)
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "read_in", "read_out")
"""Known names to which a user may have others of their own."""
NAMED = "names"
"""A layer whose names are in the table of names; what is read becomes torch-attention or linear-paper."""


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
        _require_no_joins(file, hints)
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
        from mechinterp.checkpoints.layered import read_layered

        return read_layered(tensors, file, format=name, hints=hints, settings=settings)
    if name == NAMED:
        return _read_named(tensors, file, hints, settings)
    if name not in READERS:
        raise CheckpointError(f"{file}: format must be that of other people's files, got {name!r}.")
    found = without_prefix(tensors, name, file)
    if any(set(marks) <= set(found) for marks in LINEAR):  # tokens can have columns of positions
        return _read_named(found, file, hints, settings)
    layers: list[Layer] = [({}, name, found)]
    return _tried(layers, file, hints, settings)


def _require_no_joins(file: Path, hints: Hints) -> None:
    if hints.model:
        raise CheckpointError(
            f"{file}: model ({', '.join(hints.model)}) is said of layers with norms or MLPs, got one of attention alone."
        )


Layer = tuple[Said, str, dict[str, Tensor]]
"""What is said of how it is read, the format, and its tensors by that format's names."""


def _tried(
    layers: Sequence[Layer], file: Path, hints: Hints, settings: Mapping[str, object]
) -> Checkpoint:
    """The checkpoint that one layer's tensors are, of the readings that predict best."""
    _require_no_joins(file, hints)
    if stated := stated_task(settings, ModelConfig()):
        hints = replace(hints, task={**stated, **(hints.task or {})})
    candidates: list[tuple[Said, Checkpoint]] = []
    faults: list[CheckpointError] = []
    for first, name, tensors in layers:
        unsaid = {n: v for n, v in _unsaid(name, tensors, hints).items() if n not in first}
        for values in product(*unsaid.values()):
            said = {**first, **dict(zip(unsaid, values, strict=True))}
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
    open_ones = dict.fromkeys(name for said, _ in candidates for name in said)
    if not open_ones:
        return candidates[0][1]
    require_few(len(candidates), open_ones, file)
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
            found, shown = attention_matrices(layout.layers[0], tensors, file, axes=axes)
        except CheckpointError as error:
            fault = fault or error
            continue
        n_heads = settle(file, "n_heads", shown, hints.n_heads)
        found, left_out = _without_positions(found, hints, file)
        beside |= left_out
        name = "torch-attention" if "out.weight" in found else "linear-paper"
        said: Said = {"orientation": axes} if len(tries) > 1 else {}
        outputs = _outputs(found, hints) if left_out else [{}]
        layers += [({**said, **output}, name, found) for output in outputs]
    if fault is not None and not layers:
        raise fault
    checkpoint = _tried(layers, file, replace(hints, n_heads=n_heads), settings)
    return replace(checkpoint, assumed={**checkpoint.assumed, **beside}) if beside else checkpoint


def _without_positions(
    found: dict[str, Tensor], hints: Hints, file: Path
) -> tuple[dict[str, Tensor], dict[str, object]]:
    """The layer on the columns (x, y) where the reader says both sizes and tokens are wider: the rest are positions.

    What the heads read of them is left out, and its part of the norm of queries, keys and values is said.
    """
    width = found["query.weight"].shape[1]
    size = (hints.d_x or 0) + (hints.d_y or 0)
    if None in (hints.d_x, hints.d_y) or size >= width or "out.weight" not in found:
        return found, {}
    readers = ("query.weight", "key.weight", "value.weight")
    read = dict(zip(readers, numbers(found, readers, file), strict=True))
    norms = [(t[:, size:].norm() / t.norm().clamp(min=1e-30)).item() for t in read.values()]
    kept = {name: t[:, :size].contiguous() for name, t in read.items()}
    said: dict[str, object] = {"model.position_columns_left_out": width - size}
    return {**found, **kept}, said | {"model.position_columns_share": max(norms)}


def _outputs(found: Mapping[str, Tensor], hints: Hints) -> list[Said]:
    """Which entry of whole tokens of x, y and positions is the prediction: that of y, or the last as in published code."""
    d_x, d_y, written = hints.d_x or 1, hints.d_y or 1, len(found["out.weight"])
    if hints.output_column is not None or written <= d_x + d_y:
        return [{}]
    orders = COLUMNS if hints.columns is None else (hints.columns,)
    return [
        {"output_column": entry} | ({} if hints.columns else {"columns": order})
        for order in orders
        for entry in (d_x if order == COLUMNS[0] else 0, written - d_y)
    ]


def _unsaid(
    format: str, tensors: Mapping[str, Tensor], hints: Hints
) -> dict[str, tuple[str | float | bool | None, ...]]:
    """What neither the file nor the reader says: the argument of `load`, and what it can be, most usual first.

    A scale that is None is 1/sqrt(d_head).
    """
    own = format == "arrays" or any(set(marks) <= set(tensors) for marks in LINEAR)
    # The names query, key and value are everybody's; the format is the paper's if the reader says so.
    bare = format == "linear-paper" and "kq.weight" not in tensors and hints.format is None
    found: dict[str, tuple[str | float | bool | None, ...]] = {}
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


def _best(candidates: Sequence[tuple[Said, Checkpoint]]) -> Checkpoint:
    """The checkpoint of the reading that predicts best, with all readings and the task of the first."""
    told = [
        {n: each.config.d_head**-0.5 if v is None else v for n, v in said.items()}
        for said, each in candidates
    ]
    usual = candidates[0][1]
    heads = [each.weights.circuits for _, each in candidates]
    readings = compare_readings(list(zip(told, heads, strict=True)), usual.task)
    first = readings[0]
    (best,) = (row for row, each in enumerate(heads) if each is first.weights)
    checkpoint = candidates[best][1]
    assumed = {n: v for n, v in checkpoint.assumed.items() if not n.startswith("task.")}
    assumed |= {n: v for n, v in usual.assumed.items() if n.startswith("task.")}
    assumed |= {f"model.{name}": value for name, value in first.said.items() if name != "scale"}
    if isinstance(scale := first.said.get("scale"), float):
        assumed["attn_scale"] = 1 / scale
    assumed["readings"] = [each.to_document() for each in readings]
    config = replace(checkpoint.config, task=usual.task)
    return replace(checkpoint, config=config, assumed=assumed, readings=readings)


def detect(tensors: Mapping[str, Tensor], file: Path) -> str:
    """The format that a file's tensors have by their names.

    Raises:
        CheckpointError: If they fit none.
    """
    useful = {name: tensor for name, tensor in tensors.items() if not _is_harmless(name, tensor)}
    layout = names.layout_of(useful)
    readable = layout.has_attention and not layout.unknown
    layered = layered_format(tensors, strict=readable)
    if layered is not None:
        return layered
    if any(exchange.WEIGHT.fullmatch(name) for name in tensors):
        return exchange.FORMAT
    for name in MARKS:
        if _fits(tensors, name):
            return name
    names.require_known_kind(useful, layout, file)
    if readable:
        return NAMED
    for name, marks in MARKS.items():
        prefix = prefix_of(tensors, name)
        own = prefix is not None and all(each.startswith(prefix) for each in tensors)
        if own and any(
            f"{prefix}{mark}" in tensors
            for each in marks
            for mark in each
            if mark.startswith(DISTINCT)
        ):
            return name
    known = sorted(
        {piece.part for layer in layout.layers for piece in layer} | {p for p, _ in layout.ends}
    )
    unknown = layout.unknown or tuple(sorted(tensors))
    shown = ", ".join(unknown[:6]) + (", ..." if len(unknown) > 6 else "")
    read = f"recognised are {', '.join(names.TITLES[part] for part in known)}; " if known else ""
    raise CheckpointError(
        f"{file}: must hold the tensors of a format known here ({', '.join((exchange.FORMAT, *MARKS, *LAYERED))}), or "
        f"names that can be told; {read}got {shown or 'none'}; say which parts they are by --map THEIRS=KNOWN (map=), "
        f"such as --map my_queries=q_proj, KNOWN being {', '.join(PARTS)}, ...; {ARRAYS}."
    )


def _fits(tensors: Mapping[str, Tensor], format: str) -> bool:
    """Whether all tensors of a file, but for harmless ones, are those of a format behind one prefix."""
    prefix = prefix_of(tensors, format)
    return prefix is not None and all(
        name.startswith(prefix) and name.removeprefix(prefix) in KNOWN[format]
        for name, tensor in tensors.items()
        if not _is_harmless(name, tensor)
    )
