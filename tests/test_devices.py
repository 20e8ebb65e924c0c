"""A model on another device: every analysis answers as on the processor, and its result lies on the processor."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from tests.pretended import DEVICE, Held, pretended
from tests.test_doors import ANALYSES, ANSWERS, Case, as_for_users, case_builder

SOURCES = ("softmax", "deep-linear", "deep-softmax", "encoder")
LONG = ("check_compatible", "write_report")
"""These take long on the pretended device; the command line's tests write a report there."""
PAIRS = [(a, s) for s in SOURCES for a in ANALYSES if (a, s) in ANSWERS and a not in LONG]


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    return case_builder(tmp_path_factory.mktemp("devices"))


def frame_of(result: object) -> pd.DataFrame | str:
    return result.to_frame() if hasattr(result, "to_frame") else ""


@pytest.mark.slow
@pytest.mark.parametrize(("analysis", "source"), PAIRS)
def test_an_analysis_answers_alike_on_another_device(
    analysis: str, source: str, case, tmp_path: Path
):
    here = replace(case(source), folder=tmp_path / "here")
    here.folder.mkdir()
    away_folder = tmp_path / "away"
    away_folder.mkdir()
    with as_for_users():
        expected = frame_of(ANALYSES[analysis](here))
        with pretended():
            away = replace(here, source=here.source.to(DEVICE), folder=away_folder)
            assert isinstance(away.source.weights.tensors["blocks.0.attn.W_V"], Held)
            found = frame_of(ANALYSES[analysis](away))
    if isinstance(expected, pd.DataFrame):
        pd.testing.assert_frame_equal(found, expected, rtol=1e-5)
