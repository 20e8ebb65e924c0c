"""Tensors from files of unknown origin: torch files, pickles, .npz, .safetensors and flax's
.msgpack.

Nothing in a file is run as code. Claimed sizes are checked against the size of the file before
memory is allocated. Every fault becomes a CheckpointError."""

import io
import json
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
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from mechinterp.checkpoints.foreign.copies import MOST_SHOWN, chosen_names
from mechinterp.checkpoints.foreign.names import piece_of, shown
from mechinterp.checkpoints.io.files import CheckpointError, naming, read_json
from mechinterp.checkpoints.io.headers import reading, require_header
from mechinterp.checkpoints.io.unpickler import (
    MAX_BYTES,
    STORAGES,
    ArrayType,
    Storage,
    StoredArray,
    StoredList,
    StoredTensor,
    Unread,
    read_pickle,
)

MAX_UNPACKED = 2**26
"""Largest unpacked size of a small archive; torch.save and numpy.savez do not compress."""
MAX_ENTRIES = 30_000
_CHUNK = 2**22

MAX_AXES, MAX_ARRAY_AXES = 64, 32
OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
READABLE = "must hold tensors that can be read without running code"
WRAPPERS = (
    *("model", "model_state_dict", "state_dict", "model_state", "net", "network"),
    *("params", "weights", "state", "module"),
)
"""Names under which runs store the weights."""
OPTIMISER = re.compile(
    r"(?:optim|optimi[sz]ers?|opt|(?:lr_)?sched|(?:lr_)?schedulers?)(?:_state)?(?:_dict|s)?",
    re.IGNORECASE,
)
"""Names of dictionaries with the state of an optimiser, whose tensors are no weights."""
SKIPPED = re.compile(
    r"(?:argparse|pathlib|numpy|collections|datetime|omegaconf|ml_collections)[.].*"
    r"|torch[.](?:device|dtype|Size|[a-z]+\d*)|builtins[.](?:set|frozenset|slice|complex|range)|_codecs[.]encode"
)
"""Classes whose values beside the weights are ignored; a file with any other class is refused, and
the class named."""
_MAX_DEPTH, MAX_VISITS = 8, 300_000
MAX_ARRAY_BYTES = 24_000_000
"""Largest number of bytes of all arrays together; twice the limit of a pickle, as an array may have
two names."""
KIND = re.compile(r"[<>=|]?([fiubc])(1|2|4|8|16)|(float|int|uint|complex)(8|16|32|64|128)|(bool)")
HISTORY = "hist_dict"
"""Key of the matrices that the code of Ahn et al. saves during its runs: a list for each run."""
_PRODUCTS = "allparam"
"""Name of these matrices, [layer, head, (P, Q), d, d]."""
SAVED_TIMES = "saved_times"
"""Setting of a file from which the last of several saved state dicts is read: their number."""
SUFFIXES = (
    *(".pt", ".pth", ".bin", ".npz", ".safetensors", ".npy"),
    *(".ckpt", ".pth.tar", ".pt.tar", ".pkl", ".pickle", ".msgpack"),
)
WHOLE = ("model.safetensors", "pytorch_model.bin")
INDEX = "model.safetensors.index.json"
"""Contents of a Hugging Face folder: one file, or shards listed in an index."""
MAX_NUMBERS = 2**26
MAX_SHARDS = 100
OTHERS = set(STORAGES.values())
"""Number types besides floating point that are read, so that a message can name them."""
FLAX_ARRAYS = (1, 3)  # extension types of flax's msgpack: arrays and numpy's scalars


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


StoredPlace = StoredTensor | StoredArray


Read = tuple[dict[str, Tensor], dict[str, object]]
"""Tensors of a file by name, and the settings stored with them."""


def read_torch(file: Path, weights: str | None = None) -> Read:
    """Tensors of a torch.save file by name, and the settings stored with them.

    Args:
        weights: Name of the state dict, if there are several.

    Raises:
        CheckpointError: If it has the format before PyTorch 1.6, contains code, or is another file.
    """
    with file.open("rb") as stream:
        start = stream.read(len(OLD_TORCH))
    if start == OLD_TORCH:
        raise CheckpointError(
            "written by PyTorch before 1.6 or in its old format; save it again with PyTorch >= 1.6: "
            "torch.save(torch.load(FILE), FILE)."
        )
    if start.startswith(b"\x80"):
        return _read_plain_pickle(file, weights)
    if not start.startswith(b"PK"):
        got = "another file" if start else "an empty file"
        raise CheckpointError(f"{READABLE}, as torch.save writes them; got {got}.")
    with archive(file) as opened:
        entries = opened.namelist()
        names = [name for name in entries if name.endswith("/data.pkl")]
        if any(name.endswith("/constants.pkl") for name in entries):
            raise CheckpointError(
                "a TorchScript archive, which holds code; where it runs, write "
                "torch.save(torch.jit.load(FILE).state_dict(), FILE)."
            )
        if len(names) != 1:
            got = f"an archive with {len(names)} pickles"
            raise CheckpointError(f"{READABLE}, as torch.save writes them; got {got}.")
        root = read_pickle(opened.read(names[0]))
        return tensors_among(root, weights, _Storages(opened, names[0].removesuffix("data.pkl")))


def _read_plain_pickle(file: Path, weights: str | None) -> Read:
    """numpy arrays in a plain pickle, as runs of haiku and flax are stored."""
    if file.stat().st_size > MAX_BYTES:
        raise CheckpointError(f"a pickle must be at most {MAX_BYTES} bytes.")
    try:
        return tensors_among(read_pickle(file.read_bytes()), weights)
    except CheckpointError as error:
        what = "a plain pickle, from which only numpy arrays are read"
        raise CheckpointError(f"{what}: {error}") from None


class _Storages:
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


def tensors_among(
    root: object, weights: str | None = None, storages: _Storages | None = None
) -> Read:
    """Weights by name and the settings stored with them: torch tensors or, without them, numpy
    arrays; other values are ignored.

    Args:
        weights: Name of the state dict, if there are several.
        storages: Numbers of torch tensors; None: a pickle or msgpack, which has arrays only.
    Raises:
        CheckpointError: If there are no weights, several state dicts and none is named, or torch
            tensors without storages.
    """
    if isinstance(root, dict) and (series := _last_of_series(root, weights)):
        last, settings = series
        return tensors_among(last, None, storages)[0], settings
    places = dict(_places(root))
    names = chosen_names({name: place.shape for name, place in places.items()}, weights)
    if weights is None:
        document = _unwrapped(root)
        places = dict(_places(document))
        classes = _needed_classes(document)
        if isinstance(document, dict) and any(not SKIPPED.fullmatch(name) for name in classes):
            raise CheckpointError(_no_weights(root, classes))
    else:
        places = {short: places[name] for name, short in names.items()}
    torches = {name: each for name, each in places.items() if isinstance(each, StoredTensor)}
    if torches and storages is None:
        raise CheckpointError("torch tensors must be written by torch.save, got a plain pickle.")
    if torches and storages is not None:
        read = {name: storages.tensor(name, each) for name, each in torches.items()}
        return read, settings_among(root)
    arrays = {n: each for n, each in places.items() if isinstance(each, StoredArray) and each.shape}
    if not arrays:
        raise CheckpointError(_no_weights(root, _needed_classes(root)))
    return array_tensors(arrays), settings_among(root)


def settings_among(root: object) -> dict[str, object]:
    """Numbers, texts and booleans in a run's dictionaries and objects, by their last name.

    A name with two different values gets None."""
    settings: dict[str, object] = {}
    for (*_, name), value in _entries(root, objects=True):
        if isinstance(name, str) and isinstance(value, bool | int | float | str):
            other = settings.setdefault(name, value)
            settings[name] = value if other == value else None
    return settings


def _last_of_series(root: Mapping, weights: str | None) -> tuple[dict, dict] | None:
    """State dict of the last matrices that a run saved, and settings; None for other files.

    Raises:
        CheckpointError: If the file has several runs and none is named, or no run of this name.
    """
    runs = root.get(HISTORY)
    every = runs.items() if isinstance(runs, dict) else ()
    saved = {str(key): each for key, each in every if isinstance(each, StoredList) and each.last}
    if not saved:
        return None
    listed = ", ".join(map(shown, [*saved][:MOST_SHOWN])) + ", ..." * (len(saved) > MOST_SHOWN)
    first = next(iter(saved))
    if weights is None and len(saved) > 1:
        rule = f"choose one by --weights, such as --weights {shown(first)} (weights=)"
        raise CheckpointError(f"has {len(saved)} runs ({listed}); {rule}.")
    run = saved.get(first if weights is None else weights)
    if run is None:
        rule = f"weights must name a run in the file, one of {listed}"
        raise CheckpointError(f"{rule}, got {weights!r:.80}.")
    return {_PRODUCTS: run.last}, {**settings_among(root), SAVED_TIMES: run.count}


def _needed_classes(root: object) -> list[str]:
    """Classes and functions that values beside the weights need."""
    values = list(root.values()) if isinstance(root, dict) else [root]
    return [value.name for value in values if isinstance(value, Unread) and value.name]


def _unwrapped(document: object, depth: int = 0) -> object:
    """State dict of a run, found under one of a few names, unless parts of the model lie beside it."""
    if not isinstance(document, dict) or depth == _MAX_DEPTH:
        return document
    for name in WRAPPERS:
        inner = document.get(name)
        if isinstance(inner, dict) and any(_places(inner)):
            others = {n: v for n, v in document.items() if n != name and isinstance(v, dict)}
            beside = (piece_of(each) for each, _ in _places(others))
            return document if any(beside) else _unwrapped(inner, depth + 1)
    return document


def _places(root: object) -> Iterator[tuple[str, StoredPlace]]:
    """Tensors in nested dictionaries by dotted names, without those in a dictionary of an optimiser."""
    for path, value in _entries(root):
        named = isinstance(path[-1], str) and None not in path
        beside = len(path) > 1 and OPTIMISER.fullmatch(str(path[0]))
        if isinstance(value, StoredPlace) and named and not beside:
            yield ".".join(map(str, path)), value


def _entries(root: object, *, objects: bool = False) -> Iterator[tuple[tuple, object]]:
    """Values in nested dictionaries, each with its path, the keys from the outermost on.

    Args:
        objects: True: the attributes of objects count, too.
    """
    waiting: list[tuple[tuple, object]] = [((), root)]
    visits = 0
    while waiting:
        path, values = waiting.pop()
        values = values.state if objects and isinstance(values, Unread) else values
        if not isinstance(values, dict) or len(path) > _MAX_DEPTH:
            continue
        visits += len(values)
        if visits > MAX_VISITS:
            raise CheckpointError(f"must hold at most {MAX_VISITS} values.")
        inner = [((*path, key), value) for key, value in values.items()]
        yield from inner
        waiting += (each for each in reversed(inner) if isinstance(each[1], dict | Unread))


def _no_weights(root: object, classes: list[str]) -> str:
    """Message on a file without weights: its content, and what to do."""
    for name in ([name for name in classes if not SKIPPED.fullmatch(name)] or classes)[:1]:
        got = f"it needs {name}, and no code of a file is run: where that class is installed, write torch.save(model.state_dict(), FILE)"
        return f"must hold a state dict, names with a tensor each; {got}."
    if isinstance(root, dict):
        keys = [str(key)[:40] for key in root][:8]
        got = f"a dictionary of {', '.join(keys)}" if keys else "an empty dictionary"
    elif isinstance(root, StoredTensor | StoredArray):
        got = f"one tensor of shape {list(root.shape)}; give it a name: torch.save({{'W': torch.load(FILE)}}, FILE)"
    elif isinstance(root, Unread | StoredList):
        got = "a list or the like"
    else:
        got = f"a {type(root).__name__}"
    if isinstance(root, dict) and "optimizer_state_dict" in root:
        got += ", the state of an optimiser; name the file of the model's weights beside it"
    wrappers = ", ".join(WRAPPERS)
    return f"must hold a state dict, names with a tensor each, or one under {wrappers}; got {got}."


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


def one_shard(file: Path) -> bool:
    """True if a file's name counts it among several shards.

    Example:
        >>> one_shard(Path("model-00001-of-00002.safetensors")), one_shard(Path("model.safetensors"))
        (True, False)
    """
    found = re.search(r"-\d+-of-(\d+)", file.name)
    return found is not None and int(found[1][:9]) > 1


def has_weights_ending(file: Path) -> bool:
    """True if a file has a name ending of weight files.

    Example:
        >>> has_weights_ending(Path("run/best.pth.tar"))
        True
    """
    return file.name.endswith(SUFFIXES)


def read_arrays(file: Path) -> dict[str, Tensor]:
    """Tensors of a file by name, widened to at least float32; see `read_file`.

    Raises:
        CheckpointError: As in `read_file`.
    Example:
        >>> tensors = read_arrays(Path("checkpoints/softmax-h2-s0/model.safetensors"))
        >>> tuple(tensors["blocks.0.attn.W_Q"].shape)
        (2, 6, 6)
    """
    return read_file(file)[0]


def read_file(file: Path, weights: str | None = None) -> Read:
    """Tensors of a file by name, and the settings stored with them.

    The dictionary of a whole run gives its state dict. Texts and single numbers in an .npz, and the
    metadata of a safetensors file, are settings. Nested dictionaries get dotted names.

    Args:
        weights: Name of the state dict, if the file has several.
    Raises:
        CheckpointError: If the file cannot be read, needs code, claims more than it contains, or
            has several state dicts.
    """
    readers = {".safetensors": _read_safetensors, ".npz": _read_npz, ".npy": _read_npy}
    readers |= {".msgpack": _read_msgpack}
    with reading(file):
        tensors, settings = readers.get(file.suffix, read_torch)(file, weights)
        return _plain(tensors), settings


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors in their own memory, after a check of their claimed sizes."""
    if len(tensors) > MAX_ENTRIES:
        raise CheckpointError(f"must hold at most {MAX_ENTRIES} tensors, got {len(tensors)}.")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() and tensor.dtype not in OTHERS:
            raise CheckpointError(f"{name} must hold numbers, got {tensor.dtype}.")
    numbers = sum(tensor.numel() for tensor in tensors.values())
    if numbers > MAX_NUMBERS:
        raise CheckpointError(f"must hold at most {MAX_NUMBERS} numbers, got {numbers}.")
    return {name: widened(tensor.detach()).contiguous() for name, tensor in tensors.items()}


def widened(tensor: Tensor) -> Tensor:
    """The tensor in float32 or wider."""
    narrow = tensor.is_floating_point() and tensor.element_size() < 4
    return tensor.float() if narrow else tensor


def _read_safetensors(file: Path, weights: str | None) -> Read:
    require_header(file)
    with safe_open(file, framework="np") as stored:
        metadata = stored.metadata() or {}
    documents = {n: _document(text) for n, text in enumerate(metadata.values())}
    settings = settings_among({"metadata": metadata, "documents": documents})
    with torch.device("cpu"):  # old versions of safetensors read onto the caller's default device
        return _chosen(load_file(file), weights), settings


def _document(text: str) -> object:
    """JSON document in a text of the metadata; None for other texts."""
    try:
        return json.loads(text) if text.lstrip()[:1] == "{" else None
    except (ValueError, RecursionError):
        return None


def _read_npz(file: Path, weights: str | None) -> Read:
    tensors: dict[str, Tensor] = {}
    settings: dict[str, object] = {}
    with archive(file) as opened:
        for entry in opened.infolist():
            name = entry.filename.removesuffix(".npy")
            if name == entry.filename:
                raise CheckpointError(f"must hold .npy arrays, got {entry.filename}.")
            array = npy_array(opened.read(entry), name)
            if array.dtype.kind == "U" and array.ndim == 0:
                settings[name] = str(array)
            elif array.dtype.kind != "U":
                tensor = native_tensor(array, name)
                if tensor.ndim:
                    tensors[name] = tensor
                else:
                    settings[name] = tensor.item()
    return _chosen(tensors, weights), settings_among(settings)


def _read_npy(file: Path, weights: str | None) -> Read:
    return {"W": native_tensor(npy_array(file.read_bytes(), "W"), "W")}, {}


def _chosen(tensors: Mapping[str, Tensor], weights: str | None) -> dict[str, Tensor]:
    """Tensors of one state dict by their names in it."""
    names = chosen_names({name: tuple(t.shape) for name, t in tensors.items()}, weights)
    return {short: tensors[name] for name, short in names.items()}


def _read_msgpack(file: Path, weights: str | None) -> Read:
    """Tensors of flax's nested dictionaries."""
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

    tree = msgpack.unpackb(file.read_bytes(), ext_hook=array, strict_map_key=False)
    return tensors_among(tree, weights)


def folder_file(path: Path, weights: str | None = None) -> tuple[Path, Read]:
    """The weight file beside an external config.json, and its content.

    Raises:
        CheckpointError: If there is none, or the index names other than plain files beside it.
    """
    for name in WHOLE:
        if (path / name).is_file():
            return path / name, read_file(path / name, weights)
    index = path / INDEX
    if not index.is_file():
        raise CheckpointError(
            f"{path}: its config.json is not from this package, so that the folder must have {WHOLE[0]} or {INDEX}."
        )
    return index, read_index(index, weights)


def read_index(index: Path, weights: str | None = None) -> Read:
    """Tensors of all shards that an index lists; see `read_file`.

    Raises:
        CheckpointError: If a shard is no plain file beside it, or cannot be read.
    """
    with naming(index):
        return _chosen(_shards(index), weights), {}


def _shards(index: Path) -> dict[str, Tensor]:
    document = read_json(index)
    named = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise ValueError("weight_map must name a file for each tensor.")
    shards = sorted(set(named.values()))
    if len(shards) > MAX_SHARDS:
        raise ValueError(f"must name at most {MAX_SHARDS} files, got {len(shards)}.")
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        if Path(shard).name != shard or "\\" in shard or Path(shard).suffix != ".safetensors":
            raise ValueError(f"must name .safetensors files beside it, got {shard!r}.")
        held = read_arrays(index.with_name(shard))
        if held.keys() & tensors.keys():
            raise ValueError(f"{shard} holds tensors that another shard holds.")
        tensors |= held
        if sum(tensor.numel() for tensor in tensors.values()) > MAX_NUMBERS:
            raise ValueError(f"must hold at most {MAX_NUMBERS} numbers.")
    if missing := sorted(named.keys() - tensors.keys()):
        raise ValueError(f"{missing[0]} is in none of the files.")
    return tensors
