"""What one does with TransformerLens, step by step as in notebook 9, where the answer is known."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from transformer_lens import patching
from transformer_lens.tools.analysis.attribution_patching import attribution_patch

from mechinterp import Prompts, circuits, load, patch_positions, sample_prompts
from mechinterp.models.hooked.transformer import ICLTransformer
from tests.models.test_transformer_lens import MODELS, N_POS, loaded


@pytest.fixture(params=list(MODELS.values()), ids=list(MODELS))
def shipped(request: pytest.FixtureRequest) -> tuple[ICLTransformer, Prompts]:
    return loaded(request.param)


def turned(prompts: Prompts) -> Prompts:
    """The same prompts, the last first."""
    return Prompts(**{f.name: getattr(prompts, f.name).flip(0) for f in fields(prompts)})


def first_of_query(logits: torch.Tensor) -> torch.Tensor:
    return logits[:, -1, 0].mean()


def test_the_prediction_splits_into_heads_and_grows_layer_by_layer(shipped):
    model, prompts = shipped
    logits, cache = model.run_with_cache(prompts)
    parts, names = cache.stack_head_results(incl_remainder=True, return_labels=True)
    assert names == [*model.all_head_labels, "remainder"]
    direct = cache.logit_attrs(parts, tokens=0)[:, :, -1]
    y_hat = model.predict(prompts)
    torch.testing.assert_close(direct.sum(0), y_hat[:, 0], rtol=1e-4, atol=1e-5)
    lens = cache.logit_lens(positions=-1).readout.values
    torch.testing.assert_close(lens[-1], y_hat, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits[:, -1], y_hat, rtol=0, atol=0)


@pytest.mark.slow
def test_a_sweep_on_numbers_is_patch_positions(shipped):
    model, clean = shipped
    corrupted = turned(clean)
    result = patch_positions(model, clean, corrupted, metric=lambda logits: logits[:, -1, 0])
    with torch.no_grad(), model.numbered(clean, corrupted) as (ids, other):
        _, cache = model.run_with_cache(ids)
        swept = patching.get_act_patch_resid_pre(model, other, cache, first_of_query)
        swept = swept - first_of_query(model(other))
    assert swept.shape == (model.cfg.n_layers, N_POS)
    np.testing.assert_allclose(result.effect, swept.numpy(), rtol=1e-3, atol=1e-5)


def test_a_gradient_says_what_patching_the_last_heads_does(shipped):
    """The prediction is linear in what the last layer's heads write."""
    model, clean = shipped
    corrupted = turned(clean)
    last = model.cfg.n_layers - 1
    model.set_use_zero_mlp(True)
    with model.numbered(clean[:1], corrupted[:1]) as (ids, other):
        scores = attribution_patch(model, ids, other, first_of_query).node_scores
        with torch.no_grad():
            _, cache = model.run_with_cache(ids)
            sweep = patching.get_act_patch_attn_head_out_all_pos
            patched = sweep(model, other, cache, first_of_query) - first_of_query(model(other))
    model.set_use_zero_mlp(False)
    for head in range(model.cfg.n_heads):
        at_all = [s for n, s in scores.items() if (n.layer, n.head) == (last, head)]
        assert sum(at_all) == pytest.approx(patched[last, head].item(), rel=1e-3, abs=1e-5)


def test_a_head_looks_for_what_is_like_the_query_by_the_sign_of_its_omega():
    checkpoint = load("checkpoints/softmax-h2-s0")
    prompts = sample_prompts(checkpoint.task, 256, seed=0)
    again = replace(prompts, x_query=prompts.x[:, 7])
    pattern = checkpoint.model.run_with_cache(again)[1]["pattern", 0][:, :, -1, 7].detach()
    excess = 40 * pattern.mean(0) - 1
    error = 40 * pattern.std(0) / 16
    assert (excess.abs() > 4 * error).all()
    omega = circuits(checkpoint).omega_mean[0]
    np.testing.assert_array_equal(np.sign(excess.numpy()), np.sign(omega))
