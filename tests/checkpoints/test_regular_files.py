"""Pipes, sockets and devices in place of files: refused, never opened, for to open a pipe waits for its writer."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mechinterp.checkpoints.io.files import read_json
from mechinterp.checkpoints.io.tensor_files import SUFFIXES, read_arrays
from mechinterp.checkpoints.load import convert
from mechinterp.training.state import read_state, stored_models
from tests.checkpoints.files import assert_refused, hugging_face
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
    assert_refused(f"^{file}: must be a regular file, got a pipe", read, file)


def test_a_pipe_in_a_folder(native: Path, tmp_path: Path):
    checkpoint = load(native)
    state = {"W_Q": torch.ones(1), "W_K": torch.ones(1)}
    shards = hugging_face(tmp_path / "hf", {}, state, shards=2)
    for file, read in {
        native / "history.parquet": lambda: checkpoint.history,
        native / "snapshots" / "5.safetensors": lambda: checkpoint.snapshots,
        native / "model.safetensors": lambda: load(native),
        shards / "model-1.safetensors": lambda: load(shards),
    }.items():
        piped(file)
        assert_refused(f"^{file}: must be a regular file, got a pipe", read)


def test_a_pipe_itself(tmp_path: Path):
    assert_refused("this is another file", load, piped(tmp_path / "x.pth"))
    assert_refused(r"this has no config\.json", load, piped(tmp_path / "config.json").parent)


def test_sockets_and_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("x.pth")
        assert_refused("must be a regular file, got a socket", read_arrays, Path("x.pth"))
    assert_refused("must be a regular file, got a device", read_arrays, Path(os.devnull))
