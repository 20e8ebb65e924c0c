"""Many models in one run folder: which ones there are, which are finished, and training the rest.

A run folder holds one `training-<n>.safetensors` per pack while it trains and one checkpoint folder per
model when it is done. Linear attention that is trained on moments takes seconds and needs no state. Nothing in it is overwritten: without `resume` it must be free, with `resume` its
configs must equal those asked for.
"""

import itertools
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from mechinterp.checkpoints.errors import CheckpointError
from mechinterp.checkpoints.files import read_json
from mechinterp.checkpoints.native import load, save
from mechinterp.config import ExperimentConfig, differences, from_dict, override, preset, value_of
from mechinterp.training.linear import train_linear
from mechinterp.training.trainer import Pack, Progress, TrainedModel, pack_key, train_pack

ENTRY_FIELDS = ("preset", "config", "set", "grid", "name")


@dataclass(frozen=True)
class TrainingSummary:
    """What a training run left behind."""

    checkpoints: tuple[Path, ...]
    """Folders of all models asked for, finished earlier or now."""
    steps: int
    """Updates made now, summed over packs."""
    seconds: float
    """Time spent in those steps and in writing; start-up left out."""
    loss: float
    """Mean over the models of the final `eval_loss`, unit y^2."""


def load_sweep(file: str | Path) -> dict[str, ExperimentConfig]:
    """The models of a sweep file, by name, in the order of the file.

    The file is JSON: one entry or a list of them. An entry starts from a "preset" or a "config", changes
    the fields in "set", takes every combination of the values in "grid", and is named by the pattern
    "name", in which {model.n_heads} stands for that field's value.

    Raises:
        ValueError: If the file is no sweep file; the message names the file and the rule.
    Example:
        >>> len(load_sweep("analyses/sweeps/softmax.json"))
        26
    """
    file = Path(file)
    document = read_json(file)
    models: dict[str, ExperimentConfig] = {}
    try:
        for entry in document if isinstance(document, list) else [document]:
            for name, config in _entry_models(entry):
                if name in models:
                    raise ValueError(f"names must differ, got {name!r} twice.")
                models[name] = config
    except ValueError as error:
        raise ValueError(f"{file}: {' '.join(str(error).split())}") from None
    if not models:
        raise ValueError(f"{file}: a sweep file must hold at least one entry, got none.")
    return models


def train_models(
    models: Mapping[str, ExperimentConfig],
    run_folder: str | Path,
    *,
    resume: bool = False,
    device: str = "cpu",
    on_log: Callable[[Progress], None] | None = None,
) -> TrainingSummary:
    """Train models into `run_folder/<name>`, those that can in one pack; finished ones are skipped.

    Raises:
        ValueError: If a model with merged heads is to be trained by Adam.
        CheckpointError: If the folder holds another run, or what is resumed differs from what is asked for,
            or a model's weights stopped being finite.
    Example:
        >>> import tempfile
        >>> config = override(preset("softmax-h2"), "train.steps=20", "train.n_eval_prompts=64")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     train_models({"short": config}, folder).steps
        20
    """
    _require_trainable(models)
    run_folder = Path(run_folder)
    states = sorted(run_folder.glob("training-*.safetensors"))
    if not resume:
        _require_free(models, run_folder, states)
    for name, config in models.items():
        if (run_folder / name / "config.json").exists():
            _require_same(run_folder / name, load(run_folder / name).config, config)
    on_moments = {n: config for n, config in models.items() if config.train.optimizer != "adam"}
    steps, seconds, diverged = _train_linear(on_moments, run_folder, on_log)
    packed = {name: config for name, config in models.items() if name not in on_moments}
    for file, pack in _packs(packed, run_folder, states, device):
        pack.save(file)
        first_step = pack.step
        seconds += train_pack(pack, file, on_log=on_log)
        steps += pack.step - first_step
        diverged += _export(pack, run_folder)
        file.unlink()
    if diverged:
        rates = (
            f"{name} (train.learning_rate {models[name].train.learning_rate:g})"
            for name in diverged
        )
        raise CheckpointError(
            f"{run_folder}: weights must stay finite, those of {', '.join(rates)} did not; the other models are "
            "saved. Try a smaller step size with --resume."
        )
    checkpoints = tuple(run_folder / name for name in models)
    losses = [_final_loss(folder) for folder in checkpoints]
    return TrainingSummary(checkpoints, steps, seconds, sum(losses) / len(losses))


def _train_linear(
    models: Mapping[str, ExperimentConfig],
    run_folder: Path,
    on_log: Callable[[Progress], None] | None,
) -> tuple[int, float, list[str]]:
    """Train and save models of linear attention; updates made, seconds spent and names of those that diverged."""
    steps, seconds, diverged = 0, 0.0, []
    for name, config in models.items():
        if (run_folder / name / "config.json").exists():
            continue
        start, n = time.monotonic(), config.train.steps
        try:
            trained = train_linear(config)
        except FloatingPointError:
            diverged.append(name)
            continue
        except RuntimeError as error:
            raise CheckpointError(f"{run_folder / name}: {error}") from None
        _save(run_folder / name, trained)
        spent = time.monotonic() - start
        steps, seconds = steps + n, seconds + spent
        if on_log is not None:
            on_log(Progress(n, n, 1, float(trained.history["loss"].iloc[-1]), n / spent))
    return steps, seconds, diverged


def _require_trainable(models: Mapping[str, ExperimentConfig]) -> None:
    for config in models.values():
        if config.model.merged_qk and config.train.optimizer == "adam":
            raise ValueError("model.merged_qk must be false for train.optimizer 'adam', got true.")


def _packs(
    models: Mapping[str, ExperimentConfig], run_folder: Path, states: list[Path], device: str
):
    """The state file and the pack of everything that is not finished, one after another."""
    started = set()
    for file in states:
        pack = Pack.restore(file, device=device)
        for name, config in pack.models.items():
            if name not in models:
                raise CheckpointError(f"{file}: holds {name!r}, which is not part of this run.")
            _require_same(file, config, models[name])
        started |= set(pack.models)
        yield file, pack
    groups: dict[str, dict[str, ExperimentConfig]] = {}
    for name, config in models.items():
        if name not in started and not (run_folder / name / "config.json").exists():
            groups.setdefault(pack_key(config), {})[name] = config
    first = max((int(file.stem.partition("-")[2]) for file in states), default=-1) + 1
    for index, group in enumerate(groups.values(), start=first):
        yield run_folder / f"training-{index}.safetensors", Pack(group, device=device)


def _export(pack: Pack, run_folder: Path) -> list[str]:
    """Save every model of a finished pack that is not saved yet; the names of those that diverged."""
    diverged = []
    for name, trained in pack.results().items():
        if (
            not torch.isfinite(trained.weights.QK).all()
            or not torch.isfinite(trained.weights.OV).all()
        ):
            diverged.append(name)
        elif not (run_folder / name / "config.json").exists():
            _save(run_folder / name, trained)
    return diverged


def _save(folder: Path, trained: TrainedModel) -> None:
    save(
        folder,
        trained.config,
        trained.weights,
        step=trained.step,
        history=trained.history,
        snapshots=trained.snapshots,
    )


def _require_free(
    models: Mapping[str, ExperimentConfig], run_folder: Path, states: list[Path]
) -> None:
    targets = [run_folder / name for name in models]
    occupied = states or [t for t in targets if t.exists() and (not t.is_dir() or any(t.iterdir()))]
    if occupied:
        raise CheckpointError(
            f"{occupied[0]}: already exists and is not overwritten; choose another --out, or --resume."
        )


def _require_same(where: Path, there: ExperimentConfig, here: ExperimentConfig) -> None:
    changed = differences(there, here)
    if changed:
        name, (old, new) = next(iter(changed.items()))
        raise CheckpointError(
            f"{where}: cannot be resumed with another config: {name} is {old} there, {new} here."
        )


def _final_loss(folder: Path) -> float:
    history = load(folder).history
    return float("nan") if history is None else float(history["eval_loss"].iloc[-1])


def _entry_models(entry: object):
    if not isinstance(entry, dict) or not set(entry) <= set(ENTRY_FIELDS):
        raise ValueError(
            f"an entry must be an object with fields among {', '.join(ENTRY_FIELDS)}, got {entry!r}."
        )
    if ("preset" in entry) == ("config" in entry):
        found = "both" if "preset" in entry else "neither"
        raise ValueError(f"an entry must have either a preset or a config, got {found}: {entry!r}.")
    for field in ("preset", "name"):
        if not isinstance(entry.get(field, ""), str):
            raise ValueError(f"{field} must be text, got {entry[field]!r}.")
    base = preset(entry["preset"]) if "preset" in entry else from_dict(entry["config"])
    base = override(base, *_assignments(entry.get("set", {}), "set"))
    grid = entry.get("grid", {})
    if not isinstance(grid, dict) or not all(isinstance(values, list) for values in grid.values()):
        raise ValueError(f"grid must give a list of values for each field, got {grid!r}.")
    default_name = "-".join([entry.get("preset", "model"), *(f"{key}{{{key}}}" for key in grid)])
    for values in itertools.product(*grid.values()):
        config = override(base, *_assignments(dict(zip(grid, values, strict=True)), "grid"))
        yield _name(entry.get("name", default_name), config), config


def _assignments(values: object, field: str) -> list[str]:
    if not isinstance(values, dict):
        raise ValueError(f"{field} must be an object of field names and values, got {values!r}.")
    return [f"{name}={json.dumps(value)}" for name, value in values.items()]


def _name(pattern: str, config: ExperimentConfig) -> str:
    name = re.sub(r"\{([\w.]+)\}", lambda match: str(value_of(config, match[1])), pattern)
    if not re.fullmatch(r"\w[\w.=+-]*", name):
        raise ValueError(f"a name must consist of letters, digits and . _ - = +, got {name!r}.")
    return name
