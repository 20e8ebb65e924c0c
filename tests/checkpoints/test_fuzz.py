"""A few hundred mutated files of each format; `python -m tests.checkpoints.fuzz` makes more."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from mechinterp.checkpoints.errors import CheckpointError
from tests.checkpoints import fuzz
from tests.checkpoints.fuzz import Fuzzer

FORMATS = (
    *("softmax-paper", "linear-merged", "linear-separate", "transformer-lens"),
    *(
        "transformer-lens-safetensors",
        "torch-attention",
        "linear-layers",
        "arrays",
        "circuits",
        "arrays-safetensors",
    ),
    *("folder-native", "folder-transformer-lens", "stated-arrays", "gpt2", "torch-encoder"),
    *("hugging-face", "names", "haiku", "flax"),
)


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Fuzzer:
    return Fuzzer(tmp_path_factory.mktemp("fuzz"))


def test_all_formats_are_here(fuzzer: Fuzzer):
    assert sorted(fuzzer.originals) == sorted(FORMATS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FORMATS)
def test_mutated_files_end_in_an_answer_or_a_checkpoint_error(fuzzer: Fuzzer, name: str):
    folder = fuzzer.originals[name][0].parent
    before = sorted(folder.rglob("*"))
    answers = fuzzer.run(name, 200, seed=1)
    # Mutations bite, and do not always: otherwise nothing would be tested.
    assert 0 < answers < 190
    assert sorted(folder.rglob("*")) == before


def test_mutations_are_a_function_of_their_seed(fuzzer: Fuzzer):
    file = fuzzer.originals["arrays"][0]
    original, texts = file.read_bytes(), []
    for _ in range(2):
        file.write_bytes(original)
        fuzz.mutate_bytes(file, Random("x"))
        texts.append(file.read_bytes())
    file.write_bytes(original)
    assert texts[0] == texts[1] != original


@pytest.mark.parametrize("fault", [KeyError, OSError, AssertionError])
def test_another_exception_is_not_taken_for_an_answer(
    fuzzer: Fuzzer, monkeypatch: pytest.MonkeyPatch, fault: type[Exception]
):
    calls = iter([None] * 3)

    def fails(check: Callable[..., object]) -> Callable[..., object]:
        def checked(*arguments: object, **hints: object) -> object:
            return check(*arguments, **hints) if next(calls, fault) is None else refuse()

        def refuse() -> bool:
            raise fault("broken")

        return checked

    monkeypatch.setattr(fuzz, "load", fails(fuzz.load))
    file = fuzzer.originals["arrays"][0]
    original = file.read_bytes()
    with pytest.raises(fault, match="broken") as error:
        fuzzer.run("arrays", 20, seed=0)
    assert "format arrays, seed 0, number 2" in error.value.__notes__[0]
    file.write_bytes(original)


def test_a_slow_file_is_noticed(fuzzer: Fuzzer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fuzz, "SECONDS", 0.0)
    with pytest.raises(AssertionError, match="took"):
        fuzzer.run("arrays", 1, seed=0)


def test_a_refusal_is_no_answer(tmp_path: Path):
    assert not fuzz.check(tmp_path / "gone.pt", {})
    with pytest.raises(CheckpointError):
        fuzz.load(tmp_path / "gone.pt")
