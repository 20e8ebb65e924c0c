"""The shipped models are what the sweep files say, and can be made again.

What they show is in the records of analyses/results: `make analyses-check` and
tests/test_analyses.py measure them anew, test_records.py has every claim.
"""

import json
from functools import cache

import pytest
import torch

from mechinterp.checkpoints.checkpoint import Checkpoint, load
from mechinterp.config import ExperimentConfig, override
from mechinterp.config.experiment import from_dict
from mechinterp.training.one_layer.step import Pack, initial_weights
from mechinterp.training.sweep_file import load_sweep
from tests.conftest import CHECKPOINTS, assert_close_to_rounding

SWEEPS = CHECKPOINTS.parent / "analyses" / "sweeps"
FILES = {file.parent.name: file for file in CHECKPOINTS.glob("*/config.json")}
SOFTMAX = sorted(name for name in FILES if name.startswith("softmax-h"))
# Made by scripts of their own.
OTHERS = ("garg-", "pool-")


@cache
def planned() -> dict[str, ExperimentConfig]:
    """The models of all sweep files, those of the learning rates left out."""
    files = [file for file in SWEEPS.glob("*.json") if file.stem != "sparse_rates"]
    return {name: config for file in files for name, config in load_sweep(file).items()}


@cache
def checkpoint(name: str) -> Checkpoint:
    return load(CHECKPOINTS / name)


@pytest.mark.slow
def test_every_shipped_model_is_one_of_a_sweep_with_its_config():
    for name, file in FILES.items():
        if not name.startswith(OTHERS):
            stored = json.loads(file.read_text(encoding="utf-8"))["experiment"]
            assert from_dict(stored) == planned()[name], name


@pytest.mark.parametrize(
    "sweep", ["softmax", "activations", "covariance", "tasks", "sparse", "recurrent"]
)
def test_every_model_of_a_sweep_is_shipped(sweep: str):
    assert set(load_sweep(SWEEPS / f"{sweep}.json")) <= set(FILES)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOFTMAX)
def test_a_shipped_model_starts_from_the_weights_its_config_says(name: str):
    start, expected = (
        checkpoint(name).snapshots[0],
        initial_weights(checkpoint(name).config),
    )
    for part in ("W_Q", "W_K", "W_V", "W_O"):
        assert_close_to_rounding(getattr(start, part), getattr(expected, part))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["softmax-h1-s0", "softmax-h2-s9", "softmax-h3-s1"])
def test_a_shipped_model_is_made_again_from_its_config_alone(name: str):
    # It was trained in the company of others; alone the sums round differently, and nothing else does.
    alone = Pack({name: override(checkpoint(name).config, "train.steps=1000")})
    alone.advance()
    weights, expected = (
        alone.results()[name].weights,
        checkpoint(name).snapshots[1000],
    )
    for part in ("QK", "OV"):
        torch.testing.assert_close(
            getattr(weights, part), getattr(expected, part), rtol=1e-4, atol=1e-5
        )
