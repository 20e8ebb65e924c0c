"""The local learning coefficient: the sampler on known laws, known values, gradients, modules, and what is no minimum."""

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from analyses.coefficients.sampler import heads_at, moments_of
from mechinterp import hook_module, local_learning_coefficient, sample_prompts
from mechinterp.analysis.one_layer.linear_components import heads_of_linear
from mechinterp.analysis.training import local_losses
from mechinterp.analysis.training.cost_of_chains import Cost
from mechinterp.analysis.training.local_losses import population_loss
from mechinterp.analysis.training.minimum import (
    FALL,
    fall_nearby,
    lowest_nearby,
    why_no_minimum,
)
from mechinterp.analysis.training.module_losses import module_loss, predictor_loss
from mechinterp.analysis.training.prompt_losses import prompts_loss
from mechinterp.analysis.training.sampler import (
    NBETA,
    Chains,
    Langevin,
    LocalLoss,
    MinibatchGradient,
    Tempered,
    effective_draws,
    hamiltonian_draws,
    mean_error,
    r_hat,
)
from mechinterp.checkpoints.load import load
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import draw_prompts, generator_for
from mechinterp.known import suite
from mechinterp.models.run.predictor import predictor_of
from mechinterp.theory.linear import (
    Heads,
    MergedHeads,
    Moments,
    SeparateHeads,
    merged_heads,
    modes,
    separate_heads,
)
from mechinterp.training.linear import unflatten
from mechinterp.training.linear_models import task_moments
from tests.conftest import CHECKPOINTS, refused
from tests.test_doors import as_for_users

SHORT = Chains(n_chains=8, n_draws=120, n_warmup=80, n_leapfrog=16)


@pytest.fixture
def as_users() -> Iterator[None]:
    """Chains call the loss so often that checks of types would take most of the time."""
    with as_for_users():
        yield


def quadratic(
    *curvatures: float,
    exact: float | None = None,
    on_minibatch: MinibatchGradient | None = None,
) -> LocalLoss:
    """sum_i h_i w_i^2 / 2, at its minimum."""
    h = np.array(curvatures)
    return LocalLoss(
        lambda points: ((h * points**2).sum(1) / 2, h * points),
        np.zeros(len(h)),
        f"{len(h)} entries",
        "a quadratic",
        exact,
        on_minibatch=on_minibatch,
    )


def saddle(moments: Moments, n_heads: int) -> SeparateHeads:
    """Heads of which the first holds the first direction; all other weights are 0, and so is the gradient."""
    found, d_x = modes(moments), len(moments.yz)
    K, v = np.zeros((n_heads, 1, d_x)), np.zeros(n_heads)
    v[0], K[0] = found.targets[0], found.vectors[:, 0]
    return SeparateHeads(v=v, K=K, Q=K.copy())


def merged_at(moments: Moments, n_heads: int) -> MergedHeads:
    """Merged heads at the minimum, each with a random share of it."""
    shares = np.random.default_rng(0).uniform(0.5, 1.5, n_heads)
    U = shares[:, None, None] * moments.minimiser() / shares.sum()
    return MergedHeads(v=np.ones(n_heads), U=U)


def central_differences(loss: LocalLoss, entries: np.ndarray, step: float) -> np.ndarray:
    moves = np.zeros((len(entries), loss.at.size))
    moves[np.arange(len(entries)), entries] = step
    up, down = (loss.function(loss.at + sign * moves)[0] for sign in (1, -1))
    return (up - down) / (2 * step)


@pytest.mark.parametrize(
    "heads",
    [
        merged_heads(3, 4, std=0.8, seed=0),
        separate_heads(3, 4, std=0.8, seed=0),
        separate_heads(2, 4, std=0.8, seed=0, rank=3),
    ],
    ids=repr,
)
@pytest.mark.parametrize("sampled", [None, [1]])
def test_the_loss_of_a_population_and_its_gradient_are_those_of_the_moments(
    heads: Heads, sampled: list[int] | None
):
    moments = moments_of(4, "distinct")
    loss = population_loss(heads, moments, sampled_heads=sampled)
    value, gradient = loss.function(np.array([loss.at, 1.1 * loss.at]))
    assert value[0] == pytest.approx(float(moments.loss(heads.M)), rel=1e-12)
    if sampled is None:
        assert value[1] == pytest.approx(float(moments.loss(unflatten(heads, 1.1 * loss.at).M)))
    found = central_differences(loss, np.arange(loss.at.size), 1e-5)
    np.testing.assert_allclose(gradient[0], found, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "name", ["softmax-h2-s0", "linear-h2-s0", "d4s1-linear-h4x5-l4-noise0.1-s0"]
)
def test_the_loss_on_prompts_and_its_gradient_are_those_of_the_model(name: str):
    checkpoint = load(CHECKPOINTS / name)
    prompts = draw_prompts(checkpoint.task, 16, seed=1, dtype=torch.float64)
    loss = prompts_loss(checkpoint.weights, prompts)
    value, gradient = loss.function(loss.at[None])
    expected = (checkpoint.predictor.run(prompts)[0] - prompts.y_query).square().mean().item()
    assert value[0] == pytest.approx(expected, rel=1e-4)
    entries = np.random.default_rng(0).choice(loss.at.size, 12, replace=False)
    found = central_differences(loss, entries, 1e-5)
    np.testing.assert_allclose(gradient[0, entries], found, rtol=1e-5, atol=1e-8)


@pytest.mark.usefixtures("as_users")
def test_a_quadratic_gives_half_its_directions():
    curvatures = np.array([10.0, 2.0, 0.2])
    loss = quadratic(*curvatures, 0.0, 0.0, exact=1.5)
    found = local_learning_coefficient(loss, chains=Chains(16, 200, 100, 10))
    assert found.is_minimum
    assert abs(found.estimate - 1.5) < 3 * found.sem < 0.2
    assert found.per_chain.mean() == pytest.approx(found.estimate)
    # A temperature at which the softest direction is not resolved counts less of it: h nbeta / (h nbeta + pull).
    share = (curvatures * 10 / (curvatures * 10 + 1)).sum() / 2
    other = local_learning_coefficient(loss, chains=Chains(16, 200, 100, 10, nbeta=10.0))
    assert abs(other.estimate - share) < 4 * other.sem


@pytest.mark.usefixtures("as_users")
@pytest.mark.parametrize("langevin", [None, Langevin(0.01)])
def test_a_pull_as_strong_as_the_loss_halves_every_direction(langevin: Langevin | None):
    loss = quadratic(*[1.0] * 6, exact=3.0, on_minibatch=lambda points, *_: points)
    nbeta = pull = 20.0
    chains = Chains(16, 400, 100, 10, nbeta=nbeta, localization=pull, langevin=langevin)
    found = local_learning_coefficient(loss, chains=chains)
    # w ~ N(0, 1 / (nbeta h + pull)), so that the mean of nbeta h w^2 / 2 is 1/4 in each of 6 directions;
    # Langevin dynamics without noise of the gradient widen the law by 1 / (1 - step (nbeta h + pull) / 4).
    wider = 1 if langevin is None else 1 - langevin.step_size * (nbeta + pull) / 4
    assert abs(found.estimate - 6 / 4 / wider) < 4 * found.sem < 0.2


@pytest.mark.slow
def test_mini_batches_are_biased_by_as_much_as_their_noise_and_the_step_size_say():
    curvatures, noise_var, nbeta, step = np.array([5.0, 1.0, 0.1]), 0.64, 1000.0, 1e-4

    def on_minibatch(points: np.ndarray, n_prompts: int, generator: torch.Generator) -> np.ndarray:
        noise = torch.randn(points.shape, generator=generator).numpy()
        return curvatures * points + (noise_var / n_prompts) ** 0.5 * noise

    loss = quadratic(*curvatures, exact=1.5, on_minibatch=on_minibatch)
    chains = Chains(48, 100, 15, 100, nbeta=nbeta)
    # A linear recursion: its variance, and so the mean of nbeta L, is known in every direction.
    pull = nbeta * curvatures + 1
    for batch_size in (16, 64):
        noise = 1 + step * nbeta**2 * noise_var / batch_size / 4
        law = nbeta * curvatures / 2 * noise / (pull * (1 - step * pull / 4))
        sampler = replace(chains, langevin=Langevin(step, batch_size))
        found = local_learning_coefficient(loss, chains=sampler)
        assert abs(found.estimate - law.sum()) < 4 * found.sem < 0.4
        assert found.estimate - 1.5 > 5 * found.sem
        assert f"mini-batches of {batch_size}" in repr(found)
        assert found.to_frame()["bias"].item().endswith("step size 0.0001")
    exact = local_learning_coefficient(loss, chains=replace(SHORT, nbeta=nbeta))
    assert exact.bias == ""
    assert abs(exact.estimate - 1.5) < 4 * exact.sem


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear-separate-s0", "linear-merged-s0", "softmax-h2-s0"])
def test_the_gradient_on_mini_batches_is_that_of_the_loss_in_the_mean(name: str):
    checkpoint = load(CHECKPOINTS / name)
    if "linear" in name:
        heads, task = heads_of_linear(checkpoint.snapshots[0]), checkpoint.task
        loss = population_loss(heads, task_moments(task), task=task)
    else:
        prompts = draw_prompts(checkpoint.task, 64, seed=1)
        loss = prompts_loss(checkpoint.weights, prompts)
    points = np.repeat(loss.at[None], 100, axis=0)
    rows = loss.on_minibatch(points, 8, generator_for(0, "eval", 1))
    assert len(np.unique(rows, axis=0)) == 100
    exact = loss.function(loss.at[None])[1][0]
    error = rows.std(0) / 100**0.5
    assert (abs(rows.mean(0) - exact) <= 5 * error + 1e-12).all()


def test_draws_say_what_is_no_minimum():
    drawn = np.random.default_rng(0).gamma(4.0, size=(6, 300))
    assert why_no_minimum(drawn) == ""
    assert "grows" in why_no_minimum(drawn + np.linspace(0, 3, 300))
    assert "lower loss" in why_no_minimum(drawn - 3)
    assert "overflow" in why_no_minimum(np.where(drawn > 9, np.inf, drawn))


@pytest.mark.slow
@pytest.mark.parametrize("heads", ["separate", "merged", "alone"])
def test_linear_attention_at_its_minimum(heads: str):
    """A head alone is at the minimum of its level."""
    moments = moments_of(3, "distinct")
    loss = {
        "separate": lambda: population_loss(heads_at(moments, 2, 1), moments),
        "merged": lambda: population_loss(merged_at(moments, 2), moments),
        "alone": lambda: population_loss(saddle(moments, 3), moments, sampled_heads=[0]),
    }[heads]()
    found = local_learning_coefficient(loss, chains=replace(SHORT, other_nbeta=(1e3, 1e4)))
    assert found.exact == {"separate": 4, "merged": 4.5, "alone": 2.5}[heads]
    assert found.is_minimum
    assert abs(found.estimate - found.exact) < 4 * found.sem < 1
    assert found.to_frame()["nbeta"].tolist() == [30_000, 1e3, 1e4]
    # The histogram of the draws, beside Gamma(exact), has area 1.
    draws, law = found.plot_posterior().data
    width = np.diff(draws.x[:2]).item()
    assert sum(draws.y) * width == pytest.approx(1)
    assert sum(law.y) * width == pytest.approx(1, abs=0.05)


@pytest.mark.usefixtures("as_users")
def test_an_exact_saddle_is_found_out_by_its_draws():
    """There the gradient is zero, so that descent stays."""
    moments = moments_of(3, "distinct")
    found = local_learning_coefficient(population_loss(saddle(moments, 3), moments), chains=SHORT)
    assert found.fall < 1e-6
    assert not found.is_minimum
    assert "draws have a lower loss" in found.reason
    assert found.excess.mean() < 0


def test_a_model_on_a_plateau_is_no_minimum_and_has_no_number():
    found = local_learning_coefficient(load(CHECKPOINTS / "linear-separate-s2"), chains=SHORT)
    assert not found.is_minimum
    assert np.isnan([found.estimate, found.sem, *found.per_chain]).all()
    assert found.fall > 1000
    assert "descent lowers" in found.to_frame()["reason"].item()


@pytest.mark.usefixtures("as_users")
@pytest.mark.slow
def test_a_shipped_model_has_its_exact_value():
    chains = Chains(n_chains=8, n_draws=250, n_warmup=150)
    found = local_learning_coefficient(load(CHECKPOINTS / "linear-separate-s0"), chains=chains)
    assert found.exact == 8
    assert abs(found.estimate - found.exact) < min(3 * found.sem, 0.04 * found.exact)
    assert found.r_hat < 1.02
    assert 0.6 < found.acceptance < 0.98


NO_BATCHES = LocalLoss(lambda points: (points.sum(1), points), np.zeros(1), "1 entry", "a line")


@pytest.mark.parametrize(
    ("model", "asked", "words"),
    [
        ("linear-separate-s0", {"sampled_heads": [5]}, ["0 to 4", "[5]"]),
        ("softmax-h2-s0", {"sampled_heads": [0]}, ["linear attention trained on moments"]),
        ("softmax-h2-s0", {"weights": "W_X"}, ["parameters of the module", "'W_X'"]),
        (NO_BATCHES, {"chains": replace(SHORT, langevin=Langevin(1e-6))}, ["mini-batches"]),
        (object(), {}, ["checkpoint"]),
    ],
)
def test_what_cannot_be_asked_is_refused(model: object, asked: dict, words: list):
    with refused(*words):
        local_learning_coefficient(
            load(CHECKPOINTS / model) if isinstance(model, str) else model, **asked
        )
    for values in ((0.0, 64), (1e-6, 0)):
        with refused("> 0", 0):
            Langevin(*values)
    least = {"n_chains": (1, 2), "n_draws": (7, 8), "n_warmup": (0, 8), "n_leapfrog": (0, 1)}
    for name, (value, limit) in least.items():
        with refused(name, limit, value):
            Chains(**{name: value})
    for name in ("nbeta", "localization"):
        with refused(name, "> 0", -1):
            Chains(**{name: -1.0})
    with refused("other_nbeta[1]", "> 0", 0):
        Chains(other_nbeta=(1.0, 0.0))


OF_MODULES = Chains(n_chains=8, n_draws=100, n_warmup=60, n_leapfrog=8)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def fitted(module: nn.Module, xs: Tensor):
    """The loss of a module on targets that it meets exactly."""
    ys = module(xs).detach()
    return lambda module: (module(xs) - ys).square().mean()


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
    module, xs = Mlp().double(), drawn(64, 3)
    loss = fitted(module, xs)
    grads = [torch.autograd.grad(module(x[None]).sum(), [*module.parameters()]) for x in xs]
    rows = torch.stack([torch.cat([g.flatten() for g in each]) for each in grads])
    assert torch.linalg.matrix_rank(rows) == 11
    found = local_learning_coefficient(module, loss=loss, chains=replace(OF_MODULES, nbeta=1e7))
    assert found.sampled == "11 entries: *"
    assert abs(found.estimate - 5.5) < 4 * found.sem
    assert found.sem < 0.5


@pytest.mark.parametrize("pattern", ["blocks.1.attn.W_*[1]", "blocks.0.mlp.*", "unembed.W_U"])
def test_gradients_of_gpt2_are_those_of_autograd(pattern: str):
    checkpoint = load(CHECKPOINTS / "pool-gpt2-none-s0")
    prompts = sample_prompts(checkpoint, 16).to(torch.float64)
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
    own, other = (module_loss(m, fitted(m, xs)) for m in (Mlp(), Branching()))
    points = own.at + 0.1 * np.random.default_rng(0).standard_normal((3, own.at.size))
    for mine, theirs in zip(own.function(points), other.function(points), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-10)


def slow(loss: LocalLoss, chains: Chains, *, stated: bool, parts: tuple = ()) -> None:
    Cost(loss, chains, stated=stated, parts=lambda: iter(parts)).check()


def test_ten_minutes_of_drawing_are_refused_or_with_stated_chains_told(monkeypatch):
    clock = itertools.count(step=0.01)  # a gradient takes 10 ms
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    long, short = Chains(2, 3000, 500, 20), Chains(2, 300, 50, 20)  # 3500 * 20 gradients: 700 s
    with pytest.warns(UserWarning, match="about 12 minutes, 70,000 gradients.*n_prompts"):
        slow(quadratic(1.0), long, stated=True)
    with refused("about 12 minutes", "chains=", "n_prompts="):
        slow(quadratic(1.0), long, stated=False)
    slow(quadratic(1.0), short, stated=False)
    # Each further nbeta takes as long again.
    with refused("about 23 minutes", "140,000 gradients"):
        slow(quadratic(1.0), replace(long, other_nbeta=(1.0,)), stated=False)
    # Of two parts the first that takes less than ten minutes is named: 350 * 20 gradients are 70 s.
    parts = [
        replace(quadratic(1.0), sampled=f"9 entries: {n}", chains=c)
        for n, c in (("A", long), ("B", short))
    ]
    with refused("weights='B' (9 entries, about 2 minutes)"):
        slow(quadratic(1.0), long, stated=False, parts=tuple(parts))
    fewer = replace(parts[1], over="16 prompts")
    with refused("weights='B' on 16 prompts (9 entries, about 2 minutes)"):
        slow(quadratic(1.0), long, stated=False, parts=(parts[0], fewer))


def test_parts_of_the_weights_are_offered_on_fewer_and_fewer_prompts():
    parts = local_losses.quick_parts(load(CHECKPOINTS / "garg-tiny-s0"), None, 60, 0)
    sizes = [(part.sampled, part.over) for part in parts]
    names = ("8192 entries: blocks.2.attn.W_*[0]", "64 entries: unembed.W_U")
    assert sizes == [(name, f"{n} prompts") for n in (60, 15, 4) for name in names]


def test_no_minimum_comes_before_the_cost(monkeypatch):
    """Weights that are no minimum need no draws, however long these would take."""
    monkeypatch.setattr("mechinterp.analysis.training.cost_of_chains.LONG", 0.0)
    moved = replace(quadratic(1.0, 2.0), at=np.ones(2))
    found = local_learning_coefficient(moved)
    assert not found.is_minimum
    assert "descent lowers" in found.reason
    assert not found.excess.size
    with refused("drawing takes", "chains="):
        local_learning_coefficient(quadratic(1.0, 2.0))


def test_a_first_look_ends_once_a_lower_loss_is_found():
    calls = []

    def counted(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        calls.append(len(points))
        return valley.function(points)

    # A bent valley, as Rosenbrock's, needs many steps to its end.
    def bent(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x, y = points.T
        value = (1 - x) ** 2 + 100 * (y - x**2) ** 2
        along = -2 * (1 - x) - 400 * x * (y - x**2)
        return value, np.stack([along, 200 * (y - x**2)], 1)

    valley = LocalLoss(bent, np.array([-1.0, 1.0]), "2 entries", "a valley")
    whole, exact = fall_nearby(Tempered(replace(valley, function=counted), 1.0, 1e-6))
    n_whole = len(calls)
    part, at_least = fall_nearby(Tempered(replace(valley, first_look=counted), 1.0, 1e-6))
    assert (exact, at_least) == (False, True)
    assert whole == pytest.approx(4, abs=1e-3)
    assert 2 * FALL < part < whole
    assert len(calls) - n_whole < n_whole / 3
    # At the minimum the first look finds nothing, and the loss itself decides.
    at_end = replace(valley, at=np.ones(2), first_look=bent)
    assert fall_nearby(Tempered(at_end, 1.0, 1e-6)) == (0.0, False)


def in_float32(loss: LocalLoss) -> LocalLoss:
    """The loss with draws from a copy whose weights, losses and gradients are rounded to float32."""

    def single(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = loss.function(points.astype(np.float32).astype(np.float64))
        return tuple(each.astype(np.float32).astype(np.float64) for each in found)

    return replace(loss, in_float32=single)


@pytest.mark.slow
def test_draws_in_float32_have_the_known_value():
    """At the singular minima of version 2 a term in log n is left at every finite n."""
    for entry in suite(1, trained="none").values():
        if (exact := entry.truth.learning_coefficient) is None:
            continue
        heads = heads_of_linear(entry.checkpoint.weights)
        loss = in_float32(population_loss(heads, task_moments(entry.checkpoint.task)))
        assert Tempered(loss, NBETA, 1.0).for_draws.loss.function is loss.in_float32
        found = local_learning_coefficient(loss, chains=Chains(8, 500, 250))
        assert abs(found.estimate - exact.value) < 4 * found.sem


def test_draws_stay_in_float64_where_float32_would_round():
    """2^-22 of nbeta L is 0.007 at a loss of 1, and above 0.01 at a loss of 1.5."""
    for offset, single in ((1.0, True), (1.5, False)):
        plain = quadratic(1.0)
        raised = lambda points, o=offset, f=plain.function: (f(points)[0] + o, f(points)[1])  # noqa: E731
        law = Tempered(in_float32(replace(plain, function=raised)), NBETA, 1.0).for_draws
        assert (law.loss.function is law.loss.in_float32) == single


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        *((name, "*") for name in ("garg-tiny-s0", "d4s1-linear-h1x5-l4-noise0.1-s0")),
        *((name, "*") for name in ("d8s2-softmax-h8x9-l3-noise0.1-s0", "gla-h1-s0", "mesa-h1-s0")),
        ("softmax-h2-s0", "blocks.0.attn.W_*[1]"),
        ("linear-merged-s0", "blocks.0.attn.W_QK"),
        ("garg-tiny-s0", ("blocks.1.attn.W_*[1]", "blocks.0.mlp.*", "pos_embed.*")),
        ("d8s2-softmax-h8x9-l3-noise0.1-s0", ("unembed.W_U", "blocks.2.attn.W_V[7]")),
    ],
)
def test_the_gradient_of_training_is_that_through_hooks(name: str, pattern: str | tuple[str, ...]):
    checkpoint = load(CHECKPOINTS / name)
    prompts = sample_prompts(checkpoint, 8)
    own = prompts_loss(checkpoint.weights, prompts, pattern)
    hooks = predictor_loss(checkpoint, prompts, weights=pattern)
    assert own.sampled == hooks.sampled
    (value, gradient), (expected, through_hooks) = (
        each.function(each.at[None]) for each in (own, hooks)
    )
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    # The order of the entries differs.
    scale = np.abs(gradient).max()
    np.testing.assert_allclose(np.sort(gradient), np.sort(through_hooks), atol=1e-12 * scale)
    np.testing.assert_array_equal(np.sort(own.at), np.sort(hooks.at))
    # In float32 sums over a few hundred numbers are rounded to some 1e-6 of them.
    for single in (own.in_float32, hooks.in_float32):
        near, slope = single(own.at[None] if single is own.in_float32 else hooks.at[None])
        np.testing.assert_allclose(near, value, rtol=1e-5)
        np.testing.assert_allclose(np.sort(slope), np.sort(gradient), atol=1e-4 * scale)


@pytest.mark.parametrize(
    ("name", "pattern", "through_hooks"),
    [
        ("garg-tiny-s0", None, False),
        ("garg-tiny-s0", "blocks.0.attn.W_*[1]", False),
        ("garg-tiny-s0", ("blocks.2.*", "W_in"), False),
        ("garg-tiny-s0", ("blocks.2.*", "blocks.1.attn.W_Q", "unembed.*"), True),
        ("d8s2-softmax-h8x9-l3-noise0.1-s0", "blocks.2.*", False),
        ("softmax-h2-s0", "blocks.0.attn.W_V", False),
    ],
)
def test_later_layers_with_norms_share_the_run_of_the_layers_before(
    monkeypatch: pytest.MonkeyPatch, name: str, pattern: Any, *, through_hooks: bool
):
    for way in ("predictor_loss", "prompts_loss"):
        monkeypatch.setattr(local_losses, way, lambda *_, way=way, **__: way)
    checkpoint = load(CHECKPOINTS / name)
    used = local_losses.loss_on(sample_prompts(checkpoint, 8), checkpoint, pattern)
    assert used == ("predictor_loss" if through_hooks else "prompts_loss")


def test_hooks_on_a_model_of_this_package_are_part_of_its_loss():
    checkpoint = load(CHECKPOINTS / "softmax-h2-s0")
    prompts = sample_prompts(checkpoint, 16)
    model = checkpoint.model
    model.add_hook("blocks.0.attn.hook_z", lambda z, hook: 2 * z, is_permanent=True)
    loss = local_losses.loss_on(prompts, model)
    expected = (predictor_of(model).predict(prompts) - prompts.y_query).square().mean().item()
    assert loss.function(loss.at[None])[0].item() == pytest.approx(expected, rel=1e-5)
    own = prompts_loss(checkpoint.weights, prompts)
    assert own.function(own.at[None])[0].item() != pytest.approx(expected, rel=0.1)


@pytest.mark.slow
@pytest.mark.usefixtures("as_users")
def test_one_layer_has_the_same_coefficient_by_draws_in_float32_and_in_float64():
    checkpoint = load(CHECKPOINTS / "softmax-h1-s0")
    loss = prompts_loss(checkpoint.weights, sample_prompts(checkpoint, 128))
    at, _ = lowest_nearby(Tempered(loss, NBETA, 0.0), most=20_000)
    loss = replace(loss, at=at)
    single, double = (
        local_learning_coefficient(replace(loss, in_float32=each), chains=SHORT)
        for each in (loss.in_float32, None)
    )
    assert single.is_minimum
    assert double.is_minimum
    assert abs(single.estimate - double.estimate) < 4 * np.hypot(single.sem, double.sem)


def test_a_first_look_that_is_wrong_decides_nothing():
    """What descent finds on the first look is measured by the loss itself."""
    loss = quadratic(1.0)
    wrong = lambda points: (points.sum(1), np.ones_like(points))  # noqa: E731
    fall, at_least = fall_nearby(Tempered(replace(loss, first_look=wrong), 1e3, 1.0))
    assert (fall, at_least) == (0.0, False)


@pytest.mark.slow
def test_several_layers_are_no_minimum_of_other_prompts_within_seconds():
    checkpoint = load(CHECKPOINTS / "d4s1-linear-h4x5-l4-noise0.1-s0")
    prompts = sample_prompts(checkpoint, 64, seed=1).to(torch.float64)
    loss = prompts_loss(checkpoint.weights, prompts)
    value, gradient = loss.function(loss.at[None])
    near, slope = loss.first_look(loss.at[None])
    # float32: 1e-7 of the numbers that are added.
    np.testing.assert_allclose(near, value, rtol=1e-4)
    np.testing.assert_allclose(slope, gradient, rtol=1e-2, atol=1e-4 * np.abs(gradient).max())
    found = local_learning_coefficient(checkpoint, prompts)
    assert not found.is_minimum
    assert found.fall > 2 * FALL
    assert "by at least" in found.reason


def test_all_weights_of_a_hooked_module_are_those_of_the_module():
    layers = [nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0) for _ in range(2)]
    module = nn.Sequential(*layers, nn.Linear(4, 1)).double().eval()
    hooked = hook_module(module, task=TaskConfig(d_x=3, context_length=6))
    prompts = sample_prompts(hooked, 8)
    loss = predictor_loss(hooked, prompts, weights="*")
    assert loss.at == pytest.approx(flat(module.parameters()), abs=0)
    torch.manual_seed(1)
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    error = module(prompts.tokens.double())[:, -1] - prompts.y_query
    error.square().mean().backward()
    values, gradients = loss.function(flat(module.parameters())[None])
    assert values[0] == pytest.approx(error.square().mean().item(), rel=1e-12)
    assert gradients[0] == pytest.approx(flat(p.grad for p in module.parameters()), abs=1e-12)


def flat(tensors: Iterable[torch.Tensor]) -> np.ndarray:
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).numpy()


def test_a_hooked_module_is_sampled_by_its_own_names():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).double()
    hooked = hook_module(layer, task=TaskConfig(d_x=3, context_length=6))
    prompts = sample_prompts(hooked, 8)
    loss = predictor_loss(hooked, prompts, weights="linear1.*")
    assert loss.sampled == "40 entries: linear1.*"
    (value,), _ = loss.function(loss.at[None])
    own = hooked.predict(prompts) - prompts.y_query
    assert value == pytest.approx(own.square().mean().item(), rel=1e-9)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"weights": "nothing"}, ["weights", "into.weight", "'nothing'"]),
        ({"weights": "into.weight[2]"}, ["into.weight", 2]),
        ({"loss": lambda module: module(drawn(4, 3))}, ["without axes", "[4, 1]"]),
        ({"loss": lambda module: torch.tensor(1.0)}, ["depend on the sampled parameters"]),
        ({"loss": lambda module: sum(module.out.bias) * torch.rand(())}, ["the same at each"]),
        ({"sampled_heads": [0]}, ["loss", "sampled_heads"]),
        ({"loss": None}, ["hook_module"]),
    ],
)
def test_what_it_refuses(changed: dict, words: list):
    module = Mlp()
    given = {"loss": fitted(module, drawn(8, 3)), **changed}
    with refused(*words):
        local_learning_coefficient(module, **given)


def autoregressive(correlation: float, n_draws: int = 4000, n_chains: int = 6) -> np.ndarray:
    """Chains of variance 1 whose neighbouring draws are correlated."""
    noise = np.random.default_rng(0).standard_normal((n_chains, n_draws))
    values = np.empty_like(noise)
    values[:, 0] = noise[:, 0]
    for draw in range(1, n_draws):
        new = (1 - correlation**2) ** 0.5 * noise[:, draw]
        values[:, draw] = correlation * values[:, draw - 1] + new
    return values


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_correlated_draws_count_as_fewer(correlation: float):
    values = autoregressive(correlation)
    expected = values.size * (1 - correlation) / (1 + correlation)
    # The relative error of an autocorrelation time summed over w lags is sqrt(2 (2 w + 1) / n), w about 6 of them.
    lags = 6 * (1 + correlation) / (1 - correlation)
    allowed = 4 * (2 * (2 * lags + 1) / values.size) ** 0.5
    assert abs(effective_draws(values) / expected - 1) < allowed
    assert mean_error(values) == pytest.approx(expected**-0.5, rel=allowed)


def test_alternating_draws_do_not_count_as_more_than_there_are():
    values = np.tile([1.0, -1.0], (4, 100)) + 0.01 * np.random.default_rng(0).normal(size=(4, 200))
    assert effective_draws(values) <= 800


def test_chains_that_disagree_are_told_and_make_the_error_large():
    values = np.random.default_rng(0).standard_normal((4, 500))
    assert r_hat(values) < 1.02
    apart = values + 5 * np.arange(4)[:, None]
    assert r_hat(apart) > 3
    assert effective_draws(apart) < 10
    assert mean_error(apart) > 2
    still = np.ones((4, 500))
    assert effective_draws(still) == 0
    assert np.isnan([r_hat(still), mean_error(still)]).all()


def test_chains_that_share_a_trend_do_not_agree_with_their_own_halves():
    drift = np.linspace(-2, 2, 500)
    trend = np.random.default_rng(0).standard_normal((4, 500)) + drift
    # Eight halves have means of -1 or 1, whose variance is 8/7, and variances of 1 + 1/3; whole chains agree.
    expected = np.sqrt(1 + 8 / 7 / (1 + 1 / 3))
    # A mean of 250 draws is known to 0.073, so that the ratio is known to 0.016.
    assert r_hat(trend) == pytest.approx(expected, abs=4 * 0.016)
    assert r_hat(trend - drift) < 1.02


def test_steps_that_overflow_are_rejected_and_the_seed_decides():
    def steep(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        fourth = np.exp(points**4).sum(1)
        return fourth, 4 * points**3 * np.exp(points**4)

    law = Tempered(LocalLoss(steep, np.zeros(3), "3 entries", "a well"), 5.0, 1.0)
    (excess, accepted), (again, _), (other, _) = (
        hamiltonian_draws(law, Chains(4, 100, 60, 8), seed=seed) for seed in (0, 0, 1)
    )
    assert np.isfinite(excess).all()
    assert excess.min() >= 0
    assert 0.3 < accepted.mean() <= 1
    np.testing.assert_array_equal(excess, again)
    assert not np.array_equal(excess, other)
