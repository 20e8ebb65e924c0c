"""One interface: a second argument of another type, and one name for a thing everywhere."""

import inspect
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache

import numpy as np
import plotly.graph_objects as go
import pytest

import mechinterp as mi
from mechinterp import TaskConfig, load
from mechinterp.analysis.registry import ANALYSES
from tests.conftest import Run

ONE, DEEP = "softmax-h2-s0", "sparse-h4-noise0.1-s0"
FUNCTIONS = {each.function.__name__: each.function for each in ANALYSES.values()} | {
    name: getattr(mi, name) for name in mi.__all__ if inspect.isfunction(getattr(mi, name))
}
"""Analyses and public functions by name."""
FIRST: dict[str, Callable[[], object]] = {
    "attribute_edges": lambda: load(DEEP),
    "circuit_faithfulness": lambda: load(DEEP),
    "classify_circuits": lambda: np.zeros((1, 2, 2)),
    "models_frame": lambda: {ONE: load(ONE).config},
    "override": mi.ExperimentConfig,
    "preset": lambda: ONE.removesuffix("-s0"),
    "prune": lambda: load(DEEP),
    "save_figure": go.Figure,
    "train": mi.ExperimentConfig,
    "train_models": dict,
}
"""First argument; for all others a checkpoint of one layer."""
PATHS = {"save_figure", "train_models", "write_report"}
"""Functions whose second argument is a path, so that a text is none of another type."""
SECOND = {"task": TaskConfig(), "number": 64, "string": "abc"}
PYTHONS = re.compile(r"positional argument|os\.PathLike object")
"""Texts of Python's own errors that name the argument's type."""


@cache
def first_of(name: str) -> object:
    return FIRST.get(name, lambda: load(ONE))()


def entered(result: object) -> None:
    """Enter a context, whose arguments are checked then."""
    if isinstance(result, AbstractContextManager):
        result.__enter__()


@pytest.mark.parametrize("kind", SECOND)
@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_a_second_argument_of_another_type_is_refused_in_one_line(name: str, kind: str):
    if (name, kind) == ("sample_prompts", "number") or (name in PATHS and kind == "string"):
        pytest.skip("an argument of the right type")
    with pytest.raises((ValueError, TypeError)) as caught:
        entered(FUNCTIONS[name](first_of(name), SECOND[kind]))
    said = str(caught.value)
    assert "\n" not in said
    assert isinstance(caught.value, ValueError) or PYTHONS.search(said), said


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_prompts_of_another_type_are_named_with_what_to_type(name: str):
    parameters = list(inspect.signature(FUNCTIONS[name]).parameters)
    if parameters[1:2] not in (["prompts"], ["clean"]):
        pytest.skip("takes no prompts second")
    for kind, words in (("task", "task="), ("number", "n_prompts="), ("string", "sample_prompts")):
        with pytest.raises(ValueError, match="must be Prompts, got") as caught:
            FUNCTIONS[name](first_of(name), SECOND[kind])
        assert words in str(caught.value)


def test_what_a_page_or_a_command_runs_is_imported_from_mechinterp():
    assert {each.function.__name__ for each in ANALYSES.values()} <= {*mi.__all__}


def test_registry_functions_and_names_of_over_steps_are_the_same():
    for name, analysis in ANALYSES.items():
        assert name == analysis.name == analysis.function.__name__.replace("_", "-")
        assert name == name.lower()


def test_a_wrong_name_of_an_analysis_lists_all_of_them(run: Run):
    ran = run("analyse", "nothing", ONE)
    ran.assert_refused(*ANALYSES)


@pytest.mark.slow
def test_json_and_the_page_show_the_name_of_the_registry(run: Run, tmp_path):
    names = ["circuits", "history", "attention-patterns", "ablate"]
    for name in names:
        assert run(name, ONE, "--json").document["analysis"] == name
    assert run("classify", ONE, "--json").document[0]["analysis"] == "classify"
    written = mi.write_report(load(ONE), tmp_path / "page", analyses=names, n_prompts=64)
    text = written.page.read_text(encoding="utf-8")
    for name in names:
        assert f"Analysis {name}:" in text


NO_LAW = {"circuits", "history", "jump_forecast", "linear_components"}
"""Analyses that run no model on prompts."""
FULL = {"local_learning_coefficient"}
"""Analyses with as many arguments as one may have: prompts of another law are given as prompts."""


@pytest.mark.parametrize("name", sorted(each.function.__name__ for each in ANALYSES.values()))
def test_every_analysis_that_runs_a_model_takes_a_law(name: str):
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    assert ("task" in parameters) == (name not in NO_LAW | FULL)
    if "task" in parameters:
        assert parameters["task"].kind is inspect.Parameter.KEYWORD_ONLY
        assert {"n_prompts", "seed"} <= parameters.keys()


COMMANDS = {"analyse", "convert", "info", "predict-jumps", "report", "score", "sweep", "train"}
"""Commands that run no single analysis, or any of them."""


def test_commands_have_the_names_of_their_analyses(run: Run):
    text = run("--help").out
    listed = re.findall(r"^  ([a-z-]+)  ", text.partition("Commands:")[2], re.M)
    assert set(listed) - COMMANDS - {"check"} == {*ANALYSES}
