"""The local learning coefficient: known values, what is no minimum, gradients, snapshots and the command."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from analyses.coefficients.sampler import CHAINS, GRID, at_minimum, heads_at, moments_of
from analyses.lib.coefficient_snapshots import coefficient_snapshots, live_heads
from mechinterp import local_learning_coefficient
from mechinterp.analysis.one_layer.linear_components import heads_of_linear
from mechinterp.analysis.training.learning_coefficient import why_no_minimum
from mechinterp.analysis.training.local_losses import population_loss, prompts_loss
from mechinterp.analysis.training.sampler import Chains, Langevin, LocalLoss
from mechinterp.checkpoints.load import load
from mechinterp.icl.prompts import generator_for, sample_prompts
from mechinterp.theory.linear_heads import Heads, merged_heads, separate_heads
from mechinterp.training.linear.flat import unflatten
from mechinterp.training.linear.trainer import task_moments
from tests.conftest import CHECKPOINTS, Run, sampled
from tests.learning import merged_at, saddle
from tests.test_doors import as_for_users

SHORT = Chains(n_chains=8, n_draws=120, n_warmup=80, n_leapfrog=16)
EXACT = {
    "linear-separate-s0": 8,
    "linear-separate-s1": 8,
    "linear-merged-s0": 8,
    "linear-merged-s1": 8,
    "linear-rank2-s2": 32,
    "linear-rank4-s2": 32,
    "linear-rank8-s2": 32,
}


@pytest.fixture
def as_users() -> Iterator[None]:
    """Chains call the loss so often that checks of types would take most of the time."""
    with as_for_users():
        yield


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
    prompts = sample_prompts(checkpoint.task, 16, seed=1, dtype=torch.float64)
    loss = prompts_loss(checkpoint, prompts)
    value, gradient = loss.function(loss.at[None])
    exact = checkpoint.weights.to(torch.float64)
    expected = (checkpoint.predictor.run(prompts)[0] - prompts.y_query).square().mean().item()
    assert exact.dtype == torch.float64
    assert value[0] == pytest.approx(expected, rel=1e-4)
    entries = np.random.default_rng(0).choice(loss.at.size, 12, replace=False)
    found = central_differences(loss, entries, 1e-5)
    np.testing.assert_allclose(gradient[0, entries], found, rtol=1e-5, atol=1e-8)


@pytest.mark.usefixtures("as_users")
def test_a_quadratic_gives_half_its_directions():
    curvatures = np.array([5.0, 1.0, 0.1, 0.0, 0.0])

    def quadratic(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return (curvatures * points**2).sum(1), 2 * curvatures * points

    loss = LocalLoss(quadratic, np.zeros(5), "5 entries", "a quadratic", exact=1.5)
    found = local_learning_coefficient(loss, chains=Chains(16, 300, 150, 10))
    assert found.is_minimum
    assert abs(found.estimate - 1.5) < 3 * found.sem < 0.2
    assert found.per_chain.mean() == pytest.approx(found.estimate)
    # A temperature at which the softest direction is not resolved counts less of it: h n_beta / (h n_beta + pull).
    share = (2 * curvatures[:3] * 10 / (2 * curvatures[:3] * 10 + 1)).sum() / 2
    other = local_learning_coefficient(loss, n_beta=10.0, chains=Chains(16, 300, 150, 10))
    assert abs(other.estimate - share) < 4 * other.sem


@pytest.mark.usefixtures("as_users")
@pytest.mark.parametrize("langevin", [None, Langevin(0.01)])
def test_a_pull_as_strong_as_the_loss_halves_every_direction(langevin: Langevin | None):
    def quadratic(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.square(points).sum(1) / 2, points

    def exactly(points: np.ndarray, n_prompts: int, generator: torch.Generator) -> np.ndarray:
        return points

    loss = LocalLoss(
        quadratic, np.zeros(6), "6 entries", "a quadratic", exact=3.0, on_minibatch=exactly
    )
    n_beta = pull = 20.0
    chains = Chains(n_chains=16, n_draws=400, n_warmup=100, n_leapfrog=10)
    found = local_learning_coefficient(
        loss, n_beta=n_beta, localisation=pull, chains=chains, langevin=langevin
    )
    # w ~ N(0, 1 / (n_beta h + pull)), so that the mean of n_beta h w^2 / 2 is 1/4 in each of 6 directions;
    # Langevin dynamics without noise of the gradient widen the law by 1 / (1 - step (n_beta h + pull) / 4).
    wider = 1 if langevin is None else 1 - langevin.step_size * (n_beta + pull) / 4
    assert abs(found.estimate - 6 / 4 / wider) < 4 * found.sem < 0.2


@pytest.mark.slow
@pytest.mark.usefixtures("as_users")
def test_mini_batches_are_biased_by_as_much_as_their_noise_and_the_step_size_say():
    curvatures, noise_var, n_beta, step = np.array([5.0, 1.0, 0.1]), 0.64, 1000.0, 1e-4

    def quadratic(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return (curvatures * points**2).sum(1) / 2, curvatures * points

    def on_minibatch(points: np.ndarray, n_prompts: int, generator: torch.Generator) -> np.ndarray:
        noise = torch.randn(points.shape, generator=generator).numpy()
        return curvatures * points + (noise_var / n_prompts) ** 0.5 * noise

    loss = LocalLoss(
        quadratic, np.zeros(3), "3 entries", "a quadratic", 1.5, on_minibatch=on_minibatch
    )
    chains = Chains(n_chains=48, n_draws=150, n_warmup=15, n_leapfrog=100)
    # A linear recursion: its variance, and so the mean of n_beta L, is known in every direction.
    pull = n_beta * curvatures + 1
    for batch_size in (16, 64):
        noise = 1 + step * n_beta**2 * noise_var / batch_size / 4
        law = n_beta * curvatures / 2 * noise / (pull * (1 - step * pull / 4))
        found = local_learning_coefficient(
            loss, n_beta=n_beta, chains=chains, langevin=Langevin(step, batch_size)
        )
        assert abs(found.estimate - law.sum()) < 4 * found.sem < 0.4
        assert found.estimate - 1.5 > 5 * found.sem
        assert f"biased: drawn on mini-batches of {batch_size} without rejection" in repr(found)
        assert found.to_frame()["bias"].item().endswith("step size 0.0001")
    exact = local_learning_coefficient(loss, n_beta=n_beta, chains=SHORT)
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
        prompts = sample_prompts(checkpoint.task, 64, seed=1)
        loss = prompts_loss(checkpoint, prompts)
    points = np.repeat(loss.at[None], 200, axis=0)
    rows = loss.on_minibatch(points, 8, generator_for(0, "eval", 1))
    assert len(np.unique(rows, axis=0)) == 200
    exact = loss.function(loss.at[None])[1][0]
    error = rows.std(0) / 200**0.5
    assert (abs(rows.mean(0) - exact) <= 5 * error + 1e-12).all()


def test_mini_batches_need_prompts():
    loss = population_loss(heads_at(moments_of(3, "distinct"), 3, 1), moments_of(3, "distinct"))
    with pytest.raises(ValueError, match="needs a loss with mini-batches, got one without"):
        local_learning_coefficient(loss, langevin=Langevin(1e-6))
    for values in ((0.0, 64), (1e-6, 0)):
        with pytest.raises(ValueError, match="must be > 0, got 0"):
            Langevin(*values)


@pytest.mark.slow
@pytest.mark.parametrize("heads", ["separate", "merged"])
def test_linear_attention_at_its_minimum(heads: str):
    moments = moments_of(3, "distinct")
    at = heads_at(moments, 2, 1) if heads == "separate" else merged_at(moments, 2)
    found = local_learning_coefficient(population_loss(at, moments), chains=SHORT)
    assert found.exact == (4 if heads == "separate" else 4.5)
    assert found.is_minimum
    assert abs(found.estimate - found.exact) < 4 * found.sem < 1


@pytest.mark.exhaustive
@pytest.mark.usefixtures("as_users")
@pytest.mark.slow
@pytest.mark.parametrize("n_heads", sampled(range(1, 6), keep=lambda n_heads: n_heads in (2, 5)))
def test_the_table_of_the_fact_sheet(n_heads: int):
    moments = moments_of(4, "distinct")
    loss = population_loss(heads_at(moments, n_heads, 1), moments)
    found = local_learning_coefficient(loss, chains=Chains(32, 500, 300, 40))
    assert found.exact == [3.5, 6, 7.5, 8, 8][n_heads - 1]
    assert abs(found.estimate - found.exact) < 3 * found.sem
    assert abs(found.estimate / found.exact - 1) < 0.02


@pytest.mark.usefixtures("as_users")
@pytest.mark.exhaustive
@pytest.mark.parametrize(("d_x", "n_heads", "spectrum"), GRID)
def test_all_numbers_of_heads_with_distinct_and_equal_eigenvalues(
    d_x: int, n_heads: int, spectrum: str
):
    found = at_minimum(d_x, n_heads, spectrum, CHAINS)
    assert found.exact is not None
    assert abs(found.estimate - found.exact) < 3 * found.sem
    assert abs(found.estimate / found.exact - 1) < 0.02


@pytest.mark.usefixtures("as_users")
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    sampled(
        ["linear-separate-s0", "linear-merged-s0", "linear-rank4-s2"],
        keep=lambda name: name == "linear-separate-s0",
    ),
)
def test_shipped_models_have_their_exact_value(name: str):
    found = local_learning_coefficient(load(CHECKPOINTS / name))
    assert found.exact == EXACT[name]
    assert abs(found.estimate - found.exact) < min(3 * found.sem, 0.04 * found.exact)
    assert found.r_hat < 1.02
    assert 0.6 < found.acceptance < 0.98


@pytest.mark.parametrize("name", ["linear-separate-s2", "linear-rank1-s2"])
def test_a_model_on_a_plateau_is_no_minimum_and_has_no_number(name: str):
    found = local_learning_coefficient(load(CHECKPOINTS / name), chains=SHORT)
    assert not found.is_minimum
    assert np.isnan([found.estimate, found.sem, *found.per_chain]).all()
    assert found.fall > 1000
    assert "not a minimum: descent lowers n_beta L by" in repr(found)
    assert "descent lowers" in found.to_frame()["reason"].item()
    assert len(found.plot().data) == found.excess.shape[0]


@pytest.mark.slow
def test_an_exact_saddle_is_found_out_by_its_draws():
    """There the gradient is zero, so that descent stays."""
    moments = moments_of(3, "distinct")
    found = local_learning_coefficient(population_loss(saddle(moments, 3), moments), chains=SHORT)
    assert found.fall < 1e-6
    assert not found.is_minimum
    assert "draws have a lower loss than the weights" in found.reason
    assert found.excess.mean() < 0


@pytest.mark.slow
def test_a_head_alone_is_at_the_minimum_of_its_level():
    moments = moments_of(3, "distinct")
    loss = population_loss(saddle(moments, 3), moments, sampled_heads=[0])
    found = local_learning_coefficient(loss, chains=SHORT)
    assert found.exact == 2.5
    assert abs(found.estimate - 2.5) < 4 * found.sem


def test_draws_say_what_is_no_minimum():
    drawn = np.random.default_rng(0).gamma(4.0, size=(6, 300))
    assert why_no_minimum(drawn) == ""
    assert "grows" in why_no_minimum(drawn + np.linspace(0, 3, 300))
    assert "lower loss" in why_no_minimum(drawn - 3)
    assert "overflow" in why_no_minimum(np.where(drawn > 9, np.inf, drawn))


@pytest.mark.slow
def test_the_result_says_itself():
    moments = moments_of(3, "distinct")
    loss = population_loss(heads_at(moments, 1, 1), moments)
    found = local_learning_coefficient(loss, chains=SHORT, other_n_beta=(1e3, 1e4))
    frame = found.to_frame()
    assert frame["n_beta"].tolist() == [30_000, 1e3, 1e4]
    assert frame["exact"].tolist() == [2.5] * 3
    assert repr(found).startswith(f"LearningCoefficient({found.estimate:.4g} ± ")
    assert "7 entries: v and the x entries of q and k of 1 head; the population" in repr(found)
    density = found.plot_posterior().data
    assert [trace.name for trace in density] == ["draws", "Gamma(2.5)"]
    width = np.diff(density[0].x[:2]).item()
    assert sum(density[0].y) * width == pytest.approx(1)
    assert sum(density[1].y) * width == pytest.approx(1, abs=0.05)
    assert found.plot_curve().data[0].x.tolist() == [1e3, 1e4, 30_000]


@pytest.mark.parametrize(
    ("model", "asked", "rule"),
    [
        ("linear-separate-s0", {"n_beta": -1.0}, "n_beta must be > 0, got -1"),
        ("linear-separate-s0", {"localisation": -1.0}, "localisation must be > 0, got -1"),
        ("linear-separate-s0", {"sampled_heads": [5]}, r"name heads from 0 to 4, got \[5\]"),
        ("softmax-h2-s0", {"sampled_heads": [0]}, "needs linear attention trained on moments"),
        ("softmax-h2-s0", {"weights": "W_X"}, "must match parameters of the module .*'W_X'"),
    ],
)
def test_what_cannot_be_asked_is_refused(model: str, asked: dict, rule: str):
    with pytest.raises(ValueError, match=rule):
        local_learning_coefficient(load(CHECKPOINTS / model), **asked)


def test_something_else_than_a_model_is_refused():
    with pytest.raises(ValueError, match="must be a checkpoint"):
        local_learning_coefficient(object())


def test_heads_are_read_off_the_weights():
    checkpoint = load(CHECKPOINTS / "linear-merged-s0")
    heads = heads_of_linear(checkpoint.weights)
    prompts = sample_prompts(checkpoint.task, 8, seed=0, dtype=torch.float64)
    b = (prompts.x * prompts.y).mean(1).numpy()
    expected = np.einsum("bi,ij,bj->b", b, heads.M, prompts.x_query.numpy())
    found = checkpoint.predictor.run(prompts)[0].numpy()[:, 0]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("as_users")
@pytest.mark.slow
def test_heads_that_have_learned_something_are_at_the_minimum_of_their_level():
    checkpoint = load(CHECKPOINTS / "linear-separate-s2")
    assert live_heads(checkpoint.snapshots[3600]) == live_heads(checkpoint.snapshots[1800])
    found = coefficient_snapshots(checkpoint, steps=[0, 3600, 5400], chains=SHORT)
    assert found.is_minimum.tolist() == [False] * 3
    assert found.n_live.tolist() == [5, 2, 3]
    assert found.n_learned.tolist() == [0, 2, 3]
    np.testing.assert_allclose(found.coefficients, [0, 3.5, 6, 7.5, 8])
    assert found.live[0] is None
    for live, exact in zip(found.live[1:], (6, 7.5), strict=True):
        assert live.exact == exact
        assert abs(live.estimate - exact) < 4 * live.sem < 2
    frame = found.to_frame()
    assert frame["level_coefficient"].tolist() == [0, 6, 7.5]
    assert frame["live_estimate"].notna().tolist() == [False, True, True]
    drawn = found.plot().data
    assert [trace.name for trace in drawn] == ["all heads", "live heads alone"]
    np.testing.assert_allclose(drawn[1].y, frame["live_estimate"])
    assert len(found.plot().layout.shapes) == 5
    assert [len(trace.x) for trace in found.plot_loss().data[1:]] == [0, 3]
    with pytest.raises(ValueError, match="needs linear attention trained on moments"):
        coefficient_snapshots(load(CHECKPOINTS / "softmax-h2-s0"))


def test_it_has_a_command(run: Run):
    path = CHECKPOINTS / "linear-separate-s2"
    ran = run("analyse", "learning-coefficient", path, "--json")
    (row,) = ran.document["rows"]
    assert row["is_minimum"] is False
    assert row["estimate"] is None
    assert "not a minimum: descent lowers" in ran.document["result"]
