"""Locks and claims: a folder is written by one process at a time, and only names of its own are touched.

A lock is a file with this package's mark that is released when its process exits, however that exits. A claim
is a lock in the folder itself which lists the files as they are made: after a failure they are deleted, after a
kill by whoever writes there next. A file without the mark is refused, never deleted or replaced.
"""

import os
import re
import stat
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from mechinterp.checkpoints.io.atomic import (
    TEMPORARY,
    delete_leftovers,
    write_atomically,
    write_new,
)
from mechinterp.checkpoints.io.errors import CheckpointError, one_line

if sys.platform != "win32":
    import fcntl

CLAIM = ".mechinterp"
MARK = "mechinterp lock\n"
MAX_LOCK = 2**24
NAME = re.compile(r"(?!\.\.?(/|$))[^/\0]+(/(?!\.\.?$)[^/\0]+)?")


@contextmanager
def locked(file: Path, *, wait: bool = False, busy: str = "training") -> Iterator[int]:
    """Hold the lock on a file, which is made for it and removed afterwards; its descriptor.

    Args:
        wait: Whether to wait for another process that holds it.
        busy: What the other process does, for the message.
    Raises:
        CheckpointError: If another process holds it, a file without our mark has its name, or files cannot
            be locked here.
    """
    descriptor = _descriptor(file, wait=wait, busy=busy)
    try:
        yield descriptor
    finally:
        # While it is held: whoever waited for this file finds it gone and makes a new one.
        with suppress(OSError):
            if os.path.samestat(os.lstat(file), os.fstat(descriptor)):
                file.unlink()
        os.close(descriptor)


@dataclass
class Claim:
    """A folder that this process writes."""

    folder: Path
    descriptor: int
    replaced: Collection[str]
    """Names of an earlier result of ours, which is replaced."""
    made: list[str] = field(default_factory=list)

    def write(self, name: str, write: Callable[[Path], object]) -> None:
        """Have `write` fill a file, which is then there as a whole.

        Raises:
            CheckpointError: If there is one that is not replaced.
        """
        os.write(self.descriptor, f"{name}\n".encode())
        if name in self.replaced:
            write_atomically(self.folder / name, write)
            return
        write_new(self.folder / name, write)
        self.made.append(name)


@contextmanager
def claimed(
    folder: Path, *, last: str, names: Collection[str] | None = None, replaced: Collection[str] = ()
) -> Iterator[Claim]:
    """Claim a folder to write into; what was made is deleted if the body fails.

    Args:
        last: The file that is written last: a folder that has it is whole.
        names: What must not be there, other files being let alone; None: the folder must be empty.
        replaced: Names of an earlier result of ours, which may be there and are replaced.
    Raises:
        CheckpointError: If a file is in the way, or another process is writing there.
    """
    new = not os.path.lexists(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder / CLAIM, busy="writing") as descriptor:
            _settle(folder, descriptor, last)
            require_free(folder, names, replaced)
            claim = Claim(folder, descriptor, replaced)
            try:
                yield claim
            except BaseException:
                _delete(folder, claim.made)
                raise
    except BaseException:
        if new:
            _remove_empty(folder)
        raise


def settle(folder: Path) -> None:
    """Delete what a process that was killed while it wrote into a folder left there.

    Raises:
        CheckpointError: If a process is still writing there, or a file has the name of a claim without being one.
    """
    if os.path.lexists(folder / CLAIM):
        with locked(folder / CLAIM, busy="writing") as descriptor:
            _settle(folder, descriptor, "")


def require_free(
    folder: Path, names: Collection[str] | None = None, replaced: Collection[str] = ()
) -> None:
    """Refuse a folder with one of these names in it, or with any name.

    Raises:
        CheckpointError: If there is one; the message names it.
    """
    for name in entries(folder):
        if name not in replaced and (names is None or name in names):
            raise CheckpointError(f"{folder}: already holds {name}; it is not overwritten.")


def entries(folder: Path) -> list[str]:
    """The names in a folder but for claims and temporary files of this package; none if there is no folder."""
    if not folder.is_dir():
        return []
    names = sorted(os.listdir(folder))
    return [name for name in names if name != CLAIM and not TEMPORARY.fullmatch(name)]


def _descriptor(file: Path, *, wait: bool, busy: str) -> int:
    if sys.platform == "win32":
        raise CheckpointError(f"{file}: cannot be locked (Linux or macOS is needed, got Windows).")
    operation = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
    try:
        while True:
            if not os.path.lexists(file):
                # Made as a whole, so that a file without the mark is never ours.
                with suppress(CheckpointError):
                    write_new(file, lambda target: target.write_text(MARK, encoding="utf-8"))
            try:
                flags = os.O_RDWR | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW
                descriptor = os.open(file, flags)
            except FileNotFoundError:
                continue
            try:
                _require_mark(file, descriptor)
                fcntl.flock(descriptor, operation)
                if os.fstat(descriptor).st_nlink:
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
    except BlockingIOError:
        raise CheckpointError(f"{file.parent}: another process is {busy} here.") from None
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be locked ({one_line(error)}).") from None


def _require_mark(file: Path, descriptor: int) -> None:
    regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
    if not regular or os.pread(descriptor, len(MARK), 0) != MARK.encode():
        rule = "must be a lock of this package, got another file"
        raise CheckpointError(f"{file}: {rule}; move it away.")


def _settle(folder: Path, descriptor: int, last: str) -> None:
    """Delete what the holder of a claim before us made, unless it was done; then begin our own list."""
    text = os.pread(descriptor, MAX_LOCK, 0).decode(errors="replace")
    done, _, made = text.removeprefix(MARK).partition("\n")
    if done and not os.path.lexists(folder / done):
        _delete(folder, [name for name in made.splitlines() if NAME.fullmatch(name)])
    delete_leftovers(folder, CLAIM.__eq__)
    os.ftruncate(descriptor, len(MARK))
    os.write(descriptor, f"{last}\n".encode())


def _delete(folder: Path, names: Collection[str]) -> None:
    """Delete these files, what is left of their writing, and folders inside that are empty then."""
    for parent in sorted({(folder / name).parent for name in names}, reverse=True):
        if parent.is_symlink() or not parent.is_dir():
            continue
        here = {Path(name).name for name in names if (folder / name).parent == parent}
        delete_leftovers(parent, here.__contains__)
        for name in here:
            (parent / name).unlink(missing_ok=True)
        if parent != folder:
            _remove_empty(parent)


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
