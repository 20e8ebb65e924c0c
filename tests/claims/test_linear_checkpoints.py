"""Shipped models of linear attention: where they end, and when what was foretold of them came
(README)."""

import numpy as np
import pytest

from analyses.lib.plateaus import crossings
from mechinterp.analysis.one_layer.classify import classify
from mechinterp.analysis.training.jumps import jump_forecast
from mechinterp.checkpoints.checkpoint import load
from mechinterp.config import override
from mechinterp.theory.linear import modes
from mechinterp.training.linear import flow, initial_heads, task_moments
from tests.conftest import CHECKPOINTS, sampled

pytestmark = pytest.mark.slow


ENDS = {
    **{"linear-merged-s0": 4, "linear-merged-s1": 4, "linear-separate-s0": 4},
    **{"linear-separate-s1": 4, "linear-separate-s2": 3, "linear-rank1-s2": 6},
    **{"linear-rank2-s2": 8, "linear-rank4-s2": 8, "linear-rank8-s2": 8},
}
FEW = ("linear-merged-s0", "linear-separate-s2", "linear-rank1-s2")


@pytest.mark.parametrize("name", sampled(ENDS, keep=FEW.__contains__))
def test_training_ends_at_the_level_of_its_components(name: str):
    checkpoint = load(CHECKPOINTS / name)
    levels = modes(task_moments(checkpoint.config.task)).levels
    assert checkpoint.history["eval_loss"].iloc[-1] == pytest.approx(levels[ENDS[name]], abs=2e-5)
    found = classify(checkpoint)
    assert (found.pattern, found.components.n_components) == ("linear_gd", ENDS[name])
    assert found.learner.r2 > 0.999


@pytest.mark.parametrize(
    ("seed", "foretold", "came"),
    [
        (0, [851, 1334, 1598, 9714], [851, 1336, 1608, 9604]),
        (1, [585, 951, 2606, 10789], [585, 944, 2619, 11041]),
        # The last one does not hold: the earlier drops push the foretold head through zero.
        (2, [381, 565, 4572, 13252], [381, 550, 4594, 26924]),
    ],
)
def test_jumps_foretold_and_come(seed: int, foretold: list[int], came: list[int]):
    config = load(CHECKPOINTS / f"linear-separate-s{seed}").config
    moments, per_step = task_moments(config.task), 2 * config.train.learning_rate
    run = flow(initial_heads(config), moments, duration=per_step * 40_000)
    found = crossings(run, modes(moments).levels) / per_step
    assert jump_forecast(config).step == pytest.approx(foretold, abs=1)
    assert found == pytest.approx(came, rel=1e-3)
    held = np.array(foretold) / np.array(came) - 1
    assert np.abs(held[: 3 if seed == 2 else 4]).max() < 0.03


@pytest.mark.parametrize(("factor", "miss"), [(10, 0.07), (100, 0.003)])
def test_the_miss_shrinks_with_the_initial_weights(factor: int, miss: float):
    config = load(CHECKPOINTS / "linear-separate-s2").config
    config = override(config, f"train.init_std={config.train.init_std / factor}")
    moments = task_moments(config.task)
    run = flow(initial_heads(config), moments, duration=12_000.0 * factor)
    came = crossings(run, modes(moments).levels)
    assert jump_forecast(config).time[-1] / came[-1] - 1 == pytest.approx(-miss, rel=0.1)
