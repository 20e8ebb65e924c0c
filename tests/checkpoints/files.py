"""Files and folders of a test, what is read from them, and refusals."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.io.files import CheckpointError
from mechinterp.checkpoints.load import load
from mechinterp.models.weights import Weights


def saved(folder: Path, state: object) -> Path:
    """A file of torch.save."""
    torch.save(state, folder / "x.pt")
    return folder / "x.pt"


def loaded(folder: Path, state: object, **hints: object) -> Checkpoint:
    """What is read from such a file."""
    return read(saved(folder, state), **hints)


def hugging_face(
    folder: Path, settings: object, state: dict[str, Tensor], *, shards: int = 1
) -> Path:
    """A new folder as Hugging Face's tools write it, its tensors in one file or in several with an index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    if shards == 1:
        save_file(state, folder / "model.safetensors")
        return folder
    named = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(state)}
    for shard in set(named.values()):
        save_file({n: t for n, t in state.items() if named[n] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    return folder


def assert_refused(
    words: str, read: Callable[..., object], /, *arguments: object, **hints: object
) -> str:
    """The message of a CheckpointError that these words (a pattern) are found in, one line that can be printed."""
    with pytest.raises(CheckpointError, match=words) as error:
        read(*arguments, **hints)
    assert str(error.value).isprintable()
    return str(error.value)


def assert_same_circuits(actual: Weights, expected: Weights) -> None:
    """Equal QK and OV circuits but for rounding."""
    torch.testing.assert_close(actual.QK, expected.QK)
    torch.testing.assert_close(actual.OV, expected.OV)


def read(path: str | Path | list[Path], **hints: object) -> Checkpoint:
    """What is loaded, also where no reading predicts: random weights, say."""
    return load(path, **hints)
