"""The one door to the prompts of an analysis and to their law."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from mechinterp import TaskConfig, hook_module, load, sample_prompts
from mechinterp.icl.given import PromptsTask
from mechinterp.icl.prompts import draw_prompts
from mechinterp.models.constructions.one_layer import zero_head
from mechinterp.models.run.evaluation import (
    evaluation_prompts,
    prompts_and_law,
    require_prompts,
    task_for,
)
from tests.conftest import Run, refused

TASK = TaskConfig(d_x=5, context_length=6, noise_var=0.3)
FIELDS = ("x", "y", "x_query", "y_query", "y_query_clean", "beta")


def hooked(**settings):
    torch.manual_seed(0)
    return hook_module(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), **settings)


def same(one, other) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in FIELDS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_public_prompts_are_those_of_every_analysis(dtype: torch.dtype):
    checkpoint = load("softmax-h2-s0")
    weights = checkpoint.weights.to(dtype)
    drawn = draw_prompts(TaskConfig(d_x=5), 16, seed=3, dtype=torch.float64).to(dtype)
    assert same(sample_prompts(weights, 16, seed=3), drawn)
    found, law = prompts_and_law(weights, analysis="probe", n_prompts=16, seed=3)
    assert same(found, drawn)
    assert law == TaskConfig(d_x=5)
    by_task = sample_prompts(checkpoint.task, 16, seed=3, dtype=dtype)
    assert same(by_task, drawn)
    assert same(sample_prompts(checkpoint.task, 16, seed=3), drawn.to(torch.float32))


def test_a_length_fresh_tasks_and_the_usual_number():
    pool = TaskConfig(d_x=3, n_tasks=2, context_length=4)
    own, new = sample_prompts(pool, 64), sample_prompts({"d_x": 3, "n_tasks": 2}, 64)
    assert own.x.shape == (64, 4, 3)
    assert new.x.shape == (64, 40, 3)
    assert len(own.beta.unique(dim=0)) == 2
    fresh = sample_prompts(pool, 64, new_tasks=True)
    assert len(fresh.beta.unique(dim=0)) == 64
    assert torch.equal(fresh.x, own.x)
    assert len(sample_prompts(zero_head(d_x=2))) == 4096
    assert sample_prompts(pool, 1, context_length=9).x.shape == (1, 9, 3)


def test_a_stated_law_stays_in_force_for_given_prompts():
    stated, silent = hooked(task=TASK), hooked()
    prompts = sample_prompts(stated, 8)
    law = {
        name: prompts_and_law(source, prompts, analysis="probe", task=task)[1]
        for name, source, task in [
            ("stated", stated, None),
            ("unknown", stated, "unknown"),
            ("silent", silent, None),
            ("other", stated, {"noise_var": 0.7}),
            ("checkpoint", load("softmax-h2-s0"), None),
            ("weights", load("softmax-h2-s0").weights, None),
            ("function", lambda given: given.y_query, None),
            ("function of a law", lambda given: given.y_query, TASK),
        ]
    }
    assert law["stated"] == law["function of a law"] == TASK
    assert [law[name] for name in ("unknown", "silent", "weights", "function")] == [None] * 4
    assert (law["other"].noise_var, law["other"].d_x) == (0.7, 5)
    assert law["checkpoint"] == load("softmax-h2-s0").task
    assert task_for(stated, None, "fit", prompts).posterior_penalty == TASK.posterior_penalty
    assert task_for(stated, "unknown", "fit", prompts).law is None


def test_a_task_of_given_prompts_brings_them():
    prompts = sample_prompts(TASK, 8)
    for law in (None, TASK):
        found = prompts_and_law(hooked(), analysis="probe", task=PromptsTask.of(prompts, law))
        assert found[0] is prompts
        assert found[1] == law


def test_a_law_of_its_own_draws_in_the_dtype_of_the_model():
    model = hooked(task=TASK)
    drawn, law = prompts_and_law(model, analysis="probe", task={"noise_var": 0.0}, n_prompts=8)
    assert (drawn.x.dtype, law.noise_var) == (torch.float32, 0.0)
    torch.testing.assert_close(drawn.y, (drawn.x @ drawn.beta), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (TASK, ("a task (TaskConfig)", "task=")),
        ({"d_x": 3}, ("a dict", "task=")),
        (64, ("the number 64", "n_prompts=")),
        (np.float64(0.5), ("the number 0.5", "n_prompts=")),
        ("0", ("the string '0'", "sample_prompts(model)")),
        (nn.Linear(1, 1), ("a model (Linear)", "sample_prompts(model)")),
        (zero_head(d_x=2), ("a model (Weights)", "sample_prompts(model)")),
        (torch.zeros(3), ("Tensor", "Prompts.from_arrays")),
        (np.zeros(3), ("ndarray", "Prompts.from_arrays")),
        ([1, 2], ("list", "Prompts.from_arrays")),
        (pd.DataFrame(), ("DataFrame", "Prompts.from_arrays")),
    ],
)
def test_anything_but_prompts_is_refused_with_what_to_type(given: object, words: tuple[str, ...]):
    with refused("probe: prompts must be Prompts", *words):
        require_prompts(given, "probe")
    with refused("probe: prompts must be Prompts", *words):
        prompts_and_law(zero_head(d_x=2), given, analysis="probe")


def test_numbers_and_laws_of_another_kind_are_refused():
    model = zero_head(d_x=5)
    prompts = sample_prompts(model, 4)
    with refused("probe", "task", "got Prompts", "prompts="):
        prompts_and_law(model, analysis="probe", task=prompts)
    with refused("probe", "task='unknown' needs given prompts"):
        prompts_and_law(model, analysis="probe", task="unknown")
    with refused("probe needs a task for a function of prompts", "task="):
        prompts_and_law(lambda given: given.y_query, analysis="probe")
    with refused("n_prompts must be a whole number", "'64'"):
        sample_prompts(model, "64")
    with refused("n_prompts must be a whole number", "8.5"):
        prompts_and_law(model, analysis="probe", n_prompts=8.5)
    with refused("sample_prompts needs a model or a task", "function"):
        sample_prompts(lambda given: given.y_query)
    with refused("(d_x, d_y)", (5, 1), (2, 1)):
        prompts_and_law(model, sample_prompts(TaskConfig(d_x=2), 4), analysis="probe")
    with refused("n_prompts must be >= 8"):
        evaluation_prompts(model, n_prompts=7, fitted=1)


@pytest.mark.slow
def test_files_of_prompts_have_the_law_of_the_model_or_none(run: Run, tmp_path: Path):
    checkpoint = load("softmax-h2-s0")
    prompts = sample_prompts(checkpoint, 64)
    arrays = {name: getattr(prompts, name).numpy() for name in FIELDS}
    np.savez(tmp_path / "own.npz", **arrays)
    given = ("--prompts", tmp_path / "own.npz")
    law = run("classify", "softmax-h2-s0", *given, "--json").document[0]
    none = run("classify", "softmax-h2-s0", *given, "--task", "unknown", "--json").document[0]
    assert "left_out" not in law["evidence"]
    assert "law of the prompts is unknown" in none["evidence"]["left_out"]
    assert law["pattern"] == none["pattern"] == "debiased_gd"
    run("classify", "softmax-h2-s0", "--task", "unknown").assert_refused("needs given prompts")
    out = ("--out", tmp_path / "page", "--analysis", "classify", "--task", "unknown")
    run("report", "softmax-h2-s0", *given, *out)
    assert "law of the prompts is unknown" in (tmp_path / "page" / "index.html").read_text("utf-8")
