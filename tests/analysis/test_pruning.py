"""Pruning: rules, the risk of what is left, the smaller checkpoint that predicts as the masked model, and curves, which are
masks one by one."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mechinterp.analysis.ablation import pruning
from mechinterp.analysis.ablation.masked_risk import masked_errors, pruning_curves
from mechinterp.analysis.ablation.pruning import (
    RULES,
    best_head_later,
    masked_by,
    prune,
    prune_by_rules,
    pruned_weights,
    random_halves,
    save_pruned,
)
from mechinterp.analysis.number_format import with_error
from mechinterp.analysis.probing.linear import cross_validated, streams
from mechinterp.analysis.stats import ratio_and_sem
from mechinterp.checkpoints.checkpoint import load, save
from mechinterp.checkpoints.io.errors import CheckpointError
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.display import with_sem
from mechinterp.icl.prompts import Prompts, generator_for, sample_prompts
from mechinterp.models.run.predictor import predictor_of
from tests.deep_models import WIDE, random_gpt2, random_model

TASK = TaskConfig(d_x=4, context_length=9)


@pytest.fixture
def many() -> Prompts:
    generator = generator_for(0, "eval", 1)
    return sample_prompts(TASK, 80, generator=generator, dtype=torch.float64)


@pytest.fixture
def checkpoint(tmp_path: Path):
    model = ModelConfig(n_layers=3, n_heads=4, context_only=True, d_model=12, d_head=3)
    weights = random_model(**WIDE).weights
    save(tmp_path / "full", ExperimentConfig(task=TASK, model=model), weights, step=5)
    return load(tmp_path / "full")


def test_rules():
    rise = np.array([[0.1, 0.3], [2.0, 1.0], [-1.0, -2.0]])
    kept = {name: rule(rise).tolist() for name, rule in RULES.items()}
    assert kept == {
        "best-later": [[True, True], [True, False], [True, False]],
        "least-later": [[True, True], [False, True], [False, True]],
        "best-first": [[False, True], [True, True], [True, True]],
    }
    # A tie goes to the lower number.
    assert best_head_later(np.zeros((2, 3)))[1].tolist() == [True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: random_model(**WIDE), random_gpt2])
def test_risks_are_those_of_the_masked_model(make, many):
    model = make()
    found = prune(model, many, splits=2)
    shape = found.kept.shape
    errors = masked_errors(model, many, [[], *([head] for head in np.ndindex(shape))])
    rises = (errors[:, 1:] - errors[:, :1]).reshape(-1, *shape)
    np.testing.assert_allclose(found.rise, rises.mean(0), rtol=1e-9)
    assert np.array_equal(found.kept, best_head_later(found.rise))
    # One half of each halving at a time; each prompt is measured by one choice of each.
    crossed, refitted, kept = np.zeros(80), np.zeros(80), []
    for half in random_halves(80, 2):
        kept.append(best_head_later(rises[half].mean(0)))
        gone = masked_by(kept[-1])
        crossed[~half] += masked_errors(model, many, [gone])[~half, 0] / 2
        # By hand: a ridge regression on the stream of the masked model, cross-validated.
        stream = streams(model, many, heads=gone)[-1, :, 0]
        (fitted,) = cross_validated(stream, many.y_query.numpy())
        errors = np.square(fitted.prediction - many.y_query_clean.numpy()).mean(1)
        refitted[~half] += errors[~half] / 2
    np.testing.assert_allclose(found.chosen, np.mean(kept, axis=0), rtol=1e-12)
    full = masked_errors(model, many, [[]])[:, 0]
    assert found.full_risk == pytest.approx(full.mean(), rel=1e-12)
    assert found.risk == pytest.approx(crossed.mean(), rel=1e-9)
    assert found.ratio == pytest.approx(crossed.mean() / full.mean(), rel=1e-9)
    assert found.refit_risk == pytest.approx(refitted.mean(), rel=1e-9)
    assert found.refit_ratio == pytest.approx(refitted.mean() / full.mean(), rel=1e-9)
    within = [float(ratio_and_sem(errors, full)[1]) for errors in (crossed, refitted)]
    assert found.ratio_sem >= within[0] * (1 - 1e-9)
    assert found.refit_ratio_sem >= within[1] * (1 - 1e-9)
    assert found.refit_risk < found.risk
    assert list(found.to_frame().columns) == ["layer", "head", "kept", "chosen", "rise"]
    assert repr(found).startswith(f"Pruning({shape[1]}, 1, 1 heads kept: excess risk ")
    as_it_is, refit = (trace.y.tolist() for trace in found.plot().data)
    assert as_it_is == [found.full_risk, found.risk]
    assert refit == [found.full_refit_risk, found.refit_risk]


@pytest.mark.slow
def test_sequential_scores_come_after_what_is_gone(many):
    model = random_model(**WIDE)
    joint, found = prune(model, many), prune(model, many, sequential=True)
    assert np.array_equal(found.rise[:2], joint.rise[:2])
    gone = [(1, int(head)) for head in np.flatnonzero(~found.kept[1])]
    errors = masked_errors(model, many, [gone, *([*gone, (2, head)] for head in range(4))])
    np.testing.assert_allclose(found.rise[2], errors.mean(0)[1:] - errors.mean(0)[0], rtol=1e-9)
    assert not np.allclose(found.rise[2], joint.rise[2])


def test_pruning_everything_is_refused(many):
    model = random_model()
    with pytest.raises(ValueError, match="must keep at least one of 12 heads, got none"):
        prune(model, many, rule=lambda rise: np.zeros(rise.shape, dtype=bool))
    with pytest.raises(ValueError, match=r"boolean array of shape \(3, 4\), got float64"):
        prune(model, many, rule=lambda rise: rise)


@pytest.mark.slow
def test_a_pruned_model_is_a_smaller_checkpoint(checkpoint, many, tmp_path):
    kept = np.zeros((3, 4), dtype=bool)
    kept[0, [1, 3]] = kept[2, 2] = True  # no head at all in layer 1
    gone = [(int(layer), int(head)) for layer, head in np.argwhere(~kept)]
    saved = save_pruned(checkpoint, kept, tmp_path / "pruned", prompts=many)
    assert saved.config.model.n_heads == saved.weights.n_heads == 2
    assert saved.weights.heads_per_layer == ((0, 1), (), (0,))
    assert saved.step == 5
    assert saved.origin == {"pruned_from": "full", "kept_heads": [[1, 3], [], [2]]}
    saved.save_pretrained(tmp_path / "again")
    assert load(tmp_path / "again").origin == saved.origin
    masked = predictor_of(checkpoint).run(many, [gone])[0]
    torch.testing.assert_close(saved.model.predict(many), masked, rtol=1e-11, atol=1e-13)
    with pytest.raises(CheckpointError, match="already holds a checkpoint"):
        save_pruned(checkpoint, kept, tmp_path / "pruned", prompts=many)


def test_a_saved_model_that_predicts_otherwise_is_refused(checkpoint, many, tmp_path, monkeypatch):
    def wrong(weights, kept):
        return pruned_weights(weights, ~kept)

    monkeypatch.setattr(pruning, "pruned_weights", wrong)
    with pytest.raises(ValueError, match="must predict as the masked model to 1e-05, got "):
        save_pruned(checkpoint, np.eye(3, 4, dtype=bool), tmp_path / "pruned", prompts=many)


@pytest.mark.slow
@pytest.mark.parametrize("model", [random_model(2, 2, **WIDE), random_gpt2()], ids=["ours", "gpt2"])
def test_a_curve_masks_the_heads_of_an_order_one_after_another(model, many: Prompts):
    layers = 2 if model.__class__.__name__ == "ICLTransformer" else 3
    order = [(layer, head) for layer in range(layers) for head in (1, 0)]
    found = pruning_curves(model, many, {"down": order, "up": order[::-1]})
    for row, heads in enumerate((order, order[::-1])):
        errors = masked_errors(model, many, [heads[:size] for size in range(len(order) + 1)])
        np.testing.assert_allclose(found.risk[row], errors.mean(0), rtol=1e-9)
        np.testing.assert_allclose(found.ratio[row], errors.mean(0) / errors[:, 0].mean())
    assert found.heads[0][:2] == ("L0H1", "L0H0")
    assert (found.ratio[:, 0].tolist(), found.ratio_sem[:, 0].tolist()) == ([1, 1], [0, 0])
    frame = found.to_frame()
    assert frame["n_kept"].tolist() == [*range(len(order), -1, -1)] * 2
    assert frame.query("order == 'up'")["masked_next"].tolist() == [*found.heads[1], ""]
    assert list(found.plot().data[0].x) == [*range(len(order), -1, -1)]


def test_the_heads_needed_are_the_fewest_within_the_ratio(many: Prompts):
    found = pruning_curves(random_model(1, 2, **WIDE), many, {"all": [(0, 0), (0, 1)]})
    for ratios, needed in (([1, 1.5, 3], 1), ([1, 3, 1.5], 0), ([1, 3, 3], 2)):
        assert replace(found, ratio=np.array([ratios], dtype=float)).needed("all") == needed
    assert f"twice the excess risk: all {found.needed('all')} of 2)" in repr(found)


def test_an_order_must_name_every_head_once(many: Prompts):
    model = random_model(1, 2, **WIDE)
    with pytest.raises(ValueError, match="'short' must name each of 2 heads once, got 1 heads"):
        pruning_curves(model, many, {"short": [(0, 0)]})
    with pytest.raises(ValueError, match="at least one order"):
        pruning_curves(model, many, {})


@pytest.mark.slow
def test_rules_are_those_of_prune(many: Prompts):
    model = random_model(**WIDE)
    found = prune_by_rules(model, many)
    assert found.rules == ("full model", *RULES)
    for name, rule in RULES.items():
        expected, each = prune(model, many, rule=rule), found.by_rule[name]
        assert (each.kept == expected.kept).all()
        assert (each.chosen == expected.chosen).all()
        costs = with_sem("risk", "ratio", "refit_risk", "refit_ratio")
        values = [getattr(each, cost) for cost in costs]
        assert values == pytest.approx([getattr(expected, cost) for cost in costs], rel=1e-9)
    full = found.by_rule["full model"]
    assert full.refit_risk == pytest.approx(expected.full_refit_risk, rel=1e-9)
    kept = ["4, 4, 4", "4, 1, 1", "4, 1, 1", "1, 4, 4"]
    assert found.to_frame()["heads_per_layer"].tolist() == kept
    assert found.plot().layout.yaxis.type is None
    # A rule may cost a thousand times another.
    last = found.by_rule["best-first"]
    worse = {"best-first": replace(last, risk=1000 * last.risk)}
    apart = replace(found, by_rule=found.by_rule | worse)
    assert apart.plot().layout.yaxis.type == "log"
    assert repr(found).startswith("PruningByRules(best-later ")


def test_a_risk_that_few_prompts_carry_is_read_with_a_new_read_out(many: Prompts):
    found = prune_by_rules(random_model(**WIDE), many)
    assert list(found.to_frame())[2:7:4] == ["risk", "refit_risk"]
    best = replace(found.by_rule["best-later"], carried_by_few=True)
    few = replace(found, by_rule=found.by_rule | {"best-later": best})
    assert list(few.to_frame())[2:7:4] == ["refit_risk", "risk"]
    refit = with_error(best.refit_ratio, best.refit_ratio_sem)
    assert f"best-later {refit} times with a new read-out," in repr(few)
    other = found.by_rule["best-first"]
    assert f"best-first {with_error(other.ratio, other.ratio_sem)} times)" in repr(few)


def test_rules_that_prune_nothing_are_left_out(many: Prompts):
    assert prune_by_rules(random_model(1, 2, **WIDE), many).rules == ("full model", "best-first")
    alone = prune_by_rules(random_model(3, 1, **WIDE), many)
    assert alone.rules == ("full model",)
    assert repr(alone) == "PruningByRules(full model)"
