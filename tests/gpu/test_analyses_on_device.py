"""Every analysis of four kinds of model, and every command, held against the processor."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from mechinterp.checkpoints.checkpoint import save
from tests.conftest import CHECKPOINTS, Run, sampled
from tests.gpu.test_on_device import AFTER_STEPS
from tests.test_doors import ANALYSES, ANSWERS, Case, as_for_users, case_builder

ONE, DEEP = CHECKPOINTS / "softmax-h2-s0", CHECKPOINTS / "sparse-h4-noise0.1-s0"
COMMANDS: dict[str, tuple[object, ...]] = {
    "classify": (ONE, "--n-prompts", 64),
    "ablate": (ONE, "--n-prompts", 64),
    "prune": (DEEP, "--n-prompts", 128),
    "probe": (DEEP, "--n-prompts", 128),
    "analyse": ("ablate", ONE, "--what", "heads", "--n-prompts", 64),
    "compare-learners": (ONE, "--n-prompts", 64, "--context-length", 10),
    "report": (ONE, "--n-prompts", 64),
}
SOURCES = ("softmax", "deep-linear", "deep-softmax", "encoder")
PAIRS = [(a, s) for s in SOURCES for a in ANALYSES if (a, s) in ANSWERS]
ON_THE_PROCESSOR = [("circuits", "softmax"), ("ablate heads", "softmax")]
"""Pairs that the slow tests ask with the processor as the device; the exhaustive ones ask all."""


def in_float64(case: Case, folder: Path) -> Case:
    """The same case in float64, snapshots too: fits that stop at a share of their error carry rounding further."""
    folder.mkdir()
    source = replace(case.source, weights=case.source.weights.to(torch.float64))
    if source.steps:
        kept = {step: weights.to(torch.float64) for step, weights in source.snapshots.items()}
        path, stated = folder / source.name, {"step": source.step, "history": source.history}
        save(path, source.config, source.weights, **stated, snapshots=kept)
        source = replace(source, path=path)
    return replace(case, source=source, folder=folder, dtype=torch.float64)


def frame_of(result: object) -> pd.DataFrame | str:
    return result.to_frame() if hasattr(result, "to_frame") else ""


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    return case_builder(tmp_path_factory.mktemp("device"))


@pytest.mark.parametrize(
    ("analysis", "source"), sampled(PAIRS, keep=lambda pair: pair in ON_THE_PROCESSOR)
)
def test_an_analysis_answers_as_on_the_processor(
    analysis: str, source: str, case, device: str, tmp_path: Path
):
    here, away = (in_float64(case(source), tmp_path / name) for name in ("here", "away"))
    away = replace(away, source=away.source.to(device))
    assert away.source.weights.W_V.device.type == device
    with as_for_users():
        expected, found = (frame_of(ANALYSES[analysis](each)) for each in (here, away))
    if isinstance(expected, pd.DataFrame):
        steps = analysis == "local_learning_coefficient"
        pd.testing.assert_frame_equal(found, expected, rtol=AFTER_STEPS if steps else 1e-7)


@pytest.mark.parametrize("command", sampled(COMMANDS, keep=lambda command: command == "ablate"))
def test_a_command_answers_as_on_the_processor(command: str, run: Run, device: str, tmp_path: Path):
    def answer(where: str, folder: str) -> object:
        out = ("--out", tmp_path / folder) if command == "report" else ()
        asked = (command, *COMMANDS[command], *out, "--json", "--device", where)
        return run(*asked).done().document

    require_alike(answer(device, "away"), answer("cpu", "here"))


def require_alike(found: object, expected: object) -> None:
    """The same words and whole numbers; others to rounding, paths apart."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for name, value in expected.items():
            require_alike(found[name], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            require_alike(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5, nan_ok=True)
    elif not (isinstance(expected, str) and "/" in expected):
        assert found == expected
