"""What a head of a layered model is worth: against masks made by hand, permuted heads, and a trained model."""

from pathlib import Path

import numpy as np
import pytest
from torch import nn

from mechinterp.analysis.multi_layer.classify import classify_layers
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.foreign.options import Hints
from mechinterp.checkpoints.foreign.read import Stored, read_foreign
from mechinterp.config import TaskConfig
from tests.conftest import refused
from tests.models.test_layered_models import encoder, garg

FEWEST = 12
"""Prompts for three layers: twice the two scalars that an algorithm has in each."""


def checkpoint_of(model: nn.Module, *, n_heads: int, **task: object) -> Checkpoint:
    hints = Hints(n_heads=n_heads, task=task)
    return read_foreign([Stored(Path("x.pt"), model.state_dict(), {})], hints)


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
