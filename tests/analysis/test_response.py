"""What the response measures of learners whose filter, gate, order and coordinates are known."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from analyses.response.families import filtered, read, stepped
from mechinterp.analysis.response.beside import bayes_of, sign_vectors, sparse_posterior
from mechinterp.analysis.response.response import Response, response
from mechinterp.config import TaskConfig
from mechinterp.icl.predictors import debiased_gd, dmmse, nadaraya_watson, ridge
from mechinterp.icl.prompts import Prompts
from mechinterp.models.constructions.descent import gradient_descent_model
from mechinterp.models.run.evaluation import sample_prompts
from mechinterp.models.weights import Weights

TASK = TaskConfig(d_x=5, context_length=20, noise_var=0.1, beta_var=0.2)
SMALL = TaskConfig(d_x=3, context_length=8, noise_var=0.1, beta_var=1 / 3)
Learner = Callable[[Prompts], Tensor]


def delta_rule(eta: float, gate: float = 1.0) -> Learner:
    """One pass over the pairs: beta -> gate beta, then a step on the next pair."""

    def predict(prompts: Prompts) -> Tensor:
        beta = torch.zeros_like(prompts.x[:, 0, :, None] * prompts.y[:, 0, None])
        for x, y in zip(prompts.x.unbind(1), prompts.y.unbind(1), strict=True):
            beta = gate * beta
            missed = y - (x[:, None] @ beta)[:, 0]
            beta = beta + eta * x[..., None] * missed[:, None]
        return read(prompts, beta)

    return predict


def forgetting(eta: float, gate: float) -> Learner:
    """One step of descent on pairs that are weighted by gate^age."""

    def predict(prompts: Prompts) -> Tensor:
        ages = torch.arange(prompts.x.shape[1] - 1, -1, -1)
        weights = (gate ** ages.to(prompts.x))[:, None]
        return read(prompts, eta * prompts.x.mT @ (weights * prompts.y))

    return predict


def recursive_least_squares(gate: float, penalty: float) -> Learner:
    def predict(prompts: Prompts) -> Tensor:
        ages = torch.arange(prompts.x.shape[1] - 1, -1, -1)
        weights = (gate ** ages.to(prompts.x))[:, None]
        gram = prompts.x.mT @ (weights * prompts.x)
        gram = gram + penalty * torch.eye(prompts.x.shape[2]).to(gram)
        return read(prompts, torch.linalg.solve(gram, prompts.x.mT @ (weights * prompts.y)))

    return predict


def left(found: Response, form: str) -> float:
    return float(found.forms.set_index("form").left[form])


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_descent_is_a_polynomial_of_its_own_degree(steps: int) -> None:
    etas = [0.3, 0.5, 0.4][:steps]
    found = response(stepped(etas), task=TASK, n_prompts=256)
    names = ["1 step", "2 steps", "3 steps", "4 steps"]
    rows = found.forms.set_index("form").loc[names]
    assert (rows["left"] > 3 * rows["left_sem"])[: steps - 1].all()
    assert (rows["left"][steps - 1 :] < 1e-14).all()
    assert names[steps - 1] in found.headline
    known = torch.zeros(len(found.filter))
    s = torch.tensor(found.filter.s)
    for eta in etas:
        known = known + eta * (1 - s * known)
    # A free spline has no polynomial among its members, but it is near.
    middle = slice(2, 8)
    np.testing.assert_allclose(found.filter.phi[middle], known[middle], rtol=0.02)


def test_ridge_has_its_own_penalty_and_no_difference_from_bayes() -> None:
    found = response(partial(ridge, penalty=0.5), task=TASK, n_prompts=256)
    assert found.scalar("c")[0] == pytest.approx(0.5 / 20, rel=1e-6)
    assert found.scalar("c of Bayes")[0] == pytest.approx(TASK.posterior_penalty / 20, rel=1e-6)
    np.testing.assert_allclose(found.filter.phi, 1 / (found.filter.s + 0.025), rtol=1e-3)
    np.testing.assert_allclose(found.filter.bayes, found.filter.phi, rtol=1e-9)
    assert found.differences.difference.abs().max() < 1e-9
    assert left(found, "a / (s + c)") < 1e-7
    assert found.reading == "batch"


def test_another_penalty_than_bayes_is_a_difference_in_the_filter_alone() -> None:
    found = response(partial(ridge, penalty=5.0), task=TASK, n_prompts=512)
    assert found.scalar("c")[0] == pytest.approx(0.25, rel=1e-6)
    s = found.filter.s
    expected = 1 / (s + 0.25) - 1 / (s + 0.025)
    rows = found.differences
    np.testing.assert_allclose(rows.difference[1:], expected[1:], rtol=0.05)
    assert (
        (rows.difference - expected).abs() < 4 * rows.difference_sem + 0.01 * expected.abs()
    ).all()
    assert found.scalar("share of it in the filter")[0] == pytest.approx(1, abs=0.01)
    assert "over-shrinks" in repr(found)


@pytest.mark.slow
def test_filters_of_curvature_corrected_descent_and_newton() -> None:
    def plus_plus(s: Tensor) -> Tensor:
        phi, scale = torch.zeros_like(s), torch.ones_like(s)
        for _ in range(2):
            phi = phi + 0.3 * scale**2 * (1 - s * phi)
            scale = scale * (1 - 0.1 * scale**2 * s)
        return phi

    found = response(filtered(plus_plus), task=TASK, n_prompts=512)
    inside = slice(1, 8)
    known = plus_plus(torch.tensor(found.filter.s))
    np.testing.assert_allclose(found.filter.phi[inside], known[inside], rtol=0.02)
    assert left(found, "free") < 1e-5 < left(found, "1 step")

    def newton(s: Tensor) -> Tensor:
        phi = 0.2 * s
        for _ in range(3):
            phi = 2 * phi - phi * phi * s
        return phi

    found = response(filtered(newton), task=TASK, n_prompts=512, trim=0.2)
    known = newton(torch.tensor(found.filter.s))
    np.testing.assert_allclose(found.filter.phi[inside], known[inside], rtol=0.05)


@pytest.mark.slow
def test_preconditioned_descent_is_a_filter_in_its_own_coordinates() -> None:
    matrix = torch.diag(torch.tensor([2.0, 1.5, 1.0, 0.5, 0.25]))
    learner = stepped([0.3, 0.3, 0.3], matrix)
    plain = response(learner, task=TASK, n_prompts=512, coordinates=None)
    found = response(learner, task=TASK, n_prompts=512)
    assert left(plain, "free") > 0.02 > 5 * left(found, "free")
    root = matrix.sqrt().double().numpy()
    cosine = (found.coordinates * root).sum() / np.linalg.norm(root)
    assert cosine > 0.99 * np.linalg.norm(found.coordinates)
    given = response(learner, task=TASK, n_prompts=512, coordinates=matrix.sqrt().numpy())
    assert left(given, "3 steps") < 1e-12


def test_forgetting_shows_in_the_ages_and_pairs_do_not_interact() -> None:
    found = response(forgetting(0.04, 0.9), task=TASK, n_prompts=256)
    assert found.scalar("alpha")[0] == pytest.approx(0.9, abs=1e-9)
    assert found.scalar("gate")[0] == pytest.approx(0.9, abs=1e-9)
    np.testing.assert_allclose(found.position.weight, 20 * 0.04 * 0.9**found.position.age)
    assert found.order["size"].max() < 1e-20
    assert found.reading == "no interaction with forgetting"
    assert response(forgetting(0.04, 1.0), task=TASK, n_prompts=256).reading == "no interaction"


@pytest.mark.parametrize("gate", [1.0, 0.95])
def test_delta_rule_has_an_empty_triangle(gate: float) -> None:
    found = response(delta_rule(0.1, gate), task=TASK, n_prompts=1024)
    sizes = found.order
    later, earlier = (
        sizes[mask]["size"] for mask in (sizes.changed > sizes.pair, sizes.changed < sizes.pair)
    )
    assert (earlier == 0).all()
    assert later.mean() > 0.01
    for name, expected in (("eta", 0.1), ("gate", gate)):
        value, sem = found.scalar(name)
        assert abs(value - expected) < 4 * sem
    assert found.reading == "online"


def test_recursive_least_squares_interacts_both_ways_and_forgets() -> None:
    found = response(recursive_least_squares(0.9, 0.5), task=TASK, n_prompts=512)
    assert found.reading == "recursive least squares"
    later, earlier = found.scalar("later")[0], found.scalar("earlier")[0]
    assert earlier > 0.05 * later > 0


def test_the_mean_of_x_tells_debiased_from_plain_descent() -> None:
    plain = response(stepped([0.88]), task=TASK, n_prompts=256)
    debiased = response(partial(debiased_gd, eta=0.88), task=TASK, n_prompts=256)
    assert plain.scalar("mean of x")[0] == pytest.approx(0, abs=1e-6)
    assert debiased.scalar("mean of x")[0] == pytest.approx(1, abs=1e-6)
    parts = debiased.left.set_index("columns").left
    assert parts["+ mean of x"] < 1e-12 < 1e-4 < parts["filter"]


def test_kernel_smoother_follows_similarity() -> None:
    task = replace(TASK, context_length=100)
    found = response(partial(nadaraya_watson, omega=0.5, mu=1.0), task=task, n_prompts=256)
    assert found.reading == "kernel"
    weight = found.similarity.weight.to_numpy()
    assert (np.diff(weight[1:-1]) > 0).all()
    assert found.similarity.u.is_monotonic_increasing


@pytest.mark.slow
def test_a_function_in_numpy_gets_the_weights_of_one_in_torch() -> None:
    def in_numpy(prompts: Prompts) -> Tensor:
        x, y, query = (each.numpy() for each in (prompts.x, prompts.y, prompts.x_query))
        gram = x.transpose(0, 2, 1) @ x + 0.5 * np.eye(x.shape[2])
        beta = np.linalg.solve(gram, x.transpose(0, 2, 1) @ y)
        return torch.from_numpy((query[:, None] @ beta)[:, 0])

    by_differences = response(in_numpy, task=SMALL, n_prompts=512)
    by_autograd = response(partial(ridge, penalty=0.5), task=SMALL, n_prompts=512)
    pd.testing.assert_frame_equal(by_differences.filter, by_autograd.filter, rtol=1e-6)


@pytest.mark.slow
def test_pool_is_seen_in_the_coordinates_and_by_its_posterior() -> None:
    task = TaskConfig(d_x=4, context_length=8, noise_var=0.1, beta_var=0.25, n_tasks=4)
    found = response(bayes_of(task), task=task, n_prompts=2048)
    assert not found.by_gradient
    parts = found.left.set_index("columns").left
    assert parts["+ posterior"] < 1e-12 < 0.01 < parts["filter"]
    assert "even in y" not in set(found.scalars.name)
    pool = task.pool()[..., 0].numpy()
    second = pool.T @ pool
    metric = found.coordinates @ found.coordinates.T
    cosine = (second * metric).sum() / np.sqrt((second**2).sum() * (metric**2).sum())
    trace = np.trace(second) / np.sqrt(4 * (second**2).sum())
    assert cosine > 0.9 > trace


@pytest.mark.slow
def test_gradients_disagree_with_predictions_on_a_pool() -> None:
    task = TaskConfig(d_x=4, context_length=8, noise_var=0.1, beta_var=0.25, n_tasks=4)
    found = response(bayes_of(task), task=task, n_prompts=1024, by="gradient", coordinates=None)
    assert found.scalar("disagreement")[0] > 4
    gaussian = response(partial(ridge, penalty=0.5), task=SMALL, n_prompts=512)
    assert gaussian.scalar("disagreement")[0] < 4


def test_sparse_posterior_is_dmmse_over_all_sign_vectors() -> None:
    task = TaskConfig(d_x=5, context_length=9, sparsity=2, nonzeros="signs", noise_var=0.1)
    prompts = sample_prompts(task, 16, dtype=torch.float64)
    pool = sign_vectors(5, 2)[..., None] * task.beta_variance**0.5
    assert len(pool) == 40
    expected = dmmse(prompts, pool=pool, noise_var=0.1)
    torch.testing.assert_close(
        sparse_posterior(prompts, task=task), expected, rtol=1e-9, atol=1e-12
    )


def test_ridge_does_not_use_sparsity_and_the_posterior_does() -> None:
    task = TaskConfig(d_x=5, context_length=9, sparsity=1, nonzeros="signs", noise_var=0.1)
    assert response(bayes_of(task), task=task, n_prompts=256).uses_sparsity
    assert response(partial(ridge, penalty=0.5), task=task, n_prompts=256).uses_sparsity is False


def test_symmetries_that_are_exact_and_one_that_is_broken() -> None:
    found = response(partial(ridge, penalty=0.5), task=SMALL, n_prompts=512)
    rows = found.symmetries.set_index("symmetry").mismatch
    kept = ["order of pairs", "rotation of x", "sign of y", "y / 2", "2 y", "sum of two y"]
    assert (rows[kept] < 1e-20).all()
    assert rows["shift of y"] > 0.01
    online = response(delta_rule(0.3), task=SMALL, n_prompts=512).symmetries
    assert online.set_index("symmetry").mismatch["order of pairs"] > 0.01


def test_a_square_of_y_is_even_and_no_linear_map() -> None:
    def even(prompts: Prompts) -> Tensor:
        return ridge(prompts, penalty=0.5) + prompts.y.square().mean(1) * prompts.x_query[:, :1]

    found = response(even, task=SMALL, n_prompts=512)
    value, sem = found.scalar("even in y")
    prompts = sample_prompts(SMALL, 512, dtype=torch.float64)
    f, odd = even(prompts), ridge(prompts, penalty=0.5)
    assert value == pytest.approx(float((f - odd).square().mean() / f.square().mean()), rel=1e-9)
    assert found.reading == "no linear map"
    assert sem > 0


@pytest.mark.slow
def test_the_filter_after_each_layer() -> None:
    found = response(stack(), n_prompts=256, layers=True)
    last = found.filter[found.filter.layer == 1]
    np.testing.assert_allclose(
        last.phi[2:8], response(stack(), n_prompts=256).filter.phi[2:8], rtol=1e-6
    )
    first = found.filter[found.filter.layer == 0]
    np.testing.assert_allclose(first.phi[2:8], 0.4, rtol=1e-4)
    assert found.figures()["response_layers"].frames


def stack() -> Weights:
    """Two layers of linear attention that take a step of 0.4 each."""
    return gradient_descent_model([0.4, 0.4], d_x=5)


@pytest.mark.slow
def test_two_responses_have_an_output_column() -> None:
    task = replace(SMALL, d_y=2)
    found = response(partial(ridge, penalty=0.5), task=task, n_prompts=512)
    assert sorted(set(found.scalars.output)) == [0, 1]
    assert found.scalar("cross", 1)[0] == 0
    assert found.scalar("c", 1)[0] == pytest.approx(0.5 / 8, rel=1e-3)


def test_given_prompts_of_unknown_law_are_projected_by_predictions() -> None:
    prompts = sample_prompts(SMALL, 256, dtype=torch.float64)
    given = Prompts.from_arrays(prompts.x, prompts.y, prompts.x_query, prompts.y_query)
    found = response(partial(ridge, penalty=0.5), given)
    assert not found.by_gradient
    assert found.scalar("c")[0] == pytest.approx(0.5 / 8, rel=1e-3)
    assert found.order.empty
    assert any("beta" in note for note in found.notes)


@pytest.mark.slow
def test_equal_prompts_are_one_prompt() -> None:
    prompts = sample_prompts(SMALL, 256, dtype=torch.float64)
    rows = torch.arange(256).repeat(4)
    learner = delta_rule(0.3)
    once = response(learner, prompts, task=SMALL)
    with pytest.warns(UserWarning, match="256 distinct"):
        often = response(learner, prompts[rows], task=SMALL)
    np.testing.assert_allclose(
        often.position.weight_sem, once.position.weight_sem, rtol=1e-9, atol=1e-12
    )
    with (
        pytest.warns(UserWarning, match="63 distinct"),
        pytest.raises(ValueError, match="distinct"),
    ):
        response(learner, prompts[torch.arange(63).repeat(20)], task=SMALL)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"n_prompts": 63}, "64"),
        ({"by": "magic"}, "by"),
        ({"coordinates": "magic"}, "coordinates"),
        ({"coordinates": np.eye(2)}, r"\[3, 3\]"),
        ({"trim": 1.0}, "trim"),
    ],
)
def test_refused_arguments(arguments: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word) as error:
        response(partial(ridge, penalty=0.5), task=SMALL, **{"n_prompts": 512} | arguments)
    assert "\n" not in str(error.value)


def test_heavy_tails_zero_and_overflow_are_refused() -> None:
    def heavy(prompts: Prompts) -> Tensor:
        return ridge(prompts, penalty=0.5) * torch.exp(8 * prompts.x[:, 0, :1])

    with pytest.raises(ValueError, match="trim"):
        response(heavy, task=SMALL, n_prompts=256)
    with pytest.raises(ValueError, match="not all 0"):
        response(lambda prompts: 0 * prompts.y_query, task=SMALL, n_prompts=256)
    with pytest.raises(ValueError, match="overflow"):
        response(lambda prompts: 1e300 * prompts.y[:, 0], task=SMALL, n_prompts=256)


@pytest.mark.parametrize(("d_x", "context_length"), [(1, 6), (3, 1), (3, 2), (6, 3)])
def test_short_and_narrow_prompts_are_measured(d_x: int, context_length: int) -> None:
    task = TaskConfig(d_x=d_x, context_length=context_length, noise_var=0.1, beta_var=1 / d_x)
    found = response(partial(ridge, penalty=task.posterior_penalty), task=task, n_prompts=256)
    expected = task.posterior_penalty / context_length
    assert found.scalar("c")[0] == pytest.approx(expected, rel=0.01)
    assert np.isfinite(found.left["left"]).all()
    assert found.sentences()
    assert found.figures()


class Encoder(nn.Module):
    """One step of descent as a module with softmax-free attention, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.eta = nn.Parameter(torch.tensor(0.7))

    def forward(self, tokens: Tensor) -> Tensor:
        x, y = tokens[:, :-1, :3], tokens[:, :-1, 3:]
        return self.eta * (tokens[:, -1:, :3] @ (x.mT @ y))[:, 0] / x.shape[1]


def test_results_are_copies_and_have_columns() -> None:
    found = response(partial(ridge, penalty=0.5), task=SMALL, n_prompts=512)
    frame = found.to_frame()
    frame["value"] = 0.0
    assert found.to_frame()["value"].any()
    columns = {
        "symmetries": ["symmetry", "mismatch", "mismatch_sem", "bayes"],
        "filter": ["s", "phi", "phi_sem", "bayes"],
        "forms": ["form", "left", "left_sem"],
        "position": ["age", "weight", "weight_sem"],
        "similarity": ["u", "weight", "weight_sem"],
        "order": ["changed", "pair", "size", "size_sem", "slope", "slope_sem"],
        "left": ["columns", "left", "left_sem"],
        "scalars": ["name", "value", "sem"],
    }
    for name, expected in columns.items():
        assert getattr(found, name).columns.tolist() == expected
    figure = found.plot(beside=[found], names=["first", "second"])
    assert len([trace for trace in figure.data if trace.type == "heatmap"]) == 2


LIGHT = TaskConfig(d_x=3, context_length=20, noise_var=0.1, beta_var=1 / 3)


def ridge_and_more(prompts: Prompts) -> Tensor:
    return ridge(prompts, penalty=5.0) + 0.1 * prompts.y[:, 0] * prompts.x_query[:, :1]


COVERED = {"ridge with a further term": ridge_and_more, "delta rule": delta_rule(0.15, 0.97)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", COVERED)
def test_stated_errors_are_the_spread_over_seeds(name: str) -> None:
    """Spread over 100 seeds divided by the stated error, in the mean over the entries of a frame."""
    # Errors are those for given coordinates: the choice of coordinates adds to the spread.
    found = [
        response(COVERED[name], task=LIGHT, n_prompts=512, seed=seed, coordinates=None)
        for seed in range(100)
    ]
    columns = {"position": "weight", "order": "size", "left": "left", "forms": "left"}
    for frame, column in columns.items():
        values = np.stack([getattr(each, frame)[column] for each in found])
        errors = np.stack([getattr(each, frame)[f"{column}_sem"] for each in found])
        _require_coverage(frame, values, errors)
    # The knots of a filter differ from seed to seed: phi (s + c) hardly does.
    scale = np.stack([each.filter.s + 0.25 for each in found])
    phi, phi_sem = (np.stack([each.filter[c] for each in found]) for c in ("phi", "phi_sem"))
    _require_coverage("filter", (phi * scale)[:, 1:-1], (phi_sem * scale)[:, 1:-1])
    for scalar in ("c", "alpha", "amplitude", "mean of x", "later"):
        pairs = np.array([each.scalar(scalar) for each in found])
        _require_coverage(scalar, pairs[:, :1], pairs[:, 1:])


def _require_coverage(what: str, values: np.ndarray, errors: np.ndarray) -> None:
    used = errors.mean(0) > 1e-12
    spread, stated = values.std(0, ddof=1)[used], np.sqrt((errors**2).mean(0))[used]
    ratio = (spread / stated).mean()
    assert 0.8 < ratio < 1.25, (what, ratio)
