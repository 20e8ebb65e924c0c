"""Checkpoints of any known format: which one lies at a path, and from one to the other."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from torch import Tensor

from mechinterp.checkpoints import checkpoint as native
from mechinterp.checkpoints.checkpoint import Checkpoint, checkpoint_of
from mechinterp.checkpoints.foreign.formats import NAMED
from mechinterp.checkpoints.foreign.options import Hints
from mechinterp.checkpoints.foreign.read import read_foreign
from mechinterp.checkpoints.foreign.readings import Reading
from mechinterp.checkpoints.io.atomic import read_json, read_yaml
from mechinterp.checkpoints.io.errors import CheckpointError, one_line
from mechinterp.checkpoints.io.tensor_files import (
    MAX_NUMBERS,
    SUFFIXES,
    has_weights_ending,
    read_arrays,
    read_text,
)
from mechinterp.checkpoints.native import npz as arrays
from mechinterp.checkpoints.native.exchange import FORMAT, SIDE_CAR, read_exchange, write_exchange
from mechinterp.checkpoints.native.folder import OWN, WEIGHTS, is_native, require_new
from mechinterp.checkpoints.shipped import shipped_path
from mechinterp.config import ExperimentConfig, TaskConfig, from_dict
from mechinterp.presets import PRESETS, preset

FORMATS = ("native", *NAMED)
"""What `load` reads."""
TARGETS = ("native", FORMAT, "npz")
"""What `convert` writes."""
CONFIG, INDEX = "config.json", "model.safetensors.index.json"
MAX_SHARDS = 100


def load(
    path: str | Path,
    *,
    task: Mapping[str, object] | TaskConfig | None = None,
    format: str | None = None,
    d_x: int | None = None,
    d_y: int | None = None,
    n_heads: int | None = None,
    scale: float | None = None,
    attend_to_self: bool | None = None,
    score: str | None = None,
    score_slope: float | None = None,
    columns: str | None = None,
    orientation: str | None = None,
    sign: str | None = None,
    output_column: int | None = None,
    output_scale: float | None = None,
    model: Mapping[str, object] | None = None,
    map: Sequence[str] | None = None,
) -> Checkpoint:
    """The checkpoint at a path, or the trained model of a name: a folder of this package, or what other people's code has written.

    The arguments say what a file of other people's cannot say; what they leave open is assumed, and
    `assumed` holds it. `FORMATS` lists the formats, which are told by the names of the tensors.

    Args:
        path: A local path; if nothing lies there, the name of a shipped model, such as "softmax-h2-s0".
        task: A TaskConfig, or some of its fields; the setting of the paper that the format belongs to stands for
            those left out.
        format: One of `FORMATS`, where the names do not tell.
        n_heads: Needed for torch.nn.MultiheadAttention, whose file does not say it.
        scale: Factor on the scores, for weights that do not come with one; 1/sqrt(d_head) if left out.
        attend_to_self: Whether the query is among its own keys; False if left out.
        score: One of `SCORES` of mechinterp.config. If it is left out and no format states it, softmax and linear
            scores are tried on prompts of the task, and `readings` holds what was found.
        score_slope: The constant C of the score; 1 if left out.
        columns: "x,y" or "y,x", the order of a token's columns; tried in the same way if left out.
        orientation: "out,in" (torch.nn.Linear's) or "in,out", the axes of matrices whose names do not say it; tried too.
        sign: "plus" or "minus", for a prediction that is minus the output's y entry; tried too.
        output_column: Entry of what the layer writes that is the prediction, from 0; where tokens have columns of
            positions, that of y and the last are tried.
        output_scale: Factor on what attention adds, for code that has one beside its matrices; 1 if left out.
        model: How norms, MLPs and tokens of layers are joined: fields of `JOINS` of mechinterp.checkpoints.foreign.options, such
            as {"norm": "before"}; tried in the same way if left out.
        map: Rows "theirs=known" for names that no format has, such as "my_queries=q_proj".
    Raises:
        CheckpointError: If nothing readable lies there, or an argument contradicts the file.
        ValueError: If an argument is out of range.
    Example:
        >>> load("checkpoints/softmax-h2-s0")
        Checkpoint(softmax-h2-s0: 2 heads, d_x=5, context_length=40, step 500001)
    """
    task = asdict(task) if isinstance(task, TaskConfig) else task
    hints = Hints(**{name: value for name, value in locals().items() if name != "path"})
    if format is not None and format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}.")
    path = shipped_path(path)
    try:
        return _load_folder(path, hints) if path.is_dir() else _load_file(path, hints)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({one_line(error)}).") from None
    except RecursionError:
        raise CheckpointError(f"{path}: cannot be read (nested too deeply).") from None


def _load_file(path: Path, hints: Hints) -> Checkpoint:
    if not path.exists():
        return native.load(path)
    if not has_weights_ending(path) or not path.is_file():
        raise CheckpointError(
            f"{path}: a checkpoint is a folder or a file that ends in {', '.join(SUFFIXES)}; this is another file."
        )
    if path.name == WEIGHTS and _states_all(path.parent):
        return _load_folder(path.parent, hints)
    text = read_text(path, arrays.CONFIG) if path.suffix == ".npz" else None
    tensors = read_arrays(path)
    if text is not None:
        _require_no_hints(path, hints, arrays.FORMAT)
        return arrays.read_stated(tensors, text, path)
    return read_foreign(tensors, path, hints=hints, settings=_settings_beside(path))


def _states_all(folder: Path) -> bool:
    """Whether a folder is a checkpoint of this package, or one that it wrote for transformer-lens."""
    return is_native(folder) or (folder / SIDE_CAR).is_file()


def _settings_beside(path: Path) -> dict[str, object]:
    """What the files beside weights state: Hugging Face's config.json, and config.yaml of the code of Garg et al.

    n_points, the pairs with the query, is an integer and noise_std a number, whatever they are written as.
    """
    file, garg = path.with_name(CONFIG), path.with_name("config.yaml")
    found: dict[str, object] = {}
    document = read_json(file) if file.is_file() else None
    if isinstance(document, dict) and not OWN & set(document):
        found |= _settled(file, document)
    return found | _settled(garg, _garg_settings(read_yaml(garg))) if garg.exists() else found


def _garg_settings(document: object) -> dict[str, object]:
    """Heads and other counts, noise and number of points in a config.yaml of the code of Garg et al."""
    model = _within(document, "model")
    found = {n: t for n, t in model.items() if _counts(t)} if isinstance(model, dict) else {}
    return found | {
        "n_points": _within(document, "training", "curriculum", "points", "end"),
        "noise_std": _within(document, "training", "task_kwargs", "noise_std"),
    }


def _within(document: object, *names: str) -> object:
    """The entry of nested mappings; None where there is none."""
    for name in names:
        document = document.get(name) if isinstance(document, dict) else None
    return document


def _settled(file: Path, settings: dict[str, object]) -> dict[str, object]:
    """The settings that say something, texts of digits as integers and noise_std as a number.

    Raises:
        CheckpointError: If noise_std is no number >= 0, or n_points no integer >= 2.
    """
    found = {
        name: int(value) if isinstance(value, str) and _counts(value) else value
        for name, value in settings.items()
        if value is not None
    }
    if "noise_std" in found:
        found["noise_std"] = _noise(file, found["noise_std"])
    points = found.get("n_points", 2)
    if type(points) is not int or points < 2:
        raise CheckpointError(f"{file}: n_points must be an integer >= 2, got {points!r:.42}.")
    return found


def _noise(file: Path, value: object) -> float:
    try:
        noise = math.nan if isinstance(value, bool) else float(str(value))
    except ValueError:
        noise = math.nan
    if not 0 <= noise < math.inf:
        raise CheckpointError(f"{file}: noise_std must be a number >= 0, got {value!r:.42}.")
    return noise


def _counts(text: object) -> bool:
    return str(text).isdecimal() and len(str(text)) < 10


def _load_folder(path: Path, hints: Hints) -> Checkpoint:
    stated = FORMAT if (path / SIDE_CAR).is_file() else None
    if (path / CONFIG).is_file():
        settings = read_json(path / CONFIG)
        if isinstance(settings, dict) and not OWN & set(settings):
            file, tensors = _folder_arrays(path)
            beside = _settings_beside(file)
            return replace(read_foreign(tensors, file, hints=hints, settings=beside), path=path)
        stated = "native"
    if stated is None and (files := sorted(filter(_is_weights, _in(path)))):
        if len(files) > 1:
            listed = ", ".join(file.name for file in files[:6]) + (", ..." if files[6:] else "")
            raise CheckpointError(f"{path}: holds several files of weights; name one of {listed}.")
        return replace(_load_file(files[0], hints), path=path)
    _require_no_hints(path, hints, stated)
    return read_exchange(path) if stated == FORMAT else native.load(path)


def _require_no_hints(path: Path, hints: Hints, stated: str | None) -> None:
    """A checkpoint that says everything takes no hints, but for the right format."""
    given = [name for name, value in hints.given.items() if (name, value) != ("format", stated)]
    if given and stated is not None:
        raise CheckpointError(
            f"{path}: {given[0]} is only for files that do not state theirs, "
            f"got {hints.given[given[0]]} for a checkpoint of format {stated}."
        )


def _folder_arrays(path: Path) -> tuple[Path, dict[str, Tensor]]:
    """The tensors beside somebody else's config.json, in one file or in the shards that an index names."""
    for name in (WEIGHTS, "pytorch_model.bin"):
        if (path / name).is_file():
            return path / name, read_arrays(path / name)
    index = path / INDEX
    if not index.is_file():
        raise CheckpointError(
            f"{path}: its config.json is not of this package, so that it must hold {WEIGHTS} or {INDEX}."
        )
    document = read_json(index)
    named = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise CheckpointError(f"{index}: weight_map must name a file for each tensor.")
    shards = sorted(set(named.values()))
    if len(shards) > MAX_SHARDS:
        raise CheckpointError(f"{index}: must name at most {MAX_SHARDS} files, got {len(shards)}.")
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        if Path(shard).name != shard or "\\" in shard or Path(shard).suffix != ".safetensors":
            raise CheckpointError(
                f"{index}: must name .safetensors files beside it, got {shard!r}."
            )
        found = read_arrays(path / shard)
        if found.keys() & tensors.keys():
            raise CheckpointError(f"{path / shard}: holds tensors that another shard holds.")
        tensors |= found
        if sum(tensor.numel() for tensor in tensors.values()) > MAX_NUMBERS:
            raise CheckpointError(f"{path}: must hold at most {MAX_NUMBERS} numbers.")
    missing = sorted(named.keys() - tensors.keys())
    if missing:
        raise CheckpointError(f"{index}: {missing[0]} is in none of the files.")
    return index, tensors


def convert(checkpoint: Checkpoint, target: str, out: str | Path) -> list[Path]:
    """Write a checkpoint in another format into a new folder or, as "npz", a new file; the files written.

    Raises:
        CheckpointError: If something is there already, or the format has no place for the model.
        ValueError: If the format is unknown.
    """
    checkpoint, out = checkpoint_of(checkpoint, "convert"), Path(out)
    if target not in TARGETS:
        raise ValueError(f"Format must be one of {', '.join(TARGETS)}, got {target!r}.")
    scores = sorted({str(each.said["score"]) for each in checkpoint.readings if _rivals(each)})
    if len(scores) > 1:
        raise CheckpointError(
            f"{checkpoint.path}: score must be said (--score, score=) before it is written, got {', '.join(scores)} "
            "as what it can be."
        )
    if target == "npz":
        return [arrays.write_arrays(out, checkpoint)]
    if os.path.lexists(out) and not out.is_dir():
        raise CheckpointError(f"{out}: already exists; it is not overwritten.")
    require_new(out)
    if target == FORMAT:
        write_exchange(out, checkpoint)
    else:
        checkpoint.save_pretrained(out)
    return sorted(file for file in out.rglob("*") if file.is_file())


def _rivals(reading: Reading) -> bool:
    return reading.predicts and reading.stands and "score" in reading.said


def checkpoint_paths(paths: Iterable[Path]) -> list[Path]:
    """The paths, a folder that is no checkpoint replaced by the checkpoints in it, one level down.

    Those are folders with a config.json or a side-car, files that end as those of other people do, and folders with
    one such file.
    """
    found: list[Path] = []
    for path in paths:
        inner = [] if _is_marked(path) else _checkpoints_in(path)
        found += [path] if not inner or _is_one_file(inner) else inner
    return found


def _is_marked(folder: Path) -> bool:
    return any((folder / mark).exists() for mark in (CONFIG, SIDE_CAR))


def _is_one_file(found: list[Path]) -> bool:
    return len(found) == 1 and found[0].is_file()


def _checkpoints_in(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in _in(folder)
        if _is_weights(path)
        or _is_marked(path)
        or _is_one_file(list(filter(_is_weights, _in(path))))
    )


def _is_weights(path: Path) -> bool:
    return has_weights_ending(path) and path.is_file()


def _in(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def named_config(what: str) -> ExperimentConfig:
    """The preset of this name, or the config in a file: its own JSON or a checkpoint's config.json.

    Raises:
        ValueError: If it is neither, the file holds no config, or the model in it was pruned.
    Example:
        >>> named_config("checkpoints/softmax-h2-s0/config.json") == preset("softmax-h2")
        True
    """
    file = Path(what)
    if what in PRESETS:
        return preset(what)
    if not file.is_file():
        found = "a folder" if file.is_dir() else "neither"
        raise ValueError(
            f"{what}: a preset ({', '.join(PRESETS)}) or a config file is needed, got {found}."
        )
    document = read_json(file)
    if isinstance(document, dict) and document.get("origin"):
        raise ValueError(f"{file}: training does not make this model: it was pruned from another.")
    inner = document.get("experiment", document) if isinstance(document, dict) else document
    try:
        return from_dict(inner)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
