"""Layers whose names are in the table of names, with what lies around their attention: norms, MLPs, read-in, read-out.

Such names do not say how the parts are joined. Every way that the shapes allow is tried on prompts of the task, and
the one that predicts best is taken.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from mechinterp.checkpoints.errors import CheckpointError, one_line
from mechinterp.checkpoints.hints import Hints
from mechinterp.checkpoints.layered_tensors import require_numbers, shown_name
from mechinterp.checkpoints.names import Layout, Piece, attention_matrices
from mechinterp.checkpoints.native import Checkpoint
from mechinterp.checkpoints.outside import require_shape, settle
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.fields import build, flatten
from mechinterp.icl.prompts import generator_for, sample_prompts
from mechinterp.models.weights import Weights

N_PROMPTS, N_NUMBERS = 256, 2**22
TIE = 1e-6
FORMAT = "named-layers"
Choices = Mapping[str, object]


@dataclass(frozen=True)
class Parts:
    """The tensors of a file by what they are, matrices [in, out]."""

    layers: tuple[dict[str, Tensor], ...]
    """Per layer query, key, value, out, mlp_in, mlp_out, norm1, norm2 .weight and .bias, those that are there."""
    ends: dict[str, Tensor]
    n_heads: int

    @property
    def width(self) -> int:
        """Width of the stream."""
        return len(self.layers[0]["query.weight"])

    def has(self, name: str) -> bool:
        """Whether every layer has a part, or the ends have it."""
        return name in self.ends or all(name in layer for layer in self.layers)

    @property
    def biases(self) -> bool:
        """Whether there are biases besides those of norms."""
        named = [*self.ends, *(name for layer in self.layers for name in layer)]
        return any(name.endswith(".bias") and "norm" not in name for name in named)


def read_named_layers(
    tensors: Mapping[str, Tensor],
    layout: Layout,
    file: Path,
    *,
    hints: Hints,
    settings: Mapping[str, object],
) -> Checkpoint:
    """The model of layers with known names, of the readings the one that predicts best.

    Args:
        settings: What a config file beside the weights states: n_heads, activation, norm_first, layout, residual.
    Raises:
        CheckpointError: If shapes do not fit together, or a part has no place here.
    """
    parts = _parts(tensors, layout, file, hints, settings)
    found: list[tuple[float, float, Choices, Checkpoint]] = []
    fault: CheckpointError | None = None
    for choices in _choices(parts, hints, settings):
        try:
            checkpoint = _checkpoint(parts, file, choices, hints)
        except CheckpointError as error:
            fault = fault or error
            continue
        found.append((*_loss(checkpoint), choices, checkpoint))
    if not found:
        assert fault is not None
        raise fault
    least = min(loss for loss, _, _, _ in found)
    # Of those that tie the first, which is the most usual one.
    _, _, choices, checkpoint = next(each for each in found if each[0] <= least * (1 + TIE))
    readings = [
        {**said, "loss": value, "loss_sem": sem}
        for value, sem, said, _ in sorted(found, key=lambda each: each[0])[:8]
    ]
    open_ones = {name for _, _, said, _ in found for name in said if said[name] != choices[name]}
    values = flatten(asdict(checkpoint.task), "task.")
    said_of_task = {"task.d_x", *flatten(dict(hints.task or {}), "task.")}
    assumed = {name: value for name, value in values.items() if name not in said_of_task}
    assumed |= {f"model.{name}": choices[name] for name in sorted(open_ones)}
    if len(found) > 1:
        assumed["readings"] = readings
    return replace(checkpoint, assumed=assumed | {"step": 0})


def _choices(parts: Parts, hints: Hints, settings: Mapping[str, object]) -> Iterator[Choices]:
    """What names and shapes leave open, every combination of it."""
    one_without_norm = len(parts.layers) == 1 and not parts.has("norm1.weight")
    first = settings.get("norm_first")
    options: dict[str, tuple[object, ...]] = {
        "norm": ("before", "after") if parts.has("norm1.weight") else (None,),
        "activation": ("relu", "gelu") if parts.has("mlp_in.weight") else ("relu",),
        "layout": ("pairs", "in_turn") if "read_in.weight" in parts.ends else ("pairs",),
        "attend_to_self": (True, False),
        "score": ("softmax", "linear/L"),
        "residual": (True, False) if one_without_norm else (True,),
    }
    if isinstance(first, bool) and parts.has("norm1.weight"):
        options["norm"] = ("before" if first else "after",)
    for name, given in (
        ("attend_to_self", hints.attend_to_self),
        ("score", hints.score),
        *((name, settings.get(name)) for name in ("activation", "layout", "residual")),
    ):
        if given is not None:
            options[name] = (given,)
    for values in product(*options.values()):
        yield dict(zip(options, values, strict=True))


def _parts(
    tensors: Mapping[str, Tensor],
    layout: Layout,
    file: Path,
    hints: Hints,
    settings: Mapping[str, object],
) -> Parts:
    for name, tensor in tensors.items():
        require_numbers(tensor, f"{file}: {shown_name(name)}")
    layers: list[dict[str, Tensor]] = []
    shown: int | None = None
    for pieces in layout.layers:
        matrices, n_heads = attention_matrices(
            pieces, tensors, file, axes=hints.orientation or "out,in"
        )
        shown = settle(file, "n_heads", shown, n_heads)
        found = {n: t.mT if n.endswith("weight") else t for n, t in matrices.items()}
        if "out.weight" not in found:
            raise CheckpointError(
                f"{file}: an output projection is needed beside {pieces[0].name}, got none."
            )
        width, inner = (layers[0] if layers else found)["query.weight"].shape
        found |= _beside(pieces, tensors, file, width)
        _require_shapes(found, file, _layer_shapes(found, width, inner))
        layers.append(found)
    stated = next((settings[n] for n in HEADS if isinstance(settings.get(n), int)), None)
    n_heads = settle(file, "n_heads", shown, stated if type(stated) is int else None)
    n_heads = settle(file, "n_heads", n_heads, hints.n_heads)
    if n_heads is None:
        raise CheckpointError(f"{file}: n_heads is not in the file; give --n-heads (n_heads=).")
    inner = layers[0]["query.weight"].shape[1]
    if inner % n_heads:
        raise CheckpointError(f"{file}: n_heads must divide the width {inner}, got {n_heads}.")
    ends: dict[str, Tensor] = {}
    for (part, kind), piece in layout.ends.items():
        tensor = tensors[piece.name].squeeze(0) if part == "positions" else tensors[piece.name]
        if part == "words":
            continue
        if part in ("read_in", "read_out") and kind == "weight":
            if tensor.ndim != 2:
                raise CheckpointError(f"{file}: {piece.name} must be a matrix.")
            tensor = tensor.mT if piece.axes != "in,out" else tensor
        ends[f"{part}.{kind}"] = tensor
    if "read_in.weight" in ends and "read_out.weight" not in ends:
        raise CheckpointError(f"{file}: a read-in needs a read-out beside it, got none.")
    width = len(layers[0]["query.weight"])
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("final_norm.weight", "final_norm.bias", "read_in.bias"), (width,)
    )
    for name, axis in (("read_in.weight", 1), ("read_out.weight", 0), ("positions.weight", 1)):
        if name in ends:
            size = ends[name].shape[1 - axis] if ends[name].ndim == 2 else 1
            shapes[name] = (size, width) if axis else (width, size)
    if "read_out.weight" in shapes:
        shapes["read_out.bias"] = shapes["read_out.weight"][1:]
    _require_shapes(ends, file, shapes)
    return Parts(tuple(layers), ends, n_heads)


def _layer_shapes(
    found: Mapping[str, Tensor], width: int, inner: int
) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's tensors, matrices [in, out]; the MLP may be of any inner width."""
    shapes: dict[str, tuple[int, ...]] = {"out.weight": (inner, width), "out.bias": (width,)}
    for name in ("query", "key", "value"):
        shapes |= {f"{name}.weight": (width, inner), f"{name}.bias": (inner,)}
    for name in ("norm1", "norm2"):
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    if "mlp_in.weight" in found:
        hidden, written = found["mlp_in.weight"].shape[1], found["mlp_out.weight"].shape[1]
        shapes |= {"mlp_in.weight": (width, hidden), "mlp_in.bias": (hidden,)}
        shapes |= {"mlp_out.weight": (hidden, min(written, width))}
        shapes["mlp_out.bias"] = shapes["mlp_out.weight"][1:]
    return shapes


def _require_shapes(
    found: Mapping[str, Tensor], file: Path, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    for name, tensor in found.items():
        if name not in shapes:
            raise CheckpointError(f"{file}: {name} has no matrix beside it.")
        require_shape(file, name, tensor, shapes[name])


HEADS = ("n_head", "num_heads", "num_attention_heads", "n_heads", "nhead")


def _beside(
    pieces: tuple[Piece, ...], tensors: Mapping[str, Tensor], file: Path, width: int
) -> dict[str, Tensor]:
    """Norms and MLP of a layer; matrices [in, out], turned so that they meet the stream."""
    found: dict[str, Tensor] = {}
    for piece in pieces:
        name, tensor = f"{piece.part}.{piece.kind}", tensors[piece.name]
        if piece.part not in ("mlp_in", "mlp_out", "norm1", "norm2"):
            continue
        if name in found:
            raise CheckpointError(
                f"{file}: {piece.name} is a second tensor for {name}; MLPs have two layers here."
            )
        if piece.part.startswith("mlp") and piece.kind == "weight":
            if tensor.ndim != 2:
                raise CheckpointError(f"{file}: {piece.name} must be a matrix.")
            near = 0 if piece.part == "mlp_in" else 1
            by_torch = tensor.shape[1 - near] == width and piece.axes != "in,out"
            tensor = tensor.mT if by_torch or tensor.shape[near] != width else tensor
        found[name] = tensor
    if ("mlp_in.weight" in found) != ("mlp_out.weight" in found):
        raise CheckpointError(f"{file}: an MLP needs both of its matrices, got one.")
    return found


def _checkpoint(parts: Parts, file: Path, choices: Choices, hints: Hints) -> Checkpoint:
    width, given = parts.width, {**dict(hints.task or {}), **hints.given}
    n_tokens = len(parts.ends["read_in.weight"]) if "read_in.weight" in parts.ends else width
    read = parts.ends["read_out.weight"].shape[1] if "read_out.weight" in parts.ends else None
    asked = given.get("d_y")
    d_y = settle(file, "d_y", read, asked if isinstance(asked, int) else None) or 1
    d_x = n_tokens if choices["layout"] == "in_turn" else n_tokens - d_y
    if hints.d_x not in (None, d_x):
        raise CheckpointError(f"{file}: d_x must be the weights' {d_x}, got {hints.d_x}.")
    around = parts.ends.keys() & {"read_in.weight", "read_out.weight"}
    apart = not choices["residual"]
    stream = width * 3 if apart else width
    model_fields: dict[str, object] = {
        **{name: choices[name] for name in ("norm", "activation", "layout", "score")},
        "attend_to_self": choices["attend_to_self"],
        "n_layers": len(parts.layers),
        "n_heads": parts.n_heads,
        "d_head": parts.layers[0]["query.weight"].shape[1] // parts.n_heads,
        "biases": parts.biases,
        "d_model": stream if around or apart else None,
        "final_norm": "final_norm.weight" in parts.ends,
    }
    if parts.has("mlp_in.weight"):
        model_fields["d_mlp"] = parts.layers[0]["mlp_in.weight"].shape[1]
    positions = parts.ends.get("positions.weight")
    if positions is not None:
        model_fields["n_positions"] = len(positions)
    task_fields = {"d_x": d_x, "d_y": d_y, **dict(hints.task or {})}
    try:
        model = build(ModelConfig, model_fields, "model.")
        task = build(TaskConfig, task_fields, "task.")
        if positions is not None and "context_length" not in task_fields:
            most = (len(positions) - 1) // (2 if model.layout == "in_turn" else 1)
            task = replace(task, context_length=min(task.context_length, most))
        config = ExperimentConfig(task=task, model=model)
        found = _joined(parts, model, n_tokens, d_y, apart=apart)
        weights = Weights(model, task.d_x, task.d_y, found)
    except ValueError as error:
        raise CheckpointError(f"{file}: {one_line(error)}") from None
    if hints.scale is not None:
        weights = replace(weights, scale=hints.scale)
    return Checkpoint(file, config, 0, weights, FORMAT)


def _joined(
    parts: Parts, model: ModelConfig, n_tokens: int, d_y: int, *, apart: bool
) -> dict[str, Tensor]:
    """The tensors by their names in HookedTransformer.

    Args:
        apart: Whether nothing is added up: the stream is then three streams side by side, of which the token is the
            first, what attention writes the second and what the MLP writes the third.
    """
    dtype = torch.promote_types(torch.float32, parts.layers[0]["query.weight"].dtype)
    width, n_heads = parts.width, parts.n_heads
    blocks = 3 if apart else 1

    def placed(tensor: Tensor, axis: int, block: int) -> Tensor:
        """A tensor whose axis of the stream's width lies in one of the blocks."""
        if not apart:
            return tensor
        behind = (blocks - block) * width - tensor.shape[axis]
        sides = [0, 0] * (tensor.ndim - 1 - axis) + [block * width, behind]
        return pad(tensor, sides)

    found: dict[str, Tensor] = {}
    last = 2 if parts.has("mlp_in.weight") else 1
    for number, layer in enumerate(parts.layers):
        at = f"blocks.{number}"
        for x, name in (("Q", "query"), ("K", "key"), ("V", "value")):
            heads = layer[f"{name}.weight"].unflatten(1, (n_heads, -1)).transpose(0, 1)
            found[f"{at}.attn.W_{x}"] = placed(heads, 1, 0)
        found[f"{at}.attn.W_O"] = placed(layer["out.weight"].unflatten(0, (n_heads, -1)), 2, 1)
        if model.biases:
            inner = layer["query.weight"].shape[1]
            for x, name in (("Q", "query"), ("K", "key"), ("V", "value")):
                bias = layer.get(f"{name}.bias", torch.zeros(inner))
                found[f"{at}.attn.b_{x}"] = bias.unflatten(0, (n_heads, -1))
            out = layer.get("out.bias", torch.zeros(layer["out.weight"].shape[1]))
            found[f"{at}.attn.b_O"] = placed(out, 0, 1)
        for name, here in (("norm1", "ln1"), ("norm2", "ln2")):
            if f"{name}.weight" in layer:
                scale = layer[f"{name}.weight"]
                found[f"{at}.{here}.w"] = scale
                found[f"{at}.{here}.b"] = layer.get(f"{name}.bias", torch.zeros_like(scale))
        if model.d_mlp is not None:
            found[f"{at}.mlp.W_in"] = placed(layer["mlp_in.weight"], 0, 1)
            found[f"{at}.mlp.W_out"] = placed(layer["mlp_out.weight"], 1, 2)
            if model.biases:
                written = layer["mlp_out.weight"].shape[1]
                found[f"{at}.mlp.b_in"] = layer.get("mlp_in.bias", torch.zeros(model.d_mlp))
                out = layer.get("mlp_out.bias", torch.zeros(written))
                found[f"{at}.mlp.b_out"] = placed(out, 0, 2)
    if model.final_norm:
        scale = parts.ends["final_norm.weight"]
        found["ln_final.w"] = scale
        found["ln_final.b"] = parts.ends.get("final_norm.bias", torch.zeros_like(scale))
    if model.n_positions is not None:
        found["pos_embed.W_pos"] = placed(parts.ends["positions.weight"], 1, 0)
    if model.d_model is not None:
        read_in = parts.ends.get("read_in.weight", torch.eye(width)[:n_tokens])
        written = parts.layers[-1]["mlp_out.weight"].shape[1] if last == 2 else width
        read_out = parts.ends.get("read_out.weight", torch.eye(written)[:, -d_y:])
        found["W_in"] = placed(read_in, 1, 0)
        found["unembed.W_U"] = placed(read_out, 0, last)
        if model.biases:
            b_in = parts.ends.get("read_in.bias", torch.zeros(width))
            found["b_in"] = placed(b_in, 0, 0)
            found["unembed.b_U"] = parts.ends.get("read_out.bias", torch.zeros(d_y))
    return {name: tensor.to(dtype).contiguous().clone() for name, tensor in found.items()}


def _loss(checkpoint: Checkpoint) -> tuple[float, float]:
    """Mean squared error over that of predicting 0 on prompts of the task, and its standard error."""
    task = checkpoint.task
    per_prompt = (task.context_length + 1) * max(
        task.d_x + task.d_y, checkpoint.config.model.d_model or 1
    )
    count = max(2, min(N_PROMPTS, N_NUMBERS // per_prompt))
    prompts = sample_prompts(
        task, count, generator=generator_for(0, "eval", 0), dtype=torch.float64
    )
    prediction = checkpoint.predictor.run(prompts, [[]])[0].double()
    error = (prediction - prompts.y_query).square().mean(1)
    size = prompts.y_query.square().mean(1)
    ratio = error.mean() / size.mean()
    spread = (error - ratio * size).std() / size.mean() / count**0.5
    return float(ratio.nan_to_num(torch.inf)), float(spread.nan_to_num(torch.inf))
