"""Compiled code in a folder of the disk is that of the present source: a changed file, or another list of scores, is compiled anew.

Each case edits a copy of the package and runs it in a process of its own, with the same folder of compiled code.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mechinterp.training.lanes import require_close
from tests.conftest import refused

PACKAGE = Path(__file__).parents[2] / "mechinterp"
STEP = """
import torch
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.icl.prompts import draw_prompts
from mechinterp.training.lanes import cache_folder
from mechinterp.training.one_layer import step

task = TaskConfig(d_x=2, context_length=5)
model = ModelConfig(n_heads=2, score="1+tanh", score_slope=0.5)
weights = step.initial_weights(ExperimentConfig(task=task, model=model))
prompts, members = draw_prompts(task, 4), step.membership([2])
print(cache_folder())
gradients = weights.with_tensors({name: t.clone() for name, t in weights.tensors.items()})
print(step._kernel_step(gradients, weights, members)(prompts).item())
print(step.by_tensors(weights, prompts, members)[0].item())
print(step.loss_and_gradients(weights, prompts, members)[0].item())
"""


def run(folder: Path) -> tuple[str, list[float], str]:
    """Folder of the compiled code, and losses by the kernel, by tensors and by the checked kernel."""
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "NUMBA_CACHE_DIR": str(folder / "compiled"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-c", STEP]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    first, *numbers = done.stdout.split() or [""]
    return first, [float(number) for number in numbers], done.stderr


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package whose step has been compiled once."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(PACKAGE, folder / "mechinterp", ignore=shutil.ignore_patterns("__pycache__"))
    cache, (kernel, tensors, checked), _ = run(folder)
    assert kernel == checked == pytest.approx(tensors, rel=1e-5)
    assert list(Path(cache).rglob("*.nbi"))
    return folder


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.slow
def test_another_order_of_scores_gives_the_same_losses(copied: Path):
    cache, losses, _ = run(copied)
    config = copied / "mechinterp" / "config" / "model.py"
    edit(config, 'SCORES = ("softmax", "1+tanh",', 'SCORES = ("1+tanh", "softmax",')
    try:
        other, found, _ = run(copied)
    finally:
        edit(config, 'SCORES = ("1+tanh", "softmax",', 'SCORES = ("softmax", "1+tanh",')
    assert other != cache
    assert found == losses


@pytest.mark.slow
def test_a_change_in_another_file_than_the_kernels_is_compiled(copied: Path):
    lanes = copied / "mechinterp" / "training" / "lanes.py"
    _, losses, _ = run(copied)
    edit(lanes, 'truediv, "fdiv"', 'truediv, "fmul"')
    try:
        _, found, error = run(copied)
    finally:
        edit(lanes, 'truediv, "fmul"', 'truediv, "fdiv"')
    # The kernel is the changed one, and the comparison with the tensors refuses it.
    assert found[1] == losses[1]
    assert abs(found[0] - losses[0]) > 0.01 * losses[0]
    assert len(found) == 2
    assert "must agree with the tensor operations" in error.splitlines()[-1]


@pytest.mark.slow
def test_the_cache_is_used_again(copied: Path):
    cache, losses, _ = run(copied)
    files = {file: file.stat().st_mtime_ns for file in Path(cache).rglob("*.nb?")}
    assert run(copied) == (cache, losses, "")
    assert {file: file.stat().st_mtime_ns for file in Path(cache).rglob("*.nb?")} == files


def test_a_step_that_differs_is_refused():
    numbers = torch.linspace(-1, 1, 5)
    require_close("softmax attention", [numbers], [numbers.double() + 1e-4])
    for wrong in (numbers + 0.01, numbers * float("nan")):
        with refused("softmax attention", "0.001"):
            require_close("softmax attention", [wrong], [numbers])
