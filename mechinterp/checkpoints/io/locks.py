"""Locks and claims: a folder is written by one process at a time, and only files of this package
are touched.

A lock is a file with this package's mark that is released when its process exits. A claim is a lock
in the folder itself that lists the files that are written. They are written under temporary names
and get their own names together, at the end. After a kill the next process that writes there
deletes what is left. A file without the mark is refused, never deleted or replaced."""

import os
import re
import stat
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError

from mechinterp.checkpoints.io.files import (
    TEMPORARY,
    CheckpointError,
    delete_leftovers,
    filled,
    link_new,
    one_line,
    write_new,
    writing,
)
from mechinterp.interrupts import uninterrupted

if sys.platform != "win32":
    import fcntl

CLAIM = ".mechinterp"
LOCK_MARK = "mechinterp lock\n"
MAX_LOCK = 2**24
NAME = re.compile(r"(?!\.\.?$)[^/\0]+")


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


@dataclass
class Claim:
    """A folder claimed by this process."""

    folder: Path
    descriptor: int
    replaced: Collection[str]
    """Names of files from an earlier result of this package that may be replaced."""
    waiting: dict[str, Path] = field(default_factory=dict)
    """Temporary files by the name that they get when all are written."""
    temporary: ExitStack = field(default_factory=ExitStack)

    def write(self, name: str, write: Callable[[Path], object]) -> None:
        """Let `write` fill a file, which appears together with all other files."""
        os.write(self.descriptor, f"{name}\n".encode())
        self.waiting[name] = self.temporary.enter_context(filled(self.folder / name, write))

    def publish(self, last: str) -> None:
        """Give the waiting files their names; if one is taken, none stays.

        The last file of an earlier result goes first and the new one comes last. After a kill in between the
        folder is incomplete, and the next process that writes there deletes the rest.

        Raises:
            CheckpointError: If a file exists and is not in `replaced`.
        """
        if last in self.waiting and last in self.replaced:
            (self.folder / last).unlink(missing_ok=True)
        made: list[str] = []
        try:
            for name, file in self.waiting.items():
                if name in self.replaced:
                    os.replace(file, self.folder / name)
                else:
                    link_new(file, self.folder / name)
                    made.append(name)
        except BaseException:
            for name in made:
                (self.folder / name).unlink(missing_ok=True)
            raise


@contextmanager
def claimed(
    folder: Path, *, last: str, names: Collection[str] | None = None, replaced: Collection[str] = ()
) -> Iterator[Claim]:
    """Claim a folder for writing; if the body fails, nothing appears in it.

    Args:
        last: File that is written last; a folder with it is complete.
        names: Names that must not exist, other files are ignored; None: the folder must be empty.
        replaced: Names of an earlier result of this package, which may exist. They stay until the
            body ends, and are then replaced together.
    Raises:
        CheckpointError: If a file is in the way, another process is writing there, or the folder cannot be written.
    """
    new = not os.path.lexists(folder)
    try:
        with writing(folder, SafetensorError):
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder / CLAIM, busy="writing") as descriptor:
                _settle(folder, descriptor, last)
                require_free(folder, names, replaced)
                claim = Claim(folder, descriptor, replaced)
                with claim.temporary:
                    yield claim
                    with uninterrupted():
                        claim.publish(last)
    except BaseException:
        if new:
            with suppress(OSError):
                folder.rmdir()
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
                    write_new(file, lambda target: target.write_text(LOCK_MARK, encoding="utf-8"))
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
    if not regular or os.pread(descriptor, len(LOCK_MARK), 0) != LOCK_MARK.encode():
        rule = "must be a lock of this package, got another file"
        raise CheckpointError(f"{file}: {rule}; move it away.")


def _settle(folder: Path, descriptor: int, last: str) -> None:
    """Delete the files of an unfinished earlier claim, then start a new list."""
    text = os.pread(descriptor, MAX_LOCK, 0).decode(errors="replace")
    done, _, made = text.removeprefix(LOCK_MARK).partition("\n")
    listed = [name for name in made.splitlines() if NAME.fullmatch(name)]
    for name in listed if done and not os.path.lexists(folder / done) else ():
        (folder / name).unlink(missing_ok=True)
    delete_leftovers(folder, {CLAIM, *listed}.__contains__)
    os.ftruncate(descriptor, len(LOCK_MARK))
    os.write(descriptor, f"{last}\n".encode())
