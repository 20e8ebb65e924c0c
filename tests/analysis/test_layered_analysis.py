"""What a head of a layered model is worth: against masks made by hand, permuted heads, and a trained model."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mechinterp.analysis.multi_layer.classify import LayeredClassification, classify_layers
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.foreign.options import Hints
from mechinterp.checkpoints.foreign.read import Stored, read_foreign
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import sample_prompts
from mechinterp.models.hooked.runner import masked
from mechinterp.report.to_json import to_json
from tests.conftest import refused
from tests.models.test_layered_models import encoder, garg

FEWEST = 12
"""Prompts for three layers: twice the two scalars that an algorithm has in each."""


def checkpoint_of(model: nn.Module, *, n_heads: int, **task: object) -> Checkpoint:
    hints = Hints(n_heads=n_heads, task=task)
    return read_foreign([Stored(Path("x.pt"), model.state_dict(), {})], hints)


@pytest.fixture(scope="module")
def found() -> LayeredClassification:
    return classify_layers(checkpoint_of(garg(), n_heads=4), n_prompts=48)


@pytest.mark.slow
def test_the_table_is_the_paired_difference_on_the_same_prompts(found: LayeredClassification):
    checkpoint = checkpoint_of(garg(), n_heads=4)
    prompts = sample_prompts(checkpoint.task, 48, dtype=torch.float64)
    full = (checkpoint.predictor.predict(prompts) - prompts.y_query_clean).square()[:, 0]
    with masked(checkpoint.model, [(1, 3)]):
        without = checkpoint.predictor.predict(prompts)
    rise = (without - prompts.y_query_clean).square()[:, 0] - full
    assert found.heads.full_risk == pytest.approx(full.mean().item(), rel=1e-5)
    assert found.heads.full_risk_sem == pytest.approx(full.std().item() / 48**0.5, rel=1e-5)
    assert found.heads.rise[1, 3] == pytest.approx(rise.mean().item(), rel=1e-4)
    assert found.heads.rise_sem[1, 3] == pytest.approx(rise.std().item() / 48**0.5, rel=1e-4)
    assert found.heads.rise.shape == found.plot().data[0].z.shape == (3, 4)
    document = to_json("classify", checkpoint, found)
    assert document["heads"][7]["excess_risk_increase"] == found.heads.rise[1, 3]
    assert document["heads"][7]["sem"] == found.heads.rise_sem[1, 3]
    # Importance is the share of the rises of a layer.
    positive = found.heads.rise.clip(min=0)
    total = np.where(positive.sum(1) > 0, positive.sum(1), 1)
    np.testing.assert_allclose(found.heads.importance, positive / total[:, None])


@pytest.mark.slow
def test_idle_heads_have_importance_zero_and_no_prediction_is_near_to_no_learner():
    model = garg()
    nn.init.zeros_(model._backbone.h[1].attn.c_proj.weight)
    found = classify_layers(checkpoint_of(model, n_heads=4), n_prompts=FEWEST)
    assert (found.heads.rise[1] == 0).all()
    assert (found.heads.importance[1] == 0).all()
    nn.init.zeros_(model._read_out.weight)
    nn.init.zeros_(model._read_out.bias)
    found = classify_layers(checkpoint_of(model, n_heads=4), n_prompts=FEWEST)
    assert "predicts 0 on every prompt" in found.reason
    assert np.isnan(found.near.r2).all()


@pytest.mark.slow
def test_the_risk_is_held_against_the_target_without_noise():
    noisy = checkpoint_of(garg(), n_heads=4, noise_var=25.0, query_noise=True)
    prompts = sample_prompts(noisy.task, 16, dtype=torch.float64)
    expected = (noisy.predictor.predict(prompts) - prompts.y_query_clean).square().mean().item()
    found = classify_layers(noisy, n_prompts=16)
    assert found.heads.full_risk == pytest.approx(expected, rel=1e-5)
    learners = {"vanilla_gd", "debiased_gd", "kernel_head", "least_squares"}
    assert set(found.near.learners) == learners | {"ridge"}


def test_one_layer_is_undetermined_as_norm_and_mlp_lie_between():
    found = classify_layers(checkpoint_of(encoder(6).layers[0], n_heads=2), n_prompts=16)
    assert found.pattern == "undetermined"
    assert "LayerNorm" in found.reason
    assert found.heads.rise.shape == (1, 2)


@pytest.mark.slow
def test_prompts_are_the_seeds_and_the_tasks():
    checkpoint = checkpoint_of(garg(), n_heads=4)
    first, again = (classify_layers(checkpoint, n_prompts=FEWEST, seed=1) for _ in range(2))
    np.testing.assert_array_equal(first.heads.rise, again.heads.rise)
    assert classify_layers(checkpoint, n_prompts=FEWEST).heads.full_risk != first.heads.full_risk
    task = TaskConfig(d_x=3, context_length=9, noise_var=0.0)
    assert classify_layers(checkpoint, task, n_prompts=FEWEST).task.context_length == 9
    with refused("(3, 1)", "(5, 1)"):
        classify_layers(checkpoint, TaskConfig(), n_prompts=FEWEST)
    with refused("n_prompts", 8, 1):
        classify_layers(checkpoint, n_prompts=1)
