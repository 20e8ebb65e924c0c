"""Every claim of the three papers stands in analyses/claims and has its record.

The files are frozen since 2026-11-24. A changed file fails here: its new hash belongs into a commit
of its own that says why, and what moved after a measurement into `changed` of the clause.
"""

from functools import cache
from pathlib import Path

import pandas as pd
import pytest

from analyses.lib import measured as library
from analyses.lib.measured import failures
from analyses.lib.records import CLAIMS, PAPERS, Record, all_records, claims, digest

RESULTS = Path(__file__).parents[2] / "analyses" / "results"
HASHES = {
    "softmax": "73cacd769ba9068580741fd0d3a2b113ebdda3401faa8847e69504effc845d06",
    "linear": "ef20d5b4a7b3481eaebdba3125417e4b9eea9d4337eaaa37cfa2bf873248cedc",
    "sparse": "e24bca975e89d56c81281a7fe676d7cfba8fba3854832421fe87e31c964e4f83",
}


@cache
def measured() -> dict[str, Record]:
    return {record.id: record for _, record in all_records(RESULTS)}


@pytest.mark.parametrize("paper", PAPERS)
def test_the_claims_are_those_that_were_frozen(paper: str):
    assert digest((CLAIMS / f"{paper}.toml").read_bytes()) == HASHES[paper]


def test_every_record_is_of_a_claim_and_every_claim_has_a_record():
    assert set(measured()) == set(claims())


@pytest.mark.slow
def test_no_record_counts_a_failed_training_and_the_failed_are_those_of_its_models():
    failed = set(failures("*").model)
    assert not [id for id, record in measured().items() if failed & set(record.values)]
    assert measured()["softmax-A1-signs"].over["failed"] == len(failed)


def test_a_training_fails_by_its_last_loss_over_the_least(monkeypatch: pytest.MonkeyPatch):
    for last, expected in ((1.5, False), (1.51, True)):
        loss = pd.Series([3.0, 1.0, last], index=[0, 1000, 2000])
        monkeypatch.setattr(library, "losses", lambda name, loss=loss: loss)
        assert library.failed("any") is expected


def test_places_in_a_paper_are_those_of_claims_that_it_makes():
    assert not [id for id, claim in claims().items() if claim.said_by == "ours" and claim.where]
    assert not [id for id, claim in claims().items() if claim.said_by != "ours" and not claim.where]
    bounds = {claim.bound_by for claim in claims().values() if claim.said_by == "ours"}
    assert bounds == {"ours"}


def test_every_record_says_what_was_measured():
    silent = [
        id for id, one in measured().items() if one.verdict != "not tested" and not one.measured
    ]
    assert not silent


def test_trained_models_of_sparse_regression_say_how_many_seeds_they_have():
    trained = tuple(f"sparse-C{number}-" for number in range(9, 17))
    for record in measured().values():
        if record.id.startswith(trained) and record.n:
            assert "seed" in record.note
