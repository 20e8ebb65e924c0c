"""Pruning: rules, the risk of what is left, and the smaller checkpoint that predicts as the masked model."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mechinterp.analysis.ablation import pruning
from mechinterp.analysis.ablation.masked_risk import masked_errors
from mechinterp.analysis.ablation.pruning import (
    RULES,
    SPLITS,
    best_head_first,
    best_head_later,
    fine_tune,
    masked_by,
    prune,
    pruned_weights,
    save_pruned,
)
from mechinterp.analysis.probing.linear import cross_validated, streams
from mechinterp.analysis.stats import random_halves, ratio_and_sem
from mechinterp.checkpoints.checkpoint import load, save
from mechinterp.checkpoints.io.errors import CheckpointError
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
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
    found = prune(model, many)
    shape = found.kept.shape
    errors = masked_errors(model, many, [[], *([head] for head in np.ndindex(shape))])
    rises = (errors[:, 1:] - errors[:, :1]).reshape(-1, *shape)
    np.testing.assert_allclose(found.rise, rises.mean(0), rtol=1e-9)
    assert np.array_equal(found.kept, best_head_later(found.rise))
    # One half of each halving at a time; each prompt is measured by one choice of each.
    crossed, refitted, kept = np.zeros(80), np.zeros(80), []
    for half in random_halves(80, SPLITS):
        kept.append(best_head_later(rises[half].mean(0)))
        gone = masked_by(kept[-1])
        crossed[~half] += masked_errors(model, many, [gone])[~half, 0] / SPLITS
        # By hand: a ridge regression on the stream of the masked model, cross-validated.
        stream = streams(model, many, heads=gone)[-1, :, 0]
        (fitted,) = cross_validated(stream, many.y_query.numpy())
        errors = np.square(fitted.prediction - many.y_query_clean.numpy()).mean(1)
        refitted[~half] += errors[~half] / SPLITS
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


def test_a_rule_by_its_name(many):
    model = random_model(**WIDE)
    named, own = prune(model, many, rule="best-first"), prune(model, many, rule=best_head_first)
    assert named.to_document()["heads_per_layer"].tolist() == [1, 4, 4]
    assert named.ratio == own.ratio
    costs = named.cost_frame()
    assert costs["model"].tolist() == ["full", "pruned"]
    assert costs["risk"].tolist() == [named.full_risk, named.risk]
    assert named.plot().layout.yaxis.type is None
    # A rule may cost a thousand times another.
    assert replace(named, risk=1000 * named.risk).plot().layout.yaxis.type == "log"
    with pytest.raises(ValueError, match=r"rule must be one of best-later, .*, got 'all'"):
        prune(model, many, rule="all")
    with pytest.raises(ValueError, match="needs a model of several layers, got one"):
        prune(random_model(1, 2, **WIDE), many)


@pytest.mark.slow
def test_the_pruned_model_is_saved_and_trained_further(checkpoint, many, tmp_path):
    found = prune(checkpoint, many, out=tmp_path / "pruned")
    assert found.saved == str(tmp_path / "pruned")
    assert [len(heads) for heads in load(found.saved).weights.heads_per_layer] == [4, 1, 1]
    tuned = prune(checkpoint, many, n_prompts=60, fine_tune_steps=8, out=tmp_path / "tuned", seed=2)
    # Measured on other prompts than those that the heads are chosen on.
    others = sample_prompts(TASK, 60, seed=3, dtype=torch.float64)
    by_hand = fine_tune(checkpoint, tuned.kept, others, steps=8)
    np.testing.assert_array_equal(tuned.tuned.risk, by_hand.risk)
    assert load(tmp_path / "tuned").step == checkpoint.step + 8
    with pytest.raises(CheckpointError, match="already holds a checkpoint"):
        prune(checkpoint, many, out=tmp_path / "tuned")
    with pytest.raises(ValueError, match="needs a checkpoint, got a ICLTransformer"):
        prune(checkpoint.model, many, fine_tune_steps=1)
