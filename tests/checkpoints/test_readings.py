"""Shipped models, saved under names that do not say their score: the true label, or the option that decides."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mechinterp.analysis.patterns import classify
from mechinterp.checkpoints.errors import CheckpointError
from mechinterp.checkpoints.hints import COLUMNS
from mechinterp.checkpoints.loading import convert, load
from mechinterp.checkpoints.native import Checkpoint
from mechinterp.config import SCORES
from mechinterp.models.functional import AttentionWeights

SHIPPED = Path(__file__).parents[2] / "checkpoints"
SOFTMAX = ("softmax-h1-s0", "softmax-h2-s0", "softmax-h4-s0", "kms-0.3-h1-s0", "kms-0.5-h2-s0")
LINEAR = (
    *("linear-h1-s0", "linear-h2-s0", "linear-merged-s0"),
    *("linear-separate-s2", "linear-rank1-s2", "linear-rank8-s2"),
)
OTHERS = ("tanh-h2-s0", "affine-0.8-h2-s0", "affine-0.5-h2-s1", "square-0.8-h2-s0")
SEVERAL = ("two-tasks-h1-s0", "two-tasks-h2-s0", "two-tasks-h4-s0", "shared-tasks-h3-s0")


def shipped(name: str) -> Checkpoint:
    checkpoint = load(SHIPPED / name)
    assert isinstance(checkpoint, Checkpoint)
    return checkpoint


def as_circuits(weights: AttentionWeights, file: Path, *, y_first: bool = False) -> Path:
    turn = -weights.d_x if y_first else 0
    QK, OV = weights.QK.roll((turn, turn), (1, 2)), weights.OV.roll(turn, 1)
    np.savez(file, QK=QK.numpy(), OV=OV.numpy())
    return file


def as_layers(weights: AttentionWeights, file: Path) -> Path:
    """Layers query, key and value, with the scale of the scores that no file says in the query."""
    OV = torch.nn.functional.pad(weights.OV, (weights.d_x, 0)).mT
    queries = weights.W_Q * (1 if weights.score == "softmax" else weights.scale)
    state = {"query": queries.mT, "key": weights.W_K.mT, "value": OV}
    save_file(
        {f"{name}.weight": heads.flatten(0, 1).contiguous() for name, heads in state.items()}, file
    )
    return file


LAYOUTS = {"circuits": (as_circuits, ".npz"), "layers": (as_layers, ".safetensors")}


def stated_task(checkpoint: Checkpoint) -> dict:
    return asdict(checkpoint.task)
