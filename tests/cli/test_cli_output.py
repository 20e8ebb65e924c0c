"""What is printed where standard output is closed, full or ASCII, where a disk is full, and of names with control characters."""

import errno
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from mechinterp.checkpoints.io.files import visible, write_new
from mechinterp.checkpoints.load import convert, load
from mechinterp.cli.printing import BROKEN_PIPE, say
from mechinterp.report.bars import progress_bar
from mechinterp.training.run import Progress
from tests.checkpoints.foreign_files import random_heads, softmax_paper_state
from tests.conftest import CHECKPOINTS, Run

H1 = CHECKPOINTS / "softmax-h1-s0"
COMMAND = [sys.executable, "-m", "mechinterp", "classify", H1, "--n-prompts", "64"]
INFO, HELP = [*COMMAND[:3], "info", H1], [*COMMAND[:3], "--help"]
REPORT = ("report", H1, "--n-prompts", 64, "--analysis", "circuits", "-q")


@pytest.mark.slow
@pytest.mark.parametrize("command", [INFO, HELP], ids=("info", "help"))
def test_a_reader_that_leaves_ends_the_command_quietly(command: list):
    # As `| head -1` does, before anything is written.
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (BROKEN_PIPE, b"")


@pytest.mark.slow
@pytest.mark.parametrize("streams", [">&-", ">&- 2>&-"])
def test_a_closed_standard_output_is_no_success(tmp_path: Path, streams: str):
    table = tmp_path / "table.csv"
    ran = subprocess.run(
        ["/bin/sh", "-c", f'"$@" {streams}', "sh", *COMMAND, "--out", table],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert len(ran.stderr.splitlines()) == (1 if streams == ">&-" else 0)
    assert table.read_text().count("kernel_regression") == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_an_encoding_lacks_is_escaped(monkeypatch: pytest.MonkeyPatch, encoding: str):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    say("R² ≤ 1")
    squared = "^2" if encoding == "ascii" else "²"
    assert stream.buffer.getvalue().decode(encoding) == f"R{squared} \\u2264 1\n"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
@pytest.mark.parametrize("command", [INFO, HELP], ids=("info", "help"))
def test_a_full_standard_output(command: list):
    with open("/dev/full", "w") as full:
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    told = "mechinterp: standard output: cannot be written (No space left on device).\n"
    assert (ran.returncode, ran.stderr) == (2, told)


@contextmanager
def full(size: int) -> Iterator[None]:
    """A disk on which no file grows beyond a size."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


SMALL = ("--set", "train.steps=20", "--set", "train.n_eval_prompts=16", "--device", "cpu", "-q")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "name", "limit"),
    [
        ((*REPORT, "--out"), "index.html", 2**20),
        (("classify", H1, "-q", "--out"), "table.csv", 0),
        (("convert", H1, "--to", "transformer-lens", "--out"), "model.safetensors", 100),
        (("train", "softmax-h1", *SMALL, "--out"), "training-0.safetensors", 100),
    ],
)
def test_a_full_disk_is_one_line_that_names_the_file_and_a_retry_works(
    run: Run, tmp_path: Path, command: tuple, name: str, limit: int
):
    file = tmp_path / "out" / name
    target = file if command[0] == "classify" else file.parent
    with full(limit):
        ran = run(*command, target)
    assert ran.code == 2
    (line,) = [line for line in ran.err.splitlines() if "cannot be written" in line]
    assert str(file) in line
    assert "Errno" not in line
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    run(*command, target).done()
    assert file.exists() or command[0] == "train"


@pytest.mark.slow
def test_a_full_disk_when_a_folder_is_claimed(run: Run, tmp_path: Path):
    with full(0):
        ran = run(*REPORT, "--out", tmp_path / "out")
    ran.assert_refused(str(tmp_path / "out"), "File too large")
    assert not list(tmp_path.iterdir())


def test_the_system_s_words_stand_for_its_number(tmp_path: Path):
    with full(3), pytest.raises(OSError, match="File too large") as error:
        write_new(tmp_path / "x", lambda file: file.write_text("long"))
    assert error.value.filename == str(tmp_path / "x")


def test_a_read_only_file_system_is_told_by_the_name_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Such a system refuses to delete the temporary file, too, even if there is none."""

    def refuses(path: Path, *_: object, **__: object):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "unlink", refuses)
    with pytest.raises(OSError, match="Read-only file system") as error:
        write_new(tmp_path / "x", refuses)
    assert error.value.filename == str(tmp_path / "x")


def test_a_terminal_shows_the_progress_of_a_training_from_the_start(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    with progress_bar():
        assert capsys.readouterr().err == ""  # no terminal
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with progress_bar(quiet=True):
        assert capsys.readouterr().err == ""
    with progress_bar():
        assert "preparing" in capsys.readouterr().err
    ended = capsys.readouterr().err
    assert "preparing" not in ended.rpartition("\x1b[2K")[2]  # the line is erased
    with progress_bar() as show:
        show(Progress(step=1, steps=2, n_models=3, loss=1.0, steps_per_second=1.0))
    assert "3 models" in capsys.readouterr().err


# Names of files and folders with control characters: shown as escapes, on the terminal and on the page.

# Escape sequences of 7 and 8 bits, a turned direction of writing, a bell, an end of line.
NAME = "a\x1b[2J\x9b31m\u202e\u2066\x07\nb"
SHOWN = r"a\x1b[2J\x9b31m\u202e\u2066\x07\nb"
FEW, CIRCUITS = ("--n-prompts", "64"), ("--analysis", "circuits")


def harmless(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.save(softmax_paper_state(random_heads()), tmp_path / "x.pth")
    convert(load(tmp_path / "x.pth"), "native", tmp_path / NAME)
    return tmp_path / NAME


def test_what_is_not_printable_is_visible():
    assert visible(NAME + "\udc80²±") == SHOWN.replace(r"\n", "\n") + r"\udc80" + "²±"


@pytest.mark.slow
def test_classify_shows_escapes(run: Run, folder: Path):
    for more in ((), ("--json",)):
        ran = run("classify", folder, *FEW, *more).done()
        assert harmless(ran.out + ran.err)
        assert more or SHOWN in ran.out


@pytest.mark.slow
def test_report_shows_escapes(run: Run, folder: Path, tmp_path: Path):
    for paths in ((folder,), (folder, folder, tmp_path / f"gone{NAME}")):
        out = tmp_path / f"report{len(paths)}{NAME}"
        ran = run("report", *paths, "--out", out, *FEW, *(() if paths[1:] else CIRCUITS))
        assert SHOWN in ran.out
        assert harmless(ran.out + ran.err)
        page = (out / "index.html").read_text(encoding="utf-8")
        assert SHOWN in page.replace("\\\\", "\\")
        for character in "\x1b\x9b\u2066\x07":
            assert character not in page.split("<main")[-1]


@pytest.mark.slow
def test_train_shows_escapes(run: Run, tmp_path: Path):
    small = ("--set", "train.steps=2", "--set", "train.batch_size=4")
    ran = run("train", "softmax-h1", *small, "--out", tmp_path / NAME).done()
    assert SHOWN in ran.out
    assert harmless(ran.out)


def test_a_model_that_diverges_is_named_in_escapes(capsys: pytest.CaptureFixture):
    progress = Progress(
        step=1, steps=2, n_models=1, loss=1.0, steps_per_second=1.0, diverged=(f"[bold]{NAME}",)
    )
    with progress_bar() as show:
        show(progress)
    err = capsys.readouterr().err.replace("\n", "")
    assert f"[bold]{SHOWN} has diverged" in err
