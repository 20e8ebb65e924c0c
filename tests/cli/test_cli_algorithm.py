"""Checkpoints of four layers whose algorithm is known get their labels from `classify --json`."""

from pathlib import Path

import pytest

from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.models.constructions.sparse import preprocess_then_optimise_model
from mechinterp.models.weights import Weights
from mechinterp.training.general.trainer import initial_deep_weights
from tests.analysis.test_naming import (
    DENSE,
    FALLING,
    GD_PLUS_PLUS,
    KMS,
    PRECONDITIONED,
    SPARSE,
    noisy,
    saved,
)
from tests.conftest import Run, sampled

SIXTEEN_HEADS = preprocess_then_optimise_model([1.0, 0.8, 0.6], d_x=16)
RANDOM = initial_deep_weights(
    ExperimentConfig(
        task=SPARSE,
        model=ModelConfig(n_layers=4, n_heads=4, score="linear/L", context_only=True, d_model=64),
    )
)
KNOWN: dict[str, tuple[Weights, TaskConfig, str]] = {
    "falling steps, 3% noise": (noisy(FALLING, 2), DENSE, "gradient_descent"),
    "GD++, 3% noise": (noisy(GD_PLUS_PLUS, 2), DENSE, "gd_plus_plus"),
    "Algorithm 1, 3% noise": (noisy(SIXTEEN_HEADS, 2), SPARSE, "preprocess_then_optimise"),
    "preconditioned, 3% noise": (noisy(PRECONDITIONED, 2), KMS, "preconditioned_descent"),
    "random": (RANDOM, SPARSE, "unstructured"),
}

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", sampled(KNOWN, keep="GD++, 3% noise".__eq__))
def test_the_pattern_is_the_algorithm(name: str, tmp_path: Path, run: Run):
    weights, task, label = KNOWN[name]
    assert weights.n_layers == 4
    folder = saved(weights, task, tmp_path / "model")
    (document,) = run("classify", folder, "--json").document
    assert document["pattern"] == label, document["reason"]
    evidence = document["evidence"]
    if label == "unstructured":
        assert (len(evidence["algorithms"]), evidence["relative_risk"] >= 0.95) == (1, True)
        return
    assert evidence["algorithm"] == evidence["mechanism"] == label
    assert evidence["r2"] >= 0.98
    assert evidence["r2_sem"] < 0.01
    first, *others = evidence["algorithms"]
    assert (first["learner"], first["why_not"]) == (label, "")
    assert all(row["why_not"] for row in others)
    assert min(first[f"layer_{layer}_r2"] for layer in range(4)) >= 0.98
