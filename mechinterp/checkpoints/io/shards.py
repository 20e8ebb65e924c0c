"""The tensors in a Hugging Face folder: one file, or the shards that an index names."""

from pathlib import Path

from torch import Tensor

from mechinterp.checkpoints.io.atomic import read_json
from mechinterp.checkpoints.io.errors import CheckpointError, naming
from mechinterp.checkpoints.io.tensor_files import MAX_NUMBERS, read_arrays

WHOLE = ("model.safetensors", "pytorch_model.bin")
INDEX = "model.safetensors.index.json"
MAX_SHARDS = 100


def folder_arrays(path: Path) -> tuple[Path, dict[str, Tensor]]:
    """The tensors beside somebody else's config.json, and the file that says which they are.

    Raises:
        CheckpointError: If there are none, or the index does not name plain files beside it.
    """
    for name in WHOLE:
        if (path / name).is_file():
            return path / name, read_arrays(path / name)
    index = path / INDEX
    if not index.is_file():
        raise CheckpointError(
            f"{path}: its config.json is not of this package, so that it must hold {WHOLE[0]} or {INDEX}."
        )
    with naming(index):
        return index, _shards(index)


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
