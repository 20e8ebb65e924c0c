"""Hooked modules whose state dict is read and proven by the module's own predictions: labels, circuits, edits, and what stays unproven."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from mechinterp import (
    TaskConfig,
    circuits,
    classify,
    hook_module,
    name_algorithm,
    predictor_of,
    sample_prompts,
    write_report,
)
from mechinterp.checkpoints.foreign.recorded import EXACT
from mechinterp.checkpoints.module_function import deviation
from mechinterp.checkpoints.module_weights import _recordings, _renumbered, proven_weights
from mechinterp.models.constructions.one_layer import debiased_gradient_step
from tests.checkpoints.strange_modules import Grouped, Rotary, Stack, random
from tests.checkpoints.test_wrapped_modules import Int8, Lora, Pairs, wrapped
from tests.models.test_layered_models import garg

TASK = TaskConfig(d_x=3, context_length=6)
WIDE = TaskConfig(d_x=5)


class Own(nn.Module):
    """One layer of attention as a stranger writes it, the query reads the context; linear over L, or softmax of given scale."""

    def __init__(
        self, width: int = 4, heads: int = 1, *, softmax: bool = False, bent: bool = False
    ):
        super().__init__()
        parts = (nn.Linear(width, heads * width, bias=False) for _ in "qkv")
        self.q_proj, self.k_proj, self.v_proj = parts
        self.o_proj = nn.Linear(heads * width, width, bias=False)
        self.n_heads, self.softmax, self.bent = heads, softmax, bent

    def forward(self, x):
        q = self.q_proj(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        k, v = (
            part(x)[:, :-1].unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for part in (self.k_proj, self.v_proj)
        )
        scores = q @ k.mT
        pattern = torch.softmax(scores, -1) if self.softmax else scores / k.shape[2]
        y = self.o_proj((pattern @ v).transpose(1, 2).flatten(2))[:, -1, -1:]
        return y + 0.3 * y.sin() if self.bent else y


def with_circuits(module: Own, omega: list[float], mu: list[float]) -> Own:
    """The module with QK = omega times the identity on x, and OV = mu on y, for each head."""
    width = module.q_proj.in_features
    x, y = torch.eye(width), torch.zeros(width, width)
    x[-1, -1], y[-1, -1] = 0, 1
    with torch.no_grad():
        module.q_proj.weight.copy_(torch.cat([each * x for each in omega]))
        module.k_proj.weight.copy_(torch.cat([x] * len(omega)))
        module.v_proj.weight.copy_(torch.cat([y] * len(omega)))
        module.o_proj.weight.copy_(torch.cat([each * y for each in mu], 1))
    return module.requires_grad_(False)


def test_exact_linear_descent_is_named_and_an_edit_of_the_module_counts():
    hooked = hook_module(with_circuits(Own(6), [1.0], [0.8]), task=WIDE)
    assert classify(hooked).label == "linear_gd"
    found = circuits(hooked)
    np.testing.assert_allclose(found.omega, np.ones((1, 1, 5)), rtol=1e-6)
    np.testing.assert_allclose(found.mu, [[[0.8]]], rtol=1e-6)
    assert name_algorithm(hooked, n_prompts=64).label == "gradient_descent"
    hooked.model.module.o_proj.weight *= 0.5
    np.testing.assert_allclose(circuits(hooked).mu, [[[0.4]]], rtol=1e-6)
    hooked.model.module.bent = True
    assert classify(hooked).label == "undetermined"
    with pytest.raises(
        ValueError, match="no reading of this module's state dict predicts"
    ) as caught:
        circuits(hooked)
    assert "\n" not in str(caught.value)


def test_a_softmax_pair_has_the_labels_and_circuits_of_the_same_weights():
    own = debiased_gradient_step(0.88, 0.05, d_x=5)
    (omega,), (mu,) = circuits(own).omega.mean(2), circuits(own).mu[..., 0]
    hooked = hook_module(with_circuits(Own(6, 2, softmax=True), [*omega], [*mu]), task=WIDE)
    one, other = (classify(each, task=WIDE) for each in (hooked, own))
    assert one.label == other.label == "debiased_gd"
    assert one.labels == other.labels
    np.testing.assert_allclose(circuits(hooked).omega, circuits(own).omega, rtol=1e-5)
    np.testing.assert_allclose(circuits(hooked).mu, circuits(own).mu, rtol=1e-5)


def encoder(**settings) -> nn.Module:
    layers = (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **settings) for _ in range(2))
    return random(nn.Sequential(nn.Linear(4, 8), *layers, nn.Linear(8, 1)))


class OfPairs(nn.Module):
    """Garg's GPT-2, called with tokens; it reads x and y in turn."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inside = garg(n_layer=2, n_head=2)

    def forward(self, tokens):
        return self.inside(tokens[..., :3], tokens[..., 3:])


KINDS = {
    "norm after": lambda: encoder(activation="relu"),
    "norm before": lambda: encoder(activation="gelu", norm_first=True),
    "grouped": lambda: random(Stack(Grouped(), Grouped(), norm=True)),
    "LoRA": lambda: wrapped(random(Stack(Rotary(), norm=True)), Lora).double(),
    "int8": lambda: wrapped(random(Stack(Grouped(), norm=True)), Int8),
    "GPT-2": OfPairs,
    "one layer": lambda: random(Own(4, 2)),
    "softmax": lambda: random(Own(4, 3, softmax=True)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_proven_weights_predict_like_the_module_whole_and_with_heads_masked(kind):
    hooked = hook_module(KINDS[kind](), task=TASK)
    weights = proven_weights(hooked)
    assert weights is not None
    shorter = replace(TASK, context_length=4)
    for task in (TASK, shorter):
        prompts = sample_prompts(task, 64, seed=5, dtype=weights.dtype)
        masks = [[], *([head] for head in predictor_of(hooked).heads)]
        ours, theirs = (predictor_of(each).run(prompts, masks) for each in (weights, hooked))
        for one, other in zip(theirs, ours, strict=True):
            assert deviation(theirs[0], theirs[0] + one - other) <= EXACT


@pytest.mark.parametrize("make", [Pairs, lambda: Own(4, bent=True), lambda: Stack(Rotary())])
def test_modules_that_no_reading_predicts_have_no_weights_by_name(make):
    """A module of xs and ys without a norm, a bent prediction, and an MLP whose norm has no partner."""
    hooked = hook_module(random(make()), task=TASK)
    assert proven_weights(hooked) is None
    assert predictor_of(hooked).weights is None


def test_heads_get_the_numbers_of_the_module_and_must_be_masked_alike():
    # Heads of equal QK can share what they write in any parts: the whole prediction does not show them.
    parts = [0.2, 0.3, 0.5]
    hooked = hook_module(with_circuits(Own(4, 3), [1.0] * 3, parts), task=TASK)
    own, recorded = proven_weights(hooked), _recordings(hooked)[0]
    np.testing.assert_allclose(circuits(own).mu[0, :, 0], parts, rtol=1e-6)
    turned = own.with_tensors({"attn.W_O": own.W_O[:, [2, 0, 1]]})
    again = _renumbered(hooked, turned, recorded)
    np.testing.assert_allclose(circuits(again).mu[0, :, 0], parts, rtol=1e-6)
    other = own.W_O.clone()
    other[0, :2] = other[0, :2].mean(0)
    assert _renumbered(hooked, own.with_tensors({"attn.W_O": other}), recorded) is None


def test_hooks_of_the_user_are_not_bypassed():
    hooked = hook_module(with_circuits(Own(4), [1.0], [0.8]), task=TASK)
    assert proven_weights(hooked) is not None
    with hooked.model.hooks(fwd_hooks=[("blocks.0.attn.hook_z", lambda z, hook: 2 * z)]):
        assert proven_weights(hooked) is None


@pytest.mark.slow
def test_the_page_of_a_proven_module_shows_its_circuits(tmp_path):
    hooked = hook_module(with_circuits(Own(4), [1.0], [0.8]), task=TASK)
    report = write_report(hooked, tmp_path / "page", n_prompts=64)
    assert {"circuits.csv", "heads.csv"} <= {file.name for file in report.tables}
    assert "linear_gd" in report.verdict
