"""Arrays and tensors in archives and pickles of unknown origin, whose claimed sizes are checked before memory is allocated."""

import io
import math
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mechinterp.checkpoints.io.files import CheckpointError
from mechinterp.checkpoints.io.unpickler import ArrayType, Storage, StoredArray, StoredTensor

MAX_UNPACKED = 2**26
"""Largest unpacked size of a small archive; torch.save and numpy.savez do not compress."""
MAX_ENTRIES = 30_000
_CHUNK = 2**22
MAX_AXES, MAX_ARRAY_AXES = 64, 32
MAX_ARRAY_BYTES = 24_000_000
"""Largest number of bytes of all arrays together; twice the limit of a pickle, as an array may have
two names."""
KIND = re.compile(r"[<>=|]?([fiubc])(1|2|4|8|16)|(float|int|uint|complex)(8|16|32|64|128)|(bool)")


@contextmanager
def archive(file: Path) -> Iterator[zipfile.ZipFile]:
    """A zip archive with a bounded number of entries and a bounded unpacked size."""
    with file.open("rb") as stream:
        # Counted before zipfile makes an object for each entry.
        entries = sum(
            chunk.count(b"PK\x01\x02") for chunk in iter(lambda: stream.read(_CHUNK), b"")
        )
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


def array_tensors(places: Mapping[str, StoredArray]) -> dict[str, Tensor]:
    """numpy arrays as tensors, after their claimed sizes are checked against their bytes.

    Raises:
        CheckpointError: If an array claims more or fewer bytes than it has, or has no plain
            numbers.
    """
    tensors, left = {}, MAX_ARRAY_BYTES
    for name, place in places.items():
        kind, shape = _kind(place, name), place.shape
        if len(shape) > MAX_ARRAY_AXES:
            rule = f"must have at most {MAX_ARRAY_AXES} axes"
            raise CheckpointError(f"{name} {rule}, got {len(shape)}.")
        # Protocol 2 stores bytes as texts, and empty bytes as a call.
        data = place.data.encode("latin1") if isinstance(place.data, str) else place.data
        data = data if isinstance(data, bytes) else b""
        array = array_of(data, kind, shape, place.by_columns is True, name)
        left -= len(data)
        if left < 0:
            raise CheckpointError(f"arrays must lie in {MAX_ARRAY_BYTES} bytes together.")
        tensors[name] = native_tensor(array, name)
    return tensors


def _kind(place: StoredArray, name: str) -> np.dtype:
    kind = place.kind
    if isinstance(kind, ArrayType) and KIND.fullmatch(kind.code):
        return np.dtype(kind.code).newbyteorder(">" if kind.order == ">" else "|")
    got = kind.code if isinstance(kind, ArrayType) else "no dtype"
    raise CheckpointError(f"{name} must hold plain numbers, got {got}.")


class Storages:
    """Entries of a torch archive with numbers, each read once."""

    def __init__(self, archive: zipfile.ZipFile, folder: str) -> None:
        self.archive, self.folder = archive, folder
        self.read = cache(self._read)
        self.kinds: dict[str, torch.dtype] = {}
        stated = f"{folder}byteorder" in archive.namelist()
        order = archive.read(f"{folder}byteorder").decode() if stated else sys.byteorder
        self.swapped = order != sys.byteorder

    def tensor(self, name: str, place: StoredTensor) -> Tensor:
        """A tensor whose numbers are all in the file."""
        storage, shape, strides = self.read(place.storage), place.shape, place.strides
        if len(shape) != len(strides) or len(shape) > MAX_AXES:
            rule = f"must have at most {MAX_AXES} axes, a stride each"
            raise CheckpointError(f"{name} {rule}, got {len(shape)} and {len(strides)} strides.")
        if min((place.offset, *shape, *strides)) < 0:
            raise CheckpointError(f"{name} must lie behind the start of its numbers.")
        claimed, held = math.prod(shape) * storage.dtype.itemsize, storage.nbytes
        if claimed > held:
            what = f"{name} of shape {shape}"
            raise CheckpointError(f"{what} must lie in {claimed} bytes, got {held}.")
        end = place.offset + 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if 0 not in shape and end > len(storage):
            rule = f"must end within its {len(storage)} numbers"
            raise CheckpointError(f"{name} {rule}, it goes to number {end}.")
        return storage.as_strided(shape, strides, place.offset)

    def _read(self, storage: Storage) -> Tensor:
        """All numbers of an entry."""
        entry = f"data/{storage.key}"
        if self.kinds.setdefault(storage.key, storage.dtype) != storage.dtype:
            raise CheckpointError(f"the entry {entry} must hold numbers of one kind.")
        data = bytearray(self.archive.read(self.folder + entry))
        claimed = storage.size * storage.dtype.itemsize
        if claimed != len(data):
            raise CheckpointError(f"the entry {entry} must have {claimed} bytes, got {len(data)}.")
        if not data:
            return torch.empty(0, dtype=storage.dtype, device="cpu")
        numbers = torch.frombuffer(data, dtype=storage.dtype)
        if self.swapped:
            numbers.untyped_storage().byteswap(storage.dtype)
        return numbers
