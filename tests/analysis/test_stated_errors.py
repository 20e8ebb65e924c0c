"""Stated standard errors are the spread over seeds of prompts, for every analysis of the registry.

A ratio is the spread of an estimate over seeds, divided by the root mean square of its stated errors.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from analyses.lib.coefficient_snapshots import coefficient_snapshots
from mechinterp.analysis.ablation.ablate import ablate
from mechinterp.analysis.ablation.pruning import prune
from mechinterp.analysis.learners.compare import compare_learners
from mechinterp.analysis.multi_layer.naming import name_algorithm
from mechinterp.analysis.patching.circuit import circuit_faithfulness
from mechinterp.analysis.patching.edges import attribute_edges
from mechinterp.analysis.probing.probe import probe
from mechinterp.analysis.registry import ANALYSES, run_analysis
from mechinterp.analysis.response.response import response
from mechinterp.analysis.result import tables_of
from mechinterp.analysis.training.learning_coefficient import local_learning_coefficient
from mechinterp.analysis.training.sampler import Chains
from mechinterp.checkpoints.checkpoint import Checkpoint, load
from mechinterp.config import ExperimentConfig, TaskConfig
from mechinterp.icl.prompts import draw_prompts
from mechinterp.models.constructions.descent import gradient_descent_model
from mechinterp.models.constructions.one_layer import diagonal_heads
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.weights import Weights
from tests.conftest import CHECKPOINTS
from tests.deep_models import random_model

LOW, HIGH, ERRORS = 0.75, 1.35, 3.0
"""A ratio fails where it lies outside these limits by more than `ERRORS` of its own standard errors."""
ROUNDING = 1e-6
"""An estimate whose spread and error are below this part of its size is exact."""
TASK = TaskConfig(d_x=3, context_length=8)
CHAINS = Chains(n_chains=4, n_draws=200, n_warmup=100, n_leapfrog=20)
SHORT_CHAINS = replace(CHAINS, n_leapfrog=5)
SAMPLE = 40
"""Seeds of the quick comparison."""


@cache
def softmax() -> Checkpoint:
    """One layer of two softmax heads, with its history and snapshots."""
    return load(CHECKPOINTS / "softmax-h2-s0")


@cache
def hooked() -> ICLTransformer:
    """The same model with hooks, whose formula is taken with nothing fitted."""
    return softmax().model


@cache
def with_pool() -> Checkpoint:
    """The same model on a task with a pool: its predictions have light tails, which linear stacks lack."""
    config = softmax().config
    return replace(softmax(), config=replace(config, task=replace(config.task, n_tasks=8)))


@cache
def layers() -> Checkpoint:
    """Two layers of three softmax heads at random, none of them clearly better than the others."""
    sizes = {"d_x": 3, "d_y": 1}
    model = random_model(2, 3, sizes=sizes, context_only=True, d_model=8, d_head=4, std=0.4)
    return unsaved(model.weights, TASK)


def unsaved(weights: Weights, task: TaskConfig) -> Checkpoint:
    return Checkpoint(Path("none"), ExperimentConfig(task=task, model=weights.model), 0, weights)


@cache
def descents() -> Checkpoint:
    """Two layers near two steps of gradient descent, on contexts so long that tails are light."""
    weights = gradient_descent_model([0.4, 0.3], d_x=2)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: tensor + 0.01 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        for name, tensor in weights.tensors.items()
    }
    return unsaved(replace(weights, tensors=tensors), TaskConfig(d_x=2, context_length=64))


@cache
def one_head() -> Checkpoint:
    """A kernel head of negative omega."""
    return load(CHECKPOINTS / "softmax-h1-s0")


@cache
def on_moments() -> Checkpoint:
    """Linear attention at a minimum of its loss, whose coefficient is drawn."""
    return load(CHECKPOINTS / "linear-separate-s0")


@cache
def small_head() -> Checkpoint:
    """One softmax head of 27 free entries, near a minimum of its loss on 128 prompts."""
    weights = diagonal_heads([0.5], [1.5], d_x=2)
    return unsaved(weights, TaskConfig(d_x=2, context_length=16))


@dataclass(frozen=True)
class Case:
    """Model, prompts and seeds of one comparison."""

    model: Callable[[], Checkpoint | ICLTransformer] = layers
    n_prompts: int = 96
    seeds: int = 300
    settings: Mapping[str, object] = field(default_factory=dict)
    run: Callable[..., object] | None = None
    """Function of a model; None: the analysis of the registry."""
    slow: bool = False
    """Too slow for the quick comparison."""


@dataclass(frozen=True)
class R2:
    """An algorithm on prompts of one kind."""

    r2: float
    r2_sem: float


def algorithms(source: Checkpoint, **drawn: int) -> dict[str, R2]:
    """R² of the last prediction and after each layer, learner by learner.

    In other settings, and for the learner with the most scalars, the error of the fit is left out (docs/results/labels.md)."""
    frame = name_algorithm(source, **drawn).to_frame().set_index("learner")
    columns = [name for name in frame if re.fullmatch(r"(layer_\d+_)?r2", name)]
    return {
        f"{learner} {name}": R2(row[name], row[f"{name}_sem"])
        for learner, row in frame.drop("preprocess_then_optimise").iterrows()
        for name in columns
    }


def classified_layers(source: Checkpoint, **drawn: int) -> object:
    """All but the algorithm, which has a case of its own."""
    return replace(ANALYSES["classify"].function(source, **drawn), algorithm=None)


def drawn_coefficients(source: Checkpoint, *, seed: int, n_prompts: int) -> object:
    """At a plateau and at the end; without prompts."""
    return coefficient_snapshots(source, steps=[3000, 20_000], chains=CHAINS, seed=seed)


def drawn_on_prompts(source: Checkpoint, *, seed: int, n_prompts: int) -> object:
    """At a minimum of the loss on prompts that stay the same: the error covers the chains alone (docs/results/labels.md)."""
    prompts = draw_prompts(source.task, n_prompts, seed=0)
    return local_learning_coefficient(source, prompts, settle=True, chains=SHORT_CHAINS, seed=seed)


@cache
def ranking() -> pd.DataFrame:
    return attribute_edges(layers(), n_prompts=32).circuit()


def circuits_of_one_ranking(source: Checkpoint, **drawn: int) -> object:
    """The order of the edges stays the same: the error does not cover it (docs/results/labels.md)."""
    return circuit_faithfulness(source, ranking(), sizes=[3, 9], **drawn)


def frames_of_response(source: object, **drawn: int) -> tuple[pd.DataFrame, ...]:
    """Frames whose rows are the same for every seed: knots of the filter and of similarity are quantiles.

    The coordinates are given, as their choice is not in the errors (docs/response.md).
    """
    found = response(source, coordinates=None, **drawn)
    return found.position, found.order[["size", "size_sem"]], found.left


CASES = {
    "response": Case(softmax, n_prompts=512, run=frames_of_response),
    "classify": Case(softmax),
    "name-algorithm": Case(descents, n_prompts=48, seeds=100, slow=True, run=algorithms),
    "attribute-edges": Case(n_prompts=32, seeds=100, slow=True),
    "circuit-faithfulness": Case(n_prompts=64, run=circuits_of_one_ranking),
    "compare-learners": Case(softmax, n_prompts=256),
    # Least squares has no mean risk near three pairs in three dimensions, and a ratio to it no error.
    "error-curve": Case(layers, settings={"context_lengths": (6, 7, 8)}),
    "compare-priors": Case(with_pool, settings={"context_lengths": (10, 40)}),
    "local-learning-coefficient": Case(
        on_moments, seeds=100, slow=True, settings={"chains": CHAINS}
    ),
    "coefficient snapshots": Case(on_moments, seeds=100, slow=True, run=drawn_coefficients),
    "coefficient on prompts": Case(
        small_head, n_prompts=128, seeds=100, slow=True, run=drawn_on_prompts
    ),
    "probe": Case(n_prompts=128, seeds=100),
    "classify layers": Case(descents, n_prompts=48, seeds=100, slow=True, run=classified_layers),
    "classify a hooked model": Case(
        hooked, n_prompts=512, slow=True, run=ANALYSES["classify"].function
    ),
    "ablate one layer": Case(softmax, slow=True, run=ANALYSES["ablate"].function),
    "fit of one head": Case(one_head, n_prompts=256, slow=True, run=compare_learners),
    "prune with a new read-out": Case(slow=True, run=partial(prune, refit=True)),
    "patch-activations": Case(n_prompts=24, seeds=100),
    "probe of a structure": Case(run=partial(probe, targets="preconditioned x")),
}
"""Further analyses of the registry get the default case on the first of `MODELS` that they take."""
MODELS = (layers, softmax, with_pool)
NAMES = [*ANALYSES, *(name for name in CASES if name not in ANALYSES)]


def case_of(name: str) -> Case | None:
    """The case of an analysis; None where nothing is drawn that a seed could change, or no model here is taken."""
    case = CASES.get(name)
    if case is None:
        fitting = (model for model in MODELS if ANALYSES[name].needs(model()))
        case = Case(next(fitting, softmax))
    if case.run is None and "seed" not in ANALYSES[name].options:
        return None
    return case


def results(name: str, case: Case, seeds: int) -> Iterator[object]:
    for seed in range(seeds):
        drawn = {"n_prompts": case.n_prompts, "seed": seed}
        if case.run is not None:
            yield case.run(case.model(), **drawn, **case.settings)
        else:
            yield run_analysis(name, case.model(), **drawn, settings=case.settings)


def stated(result: object, path: str = "") -> dict[str, np.ndarray]:
    """Each estimate of a result, and of the results in it, with its error, [2, ...], by the path of its field."""
    if isinstance(result, pd.DataFrame):
        pairs = {name: f"{name}_sem" for name in result if f"{name}_sem" in result}
        return {f"{path}{n}": result[[n, sem]].to_numpy(float).T for n, sem in pairs.items()}
    found = {}
    if isinstance(result, Mapping):
        inner = [(str(name), value) for name, value in result.items()]
        pairs = {name: f"{name}_sem" for name in result if f"{name}_sem" in result}
        for name, sem in pairs.items():
            found[f"{path}{name}"] = np.array([result[name], result[sem]], dtype=float)
    elif isinstance(result, tuple):
        inner = [(str(index), value) for index, value in enumerate(result)]
    elif is_dataclass(result):
        inner = [(each.name, getattr(result, each.name)) for each in fields(result)]
    else:
        return {}
    for name in dir(result) if is_dataclass(result) else ():
        estimate = "estimate" if name == "sem" else name.removesuffix("_sem")
        if name.endswith("sem") and name != estimate and estimate in dir(result):
            # A property of another kind of result: Shapley values have no rise.
            with suppress(ValueError):
                pair = [getattr(result, estimate), getattr(result, name)]
                if not any(map(callable, pair)):
                    found[f"{path}{estimate}"] = np.array(pair, dtype=float)
    for name, value in inner:
        found |= stated(value, f"{path}{name}.")
    return found


def ratios(runs: Sequence[Mapping[str, np.ndarray]]) -> pd.DataFrame:
    """Ratio of spread and stated error of each estimate that all runs have, and the standard error of its logarithm."""
    rows = []
    for name in runs[0]:
        pairs = [run[name] for run in runs if name in run]
        if len({pair.shape for pair in pairs}) > 1:  # as many as the prompts say
            continue
        each = np.array(pairs).reshape(len(pairs), 2, -1)
        for index, (value, error) in enumerate(each.transpose(2, 1, 0)):
            finite = np.isfinite(value) & np.isfinite(error)
            if finite.sum() < max(3, len(runs) / 2):
                continue
            value, error = value[finite], error[finite]
            size = np.abs(value).max()
            if max(value.std(), error.max()) <= ROUNDING * size:
                continue
            rows.append((f"{name}[{index}]", *log_ratio(value, error)))
    return pd.DataFrame(rows, columns=["estimate", "log_ratio", "sem"])


def log_ratio(value: np.ndarray, error: np.ndarray) -> tuple[float, float]:
    """log of the standard deviation of a value over the root mean square of its errors, with its jackknife error."""
    n = len(value)
    squares, stated = np.square(value - value.mean()), np.square(error)
    spread = squares.sum() / (n - 1)
    # Without run i the sum of squares is smaller by squares_i n / (n - 1).
    without = (squares.sum() - squares * n / (n - 1)) / (n - 2)
    tiny = np.finfo(float).tiny
    others = np.log((without + tiny) / ((stated.sum() - stated) / (n - 1) + tiny)) / 2
    sem = np.sqrt((n - 1) / n * np.square(others - others.mean()).sum())
    return float(np.log((spread + tiny) / (stated.mean() + tiny)) / 2), float(sem)


def compared(name: str, seeds: int) -> pd.DataFrame:
    """All ratios of one analysis, those that fail marked."""
    case = case_of(name)
    if case is None:
        return ratios([{}])
    frame = ratios([stated(result) for result in results(name, case, seeds)])
    above = frame["log_ratio"] - np.log(HIGH) > ERRORS * frame["sem"]
    below = np.log(LOW) - frame["log_ratio"] > ERRORS * frame["sem"]
    return frame.assign(ratio=np.exp(frame["log_ratio"]), fails=above | below)


def assert_true(name: str, seeds: int) -> None:
    frame = compared(name, seeds)
    if frame.empty:
        pytest.skip("states no error that seeds of prompts could test")
    wrong = frame[frame["fails"]]
    assert wrong.empty, f"{len(wrong)} of {len(frame)}:\n{wrong.to_string()}"


QUICK = [name for name in NAMES if not getattr(CASES.get(name), "slow", False)]


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_stated_errors_are_near_the_spread_over_a_few_seeds(name: str):
    assert_true(name, SAMPLE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_stated_errors_are_the_spread_over_seeds(name: str):
    assert_true(name, CASES.get(name, Case()).seeds)


def test_every_column_of_a_table_with_an_error_is_compared():
    """Columns are renamed fields or properties; a test of fields alone could miss one."""
    for name in (
        "ablate",
        "prune",
        "probe",
        "compare-learners",
        "compare-priors",
    ):
        case = case_of(name)
        (result,) = results(name, replace(case, n_prompts=32), 1)
        fields_compared = {path.split(".")[-1] for path in stated(result)}
        for table in tables_of(name, result).values():
            columns = [str(column) for column in table.frame.columns]
            stated_here = {c.removesuffix("_sem") for c in columns if c.endswith("_sem")}
            assert stated_here <= fields_compared


def test_interactions_and_shapley_values_are_compared():
    """Of an ablation the contrasts are arrays by name, in results within results."""
    result = ablate(softmax(), n_prompts=32)
    found = stated(result)
    assert {path.split(".")[-1] for path in found} >= {"rise", "shapley", "risk", "full_risk"}
    pair = stated(ablate(layers(), what="pairs", n_prompts=32))
    interaction, sem = pair["columns.interaction"]
    assert len(interaction) == 15
    assert (sem > 0).all()


def test_an_error_that_is_wrong_by_half_is_found():
    random = np.random.default_rng(0)
    values = random.normal(size=300)
    for factor, fails in ((0.5, True), (1.0, False), (2.0, True)):
        log, sem = log_ratio(values, np.full(300, factor))
        off = max(log - np.log(HIGH), np.log(LOW) - log)
        assert (off > ERRORS * sem) == fails
        # Of a normal value the standard deviation has the relative error 1 / sqrt(2 n).
        assert sem == pytest.approx((2 * 300) ** -0.5, rel=0.2)
