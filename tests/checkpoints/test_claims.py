"""Nothing of the user's is replaced or deleted, whoever writes, fails or is killed in between."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from mechinterp.checkpoints.checkpoint import load
from mechinterp.checkpoints.io import locks
from mechinterp.checkpoints.io.files import (
    MACHINE,
    CheckpointError,
    delete_leftovers,
    write_atomically,
    write_new,
)
from mechinterp.checkpoints.io.locks import CLAIM, LOCK_MARK, claimed, locked, settle
from mechinterp.memory import available_memory
from tests.checkpoints.files import assert_refused
from tests.checkpoints.killed import killed_while_writing
from tests.conftest import CHECKPOINTS, python


def text(words: str):
    return lambda file: file.write_text(words)


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def entered(context: AbstractContextManager):
    with context:
        pass


@pytest.mark.parametrize("kind", ["file", "folder", "link", "dangling link", "pipe"])
def test_a_new_file_replaces_nothing(tmp_path: Path, kind: str):
    path, other = tmp_path / "new.csv", tmp_path / "other"
    other.write_text("mine")
    make = {
        "file": lambda: path.write_text("mine"),
        "folder": path.mkdir,
        "link": lambda: path.symlink_to(other),
        "dangling link": lambda: path.symlink_to(tmp_path / "nowhere"),
        "pipe": lambda: os.mkfifo(path),
    }
    make[kind]()
    before = path.lstat().st_ino
    assert_refused(r"new\.csv: already exists", write_new, path, text("ours"))
    assert (path.lstat().st_ino, other.read_text()) == (before, "mine")
    assert names(tmp_path) == ["new.csv", "other"]


@pytest.mark.parametrize("content", ["", "mine", LOCK_MARK[:-1]])
def test_a_lock_that_is_not_ours_is_refused_and_left(tmp_path: Path, content: str):
    file = tmp_path / ".lock"
    file.write_text(content)
    assert_refused(r"\.lock: must be a lock of this package", entered, locked(file))
    assert file.read_text() == content
    file.unlink()
    file.symlink_to(tmp_path / "target")
    (tmp_path / "target").write_text(LOCK_MARK)
    assert_refused(r"\.lock: cannot be locked", entered, locked(file))
    assert file.is_symlink()
    assert names(tmp_path) == [".lock", "target"]


def test_a_lock_that_somebody_replaced_meanwhile_is_left(tmp_path: Path):
    file = tmp_path / ".lock"
    with locked(file):
        file.rename(tmp_path / "moved")
        file.write_text("mine")
    assert file.read_text() == "mine"


def test_temporary_files_are_deleted_of_ended_processes_only(tmp_path: Path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    kept = [
        f".a.{MACHINE}-{os.getpid()}-0123abcd.tmp",  # of this process, which runs
        f".a.{MACHINE}-1-0123abcd.tmp",
        f".a.000000-{ended.pid}-0123abcd.tmp",  # of another machine
        f".b.{MACHINE}-{ended.pid}-0123abcd.tmp",  # of a name that is not asked for
        f".a.{ended.pid}.tmp",  # not our mark
        f".a.{MACHINE}-{ended.pid}-0123abc.tmp",
    ]
    for name in [*kept, f".a.{MACHINE}-{ended.pid}-0123abcd.tmp"]:
        (tmp_path / name).write_text("x")
    delete_leftovers(tmp_path, "a".__eq__)
    assert names(tmp_path) == sorted(kept)
    seen = []
    write_atomically(tmp_path / "a", lambda file: seen.append(file.name) or file.write_text("x"))
    assert re.fullmatch(rf"\.a\.{MACHINE}-{os.getpid()}-[0-9a-f]{{8}}\.tmp", seen[0])


def test_a_claim_refuses_a_folder_that_is_not_empty(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    words = f"{tmp_path}: already holds notes.txt; it is not"
    assert_refused(words, entered, claimed(tmp_path, last="z"))

    def write_both():
        with claimed(tmp_path, last="z", names=["a", "z"]) as claim:
            claim.write("a", text("a"))
            claim.write("z", text("z"))
            (tmp_path / "z").write_text("mine")  # it came meanwhile

    assert_refused("z: already exists; it is not overwritten", write_both)
    again = claimed(tmp_path, last="z", names=["a", "z"])
    assert_refused("already holds z;", entered, again)
    assert (tmp_path / "z").read_text() == "mine"
    assert names(tmp_path) == ["notes.txt", "z"]


def test_a_claim_that_fails_deletes_what_it_made_and_no_more(tmp_path: Path):
    def fail(folder: Path):
        with claimed(folder, last="z", names=["a", "z"]) as claim:
            claim.write("z", text("x"))
            claim.write("a", text("x"))
            raise KeyboardInterrupt

    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").write_text("mine")
    for folder in ("new", "there"):
        with pytest.raises(KeyboardInterrupt):
            fail(tmp_path / folder)
    assert names(tmp_path) == ["there", "there/notes.txt"]


def test_one_of_several_that_claim_a_folder_at_once_gets_it(tmp_path: Path):
    start, ends = threading.Barrier(3), []

    def work(name: str):
        start.wait()
        try:
            with claimed(tmp_path / "out", last="z") as claim:
                claim.write("a", text(name))
                claim.write("z", text(name))
            ends.append(name)
        except CheckpointError as error:
            ends.append(str(error))

    threads = [threading.Thread(target=work, args=(name,)) for name in "123"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    (winner,) = [end for end in ends if end in "123"]
    assert all(f"{tmp_path / 'out'}: " in end for end in ends if end != winner)
    assert names(tmp_path / "out") == ["a", "z"]
    assert (tmp_path / "out" / "z").read_text() == winner


@pytest.mark.slow
def test_what_a_killed_process_left_is_no_obstacle_and_stays_if_it_was_whole(tmp_path: Path):
    folder = tmp_path / "u"
    killed_while_writing(folder)
    (folder / "notes.txt").write_text("mine")
    settle(folder)
    assert names(folder) == ["notes.txt"]
    (folder / "notes.txt").unlink()
    killed_while_writing(folder)
    with claimed(folder, last="config.json") as claim:
        claim.write("config.json", text("{}"))
    assert names(folder) == ["config.json"]
    (folder / "config.json").unlink()
    killed_while_writing(folder)
    (folder / "config.json").write_text("{}")
    settle(folder)
    assert names(folder) == ["config.json", "model.safetensors"]


def test_a_claim_from_elsewhere_deletes_nothing_outside_its_folder(tmp_path: Path):
    folder = tmp_path / "u"
    folder.mkdir()
    (tmp_path / "mine").write_text("mine")
    (folder / "link").symlink_to(tmp_path)
    listed = ["../mine", str(tmp_path / "mine"), "link/mine", "..", ".", "a/../../mine", "a/.."]
    (folder / CLAIM).write_text(LOCK_MARK + "\n".join(["z", *listed]) + "\n")
    settle(folder)
    assert names(tmp_path) == ["mine", "u", "u/link"]


def replacing(folder: Path):
    for name in ("a", "z"):
        (folder / name).write_text("old")
    return claimed(folder, last="z", names=["a", "b", "z"], replaced=["a", "z"])


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_an_earlier_result_stays_whole_until_all_files_are_written(tmp_path: Path):
    def fail(file: Path):
        file.write_text("half")
        raise OSError(28, "no space")

    def overwrite():
        with replacing(tmp_path) as claim:
            claim.write("a", text("new"))
            claim.write("b", text("new"))
            shown = [tmp_path / name for name in names(tmp_path) if name[0] != "."]
            assert {file.name: file.read_text() for file in shown} == {"a": "old", "z": "old"}
            claim.write("z", fail)

    assert_refused(r"cannot be written \(.*z\)", overwrite)
    assert contents(tmp_path) == {"a": "old", "z": "old"}
    with replacing(tmp_path) as claim:
        for name in ("a", "b", "z"):
            claim.write(name, text("new"))
    assert contents(tmp_path) == {"a": "new", "b": "new", "z": "new"}


REPLACE = """
import os, signal, sys
from pathlib import Path
from mechinterp.checkpoints.io import locks

def dies(count):
    whole = os.replace
    def replace(old, new):
        if count.pop():
            os.kill(os.getpid(), signal.SIGKILL)
        whole(old, new)
    return replace

folder, before = Path(sys.argv[1]), int(sys.argv[2])
locks.os.replace = dies([True] + [False] * before)
with locks.claimed(folder, last="z", names=["a", "z"], replaced=["a", "z"]) as claim:
    claim.write("a", lambda file: file.write_text("new"))
    claim.write("z", lambda file: file.write_text("new"))
    if before < 0:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("before", "left"), [(-1, ["a", "z"]), (0, []), (1, [])])
def test_a_kill_never_leaves_half_of_two_results(tmp_path: Path, before: int, left: list[str]):
    for name in ("a", "z"):
        (tmp_path / name).write_text("old")
    assert python("-c", REPLACE, tmp_path, before).code == -signal.SIGKILL
    settle(tmp_path)
    assert contents(tmp_path) == dict.fromkeys(left, "old")


def test_an_interrupted_lock_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """At its worst moment: when the file is there, and nobody has got its descriptor."""

    def interrupted(*_: object):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)

    monkeypatch.setattr(locks, "_require_mark", interrupted)
    # A shell starts its background jobs with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), locked(tmp_path / ".lock"):
            pass
        assert names(tmp_path) == []
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_without_locks_what_is_there_is_read_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # On Windows, which has no flock.
    monkeypatch.setattr(sys, "platform", "win32")
    checkpoint = load(CHECKPOINTS / "softmax-h1-s0")
    assert available_memory() > 0
    with pytest.raises(CheckpointError, match="Linux or macOS is needed, got Windows"):
        checkpoint.save_pretrained(tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []
