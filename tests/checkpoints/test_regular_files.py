"""Pipes, sockets and devices in place of files: refused, never opened, for to open a pipe waits for its writer."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mechinterp.checkpoints.io.atomic import read_json
from mechinterp.checkpoints.io.errors import CheckpointError
from mechinterp.checkpoints.io.tensor_files import SUFFIXES, read_arrays
from mechinterp.checkpoints.load import convert
from mechinterp.training.state import read_state, stored_models
from tests.checkpoints.files import assert_refused
from tests.checkpoints.files import read as load
from tests.checkpoints.foreign_files import random_heads, softmax_paper_state

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes"),
    # What hangs ends here: a pipe without a writer is waited for for ever.
    pytest.mark.usefixtures("alarm"),
]


@pytest.fixture
def alarm():
    import signal

    def stop(*_: object) -> None:
        raise TimeoutError("a pipe was opened")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def native(tmp_path: Path) -> Path:
    torch.save(softmax_paper_state(random_heads()), tmp_path / "x.pth")
    convert(load(tmp_path / "x.pth"), "native", tmp_path / "native")
    return tmp_path / "native"


def piped(file: Path) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    return file


READERS: dict[str, Callable[[Path], object]] = {
    **{suffix: read_arrays for suffix in SUFFIXES},
    ".json": read_json,
    ".state": read_state,
    ".models": stored_models,
}


@pytest.mark.parametrize(("suffix", "read"), READERS.items(), ids=READERS)
def test_a_pipe_is_no_file(tmp_path: Path, suffix: str, read: Callable[[Path], object]):
    file = piped(tmp_path / f"x{suffix}")
    with pytest.raises(CheckpointError, match="must be a regular file, got a pipe") as error:
        read(file)
    assert str(error.value).startswith(f"{file}: ")


def test_a_pipe_in_a_native_folder(native: Path):
    checkpoint = load(native)
    for file, read in {
        native / "history.parquet": lambda: checkpoint.history,
        native / "snapshots" / "5.safetensors": lambda: checkpoint.snapshots,
        native / "model.safetensors": lambda: load(native),
    }.items():
        piped(file)
        with pytest.raises(CheckpointError, match="must be a regular file, got a pipe") as error:
            read()
        assert str(error.value).startswith(f"{file}: ")


def test_a_pipe_among_the_shards(tmp_path: Path):
    save_file({"W_Q": torch.ones(1)}, tmp_path / "a.safetensors")
    piped(tmp_path / "b.safetensors")
    (tmp_path / "config.json").write_text("{}")
    index = '{"weight_map": {"W_Q": "a.safetensors", "W_K": "b.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert_refused(r"b\.safetensors: must be a regular file, got a pipe", load, tmp_path)


def test_a_pipe_itself(tmp_path: Path):
    assert_refused("this is another file", load, piped(tmp_path / "x.pth"))
    assert_refused(r"this has no config\.json", load, piped(tmp_path / "config.json").parent)


def test_sockets_and_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("x.pth")
        assert_refused("must be a regular file, got a socket", read_arrays, Path("x.pth"))
    assert_refused("must be a regular file, got a device", read_arrays, Path(os.devnull))
