"""A few cases of each subject; `make attack` runs thousands, in processes whose memory is limited."""

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from mechinterp.checkpoints.io.errors import CheckpointError
from tests.attack import runner
from tests.attack.__main__ import main
from tests.attack.mutations import mutate_bytes
from tests.attack.runner import FAULTS, Said, outcome_of
from tests.attack.targets import Subject, subjects

CASES = 8


@pytest.fixture(scope="module")
def by_name(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subject]:
    return subjects(tmp_path_factory.mktemp("attack"))


READ = (
    *("softmax-paper", "linear-merged", "linear-separate", "transformer-lens", "torch-attention"),
    *("transformer-lens-safetensors", "linear-layers", "arrays", "circuits", "arrays-safetensors"),
    *("stated-arrays", "gpt2", "torch-encoder", "folder-native", "folder-transformer-lens"),
    *("hugging-face", "names", "haiku", "flax", "history-and-snapshots", "training-state"),
)
WRITTEN = (
    *("convert-native", "convert-transformer-lens", "convert-npz", "save", "page"),
    *("page-overwrite", "table", "results", "train", "train-resume", "sweep", "sweep-resume"),
)


@pytest.mark.slow
def test_all_subjects_are_here(by_name: dict[str, Subject]):
    names = [*READ, *(f"in-the-way-{name}" for name in WRITTEN)]
    assert sorted(by_name) == sorted(names)
    assert {name for name, subject in by_name.items() if subject.writes} == set(names) - set(READ)
    for name in READ:
        by_name[name].use(by_name[name].folder)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_few_cases_of_each_subject(by_name: dict[str, Subject], tmp_path: Path):
    outcomes: Counter[str] = Counter()
    for name, subject in by_name.items():
        for number in range(CASES):
            outcome, note = outcome_of(subject, tmp_path / "case", Random(f"{name} 0 {number}"))
            assert outcome not in FAULTS, f"{name} {number}: {note}"
            outcomes[outcome] += 1
    # Cases bite, and do not always: otherwise nothing would be tested.
    assert min(outcomes["answered"], outcomes["refused"]) > 20


def test_mutations_are_a_function_of_their_seed(tmp_path: Path):
    texts = []
    for _ in range(2):
        (tmp_path / "x").write_bytes(bytes(range(256)))
        mutate_bytes(tmp_path / "x", Random("x"))
        texts.append((tmp_path / "x").read_bytes())
    assert texts[0] == texts[1] != bytes(range(256))


def raises(error: Exception) -> Callable[[Path], None]:
    def use(folder: Path) -> None:
        raise error

    return use


def is_slow(folder: Path) -> None:
    start = time.process_time()
    while time.process_time() - start < 0.05:
        pass


USES: dict[str, tuple[Callable[[Path], object], str]] = {
    "answer": (lambda folder: None, "answered"),
    "refusal": (raises(CheckpointError("no")), "refused"),
    "bug": (raises(KeyError("no")), "fault"),
    "two lines": (raises(ValueError("no\nno")), "fault"),
    "escape": (raises(ValueError("\x1b[2J")), "fault"),
    "no memory": (raises(MemoryError()), "memory"),
    "memory in other words": (raises(CheckpointError("x: not readable (MemoryError)")), "memory"),
    "slow": (is_slow, "hang"),
    "deletes": (lambda folder: (folder / "mine").unlink(), "lost"),
    "writes": (lambda folder: (folder / "mine").write_text("other"), "lost"),
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


def dies(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def two_subjects(folder: Path) -> dict[str, Subject]:
    folder.mkdir()
    nothing = Subject(folder, lambda case, random: None, lambda case: None, True)
    return {"good": nothing, "bad": Subject(folder, nothing.spoil, dies, True)}


def work_on_two(pipe, seed: int, numbers: list[int]) -> None:
    runner.subjects = two_subjects
    runner._work(pipe, seed, numbers)


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_crash_is_counted_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "TARGET", work_on_two)
    monkeypatch.setattr(runner, "WORKERS", 1)
    outcomes = [outcome for _, outcome, _ in runner.attack(3, 0)]
    assert outcomes == ["answered", "crash", "answered"]


def test_the_summary_counts_over_seeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    def attack(count: int, seed: int) -> list[Said]:
        bad = [("x seed 2 number 1", "lost", "mine")] if seed == 2 else []
        return [("x seed 1 number 0", "refused", "")] * count + bad

    monkeypatch.setattr("tests.attack.__main__.attack", attack)
    assert main(3, (1,)) == 0
    capsys.readouterr()
    assert main(3, (1, 2)) == 1
    shown = capsys.readouterr().out.splitlines()
    assert "lost: x seed 2 number 1: mine" in shown
    assert shown[-1] == (
        "all seeds: 7 cases, 0 answered, 6 refused; hang 0, crash 0, memory 0, fault 0, lost 1"
    )
