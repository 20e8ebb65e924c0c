"""devinterp's sampler on an entry of the suite."""

import math

import pytest

from mechinterp.known import suite

pytest.importorskip("devinterp")


@pytest.mark.filterwarnings("ignore")
def test_its_estimates_stand_in_a_row(monkeypatch):
    from analyses.known import devinterp_sampler as script

    short = script.SHORT | {"num_draws": 6, "num_chains": 2}
    monkeypatch.setattr(script, "SETTINGS", {script.GUIDE: short | {"num_burnin_steps": 2}})
    monkeypatch.setattr(script, "N_PROMPTS", {script.GUIDE: 2048})
    row = script.sampled(suite(1, trained="none")["minimum-1"], 0, script.GUIDE)
    assert row["estimate"] == pytest.approx((row["first_half"] + row["second_half"]) / 2)
    assert math.isfinite(row["estimate"])
    assert row["sem"] > 0
