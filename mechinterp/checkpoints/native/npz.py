"""Weights as plain arrays in one .npz file that numpy can read, with the config as text."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.io.atomic import write_new, writing
from mechinterp.checkpoints.io.errors import CheckpointError, one_line
from mechinterp.checkpoints.native.folder import document_of, document_parts
from mechinterp.checkpoints.native.tensors import PREFIX, state_dict, weights_from
from mechinterp.models.shapes import tensor_shapes

FORMAT = "arrays"
CONFIG = "config"


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
    document = document_of(checkpoint.config, step=checkpoint.step, assumed=checkpoint.assumed)
    arrays = {name: t.numpy() for name, t in state_dict(checkpoint.weights).items()}
    if checkpoint.config.model.one_attention:
        arrays = {name.removeprefix(PREFIX): array for name, array in arrays.items()}
        for name in {"W_O", "b_O"} & set(arrays):
            arrays[name] = arrays[name][..., checkpoint.task.d_x :]
    text = np.array(json.dumps(document))
    # An open file, because numpy would append .npz to the name of the temporary file.
    with writing(file):
        write_new(file, lambda target: _save(target, arrays | {CONFIG: text}))
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
        raise CheckpointError(f"{file}: {CONFIG} must be JSON ({one_line(error)}).") from None
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
    return Checkpoint(file, config, document["step"], weights, FORMAT, document["assumed"])
