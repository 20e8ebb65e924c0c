"""A model on another device: every analysis answers as on the processor, and its result lies on the processor."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from mechinterp.checkpoints.checkpoint import save
from tests.pretended import DEVICE, Held, pretended
from tests.test_doors import ANALYSES, ANSWERS, Case, as_for_users, case_builder

SOURCES = ("softmax", "deep-linear", "deep-softmax", "encoder")
LIGHT = [(a, s) for s in ("softmax", "deep-softmax") for a in ANALYSES if a != "classify_layers"]
"""Asked by `make test`; `classify` of several layers is `classify_layers`."""
LEFT_OUT = ("write_report", "info_document")
"""The first takes long on the pretended device; `info` uses PyTorch's own of that name, which holds no numbers."""
PAIRS = [
    pytest.param(a, s, marks=() if (a, s) in LIGHT else pytest.mark.exhaustive)
    for s in SOURCES
    for a in ANALYSES
    if (a, s) in ANSWERS and a not in LEFT_OUT
]


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    return case_builder(tmp_path_factory.mktemp("devices"))


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


@pytest.mark.slow
@pytest.mark.parametrize(("analysis", "source"), PAIRS)
def test_an_analysis_answers_alike_on_another_device(
    analysis: str, source: str, case, tmp_path: Path
):
    here = in_float64(case(source), tmp_path / "here")
    with as_for_users():
        expected = frame_of(ANALYSES[analysis](here))
        with pretended():
            away = in_float64(here, tmp_path / "away")
            away = replace(away, source=away.source.to(DEVICE))
            assert isinstance(away.source.weights.W_V, Held)
            found = frame_of(ANALYSES[analysis](away))
    if isinstance(expected, pd.DataFrame):
        pd.testing.assert_frame_equal(found, expected, rtol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["softmax", "deep-linear", "deep-softmax"])
def test_what_a_model_predicts_comes_back_to_the_device_of_the_prompts(source: str, case):
    here = case(source)
    prompts, head = here.prompts()[:6], [(0, 1)]
    with pretended():
        away = here.source.to(DEVICE).predictor
        for run in (
            lambda one: one.predict(prompts),
            lambda one: one.run(prompts, [[], head]),
            lambda one: one.run(prompts, [head], method="mean"),
            lambda one: one.streams(prompts, heads=head),
            lambda one: one.stream(prompts, 1),
            lambda one: one.query_streams(prompts, 1),
        ):
            found = run(away)
            assert not isinstance(found, Held)
            torch.testing.assert_close(found, run(here.source.predictor), rtol=1e-6, atol=1e-6)
        assert isinstance(away.run(prompts.to(DEVICE), [head]), Held)
