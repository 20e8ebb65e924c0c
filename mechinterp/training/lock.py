"""One process at a time: a lock on a file that ends with the process that holds it, however that ends."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mechinterp.checkpoints.errors import CheckpointError, one_line


@contextmanager
def locked(file: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock on a file, which is made for it and removed afterwards.

    Args:
        wait: Whether to wait for another process that holds it.
    Raises:
        CheckpointError: If another process holds it, or its file system has no locks.
    """
    descriptor = _descriptor(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield
    finally:
        # While it is held: whoever waited for this file finds it gone and makes a new one.
        file.unlink(missing_ok=True)
        os.close(descriptor)


def _descriptor(file: Path, operation: int) -> int:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        while True:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, operation)
            except BaseException:
                os.close(descriptor)
                raise
            if os.fstat(descriptor).st_nlink:
                return descriptor
            os.close(descriptor)
    except BlockingIOError:
        raise CheckpointError(f"{file.parent}: another process is training here.") from None
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be locked ({one_line(error)}).") from None
