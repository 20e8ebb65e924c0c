"""Which checkpoints lie in folders, and which files are the steps of one run."""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from mechinterp.checkpoints.io.tensor_files import has_weights_ending
from mechinterp.checkpoints.io.torch_files import BESIDE
from mechinterp.checkpoints.native.exchange import SIDE_CAR

CONFIG = "config.json"
WORD = re.compile(r"([a-z]*)[^a-z]*$")
STEP_WORDS = (
    *("step", "steps", "iter", "iters", "iteration", "iterations", "it", "epoch", "ep"),
    *("update", "updates", "ckpt", "checkpoint", "snapshot", "batch"),
)
"""Words before the number of a step."""
COUNT_WORDS = ("", "model", "net", "network", "weights", "params", "state")
"""Words before a number that may count models too: 0, 1, 2, ... or 1, 2, ... are then no steps."""


def checkpoint_paths(paths: Iterable[Path]) -> list[Path]:
    """The paths, a folder that is no checkpoint replaced by the checkpoints in it, one level down.

    Those are folders with a config.json or a side-car, files that end as those of other people do, and folders with
    one such file.
    """
    checkpoints: list[Path] = []
    for path in paths:
        inner = [] if is_marked(path) else checkpoints_in(path)
        checkpoints += [path] if not inner or _is_one_file(inner) else inner
    return checkpoints


def runs_among(paths: Iterable[Path]) -> list[list[Path]]:
    """The paths in groups: the steps of a run together and in their order, every other path alone.

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
    """The checkpoints one level down; what optimisers keep is none."""
    return sorted(
        path
        for path in _in(folder)
        if is_weights(path) or is_marked(path) or _is_one_file(list(filter(is_weights, _in(path))))
    )


def is_weights(path: Path) -> bool:
    """Whether a file's name is one that weights have."""
    beside = BESIDE.fullmatch(path.name) or path.name.startswith("training_args")
    return has_weights_ending(path) and not beside and path.is_file()


def is_marked(folder: Path) -> bool:
    """Whether a folder says that it is a checkpoint."""
    return any((folder / mark).exists() for mark in (CONFIG, SIDE_CAR))


def steps_of(paths: Sequence[Path], *, told: bool = False) -> dict[int, Path]:
    """The paths by step, if they lie in one folder and their names differ in the number of a step alone; else none.

    Beside a step's number that of its epoch may differ, too.

    Args:
        told: Whether it is known that they are one run, so that any number may be the step's.
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
    return dict(sorted(by_step.items())) if len(by_step) == len(paths) and (told or is_step) else {}


def _is_one_file(files: list[Path]) -> bool:
    return len(files) == 1 and files[0].is_file()


def _in(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
