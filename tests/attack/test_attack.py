"""A few cases of each subject; `make attack` runs thousands, in processes whose memory is limited."""

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from mechinterp.checkpoints.io.files import CheckpointError
from tests.attack import runner
from tests.attack.runner import FAULTS, outcome_of
from tests.attack.targets import Subject, subjects

CASES = 3


@pytest.fixture(scope="module")
def by_name(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subject]:
    return subjects(tmp_path_factory.mktemp("attack"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_few_cases_of_each_subject(by_name: dict[str, Subject], tmp_path: Path):
    assert len(by_name) == 33
    outcomes: Counter[str] = Counter()
    for name, subject in by_name.items():
        for number in range(CASES):
            outcome, note = outcome_of(subject, tmp_path / "case", Random(f"{name} 0 {number}"))
            assert outcome not in FAULTS, f"{name} {number}: {note}"
            outcomes[outcome] += 1
    # Cases bite, and do not always: otherwise nothing would be tested.
    assert min(outcomes["answered"], outcomes["refused"]) > 20


def raises(error: Exception) -> Callable[[Path], None]:
    def use(folder: Path) -> None:
        raise error

    return use


def is_slow(folder: Path) -> None:
    start = time.process_time()
    while time.process_time() - start < 0.05:
        pass


USES: dict[str, tuple[Callable[[Path], object], str]] = {
    "refusal": (raises(CheckpointError("no")), "refused"),
    "bug": (raises(KeyError("no")), "fault"),
    "two lines": (raises(ValueError("no\nno")), "fault"),
    "memory in other words": (raises(CheckpointError("x: not readable (MemoryError)")), "memory"),
    "slow": (is_slow, "hang"),
    "deletes": (lambda folder: (folder / "mine").unlink(), "lost"),
    "leaves": (lambda folder: (folder / "new").write_text("other"), "fault"),
}


@pytest.mark.parametrize(("use", "expected"), USES.values(), ids=USES)
def test_what_a_case_comes_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[Path], object], expected: str
):
    monkeypatch.setattr(runner, "SECONDS", 0.04)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("mine")
    subject = Subject(tmp_path / "folder", lambda folder, random: None, use)
    outcome, _ = outcome_of(subject, tmp_path / "case", Random(0))
    assert outcome == expected
    assert not (tmp_path / "case").exists()
