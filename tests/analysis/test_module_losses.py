"""Learning coefficients of modules: values that are known, and gradients that are autograd's."""

import time

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mechinterp import evaluation_prompts, hook_module, load, local_learning_coefficient
from mechinterp.analysis.one_layer.linear_components import heads_of_linear
from mechinterp.analysis.training.learning_coefficient import warn_of_long
from mechinterp.analysis.training.local_losses import (
    module_loss,
    population_loss,
    predictor_loss,
)
from mechinterp.analysis.training.sampler import Chains, LocalLoss, Tempered
from mechinterp.config import TaskConfig
from mechinterp.models.run.predictor import predictor_of
from mechinterp.training.linear.trainer import task_moments
from tests.conftest import CHECKPOINTS

CHAINS = Chains(n_chains=4, n_draws=200, n_warmup=100, n_leapfrog=8)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def fitted(module: nn.Module, xs: Tensor):
    """The loss of a module on targets that it meets exactly."""
    ys = module(xs).detach()
    return lambda module: (module(xs) - ys).square().mean()


class Sum(nn.Module):
    """w . (x_1, x_2, x_1 + x_2) + v . x: the loss is quadratic in 2 directions of w, and in all of v."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = (nn.Parameter(drawn(n, seed=n)) for n in (3, 4))

    def forward(self, xs: Tensor) -> Tensor:
        three = torch.stack([xs[:, 0], xs[:, 1], xs[:, 0] + xs[:, 1]], 1)
        return three @ self.w + xs @ self.v


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "exact"), [("*", 2.0), ("w", 1.0), ("v", 2.0), ("v[1]", 0.5)])
def test_a_quadratic_has_half_of_its_rank(weights: str, exact: float):
    module = Sum()
    loss = fitted(module, drawn(128, 4))
    found = local_learning_coefficient(module, loss=loss, weights=weights, chains=CHAINS, seed=1)
    assert found.is_minimum
    assert abs(found.estimate - exact) < 4 * found.sem
    assert found.sem < 0.15 * exact


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(3, 2), nn.Linear(2, 1)
        for seed, parameter in enumerate(self.parameters()):
            parameter.data = drawn(*parameter.shape, seed=seed)

    def forward(self, xs: Tensor) -> Tensor:
        return self.out(torch.tanh(self.into(xs)))


@pytest.mark.slow
def test_a_small_mlp_at_a_regular_minimum_has_half_of_its_entries():
    module, xs = Mlp().double(), drawn(256, 3)
    loss = fitted(module, xs)
    point = list(module.parameters())
    rows = []
    for x in xs:
        rows.append(
            torch.cat([g.flatten() for g in torch.autograd.grad(module(x[None]).sum(), point)])
        )
    assert torch.linalg.matrix_rank(torch.stack(rows)) == 11
    found = local_learning_coefficient(module, loss=loss, chains=CHAINS, n_beta=1e7)
    assert found.sampled == "11 entries: *"
    assert abs(found.estimate - 5.5) < 4 * found.sem
    assert found.sem < 0.5


class Linear(nn.Module):
    """The matrix of heads of linear attention, with the loss of the population."""

    def __init__(self, heads, moments) -> None:
        super().__init__()
        self.v, self.K, self.Q = (nn.Parameter(torch.tensor(getattr(heads, n))) for n in "vKQ")
        self.moments = {n: torch.tensor(getattr(moments, n)) for n in ("zz", "yz", "yy")}

    def forward(self) -> Tensor:
        M = torch.einsum("h,hri,hrj->ij", self.v, self.K, self.Q).flatten()
        zz, yz, yy = self.moments["zz"], self.moments["yz"], self.moments["yy"]
        return yy - 2 * M @ yz.flatten() + M @ zz.reshape(M.numel(), -1) @ M


@pytest.mark.slow
def test_linear_attention_as_a_module_has_its_exact_loss_and_coefficient():
    checkpoint = load(CHECKPOINTS / "linear-separate-s0")
    heads, moments = heads_of_linear(checkpoint.weights), task_moments(checkpoint.task)
    module = Linear(heads, moments)
    own, expected = module_loss(module, lambda module: module()), population_loss(heads, moments)
    points = own.at + 0.1 * np.random.default_rng(0).standard_normal((5, own.at.size))
    losses, gradients = own.function(points)
    stated, slopes = expected.function(points)
    np.testing.assert_allclose(losses, stated, rtol=1e-10)
    np.testing.assert_allclose(gradients, slopes, rtol=1e-8, atol=1e-10)
    found = local_learning_coefficient(module, loss=lambda module: module(), chains=CHAINS)
    assert abs(found.estimate - expected.exact) < 4 * found.sem


@pytest.mark.parametrize("pattern", ["blocks.1.attn.W_*[1]", "blocks.0.mlp.*", "unembed.W_U"])
def test_gradients_of_gpt2_are_those_of_autograd(pattern: str):
    checkpoint = load(CHECKPOINTS / "pool-gpt2-none-s0")
    prompts = evaluation_prompts(checkpoint, n_prompts=16).to(torch.float64)
    loss = predictor_loss(checkpoint, prompts, weights=pattern)
    (value,), (gradient,) = loss.function(loss.at[None])
    hooked = predictor_of(checkpoint.weights.to(torch.float64)).hooked
    error = (hooked.predict(prompts) - prompts.y_query).square().mean()
    error.backward()
    assert value == pytest.approx(error.item(), rel=1e-10)
    named = dict(hooked.model.named_parameters())
    expected = {
        "blocks.1.attn.W_*[1]": [named[f"blocks.1.attn.W_{n}"].grad[1] for n in "QKVO"],
        "blocks.0.mlp.*": [p.grad for n, p in named.items() if n.startswith("blocks.0.mlp.")],
        "unembed.W_U": [named["unembed.W_U"].grad],
    }[pattern]
    flat = np.sort(torch.cat([each.flatten() for each in expected]).numpy(force=True))
    np.testing.assert_allclose(np.sort(gradient), flat, rtol=1e-8, atol=1e-12)


class Branching(Mlp):
    """Control flow that reads a number, which vmap refuses."""

    def forward(self, xs: Tensor) -> Tensor:
        return super().forward(xs) if self.out.bias.item() < 1e9 else xs


def test_a_module_that_runs_one_by_one_has_the_same_loss():
    xs = drawn(32, 3)
    plain, branching = Mlp(), Branching()
    own, other = (module_loss(m, fitted(m, xs)) for m in (plain, branching))
    points = own.at + 0.1 * np.random.default_rng(0).standard_normal((3, own.at.size))
    for mine, theirs in zip(own.function(points), other.function(points), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-10)


@pytest.mark.slow
def test_a_hooked_module_is_sampled_by_its_own_names():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).double()
    task = TaskConfig(d_x=3, context_length=6)
    hooked = hook_module(layer, task=task)
    prompts = evaluation_prompts(hooked, n_prompts=8)
    loss = predictor_loss(hooked, prompts, weights="linear1.*")
    assert loss.sampled == "40 entries: linear1.*"
    (value,), _ = loss.function(loss.at[None])
    own = hooked.predict(prompts) - prompts.y_query
    assert value == pytest.approx(own.square().mean().item(), rel=1e-9)
    found = local_learning_coefficient(hooked, prompts, weights="linear1.*", chains=CHAINS)
    assert not found.is_minimum  # random weights


def test_a_warning_comes_before_ten_minutes_of_drawing():
    def slow(points):
        time.sleep(0.01)
        return (points**2).sum(1), 2 * points

    loss = LocalLoss(slow, np.zeros(4), "4 entries: all", "16 prompts")
    with pytest.warns(UserWarning, match="about 1. minutes.*n_prompts"):
        warn_of_long(Tempered(loss, 1e4, 1.0), Chains(2, 3000, 500, 20))
    warn_of_long(Tempered(loss, 1e4, 1.0), Chains(2, 300, 50, 20))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weights": "nothing"}, "weights must match parameters .*into.weight.*'nothing'"),
        ({"weights": "into.weight[2]"}, "entry below .*2.* of into.weight, got 2"),
        ({"loss": lambda module: module(drawn(4, 3))}, r"tensor without axes, got \[4, 1\]"),
        ({"loss": lambda module: torch.tensor(1.0)}, "depend on the sampled parameters"),
        ({"loss": lambda module: sum(module.out.bias) * torch.rand(())}, "the same at each call"),
        ({"sampled_heads": [0]}, "loss must stand without sampled_heads"),
    ],
)
def test_what_it_refuses(changed: dict, message: str):
    module = Mlp()
    given = {"loss": fitted(module, drawn(8, 3)), **changed}
    with pytest.raises(ValueError, match=message):
        local_learning_coefficient(module, **given)


def test_a_module_without_a_loss_must_be_hooked():
    with pytest.raises(ValueError, match="hook_module"):
        local_learning_coefficient(Mlp())
