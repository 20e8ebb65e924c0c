"""Tensors out of what torch.save and pickle write, without running what is in it."""

import math
import sys
import zipfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from mechinterp.checkpoints.io.archives import CHUNK, archive
from mechinterp.checkpoints.io.errors import CheckpointError
from mechinterp.checkpoints.io.pickled_values import Storage, StoredTensor
from mechinterp.checkpoints.io.state_dict import array_tensors, weights_among
from mechinterp.checkpoints.io.unpickler import MAX_BYTES, read_pickle

MAX_AXES = 64
OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
UNREADABLE = (
    "must hold tensors that can be read without running code, as torch.save writes them; got "
)


def read_torch(file: Path) -> dict[str, Tensor]:
    """The tensors of a file of torch.save by name.

    Raises:
        CheckpointError: If it is of the form before PyTorch 1.6, holds code, or is no such file.
    """
    with file.open("rb") as stream:
        start = stream.read(len(OLD_TORCH))
    if start == OLD_TORCH:
        raise CheckpointError(
            "written by PyTorch before 1.6 or in its old format; save it again with PyTorch >= 1.6: "
            "torch.save(torch.load(FILE), FILE)."
        )
    if start.startswith(b"\x80"):
        return _read_plain_pickle(file)
    if not start.startswith(b"PK"):
        raise CheckpointError(UNREADABLE + ("another file." if start else "an empty file."))
    with archive(file) as opened:
        entries = opened.namelist()
        names = [name for name in entries if name.endswith("/data.pkl")]
        if any(name.endswith("/constants.pkl") for name in entries):
            raise CheckpointError(
                "a TorchScript archive, which holds code; where it runs, write "
                "torch.save(torch.jit.load(FILE).state_dict(), FILE)."
            )
        if len(names) != 1:
            raise CheckpointError(f"{UNREADABLE}an archive with {len(names)} pickles.")
        torches, arrays = weights_among(read_pickle(opened.read(names[0])))
        storages = _Storages(opened, names[0].removesuffix("data.pkl"))
        tensors = {name: storages.tensor(name, each) for name, each in torches.items()}
        return tensors | array_tensors(arrays)


def _read_plain_pickle(file: Path) -> dict[str, Tensor]:
    """Arrays of numpy in a pickle without an archive around it, as haiku's and flax's runs are kept."""
    if file.stat().st_size > MAX_BYTES:
        raise CheckpointError(f"a pickle must be at most {MAX_BYTES} bytes.")
    try:
        return arrays_among(read_pickle(file.read_bytes()))
    except CheckpointError as error:
        raise CheckpointError(
            f"a plain pickle, of which arrays of numpy are read: {error}"
        ) from None


def arrays_among(root: object) -> dict[str, Tensor]:
    """Arrays of numpy as tensors, among what a pickle or a msgpack holds."""
    torches, arrays = weights_among(root)
    if torches:
        raise CheckpointError("torch's tensors must be written by torch.save, got a plain pickle.")
    return array_tensors(arrays)


class _Storages:
    """The entries of a torch archive that hold numbers, each read once."""

    def __init__(self, archive: zipfile.ZipFile, folder: str) -> None:
        self.archive, self.folder = archive, folder
        self.read = cache(self._read)
        self.kinds: dict[str, torch.dtype] = {}
        there = f"{folder}byteorder" in archive.namelist()
        order = archive.read(f"{folder}byteorder").decode() if there else sys.byteorder
        self.swapped = order != sys.byteorder

    def tensor(self, name: str, place: StoredTensor) -> Tensor:
        """A tensor, all of whose numbers are there."""
        storage, shape, strides = self.read(place.storage), place.shape, place.strides
        if len(shape) != len(strides) or len(shape) > MAX_AXES:
            got = f"{len(shape)} and {len(strides)} strides"
            raise CheckpointError(
                f"{name} must have at most {MAX_AXES} axes, a stride each, got {got}."
            )
        if min((place.offset, *shape, *strides)) < 0:
            raise CheckpointError(f"{name} must lie behind the start of its numbers.")
        claimed, held = math.prod(shape) * storage.dtype.itemsize, storage.nbytes
        if claimed > held:
            raise CheckpointError(
                f"{name} of shape {shape} must lie in {claimed} bytes, got {held}."
            )
        end = place.offset + 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if 0 not in shape and end > len(storage):
            raise CheckpointError(
                f"{name} must end within its {len(storage)} numbers, it goes to number {end}."
            )
        return storage.as_strided(shape, strides, place.offset)

    def _read(self, storage: Storage) -> Tensor:
        """All numbers of an entry."""
        entry = f"data/{storage.key}"
        if self.kinds.setdefault(storage.key, storage.dtype) != storage.dtype:
            raise CheckpointError(f"the entry {entry} must hold numbers of one kind.")
        data = bytearray()
        with self.archive.open(self.folder + entry) as stream:
            for chunk in iter(lambda: stream.read(CHUNK), b""):
                data += chunk
        claimed = storage.size * storage.dtype.itemsize
        if claimed != len(data):
            raise CheckpointError(f"the entry {entry} must have {claimed} bytes, got {len(data)}.")
        if not data:
            return torch.empty(0, dtype=storage.dtype)
        numbers = torch.frombuffer(data, dtype=storage.dtype)
        if self.swapped:
            numbers.untyped_storage().byteswap(storage.dtype)
        return numbers
