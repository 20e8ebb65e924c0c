"""Files written so that a kill at any moment leaves either the old or the new one, and JSON files read."""

import json
import os
from collections.abc import Callable
from pathlib import Path

from mechinterp.checkpoints.errors import CheckpointError, one_line

MAX_JSON = 2**22


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


def read_json(file: Path) -> object:
    """What a JSON file holds.

    Raises:
        CheckpointError: If it cannot be read, is larger than 4 MB or nested too deeply.
    """
    try:
        size = file.stat().st_size
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
