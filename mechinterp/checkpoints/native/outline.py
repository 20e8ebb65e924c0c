"""What a checkpoint states, its numbers left where they are: enough to show it, and read without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pandas as pd

from mechinterp.checkpoints.io.errors import naming, printable
from mechinterp.checkpoints.io.headers import require_finite_in, require_shapes, shapes_in
from mechinterp.checkpoints.native.folder import (
    WEIGHTS,
    document_file,
    is_native,
    read_document,
    read_history,
    snapshot_steps,
)
from mechinterp.config import ExperimentConfig, TaskConfig


@dataclass(frozen=True, eq=False)
class Outline:
    """A checkpoint without its weights."""

    path: Path
    config: ExperimentConfig
    step: int
    shapes: Mapping[str, tuple[int, ...]]
    """Of the weights, by name."""
    format: str = "native"
    assumed: Mapping[str, object] = field(default_factory=dict)
    """What the file did not say and was filled in, by dotted name."""
    origin: Mapping[str, object] = field(default_factory=dict)
    """Of a model that training by its config would not give."""

    @property
    def name(self) -> str:
        """The folder's or file's name, printable; of a download from the hub that of its repository."""
        path = self.path.resolve()
        repository = path.parents[1].name if path.parent.name == "snapshots" else ""
        named = repository.rpartition("--")[2] if repository.startswith("models--") else path.name
        return printable(named)

    @property
    def task(self) -> TaskConfig:
        return self.config.task

    @cached_property
    def history(self) -> pd.DataFrame | None:
        """One row per logged step, layer (of several) and head: loss, eval_loss, ...; or None."""
        if self.format != "native":
            return None
        return read_history(self.path, self.config, self.step)

    @property
    def steps(self) -> list[int]:
        """Steps of the snapshots during training."""
        return snapshot_steps(self.path)


def outline_of(path: Path) -> Outline | None:
    """The outline of a checkpoint of this package, None if something else lies there.

    Raises:
        CheckpointError: If its config, or the names and shapes of its weights, are not as they must be, or some of
            its numbers are not finite.
    Example:
        >>> outline = outline_of(Path("checkpoints/softmax-h2-s0"))
        >>> outline.step, outline.shapes["blocks.0.attn.W_Q"]
        (500001, (2, 6, 6))
    """
    if not is_native(path):
        return None
    document, config = read_document(document_file(path))
    file = path / WEIGHTS
    with naming(file):
        shapes = require_shapes(shapes_in(file), config)
    require_finite_in(file, shapes)
    said = {name: document.get(name, {}) for name in ("assumed", "origin")}
    return Outline(path, config, document["step"], shapes, **said)
