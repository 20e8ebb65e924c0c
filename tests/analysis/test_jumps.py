"""Jumps foretold from a config: against the flow of the same config and of the shipped models, and what is refused."""

import numpy as np
import pytest

from analyses.lib.plateaus import crossings
from mechinterp.analysis.training.jumps import jump_forecast
from mechinterp.checkpoints.checkpoint import load
from mechinterp.config import override
from mechinterp.presets import preset
from mechinterp.theory.linear import modes
from mechinterp.theory.linear_jumps import Jumps, growth_value, predicted_loss
from mechinterp.training.linear import flow
from mechinterp.training.linear_models import initial_heads, task_moments, train_linear
from tests.conftest import CHECKPOINTS, refused

CONFIG = preset("linear-separate")
SMALL = override(CONFIG, "train.init_std=0.001", "train.steps=400000", "train.log_every=500")


@pytest.mark.slow
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
    forecast, holding = jump_forecast(config), 3 if seed == 2 else 4
    assert forecast.step == pytest.approx(foretold, abs=1)
    assert found == pytest.approx(came, rel=1e-3)
    assert np.abs(np.array(foretold) / came - 1)[:holding].max() < 0.03
    # The head that is foretold holds its direction in the end; the eigenvectors are the axes.
    held = np.abs(run.heads.v[-1][:, None] * run.heads.K[-1, :, 0] * run.heads.Q[-1, :, 0])
    assert held.argmax(0)[forecast.direction][:holding].tolist() == forecast.head[:holding].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "miss"), [(10, 0.07), (100, 0.003)])
def test_the_miss_shrinks_with_the_initial_weights(factor: int, miss: float):
    config = load(CHECKPOINTS / "linear-separate-s2").config
    config = override(config, f"train.init_std={config.train.init_std / factor}")
    moments = task_moments(config.task)
    run = flow(initial_heads(config), moments, duration=12_000.0 * factor)
    came = crossings(run, modes(moments).levels)
    assert jump_forecast(config).time[-1] / came[-1] - 1 == pytest.approx(-miss, rel=0.1)


@pytest.mark.slow
def test_foretold_loss_is_that_of_training():
    forecast = jump_forecast(SMALL)
    history = train_linear(SMALL).history.drop_duplicates("step")[1:]
    foretold = np.interp(history["step"], *forecast.curve.T)
    assert np.abs(foretold - history["loss"]).mean() < 2e-3
    resting = np.abs(np.log(history["step"].to_numpy()[:, None] / forecast.step)).min(1) > 0.2
    assert np.abs(foretold - history["loss"])[resting].max() < 2e-3


def test_a_rotated_covariance_gives_its_eigenvectors():
    config = override(CONFIG, 'task.covariance={"kind": "kms", "rho": 0.5}')
    forecast = jump_forecast(config)
    covariance = 0.5 ** np.abs(np.subtract.outer(range(4), range(4)))
    turned = forecast.vector @ covariance @ forecast.vector.T
    assert turned == pytest.approx(np.diag(forecast.eigenvalue), abs=1e-12)


def test_predicted_loss_is_the_equation_of_one_head_through_each_drop():
    found = modes(task_moments(CONFIG.task))
    jumps = Jumps(time=np.array([1e3, 1e5]), mode=np.array([1, 0]), head=np.array([0, 1]))
    middle = predicted_loss(jumps.time, jumps, found)
    levels = found.variance - np.array([0, found.gains[1], found.gains[1] + found.gains[0]])
    assert middle == pytest.approx((levels[:-1] + levels[1:]) / 2, abs=2e-4)
    time = np.linspace(900, 1100, 50)
    one = Jumps(time=jumps.time[:1], mode=jumps.mode[:1], head=jumps.head[:1])
    m, g = found.targets[1], found.rates[1]
    v = growth_value(time - 1e3, (1 - 0.5**0.5) ** (1 / 3) * m ** (1 / 3), rate=g, target=m)
    expected = found.variance - found.gains[1] * (1 - (1 - v**3 / m) ** 2)
    assert predicted_loss(time, one, found) == pytest.approx(expected, abs=1e-12)


@pytest.mark.slow
def test_levels_steps_and_notes_follow_the_config():
    forecast = jump_forecast(CONFIG)
    assert forecast.levels == pytest.approx(modes(task_moments(CONFIG.task)).levels)
    assert forecast.step == pytest.approx(forecast.time / (2 * CONFIG.train.learning_rate))
    assert forecast.eigenvalue.tolist() == [0.4, 0.3, 0.2, 0.1]
    assert repr(forecast) == "JumpForecast(0@851.4, 1@1334, 2@1598, 3@9714)"
    half = CONFIG.train.learning_rate / 2
    halved = jump_forecast(override(CONFIG, f"train.learning_rate={half}"))
    assert halved.step == pytest.approx(2 * forecast.step)
    assert halved.time == pytest.approx(forecast.time)
    assert jump_forecast(override(CONFIG, "seed=1")).step[0] != pytest.approx(forecast.step[0])
    frame = forecast.to_frame()
    assert np.all(frame["loss_before"] > frame["loss_after"])
    assert np.all(np.diff(forecast.curve[:, 0]) > 0)
    assert np.all(np.diff(forecast.curve[:, 1]) < 1e-12)
    assert len(forecast.plot().layout.shapes) == 5 + 4
    assert forecast.notes == ()
    few = jump_forecast(override(CONFIG, "model.n_heads=3", "train.steps=1000"))
    assert (len(few.step), len(few.notes)) == (3, 2)
    assert few.levels[-1] == pytest.approx(0.2098045954)
    assert "3 of 4 directions" in few.notes[0]
    descent = "train.optimizer=gradient_descent"
    finite = jump_forecast(override(CONFIG, descent, "task.n_sequences=5000"))
    assert "5000 sequences" in finite.notes[0]


EIGENVALUES = "task.covariance.eigenvalues"


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        ("linear-merged", [], ["model.merged_qk", "true"]),
        ("linear-separate", ["model.d_head=2"], ["model.d_head", 1, 2]),
        ("linear-separate", ["model.d_head=null"], ["model.d_head", 1, 5]),
        ("linear-separate", [f"{EIGENVALUES}=[0.3, 0.3, 0.3, 0.1]"], ["distinct", "0.3, 0.3"]),
        ("linear-separate", [f"{EIGENVALUES}=[0.4, 0.3, 0.2, -0.1]"], ["positive"]),
        ("linear-separate", ["task.context_length=0"], ["task.context_length", 1, 0]),
        ("linear-separate", ["train.init_std=0"], ["train.init_std", 0]),
        ("linear-separate", ["train.optimizer=adam", "train.init_std=null"], ["train.optimizer"]),
        ("softmax-h2", [], ["model.score", "linear/L", "softmax"]),
    ],
)
def test_other_configs_are_refused(base: str, changes: list[str], words: list):
    with refused(*words):
        jump_forecast(override(preset(base), *changes))
