"""Tensors from files of unknown origin: torch files, pickles, .npz, .safetensors and flax's
.msgpack.

Nothing in a file is run as code. Claimed sizes are checked against the size of the file before
memory is allocated. Every fault becomes a CheckpointError."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from mechinterp.checkpoints.io.arrays import (
    MAX_ENTRIES,
    Storages,
    archive,
    native_tensor,
    npy_array,
)
from mechinterp.checkpoints.io.copies import chosen_names
from mechinterp.checkpoints.io.files import CheckpointError, naming, read_json
from mechinterp.checkpoints.io.headers import reading, require_header
from mechinterp.checkpoints.io.trees import Read, settings_among, tensors_among
from mechinterp.checkpoints.io.unpickler import (
    MAX_BYTES,
    STORAGES,
    ArrayType,
    StoredArray,
    read_pickle,
)

OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
READABLE = "must hold tensors that can be read without running code"
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
        return tensors_among(root, weights, Storages(opened, names[0].removesuffix("data.pkl")))


def _read_plain_pickle(file: Path, weights: str | None) -> Read:
    """numpy arrays in a plain pickle, as runs of haiku and flax are stored."""
    if file.stat().st_size > MAX_BYTES:
        raise CheckpointError(f"a pickle must be at most {MAX_BYTES} bytes.")
    try:
        return tensors_among(read_pickle(file.read_bytes()), weights)
    except CheckpointError as error:
        what = "a plain pickle, from which only numpy arrays are read"
        raise CheckpointError(f"{what}: {error}") from None


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
