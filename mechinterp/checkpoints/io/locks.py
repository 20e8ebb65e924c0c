"""Locks and claims: a folder is written by one process at a time, and only files of this package
are touched.

A lock is a file with this package's mark that is released when its process exits. A claim is a lock
in the folder itself that lists the files as they are written. After a failure these files are
deleted; after a kill the next process that writes there deletes them. A file without the mark is
refused, never deleted or replaced."""

import os
import re
import signal
import stat
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from mechinterp.checkpoints.io.files import (
    TEMPORARY,
    CheckpointError,
    delete_leftovers,
    filled,
    link_new,
    one_line,
    write_new,
)

if sys.platform != "win32":
    import fcntl

CLAIM = ".mechinterp"
MARK = "mechinterp lock\n"
MAX_LOCK = 2**24
NAME = re.compile(r"(?!\.\.?(/|$))[^/\0]+(/(?!\.\.?$)[^/\0]+)?")


@contextmanager
def locked(file: Path, *, wait: bool = False, busy: str = "training") -> Iterator[int]:
    """Hold the lock on a file, which is created and later removed; yields its descriptor.

    Args:
        wait: True: wait for another process that has the lock. False: raise.
        busy: Activity of the other process, for the message.
    Raises:
        CheckpointError: If another process has the lock, a file without the mark has its name, or
            files cannot be locked here.
    """
    descriptor = None
    try:
        # A wait for another process may be interrupted; what takes no time may not.
        with nullcontext() if wait else uninterrupted():
            descriptor = _descriptor(file, wait=wait, busy=busy)
        yield descriptor
    finally:
        if descriptor is not None:
            with uninterrupted():
                _unlock(file, descriptor)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the body has ended."""
    # None: a handler that is not of Python.
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda *about: came.append(about))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came and callable(before):
        before(*came[0])


@dataclass
class Claim:
    """A folder claimed by this process."""

    folder: Path
    descriptor: int
    replaced: Collection[str]
    """Names of files from an earlier result of this package that may be replaced."""
    made: list[str] = field(default_factory=list)
    waiting: dict[str, Path] = field(default_factory=dict)
    """Temporary files that replace an earlier result when all are written, by name."""
    temporary: ExitStack = field(default_factory=ExitStack)

    def write(self, name: str, write: Callable[[Path], object]) -> None:
        """Let `write` fill a file. It appears as a whole, where an earlier result is replaced
        together with all other files.

        Raises:
            CheckpointError: If the file exists and is not in `replaced`.
        """
        os.write(self.descriptor, f"{name}\n".encode())
        if self.replaced:
            self.waiting[name] = self.temporary.enter_context(filled(self.folder / name, write))
            return
        write_new(self.folder / name, write)
        self.made.append(name)

    def replace(self, last: str) -> None:
        """Put the waiting files in the place of the earlier result.

        The earlier last file goes first and the new one comes last. After a kill in between the
        folder is incomplete, and the next process that writes there deletes the rest."""
        if last in self.waiting and last in self.replaced:
            (self.folder / last).unlink(missing_ok=True)
        for name, file in self.waiting.items():
            if name in self.replaced:
                os.replace(file, self.folder / name)
            else:
                link_new(file, self.folder / name)
                self.made.append(name)


@contextmanager
def claimed(
    folder: Path, *, last: str, names: Collection[str] | None = None, replaced: Collection[str] = ()
) -> Iterator[Claim]:
    """Claim a folder for writing; files that were written are deleted if the body fails.

    Args:
        last: File that is written last; a folder with it is complete.
        names: Names that must not exist, other files are ignored; None: the folder must be empty.
        replaced: Names of an earlier result of this package, which may exist. They stay until the
            body ends, and are then replaced together.
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
                with claim.temporary:
                    yield claim
                    with uninterrupted():
                        claim.replace(last)
            except BaseException:
                _delete(folder, claim.made)
                raise
    except BaseException:
        if new:
            _remove_empty(folder)
        raise


def settle(folder: Path) -> None:
    """Delete the leftovers of a process that was killed while it wrote into a folder.

    Raises:
        CheckpointError: If a process is still writing there, or another file has the name of a
            claim.
    """
    if os.path.lexists(folder / CLAIM):
        with locked(folder / CLAIM, busy="writing") as descriptor:
            _settle(folder, descriptor, "")


def require_free(
    folder: Path, names: Collection[str] | None = None, replaced: Collection[str] = ()
) -> None:
    """Refuse a folder that contains one of these names (None: any name).

    Raises:
        CheckpointError: If it does; the message names the file.
    """
    for name in entries(folder):
        if name not in replaced and (names is None or name in names):
            raise CheckpointError(f"{folder}: already holds {name}; it is not overwritten.")


def entries(folder: Path) -> list[str]:
    """Names in a folder, without claims and temporary files of this package; empty if there is no
    folder."""
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
                # Created as a whole, so that a file without the mark is never this package's.
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


def _unlock(file: Path, descriptor: int) -> None:
    """Remove the file while it is locked: a process that waits for it then creates a new one."""
    with suppress(OSError):
        if os.path.samestat(os.lstat(file), os.fstat(descriptor)):
            file.unlink()
    os.close(descriptor)


def _require_mark(file: Path, descriptor: int) -> None:
    regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
    if not regular or os.pread(descriptor, len(MARK), 0) != MARK.encode():
        rule = "must be a lock of this package, got another file"
        raise CheckpointError(f"{file}: {rule}; move it away.")


def _settle(folder: Path, descriptor: int, last: str) -> None:
    """Delete the files of an unfinished earlier claim, then start a new list."""
    text = os.pread(descriptor, MAX_LOCK, 0).decode(errors="replace")
    done, _, made = text.removeprefix(MARK).partition("\n")
    listed = [name for name in made.splitlines() if NAME.fullmatch(name)]
    if done and not os.path.lexists(folder / done):
        _delete(folder, listed)
    delete_leftovers(folder, {CLAIM, *listed}.__contains__)
    os.ftruncate(descriptor, len(MARK))
    os.write(descriptor, f"{last}\n".encode())


def _delete(folder: Path, names: Collection[str]) -> None:
    """Delete these files, their temporary files, and inner folders that become empty."""
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
