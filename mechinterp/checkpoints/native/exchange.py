"""Exchange with other code by file: HookedTransformer of transformer-lens 2.x and 3.x, and numpy.

For HookedTransformer, writing makes a folder with a state dict that HookedTransformer loads
unchanged, a side-car file with all other settings, and a script that loads both. Reading takes such
a folder, or a state dict alone, of a causal one-layer model. For numpy, one .npz file has the
weights as plain arrays, and the config as text."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.foreign.tensors.lens import MASK, PREFIX, hooked_layer, require_zero
from mechinterp.checkpoints.io.files import CheckpointError, naming, one_line, write_new, writing
from mechinterp.checkpoints.io.locks import claimed
from mechinterp.checkpoints.io.tensor_files import read_arrays
from mechinterp.checkpoints.native.document import (
    document_of,
    document_parts,
    read_document,
    require_stated,
    sha256_of,
)
from mechinterp.checkpoints.native.folder import WEIGHTS_FILE
from mechinterp.checkpoints.native.tensors import fill_with_tensors, state_dict, weights_from
from mechinterp.config import ExperimentConfig, TaskConfig
from mechinterp.config.model import BIASES, NAMES, tensor_shapes
from mechinterp.models.weights import Weights

FORMAT = "transformer-lens"
ARRAYS_FORMAT = "arrays"
ARRAYS_CONFIG = "config"
"""Name of the config's text in an .npz file."""
SIDE_CAR = "transformer_lens.json"
LEAST_N_CTX = 1024
SCRIPT = Path(__file__).with_name("load.py.txt")
"""Script that is copied into the folder for its reader; this package never runs it."""


def positions_for(task: TaskConfig) -> int:
    """HookedTransformer's n_ctx: more than a prompt needs, so that longer contexts than the task's
    fit."""
    return max(LEAST_N_CTX, task.context_length + 2)


def write_exchange(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the weights, the script that loads them and, last, the side-car file.

    Raises:
        CheckpointError: If HookedTransformer cannot represent the attention, or the folder cannot
            be written.
    """
    # HookedTransformer has no merged heads: weights and side-car get W_Q = W_QK and W_K = I.
    config = replace(checkpoint.config, model=replace(checkpoint.config.model, merged_qk=False))
    with naming(checkpoint.path):
        if extra := config.model.beyond_one_layer:
            rule = "export to HookedTransformer needs one layer of attention"
            raise ValueError(f"{rule}, got {extra}.")
        if (score := config.model.score) != "softmax":
            raise ValueError(f"HookedTransformer has softmax attention only, got score {score!r}.")
        if config.model.attend_to_self:
            raise ValueError(
                "the script that loads the model uses a strict mask, got a model whose query attends to itself."
            )
    state = hooked_state(checkpoint.weights, n_ctx=positions_for(config.task))
    with claimed(folder, last=SIDE_CAR) as claim:
        claim.write(WEIGHTS_FILE, partial(fill_with_tensors, tensors=state))
        document = document_of(
            config,
            step=checkpoint.step,
            assumed=checkpoint.assumed_and_doubt,
            grounds=checkpoint.grounds,
            files={WEIGHTS_FILE: sha256_of(claim.waiting[WEIGHTS_FILE])},
        )
        text = json.dumps(document | _settings(config), indent=2) + "\n"
        claim.write("load.py", lambda file: file.write_bytes(SCRIPT.read_bytes()))
        claim.write(SIDE_CAR, lambda file: file.write_text(text, encoding="utf-8"))


def hooked_state(weights: Weights, *, n_ctx: int) -> dict[str, Tensor]:
    """HookedTransformer's state dict without the mask, whose shape depends on the version.

    The x columns of W_O, which no prediction reads, are zero.
    """
    d_x, d_model = weights.d_x, weights.d_model
    tensors = {f"attn.{name}": getattr(weights, name) for name in NAMES}
    tensors |= {name: t for name, t in weights.tensors.items() if name.startswith("attn.b_")}
    for name in {"attn.W_O", "attn.b_O"} & tensors.keys():
        tensors[name] = tensors[name].clone()
        tensors[name][..., :d_x] = 0
    separate = replace(weights, model=replace(weights.model, merged_qk=False), tensors=tensors)
    per_head = weights.W_V.new_zeros(weights.n_heads, weights.d_head, device="cpu")
    read_out = torch.eye(d_model, dtype=weights.dtype, device="cpu")[:, d_x:]
    others = {
        "embed.W_E": torch.zeros_like(read_out.mT).contiguous(),
        "pos_embed.W_pos": per_head.new_zeros(n_ctx, d_model),
        **{PREFIX + name: per_head.clone() for name in ("b_Q", "b_K", "b_V")},
        PREFIX + "b_O": per_head.new_zeros(d_model),
        "unembed.W_U": read_out.contiguous(),
        "unembed.b_U": per_head.new_zeros(weights.d_y),
    }
    return others | state_dict(separate)


def read_exchange(folder: Path) -> Checkpoint:
    """Checkpoint in an exchange folder.

    Raises:
        CheckpointError: If the side-car file or the weights cannot be read, do not fit together, or the weights are not
            those that the side-car file lists.
    """
    document, config = read_document(folder / SIDE_CAR)
    for name, expected in _settings(config).items():
        got = document.get(name)
        if name != "n_ctx" and (got != expected or type(got) is not type(expected)):
            raise CheckpointError(f"{folder / SIDE_CAR}: {name} must be {expected!r}, got {got!r}.")
    file = folder / WEIGHTS_FILE
    require_stated(file, document["files"])
    tensors = read_arrays(file)
    with naming(file):
        _, stated = hooked_layer(tensors, config.task.d_y)
        if stated.get("attend_to_self"):
            raise ValueError(f"{MASK} must be strict causal, as the side-car file states.")
        for name in set() if config.model.biases else {PREFIX + n for n in BIASES} & set(tensors):
            require_zero(name, tensors[name], "the side-car file states that there are no biases")
    weights = weights_from(tensors, config, file)
    return Checkpoint(
        folder,
        config,
        document["step"],
        weights,
        FORMAT,
        document["assumed"],
        **document["grounds"],
    )


def _settings(config: ExperimentConfig) -> dict[str, object]:
    """Settings in the side-car file for readers without this package, in addition to the
    experiment."""
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


def write_arrays(file: Path, checkpoint: Checkpoint) -> Path:
    """Write a model's tensors and its config. One attention layer gets W_Q, W_K (or W_QK), W_V
    [head, d_model, d_head], W_O [head, d_head, d_y] and biases; other models get all tensors by
    their names in HookedTransformer.

    Raises:
        CheckpointError: If the file exists, does not end in .npz or cannot be written.
    """
    if os.path.lexists(file):
        raise CheckpointError(f"{file}: already exists; it is not overwritten.")
    if file.suffix != ".npz":
        raise CheckpointError(f"{file}: must end in .npz.")
    document = document_of(
        checkpoint.config,
        step=checkpoint.step,
        assumed=checkpoint.assumed_and_doubt,
        grounds=checkpoint.grounds,
    )
    arrays = {name: t.numpy() for name, t in state_dict(checkpoint.weights).items()}
    if checkpoint.config.model.one_attention:
        arrays = {name.removeprefix(PREFIX): array for name, array in arrays.items()}
        for name in {"W_O", "b_O"} & set(arrays):
            arrays[name] = arrays[name][..., checkpoint.task.d_x :]
    text = np.array(json.dumps(document))
    # An open file, because numpy would append .npz to the name of the temporary file.
    with writing(file):
        write_new(file, lambda target: _save(target, arrays | {ARRAYS_CONFIG: text}))
    return file


def _save(target: Path, arrays: Mapping[str, np.ndarray]) -> None:
    with target.open("wb") as stream:
        np.savez(stream, **arrays)  # type: ignore[arg-type]  # numpy < 2.1 has no option allow_pickle


def read_stated(tensors: Mapping[str, Tensor], text: str, file: Path) -> Checkpoint:
    """Checkpoint from arrays that come with their config.

    Raises:
        CheckpointError: If the config cannot be read, or the arrays do not belong to such a model.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: {ARRAYS_CONFIG} must be JSON ({one_line(error)})."
        ) from None
    if isinstance(document, dict) and "experiment" not in document:
        document = {"format_version": 1, "step": 0, "experiment": document}
    document, config = document_parts(document, file)
    known = tensor_shapes(config.model, config.task.d_x, config.task.d_y)
    named = {PREFIX + n if PREFIX + n in known else n: tensor for n, tensor in tensors.items()}
    if strange := [name.removeprefix(PREFIX) for name in named if name not in known]:
        raise CheckpointError(f"{file}: {strange[0]} is not among the arrays of such a model.")
    for name in {PREFIX + "W_O", PREFIX + "b_O"} & set(named) if config.model.one_attention else ():
        if named[name].ndim and named[name].shape[-1] == config.task.d_y:
            named[name] = torch.nn.functional.pad(named[name], (config.task.d_x, 0))
    weights = weights_from(named, config, file)
    return Checkpoint(
        file,
        config,
        document["step"],
        weights,
        ARRAYS_FORMAT,
        document["assumed"],
        **document["grounds"],
    )
