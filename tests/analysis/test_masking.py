"""Masks: from cached streams against plain runs with hooks, and what is said of masks that do nothing."""

import pytest
import torch

from mechinterp.analysis.ablation.masked_risk import Masking, masked_errors, masked_values
from mechinterp.models.hooked.masks import METHODS, mask_heads, z_name
from mechinterp.models.hooked.runner import HookedPredictor, hooked_predictor, masked
from mechinterp.models.run import general, hooks, one_layer
from mechinterp.models.run import linear as token_map
from mechinterp.models.run.predictor import predictor_of
from tests.deep_models import WIDE, random_gpt2, random_model

MASKS = [
    [],
    [(0, 1)],
    [(1, 3)],
    [(2, 0)],
    [(0, 0), (1, 1), (2, 3)],
    [(0, 2), (2, 2)],
    [(2, 1), (2, 2)],
]
LAWS = [
    {},
    {"biases": True},
    {"attend_to_self": True, "biases": True},
    {"score": "linear", "merged_qk": True, "biases": True},
    {"score": "1+tanh", "d_head": 2},
    *({"score": score, **WIDE} for score in ("softmax", "linear/L", "relu/L")),
]


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
    for backend in (general, hooks, one_layer, token_map):
        monkeypatch.setattr(backend, "CHUNK", 8)


def assert_as_by_hooks(model, prompts, masks, method):
    predictor = hooked_predictor(model)
    found = predictor_of(model).run(prompts, masks, method=method)
    values = replacements(predictor, prompts, method)
    expected = torch.stack([by_hooks(predictor, prompts, heads, values) for heads in masks])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert (found[1:] - found[0]).abs().amax((1, 2)).min() > 1e-4


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("law", LAWS, ids=str)
def test_many_masks_equal_runs_with_hooks(law, method, few):
    assert_as_by_hooks(random_model(**law), few, MASKS, method)


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("method", METHODS)
def test_many_masks_of_a_bridge_equal_runs_with_hooks(method, few):
    masks = [[(layer, head % 2) for layer, head in heads] for heads in MASKS]
    assert_as_by_hooks(random_gpt2(), few, masks, method)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("law", [{}, {"attend_to_self": True, "biases": True}], ids=str)
@pytest.mark.parametrize("n_layers", [1, 2])
def test_shallow_models(n_layers, law, method, few):
    heads = [(layer, head) for layer in range(n_layers) for head in range(4)]
    masks = [[], *([head] for head in heads), heads[1:], heads]
    assert_as_by_hooks(random_model(n_layers, **law), few, masks, method)


def test_hooks_of_the_caller_count(few):
    model = random_model()
    halve = ("blocks.2.attn.hook_pattern", lambda pattern, hook: pattern / 2)
    with model.hooks(fwd_hooks=[halve]):
        found = predictor_of(model).run(few, [[(0, 1)]])[0]
        expected = by_hooks(hooked_predictor(model), few, [(0, 1)])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(found, predictor_of(model).run(few, [[(0, 1)]])[0])


def test_errors_are_those_of_independent_units(few):
    model = random_model()
    masks = [[], [(1, 1)]]
    for method, size in (("zero", 30), ("resample", 15)):
        predictions = predictor_of(model).run(few, masks, method=method)
        squares = (predictions - few.y_query_clean).square().mean(2)
        errors = masked_values(model, few, masks, Masking(method=method))
        assert errors.shape == (size, 2)
        assert errors[:, 1].mean() == pytest.approx(squares[1].mean().item(), rel=1e-12)
    assert errors[3, 0] == pytest.approx(squares[0, 6:8].mean().item(), rel=1e-12)


def test_the_context_masks_and_leaves_nothing_behind(few):
    model = random_model()
    before = model.predict(few)
    with masked(model, [(0, 1), (2, 3)]):
        inside = model.predict(few)
    torch.testing.assert_close(inside, by_hooks(hooked_predictor(model), few, [(0, 1), (2, 3)]))
    assert torch.equal(model.predict(few), before)


@pytest.mark.parametrize(
    ("head", "name"), [((3, 0), "L3H0"), ((0, 4), "L0H4"), ((-1, 0), "L-1H0"), ((0, -1), "L0H-1")]
)
def test_heads_that_do_not_exist_are_refused(head, name, few):
    model = random_model()
    rule = f"heads must lie in 3 layers of 4 heads, counted from 0, got {name}"
    with pytest.raises(ValueError, match=rule), masked(model, [(0, 0), head]):
        raise AssertionError("the block must not run")
    with pytest.raises(ValueError, match=rule):
        predictor_of(model).run(few, [[(0, 0)], [head]])


def test_hooks_of_heads_that_do_not_exist_are_refused(few):
    for head, name in (((0, -1), "L0H-1"), ((-1, 0), "L-1H0")):
        with pytest.raises(ValueError, match=f"heads must be counted from 0, got {name}"):
            mask_heads([(0, 0), head])
    model = random_model()
    rule = r"heads of blocks\.1\.attn\.hook_z must lie in 0 to 3, got 9"
    with pytest.raises(ValueError, match=rule):
        model.run_with_hooks(few.tokens, fwd_hooks=mask_heads([(1, 2), (1, 9)]))


def test_a_mask_that_never_ran_is_named(few):
    model = random_model()
    message = "Masking L2H1 changed nothing: the hook blocks.2.attn.hook_z never fired"
    with pytest.raises(ValueError, match=message), masked(model, [(0, 0), (2, 1)]):
        model(few.tokens, stop_at_layer=2)
    with pytest.raises(RuntimeError, match="own"), masked(model, [(0, 0)]):
        raise RuntimeError("own")


def test_prompts_that_swap_must_be_even_in_number(few):
    with pytest.raises(ValueError, match="there must be an even number, got 29"):
        predictor_of(random_model()).run(few[:29], method="resample")


def test_something_else_than_a_hooked_model_is_refused(few):
    rule = "model must be a checkpoint, an ICLTransformer or a HookedPredictor, got Linear; hook_module"
    with pytest.raises(ValueError, match=rule):
        masked_errors(torch.nn.Linear(2, 2), few, [[]])


def test_a_model_without_the_hooks_is_refused():
    model = random_model(2)
    read = {"embed": lambda prompts: prompts.tokens, "read": lambda output: output[:, -1]}
    with pytest.raises(ValueError, match=r"3 layers must have the hook blocks\.2\.attn\.hook_z"):
        HookedPredictor(model, n_layers=3, n_heads=4, **read)
