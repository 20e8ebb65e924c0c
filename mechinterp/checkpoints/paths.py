"""Checkpoints among paths, and the steps of runs by the names of their files."""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from mechinterp.checkpoints.io.tensor_files import has_weights_ending
from mechinterp.checkpoints.native.exchange import SIDE_CAR
from mechinterp.checkpoints.native.folder import CONFIG_FILE

BESIDE = re.compile(r"(?:optim|opt_|sched|lr_sched|scaler|rng|ema).*", re.IGNORECASE)
"""Names of files beside the weights: states of optimisers and random numbers, averaged weights."""
WORD = re.compile(r"([a-z]*)[^a-z]*$")
STEP_WORDS = (
    *("step", "steps", "iter", "iters", "iteration", "iterations", "it", "epoch", "ep"),
    *("update", "updates", "ckpt", "checkpoint", "snapshot", "batch"),
)
"""Words before a step number."""
COUNT_WORDS = ("", "model", "net", "network", "weights", "params", "state")
"""Words before a number that may also count models: then 0, 1, 2, ... or 1, 2, ... are not steps."""


def checkpoint_paths(paths: Iterable[Path]) -> list[Path]:
    """Paths in which a folder that is not a checkpoint is replaced by the checkpoints in it, one
    level down.

    Checkpoints are folders with a config.json or a side-car file, files with an ending of weight
    files, and folders with one such file.
    """
    checkpoints: list[Path] = []
    for path in paths:
        inner = [] if is_marked(path) else checkpoints_in(path)
        checkpoints += [path] if not inner or _is_one_file(inner) else inner
    return checkpoints


def runs_among(paths: Iterable[Path]) -> list[list[Path]]:
    """Paths in groups: the steps of a run together and in order, every other path alone.

    Example:
        >>> [len(group) for group in runs_among(map(Path, ("a/step_1.pt", "a/step_9.pt", "b/x.pt")))]
        [2, 1]
    """
    groups: list[list[Path]] = []
    for _, paths_of_folder in groupby(paths, key=lambda path: path.parent):
        folder = list(paths_of_folder)
        steps = steps_of(folder)
        groups += [list(steps.values())] if steps else [[path] for path in folder]
    return groups


def checkpoints_in(folder: Path) -> list[Path]:
    """Checkpoints one level down; optimiser states do not count."""
    return sorted(
        path
        for path in _in(folder)
        if is_weights(path) or is_marked(path) or _is_one_file(list(filter(is_weights, _in(path))))
    )


def is_weights(path: Path) -> bool:
    """True if a file has a name of weight files."""
    beside = BESIDE.fullmatch(path.name) or path.name.startswith("training_args")
    return has_weights_ending(path) and not beside and path.is_file()


def is_marked(folder: Path) -> bool:
    """True if a folder has a file that marks a checkpoint, and not the steps of a run beside it."""
    marked = any((folder / mark).exists() for mark in (CONFIG_FILE, SIDE_CAR))
    return marked and not steps_of(list(filter(is_weights, _in(folder))))


def steps_of(paths: Sequence[Path], *, one_run: bool = False) -> dict[int, Path]:
    """Paths by step, if they lie in one folder and their names differ in the step number only; else
    empty.

    Besides the step, the epoch may differ too.

    Args:
        one_run: True: the paths are known to be one run, so that any number counts as the step.
    Example:
        >>> steps_of([Path("run/step_1000.pt"), Path("run/step_200.pt")])
        {200: PosixPath('run/step_200.pt'), 1000: PosixPath('run/step_1000.pt')}
        >>> steps_of([Path("model_s0.pt"), Path("model_s1.pt")])
        {}
    """
    names = [re.split(r"(\d+)", path.name) for path in paths]
    texts = {(path.parent, *name[::2]) for path, name in zip(paths, names, strict=True)}
    if len(paths) < 2 or len(texts) > 1:
        return {}
    varying = [n for n in range(1, len(names[0]), 2) if len({int(name[n]) for name in names}) > 1]
    words = {WORD.search(names[0][n - 1].lower())[1]: n for n in varying}  # type: ignore[index]
    if len(varying) == 2 and words.keys() == {"epoch", "step"}:
        del words["epoch"]
    elif len(varying) != 1:
        return {}
    ((word, place),) = words.items()
    by_step = {int(name[place]): path for path, name in zip(paths, names, strict=True)}
    counted = sorted(by_step) in (list(range(len(by_step))), list(range(1, len(by_step) + 1)))
    is_step = word in STEP_WORDS or (word in COUNT_WORDS and not counted)
    return (
        dict(sorted(by_step.items())) if len(by_step) == len(paths) and (one_run or is_step) else {}
    )


def _is_one_file(files: list[Path]) -> bool:
    return len(files) == 1 and files[0].is_file()


def _in(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
