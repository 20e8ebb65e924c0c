"""Predictions and trained weights are those of the day when the golden files were written.

tests/golden/README.md says what is stored, and how it is written again where a difference is meant.
"""

import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from mechinterp.icl.prompts import draw_prompts
from mechinterp.presets import PRESETS
from mechinterp.training.general.step import loss_and_gradients
from mechinterp.training.general.trainer import initial_deep_weights
from tests.conftest import sampled
from tests.golden import subjects
from tests.golden.store import (
    KINDS,
    METHODS,
    SLOW_STEPS,
    SNAPSHOT_PROMPTS,
    STEPS,
    distance,
    masks_of,
    read_json,
    read_tensors,
    stored_prompts,
)

SUBJECTS = read_json("subjects")
WIDE = "checkpoints/sparse-wide-s0"  # 256 heads
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Tolerance of predictions: rounding of each dtype, relative to the largest prediction."""
TRAINED = 1e-5
"""Tolerance of weights after some steps in float32, in norm."""


def stored(name: str, key: str) -> np.ndarray:
    return read_tensors(name)[key].numpy()


def given(subject: str, n_prompts: int | None = None) -> tuple[subjects.Hints, dict]:
    """Hints and prompts of a subject that is there."""
    if not subjects.path_of(subject).exists():
        assert subject.startswith("fixtures/"), f"{subject} is gone"
        pytest.skip("the published files are not part of the repository")
    each = SUBJECTS[subject]
    return each["hints"], stored_prompts(each["prompts"], n_prompts)


FURTHER = r"-s[1-9]\d*$|other-names|unpacked|prefix|one-file|first-norm|\.safetensors$"
FIRST = {name for name in SUBJECTS if not re.search(FURTHER, name) or "-rank" in name}
"""The first seed of each setting, and a file of every layout, not in other containers or under other names too."""


def kept(case: tuple[str, torch.dtype]) -> bool:
    """Float64 for a model of each setting and a file of each layout; float32 for a model of each kind."""
    subject, dtype = case
    if dtype == torch.float32:
        return subject in {*KINDS.values(), WIDE}
    return subject in FIRST - {WIDE}


@pytest.mark.slow
@pytest.mark.parametrize(("subject", "dtype"), sampled(product(SUBJECTS, TOLERANCE), keep=kept))
def test_predictions_are_those_stored(subject: str, dtype: torch.dtype):
    # A prompt of the wide model takes as long as all of another.
    n_prompts = 2 if subject == WIDE else None
    hints, prompts = given(subject, n_prompts)
    expected = stored("predictions", subject)[:n_prompts]
    largest = np.abs(expected).max()
    found = subjects.predictions(subject, hints, prompts, dtype)
    assert distance(found, expected, largest) <= TOLERANCE[dtype]
    (found,) = subjects.masked_at_once(subject, hints, prompts, dtype, [[]])
    assert distance(found, expected, largest) <= TOLERANCE[dtype]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "method"),
    sampled(
        product(KINDS, METHODS),
        keep=lambda case: (
            case[0] in ("softmax", "deep softmax", "gpt2")
            or (case[1] == "zero" and case[0] != "encoder")
        ),
    ),
)
def test_every_masked_head_changes_predictions_as_stored(kind: str, method: str):
    subject = KINDS[kind]
    hints, prompts = given(subject)
    expected, masks = stored("masks", f"{subject}/{method}"), masks_of(subject, hints)
    # A mask may blow predictions up, and another leave them small: each has its own largest
    # prediction.
    largest = np.maximum(np.abs(expected), np.abs(expected[:1])).max((1, 2), keepdims=True)
    found = subjects.masked_at_once(subject, hints, prompts, torch.float64, masks, method)
    assert distance(found, expected, largest) <= TOLERANCE[torch.float64]
    if method == "zero":
        found = subjects.hooked_predictions(subject, hints, prompts, torch.float64, masks)
        assert distance(found, expected, largest) <= TOLERANCE[torch.float64]


@pytest.mark.slow
@pytest.mark.parametrize("subject", sampled(read_tensors("snapshots"), keep=FIRST.__contains__))
def test_snapshots_predict_what_is_stored(subject: str):
    _, prompts = given(subject, SNAPSHOT_PROMPTS)
    expected = stored("snapshots", subject)
    found = subjects.snapshot_predictions(subject, prompts, torch.float64)
    # Weights grow from next to nothing: each snapshot has its own largest prediction.
    largest = np.abs(expected).max((1, 2), keepdims=True)
    assert distance(found, expected, largest) <= TOLERANCE[torch.float64]


@pytest.mark.parametrize("preset", [n for n, c in PRESETS.items() if c.model.biases])
def test_a_key_bias_has_no_gradient(preset: str):
    config = PRESETS[preset]
    prompts = draw_prompts(config.task, 4, dtype=torch.float64, context_length=6)
    weights = initial_deep_weights(config)
    weights = weights.with_tensors({n: t.double() for n, t in weights.tensors.items()})
    _, gradients = loss_and_gradients(weights, prompts, first_counted=0)
    assert gradients.tensors["attn.b_Q"].abs().max() > 1e-6
    assert gradients.tensors["attn.b_K"].abs().max() < 1e-14


RUNS = sampled(
    subjects.presets(),
    keep=lambda preset: (
        preset == "softmax-h2" or not preset.startswith(("softmax-", "sparse-", "pool-gpt2"))
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("preset", RUNS)
def test_presets_train_to_what_is_stored(preset: str, tmp_path: Path):
    steps = SLOW_STEPS.get(preset, STEPS)
    found = subjects.trained(preset, steps, tmp_path / "whole")
    prefix = f"{preset}/"
    keys = [key for key in read_tensors("training") if key.startswith(prefix)]
    assert found.keys() == {key.removeprefix(prefix) for key in keys}
    for key in keys:
        expected = stored("training", key)
        off = np.linalg.norm(found[key.removeprefix(prefix)].numpy() - expected)
        if key.endswith("attn.b_K"):
            # A softmax does not depend on it (test_a_key_bias_has_no_gradient): Adam moves it by rounding alone.
            continue
        # Adam moves a weight whose gradient is nothing but rounding by up to a learning rate, on each
        # processor another way. A step more or less moves every weight so far.
        allowed = TRAINED * np.linalg.norm(expected) + subjects.learning_rate(preset)
        assert off <= allowed, key
