"""Layers whose names are in the table of names, with what lies around their attention: norms, MLPs, read-in, read-out."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from mechinterp.checkpoints.errors import CheckpointError
from mechinterp.checkpoints.hints import ORIENTATIONS, Hints
from mechinterp.checkpoints.layer_readings import best_reading
from mechinterp.checkpoints.named_parts import Parts, parts_of
from mechinterp.checkpoints.names import Layout
from mechinterp.checkpoints.native import Checkpoint
from mechinterp.checkpoints.readings import Said

FORMAT = "named-layers"


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
        settings: What a config file beside the weights states: n_heads, norm_first, and fields of `JOINS`.
    Raises:
        CheckpointError: If shapes do not fit together, a part has no place here, or too much is left open.
    """
    tries: tuple[str, ...] = ORIENTATIONS if layout.open_axes else ORIENTATIONS[:1]
    tries = tries if hints.orientation is None else (hints.orientation,)
    settings = {**settings, **(hints.model or {})}
    sources: list[tuple[Said, Parts]] = []
    faults: list[CheckpointError] = []
    for axes in tries:
        try:
            parts = parts_of(tensors, layout, file, axes=axes, hints=hints, settings=settings)
            sources.append(({"orientation": axes}, parts))
        except CheckpointError as error:
            faults.append(error)
    if not sources:
        raise faults[0]
    return best_reading(sources, file, hints=hints, settings=settings, usual={}, format=FORMAT)
