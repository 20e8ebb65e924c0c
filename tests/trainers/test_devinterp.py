"""devinterp's sampler on an entry of the suite."""

import math

import pytest

from mechinterp.known import suite

pytest.importorskip("devinterp")


@pytest.mark.filterwarnings("ignore")
def test_it_is_judged():
    from analyses.known.devinterp_sampler import README, sampled
    from mechinterp.known import judge_sampler
    from mechinterp.known.entries import Suite

    few = Suite(1, {"minimum-1": suite(trained="none")["minimum-1"]})
    short = README | {"num_draws": 5, "num_chains": 2}

    def sampler(entry, seed):
        return sampled(entry, seed, settings=short, n_prompts=256)

    (row,) = judge_sampler(sampler, few, seeds=[0]).to_frame().itertuples()
    assert row.exact == 3.5
    assert math.isfinite(row.estimate)
    assert row.sem > 0
