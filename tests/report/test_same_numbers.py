"""One seed and one number of prompts are one set of numbers: in Python, from a command, on a page."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from mechinterp.analysis.ablation.ablate import ablate
from mechinterp.analysis.ablation.pruning import prune
from mechinterp.analysis.probing.probe import probe
from mechinterp.checkpoints.load import load
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import draw_prompts
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.n_prompts import usual_number
from mechinterp.report.page import write_report
from tests.conftest import CHECKPOINTS, Run
from tests.golden.store import FILES
from tests.test_doors import as_for_users

N_PROMPTS, SEED = 128, 3
MODELS = {
    "one layer": (CHECKPOINTS / "softmax-h2-s0", {}),
    "stack": (Path(FILES) / "deep-wide", {}),
    "gpt2": (Path(FILES) / "garg.pt", {"n_heads": 4}),
}
SAME = {"rtol": 1e-4, "atol": 1e-9}


@pytest.fixture(autouse=True, scope="module")
def without_checks_of_types() -> Iterator[None]:
    with as_for_users():
        yield


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> tuple[Path, dict]:
    return MODELS[request.param]


@pytest.fixture(scope="module")
def page(model: tuple[Path, dict], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, hints = model
    folder = tmp_path_factory.mktemp("page")
    checkpoint = load(path, **hints)
    several = checkpoint.config.model.n_layers > 1  # one layer has no later heads to prune
    names = ["ablate", "probe", *(["prune"] if several else [])]
    write_report(checkpoint, folder / "report", n_prompts=N_PROMPTS, seed=SEED, analyses=names)
    return folder / "report"


def asked(command: tuple[object, ...], hints: dict) -> tuple[object, ...]:
    given = []
    for name, value in hints.items():
        given += [f"--{name.replace('_', '-')}", *([] if value is True else [value])]
    return (*command, *given, "--n-prompts", N_PROMPTS, "--seed", SEED, "--json", "--quiet")


@pytest.mark.slow
def test_ablation_is_one_set_of_numbers(model: tuple[Path, dict], page: Path, run: Run):
    path, hints = model
    document = run(*asked(("ablate", path), hints)).document
    told = pd.DataFrame(document["heads"])
    shown = pd.read_csv(page / "ablation.csv")
    for method in ("zero", "mean", "resample"):
        found = ablate(
            load(path, **hints), method=method, n_prompts=N_PROMPTS, seed=SEED, what="heads"
        )
        rows = told[told["method"] == method]
        drawn = shown[shown["method"] == method]
        for name in ("rise", "rise_sem"):
            expected = getattr(found, name).ravel()
            np.testing.assert_allclose(rows[name], expected, **SAME)
            np.testing.assert_allclose(drawn[name], expected, **SAME)
    zero = ablate(load(path, **hints), n_prompts=N_PROMPTS, seed=SEED, what="heads")
    assert document["excess_risk"] == pytest.approx(zero.full_risk, rel=1e-4)


@pytest.mark.slow
def test_probes_are_one_set_of_numbers(model: tuple[Path, dict], page: Path, run: Run):
    path, hints = model
    document = run(*asked(("probe", path), hints)).document
    shown = pd.read_csv(page / "probes.csv")
    source = load(path, **hints)
    found = probe(source, targets="y", n_prompts=N_PROMPTS, seed=SEED).probes["y"]
    for rows in (pd.DataFrame(document["response"]), shown[shown["target"] == "y"]):
        np.testing.assert_allclose(rows["risk"], found.risk.ravel(), **SAME)


@pytest.mark.slow
def test_pruning_is_one_set_of_numbers(model: tuple[Path, dict], page: Path, run: Run):
    path, hints = model
    if not (page / "chosen.csv").exists():
        pytest.skip("one layer has no later heads")
    costs = pd.read_csv(page / "pruning.csv").set_index("model")
    document = run(*asked(("prune", path), hints)).document
    found = prune(load(path, **hints), n_prompts=N_PROMPTS, seed=SEED)
    for name in ("risk", "ratio", "refit_risk", "refit_ratio_sem"):
        expected = pytest.approx(getattr(found, name), rel=1e-4)
        assert document[name] == expected
        assert costs.loc["pruned", name] == expected


@pytest.mark.slow
def test_without_a_number_all_take_the_same(model: tuple[Path, dict], run: Run):
    path, hints = model
    checkpoint = load(path, **hints)
    expected = 512 if model == MODELS["gpt2"] else 4096
    assert usual_number(checkpoint) == len(evaluation_prompts(checkpoint)) == expected


def test_a_seed_means_the_same_prompts_in_every_dtype():
    checkpoint = load(CHECKPOINTS / "softmax-h2-s0")
    single = evaluation_prompts(checkpoint, n_prompts=32, seed=5)
    double = evaluation_prompts(checkpoint.weights.to(torch.float64), n_prompts=32, seed=5)
    assert (single.x.dtype, double.x.dtype) == (torch.float32, torch.float64)
    assert torch.equal(single.x, double.x.float())
    assert torch.equal(single.y, double.y.float())
    task = TaskConfig()
    drawn = draw_prompts(task, 32, seed=5, dtype=torch.float64)
    assert torch.equal(evaluation_prompts(task, n_prompts=32, seed=5).y, drawn.y)
    assert evaluation_prompts(checkpoint, drawn) is drawn
    longer = evaluation_prompts(checkpoint, n_prompts=8, context_length=50)
    assert longer.x.shape == (8, 50, 5)
