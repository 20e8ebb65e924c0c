"""C9-C16: what trained models of sparse regression show, at noise variances 0.1 and 0.4.

Settings and thresholds are ours. Most claims do not hold here, and the tests say what does instead:
the models come out a little below ridge at its best, layer 1 rewrites x by the context's covariance
and not by its correlations with y, and later layers need several of their heads.
`analyses/sparse_*.py` measure the same on more prompts.
"""

import re
from collections.abc import Iterable
from functools import cache

import numpy as np
import pytest
import torch

from mechinterp.analysis.ablation.cross_fitting import masked_by
from mechinterp.analysis.ablation.fine_tuning import fine_tune
from mechinterp.analysis.ablation.masked_risk import masked_errors
from mechinterp.analysis.ablation.pairs import halves
from mechinterp.analysis.ablation.pruning import Pruning, best_head_first, best_head_later, prune
from mechinterp.analysis.ablation.single import HeadAblation, ablate_heads
from mechinterp.analysis.probing.feature_descent import RAW, descent_curves, query_features
from mechinterp.analysis.probing.linear import LayerProbes, preconditioned, probe_layers, reweighted
from mechinterp.analysis.stats import ratio_and_sem
from mechinterp.checkpoints.checkpoint import Checkpoint, load
from mechinterp.icl.predictors import ridge
from mechinterp.icl.prompts import Prompts, generator_for, sample_prompts
from mechinterp.icl.sparse_predictors import excess_risk, lasso, preprocess_then_optimise, tuned
from mechinterp.training.sweep_file import load_sweep
from tests.conftest import CHECKPOINTS, sampled

pytestmark = pytest.mark.slow

NAMES = sorted(file.parent.name for file in CHECKPOINTS.glob("sparse-h*/config.json"))
SINGLE, H4, H8 = ([name for name in NAMES if f"-h{heads}-" in name] for heads in (1, 4, 8))
SEVERAL = H4 + H8
LOW, HIGH = ([name for name in SEVERAL if f"noise{noise}" in name] for noise in (0.1, 0.4))


def models(names: Iterable[str]) -> list:
    """As cases: one of each number of heads, and the other noise and seed in `make test-all`."""
    names = sorted(names)
    firsts = {name.split("-")[1]: name for name in reversed(names)}
    return sampled(names, keep=lambda name: name in firsts.values())


def single_of(name: str) -> str:
    """The model of one head of the same noise and seed."""
    return re.sub("-h[0-9]+-", "-h1-", name)


@cache
def trained(name: str) -> Checkpoint:
    return load(CHECKPOINTS / name)


@cache
def draw(name: str, n_prompts: int, context_length: int = 40) -> Prompts:
    """The same for all models of a noise."""
    task, generator = trained(name).config.task, generator_for(1, "eval", 0)
    return sample_prompts(task, n_prompts, generator=generator, context_length=context_length)


@cache
def errors(name: str, n_prompts: int, context_length: int = 40) -> np.ndarray:
    prompts = draw(name, n_prompts, context_length)
    return masked_errors(trained(name).model, prompts, [[]])[:, 0]


@cache
def masked(name: str) -> HeadAblation:
    return ablate_heads(trained(name).model, draw(name, 8192))


@cache
def pruned(name: str) -> Pruning:
    return prune(trained(name).model, draw(name, 2048))


@cache
def kept(name: str) -> np.ndarray:
    """All heads of the first layer and the best of each later one, by the first half of the
    prompts."""
    return best_head_later(ablate_heads(trained(name).model, halves(draw(name, 2048))[0]).rise)


@cache
def probes(name: str, *, without_pruned: bool = False) -> LayerProbes:
    gone = masked_by(kept(name)) if without_pruned else []
    return probe_layers(trained(name).model, draw(name, 2048), heads=gone)


def test_the_sweep_file_names_the_shipped_models_with_their_configs():
    models = load_sweep(CHECKPOINTS.parent / "analyses" / "sweeps" / "sparse.json")
    assert {name: models[name] for name in NAMES} == {n: trained(n).config for n in NAMES}
    assert {trained(name).step for name in NAMES} == {50_000}


# C9: many heads and few


@pytest.mark.parametrize("name", models(SEVERAL))
@pytest.mark.parametrize("length", [32, 40])
def test_c9_does_not_hold_several_heads_gain_a_few_per_cent_at_most(name: str, length: int):
    single = errors(single_of(name), 4096, length)
    ratio, sem = ratio_and_sem(errors(name, 4096, length), single)
    assert ratio - 4 * sem > 0.9


@pytest.mark.parametrize("name", models(NAMES))
def test_trained_models_are_a_little_below_ridge_and_far_above_what_sees_sparsity(name: str):
    prompts = draw(name, 4096)
    best = tuned(lambda p: ridge(prompts, penalty=p), np.geomspace(0.5, 4, 9).tolist(), prompts)
    rival = excess_risk(ridge(prompts, penalty=best.value), prompts).double().numpy()
    ratio, sem = ratio_and_sem(errors(name, 4096), rival)
    assert ratio + 3 * sem < 1
    path = excess_risk(preprocess_then_optimise(prompts, steps=128), prompts).double()
    algorithm = path[path.mean(1).argmin()].numpy()
    few = prompts[:512]
    found = [excess_risk(lasso(few, alpha=a), few).double().numpy() for a in (0.03, 0.06, 0.12)]
    sparse = min(found, key=np.mean)
    for risks in (algorithm, sparse):
        ratio, sem = ratio_and_sem(errors(name, 4096)[: len(risks)], risks)
        assert ratio - 2 * sem > 1


# C10: heads of layer 1 and of later ones


@pytest.mark.parametrize("name", models(H4))
def test_c10_does_not_hold_with_4_heads_layer_1_uses_one_and_a_later_layer_several(name: str):
    found = masked(name)
    assert found.importance[0].max() > 0.6
    # A few prompts carry that mean; the medians say the same.
    assert found.effective_heads_of_medians[0] < 2
    assert found.effective_heads_of_medians[1:].max() > 2


@pytest.mark.parametrize("name", models(H8))
def test_c10_with_8_heads_layer_1_uses_several(name: str):
    found = masked(name)
    assert found.effective_heads_of_medians[0] > 2
    assert found.effective_heads[0] - 4 * found.effective_heads_sem[0] > 2
    assert found.importance[0].max() < 0.6


@pytest.mark.parametrize("name", models(SEVERAL))
def test_c10_does_not_hold_no_head_dominates_later_layers(name: str):
    assert np.median(masked(name).importance[1:].max(1)) < 0.7


# C11 to C13: pruning; C16 asks for them at 0.1, 0.4 and 0.8


@pytest.mark.parametrize("name", models({*LOW, *H8}))
def test_c11_does_not_hold_at_low_noise_or_with_8_heads(name: str):
    found = pruned(name)
    assert found.refit_ratio - 3 * found.refit_ratio_sem > 1.25


@pytest.mark.parametrize("name", models({*HIGH} & {*H4}))
def test_c11_holds_at_high_noise_with_4_heads_and_in_one_seed_with_a_new_read_out(name: str):
    found = pruned(name)
    assert found.ratio + 4 * found.ratio_sem < 2
    if name.endswith("s0"):  # The other one is near the threshold: see test_outcomes.py.
        assert found.refit_ratio + 4 * found.refit_ratio_sem < 1.25


@pytest.mark.exhaustive
def test_further_training_wins_back_most_of_what_pruning_costs():
    name = "sparse-h4-noise0.1-s0"
    measured = halves(draw(name, 2048))[1]
    found = fine_tune(trained(name), kept(name), measured, steps=500)
    ratio, full = found.ratio[:, -1]
    assert ratio + 4 * found.ratio_sem[0, -1] < found.ratio[0, 0] - 4 * found.ratio_sem[0, 0]
    assert ratio > full


@pytest.mark.parametrize("name", models(H4))
def test_c12_does_not_hold_with_4_heads_one_head_in_layer_1_will_do(name: str):
    found = prune(trained(name).model, draw(name, 2048), rule=best_head_first)
    assert found.refit_ratio + 4 * found.refit_ratio_sem < 2


@pytest.mark.parametrize("name", models(H8))
def test_c12_does_not_hold_with_8_heads_one_in_each_later_layer_costs_as_much(name: str):
    """At low noise one head in layer 1 costs more than twice the risk; as it is a few prompts carry
    that (20,000 times), so that both are told with a new read-out."""
    found = prune(trained(name).model, draw(name, 4096), rule=best_head_first)
    assert found.refit_ratio + 3 * found.refit_ratio_sem < 1.5 * pruned(name).refit_ratio
    if name in LOW:
        assert found.refit_ratio - 4 * found.refit_ratio_sem > 2


@pytest.mark.parametrize("name", models(SEVERAL))
def test_c13_does_not_hold_the_pruned_model_is_worse_than_a_single_head(name: str):
    measured = halves(draw(name, 2048))[1]
    masks = masked_errors(trained(name).model, measured, [masked_by(kept(name))])
    single = masked_errors(trained(single_of(name)).model, measured, [[]])
    ratio, sem = ratio_and_sem(masks[:, 0], single[:, 0])
    assert ratio - 4 * sem > 1


# C14: probes


@pytest.mark.parametrize("name", models(NAMES))
def test_c14_holds_probes_get_better_from_layer_to_layer(name: str):
    risk = probes(name).risk[:, -1]
    assert (risk[1:] <= 1.05 * risk[:-1]).all()


@pytest.mark.parametrize("name", models(SEVERAL))
def test_c14_holds_for_pruned_models_the_same_after_layer_1(name: str):
    risk = probes(name, without_pruned=True).risk[:, -1]
    assert (risk[1:] <= 1.05 * risk[:-1]).all()
    assert abs(risk[1] - probes(name).risk[1, -1]) <= 1e-6


# C15: what layer 1 is good for


@pytest.mark.parametrize("name", models(SEVERAL))
def test_c15_does_not_hold_descent_on_layer_1_is_no_better_after_16_steps(name: str):
    prompts = draw(name, 1024)
    raw = torch.cat([prompts.x, prompts.x_query[:, None]], dim=1)
    phis = {RAW: raw, name: query_features(trained(name).model, prompts, layer=1)}
    found = descent_curves(phis, prompts, steps=32)
    assert found.risk[1, 16] > 0.8 * found.risk[0, 16]
    # Over all steps it is ahead where there is little noise; with more it is sooner at its best, and sooner past it.
    ahead = found.log_area[1] + 2 * found.log_area_sem[1] < 0
    assert ahead == (name in LOW)


@pytest.mark.parametrize("name", models(NAMES))
def test_layer_1_writes_the_covariance_times_x_and_not_the_correlations(name: str):
    model, prompts = trained(name).model, draw(name, 2048)
    covariance = probe_layers(model, prompts, target=preconditioned)
    correlations = probe_layers(model, prompts, target=reweighted)
    # 0.9 is the claim of analyses/sparse/probes.py.
    assert (covariance.r2[1, -1] >= 0.9) == (name not in H8)
    assert correlations.r2[1, -1] < covariance.r2[1, -1]
    assert correlations.r2[1, -1] < 0.9
    assert max(covariance.r2[0, -1], correlations.r2[0, -1]) < 0.05
