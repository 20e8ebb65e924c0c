"""Writes the golden files: `python -m tests.golden.write [PART...]`, all parts if none is named.

Run it only where a difference is meant, and read the difference before it is committed. Files of weights in `files/` are
not written again: they stand for what other people have.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from mechinterp.config import TaskConfig
from tests.golden import subjects
from tests.golden.store import (
    DATA,
    KINDS,
    METHODS,
    SLOW_STEPS,
    SNAPSHOT_PROMPTS,
    STEPS,
    masks_of,
    read_json,
    read_tensors,
    stored_prompts,
    write_json,
)

N_PROMPTS = 64
FIXTURES = (
    "softmax_h3_run",
    "softmax_multitask_h4_run",
    "linear_merged_h8",
    "linear_separate_h5_r1",
)


def write_predictions() -> None:
    """The list of subjects, their prompts and their predictions."""
    names: dict[str, dict] = {f"checkpoints/{f.name}": {} for f in _checkpoints()}
    names |= {f"fixtures/{name}.pth": {} for name in FIXTURES} | read_json("files")
    tasks: dict[TaskConfig, str] = {}
    listed, prompts, found = {}, {}, {}
    for name, hints in names.items():
        task = subjects.task_of(name, hints)
        if task not in tasks:
            tasks[task] = Path(name).name
            drawn = subjects.drawn_prompts(task, N_PROMPTS)
            prompts |= {f"{tasks[task]}/{field}": tensor for field, tensor in drawn.items()}
        listed[name] = {"prompts": tasks[task], "hints": hints}
    write_json("subjects", listed)
    _write_tensors("prompts", prompts)
    for name, each in listed.items():
        given = stored_prompts(each["prompts"])
        values = subjects.predictions(name, each["hints"], given, torch.float64)
        found[name] = torch.from_numpy(values)
    _write_tensors("predictions", found)


def write_masks() -> None:
    """Predictions of a model of each kind, unmasked and with each head masked alone."""
    found = {}
    for name in KINDS.values():
        each = read_json("subjects")[name]
        given, hints = stored_prompts(each["prompts"]), each["hints"]
        for method in METHODS:
            values = subjects.masked_at_once(
                name, hints, given, torch.float64, masks_of(name, hints), method
            )
            found[f"{name}/{method}"] = torch.from_numpy(values)
    _write_tensors("masks", found)


def write_snapshots() -> None:
    """Predictions of all snapshots of models of linear attention, of several layers too."""
    found = {}
    for folder in _checkpoints():
        name = f"checkpoints/{folder.name}"
        if folder.name.startswith(("linear-", "sparse-")):
            prompts = stored_prompts(read_json("subjects")[name]["prompts"], SNAPSHOT_PROMPTS)
            values = subjects.snapshot_predictions(name, prompts, torch.float64)
            found[name] = torch.from_numpy(values)
    _write_tensors("snapshots", found)


def write_training() -> None:
    """Weights of each preset after a few steps."""
    found = {}
    for preset in subjects.presets():
        with tempfile.TemporaryDirectory() as folder:
            weights = subjects.trained(preset, SLOW_STEPS.get(preset, STEPS), Path(folder))
        found |= {f"{preset}/{name}": tensor for name, tensor in weights.items()}
    _write_tensors("training", found)


def _checkpoints() -> list[Path]:
    return sorted(f.parent for f in (subjects.ROOT / "checkpoints").glob("*/config.json"))


def _write_tensors(name: str, tensors: dict[str, Tensor]) -> None:
    file = DATA / f"{name}.safetensors"
    save_file({key: t.contiguous() for key, t in tensors.items()}, file)
    file.chmod(0o644)
    read_tensors.cache_clear()


PARTS: dict[str, Callable[[], None]] = {
    "predictions": write_predictions,
    "masks": write_masks,
    "snapshots": write_snapshots,
    "training": write_training,
}

if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
