"""The scripts in analyses/: that they run, and that every number written of them is that of their
records."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from analyses.__main__ import main
from analyses.lib import check, main_claims, numbers, pages
from analyses.lib.measured import module_of, scripts, shipped_config
from analyses.lib.records import Record, agree, all_records, digest, load, seal, written_by
from tests.conftest import sampled

ANALYSES = Path(__file__).parents[1] / "analyses"
RESULTS = ANALYSES / "results"
CHECKPOINTS = ANALYSES.parent / "checkpoints"
FAST = check.fast(RESULTS)
FILES = sorted(RESULTS.glob("*.records.json"))
RECORDS = [record for _, record in all_records(RESULTS)]


def test_ids_are_of_one_record_each():
    ids = [record.id for record in RECORDS]
    assert len(set(ids)) == len(ids)


@cache
def origin_of(checkpoint: str) -> dict[str, object]:
    """Id and seed of a shipped model."""
    config = shipped_config(CHECKPOINTS / checkpoint / "config.json")
    return {"id": config.id, "seed": config.seed}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_records_are_those_that_were_measured(file: Path):
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["seal"] == seal(content["records"])
    assert content["records"] == [json.loads(json.dumps(one.to_json())) for one in load(file)]
    assert (ANALYSES / f"{content['script']}.py").exists()
    assert len(content["commit"]) == 40
    assert content["checkpoints"] == {name: origin_of(name) for name in content["checkpoints"]}


def test_every_csv_file_is_the_one_that_its_script_wrote():
    found = {}
    for file in FILES:
        found |= json.loads(file.read_text(encoding="utf-8"))["files"]
    files = sorted(RESULTS.glob("*.csv"))
    assert found == {file.name: digest(file.read_bytes()) for file in files}
    assert {f"{written_by(file.name)}.records.json" for file in files} == {f.name for f in FILES}


PAGES = [(page, name) for page, tables in pages.tables().items() for name in tables]


@pytest.mark.parametrize(
    ("page", "name"),
    PAGES,
    ids=[f"{page.relative_to(ANALYSES.parent)}, {name}" for page, name in PAGES],
)
def test_the_tables_of_all_pages_are_those_of_the_results(page: Path, name: str):
    text = page.read_text(encoding="utf-8")
    assert pages.replaced(text, name, pages.tables()[page][name](RESULTS)) == text


def named(page: Path) -> str:
    return str(page.relative_to(ANALYSES.parent))


@pytest.mark.slow
@pytest.mark.parametrize("page", numbers.pages(), ids=named)
def test_marked_numbers_are_those_of_the_results(page: Path):
    text = page.read_text(encoding="utf-8")
    assert numbers.filled(text).split() == text.split()


def test_a_changed_digit_is_seen():
    text = "ends at <!-- v: start.ridge_random -->0.942 ± 0.009<!-- /v --> of ridge's"
    assert numbers.filled(text) == text.replace("0.009", "0.008")


def test_every_number_has_its_place_in_a_page():
    marks = {name for page in numbers.pages() for name, _ in numbers.MARK.findall(page.read_text())}
    groups = {group: rows for group, rows in numbers.sources().items() if group != "filters"}
    assert marks == {f"{group}.{name}" for group, rows in groups.items() for name in rows}


@pytest.mark.parametrize("file", pages.FILES, ids=lambda file: file.name)
def test_the_files_of_all_claims_are_those_of_the_results(file: Path):
    assert pages.FILES[file](RESULTS) == file.read_text(encoding="utf-8")


MAIN = [(page, row) for page, rows in main_claims.main().items() for row in rows]


@pytest.mark.parametrize(("page", "row"), MAIN, ids=[row["clause"] for _, row in MAIN])
def test_count_and_number_of_a_main_row_are_those_of_one_clause(page: str, row: dict):
    script, record = next(one for one in all_records(RESULTS) if one[1].id == row["clause"])
    line = next(
        one
        for one in pages.main_table(RESULTS, page="x.md", paper=page).splitlines()
        if row["claim"] in one
    )
    _, count, number, _, _, more = line.strip("| ").split(" | ")
    assert f"(analyses/{script}.py)" in more
    if re.match(r"\d+ of \d+", count) and "share" not in record.values:
        holding = sum(record.holds(v, record.errors.get(k, 0.0)) for k, v in record.values.items())
        assert count.startswith(f"{holding} of {len(record.values)} ")
    if "show" in row:
        ends = (min(record.values.values()), max(record.values.values()))
        low, high = (f"{end:{row['show']}}".replace("-", "−", end < 0) for end in ends)
        assert high in number
        assert low in number.replace("up to", low)
    else:
        assert set(record.values.values()) <= {0.0, 1.0}


SHORT = (
    *(f"softmax/{name}" for name in ("figure_20_concentration", "figure_6_loss_surface")),
    *("softmax/figure_8_beyond_its_length", "softmax/theory", "linear/figure_14_mixtures"),
    *("calibration/scores", "sparse/algorithm"),
)
"""Scripts whose quick runs take about a second."""
NOT_CHECKED = [script for script in scripts() if script not in FAST]


@pytest.mark.slow
@pytest.mark.parametrize("script", sampled(NOT_CHECKED, keep=SHORT.__contains__))
def test_scripts_measure_the_claims_they_have_shipped(script: str):
    """Those that `make analyses-check` leaves out; a quick run has other numbers."""
    found = module_of(script).measure(True)
    assert len(found.data)
    stored = load(RESULTS / f"{script.replace('/', '_')}.records.json")
    assert {one.id for one in found.claims} == {one.id for one in stored}


@pytest.mark.slow
def test_a_script_by_its_name_writes_what_it_has_shipped(tmp_path: Path):
    main(["softmax/figure_22_flow", "--out", str(tmp_path)])
    name = "softmax_figure_22_flow"
    assert (tmp_path / f"{name}.csv").read_bytes() == (RESULTS / f"{name}.csv").read_bytes()
    assert (tmp_path / f"{name}.html").exists()
    again, first = (load(folder / f"{name}.records.json") for folder in (tmp_path, RESULTS))
    assert check.differences(first, again) == []


def record(relation: str, bound: float | tuple[float, float], *values: float) -> Record:
    named = {f"s{seed}": value for seed, value in enumerate(values)}
    asked = {"relation": relation, "bound": bound, "said_by": "paper", "bound_by": "ours"}
    return Record(id="softmax-O1a", statement="", values=named, **asked)


@pytest.mark.parametrize(
    ("relation", "bound", "inside", "outside"),
    [
        ("at most", 0.05, 0.05, 0.0501),
        ("below", 0.05, 0.0499, 0.05),
        ("at least", 0.999, 0.999, 0.9988),
        ("above", 0.9, 0.91, 0.9),
        ("equal to", 1, 1, 0),
        ("between", (0.862, 0.897), 0.862, 0.898),
    ],
)
def test_a_verdict_follows_from_the_relation_the_bound_and_the_values(
    relation: str, bound: float | tuple[float, float], inside: float, outside: float
):
    assert record(relation, bound).verdict == "not tested"
    assert record(relation, bound, inside, inside).verdict == "holds"
    assert record(relation, bound, inside, outside, inside).verdict == "holds for 2 of 3"
    assert record(relation, bound, inside, float("nan")).verdict == "holds for 1 of 2"
    assert record(relation, bound, outside).verdict == "does not hold"


def test_measurements_agree_within_their_standard_errors():
    def measured(value: float, error: float | None = None) -> Record:
        errors = {} if error is None else {"s0": error}
        return replace(record("below", 1, value), errors=errors)

    assert agree(measured(0.5, 0.1), measured(0.9, 0.1))
    assert not agree(measured(0.5, 0.01), measured(0.6, 0.01))
    assert agree(measured(0.5), measured(0.50001))
    assert not agree(measured(0.158), measured(0.021))


def test_a_check_measures_the_records_of_all_fast_scripts():
    seconds = {
        content["script"]: content["seconds"]
        for content in (json.loads(file.read_text(encoding="utf-8")) for file in FILES)
        if content["records"]
    }
    fast = check.fast(RESULTS)
    assert set(fast) == {one for one, time in seconds.items() if time and time <= check.SLOWEST}
    assert sum(script in fast for script, _ in all_records(RESULTS)) > len(RECORDS) / 4


def test_a_check_names_the_records_that_differ():
    first, other = record("below", 1, 0.158), record("below", 1, 0.021)
    assert check.differences([first], [first]) == []
    assert check.differences([first], [other]) == ["softmax-O1a is 0.021, stored: 0.158."]
    assert check.differences([first], []) == ["softmax-O1a was not measured again."]


def test_records_say_what_is_wrong_with_them():
    good = {"id": "softmax-O1a", "statement": "", "relation": "below", "bound": 1}
    good |= {"said_by": "ours", "bound_by": "ours"}
    for bad, message in (
        ({"relation": "about"}, "relation must be one of"),
        ({"said_by": "third hand"}, "said_by must be one of paper, second hand, ours, got third"),
        ({"bound_by": "second hand"}, "bound_by must be one of paper, ours, got second hand"),
        ({"changed": [{"when": "2026-11-22"}]}, "changed of softmax-O1a must have when, was"),
        ({"errors": {"s0": 1.0}}, "must belong to its values"),
    ):
        with pytest.raises(ValueError, match=message):
            Record(**(good | bad))
