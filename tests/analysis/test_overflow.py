"""Weights so large that predictions overflow are refused with that reason, on one line."""

from pathlib import Path

import pytest

from mechinterp.checkpoints.checkpoint import load, save
from tests.conftest import Run


@pytest.mark.parametrize("factor", [1e10, 1e19])
@pytest.mark.parametrize("command", ["fit", "ablate", "report"])
def test_predictions_that_overflow_are_named(run: Run, tmp_path: Path, command: str, factor: float):
    small = load("checkpoints/softmax-h1-s0")
    large = small.weights.with_tensors(
        {name: tensor * factor for name, tensor in small.weights.tensors.items()}
    )
    save(tmp_path / "model", small.config, large, step=1)
    options = ["--out", tmp_path / "report"] if command == "report" else []
    ran = run(command, tmp_path / "model", "--n-prompts", 64, "-q", *options)
    ran.assert_refused(tmp_path / "model", "The model's predictions overflow: they must lie within")
    assert not (tmp_path / "report").exists()
