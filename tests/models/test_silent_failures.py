"""What would go wrong without a word: hooks of a zero MLP, gradients and numbers for prompts."""

import pytest
import torch
from torch import Tensor

from mechinterp.models.hooked.transformer import ICLTransformer
from tests import deep_models
from tests.conformance.conftest import sample_inputs
from tests.conftest import refused


def random_model(n_layers: int = 2) -> ICLTransformer:
    sizes = {"d_x": 3, "d_y": 2, "n_ctx": 10}
    return deep_models.random_model(n_layers, 3, sizes=sizes, std=0.4, d_head=4)


def test_zero_mlp_adds_nothing_and_lets_one_be_added():
    model = random_model()
    inputs, _ = sample_inputs(model)
    before = model(inputs)
    model.set_use_zero_mlp(True)
    assert torch.equal(model(inputs), before)
    model.set_use_hook_mlp_in(True)
    added = torch.arange(5.0).double()
    hooks = [("blocks.1.hook_mlp_out", lambda values, hook: values + added)]
    changed = model.run_with_hooks(inputs, fwd_hooks=hooks)
    torch.testing.assert_close(changed, before + added[3:], rtol=1e-12, atol=1e-12)

    def overwrite(values: Tensor, hook) -> None:
        values[:] = 7

    with torch.no_grad():
        kept = model.run_with_hooks(inputs, fwd_hooks=[("blocks.1.hook_mlp_in", overwrite)])
    assert torch.equal(kept, before)


def test_gradient_at_hook_embed_only_where_asked_for():
    model = random_model().requires_grad_(False)
    inputs, _ = sample_inputs(model)
    assert not model(inputs).requires_grad
    gradients = []
    with model.hooks(bwd_hooks=[("hook_embed", lambda gradient, hook: gradients.append(gradient))]):
        model(inputs)[:, -1, 0].sum().backward()
        with torch.no_grad():
            model(inputs)
    assert len(gradients) == 1
    asked = inputs.clone().requires_grad_()
    (expected,) = torch.autograd.grad(model(asked)[:, -1, 0].sum(), asked)
    torch.testing.assert_close(gradients[0], expected, rtol=1e-12, atol=1e-12)
    assert not inputs.requires_grad


def test_numbers_stand_for_prompts_within_the_block_only():
    model = random_model()
    clean, corrupted = sample_inputs(model)
    with model.numbered(clean, corrupted[:2, :4]) as (clean_ids, corrupted_ids):
        assert (clean_ids.shape, corrupted_ids.shape) == ((3, 7), (2, 4))
        assert not set(clean_ids.ravel().tolist()) & set(corrupted_ids.ravel().tolist())
        assert torch.equal(model(clean_ids), model(clean))
        assert torch.equal(model(corrupted_ids), model(corrupted[:2, :4]))
        assert torch.equal(model(clean_ids.flip(0)[:, :5]), model(clean.flip(0)[:, :5]))
        with model.numbered(corrupted) as (inner,):
            assert torch.equal(model(inner), model(corrupted))
        assert torch.equal(model(clean_ids), model(clean))
        assert model.to_tokens(clean_ids) is clean_ids
    with pytest.raises(InterruptedError), model.numbered(clean):
        raise InterruptedError
    with refused("torch.int64"):
        model(clean_ids)
    assert torch.equal(model(model.to_tokens(clean)), model(clean))  # these keep their numbers
