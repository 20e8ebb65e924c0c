"""Prompts of one's own arrays: their shapes, the predictions on them, and what is left out without a law."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mechinterp import classify
from mechinterp.analysis.ablation.ablate import ablate
from mechinterp.analysis.learners.compare import compare_learners
from mechinterp.config import CovarianceConfig, TaskConfig, as_task
from mechinterp.icl.given import PENALTIES, PromptsTask, no_law
from mechinterp.icl.predictors import debiased_gd, ridge
from mechinterp.icl.prompts import Prompts, draw_prompts
from mechinterp.models.constructions.one_layer import debiased_gradient_step
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import predictor_of
from tests.conftest import refused

N, LENGTH, D_X = 64, 12, 3


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    """Correlated x that is not centred, task vectors whose mean is not 0, and targets that are not linear."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, LENGTH + 1, D_X)) @ rng.normal(size=(D_X, D_X)) + 0.3
    beta = rng.normal(size=(N, D_X)) + 0.5
    y = np.tanh(np.einsum("nld,nd->nl", x, beta))
    return {"x": x[:, :-1], "y": y[:, :-1], "x_query": x[:, -1], "y_query": y[:, -1]}


def test_an_axis_of_one_response_is_added_and_both_libraries_are_taken(arrays):
    given = Prompts.from_arrays(**arrays)
    assert (given.y.shape, given.y_query.shape) == ((N, LENGTH, 1), (N, 1))
    assert given.beta is None
    assert "without task vectors" in repr(given)
    torch.testing.assert_close(given.y_query_clean, given.y_query)
    tensors = {name: torch.from_numpy(array).float() for name, array in arrays.items()}
    wide = Prompts.from_arrays(**tensors | {"y": tensors["y"][..., None]})
    assert wide.x.dtype == torch.float32
    torch.testing.assert_close(wide.y.double(), given.y, rtol=0, atol=1e-6)
    assert len(given[:5]) == 5
    assert given.to(torch.float32).beta is None


def test_the_clean_target_is_that_of_the_task_vectors(arrays):
    beta = np.ones((N, D_X))
    given = Prompts.from_arrays(**arrays, beta=beta)
    np.testing.assert_allclose(given.y_query_clean[:, 0], arrays["x_query"].sum(1))
    own = Prompts.from_arrays(**arrays, beta=beta, y_query_clean=np.zeros(N))
    assert not own.y_query_clean.any()


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("x", np.ones((4, 3)), ("[batch, L, d_x]",)),
        ("y", np.ones((N, LENGTH + 1)), (f"[{N}, {LENGTH}, 1]",)),
        ("x_query", np.ones((N, D_X + 1)), (f"[{N}, {D_X}]",)),
        ("y_query", np.ones((N, 2)), (f"[{N}, 1]",)),
        ("beta", np.ones((N, D_X + 1)), (f"[{N}, {D_X}, 1]",)),
        ("y", np.full((N, LENGTH), np.nan), ("finite numbers",)),
        ("y", np.ones((N, LENGTH), complex), ("real numbers",)),
        ("y", "text", ("array of numbers",)),
    ],
)
def test_arrays_that_do_not_fit_are_refused(arrays, name: str, array: object, words: tuple):
    with refused(name, *words):
        Prompts.from_arrays(**arrays | {name: array})


def test_given_prompts_stand_for_their_law(arrays):
    given = Prompts.from_arrays(**arrays)
    task = PromptsTask.of(given)
    assert evaluation_prompts(task).x.shape == given.x.shape
    losses = [(ridge(given, penalty=p) - given.y_query).square().mean().item() for p in PENALTIES]
    assert task.posterior_penalty == pytest.approx(PENALTIES[int(np.argmin(losses))])
    assert no_law(task)
    assert "law is not known" in task.in_words
    with refused("law of the given prompts is unknown"):
        draw_prompts(task, 4)
    law = TaskConfig(d_x=D_X, noise_var=0.3)
    stated = PromptsTask.of(given, law)
    assert (no_law(stated), stated.posterior_penalty) == (False, law.posterior_penalty)
    assert stated != task == PromptsTask.of(given)
    with refused("d_x", "that of the prompts, 3", 4):
        PromptsTask.of(given, TaskConfig(d_x=4))
    pool = TaskConfig(d_x=D_X, n_tasks=4)
    torch.testing.assert_close(PromptsTask.of(given, pool).pool(), pool.pool(), rtol=0, atol=0)


def test_prompts_with_x_of_zeros_have_a_law(arrays):
    """y says nothing about beta then, and all of it is noise."""
    zeros = arrays | {name: np.zeros_like(arrays[name]) for name in ("x", "x_query")}
    task = PromptsTask.of(given := Prompts.from_arrays(**zeros))
    assert task.beta_var == pytest.approx(given.y.square().mean().item())


@pytest.mark.slow
def test_a_step_is_found_on_any_data_and_what_needs_a_law_is_left_out(arrays):
    given, weights = Prompts.from_arrays(**arrays), debiased_gradient_step(0.15, 0.01, d_x=D_X)
    found = classify(weights, given)
    assert (found.label, found.n_prompts) == ("debiased_gd", N)
    error = predictor_of(weights).predict(given) - given.y_query
    assert found.loss.model == pytest.approx(error.square().mean().item())
    assert "Left out" in found.left_out
    assert found.left_out in repr(found)
    assert np.isnan(found.scales.eta_optimal)
    assert classify(weights, given, task={"noise_var": 0.2}).left_out == ""
    fits = compare_learners(weights, given)
    row = fits.at_trained.loc["debiased_gd"]
    assert row.n_pairs == LENGTH
    assert row.r2 == pytest.approx(1, abs=0.01)
    shape = debiased_gd(given, eta=1.0)
    predicted = predictor_of(weights).predict(given)
    eta = (shape * predicted).sum() / shape.square().sum()
    assert row.factor == pytest.approx(eta.item())
    risk = ablate(weights, given, what="heads").full_risk
    assert risk == pytest.approx(found.loss.model)  # y_query stands for the clean target


def test_covariances_of_another_scale_and_of_any_matrix():
    task = TaskConfig(d_x=2, covariance=CovarianceConfig(scale=4.0))
    plain = draw_prompts(TaskConfig(d_x=2), 8, dtype=torch.float64)
    torch.testing.assert_close(draw_prompts(task, 8, dtype=torch.float64).x, 2 * plain.x)
    assert task.signal_var == 4
    # x times 2 and beta over 2 are the same y: the best step is a quarter.
    model = debiased_gradient_step(0.5, 0.01, d_x=2)
    laws = replace(task, beta_var=0.125), TaskConfig(d_x=2)
    scaled, unit = (classify(model, task=law, n_prompts=16) for law in laws)
    assert scaled.scales.eta_optimal == pytest.approx(unit.scales.eta_optimal / 4, rel=1e-12)
    Sigma = ((2.0, 0.6), (0.6, 1.0))
    full = TaskConfig(d_x=2, covariance=CovarianceConfig("matrix", matrix=Sigma))
    x = draw_prompts(full, 4096, dtype=torch.float64).x.flatten(0, 1).numpy()
    # Standard error of an entry: at most sqrt(2) * 2 / sqrt(4096 * 40) = 0.007.
    np.testing.assert_allclose(x.T @ x / len(x), Sigma, atol=5 * 0.007)
    for matrix in ([[1, 2], [2, 1]], [[1, 0.5], [0.4, 1]], [[1, 0]], []):
        with refused("task.covariance.matrix", "symmetric"):
            as_task({"d_x": 2, "covariance": {"kind": "matrix", "matrix": matrix}})
    with refused("matrix", "d_x = 3 rows", 2):
        TaskConfig(d_x=3, covariance=full.covariance)


def test_prompts_of_a_table_keep_its_test_rows_apart():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(40, 2)) * [1.0, 50.0] + 3
    y = np.arange(40.0)  # names the row
    found = Prompts.from_table(x, y, context_length=12, n_prompts=300, seed=2)
    pairs, queries = set(found.y.flatten().tolist()), set(found.y_query.flatten().tolist())
    assert (len(pairs), len(queries)) == (30, 10)
    assert not pairs & queries
    assert all(len(set(one.flatten().tolist())) == 12 for one in found.y)
    rows = found.y[..., 0].long()
    np.testing.assert_array_equal(found.x, x[rows])
    np.testing.assert_array_equal(found.x_query, x[found.y_query[:, 0].long()])
    other = Prompts.from_table(x, y, context_length=12, n_prompts=300, seed=3)
    assert set(other.y_query.flatten().tolist()) != queries
    scaled = Prompts.from_table(x, y, context_length=12, n_prompts=300, seed=2, standardise=True)
    train = torch.tensor(x[sorted(int(row) for row in pairs)])
    mean, std = train.mean(0), train.std(0, correction=0)
    torch.testing.assert_close(scaled.x, (found.x - mean) / std)
    torch.testing.assert_close(scaled.x_query, (found.x_query - mean) / std)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"context_length": 31}, ("context_length", "1 to 30", "31")),
        ({"context_length": 0}, ("context_length", "got 0")),
        ({"n_prompts": 0}, ("n_prompts", "got 0")),
        ({"y": np.ones((39, 1))}, ("[40, 2]", "[39, 1]")),
        ({"x": np.ones((40, 2)), "standardise": True}, ("x must vary",)),
    ],
)
def test_tables_without_prompts_are_refused(arguments: dict, words: tuple):
    given = {"x": np.random.default_rng(0).normal(size=(40, 2)), "y": np.arange(40.0)}
    with refused(*words):
        Prompts.from_table(**(given | {"context_length": 5, "n_prompts": 8} | arguments))
