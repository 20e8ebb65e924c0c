"""Exchange with HookedTransformer of transformer-lens 2.x and 3.x, by file.

Out: a folder with a state dict that HookedTransformer takes as it is, a side-car that says the rest and
a script that loads them. In: such a folder, or a state dict alone, of a causal one-layer model.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.io.atomic import writing
from mechinterp.checkpoints.io.errors import CheckpointError, naming
from mechinterp.checkpoints.io.locks import claimed
from mechinterp.checkpoints.io.tensor_files import read_arrays
from mechinterp.checkpoints.native.folder import document_of, read_document
from mechinterp.checkpoints.native.folder_tensors import fill_with_tensors
from mechinterp.checkpoints.native.recipe import LOAD
from mechinterp.checkpoints.native.tensors import PREFIX, state_dict, weights_from
from mechinterp.config import ExperimentConfig, TaskConfig
from mechinterp.models.heads import AttentionWeights
from mechinterp.models.shapes import BIASES, NAMES
from mechinterp.models.weights import weights_of_layer, why_no_circuits

FORMAT = "transformer-lens"
SIDE_CAR = "transformer_lens.json"
LEAST_N_CTX = 1024
WEIGHT = r"^blocks\.\d+\.attn\.W_[QKVO]$"
# Tensors that our model has no place for; HookedTransformer or a Bridge has them all the same.
ZERO = {
    "embed.W_E": "tokens are vectors (x, y) and enter as they are, by start_at_layer=0; else it is a model of word tokens",
    "pos_embed.W_pos": "tokens are vectors (x, y), to which no position is added",
    "unembed.b_U": "the model has no bias behind its read-out",
    **{
        f"blocks.0.mlp.{name}": "the model has no MLP"
        for name in ("W_in", "b_in", "W_out", "b_out")
    },
}
READ_OUT, MASK = "unembed.W_U", PREFIX + "mask"
KNOWN = {*ZERO, READ_OUT, MASK, PREFIX + "IGNORE", *(PREFIX + name for name in (*NAMES, *BIASES))}


def positions_for(task: TaskConfig) -> int:
    """HookedTransformer's n_ctx: more than a prompt has, and enough for longer contexts than the task's."""
    return max(LEAST_N_CTX, task.context_length + 2)


def write_exchange(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the weights, the script that loads them and, last, the side-car.

    Raises:
        CheckpointError: If HookedTransformer has no such attention, or the folder cannot be written.
    """
    found = why_no_circuits(checkpoint.config.model)
    if found is not None:
        raise CheckpointError(
            f"{checkpoint.path}: HookedTransformer takes one layer of attention from here, got {found}."
        )
    # HookedTransformer has no merged heads: it gets W_Q = W_QK and W_K = I, and so does the side-car.
    config = replace(checkpoint.config, model=replace(checkpoint.config.model, merged_qk=False))
    if config.model.score != "softmax":
        raise CheckpointError(
            f"{checkpoint.path}: HookedTransformer has softmax attention only, got score {config.model.score!r}."
        )
    if config.model.attend_to_self:
        raise CheckpointError(
            f"{checkpoint.path}: the script that loads the model makes its mask strict, "
            "got a model whose query attends to itself."
        )
    document = document_of(config, step=checkpoint.step, assumed=checkpoint.assumed)
    text = json.dumps(document | _settings(config), indent=2) + "\n"
    circuits = replace(checkpoint.weights.circuits, merged_qk=False)
    state = hooked_state(circuits, n_ctx=positions_for(config.task))
    with writing(folder, SafetensorError), claimed(folder, last=SIDE_CAR) as claim:
        claim.write("model.safetensors", partial(fill_with_tensors, tensors=state))
        claim.write("load.py", lambda file: file.write_text(LOAD, encoding="utf-8"))
        claim.write(SIDE_CAR, lambda file: file.write_text(text, encoding="utf-8"))


def hooked_state(circuits: AttentionWeights, *, n_ctx: int) -> dict[str, Tensor]:
    """HookedTransformer's whole state dict but for the mask, whose shape depends on the version."""
    n_heads, d_model, d_head = circuits.W_Q.shape
    per_head = circuits.W_Q.new_zeros(n_heads, d_head, device="cpu")
    read_out = torch.eye(d_model, dtype=circuits.W_Q.dtype)[:, circuits.d_x :]
    others = {
        "embed.W_E": torch.zeros_like(read_out.mT).contiguous(),
        "pos_embed.W_pos": per_head.new_zeros(n_ctx, d_model),
        **{PREFIX + name: per_head.clone() for name in ("b_Q", "b_K", "b_V")},
        PREFIX + "b_O": per_head.new_zeros(d_model),
        READ_OUT: read_out.contiguous(),
        "unembed.b_U": per_head.new_zeros(circuits.d_y),
    }
    return others | state_dict(weights_of_layer(circuits))


def read_exchange(folder: Path) -> Checkpoint:
    """The checkpoint in an exchange folder.

    Raises:
        CheckpointError: If the side-car or the weights cannot be read, or do not fit together.
    """
    document, config = read_document(folder / SIDE_CAR)
    for name, expected in _settings(config).items():
        got = document.get(name)
        if name != "n_ctx" and (got != expected or type(got) is not type(expected)):
            raise CheckpointError(f"{folder / SIDE_CAR}: {name} must be {expected!r}, got {got!r}.")
    file = folder / "model.safetensors"
    tensors = read_arrays(file)
    with naming(file):
        _, said = hooked_layer(tensors, config.task.d_y)
        if said.get("attend_to_self"):
            raise ValueError(f"{MASK} must be strict causal, as the side-car says.")
        if not config.model.biases:
            reason = "the side-car says that there are no biases"
            _require_zero(tensors, dict.fromkeys((PREFIX + name for name in BIASES), reason))
    weights = weights_from(tensors, config, file)
    assumed = document.get("assumed", {})
    return Checkpoint(folder, config, document["step"], weights, FORMAT, assumed)


def hooked_layer(
    tensors: Mapping[str, Tensor], d_y: int | None = None
) -> tuple[dict[str, Tensor], dict[str, bool]]:
    """The attention of a HookedTransformer or a Bridge, and `attend_to_self` where a stored mask says it.

    Outputs are cut to the y entries where a read-out says how many there are.

    Args:
        d_y: Number of responses; None: the read-out's.
    Raises:
        ValueError: If the tensors are not those of a causal one-layer model without positions, norms and
            an MLP, which reads out the y entries.
    """
    layers = {name.split(".")[1] for name in tensors if name.startswith("blocks.")}
    if len(layers) > 1:
        raise ValueError(f"the model must have one layer, got {len(layers)}.")
    for name in sorted(tensors):
        if any(part.startswith("ln") for part in name.split(".")):
            raise ValueError(f"the model must have no LayerNorm, got {name}.")
        if name not in KNOWN:
            raise ValueError(
                f"{name} is not among the tensors of an attention-only HookedTransformer of one layer."
            )
    _require_zero(tensors, ZERO)
    for name in NAMES:
        tensor = tensors.get(PREFIX + name)
        if tensor is None or tensor.ndim != 3:
            got = "nothing" if tensor is None else f"shape {tuple(tensor.shape)}"
            raise ValueError(f"{PREFIX}{name} must have three axes, head first, got {got}.")
    found = {n: tensors[PREFIX + n] for n in (*NAMES, *BIASES) if PREFIX + n in tensors}
    if (read_out := tensors.get(READ_OUT)) is not None:
        d_model = found["W_Q"].shape[1]
        d_y = (read_out.shape[1] if read_out.ndim == 2 else 1) if d_y is None else d_y
        expected = torch.eye(d_model)[:, d_model - d_y :]
        if d_y >= d_model or not torch.equal(read_out.to(expected), expected):
            raise ValueError(
                f"{READ_OUT} must read the y entries as they are, [d_model, d_y] = "
                f"{list(expected.shape)} with ones at y and zeros elsewhere, got another of shape {list(read_out.shape)}."
            )
        found |= {name: found[name][..., -d_y:] for name in {"W_O", "b_O"} & set(found)}
    return found, _mask_says(tensors)


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


def _require_zero(tensors: Mapping[str, Tensor], reasons: Mapping[str, str]) -> None:
    for name, reason in reasons.items():
        if name in tensors and tensors[name].any():
            largest = tensors[name].to(torch.complex128).abs().max().item()
            raise ValueError(f"{name} must be zero ({reason}), got entries up to {largest:.3g}.")


def _mask_says(tensors: Mapping[str, Tensor]) -> dict[str, bool]:
    """Whether the query is among its keys, by a stored mask; nothing without one, and from 3.5.0 on an empty one is stored."""
    mask = tensors.get(MASK)
    if mask is None or mask.numel() == 0:
        return {}
    allowed = torch.ones(mask.shape, dtype=torch.bool)
    for diagonal, attends in ((-1, False), (0, True)):
        if mask.ndim == 2 and torch.equal(mask.bool(), allowed.tril(diagonal)):
            return {"attend_to_self": attends}
    raise ValueError(
        f"{MASK} must be causal, mask.tril(-1) or mask.tril(), got another of shape {list(mask.shape)}."
    )
