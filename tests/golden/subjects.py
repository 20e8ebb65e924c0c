"""The package as a user has it: the one file of the golden tests that knows its functions.

A subject is a checkpoint folder or a file of weights. Everything stored in `data/` was got through
here, so that after a change of the package's functions this file changes and the stored numbers stay.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

import mechinterp
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.config import ExperimentConfig, TaskConfig, override
from mechinterp.icl.prompts import Prompts, draw_prompts, generator_for
from mechinterp.models.run.predictor import predictor_of
from mechinterp.presets import PRESETS
from mechinterp.training.train import train_models
from tests.checkpoints.files import read as load

ROOT = Path(__file__).parents[2]
FILES = Path(__file__).parent / "files"
FIXTURES = Path(os.environ.get("MECHINTERP_FIXTURES", ROOT.parent / "shared" / "fixtures"))
Head = tuple[int, int]
Hints = Mapping[str, object]
PromptArrays = Mapping[str, Tensor]


def path_of(subject: str) -> Path:
    """Where a subject lies: among the fixtures, or under the root of the checkout."""
    kind, _, name = subject.partition("/")
    return FIXTURES / name if kind == "fixtures" else ROOT / subject


def task_of(subject: str, hints: Hints) -> TaskConfig:
    """The law of its prompts, stated or assumed."""
    return load(path_of(subject), **hints).task


def drawn_prompts(task: TaskConfig, n_prompts: int) -> dict[str, Tensor]:
    """Prompts of a task, in half precision, so that every dtype holds the same numbers."""
    prompts = draw_prompts(task, n_prompts, generator=generator_for(2024, "eval", 0))
    tensors = {field.name: getattr(prompts, field.name) for field in fields(prompts)}
    # The vectors of every pair are there on tasks that drift alone.
    return {name: tensor.half() for name, tensor in tensors.items() if tensor is not None}


def heads_of(subject: str, hints: Hints) -> list[Head]:
    """Every head, (layer, head) from 0."""
    predictor = load(path_of(subject), **hints).predictor
    return [(layer, h) for layer in range(predictor.n_layers) for h in range(predictor.n_heads)]


def predictions(
    subject: str, hints: Hints, prompts: PromptArrays, dtype: torch.dtype
) -> np.ndarray:
    """Predictions of the runnable model, [prompt, d_y]."""
    with torch.no_grad():
        found = _checkpoint(subject, hints, dtype).model.predict(_prompts(prompts, dtype))
    return _float64(found, dtype)


def hooked_predictions(
    subject: str, hints: Hints, prompts: PromptArrays, dtype: torch.dtype, masks: Sequence
) -> np.ndarray:
    """Predictions with heads masked by hooks, a run of the whole model for each mask."""
    model, found = _checkpoint(subject, hints, dtype).model, []
    for heads in masks:
        with torch.no_grad(), mechinterp.masked(model, heads):
            found.append(model.predict(_prompts(prompts, dtype)))
    return _float64(torch.stack(found), dtype)


def masked_at_once(
    subject: str,
    hints: Hints,
    prompts: PromptArrays,
    dtype: torch.dtype,
    masks: Sequence,
    method: str = "zero",
) -> np.ndarray:
    """Predictions under many masks by the package's fastest way, [mask, prompt, d_y]."""
    predictor = _checkpoint(subject, hints, dtype).predictor
    found = predictor.run(_prompts(prompts, dtype), masks, method=method)
    return _float64(found, dtype)


def snapshot_predictions(subject: str, prompts: PromptArrays, dtype: torch.dtype) -> np.ndarray:
    """Predictions of every snapshot in the order of steps, [snapshot, prompt, d_y]."""
    snapshots, given = load(path_of(subject)).snapshots, _prompts(prompts, dtype)
    found = [predictor_of(snapshots[step].to(dtype)).predict(given) for step in sorted(snapshots)]
    return _float64(torch.stack(found), dtype)


def presets() -> list[str]:
    """Presets without three larger ones, which train as `garg-tiny` and `pool-gpt2` do."""
    return [name for name in PRESETS if not name.startswith(("garg-small", "raventos-"))]


def trained(preset: str, steps: int, folder: Path) -> dict[str, Tensor]:
    """The weights after so many steps of a preset, by their names in the file."""
    train_models({"model": _short(preset, steps)}, folder)
    return load_file(folder / "model" / "model.safetensors")


def learning_rate(preset: str) -> float:
    """Distance that Adam moves a weight in a step; 0 for flows, which move it by its gradient."""
    train = PRESETS[preset].train
    return train.learning_rate if train.optimizer == "adam" else 0.0


def _short(preset: str, steps: int) -> ExperimentConfig:
    config = PRESETS[preset]
    shorter = [f"train.steps={steps}", f"train.log_every={steps // 4}", "train.n_eval_prompts=64"]
    if config.train.warm_up is not None:
        shorter.append(f"train.warm_up={steps // 4}")
    return override(config, *shorter)


@lru_cache(maxsize=8)
def _loaded(path: Path, hints: str) -> Checkpoint:
    return load(path, **json.loads(hints))


def _checkpoint(subject: str, hints: Hints, dtype: torch.dtype) -> Checkpoint:
    checkpoint = _loaded(path_of(subject), json.dumps(hints))
    return replace(checkpoint, weights=checkpoint.weights.to(dtype))


def _prompts(arrays: PromptArrays, dtype: torch.dtype) -> Prompts:
    missing = {"beta": None}  # task vectors that drift
    return Prompts(**missing | dict(arrays)).to(dtype)


def _float64(found: Tensor, dtype: torch.dtype) -> np.ndarray:
    assert found.dtype == dtype, f"predictions must be {dtype}, got {found.dtype}"
    return found.double().numpy()
