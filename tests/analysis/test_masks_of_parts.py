"""Masks at one position, of MLPs, and under a metric of one's own: against weights of zero and hooks written by hand."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from mechinterp import dmmse, hook_module, load, masked, sample_prompts, task_pool
from mechinterp.analysis.ablation.masked_risk import PositionAblation
from mechinterp.analysis.ablation.single import HeadAblation, ablate_heads
from mechinterp.analysis.result import meanings, unit_of
from mechinterp.config import TaskConfig
from mechinterp.display import Result
from mechinterp.icl.predictors import ridge
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.masks import METHODS, mask_heads
from mechinterp.models.hooked.transformer import ICLTransformer
from tests.deep_models import GPT2, random_gpt2, random_model


def own_gpt2() -> ICLTransformer:
    return random_model(3, 2, **GPT2)


def task_of(prompts: Prompts) -> TaskConfig:
    return TaskConfig(d_x=prompts.x.shape[2], context_length=prompts.x.shape[1])


def meaning_units(found: Result) -> dict[str, str]:
    """Units of the rises, as the headers of tables have them."""
    columns = [name for name in ("rise", "median_rise") if name in found.to_frame()]
    return {name: unit_of(text) for name, text in meanings(found, columns).items()}


def squares(predictions: Tensor, prompts: Prompts) -> Tensor:
    return (predictions - prompts.y_query_clean).square().mean(1)


def without_mlp(model: ICLTransformer, layer: int, task: TaskConfig) -> ICLTransformer:
    """The model with an MLP that writes nothing."""
    weights = model.weights
    tensors = {name: each.clone() for name, each in weights.tensors.items()}
    for name in ("mlp.W_out", "mlp.b_out"):
        tensors[name][layer] = 0
    return ICLTransformer.from_weights(replace(weights, tensors=tensors), task=task)


def test_a_masked_mlp_is_an_mlp_of_zeros(few):
    model = own_gpt2()
    found = ablate_heads(model, few, mlps=True)
    full = squares(model.predict(few), few)
    for layer in range(len(model.blocks)):
        rise = (squares(without_mlp(model, layer, task_of(few)).predict(few), few) - full).detach()
        assert found.mlp_rise[layer] == pytest.approx(rise.mean().item(), rel=1e-9)
        assert found.mlp_rise_sem[layer] == pytest.approx(
            rise.std().item() / len(few) ** 0.5, rel=1e-9
        )
    heads = ablate_heads(model, few)
    np.testing.assert_array_equal(found.rise, heads.rise)
    mlps = found.to_frame().query("head == 'MLP'")
    assert mlps["rise"].tolist() == found.mlp_rise.tolist()
    n_layers, n_heads = found.rise.shape
    assert found.plot().data[0].z.shape == (n_layers, n_heads + 1)


def test_the_mean_output_of_an_mlp_is_that_over_prompts(few):
    model = own_gpt2()
    name = "blocks.0.hook_mlp_out"
    _, cache = model.run_with_cache(few)
    mean = cache[name].mean(0)
    masked = model.run_with_hooks(
        model.tokens(few), fwd_hooks=[(name, lambda out, hook: mean.expand_as(out))]
    )[:, -1]
    rise = squares(masked, few) - squares(model.predict(few), few)
    found = ablate_heads(model, few, mlps=True, method="mean")
    assert found.mlp_rise[0] == pytest.approx(rise.mean().item(), rel=1e-9)


def test_mlps_of_somebody_elses_model(few):
    hooked = random_gpt2()
    found = ablate_heads(hooked, few, mlps=True)
    masked = hooked.model.run_with_hooks(
        hooked.inputs(few), fwd_hooks=[("blocks.1.hook_mlp_out", lambda out, hook: 0 * out)]
    )
    rise = squares(hooked.read(masked), few) - squares(hooked.predict(few), few)
    assert found.mlp_rise[1] == pytest.approx(rise.mean().item(), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("make", [random_model, own_gpt2])
def test_a_head_is_masked_at_one_position(make, method, few):
    model, even = make(), few[: len(few) // 2 * 2]
    found = ablate_heads(model, even, positions="all", method=method)
    assert isinstance(found, PositionAblation)
    n_layers, n_heads, n_pos = found.rise.shape
    assert len(found.positions) == n_pos == model.tokens(even).shape[1]
    _, cache = model.run_with_cache(even)
    full = squares(model.predict(even), even)
    places = [(0, 1, 2), (1, 0, n_pos - 1), (n_layers - 1, n_heads - 1, n_pos - 1)]
    # Nothing reads the last layer but the query: such masks are not run, and change nothing in a run by hand.
    places += [(n_layers - 1, 0, 0), (n_layers - 1, 1, n_pos - 2)]
    for layer, head, at in places:
        name = f"blocks.{layer}.attn.hook_z"
        z = cache[name]
        values = {"zero": torch.zeros_like(z), "mean": z.mean(0).expand_as(z)}
        values["resample"] = z.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)

        def put(own: Tensor, hook: object, value=values[method], head=head, at=at) -> Tensor:
            own = own.clone()
            own[:, at, head] = value[:, at, head]
            return own

        masked = model.run_with_hooks(model.tokens(even), fwd_hooks=[(name, put)])[:, -1]
        rise = (squares(masked, even) - full).mean().item()
        assert found.rise[layer, head, at] == pytest.approx(rise, rel=1e-8, abs=1e-12)
    assert found.rise[:-1].any()
    frame = found.to_frame()
    assert len(frame) == found.rise.size
    assert found.plot().data[0].z.shape == (n_layers * n_heads, n_pos)


def test_in_one_layer_the_query_alone_counts(few):
    model = random_model(1)
    by_position = ablate_heads(model, few, positions="all")
    np.testing.assert_allclose(by_position.rise[..., -1], ablate_heads(model, few).rise, rtol=1e-9)
    np.testing.assert_array_equal(by_position.rise.sum(2), by_position.rise[..., -1])


def test_positions_of_a_plain_module(few):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    read = torch.nn.Sequential(
        torch.nn.Linear(5, 8),
        torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        torch.nn.Linear(8, 1),
    ).double()
    hooked = hook_module(read, task=task_of(few))
    found = ablate_heads(hooked, few, positions="all")
    assert found.rise.shape == (2, 2, few.x.shape[1] + 1)
    assert found.rise[0].all()  # every position is read by the next layer
    np.testing.assert_allclose(found.rise[1, :, :-1], 0, atol=1e-15)


def test_the_distance_to_a_predictor_of_the_task_is_a_metric():
    shipped = load("pool-linear-m4-s0")
    checkpoint = replace(shipped, weights=shipped.weights.to(torch.float64))
    task, prompts = checkpoint.task, sample_prompts(checkpoint.task, 64, dtype=torch.float64)
    own = {
        "ridge": partial(ridge, penalty=task.posterior_penalty),
        "dmmse": partial(dmmse, pool=task_pool(task), noise_var=task.noise_var),
    }
    for name, learner in own.items():

        def distance(y_hat: Tensor, prompts: Prompts, learner=learner) -> Tensor:
            return (y_hat - learner(prompts)).square().mean(1)

        found = ablate_heads(checkpoint, prompts, metric=name)
        assert (found.metric, found.unit) == (f"distance to {name}", "y²")
        np.testing.assert_allclose(
            found.rise, ablate_heads(checkpoint, prompts, metric=distance).rise, rtol=1e-6
        )


def test_a_metric_of_ones_own(few):
    model = random_model(2)

    def distance_to_one(predictions: Tensor, prompts: Prompts) -> Tensor:
        return (predictions[:, 0] - 1).abs()

    found = ablate_heads(model, few, metric=distance_to_one)
    full = distance_to_one(model.predict(few), few)
    assert found.full_risk == pytest.approx(full.mean().item(), rel=1e-12)
    assert found.null_risk == 1
    with torch.no_grad(), model.hooks(fwd_hooks=mask_heads([(1, 2)])):
        rise = distance_to_one(model.predict(few), few) - full.detach()
    assert found.rise[1, 2] == pytest.approx(rise.mean().item(), rel=1e-9)
    assert found.rise_sem[1, 2] == pytest.approx(rise.std().item() / len(few) ** 0.5, rel=1e-9)
    assert found.metric == "distance to one"
    assert meaning_units(found) == {"rise": "", "median_rise": ""}
    assert found.headline.startswith("distance to one ")
    assert "distance to one" in found.plot().layout.title.text
    nameless = ablate_heads(model, few, metric=lambda y_hat, prompts: y_hat[:, 0])
    assert nameless.metric == "metric"
    pairs = ablate_heads(model, few, metric=distance_to_one, sets="pairs")
    np.testing.assert_allclose(pairs.rise.diagonal(), found.rise.ravel(), rtol=1e-9)
    greedy = ablate_heads(model, few, metric=distance_to_one, sets="greedy")
    assert greedy.risk[-1] == pytest.approx(1)  # nothing is left: 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sets": "triples"}, ("sets", "greedy", "'triples'")),
        ({"positions": "first"}, ("positions", "'all'", "'first'")),
        ({"sets": "pairs", "mlps": True}, ("mlps", "'single'", "'pairs'")),
        ({"positions": "all", "mlps": True}, ("positions", "mlps")),
        ({"positions": "all", "runs": "all"}, ("positions", "runs")),
        ({"mlps": True, "runs": "all"}, ("mlps", "runs")),
        ({"metric": lambda predictions, prompts: predictions}, ("metric", "[30]", "[30, 1]")),
        ({"metric": "dmmse"}, ("metric='dmmse'", "task")),
        ({"metric": "loss"}, ("metric", "'ridge'", "'loss'")),
        ({"metric": lambda y_hat, prompts: y_hat[:, 0] / 0}, ("metric", "finite", "inf")),
        ({"mlps": True}, ("mlps", "MLPs", "attention")),
    ],
)
def test_options_that_do_not_go_together(options, words, few):
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        ablate_heads(random_model(2), few, **options)
    assert all(word in str(refused.value) for word in words), refused.value
    assert "\n" not in str(refused.value)


def test_a_position_or_an_mlp_that_is_not_there_is_refused(few):
    model = own_gpt2()
    n_pos = model.tokens(few).shape[1]
    for options, words in (
        ({"heads": [(0, 0)], "at": n_pos}, ("at", f"{n_pos - 1}", f"{n_pos}")),
        ({"heads": [], "mlps": [0], "at": -1}, ("at", "-1")),
        ({"heads": [], "mlps": [3]}, ("blocks.3.hook_mlp_out",)),
    ):
        with pytest.raises(ValueError) as refused, masked(model, **options):  # noqa: PT011
            model.predict(few)
        assert all(word in str(refused.value) for word in words), refused.value
    with masked(model, [(0, 1)], mlps=[1], at=2):
        both = model.predict(few)
    assert not torch.equal(both, model.predict(few))


@pytest.mark.slow
def test_without_options_it_is_the_excess_risk(few):
    found = ablate_heads(random_model(2), few)
    assert isinstance(found, HeadAblation)
    assert found.metric == "excess risk"
    assert meaning_units(found) == {"rise": "y²", "median_rise": "y²"}
    assert found.headline.startswith("excess risk ")
    for options in ({"positions": "all"}, {"sets": "pairs"}):
        assert meaning_units(ablate_heads(random_model(2), few, **options))["rise"] == "y²"
    curves = ablate_heads(random_model(2), few, sets="greedy")
    assert unit_of(meanings(curves, ["risk"])["risk"]) == "y²"
    assert found.mlp_rise is None
