"""One trained model of sparse regression where the construction can win: in our budget of steps it
does not find it.

`analyses/sparse/wide.py` measures the same on more prompts, and more of it.
"""

import numpy as np
import pytest

from mechinterp.analysis.ablation.masked_risk import masked_errors
from mechinterp.analysis.probing.linear import probe_layers, reweighted
from mechinterp.analysis.stats import ratio_and_sem
from mechinterp.checkpoints.checkpoint import Checkpoint, load
from mechinterp.icl.predictors import ridge
from mechinterp.icl.prompts import Prompts, generator_for, sample_prompts
from mechinterp.icl.sparse_predictors import excess_risk, preprocess_then_optimise
from mechinterp.training.sweep_file import load_sweep
from tests.conftest import CHECKPOINTS

pytestmark = pytest.mark.slow

NAME = "sparse-wide-s0"


@pytest.fixture(scope="module")
def wide() -> Checkpoint:
    return load(CHECKPOINTS / NAME)


@pytest.fixture(scope="module")
def drawn(wide: Checkpoint) -> Prompts:
    return sample_prompts(wide.config.task, 512, generator=generator_for(1, "eval", 0))


def test_it_is_the_model_of_the_sweep_trained_to_the_end(wide):
    models = load_sweep(CHECKPOINTS.parent / "analyses" / "sweeps" / "sparse.json")
    assert models[NAME] == wide.config
    assert wide.step == 50_000


def test_it_does_not_beat_ridge_while_algorithm_1_does(wide, drawn):
    errors = masked_errors(wide.model, drawn, [[]])[:, 0]
    risks = [excess_risk(ridge(drawn, penalty=p), drawn) for p in np.geomspace(3, 30, 9)]
    best = min(risks, key=lambda risk: risk.mean()).double().numpy()
    ratio, sem = ratio_and_sem(errors, best)
    assert ratio - 3 * sem > 1
    path = excess_risk(preprocess_then_optimise(drawn, steps=32), drawn).double().numpy()
    ratio, sem = ratio_and_sem(path[path.mean(1).argmin()], best)
    assert ratio + 3 * sem < 0.5


def test_its_first_layer_does_not_write_the_correlations_times_x(wide, drawn):
    assert probe_layers(wide.model, drawn, target=reweighted).r2[1, -1] < 0.1
