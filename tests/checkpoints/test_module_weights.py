"""Hooked modules whose state dict is read and proven by the module's own predictions: labels, circuits, edits, and what stays unproven."""

import re
import time
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
from mechinterp.checkpoints.foreign.readings.recorded import EXACT
from mechinterp.checkpoints.modules.function import deviation
from mechinterp.checkpoints.modules.weights import (
    MOST_READINGS,
    _recordings,
    _renumbered,
    by_weights,
    proof_of,
)
from mechinterp.models.constructions.one_layer import debiased_gradient_step
from tests.checkpoints import strange_modules as strange
from tests.checkpoints.files import loaded
from tests.checkpoints.strange_modules import Grouped, Rotary, Stack, random
from tests.checkpoints.test_wrapped_modules import Int8, Lora, Pairs, wrapped
from tests.models.test_layered_models import garg

TASK = TaskConfig(d_x=3, context_length=6)
WIDE = TaskConfig(d_x=5)


class Own(nn.Module):
    """One layer of attention as a stranger writes it, the query reads the context; linear over L, or softmax of given scale."""

    factor: float | torch.Tensor = 1.0

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
        scores = self.factor * q @ k.mT
        pattern = torch.softmax(scores, -1) if self.softmax else scores / k.shape[2]
        y = self.o_proj((pattern @ v).transpose(1, 2).flatten(2))[:, -1, -1:]
        return y + 0.3 * y.sin() if self.bent else y


class Tempered(Own):
    """A trained factor on the scores, and a stored mask that nothing uses."""

    def __init__(self, *sizes, **settings):
        super().__init__(*sizes, **settings)
        self.log_temperature = nn.Parameter(torch.zeros(()))
        self.register_buffer("causal", torch.ones(7, 7).tril())

    @property
    def factor(self):
        return self.log_temperature.exp()


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


def of(make, number: int = 2) -> list[nn.Module]:
    return [make() for _ in range(number)]


class GroupedRotary(Grouped):
    """Shared keys under rotary positions, whose hook point is left out."""

    def forward(self, x):
        q, k = strange.split(self.q_proj(x), 4), strange.split(self.k_proj(x), 2)
        q, k = (Rotary.turned(self, each) for each in (q, k))
        v = strange.split(self.v_proj(x), 2)
        return self.o_proj(strange.joined(strange.attend(q, k, v, is_causal=True, enable_gqa=True)))


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
    "of xs and ys": lambda: random(Pairs()),
    "linear, n - 1 of n keys": lambda: random(Stack(*of(strange.LinearAttention), norm=True)),
    "strict linear": lambda: random(Stack(*of(lambda: strange.LinearAttention(strict=True)))),
    "context keys": lambda: random(Stack(*of(strange.ContextKeys))),
    "norm of the MLP alone": lambda: random(Stack(*of(Grouped))),
    "rotary": lambda: random(Stack(*of(Rotary), norm=True)),
    "grouped rotary": lambda: random(Stack(*of(GroupedRotary), norm=True)),
    "looped rotary": lambda: random(Stack(Rotary(), runs=3, norm=True)),
    "torch, positions first": lambda: random(Stack(*of(lambda: strange.Torchs(False)))),
    "parameters": lambda: random(Stack(*of(strange.Parameters))),
    "a module for each head": lambda: random(Stack(*of(strange.Heads))),
    "temperature": lambda: random(Tempered(4, 3, softmax=True)),
    "three layers": lambda: random(Stack(Grouped(), Grouped(), Grouped("is_causal"))),
}


UNPROVEN = [
    lambda: Own(4, bent=True),
    lambda: Stack(strange.Differential(), strange.Differential()),
    lambda: Stack(strange.WithSink()),
    lambda: Stack(Grouped(), strange.Parameters(), Grouped()),
]


@pytest.mark.parametrize("kind", KINDS)
def test_proven_weights_predict_like_the_module_whole_and_with_heads_masked(kind):
    hooked = hook_module(KINDS[kind](), task=TASK)
    weights = proof_of(hooked).weights
    assert weights is not None
    shorter = replace(TASK, context_length=4)
    for task in (TASK, shorter):
        prompts = sample_prompts(task, 64, seed=5, dtype=weights.dtype)
        masks = [[], *([head] for head in predictor_of(hooked).heads)]
        ours, theirs = (predictor_of(each).run(prompts, masks) for each in (weights, hooked))
        for one, other in zip(theirs, ours, strict=True):
            assert deviation(theirs[0], theirs[0] + one - other) <= EXACT


@pytest.mark.parametrize("make", UNPROVEN)
def test_modules_that_no_reading_predicts_have_no_weights_by_name(make):
    """A bent prediction, differential attention, a softmax with a sink, and layers that read different keys."""
    hooked = hook_module(random(make()), task=TASK)
    found = proof_of(hooked)
    assert found.weights is proof_of(hooked).weights is predictor_of(hooked).weights is None
    assert found.why
    assert not found.readings


@pytest.mark.parametrize("make", UNPROVEN)
def test_a_failed_proof_is_bounded_in_readings_and_costs_less_than_a_second(make):
    hooked = hook_module(random(make()), task=TASK)
    found, start = proof_of(hooked), time.process_time()
    again = proof_of(hooked)
    assert time.process_time() - start < 1
    assert found.why == again.why
    tried = re.search(r"(\d+) readings? tried", found.why)
    assert tried is None or int(tried[1]) <= MOST_READINGS


class Shares(Own):
    """Heads of equal queries, keys and values, whose outputs are multiplied by fixed numbers."""

    def __init__(self, shares: list[float]):
        super().__init__(4, len(shares))
        self.register_buffer("shares", torch.tensor(shares).repeat_interleave(4))
        self.o_proj.register_forward_pre_hook(lambda _, args: (args[0] * self.shares,))


def test_heads_that_are_numbered_otherwise_get_the_modules_numbers():
    """Parts .2, .3, .5 of the file are .3, .2, .5 in the module, so that the whole predictions agree."""
    module = with_circuits(Shares([1.5, 2 / 3, 1.0]), [1.0] * 3, [0.2, 0.3, 0.5])
    hooked = hook_module(module, task=TASK)
    np.testing.assert_allclose(circuits(hooked).mu[0, :, 0], [0.3, 0.2, 0.5], rtol=1e-5)


@pytest.mark.parametrize(("share", "proven"), [(1.0005, True), (1.02, False), (1.5, False)])
def test_a_head_that_is_subtly_different_is_not_called_proven(share, proven):
    """One head gives to the other, so that the whole predictions agree; the limit is 1e-3 of their standard deviation."""
    module = with_circuits(Shares([share, 2 - share, 1.0]), [1.0] * 3, [0.25, 0.25, 0.5])
    found = proof_of(hook_module(module, task=TASK))
    assert bool(found.readings) is proven
    assert proven or "each head masked" in found.why


@pytest.mark.parametrize("factor", [1.01, 0.5])
def test_a_head_of_another_scale_is_not_proven(factor):
    """The file does not show the factor on the queries of head 0."""

    class Scaled(Own):
        def forward(self, x):
            rows = torch.ones(12)
            rows[:4] = factor
            hook = self.q_proj.register_forward_hook(lambda _, args, output: output * rows)
            try:
                return super().forward(x)
            finally:
                hook.remove()

    assert proof_of(hook_module(random(Scaled(4, 3, softmax=True)), task=TASK)).weights is None


def one_length(module: Own) -> Own:
    def require(_, args):
        if args[0].shape[1] != TASK.context_length + 1:
            raise ValueError("7 tokens are needed")

    module.register_forward_pre_hook(require)
    return module


def test_a_module_of_one_length_leaves_the_division_open_and_its_label_stands():
    """1/L is a fixed number there; both readings are named, and both are a step of gradient descent."""
    module = one_length(with_circuits(Own(4), [1.0], [0.8]))
    hooked = hook_module(module, task=TASK)
    found = proof_of(hooked)
    assert {each.tried["score"] for each in found.readings} == {"linear", "linear/L"}
    (scores, scales) = found.open
    assert scores == "--score linear/L or --score linear"
    assert "--scale 1" in scales
    assert classify(hooked).label == "linear_gd"
    assert len(by_weights(hooked).readings) == 2


def test_proven_readings_of_different_labels_leave_the_module_undetermined():
    """The second reading has no circuits; the setting that decides is named."""
    hooked = hook_module(one_length(with_circuits(Own(4), [1.0], [0.8])), task=TASK)
    predictor = by_weights(hooked)
    first, second = predictor.readings
    other = replace(
        second, build=lambda: second.build().with_tensors({"attn.W_O": 0 * second.weights.W_O})
    )
    found = classify(replace(predictor, readings=(first, other)))
    assert found.label == "undetermined"
    assert "--score" in found.reason


def test_a_name_too_is_the_one_on_which_all_proven_readings_agree():
    hooked = hook_module(one_length(with_circuits(Own(4), [1.0], [0.8])), task=TASK)
    agreed = name_algorithm(hooked, n_prompts=64)
    first, second = by_weights(hooked).readings
    alone = name_algorithm(first.weights, task=TASK, n_prompts=64)
    assert (agreed.label, agreed.reason) == (alone.label, alone.reason)
    assert agreed.label == "gradient_descent"
    other = replace(
        second, build=lambda: second.build().with_tensors({"attn.W_O": 0 * second.weights.W_O})
    )
    for readings, of_first in (((first, other), "gradient_descent"), ((other, first), "")):
        source = replace(by_weights(hooked), own=readings[0].weights, readings=readings)
        found = name_algorithm(source, n_prompts=64)
        assert (found.label, found.why, found.mechanism) == ("undetermined", "readings", "undetermined")  # fmt: skip
        assert "--score" in found.reason
        assert "gradient_descent for" in found.reason
        assert found.nearest == of_first
        assert not found.evidence().get("scalar_sems", ())
        assert "" not in set(found.to_frame().why_not)
        assert found.sentences()[0].startswith("The label is undetermined: ")


def test_heads_get_the_numbers_of_the_module_and_must_be_masked_alike():
    # Heads of equal QK can share what they write in any parts: the whole prediction does not show them.
    parts = [0.2, 0.3, 0.5]
    hooked = hook_module(with_circuits(Own(4, 3), [1.0] * 3, parts), task=TASK)
    own, recorded = proof_of(hooked).weights, _recordings(hooked)[0]
    np.testing.assert_allclose(circuits(own).mu[0, :, 0], parts, rtol=1e-6)
    turned = own.with_tensors({"attn.W_O": own.W_O[:, [2, 0, 1]]})
    again = _renumbered(hooked, turned, recorded)
    np.testing.assert_allclose(circuits(again).mu[0, :, 0], parts, rtol=1e-6)
    other = own.W_O.clone()
    other[0, :2] = other[0, :2].mean(0)
    assert _renumbered(hooked, own.with_tensors({"attn.W_O": other}), recorded) is None


def test_hooks_of_the_user_are_not_bypassed():
    hooked = hook_module(with_circuits(Own(4), [1.0], [0.8]), task=TASK)
    assert proof_of(hooked).weights is not None
    with hooked.model.hooks(fwd_hooks=[("blocks.0.attn.hook_z", lambda z, hook: 2 * z)]):
        assert proof_of(hooked).weights is None


@pytest.mark.slow
def test_the_page_of_a_proven_module_shows_its_circuits(tmp_path):
    hooked = hook_module(with_circuits(Own(4), [1.0], [0.8]), task=TASK)
    report = write_report(hooked, tmp_path / "page", n_prompts=64)
    assert {"circuits.csv", "heads.csv"} <= {file.name for file in report.tables}
    assert "linear_gd" in report.verdict


def test_a_file_may_state_linear_scores_over_the_pairs(tmp_path):
    """All L + 1 tokens are keys, and the scores are divided by L, at any length."""
    state = {f"{x}_proj.weight": part.weight for x, part in zip("qkvo", of(square, 4), strict=True)}
    stated = {"score": "linear/pairs", "scale": 1.0, "attend_to_self": True}
    stated |= {"columns": "x,y", "sign": "plus", "n_heads": 1, "d_x": 3}
    checkpoint = loaded(tmp_path, state, **stated)
    for length in (6, 4):
        task = replace(TASK, context_length=length)
        prompts = sample_prompts(task, 8, seed=0, dtype=torch.float64)
        q, k, v = (prompts.tokens @ state[f"{x}_proj.weight"].T for x in "qkv")
        expected = (q @ k.mT / length) @ v @ state["o_proj.weight"].T
        torch.testing.assert_close(predictor_of(checkpoint).predict(prompts), expected[:, -1, -1:])


def square() -> nn.Module:
    return nn.Linear(4, 4, bias=False).double().requires_grad_(False)


@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_layer_alone_is_proven_with_its_norms_and_mlp(norm_first: bool):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, norm_first=norm_first).eval()
    weights = proof_of(hook_module(layer, task=TaskConfig())).weights
    assert weights is not None
    assert (weights.model.norm, weights.model.d_mlp) == ("before" if norm_first else "after", 8)
