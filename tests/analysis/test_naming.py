"""The algorithm of a model of several layers, and what its heads are worth: models built by hand get their labels."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformer_lens.tools.analysis.interchange import (
    NormMatchedPlacebo,
    SubspaceInterchange,
    collect_activations,
    intervened_logits,
    random_basis,
)

from mechinterp.analysis.multi_layer.classify import layered_classification
from mechinterp.analysis.multi_layer.identities import PAIR_ORDER, identities
from mechinterp.analysis.multi_layer.naming import labelled, name_algorithm
from mechinterp.analysis.multi_layer.naming_prompts import (
    NOISES,
    NamingSetting,
    Subject,
    relative_risk,
)
from mechinterp.analysis.multi_layer.naming_result import Naming
from mechinterp.analysis.multi_layer.naming_rules import Limits
from mechinterp.analysis.multi_layer.rests import reflected, rest_of
from mechinterp.analysis.multi_layer.stream import step_effects
from mechinterp.analysis.stats import best_factor
from mechinterp.checkpoints.checkpoint import save
from mechinterp.config import CovarianceConfig, ExperimentConfig, TaskConfig
from mechinterp.icl.algorithm import PromptMoments
from mechinterp.icl.algorithms import ALGORITHMS
from mechinterp.icl.predictors import dmmse, ridge, zero_prediction
from mechinterp.icl.prompts import (
    Prompts,
    covariance_matrix,
    draw_prompts,
    generator_for,
)
from mechinterp.icl.sparse_predictors import gradient_descent
from mechinterp.models.constructions.descent import (
    gd_plus_plus_model,
    gradient_descent_model,
    preconditioned_gd_model,
    rotated,
    with_noise,
)
from mechinterp.models.constructions.sparse import preprocess_then_optimise_model
from mechinterp.models.hooked.query_position import NoStreamError
from mechinterp.models.hooked.runner import HookedPredictor
from mechinterp.models.run.evaluation import task_for
from mechinterp.models.run.predictor import predictor_of
from mechinterp.models.run.ways import Predictor
from mechinterp.models.weights import Weights, stacked
from tests.conftest import refused, sampled
from tests.models.test_layered_models import encoder, garg, read_encoder, read_gpt2

DENSE = TaskConfig(d_x=8)
KMS = TaskConfig(d_x=8, covariance=CovarianceConfig(kind="kms", rho=0.6))
SPARSE = TaskConfig(d_x=16, sparsity=4, nonzeros="signs")
SIGMA = torch.from_numpy(covariance_matrix(KMS.covariance, 8))

EQUAL = gradient_descent_model([0.4] * 4, d_x=8)
FALLING = gradient_descent_model([0.7, 0.5, 0.3, 0.2], d_x=8)
GD_PLUS_PLUS = gd_plus_plus_model([0.6, 0.5, 0.4, 0.4], [0.2, 0.2, 0.15, 0.0], d_x=8)
PRECONDITIONED = preconditioned_gd_model(
    [0.5, 0.4, 0.3, 0.3], [0.2, 0.2, 0.4, 0.4], covariance=SIGMA
)
ALGORITHM_1 = preprocess_then_optimise_model([1.0, 0.8, 0.6], d_x=16)
PROMPTS = draw_prompts(DENSE, 64, dtype=torch.float64)
"""Given to a test, no more are drawn until the label stands."""
MORE = draw_prompts(DENSE, 128, dtype=torch.float64)
BY_LABEL = {each.label: each for each in ALGORITHMS}
LABELS = {
    "gradient_descent": (FALLING, DENSE),
    "gd_plus_plus": (GD_PLUS_PLUS, DENSE),
    "preconditioned_descent": (PRECONDITIONED, KMS),
    "preprocess_then_optimise": (ALGORITHM_1, SPARSE),
}


def noisy(weights: Weights, seed: int = 0) -> Weights:
    return with_noise(rotated(weights, seed=seed), 0.03, seed=seed)


def saved(weights: Weights, task: TaskConfig, folder: Path) -> Path:
    save(folder, ExperimentConfig(task=task, model=weights.model), weights, step=0)
    return folder


def r2_of(found: Naming, label: str) -> np.ndarray:
    """R² for the last prediction, at the own length and in other settings, [setting]."""
    scores = found.measured.last
    return scores.r2()[scores.names.index(label)]


def path_r2_of(found: Naming, label: str) -> np.ndarray:
    """R² after each layer, [layer]."""
    scores = found.measured.path
    return scores.r2()[scores.names.index(label), : scores.n_own]


@pytest.fixture(scope="module")
def exact() -> Naming:
    return name_algorithm(rotated(FALLING, seed=0), PROMPTS, task=DENSE)


@pytest.mark.slow
def test_prompts_that_reach_the_tails_give_no_worse_label():
    """One prompt in 6,900 has a prediction 10,000 times too large: among 65,536 prompts there are always some."""
    task = TaskConfig(d_x=4)

    def descent(prompts: Prompts) -> Tensor:
        path = gradient_descent(prompts, steps=3, eta=0.4)[1:]
        rare = prompts.x_query[:, :1].abs() > 3.8
        return path * torch.where(rare, 1e4, 1.0)

    found = name_algorithm(descent, task=task, n_prompts=4096)
    assert found.label == "gradient_descent", found.reason
    assert found.measured.relative_risk < 1


@pytest.mark.slow
def test_an_exact_model_is_explained_to_rounding_in_every_setting(exact: Naming):
    assert (exact.label, exact.mechanism, exact.function) == ("gradient_descent",) * 3
    assert exact.followed == exact.label
    assert all(risk < 0.95 for _, risk in exact.risks.values())
    for r2 in (r2_of(exact, exact.label), path_r2_of(exact, exact.label)):
        np.testing.assert_allclose(r2, 1, rtol=0, atol=1e-9)
    for r2 in (exact.steps.steps_r2, exact.steps.exchanged_r2):
        np.testing.assert_allclose(r2, 1, rtol=0, atol=1e-8)
    # From the path each step comes back in its place.
    np.testing.assert_allclose(exact.scalars(exact.label), [0.7, 0.5, 0.3, 0.2], rtol=1e-6)
    assert len(exact.test_frame()) == 6
    np.testing.assert_allclose(exact.test_frame().mismatch, 0, rtol=0, atol=1e-12)
    assert [length for length, _ in exact.risks.values()] == [40, 20, 80, 40, 40]
    assert list(exact.risks)[-1] == "less noise"
    assert [len(exact.scalars(name)) for name in exact.members] == [4, 7, 1, 3, 8, 1]
    assert exact.frequency == {"gradient_descent": 1.0}
    ridge, newton = (r2_of(exact, name)[0] for name in ("ridge_like", "newton"))
    lead, sem = exact.lead("ridge_like", "newton")
    assert lead == pytest.approx(ridge - newton, abs=1e-9)
    assert sem > 0
    assert exact.lead("ridge_like", "ridge_like") == (0, 0)


@pytest.mark.slow
def test_the_label_is_the_row_without_a_why_not(exact: Naming):
    frame = exact.to_frame().set_index("learner")
    assert frame.index[0] == exact.label
    assert (frame.why_not == "").tolist() == [True] + [False] * (len(frame) - 1)
    assert frame.scalars.iloc[0] == "0.700, 0.500, 0.300, 0.200"
    assert frame.loc["ridge_like", "r2"] == r2_of(exact, "ridge_like")[0]
    newton = frame.loc["newton", [f"layer_{layer}_r2" for layer in range(4)]]
    assert newton.tolist() == path_r2_of(exact, "newton").tolist()
    assert exact.why_not["ridge_like"].rule in ("factor", "rival")
    assert frame.steps_r2.isna().sum() == len(frame) - 1


@pytest.mark.slow
def test_the_numbers_of_a_label_keep_the_limits_that_decide(exact: Naming):
    numbers = {each.column: each for each in exact.numbers}
    assert (numbers["r2"].value, numbers["r2"].sem) == exact.explained("gradient_descent")
    assert numbers["least_layer_r2"].value == path_r2_of(exact, "gradient_descent").min()
    assert numbers["relative_risk"].value == exact.measured.relative_risk
    assert numbers["label_frequency"].value == exact.frequency["gradient_descent"] == 1
    least = exact.steps.loc[exact.steps.steps_r2.idxmin()]
    assert (numbers["steps_r2"].value, numbers["steps_r2"].sem) == (
        least.steps_r2,
        least.steps_r2_sem,
    )
    scalars = [each.value for each in exact.numbers if each.name == "scalars"]
    assert scalars == exact.evidence()["scalars"].tolist()
    limited = [each for each in exact.numbers if each.check is not None]
    assert {"r2", "least_layer_r2", "progress", "label_frequency"} < {each.name for each in limited}
    assert all(each.check.holds for each in limited)
    frame = exact.evidence_frame()
    assert frame.how.str.len().min() > 0
    assert frame.value.tolist() == [each.value for each in exact.numbers]


@pytest.mark.slow
def test_at_the_edge_the_label_is_undetermined_with_its_candidates(exact: Naming):
    """Gradient descent of which noise takes off as much as is allowed."""
    path = exact.measured.path
    assert path.names.index("gradient_descent") == 0
    error = path.error.copy()
    noise = np.random.default_rng(0).exponential(size=path.size.shape[1])
    error[:, :4] += 0.02 * path.size[:4].mean(1, keepdims=True) * noise / noise.mean()
    measured = replace(exact.measured, path=replace(path, error=error))
    decision, frequency = labelled(measured, Limits())
    assert set(frequency) == {"gradient_descent", "undetermined"}
    assert max(frequency.values()) < 0.9
    assert decision.label == "undetermined"
    unsure = decision.why_not["gradient_descent"]
    assert (unsure.rule, unsure.value) == ("frequency", frequency["gradient_descent"])


@pytest.mark.parametrize(("factor", "by_weights"), [(2.0, True), (3.0, False), (-1.0, True)])
def test_a_model_whose_output_is_scaled_is_told_its_factor(factor: float, by_weights: bool):
    target = PROMPTS.y_query_clean
    predicted = predictor_of(FALLING).predict(PROMPTS).double()
    best, _ = best_factor(predicted, target)
    risk = relative_risk(best * predicted, target)
    W_U = factor * best * FALLING.by_name["unembed.W_U"]
    scaled = FALLING.with_tensors(
        stacked({**FALLING.by_name, "unembed.W_U": W_U}, FALLING.n_layers)
    )
    predict = predictor_of(scaled).predict
    found = name_algorithm(scaled if by_weights else predict, PROMPTS, task=DENSE)
    assert (found.label, found.why) == ("undetermined", "scale")
    scale = found.measured.scale
    assert scale.factor == pytest.approx(1 / factor, rel=1e-4)
    assert scale.risk == pytest.approx(risk, rel=1e-4)
    assert 0 < scale.ridge < scale.risk < 0.1
    assert f"times {scale.factor:.3g}" in found.reason


def test_a_logistic_model_has_a_factor_and_predictions_that_no_factor_helps_are_unstructured():
    other = torch.Generator().manual_seed(0)

    def logit(prompts: Prompts) -> Tensor:
        return 8 * ridge(prompts, penalty=0.1).tanh()

    def noise(prompts: Prompts) -> Tensor:
        return torch.randn(prompts.y_query.shape, generator=other, dtype=torch.float64)

    found = name_algorithm(logit, PROMPTS, task=DENSE)
    assert (found.label, found.why) == ("undetermined", "scale")
    assert 0 < found.measured.scale.factor < 0.5
    for model in (noise, lambda prompts: 0 * prompts.y_query):
        found = name_algorithm(model, PROMPTS, task=DENSE)
        assert (found.label, found.why) == ("unstructured", "useless")


@pytest.mark.parametrize("no_better", [False, True])
def test_a_logit_is_not_measured_by_squared_error(no_better: bool):
    """Three steps of logistic regression on responses of -1 and 1; the expected response is tanh(z / 2)."""
    drawn = draw_prompts(DENSE, 64, dtype=torch.float64)
    signs = {name: getattr(drawn, name).sign() for name in ("y", "y_query", "y_query_clean")}
    prompts = replace(drawn, **signs)

    def logit(given: Prompts) -> Tensor:
        w = torch.zeros(len(given), 8, 1, dtype=torch.float64)
        for _ in range(3):
            rest = given.y / (1 + (given.y * (given.x @ w)).exp())
            w = w + 6 * given.x.mT @ rest / given.x.shape[1]
        return (given.x_query[:, None] @ w)[:, 0] * (-1 if no_better else 1)

    found = name_algorithm(logit, prompts)
    assert found.measured.relative_risk > 2
    assert (found.label, found.why) == ("undetermined", "logit")
    assert found.measured.scale.two_values == (-1, 1)
    assert "squared error is the wrong loss" in found.reason
    assert "-1 + 2 sigmoid(z)" in found.reason
    if not no_better:
        expected = name_algorithm(lambda given: (logit(given) / 2).tanh(), prompts)
        assert expected.measured.useful


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        (FALLING, {"n_prompts": 4}, ["n_prompts", 16, 4]),
        (FALLING, {"task": SPARSE, "n_prompts": 16}, ["(8, 1)", "(16, 1)"]),
        (zero_prediction, {}, ["name_algorithm", "task"]),
        (lambda prompts: prompts.y, {"task": DENSE}, ["[2, 1]", "[layer, 2, 1]"]),
    ],
)
def test_what_cannot_be_named_is_refused(model, settings: dict, words: list):
    with refused(*words):
        name_algorithm(model, **settings)


@pytest.mark.slow
def test_where_a_model_fails_it_is_not_answered():
    # Steps that are stable for I and far from it for eigenvalues of 3 and more.
    found = name_algorithm(gradient_descent_model([0.9] * 6, d_x=8), task=DENSE, n_prompts=64)
    assert found.risks["wide spread"][1] > 1
    assert found.measured.relative_risk < 0.5
    assert "wide spread" not in found.measured.last.columns
    assert found.label == "gradient_descent"


@pytest.mark.slow
def test_preconditioning_is_no_candidate_where_it_changes_nothing(exact: Naming):
    assert "preconditioned_descent" not in exact.members
    found = name_algorithm(gradient_descent_model([0.3, 0.2], d_x=8), task=KMS, n_prompts=64)
    assert "preconditioned_descent" in found.members
    assert found.label == "gradient_descent"


@pytest.mark.slow
def test_gd_plus_plus_is_named_by_its_path_of_predictions():
    plain = name_algorithm(rotated(GD_PLUS_PLUS, seed=0), MORE, task=DENSE)
    assert plain.label == "gd_plus_plus"
    np.testing.assert_allclose(plain.steps.steps_r2, 1, rtol=0, atol=1e-6)
    scalars = plain.scalars("gd_plus_plus").tolist()
    member = plain.measured.last.learners[plain.members.index("gd_plus_plus")]

    def path(prompts: Prompts) -> Tensor:
        return member.predictions(PromptMoments(prompts, DENSE), scalars, 4)

    found = name_algorithm(Impostor(path), MORE, task=DENSE)
    assert (found.label, found.steps) == ("gd_plus_plus", None)


class Impostor(Predictor):
    """A model whose stream holds x_query as it is, and given predictions."""

    n_layers, n_heads, weights, is_hooked = 4, 1, None, False

    def __init__(self, path: Callable[[Prompts], Tensor]) -> None:
        super().__init__(task=DENSE)
        self.path = path

    @property
    def hooked(self) -> HookedPredictor:
        raise NoStreamError("It has no hooks.")

    def predict(self, prompts: Prompts) -> Tensor:
        return self.path(prompts.to(torch.float64))[-1]

    def streams(self, prompts: Prompts, **_: object) -> Tensor:
        known = self.path(prompts.to(torch.float64))
        known = torch.cat([torch.zeros_like(known[:1]), known])
        x = prompts.x_query.double().expand(len(known), -1, -1)
        return torch.cat([x, known], dim=2)[:, :, None]


def descent(prompts: Prompts) -> Tensor:
    return gradient_descent(prompts, steps=3, eta=0.5)[1:]


@pytest.mark.slow
def test_functions_of_prompts_are_sources():
    # No more prompts are used than these.
    given = draw_prompts(DENSE, 48, generator=generator_for(3, "eval", 0), context_length=30)
    found = name_algorithm(descent, given, task=DENSE)
    assert (found.label, found.n_layers, found.n_prompts) == ("gradient_descent", 3, 48)
    assert [length for length, _ in found.risks.values()] == [30, 15, 60, 30, 30, 30, 30]
    np.testing.assert_allclose(found.scalars("gradient_descent"), 0.5, rtol=1e-6)
    last = name_algorithm(lambda prompts: descent(prompts)[-1], PROMPTS, task=DENSE)
    assert (last.label, last.function, last.why) == ("undetermined", "gradient_descent", "no path")
    ridged = name_algorithm(partial(ridge, penalty=0.7), PROMPTS, task=DENSE)
    assert (ridged.label, ridged.mechanism) == ("ridge_like", "undetermined")
    np.testing.assert_allclose(ridged.scalars("ridge_like"), 0.7, rtol=1e-4)
    assert "linear in y: sum" in ridged.measured.tests


def test_prompts_without_task_vectors_leave_sums_out_and_keep_the_law():
    """`Prompts.from_arrays` of a model's own data has no beta: sums have no target, all other identities have one."""
    model, known = gradient_descent_model([0.5, 0.3], d_x=3), TaskConfig(d_x=3, noise_var=0.0)
    full = draw_prompts(known, 48, dtype=torch.float64)
    bare = Prompts.from_arrays(full.x, full.y, full.x_query, full.y_query)
    found, other = (name_algorithm(model, each, task=known) for each in (bare, full))
    assert found.label == other.label == "gradient_descent"
    assert other.measured.tests.keys() - found.measured.tests.keys() == {
        "linear in x_query",
        "linear in y: sum",
    }
    np.testing.assert_allclose(
        found.scalars("gradient_descent"), other.scalars("gradient_descent"), rtol=1e-9
    )
    assert found.risks["double length"] == other.risks["double length"]


@pytest.mark.parametrize("pairs", [0.0, 1.0])
def test_targets_that_are_all_0_say_nothing_about_a_model(pairs: float):
    drawn = draw_prompts(TaskConfig(d_x=3), 32, dtype=torch.float64)
    prompts = Prompts.from_arrays(drawn.x, pairs * drawn.y, drawn.x_query, 0 * drawn.y_query)
    model = gradient_descent_model([0.5, 0.3], d_x=3)
    found = name_algorithm(model, prompts, task="unknown")
    assert (found.label, found.measured.without_targets) == ("undetermined", True)
    law = task_for(model, "unknown", "classify", prompts)
    for text in (found.reason, layered_classification(model, law).reason):
        assert not {"nan", "inf"} & set(text.split())


def test_mismatches_risk_and_effects_of_steps_have_errors_over_prompts():
    """On prompts that are given twice the means are the same and the errors are smaller by sqrt((n - 1) / (2 n - 1))."""
    task = TaskConfig(d_x=3, noise_var=0.0)
    prompts = draw_prompts(task, 64, dtype=torch.float64)
    model = predictor_of(with_noise(gradient_descent_model([0.5, 0.3], d_x=3), 0.05, seed=0))
    subject, n = Subject(model, task, 2), len(prompts) // 2
    once, twice = (
        NamingSetting(each, model.predict(each))
        for each in (prompts, prompts[torch.arange(128) // 4 * 2 + torch.arange(128) % 2])
    )
    found = identities(subject.predict, once, task, 0)["linear in y: times 2"]
    again = identities(subject.predict, twice, task, 0)["linear in y: times 2"]
    assert again.mismatch() == pytest.approx(found.mismatch(), rel=1e-9)
    fewer = ((n - 1) / (2 * n - 1)) ** 0.5
    assert again.mismatch_sem() == pytest.approx(fewer * found.mismatch_sem(), rel=1e-9)
    assert found.mismatch_sem() > 0
    n = len(prompts)
    fewer = ((n - 1) / (2 * n - 1)) ** 0.5
    assert twice.relative_risk == pytest.approx(once.relative_risk, rel=1e-12)
    assert twice.relative_risk_sem == pytest.approx(fewer * once.relative_risk_sem, rel=1e-9)
    effects = step_effects(model, ALGORITHMS[0], np.array([0.5, 0.3]), prompts, task)
    assert effects is not None
    assert (effects["steps_r2_sem"] > 0).all()


def bayes(prompts: Prompts, levels: tuple[float, float], beta_var: float) -> Tensor:
    """Posterior mean under two noise variances that are equally likely."""
    x, y, query = prompts.x.double(), prompts.y.double(), prompts.x_query.double()
    logs, means = [], []
    for level in levels:
        K = beta_var * x @ x.mT + level * torch.eye(x.shape[1], dtype=torch.float64)
        C = torch.linalg.cholesky(K)
        z = torch.linalg.solve_triangular(C, y, upper=False)
        logs.append(-z.square().sum((1, 2)) / 2 - C.diagonal(dim1=1, dim2=2).log().sum(1))
        inner = x.mT @ x + level / beta_var * torch.eye(x.shape[2], dtype=torch.float64)
        means.append((query[:, None] @ torch.linalg.solve(inner, x.mT @ y))[:, 0])
    weight = torch.softmax(torch.stack(logs), 0)[..., None]
    return (weight * torch.stack(means)).sum(0)


@pytest.mark.slow
@pytest.mark.parametrize("noise_var", [0.01, 0.1, 1.0])
def test_bayes_over_two_noise_levels_is_no_ridge_regression(noise_var: float):
    """Prompts of one noise level show one penalty (R² 1 to rounding); other noise shows the other."""
    task = TaskConfig(d_x=4, context_length=80, noise_var=noise_var)
    found = name_algorithm(
        partial(bayes, levels=(0.01, 1.0), beta_var=0.25), task=task, n_prompts=64
    )
    assert found.explained("ridge_like")[0] == pytest.approx(1, abs=1e-6)
    # At the larger level scaled y changes no prediction, so that adaptive ridge is not asked.
    assert found.label == ("undetermined" if noise_var == 1 else "adaptive_ridge")
    assert found.why_not["ridge_like"].where in NOISES
    # The same with one level is ridge regression at every noise.
    alone = name_algorithm(
        partial(bayes, levels=(0.1, 0.1), beta_var=0.25), task=task, n_prompts=64
    )
    assert alone.label == "ridge_like"
    assert alone.scalars("ridge_like") == pytest.approx([0.4], rel=1e-4)
    columns = alone.measured.last.columns
    assert {"less noise", "more noise"} <= set(columns)
    r2 = alone.measured.last.r2()[alone.measured.last.names.index("ridge_like")]
    assert r2.min() > 1 - 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "label"), [(0.85, "undetermined"), (1.04, "gradient_descent")])
def test_a_read_out_of_another_size_is_another_learner(factor: float, label: str):
    """Other step sizes take most of a factor up; it counts if it explains much of what they leave."""
    plain = rotated(gradient_descent_model([0.5, 0.4, 0.45], d_x=4), seed=0)
    W_U = factor * plain.by_name["unembed.W_U"]
    tensors = stacked({**plain.by_name, "unembed.W_U": W_U}, plain.n_layers)
    weights = with_noise(plain.with_tensors(tensors), 0.01, seed=0)
    found = name_algorithm(weights, task=TaskConfig(d_x=4, context_length=24, noise_var=0.1))
    assert found.label == label, found.reason
    assert found.explained("gradient_descent")[0] > 0.99
    if label == "undetermined":
        reason = found.why_not["gradient_descent"]
        assert (reason.rule, reason.limit) == ("factor", Limits().read_out)
        assert reason.value == pytest.approx(factor, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("eta", "seed"), [(0.2, 1), (0.6, 0), (1.0, 0), (1.2, 0), (1.2, 1)])
def test_one_step_of_descent_is_found_among_functions(eta: float, seed: int):
    """Other searches end at four steps, with an R² of .70 to .996; one step and zeros is exact."""
    task = TaskConfig(d_x=4, context_length=20, noise_var=0.1)

    def one_step(prompts: Prompts) -> Tensor:
        return gradient_descent(prompts, steps=1, eta=eta)[-1]

    found = name_algorithm(one_step, task=task, seed=seed)
    assert (found.label, found.function, found.why) == (
        "undetermined",
        "gradient_descent",
        "no path",
    )
    assert found.explained("gradient_descent")[0] == pytest.approx(1, abs=1e-9)
    np.testing.assert_allclose(
        np.sort(found.scalars("gradient_descent")), [0, 0, 0, eta], atol=1e-5
    )


@pytest.mark.slow
def test_the_posterior_mean_of_a_pool_is_a_function():
    task = TaskConfig(d_x=4, context_length=8, noise_var=0.25, n_tasks=8)
    prompts = draw_prompts(task, 128, dtype=torch.float64)

    def named(noise_var: float) -> Naming:
        memory = partial(dmmse, pool=task.pool(), noise_var=noise_var)
        return name_algorithm(memory, prompts, task=task)

    found = named(task.noise_var)
    assert (found.label, found.mechanism) == ("posterior_mean", "undetermined")
    # (beta_1 + beta_2) / sqrt 2 is no task of the pool.
    assert "linear in y: sum" not in found.measured.tests
    # For a little less noise it is within .5%; the task has no symmetry, so that only rounding is noise.
    found = named(0.9 * task.noise_var)
    assert r2_of(found, "posterior_mean")[0] > 1 - Limits().tie
    assert (found.label, found.why) == ("undetermined", "rest, no symmetry"), found.reason


@pytest.mark.slow
def test_an_order_of_the_pairs_is_no_batch_learner():
    """Recursive least squares that forgets: the newest pair weighs most."""

    def forgetting(prompts: Prompts) -> Tensor:
        age = torch.arange(prompts.x.shape[1] - 1, -1, -1).double()
        root = (0.95**age).sqrt()[:, None]
        return ridge(replace(prompts, x=prompts.x * root, y=prompts.y * root), penalty=0.5)

    found = name_algorithm(forgetting, MORE, task=DENSE)
    assert found.label == "recursive_least_squares"
    assert found.scalars("recursive_least_squares") == pytest.approx([0.95, 0.5], abs=1e-3)
    assert found.measured.tests[PAIR_ORDER].mismatch() > Limits().tie
    assert (
        found.why_not["ridge_like"].where == PAIR_ORDER or found.why_not["ridge_like"].rule == "far"
    )


@pytest.mark.parametrize("task", [DENSE, SPARSE, KMS], ids=["dense", "sparse", "chain"])
def test_noise_of_weights_keeps_a_share_of_one_over_d(task: TaskConfig):
    """x^T E b with entries of +-1 in E: other signs keep its diagonal, another order of a chain on average less than half."""
    prompts = draw_prompts(task, 4096, dtype=torch.float64)
    d = task.d_x
    draws = []
    for seed in range(8):
        E = torch.randn(d, d, generator=generator_for(seed, "init", 0)).sign().double()
        others = reflected(prompts, task, seed)
        own, *rest = (
            (given.x_query[:, None] @ E @ PromptMoments(given, task).b)[:, 0][None]
            for given in (prompts, *others)
        )
        draws.append(rest_of(own, rest, np.ones(4096), 1 / d).share()[0])
    sem = np.std(draws, ddof=1) / len(draws) ** 0.5
    if task is KMS:
        assert np.mean(draws) + 2 * sem < Limits().rest_of_function
    else:
        assert abs(np.mean(draws)) < 4 * sem
        assert max(draws) < Limits().rest_of_function


# Steps of the fitted algorithm in place of what layers add.


@pytest.mark.slow
@pytest.mark.parametrize(
    "label",
    sampled(
        ["gd_plus_plus", "preprocess_then_optimise", "preconditioned_descent"],
        keep=lambda label: label == "gd_plus_plus",
    ),
)
def test_what_else_an_algorithm_holds_is_put_in_too(label: str):
    weights, task = LABELS[label]
    found = name_algorithm(rotated(weights, seed=0), task=task)
    assert found.followed == found.label == label
    np.testing.assert_allclose(found.steps.steps_r2, 1, rtol=0, atol=1e-6)
    exchanged = found.steps.exchanged_r2
    # Algorithm 1 has predicted nothing after its first layer.
    first = label == "preprocess_then_optimise"
    assert np.isnan(exchanged).tolist() == [first, *[False] * (len(exchanged) - 1)]
    np.testing.assert_allclose(exchanged[~np.isnan(exchanged)], 1, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_model_that_takes_other_steps_does_not_follow():
    """The stream moves on by the steps of another step size than those that are put in."""
    weights, task = LABELS["gradient_descent"]
    predictor, prompts = predictor_of(weights), draw_prompts(task, 128, dtype=torch.float64)
    found = step_effects(predictor, BY_LABEL["newton"], np.array([0.1]), prompts, task)
    assert found.steps_r2.min() < 0.95


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_what_is_held_is_exchanged_by_the_interchange_of_transformer_lens_too(layer: int):
    """Of the prediction so far, in the direction that is read out; a random direction of the same length is none."""
    weights = rotated(FALLING, seed=0)
    hooked = predictor_of(weights).hooked
    prompts = draw_prompts(DENSE, 64, seed=3, dtype=torch.float64)
    moments = PromptMoments(prompts, DENSE)
    path = BY_LABEL["gradient_descent"].predictions(moments, [0.7, 0.5, 0.3, 0.2], 4)
    expected = path[-1] - path[layer - 1] + path[layer - 1].roll(1, 0)

    read_out = weights.reading[1]
    own = SubspaceInterchange(read_out / read_out.norm())
    other = NormMatchedPlacebo(own, random_basis(weights.d_model, 1, seed=0).double())
    inputs, name = hooked.inputs(prompts), hooked.stream_name(layer)
    last = torch.full((64,), inputs.shape[1] - 1)
    at = {"task_logits": lambda given: hooked.model(given)[:, -1], "positions": last}
    streams = collect_activations(hooked.model, name, inputs, **at).roll(1, 0)
    found = {
        how: intervened_logits(hooked.model, name, how, inputs, streams, **at)
        for how in (own, other)
    }
    torch.testing.assert_close(found[own], expected, rtol=0, atol=1e-10)
    assert (found[other] - expected).square().mean() > 0.5 * (path[-1] - expected).square().mean()


def test_too_few_prompts_for_the_images_are_not_enough():
    weights, task = LABELS["gradient_descent"]
    # Images of the prediction and 8 entries of x, fitted to half of the prompts, two for each.
    for n, known in ((35, False), (36, True)):
        prompts = draw_prompts(task, n, dtype=torch.float64)
        scalars = np.array([0.7, 0.5, 0.3, 0.2])
        found = step_effects(
            predictor_of(weights), BY_LABEL["gradient_descent"], scalars, prompts, task
        )
        assert (found is not None) == known


# What a head is worth, of models that were read from files.

FEWEST = 12
"""Prompts for three layers: twice the two scalars that an algorithm has in each."""


@pytest.mark.slow
def test_idle_heads_have_importance_zero_and_no_prediction_is_near_to_no_learner():
    model = garg()
    nn.init.zeros_(model._backbone.h[1].attn.c_proj.weight)
    found = layered_classification(read_gpt2(model.state_dict()), n_prompts=FEWEST)
    assert (found.heads.rise[1] == 0).all()
    assert (found.heads.importance[1] == 0).all()
    nn.init.zeros_(model._read_out.weight)
    nn.init.zeros_(model._read_out.bias)
    found = layered_classification(read_gpt2(model.state_dict()), n_prompts=FEWEST)
    assert "predicts 0 on every prompt" in found.reason
    assert np.isnan(found.near.r2).all()


def test_one_layer_is_undetermined_as_norm_and_mlp_lie_between():
    found = layered_classification(read_encoder(encoder(6).layers[0].state_dict()), n_prompts=16)
    assert found.label == "undetermined"
    assert "LayerNorm" in found.reason
    assert found.heads.rise.shape == (1, 2)


@pytest.mark.slow
def test_prompts_are_the_seeds_and_the_tasks():
    checkpoint = read_gpt2(garg().state_dict())
    first, again = (layered_classification(checkpoint, n_prompts=FEWEST, seed=1) for _ in range(2))
    np.testing.assert_array_equal(first.heads.rise, again.heads.rise)
    assert (
        layered_classification(checkpoint, n_prompts=FEWEST).heads.full_risk
        != first.heads.full_risk
    )
    task = TaskConfig(d_x=3, context_length=9, noise_var=0.0)
    assert layered_classification(checkpoint, task, n_prompts=FEWEST).task.context_length == 9
    with refused("(3, 1)", "(5, 1)"):
        layered_classification(checkpoint, TaskConfig(), n_prompts=FEWEST)
    with refused("n_prompts", 8, 1):
        layered_classification(checkpoint, n_prompts=1)
