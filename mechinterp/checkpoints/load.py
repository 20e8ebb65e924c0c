"""Loading of checkpoints of any known format, and conversion between formats."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from glob import glob, has_magic
from pathlib import Path

from mechinterp.checkpoints import checkpoint as native
from mechinterp.checkpoints.checkpoint import Checkpoint, checkpoint_of
from mechinterp.checkpoints.foreign.options import Hints, with_options
from mechinterp.checkpoints.foreign.read import read_foreign
from mechinterp.checkpoints.foreign.settings import Stored, settings_of
from mechinterp.checkpoints.foreign.tensors.formats import NAMED
from mechinterp.checkpoints.hub import downloaded, is_repository
from mechinterp.checkpoints.io.files import CheckpointError, naming
from mechinterp.checkpoints.io.tensor_files import (
    INDEX,
    SUFFIXES,
    folder_file,
    has_weights_ending,
    one_shard,
    read_file,
    read_index,
)
from mechinterp.checkpoints.native import exchange
from mechinterp.checkpoints.native.exchange import FORMAT, SIDE_CAR
from mechinterp.checkpoints.native.folder import CONFIG_FILE, WEIGHTS_FILE, is_native, require_new
from mechinterp.checkpoints.paths import checkpoints_in, is_marked, is_weights, steps_of
from mechinterp.checkpoints.shipped import shipped_path
from mechinterp.config import TaskConfig, task_fields

FORMATS = ("native", *NAMED)
"""Formats that `load` reads."""
AS_NPZ = "numpy.savez('weights.npz', **{'/'.join(path): array}), with a name and an array for each parameter"
ORBAX = (
    *("_METADATA", "_CHECKPOINT_METADATA", "_sharding", "manifest.ocdbt", "ocdbt.process_0"),
    *("default/_METADATA", "default/manifest.ocdbt", "state/_METADATA", "params/_METADATA"),
)
"""Files in an orbax folder."""
FROM_ORBAX = (
    "an orbax checkpoint, which is not read; where orbax is installed, restore it by "
    f"orbax.checkpoint.PyTreeCheckpointer().restore(FOLDER) and write {AS_NPZ}"
)
DCP = ".metadata"
"""File in a folder of torch.distributed.checkpoint."""
FROM_DCP = (
    "a distributed checkpoint of torch; write one file: "
    "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER weights.pt"
)
DEEPSPEED = "latest"
"""File in a folder of DeepSpeed, which names the folder of its last step."""
FROM_DEEPSPEED = "a folder of DeepSpeed; name the file mp_rank_00_model_states.pt in its folder of a step, or write one file by its zero_to_fp32.py"
OTHER_FILES = {
    ".eqx": f"an equinox file, which has no names; where its class is installed, load it and write {AS_NPZ}",
    ".onnx": "an ONNX graph, which is not read; where the model was made, write torch.save(model.state_dict(), 'weights.pt')",
    ".h5": f"a Keras or HDF5 file, which is not read; write {AS_NPZ}",
    ".keras": f"a Keras file, which is not read; write {AS_NPZ}",
    ".gguf": "a GGUF file of a language model, which is not read",
    ".pt2": "an exported program, which holds code; where it runs, write torch.save(torch.export.load(FILE).state_dict, 'weights.pt')",
    ".distcp": FROM_DCP,
    ".mat": f"a MATLAB file, which is not read; load it by scipy.io.loadmat and write {AS_NPZ}",
}
"""Advice for files of other kinds, by their endings."""
OF_TRAINING = ("flat", "moment.", "row.", "snapshot.")
"""Beginnings of the names of all tensors in the state file of a training run."""
UNFINISHED = (
    "the state of a training run that is not finished; wait for its end, or continue it with "
    "--resume, then read the run folder"
)
TARGETS = ("native", FORMAT, "npz")
"""Formats that `convert` writes."""


@with_options
def load(
    path: str | Path | Sequence[str | Path],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    **options: object,
) -> Checkpoint:
    """Checkpoint at a path, of a shipped model or in a repository of the hub: a folder of this
    package, a file of external code, or the files of a run.

    The options state what an external file does not state. Settings that stay open are tried or
    assumed, and `assumed` lists them. `FORMATS` lists the formats, which are recognised by the
    names of the tensors.

    A run is the last of its checkpoints, with the weights of all as `snapshots`, and with their
    losses on the same evaluation prompts as `history`. Open settings are decided on the last file.

    Args:
        path: A local path; else the name of a shipped model, such as "softmax-h2-s0"; else
            "owner/repository" of the Hugging Face hub. A folder whose file names are recognised as
            steps is a run, and so are a pattern such as "runs/mine/model_*.pt" and a list of files,
            whose names differ in one number only.
        revision: Branch, tag or commit of a repository of the hub; None: the main branch.
        token: Account token for a private repository; None: that of the current login.
        {options}
    Raises:
        CheckpointError: If there is nothing readable, the file was not understood, an argument
            contradicts the file, names do not show the steps of a run, or shapes differ in it.
        ValueError: If an argument is out of range.
    See also:
        `hook_module`, `over_steps`, `push_to_hub`.
    Example:
        >>> load("checkpoints/softmax-h2-s0")
        Checkpoint(softmax-h2-s0: 2 heads, d_x=5, context_length=40, step 500001)
        >>> import tempfile
        >>> model = load("softmax-h2-s0")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for step in (1000, 2000):
        ...         files = convert(model.at(step), "npz", f"{folder}/step_{step}.npz")
        ...     load(folder).steps
        [1000, 2000]
    """
    hints = _hints(options)
    if not isinstance(path, str | Path | os.PathLike):
        return _run_at(path, hints)
    path = _local(path, revision, token)
    if not os.path.lexists(path) and has_magic(str(path)):
        return _run_at(path, hints)
    with naming(path):
        if path.is_dir() and not is_marked(path) and (steps := steps_of(checkpoints_in(path))):
            return _run(steps, hints)
        stored = _stored(path, hints)
        if isinstance(stored, Stored):
            stored = replace(read_foreign([stored], hints), path=path)
        return stored


def _local(path: str | Path, revision: str | None, token: str | bool | None) -> Path:
    """Path of a file or folder here, which a repository of the hub becomes by its download."""
    local = shipped_path(path)
    if not os.path.lexists(local) and is_repository(local):
        return downloaded(local.as_posix(), revision=revision, token=token)
    if revision is not None:
        raise CheckpointError(
            f"{path}: revision needs a repository of the hub, got {revision!r} for a local path."
        )
    return local


def _run_at(path: str | Path | Sequence[str | Path], hints: Hints) -> Checkpoint:
    """Run of a pattern or of a list of files."""
    steps = _steps_at(path)
    with naming(next(iter(steps.values())).parent):
        return _run(steps, hints)


def _steps_at(path: str | Path | Sequence[str | Path]) -> dict[int, Path]:
    """Checkpoints of a pattern or of a list, by step.

    Raises:
        CheckpointError: If there are none, or their names do not show the step.
    """
    if isinstance(path, str | Path):
        paths = sorted(Path(each) for each in glob(str(path)))
    else:
        paths = [Path(each) for each in path]
    if not paths:
        raise CheckpointError(f"{path}: must be a pattern that matches checkpoints; found none.")
    steps = steps_of(paths, one_run=True)
    if not steps:
        raise CheckpointError(
            f"{paths[0].parent}: names of a run must differ in the step number only, got {_listed(paths)}; a pattern such as "
            "step_*.pt selects some of them."
        )
    return steps


def _listed(paths: Sequence[Path]) -> str:
    return ", ".join(path.name for path in paths[:6]) + (", ..." if paths[6:] else "")


def _run(steps: Mapping[int, Path], hints: Hints) -> Checkpoint:
    """The last of these checkpoints with the weights of all."""
    stored = {step: _stored(path, hints) for step, path in steps.items()}
    folder, last = next(iter(steps.values())).parent, stored[max(steps)]
    for step, path in steps.items():
        with naming(path):
            _require_alike(stored[step], last)
    if isinstance(last, Checkpoint):
        kept = {n: each.weights for n, each in stored.items() if isinstance(each, Checkpoint)}
        return replace(last, path=folder, step=max(steps), kept=kept)
    files = [replace(each, step=n) for n, each in stored.items() if isinstance(each, Stored)]
    return replace(read_foreign(files, hints), path=folder)


def _require_alike(each: Checkpoint | Stored, last: Checkpoint | Stored) -> None:
    """Refuse a file of a run whose model differs from that of its last file."""
    if isinstance(each, Checkpoint) and isinstance(last, Checkpoint):
        if each.config.model != last.config.model:
            raise ValueError("must have the architecture of the last step.")
    elif not isinstance(each, Stored) or not isinstance(last, Stored):
        raise ValueError("must have the format of the last step.")
    else:
        shapes, others = ({n: list(t.shape) for n, t in x.tensors.items()} for x in (each, last))
        for name in sorted(shapes.keys() | others.keys()):
            if shapes.get(name) != others.get(name):
                rule = f"must have the shape {others.get(name)} of the last step"
                raise ValueError(f"{name} {rule}, got {shapes.get(name)}.")


def _hints(given: Mapping[str, object]) -> Hints:
    """Options of `load`, checked.

    Raises:
        TypeError: If there is no such option.
        ValueError: If one is out of range.
    """
    names = [each.name for each in fields(Hints)]
    for name in given.keys() - names:
        raise TypeError(f"load has no option {name!r}; it has {', '.join(names)}.")
    task = given.get("task")
    if isinstance(task, TaskConfig):
        task = {name: value for name, value in asdict(task).items() if name in task.given}
    hints = Hints(**{**given, "task": None if task is None else task_fields(task)})  # type: ignore[arg-type]
    if hints.format is not None and hints.format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {hints.format!r}.")
    return hints


def _stored(path: Path, hints: Hints) -> Checkpoint | Stored:
    """Content at a path: a checkpoint that states everything, or tensors with open settings."""
    return _in_folder(path, hints) if path.is_dir() else _in_file(path, hints)


def _in_file(path: Path, hints: Hints) -> Checkpoint | Stored:
    if not path.exists():
        return native.load(path)
    if path.suffix in OTHER_FILES or path.name == DCP:
        raise CheckpointError(f"{path}: {OTHER_FILES.get(path.suffix, FROM_DCP)}.")
    if path.name == INDEX:
        return Stored(path, read_index(path, hints.weights)[0], settings_of(path, {}))
    if one_shard(path):
        raise CheckpointError(
            f"{path}: one of several shards; name {path.parent / INDEX}, or write all tensors in one file."
        )
    if not has_weights_ending(path) or not path.is_file():
        rule = f"a checkpoint is a folder or a file that ends in {', '.join(SUFFIXES)}"
        raise CheckpointError(f"{path}: {rule}; this is another file.")
    if path.name == WEIGHTS_FILE and (is_native(path.parent) or (path.parent / SIDE_CAR).is_file()):
        return _in_folder(path.parent, hints)
    tensors, settings = read_file(path, hints.weights)
    if path.suffix == ".npz" and exchange.ARRAYS_CONFIG in settings:
        _require_no_hints(path, hints, exchange.ARRAYS_FORMAT)
        return exchange.read_stated(tensors, str(settings[exchange.ARRAYS_CONFIG]), path)
    if "flat" in tensors and all(name.startswith(OF_TRAINING) for name in tensors):
        raise CheckpointError(f"{path}: {UNFINISHED}.")
    return Stored(path, tensors, settings_of(path, settings))


def _in_folder(path: Path, hints: Hints) -> Checkpoint | Stored:
    if is_native(path):
        _require_no_hints(path, hints, "native")
        return native.load(path)
    if (path / CONFIG_FILE).is_file():
        file, (tensors, settings) = folder_file(path, hints.weights)
        return Stored(file, tensors, settings_of(file, settings))
    if (path / SIDE_CAR).is_file():
        _require_no_hints(path, hints, FORMAT)
        return exchange.read_exchange(path)
    if (path / INDEX).is_file():
        return _in_file(path / INDEX, hints)
    files = sorted(filter(is_weights, path.iterdir()))
    if len(files) > 1:
        rule = f"has several files of weights; name one of {_listed(files)}, or a pattern for the steps of one run"
        raise CheckpointError(f"{path}: {rule}.")
    if not files and any((path / name).exists() for name in ORBAX):
        raise CheckpointError(f"{path}: {FROM_ORBAX}.")
    if not files and (path / DCP).is_file():
        raise CheckpointError(f"{path}: {FROM_DCP}.")
    if not files and (path / DEEPSPEED).is_file():
        raise CheckpointError(f"{path}: {FROM_DEEPSPEED}.")
    if not files:
        return native.load(path)  # its error says what is missing
    stored = _in_file(files[0], hints)
    return replace(stored, path=path) if isinstance(stored, Checkpoint) else stored


def _require_no_hints(path: Path, hints: Hints, stated: str) -> None:
    """Refuse hints for a checkpoint that states everything, except its own format."""
    for name, value in hints.given.items():
        if (name, value) != ("format", stated):
            raise CheckpointError(
                f"{path}: {name} is only for files that do not state it, got {value} for a checkpoint of format {stated}."
            )


def convert(checkpoint: Checkpoint, target: str, out: str | Path) -> list[Path]:
    """Write a checkpoint in another format into a new folder or (for "npz") a new file; returns the
    files.

    Raises:
        CheckpointError: If something exists there, or the format cannot represent the model.
        ValueError: If the format is unknown.
    """
    checkpoint, out = checkpoint_of(checkpoint, "convert"), Path(out)
    if target not in TARGETS:
        raise ValueError(f"Format must be one of {', '.join(TARGETS)}, got {target!r}.")
    rivals = [each.tried for each in checkpoint.readings if each.predicts and each.stands]
    scores = sorted({str(said["score"]) for said in rivals if "score" in said})
    if len(scores) > 1:
        raise CheckpointError(
            f"{checkpoint.path}: state the score (--score, score=) before converting: the file may have "
            f"{' or '.join(scores)}."
        )
    if target == "npz":
        return [exchange.write_arrays(out, checkpoint)]
    if os.path.lexists(out) and not out.is_dir():
        raise CheckpointError(f"{out}: already exists; it is not overwritten.")
    require_new(out)
    if target == FORMAT:
        exchange.write_exchange(out, checkpoint)
    else:
        checkpoint.save_pretrained(out, card="")
    return sorted(file for file in out.rglob("*") if file.is_file())
