"""Modules whose parts have no usual names: what takes the heads' outputs is found by running them."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from mechinterp import TaskConfig, ablate, attention_patterns, hook_module
from mechinterp.icl.prompts import draw_prompts

TASK = TaskConfig(d_x=3, context_length=6)
HEADS, WIDTH = 2, 8


class Layer(nn.Module):
    """Attention of a kind between one matrix `alpha` for queries, keys and values, and one `omega` after it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.alpha = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.omega = nn.Linear(WIDTH, WIDTH)
        self.norm, self.gate = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rise, self.fall = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.by_head = nn.Parameter(torch.randn(HEADS, WIDTH, WIDTH // HEADS))
        self.mix = nn.Linear(HEADS, HEADS)

    def forward(self, stream: Tensor) -> Tensor:
        n, pos, _ = stream.shape
        q, k, v = self.alpha(self.norm(stream)).view(n, pos, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        z = self.attention(q, k, v, stream).transpose(1, 2).reshape(n, pos, WIDTH)
        if self.kind == "gated":
            z = F.rms_norm(z, (WIDTH,)) * torch.sigmoid(self.gate(stream))
        stream = stream + self.omega(z)
        return stream + self.fall(F.gelu(self.rise(stream)))

    def attention(self, q: Tensor, k: Tensor, v: Tensor, stream: Tensor) -> Tensor:
        if self.kind in ("torch", "gated"):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.kind == "weights by head":
            q = torch.einsum("npd,hde->nhpe", stream, self.by_head)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if self.kind == "linear":
            return scores @ v / v.shape[-2]
        if self.kind == "state":
            return q @ (k.transpose(-1, -2) @ v) / v.shape[-2]
        if self.kind == "talking heads":
            scores = self.mix(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return torch.einsum("nhqk,nhkd->nhqd", scores.softmax(-1), v)


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, WIDTH)
        self.middle = nn.ModuleList([Layer(kind), Layer(kind)])
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.first(tokens)
        for layer in self.middle:
            stream = layer(stream)
        return self.last(stream)[:, -1]


KINDS = ["torch", "gated", "softmax", "talking heads", "weights by head", "linear", "state"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_projection_of_the_heads_outputs_is_found_by_its_input(kind: str):
    hooked = hook_module(Model(kind), task=TASK, n_heads=HEADS)
    assert hooked.outputs == ("middle.0.omega", "middle.1.omega")


@pytest.mark.parametrize("kind", ["torch", "talking heads", "linear"])
def test_masking_a_head_found_so_is_cutting_its_columns(kind: str):
    model = Model(kind)
    prompts = draw_prompts(TASK, 16, seed=3)
    loss = ablate(hook_module(model, task=TASK, n_heads=HEADS), prompts, what="heads").to_frame()
    with torch.no_grad():
        before = (model(prompts.tokens) - prompts.y_query_clean).square().mean()
        model.middle[1].omega.weight[:, : WIDTH // HEADS] = 0
        after = (model(prompts.tokens) - prompts.y_query_clean).square().mean()
    rows = loss[(loss["method"] == "zero") & (loss["layer"] == 1) & (loss["head"] == 0)]
    assert float(rows["rise"].iloc[0]) == pytest.approx(float(after - before), rel=1e-4)


def test_the_entropy_of_torchs_own_attention_is_that_of_its_softmax():
    model = Model("torch")
    prompts = draw_prompts(TASK, 4, seed=1)
    seen: list[Tensor] = []
    model.middle[0].alpha.register_forward_hook(lambda *given: seen.append(given[2].detach()))
    model(prompts.tokens)
    q, k, _ = seen[0].view(4, 7, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
    causal = torch.full((7, 7), -torch.inf).triu(1)
    expected = (scores + causal).softmax(-1)[:, :, -1]
    found = attention_patterns(hook_module(model, task=TASK), prompts)
    entropy = -(expected * expected.log()).sum(-1).mean(0)
    assert found.entropy[0] == pytest.approx(entropy.numpy(), abs=1e-6)


class Writing(nn.Module):
    """A model that first scales its input in place."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        tokens *= 2
        tokens[:, -1, -1] = 0
        return self.model(tokens)


def test_a_module_may_write_into_its_input():
    """Neither the trial input, from which the projections are found, nor the caller's tokens change."""
    model = Writing(Model("softmax"))
    hooked = hook_module(model, task=TASK, n_heads=HEADS)
    assert hooked.outputs == ("model.middle.0.omega", "model.middle.1.omega")
    tokens = draw_prompts(TASK, 8, seed=1).tokens
    given = tokens.clone().requires_grad_()
    predictions = hooked.model(given)
    assert torch.equal(given, tokens)
    assert torch.equal(predictions, model(tokens.clone()))
    assert predictions.sum().backward() is None
    assert given.grad.abs().sum() > 0


def test_a_model_without_attention_has_no_such_projection():
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 1))
    with pytest.raises(ValueError, match="outputs must name"):
        hook_module(model, task=TASK)


def test_a_projection_of_the_scores_or_of_the_values_is_none():
    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 8), nn.Linear(7, 8)

        def forward(self, tokens: Tensor) -> Tensor:
            wide = self.one(tokens)
            return self.two(wide @ wide.transpose(-1, -2))[:, -1, -1:]

    with pytest.raises(ValueError, match="outputs must name"):
        hook_module(Scored(), task=TASK, n_heads=1)


def test_a_matrix_of_queries_made_by_a_weight_is_none():
    """Products with weights by head are products of batches, too."""

    class ByHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Parameter(torch.randn(3, HEADS, WIDTH, 4))
            self.leave = nn.Parameter(torch.randn(HEADS, 4, WIDTH))
            self.turn = nn.Linear(4, 4)

        def forward(self, stream: Tensor) -> Tensor:
            q, k, v = torch.einsum("npd,thde->tnhpe", stream, self.enter)
            z = (self.turn(q) @ k.transpose(-1, -2)).softmax(-1) @ v
            return torch.einsum("nhpe,hed->npd", z, self.leave)

    model = nn.Sequential(nn.Linear(4, WIDTH), ByHead(), ByHead())
    with pytest.raises(ValueError, match="outputs must name"):
        hook_module(model, task=TASK, n_heads=HEADS, read=lambda output: output[:, -1, -1:])
