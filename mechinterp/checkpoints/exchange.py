"""Exchange with HookedTransformer of transformer-lens 2.x and 3.x, by file.

Out: a folder with a state dict that HookedTransformer takes as it is, a side-car that says the rest and
a script that loads them. In: such a folder, or a state dict alone, of a strictly causal one-layer model.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from mechinterp.checkpoints.errors import CheckpointError, one_line
from mechinterp.checkpoints.files import write_atomically
from mechinterp.checkpoints.native import (
    PREFIX,
    Checkpoint,
    document_of,
    read_document,
    read_tensors,
    state_dict,
    weights_from,
)
from mechinterp.checkpoints.recipe import LOAD
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.fields import build, flatten
from mechinterp.models.functional import NAMES, AttentionWeights

FORMAT = "transformer-lens"
SIDE_CAR = "transformer_lens.json"
SUFFIXES = (".pt", ".pth", ".safetensors")
LEAST_N_CTX = 1024

BIASES = ("b_Q", "b_K", "b_V", "b_O")
# Tensors that our model has no place for; HookedTransformer or a Bridge has them all the same.
ZERO = {
    "embed.W_E": "tokens are vectors (x, y) and enter as they are, by start_at_layer=0",
    "pos_embed.W_pos": "tokens are vectors (x, y), to which no position is added",
    **{PREFIX + name: "the model has no biases" for name in BIASES},
    "unembed.b_U": "the model has no biases",
    **{
        f"blocks.0.mlp.{name}": "the model has no MLP"
        for name in ("W_in", "b_in", "W_out", "b_out")
    },
}
READ_OUT, MASK = "unembed.W_U", PREFIX + "mask"
KNOWN = {*ZERO, READ_OUT, MASK, PREFIX + "IGNORE", *(PREFIX + name for name in NAMES)}


def positions_for(task: TaskConfig) -> int:
    """HookedTransformer's n_ctx: more than a prompt has, and enough for longer contexts than the task's."""
    return max(LEAST_N_CTX, task.context_length + 2)


def write_exchange(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the weights, the script that loads them and, last, the side-car.

    Raises:
        CheckpointError: If HookedTransformer has no such attention, or the folder cannot be written.
    """
    config = checkpoint.config
    if config.model.score != "softmax":
        raise CheckpointError(
            f"{checkpoint.path}: HookedTransformer has softmax attention only, got score {config.model.score!r}."
        )
    document = document_of(config, step=checkpoint.step, assumed=checkpoint.assumed)
    text = json.dumps(document | _settings(config), indent=2) + "\n"
    state = hooked_state(checkpoint.weights, n_ctx=positions_for(config.task))
    try:
        write_atomically(folder / "model.safetensors", lambda file: save_file(state, file))
        write_atomically(folder / "load.py", lambda file: file.write_text(LOAD, encoding="utf-8"))
        write_atomically(folder / SIDE_CAR, lambda file: file.write_text(text, encoding="utf-8"))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot be written ({one_line(error)}).") from None


def hooked_state(weights: AttentionWeights, *, n_ctx: int) -> dict[str, Tensor]:
    """HookedTransformer's whole state dict but for the mask, whose shape depends on the version."""
    n_heads, d_model, d_head = weights.W_Q.shape
    per_head = weights.W_Q.new_zeros(n_heads, d_head, device="cpu")
    read_out = torch.eye(d_model, dtype=weights.W_Q.dtype)[:, weights.d_x :]
    return state_dict(weights) | {
        "embed.W_E": torch.zeros_like(read_out.mT).contiguous(),
        "pos_embed.W_pos": per_head.new_zeros(n_ctx, d_model),
        **{PREFIX + name: per_head.clone() for name in ("b_Q", "b_K", "b_V")},
        PREFIX + "b_O": per_head.new_zeros(d_model),
        READ_OUT: read_out.contiguous(),
        "unembed.b_U": per_head.new_zeros(weights.d_y),
    }


def read_exchange(path: Path, *, task: Mapping[str, object] | None = None) -> Checkpoint:
    """The checkpoint in an exchange folder or in the file of a state dict.

    Args:
        task: Fields of TaskConfig, for a state dict alone; the softmax paper's stand for those left out.
    Raises:
        CheckpointError: If the file cannot be read, or is not of a strictly causal one-layer model
            without positions, norms and biases, which reads out the y entries.
    """
    if not path.is_dir():
        tensors = _require_plain(_read_state(path), path)
        config, assumed = _assume(tensors, task or {}, path)
        return Checkpoint(path, config, 0, _weights(tensors, config, path), FORMAT, assumed)
    document, config = read_document(path / SIDE_CAR)
    for name, expected in _settings(config).items():
        found = document.get(name)
        if name != "n_ctx" and not _same(found, expected):
            raise CheckpointError(f"{path / SIDE_CAR}: {name} must be {expected!r}, got {found!r}.")
    file = path / "model.safetensors"
    weights = _weights(_require_plain(read_tensors(file), file), config, file)
    return Checkpoint(path, config, document["step"], weights, FORMAT, document.get("assumed", {}))


def _settings(config: ExperimentConfig) -> dict[str, object]:
    """What the side-car says besides the experiment, for those who do not have this package."""
    return {
        "n_layers": 1,
        "n_heads": config.model.n_heads,
        "d_model": config.d_model,
        "d_head": config.d_head,
        "d_vocab": config.task.d_y,
        "n_ctx": positions_for(config.task),
        "attn_scale": math.sqrt(config.d_head),
        "strict_causal": True,
        "attention": "softmax",
        "readout": "y_entries",
    }


def _same(found: object, expected: object) -> bool:
    if isinstance(expected, float) and isinstance(found, float):
        return math.isclose(found, expected)
    return type(found) is type(expected) and found == expected


def _read_state(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        return read_tensors(file)
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({one_line(error)}).") from None
    except Exception as error:
        # PyTorch's own words recommend to run what the file holds.
        raise CheckpointError(
            f"{file}: must hold tensors that can be read without running code, got a {type(error).__name__}."
        ) from None
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in state.items()
    ):
        raise CheckpointError(f"{file}: must hold a state dict, names with a tensor each.")
    # Parameters, and views of larger tensors, become plain tensors.
    return {name: tensor.detach().contiguous() for name, tensor in state.items()}


def _require_plain(tensors: dict[str, Tensor], file: Path) -> dict[str, Tensor]:
    """Refuse what a strictly causal one-layer model on vectors (x, y) has no place for."""
    layers = {name.split(".")[1] for name in tensors if name.startswith("blocks.")}
    if len(layers) > 1:
        raise CheckpointError(f"{file}: the model must have one layer, got {len(layers)}.")
    for name in sorted(tensors):
        if any(part.startswith("ln") for part in name.split(".")):
            raise CheckpointError(f"{file}: the model must have no LayerNorm, got {name}.")
        if name not in KNOWN:
            raise CheckpointError(
                f"{file}: {name} is not among the tensors of an attention-only HookedTransformer of one layer."
            )
    for name, reason in ZERO.items():
        if name in tensors and tensors[name].any():
            largest = tensors[name].abs().max().item()
            raise CheckpointError(
                f"{file}: {name} must be zero ({reason}), got entries up to {largest:.3g}."
            )
    for name in NAMES:
        tensor = tensors.get(PREFIX + name)
        if tensor is None or tensor.ndim != 3:
            got = "nothing" if tensor is None else f"shape {tuple(tensor.shape)}"
            raise CheckpointError(
                f"{file}: {PREFIX}{name} must have three axes, head first, got {got}."
            )
    _require_strict(tensors.get(MASK), file)
    return tensors


def _require_strict(mask: Tensor | None, file: Path) -> None:
    """Refuse a stored mask other than strict causal; from 3.5.0 on an empty one is stored."""
    if mask is None or mask.numel() == 0:
        return
    allowed = torch.ones(mask.shape, dtype=torch.bool)
    if mask.ndim == 2 and torch.equal(mask.bool(), allowed.tril(-1)):
        return
    ordinary = mask.ndim == 2 and torch.equal(mask.bool(), allowed.tril())
    got = "one that lets tokens attend to themselves" if ordinary else "another"
    raise CheckpointError(
        f"{file}: {MASK} must be strict causal, mask.tril(-1), as it must be stored also where a hook "
        f"makes it strict; got {got}."
    )


def _assume(
    tensors: Mapping[str, Tensor], task: Mapping[str, object], file: Path
) -> tuple[ExperimentConfig, dict[str, object]]:
    """The config of a state dict alone, and which of it the file does not say."""
    n_heads, d_model, d_head = tensors[PREFIX + "W_Q"].shape
    read_out = tensors.get(READ_OUT)
    given = {name: task[name] for name in ("d_x", "d_y") if name in task}
    if read_out is not None and read_out.ndim == 2:
        sizes = {"d_x": d_model - read_out.shape[1], "d_y": read_out.shape[1]}
    else:
        d_x = given.get("d_x")
        d_y = given.get("d_y", d_model - d_x if isinstance(d_x, int) else 1)
        sizes = {"d_x": d_model - d_y, "d_y": d_y} if isinstance(d_y, int) else {}
    model = ModelConfig(n_heads=n_heads, d_head=None if d_head == d_model else d_head)
    try:
        config = ExperimentConfig(task=build(TaskConfig, sizes | dict(task), "task."), model=model)
    except ValueError as error:
        raise CheckpointError(f"{file}: {one_line(error)}") from None
    for name, size in sizes.items():
        if getattr(config.task, name) != size:
            raise CheckpointError(
                f"{file}: task.{name} must be the weights' {size}, got {getattr(config.task, name)}."
            )
    said = {"task.d_x", "task.d_y", *flatten(dict(task), "task.")}
    said |= {f"model.{name}" for name in ("n_layers", "n_heads", "d_head")}
    if read_out is None and not given:
        said.remove("task.d_y")
    values = flatten(asdict(config)) | {"attn_scale": math.sqrt(d_head), "normalization": None}
    assumed = {name: value for name, value in values.items() if name not in said}
    mask = tensors.get(MASK)
    if mask is None or mask.numel() == 0:
        assumed["strict_causal"] = True
    return config, assumed | {"step": 0}


def _weights(
    tensors: Mapping[str, Tensor], config: ExperimentConfig, file: Path
) -> AttentionWeights:
    kinds = sorted({str(tensors[PREFIX + name].dtype) for name in NAMES})
    if len(kinds) > 1:
        raise CheckpointError(f"{file}: the weights must have one dtype, got {', '.join(kinds)}.")
    read_out = tensors.get(READ_OUT)
    expected = torch.eye(config.d_model)[:, config.task.d_x :]
    if read_out is not None and not torch.equal(read_out.to(expected), expected):
        raise CheckpointError(
            f"{file}: {READ_OUT} must read the y entries as they are, [d_model, d_y] = "
            f"{list(expected.shape)} with ones at y and zeros elsewhere, got another of shape {list(read_out.shape)}."
        )
    return weights_from(tensors, config, file)
