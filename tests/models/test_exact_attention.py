"""Attention read by one-hot values is z = A v, for every layer that is linear in its values; others are refused."""

import pytest
import torch
from torch import Tensor, nn

from mechinterp import attention_patterns, hook_module
from mechinterp.analysis.registry import ANALYSES
from mechinterp.config import TaskConfig
from mechinterp.config.model import RECURRENT
from mechinterp.icl.prompts import draw_prompts
from mechinterp.models.hooked.runner import hooked_predictor
from mechinterp.models.run.exact import exact_attention
from mechinterp.models.run.predictor import predictor_of
from tests.conftest import refused
from tests.deep_models import random_model

TASK = TaskConfig(d_x=3, context_length=7)
HEADS, EACH = 2, 4
SCORES = ("softmax", "linear/L", "(1+Cx)^2", *RECURRENT)


class Recurrent(nn.Module):
    """One layer of somebody's own recurrent heads on tokens (x, y), token by token, as a plain module."""

    def __init__(self, rule: str):
        super().__init__()
        self.rule = rule
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(*sizes, bias=False, dtype=torch.float64)
            for sizes in ((4, HEADS * EACH),) * 3 + ((HEADS * EACH, 4),)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = (p(tokens).unflatten(-1, (HEADS, EACH)) for p in self.projections)
        S = H = tokens.new_zeros(len(tokens), HEADS, EACH, EACH)
        outputs = []
        for t in range(tokens.shape[1]):
            key, value = k[:, t, :, :, None], v[:, t, :, None]
            if self.rule in ("gated", "tanh"):
                S = 0.9 * S + key * value
            elif self.rule == "delta":
                S = S + 0.3 * key * (value - key.mT @ S)
            elif self.rule == "gated_delta":
                S = 0.9 * S + 0.3 * key * (value - key.mT @ (0.9 * S))
            elif self.rule == "mesa":
                H, S = H + key * key.mT, S + key * value
            read = S
            if self.rule == "mesa":
                read = torch.linalg.solve(H + torch.eye(EACH, dtype=H.dtype), S)
            z = torch.einsum("bhd,bhdv->bhv", q[:, t], read)
            outputs.append(torch.tanh(z) if self.rule == "tanh" else z)
        return tokens + self.o_proj(torch.stack(outputs, 1).flatten(2))

    @property
    def projections(self) -> tuple[nn.Linear, ...]:
        return self.q_proj, self.k_proj, self.v_proj


class Squared(Recurrent):
    """Values enter squared."""

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = (p(tokens).unflatten(-1, (HEADS, EACH)) for p in self.projections)
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k).tril()
        z = torch.einsum("bhqk,bkhd->bqhd", weights, v.square())
        return tokens + self.o_proj(z.flatten(2))


class Mixed(Recurrent):
    """Each channel of the values has a decay of its own: linear in v, but there is no one A."""

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = (p(tokens).unflatten(-1, (HEADS, EACH)) for p in self.projections)
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k).tril()
        z = torch.einsum("bhqk,bkhd->bqhd", weights, v) * torch.arange(1, EACH + 1)
        return tokens + self.o_proj(z.flatten(2))


class Rectified(Recurrent):
    """Negative values count as 0, and the layer's own are all positive: random values alone tell."""

    def __init__(self):
        super().__init__("")
        self.v_proj = nn.Linear(4, HEADS * EACH, dtype=torch.float64)
        nn.init.constant_(self.v_proj.bias, 20.0)

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = (p(tokens).unflatten(-1, (HEADS, EACH)) for p in self.projections)
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k).tril()
        z = torch.einsum("bhqk,bkhd->bqhd", weights, v.relu())
        return tokens + self.o_proj(z.flatten(2))


def hooked(module: nn.Module):
    return hook_module(module.eval(), n_heads=HEADS, task=TASK)


@pytest.mark.parametrize("score", SCORES)
def test_own_layers_have_the_pattern_of_their_hook(score: str):
    model = random_model(
        n_layers=2, n_heads=2, sizes={"d_x": 3, "d_y": 1}, score=score, d_model=6, d_head=4
    )
    prompts = draw_prompts(TASK, 5, dtype=torch.float64)
    _, cache = model.run_with_cache(prompts)
    for layer in range(2):
        A = exact_attention(hooked_predictor(model), prompts, layer)
        torch.testing.assert_close(A, cache["pattern", layer], rtol=1e-8, atol=1e-10)
        z = torch.einsum("bhqk,bkhd->bqhd", A, cache["v", layer])
        torch.testing.assert_close(z, cache["z", layer], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("rule", RECURRENT)
def test_a_plain_recurrent_module_has_an_exact_pattern(rule: str):
    module = Recurrent(rule)
    own = hooked(module)
    prompts = draw_prompts(TASK, 5, dtype=torch.float64)
    predictor = predictor_of(own)
    assert "blocks.0.attn.hook_pattern" not in predictor.hooked.model.hook_dict
    before = set(predictor.hooked.model.hook_dict)
    A = exact_attention(predictor.hooked, prompts, 0)
    assert set(predictor.hooked.model.hook_dict) == before
    v = module.v_proj(prompts.tokens).unflatten(-1, (HEADS, EACH))
    z = torch.einsum("bhqk,bkhd->bqhd", A, v)
    _, noted = predictor.hooked.run_noting(
        predictor.hooked.inputs(prompts), ["blocks.0.attn.hook_z"]
    )
    torch.testing.assert_close(z, noted["blocks.0.attn.hook_z"], rtol=1e-5, atol=1e-8)
    assert not A.triu(1).any()
    found = attention_patterns(own, prompts)
    last = A[:, :, -1].numpy(force=True)
    assert found.pattern.shape == last.shape
    assert abs(found.pattern - last).max() < 1e-9
    assert ANALYSES["attention-patterns"].needs(own)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Recurrent("tanh"), ("linear in its values", "limit 1e-09")),
        (Squared(""), ("linear in its values", "limit 1e-09")),
        (Mixed(""), ("each channel", "limit 1e-09")),
    ],
)
def test_other_layers_are_refused_by_the_number(module: nn.Module, words: tuple[str, ...]):
    own = hooked(module)
    with refused(*words):
        attention_patterns(own, draw_prompts(TASK, 5, dtype=torch.float64))
    assert not ANALYSES["attention-patterns"].needs(own)


def test_random_values_tell_what_the_own_values_do_not():
    own = predictor_of(hooked(Rectified()))
    with refused("random values", "limit 1e-09"):
        exact_attention(own.hooked, draw_prompts(TASK, 5, dtype=torch.float64), 0)
