"""Masks: from cached streams against plain runs with hooks, and what is said of masks that do nothing."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from mechinterp import load
from mechinterp.analysis.ablation.ablate import ablate
from mechinterp.analysis.ablation.contrasts import Mask
from mechinterp.analysis.ablation.measured import masked_errors, values_under
from mechinterp.analysis.result import tables_of
from mechinterp.icl import dmmse
from mechinterp.icl.predictors import ridge
from mechinterp.icl.prompts import Prompts, draw_prompts
from mechinterp.models.hooked.masks import METHODS, mask_heads, z_name
from mechinterp.models.hooked.runner import HookedPredictor, hooked_predictor, masked
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.run import general, hooks, one_layer
from mechinterp.models.run import linear as token_map
from mechinterp.models.run.predictor import predictor_of
from tests.conftest import refused
from tests.deep_models import GPT2, random_gpt2, random_model

MASKS = [[], [(0, 1)], [(1, 3)], [(0, 0), (1, 1), (2, 3)], [(0, 2), (2, 2)], [(2, 1), (2, 2)]]


def by_hooks(predictor, prompts, heads, values=None):
    with torch.no_grad(), predictor.model.hooks(fwd_hooks=mask_heads(heads, values=values)):
        return predictor.predict(prompts)


def replacements(predictor, prompts, method):
    """What the plain run puts in the place of z, worked out here anew."""
    if method == "zero":
        return None
    names = [z_name(layer) for layer in range(predictor.n_layers)]
    with torch.no_grad():
        _, cache = predictor.model.run_with_cache(predictor.embed(prompts), names_filter=names)
    if method == "mean":
        return [cache[name].mean(0) for name in names]
    other = [i + 1 if i % 2 == 0 else i - 1 for i in range(len(prompts))]
    return [cache[name][other] for name in names]


@pytest.fixture
def small_chunks(monkeypatch):
    for backend in (general, hooks, token_map):
        monkeypatch.setattr(backend, "CHUNK", 8)
    monkeypatch.setattr(one_layer, "CHUNK_OF_ONE_LAYER", 8)


def assert_as_by_hooks(model, prompts, masks, method):
    predictor = hooked_predictor(model)
    found = predictor_of(model).run(prompts, masks, method=method)
    values = replacements(predictor, prompts, method)
    expected = torch.stack([by_hooks(predictor, prompts, heads, values) for heads in masks])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert (found[1:] - found[0]).abs().amax((1, 2)).min() > 1e-4


def test_errors_are_those_of_independent_units(few):
    model = random_model()
    masks = [[], [(1, 1)]]
    for method, size in (("zero", 30), ("resample", 15)):
        predictions = predictor_of(model).run(few, masks, method=method)
        squares = (predictions - few.y_query_clean).square().mean(2)
        errors = values_under(
            predictor_of(model), few, [Mask(tuple(heads)) for heads in masks], method=method
        )
        assert errors.shape == (size, 2)
        assert errors[:, 1].mean() == pytest.approx(squares[1].mean().item(), rel=1e-12)
    assert errors[3, 0] == pytest.approx(squares[0, 6:8].mean().item(), rel=1e-12)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("law", [{}, None], ids=str)
def test_masks_of_shallow_models_and_of_a_bridge_equal_runs_with_hooks(law, method, few):
    if law is None:
        masks = [[(layer, head % 2) for layer, head in heads] for heads in MASKS]
        assert_as_by_hooks(random_gpt2(), few, masks, method)
        return
    for n_layers in (1, 2):
        heads = [(layer, head) for layer in range(n_layers) for head in range(4)]
        masks = [[], *([head] for head in heads), heads[1:], heads]
        assert_as_by_hooks(random_model(n_layers, **law), few, masks, method)


def test_masks_that_cannot_run_are_refused(few):
    model = random_model()
    with refused("blocks.1.attn.hook_z", 3, 9):
        model.run_with_hooks(few.tokens, fwd_hooks=mask_heads([(1, 2), (1, 9)]))
    with refused("L2H1", "blocks.2.attn.hook_z never fired"), masked(model, [(0, 0), (2, 1)]):
        model(few.tokens, stop_at_layer=2)
    with pytest.raises(RuntimeError, match="own"), masked(model, [(0, 0)]):
        raise RuntimeError("own")
    with refused("3 layers of 4 heads", "L0H4"), masked(model, [(0, 0), (0, 4)]):
        raise AssertionError("the block must not run")
    with refused("counted from 0", "L0H-1"):
        mask_heads([(0, 0), (0, -1)])
    with refused("even", 29):
        predictor_of(model).run(few[:29], method="resample")
    with refused("model", "Linear", "hook_module"):
        masked_errors(torch.nn.Linear(2, 2), few, [[]])
    read = {"embed": lambda prompts: prompts.tokens, "read": lambda output: output[:, -1]}
    with refused("3 layers", "blocks.2.attn.hook_z"):
        HookedPredictor(random_model(2), n_layers=3, n_heads=4, **read)


def own_gpt2() -> ICLTransformer:
    return random_model(3, 2, **GPT2)


def square_errors(predictions: Tensor, prompts: Prompts) -> Tensor:
    return (predictions - prompts.y_query_clean).square().mean(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "method"), [*((random_model, method) for method in METHODS), (own_gpt2, "mean")]
)
def test_a_head_is_masked_at_one_position(make, method, few):
    model, even = make(), few[:8].prefix(4)
    found = ablate(model, even, what="positions", method=method)
    n_layers, n_heads, n_pos = found.rise.shape
    assert found.rows["pos"].nunique() == n_pos == model.tokens(even).shape[1]
    _, cache = model.run_with_cache(even)
    full = square_errors(model.predict(even), even)
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
        rise = (square_errors(masked, even) - full).mean().item()
        assert found.rise[layer, head, at] == pytest.approx(rise, rel=1e-8, abs=1e-12)
    assert found.rise[:-1].any()
    assert len(found.to_frame()) == found.rise.size
    assert found.plot().data[0].z.shape == (n_layers * n_heads, n_pos)


def test_in_one_layer_the_query_alone_counts(few):
    model = random_model(1)
    by_position = ablate(model, few, what="positions")
    np.testing.assert_allclose(
        by_position.rise[..., -1], ablate(model, few, what="heads").rise, rtol=1e-9
    )
    np.testing.assert_array_equal(by_position.rise.sum(2), by_position.rise[..., -1])


def test_a_metric_of_ones_own(few):
    model = random_model(2)

    def distance_to_one(predictions: Tensor, prompts: Prompts) -> Tensor:
        return (predictions[:, 0] - 1).abs()

    found = ablate(model, few, metric=distance_to_one, what="heads")
    full = distance_to_one(model.predict(few), few)
    assert found.full_risk == pytest.approx(full.mean().item(), rel=1e-12)
    assert found.null_risk == 1
    with torch.no_grad(), model.hooks(fwd_hooks=mask_heads([(1, 2)])):
        rise = distance_to_one(model.predict(few), few) - full.detach()
    assert found.rise[1, 2] == pytest.approx(rise.mean().item(), rel=1e-9)
    assert found.rise_sem[1, 2] == pytest.approx(rise.std().item() / len(few) ** 0.5, rel=1e-9)
    units = tables_of("ablate", found)["ablation"].units
    assert (units["rise"], units["median_rise"]) == ("", "")
    assert found.metric == "distance to one"
    assert "distance to one" in found.plot().layout.title.text
    pairs = ablate(model, few, metric=distance_to_one, what="pairs")
    both, one, other = (
        distance_to_one(predicted, few).mean().item()
        for predicted in predictor_of(model).run(few, [[(0, 0), (0, 1)], [(0, 0)], [(0, 1)]])
    )
    expected = both - one - other + full.mean().item()
    assert pairs.grid("interaction")[0] == pytest.approx(expected, rel=1e-7)
    greedy = ablate(model, few, metric=distance_to_one, what="greedy")
    assert greedy.grid("risk")[-1] == pytest.approx(1)  # nothing is left: 0


def test_a_greedy_order_by_a_metric_that_is_0_or_negative_needs_all_heads(few):
    """Twice 0 is 0, and no smaller set of heads has it; of negative metrics too the full model counts."""
    model = random_model(2)
    predictor = predictor_of(model)

    def differs(predictions: Tensor, prompts: Prompts) -> Tensor:
        return ((predictions - predictor.predict(prompts)).abs() > 1e-6)[:, 0].double()

    for least in (0, -1):
        found = ablate(
            model, few, metric=lambda *each, least=least: differs(*each) + least, what="greedy"
        )
        assert found.full_risk == least
        assert found.needed == len(predictor_of(model).heads)
        assert repr(found)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"what": "triples"}, ("what", "greedy", "'triples'")),
        ({"method": "median"}, ("method", "resample", "'median'")),
        ({"metric": lambda predictions, prompts: predictions}, ("metric", "[30]", "[30, 1]")),
        ({"metric": "dmmse"}, ("metric='dmmse'", "task")),
        ({"metric": "loss"}, ("metric", "'ridge'", "'loss'")),
        ({"metric": lambda y_hat, prompts: y_hat[:, 0] / 0}, ("metric", "finite", "inf")),
        ({"what": "mlps"}, ("mlps", "MLPs", "attention")),
    ],
)
def test_options_that_do_not_go_together(options, words, few):
    with refused(*words):
        ablate(random_model(2), few, **options)


def test_a_position_or_an_mlp_that_is_not_there_is_refused(few):
    model = own_gpt2()
    n_pos = model.tokens(few).shape[1]
    for options, words in (
        ({"heads": [(0, 0)], "at": n_pos}, ("at", n_pos - 1, n_pos)),
        ({"heads": [], "mlps": [0], "at": -1}, ("at", -1)),
        ({"heads": [], "mlps": [3]}, ("blocks.3.hook_mlp_out",)),
    ):
        with refused(*words), masked(model, **options):
            model.predict(few)
    with masked(model, [(0, 1)], mlps=[1], at=2):
        both = model.predict(few)
    assert not torch.equal(both, model.predict(few))


@pytest.mark.parametrize(("make", "method"), [(own_gpt2, "mean"), (random_gpt2, "zero")])
def test_masks_of_mlps_are_hooks_on_what_they_write(make, method, few):
    source = make()
    hooked = hooked_predictor(source)
    inputs = hooked.inputs(few)
    _, cache = hooked.model.run_with_cache(inputs)
    found = ablate(source, few, what="mlps", method=method)
    full = square_errors(hooked.predict(few), few)
    for layer, name in enumerate(f"blocks.{layer}.hook_mlp_out" for layer in range(3)):
        put = cache[name].mean(0) if method == "mean" else torch.zeros(()).double()
        hook = (name, lambda out, hook, put=put: put.expand_as(out))
        masked_by_hand = hooked.read(hooked.model.run_with_hooks(inputs, fwd_hooks=[hook]))
        rise = (square_errors(masked_by_hand, few) - full).detach()
        sem = rise.std().item() / len(few) ** 0.5
        assert found.rise[layer] == pytest.approx(rise.mean().item(), rel=1e-9)
        assert found.rise_sem[layer] == pytest.approx(sem, rel=1e-9)
    assert tables_of("ablate", found)["mlps"].units["rise"] == "y²"
    assert found.plot().data[0].y.tolist() == found.rise.tolist()


def test_the_distance_to_a_predictor_of_the_task_is_a_metric():
    shipped = load("pool-linear-m4-s0")
    checkpoint = replace(shipped, weights=shipped.weights.to(torch.float64))
    task, prompts = checkpoint.task, draw_prompts(checkpoint.task, 64, dtype=torch.float64)
    for name, learner in (
        ("ridge", partial(ridge, penalty=task.posterior_penalty)),
        ("dmmse", partial(dmmse, pool=task.pool(), noise_var=task.noise_var)),
    ):
        found = ablate(checkpoint, prompts, metric=name, what="heads")
        apart = checkpoint.predictor.run(prompts, [[], [(0, 0)]]) - learner(prompts)
        without = apart.square().mean((1, 2))
        assert (found.metric, found.unit) == (f"distance to {name}", "y²")
        assert found.rise[0, 0] == pytest.approx((without[1] - without[0]).item(), rel=1e-6)
