"""Tensors out of files that anybody may have written: torch's, pickles, .npz, .safetensors and flax's .msgpack.

Nothing in a file is run as code, and what a file claims is held against its size before memory is asked
for. Every fault ends in a CheckpointError.
"""

import io
import math
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from mechinterp.checkpoints.io import unpickler as pickles
from mechinterp.checkpoints.io.errors import CheckpointError
from mechinterp.checkpoints.io.headers import reading, require_header
from mechinterp.checkpoints.io.state_dict import array_tensors, weights_among
from mechinterp.checkpoints.io.unpickler import (
    ArrayType,
    Storage,
    StoredArray,
    StoredTensor,
    read_pickle,
)

SUFFIXES = (
    *(".pt", ".pth", ".bin", ".npz", ".safetensors", ".npy"),
    *(".ckpt", ".pth.tar", ".pt.tar", ".pkl", ".pickle", ".msgpack"),
)
MAX_UNPACKED = 2**26
"""Size to which the entries of a smaller archive may unpack; torch.save and numpy.savez do not pack."""
MAX_NUMBERS = 2**26
MAX_ENTRIES = 30_000
MAX_AXES = 64
CHUNK = 2**22
# Kinds of numbers besides floating-point ones that are read, if only to be refused by name.
OTHERS = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.complex64, torch.complex128),
)
OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
UNREADABLE = (
    "must hold tensors that can be read without running code, as torch.save writes them; got "
)
FLAX_ARRAYS = (1, 3)  # extension types of flax's msgpack: arrays and numpy's scalars


def has_weights_ending(file: Path) -> bool:
    """Whether a file's name ends as those of weights do.

    Example:
        >>> has_weights_ending(Path("run/best.pth.tar"))
        True
    """
    return file.name.endswith(SUFFIXES)


def read_arrays(file: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, those narrower than float32 widened to it.

    Of a whole-run dictionary it is the state dict; texts in an .npz are left out, dictionaries of dictionaries get
    dotted names.

    Raises:
        CheckpointError: If the file cannot be read, runs code, or claims more than it holds.
    Example:
        >>> tensors = read_arrays(Path("checkpoints/softmax-h2-s0/model.safetensors"))
        >>> tuple(tensors["blocks.0.attn.W_Q"].shape)
        (2, 6, 6)
    """
    readers = {".safetensors": _read_safetensors, ".npz": _read_npz, ".msgpack": _read_msgpack}
    readers |= {".npy": lambda file: {"W": _tensor(file.read_bytes(), "W")}}
    with reading(file):
        return _plain(readers.get(file.suffix, _read_torch)(file))


def read_text(file: Path, name: str) -> str | None:
    """A text in an .npz file, None if it has none of this name.

    Raises:
        CheckpointError: If the file cannot be read, or holds something else under this name.
    """
    with reading(file), _archive(file) as archive:
        if f"{name}.npy" not in archive.namelist():
            return None
        array = _array(archive.read(f"{name}.npy"), name)
        if array.dtype.kind != "U" or array.ndim:
            raise CheckpointError(f"{name} must be a text, got {array.dtype}.")
        return str(array)


def _plain(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors in memory of their own, after a look at what they claim."""
    if len(found) > MAX_ENTRIES:
        raise CheckpointError(f"must hold at most {MAX_ENTRIES} tensors, got {len(found)}.")
    for name, tensor in found.items():
        if not tensor.is_floating_point() and tensor.dtype not in OTHERS:
            raise CheckpointError(f"{name} must hold numbers, got {tensor.dtype}.")
    numbers = sum(tensor.numel() for tensor in found.values())
    if numbers > MAX_NUMBERS:
        raise CheckpointError(f"must hold at most {MAX_NUMBERS} numbers, got {numbers}.")
    return {name: _wide(tensor.detach()).contiguous() for name, tensor in found.items()}


def _wide(tensor: Tensor) -> Tensor:
    narrow = tensor.is_floating_point() and tensor.element_size() < 4
    return tensor.float() if narrow else tensor


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    require_header(file)
    return load_file(file)


@contextmanager
def _archive(file: Path) -> Iterator[zipfile.ZipFile]:
    """A zip archive whose entries are few and unpack to no more than they may."""
    with file.open("rb") as stream:
        # Counted before zipfile makes an object of each.
        entries = sum(chunk.count(b"PK\x01\x02") for chunk in iter(lambda: stream.read(CHUNK), b""))
    if entries > MAX_ENTRIES:
        raise CheckpointError(f"must hold at most {MAX_ENTRIES} entries, got {entries}.")
    with zipfile.ZipFile(file) as archive:
        found, size = archive.infolist(), file.stat().st_size
        unpacked, most = sum(entry.file_size for entry in found), max(size, MAX_UNPACKED)
        packed = max((entry.compress_size for entry in found), default=0)
        if unpacked > most:
            raise CheckpointError(f"must unpack to at most {most} bytes, it claims {unpacked}.")
        if packed > size:  # as much is asked of memory
            raise CheckpointError(
                f"an entry must have at most the file's {size} bytes, it claims {packed}."
            )
        if len({entry.filename.lower() for entry in found}) < len(found):
            raise CheckpointError("must hold each entry once, got some twice.")
        for entry in found:
            if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                got = f"got compression {entry.compress_type}"
                raise CheckpointError(f"{entry.filename} must be stored or deflated, {got}.")
        yield archive


def _read_torch(file: Path) -> dict[str, Tensor]:
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
    with _archive(file) as archive:
        entries = archive.namelist()
        names = [name for name in entries if name.endswith("/data.pkl")]
        if any(name.endswith("/constants.pkl") for name in entries):
            raise CheckpointError(
                "a TorchScript archive, which holds code; where it runs, write "
                "torch.save(torch.jit.load(FILE).state_dict(), FILE)."
            )
        if len(names) != 1:
            raise CheckpointError(f"{UNREADABLE}an archive with {len(names)} pickles.")
        places = weights_among(read_pickle(archive.read(names[0])))
        storages = _Storages(archive, names[0].removesuffix("data.pkl"))
        arrays = {name: each for name, each in places.items() if isinstance(each, StoredArray)}
        return array_tensors(arrays) | {
            name: storages.tensor(name, each)
            for name, each in places.items()
            if isinstance(each, StoredTensor)
        }


def _read_plain_pickle(file: Path) -> dict[str, Tensor]:
    """Arrays of numpy in a pickle without an archive around it, as haiku's and flax's runs are kept."""
    if file.stat().st_size > pickles.MAX_BYTES:
        raise CheckpointError(f"a pickle must be at most {pickles.MAX_BYTES} bytes.")
    try:
        return _arrays_among(read_pickle(file.read_bytes()))
    except CheckpointError as error:
        raise CheckpointError(
            f"a plain pickle, of which arrays of numpy are read: {error}"
        ) from None


def _arrays_among(root: object) -> dict[str, Tensor]:
    found = weights_among(root)
    arrays = {name: each for name, each in found.items() if isinstance(each, StoredArray)}
    if len(arrays) < len(found):
        raise CheckpointError("torch's tensors must be written by torch.save, got a plain pickle.")
    return array_tensors(arrays)


def _read_msgpack(file: Path) -> dict[str, Tensor]:
    """Flax's dictionaries of arrays."""
    try:
        import msgpack
    except ImportError:
        raise CheckpointError(
            "reading .msgpack needs the package msgpack; install mechinterp-icl[flax]."
        ) from None

    def array(code: int, data: bytes) -> object:
        if code not in FLAX_ARRAYS:
            return None
        shape, kind, numbers = msgpack.unpackb(data, raw=True, max_map_len=0)
        if not isinstance(kind, bytes) or not isinstance(shape, list):
            return None
        return StoredArray(ArrayType(kind.decode("latin1")), tuple(shape), False, numbers)

    return _arrays_among(msgpack.unpackb(file.read_bytes(), ext_hook=array, strict_map_key=False))


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


def _read_npz(file: Path) -> dict[str, Tensor]:
    found = {}
    with _archive(file) as archive:
        for entry in archive.infolist():
            name = entry.filename.removesuffix(".npy")
            if name == entry.filename:
                raise CheckpointError(f"must hold .npy arrays, got {entry.filename}.")
            data = archive.read(entry)
            if _array(data, name).dtype.kind != "U":
                found[name] = _tensor(data, name)
    return found


def _tensor(data: bytes, name: str) -> Tensor:
    """An .npy file's numbers."""
    array = _array(data, name)
    if array.dtype.kind not in "fiubc":
        raise CheckpointError(f"{name} must hold numbers, got {array.dtype}.")
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))


def _array(data: bytes, name: str) -> np.ndarray:
    """An .npy file's array; its header is held against the bytes behind it."""
    stream = io.BytesIO(data)
    version, headers = np.lib.format.read_magic(stream), np.lib.format
    read = {(1, 0): headers.read_array_header_1_0, (2, 0): headers.read_array_header_2_0}
    if version not in read:
        raise CheckpointError(f"{name} must have .npy version 1.0 or 2.0, got {version}.")
    shape, columns_first, dtype = read[version](stream)
    if dtype.hasobject or dtype.fields or dtype.subdtype:
        raise CheckpointError(f"{name} must hold plain numbers, got {dtype}.")
    claimed, held = math.prod(shape) * dtype.itemsize, len(data) - stream.tell()
    if claimed != held or min(shape, default=0) < 0:
        raise CheckpointError(f"{name} of shape {shape} must lie in {claimed} bytes, got {held}.")
    numbers = np.frombuffer(data, dtype, offset=stream.tell()) if held else np.empty(0, dtype)
    return numbers.reshape(shape, order="F" if columns_first else "C")
