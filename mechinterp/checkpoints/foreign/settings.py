"""What files beside weights state: Hugging Face's config.json, and config.yaml of the code of Garg et al."""

import math
from pathlib import Path

from mechinterp.checkpoints.io.atomic import read_json, read_yaml
from mechinterp.checkpoints.io.errors import CheckpointError
from mechinterp.checkpoints.native.folder import OWN


def settings_beside(path: Path) -> dict[str, object]:
    """What is stated beside a file of weights, {} without such files.

    n_points, the pairs with the query, is an integer and noise_std a number, whatever they are written as.

    Raises:
        CheckpointError: If noise_std is no number >= 0, or n_points no integer >= 2.
    """
    file, garg = path.with_name("config.json"), path.with_name("config.yaml")
    stated: list[tuple[Path, dict]] = []
    document = read_json(file) if file.is_file() else None
    if isinstance(document, dict) and not OWN & set(document):
        stated.append((file, document))
    if garg.exists():
        stated.append((garg, _garg_settings(read_yaml(garg))))
    return {
        name: _checked(file, name, value)
        for file, settings in stated
        for name, value in settings.items()
        if value is not None
    }


def _garg_settings(document: object) -> dict[str, object]:
    """Heads and other counts, noise and number of points in a config.yaml of the code of Garg et al."""
    model = _within(document, "model")
    counts = {n: t for n, t in model.items() if _counts(t)} if isinstance(model, dict) else {}
    return counts | {
        "n_points": _within(document, "training", "curriculum", "points", "end"),
        "noise_std": _within(document, "training", "task_kwargs", "noise_std"),
    }


def _within(document: object, *names: str) -> object:
    """The entry of nested mappings; None where there is none."""
    for name in names:
        document = document.get(name) if isinstance(document, dict) else None
    return document


def _checked(file: Path, name: str, value: object) -> object:
    """A setting, a text of digits as an integer and noise_std as a number."""
    if isinstance(value, str) and _counts(value):
        value = int(value)
    if name == "noise_std":
        try:
            noise = float(str(value))
        except ValueError:
            noise = math.nan
        if not 0 <= noise < math.inf:
            raise CheckpointError(f"{file}: noise_std must be a number >= 0, got {value!r:.42}.")
        return noise
    if name == "n_points" and (type(value) is not int or value < 2):
        raise CheckpointError(f"{file}: n_points must be an integer >= 2, got {value!r:.42}.")
    return value


def _counts(text: object) -> bool:
    return str(text).isdecimal() and len(str(text)) < 10
