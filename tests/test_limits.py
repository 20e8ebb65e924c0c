"""Limits of analyses: long prompts are refused before they are drawn, and prompts of extreme numbers end in one line."""

from dataclasses import replace

import pandas as pd
import pytest
import torch

from mechinterp import (
    Prompts,
    classify,
    compare_learners,
    local_learning_coefficient,
    name_algorithm,
    probe,
    response,
    sample_prompts,
)
from mechinterp.analysis.classified import calibration_text
from mechinterp.analysis.labels import ALGORITHM_LABELS, ALGORITHMS_RANGE, PATTERNS_RANGE
from mechinterp.analysis.multi_layer.naming_prompts import drawn_at
from mechinterp.analysis.number_format import with_error
from mechinterp.analysis.registry import ANALYSES, run_analysis
from mechinterp.checkpoints.checkpoint import save
from mechinterp.checkpoints.load import load
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.memory import peak_memory
from mechinterp.models.constructions.descent import gradient_descent_model
from mechinterp.models.constructions.one_layer import debiased_gradient_step
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.n_prompts import MOST_DRAWN, most_prompts
from mechinterp.training.general.trainer import initial_deep_weights
from mechinterp.training.one_layer.step import initial_weights
from tests.conftest import Run, refused
from tests.test_doors import as_for_users

STEP = debiased_gradient_step(0.88, 0.02, d_x=5)
LONG = TaskConfig(context_length=100_000)
DRAWN = [name for name, each in ANALYSES.items() if each.draws_prompts]


def test_long_prompts_are_refused_with_the_number_that_fits():
    most = most_prompts(LONG, 100_000)
    # x, y and the task vector of a prompt.
    assert most == MOST_DRAWN // (100_001 * 6 + 5) == 111
    with refused("n_prompts", "<= 111", "100000 pairs", "got 112"):
        evaluation_prompts(LONG, n_prompts=112)
    assert len(sample_prompts(replace(LONG, context_length=3), 4)) == 4


@pytest.mark.parametrize("name", ["classify", "response", "ablate", "compare-learners"])
def test_an_analysis_of_long_prompts_costs_no_memory(tmp_path, name: str):
    config = ExperimentConfig(task=LONG, model=ModelConfig(n_heads=2))
    save(tmp_path / "long", config, initial_weights(config), step=0)
    before = peak_memory()
    with refused("n_prompts", "<= 111"):
        run_analysis(name, load(tmp_path / "long"))
    assert peak_memory() - before < 2**28  # the prompts of classify alone are 2.5 GB


@pytest.mark.parametrize("name", ["patch-activations", "attribute-edges"])
def test_patching_on_long_prompts_is_refused_before_they_are_drawn(name: str):
    model = ModelConfig(n_layers=2, n_heads=2, context_only=True, d_model=12, d_head=6)
    hooked = ICLTransformer(model, d_x=5, d_y=1).eval()
    before = peak_memory()
    with refused("64 prompts of 100000 pairs at once", "bytes are needed"):
        ANALYSES[name].function(hooked, task=LONG, n_prompts=64)
    # All prompts are 300 MB, in float64, and twice that with the noise.
    assert peak_memory() - before < 2**28


def test_an_algorithm_of_long_prompts_is_refused_before_other_lengths_are_drawn():
    model = gradient_descent_model([0.5, 0.3], d_x=5)
    with refused("n_prompts", "<= 111"):
        name_algorithm(model, task=LONG)


def test_the_gradient_of_a_stack_on_long_prompts_is_refused_before_it_is_taken(tmp_path):
    model = ModelConfig(n_layers=2, n_heads=2, context_only=True, d_model=12, d_head=6)
    config = ExperimentConfig(task=LONG, model=model)
    save(tmp_path / "long", config, initial_deep_weights(config), step=0)
    with refused("a gradient on 8 prompts of 100000 pairs", "bytes are needed"):
        local_learning_coefficient(load(tmp_path / "long"), n_prompts=8)


def test_a_command_refuses_long_prompts(run: Run, tmp_path):
    config = ExperimentConfig(task=LONG, model=ModelConfig(n_heads=2))
    save(tmp_path / "long", config, initial_weights(config), step=0)
    run("classify", tmp_path / "long").assert_refused(tmp_path / "long", "--n-prompts", "<= 111")


def test_x_of_zeros_has_a_label_and_no_response():
    """All kernel smoothers are then the mean of y."""
    model = load("softmax-h1-s0")
    drawn = sample_prompts(model, 64)
    zero = replace(drawn, x=torch.zeros_like(drawn.x))
    answer = classify(model, zero)
    assert answer.near.learners[0] == "kernel_head"
    own, mean = model.predictor.predict(zero).double(), drawn.y.mean(1).double()
    unexplained = own - mean * (own * mean).sum() / mean.square().sum()
    expected = 1 - (unexplained.square().sum() / own.square().sum()).item()
    assert answer.near.r2[0] == pytest.approx(expected, abs=1e-6)
    assert "kernel" in repr(answer)
    row = compare_learners(model, zero).to_frame().set_index("learner").loc["kernel_head"]
    assert row.setting == 0
    assert row.r2 == pytest.approx(expected, abs=1e-6)
    with refused("x other than 0"):
        response(model, zero)


def test_a_query_of_zeros_has_no_r2_and_no_warning():
    model = load("softmax-h2-s0")
    drawn = sample_prompts(model, 256)
    zero = replace(drawn, x_query=torch.zeros_like(drawn.x_query))
    none = torch.zeros_like(drawn.y_query)
    found = probe(model, replace(zero, y_query=none, y_query_clean=none)).to_frame()
    assert found.r2.isna().all()


@pytest.mark.parametrize("name", ["classify", "response", "compare-learners", "ablate"])
@pytest.mark.parametrize("size", [1e100, float("inf")])
def test_given_prompts_beyond_all_bounds_are_refused(name: str, size: float):
    drawn = sample_prompts(STEP, 64)
    with refused("prompts.y", "1e+15", f"{size * drawn.y.abs().max().item():.3g}"):
        ANALYSES[name].function(STEP, replace(drawn, y=size * drawn.y))


def test_a_number_of_infinite_error_is_not_defined():
    assert with_error(0.5, float("inf")) == "not defined"


@pytest.mark.parametrize(
    "task",
    [
        {"context_length": 2},
        {"d_x": 50},
        {"noise_var": 1e8},
        {"context_length": 1000},
        {"drift": 0.9},
        {"noise_var": ((0.01, 0.5), (0.1, 0.5))},
    ],
)
def test_calibrations_are_said_of_tasks_in_their_range_alone(task: dict):
    assert PATTERNS_RANGE.holds(TaskConfig())
    assert ALGORITHMS_RANGE.holds(TaskConfig(context_length=20))
    outside = replace(TaskConfig(), **task)
    assert not PATTERNS_RANGE.holds(outside)
    assert not ALGORITHMS_RANGE.holds(outside)


@pytest.mark.slow
def test_the_verdict_outside_the_calibrated_range_leaves_the_calibration_out():
    inside = classify(STEP, task=TaskConfig(), n_prompts=64)
    outside = classify(STEP, task=TaskConfig(context_length=1000), n_prompts=64)
    assert inside.label == outside.label == "debiased_gd"
    assert (inside.calibrated, outside.calibrated) == (True, False)
    assert len(outside.verdict.sure) < len(inside.verdict.sure)


def test_the_verdict_on_layers_outside_the_calibrated_range_leaves_the_calibration_out():
    model = gradient_descent_model([0.5, 0.3], d_x=5)
    inside, outside = (
        classify(model, task=TaskConfig(context_length=length), n_prompts=256)
        for length in (20, 60)
    )
    assert inside.label == outside.label == "gradient_descent"
    said = calibration_text(ALGORITHM_LABELS["gradient_descent"])
    assert said
    assert inside.verdict.sure.endswith(said)
    assert said not in outside.verdict.sure


GIVEN = sample_prompts(STEP, 64)
MISFITS = {
    "fewer y": ({"y": GIVEN.y[:, :3]}, ["prompts.y", "[64, 40, 1]", "[64, 3, 1]"]),
    "two axes": ({"x": GIVEN.x[:, 0]}, ["prompts.x", "[64, 5]"]),
    "no pairs": ({"x": GIVEN.x[:, :0], "y": GIVEN.y[:, :0]}, ["prompts.x", "[64, 0, 5]"]),
    "other prompts": ({"x_query": GIVEN.x_query[:32]}, ["prompts.x_query", "[32, 5]"]),
    "other task vectors": ({"beta": GIVEN.beta[:, :2]}, ["prompts.beta", "[64, 2, 1]"]),
    "one in float32": ({"x": GIVEN.x.float()}, ["prompts.y", "torch.float64"]),
    "bfloat16": ({"x": GIVEN.x.bfloat16()}, ["prompts.x", "torch.bfloat16"]),
    "whole numbers": ({"x": GIVEN.x.long()}, ["prompts.x", "torch.int64", "from_arrays"]),
    "truth values": ({"y": GIVEN.y > 0}, ["prompts.y", "torch.bool"]),
    "complex": ({"x": GIVEN.x.to(torch.complex64)}, ["prompts.x", "torch.complex64"]),
    "sparse": ({"x": GIVEN.x.to_sparse()}, ["prompts.x", "dense"]),
    "without data": ({"y": GIVEN.y.to("meta")}, ["prompts.y", "on meta"]),
}


@pytest.mark.parametrize("misfit", MISFITS)
@pytest.mark.parametrize("name", ["classify", "probe", "error-curve", "attention-patterns"])
def test_prompts_whose_tensors_do_not_fit_are_refused(name: str, misfit: str):
    changed, words = MISFITS[misfit]
    with as_for_users(), refused(*words):
        ANALYSES[name].function(STEP, replace(GIVEN, **changed))


@pytest.mark.parametrize("wrong", [GIVEN.x.numpy(), GIVEN.x.tolist(), None], ids=type)
def test_prompts_are_made_of_tensors(wrong: object):
    with as_for_users(), refused("Prompts.x must be a tensor", type(wrong).__name__):
        replace(GIVEN, x=wrong)


def test_half_precision_of_arrays_becomes_float32():
    given = [getattr(GIVEN, name).half() for name in ("x", "y", "x_query", "y_query")]
    prompts = Prompts.from_arrays(*given)
    assert prompts.y.dtype == torch.float32
    assert torch.equal(prompts.y, given[1].float())


@pytest.mark.parametrize("name", ["classify", "response", "compare-learners"])
def test_prompts_that_need_gradients_give_the_same_numbers(name: str):
    plain = sample_prompts(STEP, 512)
    needing = replace(plain, x=plain.x.clone().requires_grad_(), y=torch.nn.Parameter(plain.y))
    analysis = ANALYSES[name].function
    expected = analysis(STEP, plain).to_frame()
    pd.testing.assert_frame_equal(analysis(STEP, needing).to_frame(), expected)
    assert needing.x.requires_grad


@pytest.mark.parametrize("name", ["classify", "response", "ablate", "error-curve"])
def test_autocast_is_refused(name: str):
    """It computes float32 in bfloat16: an R² of the error curve was off by 20."""
    with torch.autocast("cpu", dtype=torch.bfloat16), refused("torch.autocast('cpu')"):
        ANALYSES[name].function(load("softmax-h2-s0"), n_prompts=512)
    with torch.autocast("cpu", enabled=False):
        ANALYSES[name].function(load("softmax-h2-s0"), n_prompts=512)


def test_prompts_of_another_length_are_refused_before_they_are_drawn():
    """A model at its own length may have few prompts, while those that a name needs are as many as always."""
    assert len(drawn_at(replace(LONG, context_length=3), 8, 3, seed=0, step=1)) == 8
    with refused("n_prompts", "<= 111", "got 112"):
        drawn_at(LONG, 112, 100_000, seed=0, step=1)


def halved_in_place(prompts: Prompts) -> torch.Tensor:
    """A function that writes into its prompts: half of the mean of y."""
    prompts.y.div_(2)
    return prompts.y.mean(1)


@pytest.mark.parametrize("name", ["response", "compare-learners", "error-curve", "name-algorithm"])
def test_a_function_may_write_into_its_prompts(name: str):
    """Others, such as the learners beside it, get the prompts as they were."""
    analysis, task = ANALYSES[name].function, TaskConfig(d_x=3, context_length=10)
    expected = analysis(lambda prompts: prompts.y.mean(1) / 2, task=task, n_prompts=256)
    found = analysis(halved_in_place, task=task, n_prompts=256)
    pd.testing.assert_frame_equal(found.to_frame(), expected.to_frame(), rtol=1e-9)


@pytest.mark.parametrize("name", ["response", "compare-learners", "error-curve", "name-algorithm"])
def test_complex_predictions_are_refused(name: str):
    task = TaskConfig(d_x=3, context_length=10)
    with refused("must give predictions", "complex"):
        ANALYSES[name].function(lambda prompts: 1j * prompts.y[:, 0], task=task, n_prompts=256)
