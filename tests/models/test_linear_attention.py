"""Linear attention: merged and separate heads against X X^T written out, and merged heads as a hooked model."""

import numpy as np
import pytest
import torch

from mechinterp.config import CovarianceConfig, ModelConfig, TaskConfig
from mechinterp.icl.prompts import Prompts, draw_prompts
from mechinterp.models.constructions.one_layer import linear_attention, one_layer
from mechinterp.models.heads import predict, stack
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.weights import Weights, identity_keys
from mechinterp.theory.linear import Heads, MergedHeads, merged_heads, separate_heads
from tests.conftest import assert_close_to_rounding, assert_same, by_head, refused

KMS = CovarianceConfig(kind="kms", rho=0.5)
TASK = TaskConfig(d_x=4, context_length=31, covariance=KMS, beta_var=1.0, noise_var=0.0)
HEADS: dict[str, Heads] = {
    "merged": merged_heads(8, 4, std=0.7, seed=1),
    "separate rank 1": separate_heads(5, 4, std=0.7, seed=1),
    "separate rank 2": separate_heads(3, 4, std=0.7, seed=1, rank=2),
}
EACH = pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)


@pytest.fixture
def prompts() -> Prompts:
    return draw_prompts(TASK, 64, dtype=torch.float64)


def written_out(heads: Heads, prompts: Prompts) -> np.ndarray:
    """The corner of sum_i (1/N) W_V,i X X^T W_KQ,i X, its zero blocks among it; X [d_model, token], query last."""
    X = prompts.tokens.numpy().transpose(0, 2, 1)
    matrices = heads.U if isinstance(heads, MergedHeads) else np.swapaxes(heads.K, 1, 2) @ heads.Q
    d_x, total = matrices.shape[-1], 0.0
    for v, U in zip(heads.v, matrices, strict=True):
        W_V, W_KQ = np.zeros((2, d_x + 1, d_x + 1))
        W_V[-1, -1], W_KQ[:d_x, :d_x] = v, U
        total = total + W_V @ X @ X.transpose(0, 2, 1) @ W_KQ @ X / (X.shape[2] - 1)
    return np.asarray(total)[:, -1, -1]


@EACH
@pytest.mark.parametrize("slope", [1.0, -0.5])
def test_reduced_form_hooked_model_and_tokens_agree(heads: Heads, slope: float, prompts: Prompts):
    b = np.einsum("bli,bl->bi", prompts.x, prompts.y[..., 0]) / 31
    reduced = np.einsum("bi,ij,bj->b", b, heads.M, prompts.x_query)
    weights = linear_attention(heads, score_slope=slope)
    hooked = ICLTransformer.from_weights(weights, task=TASK).predict(prompts).detach()
    expected = written_out(heads, prompts)
    for actual in (reduced, predict(weights, prompts)[:, 0].numpy(), hooked[:, 0].numpy()):
        assert_close_to_rounding(actual, expected)


@EACH
def test_circuits_are_those_of_the_heads(heads: Heads):
    weights = linear_attention(heads)
    step = torch.einsum("h,hij->ji", weights.mu[:, 0], weights.QK[:, :4, :4])
    assert_close_to_rounding(step, heads.M)
    assert_close_to_rounding(weights.mu[:, 0], heads.v)
    assert_close_to_rounding(weights.ov_last_entry, torch.ones(weights.n_heads).double())
    assert weights.model.merged_qk == isinstance(heads, MergedHeads)


def test_leading_axes_become_heads():
    heads = [merged_heads(3, 4, std=0.7, seed=seed) for seed in range(2)]
    path = MergedHeads(v=np.stack([h.v for h in heads]), U=np.stack([h.U for h in heads]))
    assert_same(linear_attention(path), stack([linear_attention(h) for h in heads]))


@pytest.fixture
def merged() -> Weights:
    return linear_attention(HEADS["merged"])


def test_merged_and_separate_weights_run_alike(merged: Weights, prompts: Prompts):
    of = by_head(merged)
    keys = identity_keys(of["W_QK"])
    separate = one_layer(of["W_QK"], keys, of["W_V"], of["W_O"], score="linear/L")
    models = [ICLTransformer.from_weights(w, task=TASK) for w in (merged, separate)]
    for split in (False, True):
        caches = []
        for model in models:
            model.set_use_split_qkv_input(split)
            caches.append(model.run_with_cache(prompts.tokens)[1])
        assert list(caches[0]) == list(caches[1])
        for name, values in caches[0].items():
            finite = torch.isfinite(values)
            assert torch.allclose(values[finite], caches[1][name][finite], rtol=0, atol=1e-12)


def test_merged_heads_are_as_wide_as_a_token(merged: Weights):
    with refused("d_head", "d_model = 5", "merged_qk"):
        ICLTransformer(ModelConfig(n_heads=2, d_head=3, merged_qk=True), d_x=4, d_y=1)
