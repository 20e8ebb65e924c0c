"""Weights so large that predictions overflow are refused with that reason, on one line."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mechinterp import circuits, classify
from mechinterp.checkpoints.checkpoint import load, save
from mechinterp.models.constructions.one_layer import diagonal_heads
from tests.conftest import Run


@pytest.mark.parametrize(("command", "factor"), [("fit", 1e10), ("ablate", 1e19), ("report", 1e19)])
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


def test_weights_beyond_all_bounds_give_no_warning():
    """Warnings are errors in the tests."""
    heads = diagonal_heads([0.1, -0.1], [3.0, -3.0], d_x=5)
    huge = heads.with_tensors(
        {name: torch.full_like(tensor, 1e200) for name, tensor in heads.tensors.items()}
    )
    assert np.isinf(circuits(huge).qk_off_diagonal).all()
    assert classify(huge, n_prompts=64).pattern in ("undetermined", "other")
