"""Files written so that a kill at any moment leaves either the old or the new one, and JSON files read."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

from mechinterp.checkpoints.errors import CheckpointError, one_line

MAX_JSON = 2**22
KINDS = {"a folder": stat.S_ISDIR, "a pipe": stat.S_ISFIFO, "a socket": stat.S_ISSOCK}


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` fill a temporary file beside `path`, flush it to disk and rename it to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        _flush(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _flush(path.parent)


def size_of(file: Path) -> int:
    """The bytes of a regular file; whatever is read goes through here first, for a pipe would wait for its writer.

    Raises:
        CheckpointError: If it is a folder, a pipe, a socket or a device.
        OSError: If it does not exist or may not be looked at.
    """
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        kind = next((name for name, is_kind in KINDS.items() if is_kind(found.st_mode)), "a device")
        raise CheckpointError(f"{file}: must be a regular file, got {kind}.")
    return found.st_size


def read_json(file: Path) -> object:
    """What a JSON file holds.

    Raises:
        CheckpointError: If it cannot be read, is larger than 4 MB or nested too deeply.
    """
    try:
        size = size_of(file)
        if size > MAX_JSON:
            raise CheckpointError(f"{file}: must be at most {MAX_JSON} bytes, got {size}.")
        return json.loads(file.read_text(encoding="utf-8"))
    except CheckpointError:
        raise
    except RecursionError:
        reason = "nested too deeply"
    except (OSError, ValueError) as error:
        reason = one_line(error) if file.exists() else "does not exist"
    raise CheckpointError(f"{file}: not a readable JSON file ({reason}).")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
