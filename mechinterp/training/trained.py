"""A trained model with its history and snapshots, ready to be saved as a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from torch import Tensor

from mechinterp.checkpoints.checkpoint import save
from mechinterp.config import ExperimentConfig
from mechinterp.models.weights import Weights


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """A trained model; its fields are arguments of `save`."""

    config: ExperimentConfig
    weights: Weights
    step: int
    history: pd.DataFrame
    snapshots: dict[int, Weights]
    origin: Mapping[str, object] = field(default_factory=dict)
    """The checkpoint that the training started from; empty: random weights."""

    def save(self, folder: Path) -> None:
        """Write the checkpoint, beside other files of its run.

        Raises:
            CheckpointError: If a file with the same name exists, or the folder cannot be written.
        """
        save(folder, **vars(self), shared=True)


def history_of(
    steps: Tensor, losses: Mapping[str, Tensor], measured: Mapping[str, Tensor]
) -> pd.DataFrame:
    """One row per logged step, layer (if it is an axis) and head.

    Args:
        losses: One number per step, by name.
        measured: Arrays [step, head] or [step, layer, head], by name.
    """
    row, *axes = (each.ravel() for each in np.indices(next(iter(measured.values())).shape))
    columns = {"step": steps.numpy()[row]}
    columns |= dict(zip(("layer", "head")[-len(axes) :], axes, strict=True))
    columns |= {name: values.numpy()[row] for name, values in losses.items()}
    columns |= {name: values.flatten().numpy() for name, values in measured.items()}
    return pd.DataFrame(columns)
