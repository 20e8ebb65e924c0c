"""devinterp's sampler on an entry of the suite."""

import math

import pytest

from mechinterp.known import suite

pytest.importorskip("devinterp")


@pytest.mark.filterwarnings("ignore")
def test_its_estimates_stand_in_a_row(monkeypatch):
    from analyses.known import devinterp_sampler

    short = devinterp_sampler.SHORT | {"num_draws": 6, "num_chains": 2}
    monkeypatch.setattr(devinterp_sampler, "SETTINGS", {"short": short})
    entry = suite(1, trained="none")["minimum-1"]
    row = devinterp_sampler.sampled(entry, 0, "short")
    assert row["estimate"] == pytest.approx((row["first_half"] + row["second_half"]) / 2)
    assert math.isfinite(row["estimate"])
    assert row["sem"] > 0
