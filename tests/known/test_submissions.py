"""Submissions: a file says what was scored, files of one suite are compared entry by entry, and others are refused."""

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mechinterp.checkpoints.io.files import CheckpointError
from mechinterp.known import (
    Entry,
    Submission,
    Suite,
    compare_submissions,
    read_submission,
    score,
    suite,
)
from mechinterp.known.scores import Scores
from tests.conftest import Run, refused

HAND = suite(1, trained="none")
METHODS = """
def by_output(entry):
    return {"heads": entry.checkpoint.weights.W_O.square().sum((-2, -1)).numpy()}


def by_value(entry):
    return {"heads": entry.checkpoint.weights.W_V.square().sum((-2, -1)).numpy()}
"""


def submitted(method: str, values: dict[str, dict[str, float]]) -> Submission:
    """Submission with given scores by entry."""
    rows = [(e, "hand-made", s, v) for e, each in values.items() for s, v in each.items()]
    frame = pd.DataFrame(rows, columns=["entry", "kind", "score", "value"])
    return Submission.of(Scores(method, frame, dict.fromkeys(values, 1.0)), HAND)


def by_output(entry: Entry) -> dict[str, object]:
    return {"heads": entry.checkpoint.weights.W_O.square().sum((-2, -1)).numpy()}


def test_a_file_has_all_that_was_scored(tmp_path: Path):
    chosen = Suite(1, {name: HAND[name] for name in ("gd-1", "gd-3", "debiased-two-pairs")})
    found = score(by_output, chosen)
    written = Submission.of(found, chosen, method="mine:by_output")
    again = read_submission(written.save(tmp_path / "mine.json"))
    pd.testing.assert_frame_equal(again.to_frame(), found.to_frame(), rtol=1e-5)
    assert again.seconds == pytest.approx(dict(found.seconds), rel=1e-5)
    assert (again.method, again.version, again.sha256) == ("mine:by_output", 1, HAND.hash)
    assert {"python", "mechinterp", "numpy", "torch"} <= again.versions.keys()


def test_a_file_is_never_overwritten(tmp_path: Path):
    written = submitted("one", {"gd-2": {"heads auroc": 1.0}})
    file = written.save(tmp_path / "mine.json")
    with refused("mine.json", "not overwritten"):
        written.save(file)
    with refused("mine.txt", ".json"):
        written.save(tmp_path / "mine.txt")


def test_differences_are_paired_over_common_entries(tmp_path: Path):
    """By hand: both have gd-2, gd-3 and gd-4; gd-1 and kernel count for neither."""
    one = {"gd-1": 9.0, "gd-2": 0.9, "gd-3": 0.5, "gd-4": 0.7}
    other = {"gd-2": 0.8, "gd-3": 0.5, "gd-4": 0.1, "kernel": 9.0}
    for name, values in (("one", one), ("other", other)):
        scored = {entry: {"heads spearman": value} for entry, value in values.items()}
        submitted(name, scored).save(tmp_path / f"{name}.json")
    found = compare_submissions([tmp_path])
    moved = np.array([0.1, 0.0, 0.6])
    row = found.differences().iloc[0]
    assert (row["first"], row["second"]) == ("one", "other")
    assert (row["better"], row["tied"], row["entries"]) == (2, 1, 3)
    assert row["difference"] == pytest.approx(moved.mean())
    assert row["difference_sem"] == pytest.approx(moved.std(ddof=1) / 3**0.5)
    means = found.to_frame().iloc[0]
    assert means["one"] == pytest.approx(np.mean([0.9, 0.5, 0.7]))
    assert means["other_sem"] == pytest.approx(np.std([0.8, 0.5, 0.1], ddof=1) / 3**0.5)
    assert means["entries"] == 3


def test_of_an_error_the_smaller_size_is_better(tmp_path: Path):
    for name, error in (("one", -0.1), ("other", 0.3)):
        values = {entry: {"coefficient error": error} for entry in ("gd-1", "gd-2")}
        submitted(name, values).save(tmp_path / f"{name}.json")
    row = compare_submissions([tmp_path]).differences().iloc[0]
    assert row["difference"] == pytest.approx(-0.2)
    assert row["better"] == 2


def test_scores_that_differ_by_rounding_are_tied(tmp_path: Path):
    for name, value in (("one", 1.0), ("other", 1 - 1e-12)):
        values = {entry: {"heads auroc": value} for entry in ("gd-1", "gd-2")}
        submitted(name, values).save(tmp_path / f"{name}.json")
    row = compare_submissions([tmp_path]).differences().iloc[0]
    assert (row["better"], row["tied"]) == (0, 2)


def test_a_score_that_one_method_lacks_is_no_row_of_both(tmp_path: Path):
    submitted("one", {"gd-1": {"heads auroc": 1.0, "label right": 1.0}}).save(tmp_path / "one.json")
    submitted("other", {"gd-1": {"heads auroc": 0.5}}).save(tmp_path / "other.json")
    found = compare_submissions([tmp_path / "one.json", tmp_path / "other.json"])
    assert found.differences()["score"].tolist() == ["heads auroc"]
    means = found.to_frame().set_index("score")
    assert means.loc["label right", "one"] == 1
    assert np.isnan(means.loc["label right", "other"])


def test_methods_of_one_name_are_told_by_their_files(tmp_path: Path):
    for name in ("a", "b"):
        submitted("same", {"gd-2": {"heads auroc": 1.0}}).save(tmp_path / f"{name}.json")
    names = compare_submissions([tmp_path]).names
    assert len(set(names)) == 2
    assert "a.json" in names[0]


def document() -> dict:
    return submitted("one", {"gd-2": {"heads auroc": 1.0}}).to_document()


def without(name: str) -> Callable[[dict], object]:
    return lambda given: {key: value for key, value in given.items() if key != name}


SPOILT: dict[str, tuple[Callable[[dict], object], str]] = {
    "list": (lambda given: [given], "method"),
    "number": (lambda given: 3, "method"),
    **{
        name: (without(name), name)
        for name in ("method", "suite", "versions", "entries", "submission_version")
    },
    "another form": (lambda given: given | {"submission_version": 2}, "submission_version"),
    "another suite": (
        lambda given: given | {"suite": {"version": 1, "sha256": "0" * 64}},
        "000000000000",
    ),
    "unknown version": (lambda given: given | {"suite": {"version": 99, "sha256": "0"}}, "99"),
    "no name": (lambda given: given | {"method": 3}, "method"),
    "no scores": (
        lambda given: given | {"entries": {"gd-2": {"kind": "", "seconds": 1}}},
        "scores",
    ),
    "entries": (lambda given: given | {"entries": [1]}, "entries"),
    "unknown score": (
        lambda given: (
            given | {"entries": {"gd-2": {"kind": "", "seconds": 1, "scores": {"charm": 1}}}}
        ),
        "charm",
    ),
    "unknown entry": (
        lambda given: given | {"entries": {"gd-9": {"kind": "", "seconds": 1, "scores": {}}}},
        "gd-9",
    ),
    "text": (
        lambda given: (
            given
            | {"entries": {"gd-2": {"kind": "", "seconds": 1, "scores": {"heads auroc": "1"}}}}
        ),
        "heads auroc",
    ),
    "truth value": (
        lambda given: given | {"entries": {"gd-2": {"kind": "", "seconds": True, "scores": {}}}},
        "seconds",
    ),
}


@pytest.mark.parametrize("name", SPOILT)
def test_another_document_is_refused_in_one_line(tmp_path: Path, name: str):
    change, named = SPOILT[name]
    file = tmp_path / "spoilt.json"
    file.write_text(json.dumps(change(document())))
    with pytest.raises(CheckpointError) as caught:
        read_submission(file)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 300
    assert message.startswith(str(file))
    assert named in message


@pytest.mark.parametrize(
    "text",
    [b"", b"\xff\xfe", b"[" * 100_000, b'{"method": NaN}', b'{"method": 1e999}', b"PK\x03\x04"],
)
def test_a_file_that_is_no_json_is_refused_in_one_line(tmp_path: Path, text: bytes):
    file = tmp_path / "spoilt.json"
    file.write_bytes(text)
    with refused("spoilt.json"):
        read_submission(file)
    with refused("nowhere.json"):
        read_submission(tmp_path / "nowhere.json")


def test_bytes_changed_at_random_give_a_submission_or_one_line(tmp_path: Path):
    whole = json.dumps(document()).encode()
    rng, file = np.random.default_rng(0), tmp_path / "spoilt.json"
    messages = []
    for _ in range(300):
        spoilt = bytearray(whole)
        spoilt[rng.integers(len(spoilt))] = rng.integers(256)
        file.write_bytes(spoilt)
        try:
            read_submission(file)
        except CheckpointError as error:
            messages.append(str(error))
    assert 0 < len(messages) < 300
    assert not any("\n" in message for message in messages)


def test_a_comparison_needs_files(tmp_path: Path):
    with refused("2", "0"):
        compare_submissions([])
    with refused(tmp_path.name, ".json"):
        compare_submissions([tmp_path])


def test_the_command_writes_compares_and_refuses(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A whole run on the hand-made models, so that a file of one command is read by the other."""
    (tmp_path / "two_methods.py").write_text(METHODS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("by_output", "by_value"):
        arguments = ("--suite", "1", "--trained", "none", "--out", f"{name}.json", "--json")
        answered = run("score", f"two_methods:{name}", *arguments).done().document
        assert answered["submission"] == f"{name}.json"
        entries = json.loads(Path(f"{name}.json").read_text())["entries"]
        assert entries.keys() == HAND.keys() == answered["seconds"].keys()
    files = ("by_output.json", "by_value.json")
    compared = run("score", "--compare", *files, "--out", "page", "--json").done().document
    assert compared["methods"] == ["two_methods:by_output", "two_methods:by_value"]
    with Path("page/differences.csv").open(newline="") as text:
        rows = list(csv.DictReader(text))
    assert len(rows) == len(compared["differences"])
    assert float(rows[0]["difference"]) == compared["differences"][0]["difference"]
    assert "two_methods:by_value" in Path("page/index.html").read_text()
    shown = run("score", "--compare", ".").done().out
    assert "two_methods" in shown
    run("score", "--compare", *files, "--out", "page").assert_refused("page", "not overwritten")
    run("score", "two_methods:by_value", "--out", files[0]).assert_refused(files[0], "overwritten")
    run("score", *files).assert_refused(files[1])


def test_a_name_that_a_spreadsheet_would_run_is_escaped(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for file, name in (("a", "=1+1"), ("b", "@other")):
        submitted(name, {"gd-2": {"heads auroc": 1.0}}).save(f"{file}.json")
    run("score", "--compare", ".", "--out", "page").done()
    for file in Path("page").glob("*.csv"):
        with file.open(newline="") as text:
            cells = [cell for row in csv.reader(text) for cell in row]
        assert not [cell for cell in cells if cell.startswith(("=", "+", "@"))]


def test_many_methods_have_a_page(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """More methods than colours of bars, and scores that some of them lack."""
    monkeypatch.chdir(tmp_path)
    for number in range(20):
        score = "heads auroc" if number % 2 else "label right"
        submitted(f"method {number}", {"gd-1": {score: 1.0}, "gd-2": {score: 0.5}}).save(
            f"{number}.json"
        )
    compared = run("score", "--compare", ".", "--out", "page", "--json").done().document
    assert len(compared["methods"]) == 20
    assert len(compared["differences"]) == 2 * 45


def test_many_methods_are_a_matrix_of_bounded_scores(tmp_path: Path):
    scores = {"one": 0.9, "two": 0.5, "three": -0.2, "four": 0.1}
    for name, value in scores.items():
        given = {"heads spearman": value, "edges cpr": 60.0}
        submitted(name, {"gd-1": given, "gd-2": given}).save(tmp_path / f"{name}.json")
    found = compare_submissions([tmp_path])
    (matrix,) = found.plot().data
    assert list(matrix.x) == ["heads spearman"]
    assert dict(zip(matrix.y, matrix.z[:, 0], strict=True)) == scores
    few = compare_submissions([tmp_path / "one.json", tmp_path / "two.json"]).plot()
    assert [bar.type for bar in few.data] == ["bar", "bar"]
