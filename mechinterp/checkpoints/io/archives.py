"""Zip archives within bounds, and numpy's arrays in .npy and .npz files."""

import io
import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mechinterp.checkpoints.io.errors import CheckpointError

MAX_UNPACKED = 2**26
"""Largest unpacked size of a small archive; torch.save and numpy.savez do not compress."""
MAX_ENTRIES = 30_000
CHUNK = 2**22


@contextmanager
def archive(file: Path) -> Iterator[zipfile.ZipFile]:
    """A zip archive with a bounded number of entries and a bounded unpacked size."""
    with file.open("rb") as stream:
        # Counted before zipfile makes an object for each entry.
        entries = sum(chunk.count(b"PK\x01\x02") for chunk in iter(lambda: stream.read(CHUNK), b""))
    if entries > MAX_ENTRIES:
        raise CheckpointError(f"must hold at most {MAX_ENTRIES} entries, got {entries}.")
    with zipfile.ZipFile(file) as opened:
        listed, size = opened.infolist(), file.stat().st_size
        unpacked, most = sum(entry.file_size for entry in listed), max(size, MAX_UNPACKED)
        packed = max((entry.compress_size for entry in listed), default=0)
        if unpacked > most:
            raise CheckpointError(f"must unpack to at most {most} bytes, it claims {unpacked}.")
        if packed > size:  # zipfile would allocate this much
            rule = f"must have at most the file's {size} bytes"
            raise CheckpointError(f"an entry {rule}, it claims {packed}.")
        if len({entry.filename.lower() for entry in listed}) < len(listed):
            raise CheckpointError("must hold each entry once, got some twice.")
        for entry in listed:
            if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                got = f"got compression {entry.compress_type}"
                raise CheckpointError(f"{entry.filename} must be stored or deflated, {got}.")
        yield opened


def npy_array(data: bytes, name: str) -> np.ndarray:
    """Array of an .npy file, after its header is checked against the number of bytes."""
    stream = io.BytesIO(data)
    version, headers = np.lib.format.read_magic(stream), np.lib.format
    read = {(1, 0): headers.read_array_header_1_0, (2, 0): headers.read_array_header_2_0}
    if version not in read:
        raise CheckpointError(f"{name} must have .npy version 1.0 or 2.0, got {version}.")
    shape, columns_first, dtype = read[version](stream)
    if dtype.hasobject or dtype.fields or dtype.subdtype:
        raise CheckpointError(f"{name} must hold plain numbers, got {dtype}.")
    return array_of(memoryview(data)[stream.tell() :], dtype, shape, columns_first, name)


def array_of(
    data: bytes | memoryview, dtype: np.dtype, shape: tuple[int, ...], by_columns: bool, name: str
) -> np.ndarray:
    """Numbers in a shape, which must need exactly the bytes that are there.

    Raises:
        CheckpointError: If it needs more or fewer bytes.
    """
    claimed, held = math.prod(shape) * dtype.itemsize, len(data)
    if claimed != held or min(shape, default=0) < 0:
        raise CheckpointError(f"{name} of shape {shape} must lie in {claimed} bytes, got {held}.")
    numbers = np.frombuffer(data, dtype) if held else np.empty(0, dtype)
    return numbers.reshape(shape, order="F" if by_columns else "C")


def native_tensor(array: np.ndarray, name: str) -> Tensor:
    """Copy of an array of numbers in native byte order, row by row."""
    if array.dtype.kind not in "fiubc":
        raise CheckpointError(f"{name} must hold numbers, got {array.dtype}.")
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))
