"""What a head of a layered model is worth: against masks made by hand, permuted heads, and a trained model."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest
import torch
from torch import nn

from mechinterp.analysis.ablation.pruning import save_pruned
from mechinterp.analysis.multi_layer.classify import LayeredClassification, classify_layers
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.foreign.options import Hints
from mechinterp.checkpoints.foreign.read import Stored, read_foreign
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import generator_for, sample_prompts
from mechinterp.models.hooked.runner import masked
from mechinterp.models.tokens import interleaved
from mechinterp.report.header import dumps
from mechinterp.report.to_json import to_json
from tests.models.test_layered_models import GargModel, encoder, garg

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
    prompts = sample_prompts(
        checkpoint.task, 48, generator=generator_for(0, "eval", 0), dtype=torch.float64
    )
    full = (checkpoint.predictor.predict(prompts) - prompts.y_query_clean).square()[:, 0]
    with masked(checkpoint.model, [(1, 3)]):
        without = checkpoint.predictor.predict(prompts)
    rise = (without - prompts.y_query_clean).square()[:, 0] - full
    assert found.excess_risk == pytest.approx(full.mean().item(), rel=1e-5)
    assert found.excess_risk_sem == pytest.approx(full.std().item() / 48**0.5, rel=1e-5)
    assert found.increase[1, 3] == pytest.approx(rise.mean().item(), rel=1e-4)
    assert found.increase_sem[1, 3] == pytest.approx(rise.std().item() / 48**0.5, rel=1e-4)
    assert found.increase.shape == (3, 4)


@pytest.mark.slow
def test_the_risk_is_held_against_the_target_without_noise():
    noisy = checkpoint_of(garg(), n_heads=4, noise_var=25.0, query_noise=True)
    prompts = sample_prompts(
        noisy.task, 16, generator=generator_for(0, "eval", 0), dtype=torch.float64
    )
    expected = (noisy.predictor.predict(prompts) - prompts.y_query_clean).square().mean().item()
    found = classify_layers(noisy, n_prompts=16)
    assert found.excess_risk == pytest.approx(expected, rel=1e-5)
    learners = ("vanilla_gd", "debiased_gd", "kernel_head", "least_squares", "ridge")
    assert set(found.near.learners) == set(learners)


@pytest.mark.slow
def test_permuted_heads_permute_the_table(found: LayeredClassification):
    order = [2, 0, 3, 1]
    model = garg()
    attention = model._backbone.h[1].attn
    columns = torch.arange(16).unflatten(0, (4, 4))[order].flatten()
    with torch.no_grad():
        for parameter in (attention.c_attn.weight, attention.c_attn.bias):
            split = parameter.unflatten(-1, (3, 16))[..., columns]
            parameter.copy_(split.flatten(-2))
        attention.c_proj.weight.copy_(attention.c_proj.weight[columns])
    permuted = classify_layers(checkpoint_of(model, n_heads=4), n_prompts=48)
    expected = found.increase.copy()
    expected[1] = expected[1, order]
    np.testing.assert_allclose(permuted.increase, expected, rtol=1e-3, atol=1e-5)
    assert np.ptp(expected[1]) > 0.01


@pytest.mark.slow
def test_importance_is_the_share_of_the_layers_rises(found: LayeredClassification):
    positive = found.increase.clip(min=0)
    has_rise = positive.sum(1) > 0
    np.testing.assert_allclose(found.importance.sum(1), has_rise.astype(float), atol=1e-12)
    assert (found.importance[found.increase < 0] == 0).all()
    ratio = positive[has_rise] / positive[has_rise].sum(1, keepdims=True)
    np.testing.assert_allclose(found.importance[has_rise], ratio)


@pytest.mark.slow
def test_a_layer_of_idle_heads_has_importance_zero():
    model = garg()
    with torch.no_grad():
        model._backbone.h[1].attn.c_proj.weight.zero_()
    found = classify_layers(checkpoint_of(model, n_heads=4), n_prompts=FEWEST)
    assert (found.increase[1] == 0).all()
    assert (found.importance[1] == 0).all()


def test_the_document_and_the_pictures(found: LayeredClassification):
    checkpoint = checkpoint_of(garg(), n_heads=4)
    document = to_json("classify", checkpoint, found)
    assert (document["pattern"], document["format"], document["d_x"]) == ("unstructured", "gpt2", 3)
    head = document["heads"][7]
    assert (head["layer"], head["head"], head["label"]) == (1, 3, "L1H3")
    assert head["excess_risk_increase"] == found.increase[1, 3]
    assert head["sem"] == found.increase_sem[1, 3]
    assert head["importance"] == found.importance[1, 3]
    assert document["evidence"]["excess_risk"] == found.excess_risk
    assert set(document["evidence"]["learner_r2"]) == set(found.near.learners)
    assert document["assumed"]["task.noise_var"] == 0
    assert "unstructured" in dumps(document)
    for figure in (found.plot(),):
        assert isinstance(figure, go.Figure)
        assert np.shape(figure.data[0].z) == (3, 4)
    assert repr(found).startswith("LayeredClassification(unstructured)\nWhat it computes: nothing")
    learners = ("vanilla_gd", "debiased_gd", "kernel_head", "least_squares")
    assert set(found.near.learners) == set(learners)
    assert found.algorithm is not None
    assert found.reason == found.algorithm.reason
    assert not found.near.is_near


def test_colours_end_where_a_masked_model_is_no_better_than_one_that_predicts_0(
    found: LayeredClassification,
):
    loss = replace(found.loss, model=0.5, zero=2.0)
    one = np.where(np.arange(12).reshape(3, 4) == 3, 1e4, 0.3)
    broken = replace(found, loss=loss, increase=one).plot()
    assert (broken.data[0].zmax, broken.data[0].zmin) == (1.5, -1.5)
    assert "full colour: no better than predicting 0" in broken.layout.title.text
    whole = replace(found, loss=loss, increase=one.clip(max=1.2)).plot()
    assert whole.data[0].zmax == 1.2
    assert whole.layout.title.text == "Rise of the excess risk when a head is masked"


def test_one_layer_is_undetermined_as_norm_and_mlp_lie_between():
    found = classify_layers(checkpoint_of(encoder(6).layers[0], n_heads=2), n_prompts=16)
    assert found.pattern == "undetermined"
    assert "between the heads and the prediction" in found.reason
    assert "LayerNorm" in found.reason
    assert found.increase.shape == (1, 2)


@pytest.mark.slow
def test_a_model_that_predicts_nothing_is_near_to_no_learner():
    model = garg()
    nn.init.zeros_(model._read_out.weight)
    nn.init.zeros_(model._read_out.bias)
    found = classify_layers(checkpoint_of(model, n_heads=4), n_prompts=FEWEST)
    assert found.reason.endswith("; the model predicts 0 on every prompt")
    assert np.isnan(found.near.r2).all()


@pytest.mark.slow
def test_prompts_are_the_seeds_and_the_tasks():
    checkpoint = checkpoint_of(garg(), n_heads=4)
    first, again = (classify_layers(checkpoint, n_prompts=FEWEST, seed=1) for _ in range(2))
    np.testing.assert_array_equal(first.increase, again.increase)
    assert classify_layers(checkpoint, n_prompts=FEWEST).excess_risk != first.excess_risk
    task = TaskConfig(d_x=3, context_length=9, noise_var=0.0)
    assert classify_layers(checkpoint, task, n_prompts=FEWEST).task.context_length == 9
    with pytest.raises(ValueError, match=r"the model's, \(3, 1\), got \(5, 1\)"):
        classify_layers(checkpoint, TaskConfig(), n_prompts=FEWEST)
    with pytest.raises(ValueError, match=r"n_prompts must be >= 8, .*, got 1"):
        classify_layers(checkpoint, n_prompts=1)


def test_a_pruned_model_is_saved_and_predicts_as_the_masked_one(tmp_path: Path):
    checkpoint = checkpoint_of(garg(), n_heads=4, context_length=5)
    prompts = sample_prompts(checkpoint.task, 20, generator=generator_for(0, "eval", 0))
    kept = np.ones((3, 4), dtype=bool)
    kept[1, 1:] = kept[2, 0] = False
    saved = save_pruned(checkpoint, kept, tmp_path / "pruned", prompts=prompts)
    with masked(checkpoint.model, [(1, 1), (1, 2), (1, 3), (2, 0)]):
        expected = checkpoint.model.predict(prompts)
    torch.testing.assert_close(saved.model.predict(prompts), expected)
    assert (saved.path, saved.task.context_length) == (tmp_path / "pruned", 5)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_trained_model_comes_close_to_least_squares():
    task = TaskConfig(d_x=1, context_length=8, beta_var=1.0, noise_var=0.0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GargModel(1, 9, n_embd=32, n_layer=2, n_head=2).train()
        for name, parameter in model.named_parameters():
            if name.endswith("weight") and "ln" not in name:
                nn.init.normal_(parameter, 0.0, 0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(600):
        prompts = sample_prompts(task, 128, generator=generator_for(0, "train", step))
        stream = model._backbone(inputs_embeds=model._read_in(interleaved(prompts)))
        prediction = model._read_out(stream.last_hidden_state)[:, ::2, 0]
        targets = torch.cat([prompts.y[..., 0], prompts.y_query], 1)
        loss = (prediction - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = classify_layers(checkpoint_of(model, n_heads=2, context_length=8), n_prompts=512)
    assert found.near.learners[0] == "least_squares"
    assert found.near.r2.max() > 0.85
    assert found.near.sentence.startswith("the nearest simple learner is least squares, R² = 0.")
    # Some head carries the solution, well above its standard error.
    assert (found.increase / found.increase_sem).max() > 5
    assert found.increase.max() > 5 * found.excess_risk
    assert found.excess_risk < 0.15
