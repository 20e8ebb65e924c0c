"""An analysis of the user's own, in a module outside of the package: JSON, terminal, page and CSV."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from mechinterp.analysis.registry import ANALYSES, analysis_of, nothing, run_analysis
from mechinterp.checkpoints.load import load
from mechinterp.cli.analyses import settings_of
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.report.page import default_names, write_report
from tests.conftest import CHECKPOINTS, Run

MODULE = '''
from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go

import mechinterp as mi


@dataclass
class Power:
    mean: float

    def to_frame(self):
        return pd.DataFrame({"mean": [self.mean]})

    def plot(self):
        return go.Figure(go.Bar(y=[self.mean]))


def mean_power(source, prompts=None, *, n_prompts, seed, power: float = 2.0, clip: bool = False):
    """Mean power of the responses."""
    if prompts is None:
        prompts = mi.sample_prompts(source, n_prompts, seed=seed)
    return Power(prompts.y_query.abs().pow(power).mean().item())


def no_result(source):
    return 1


number = 1
'''
PATH = CHECKPOINTS / "softmax-h1-s0"
NAME = "own_analyses:mean_power"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_analyses.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_analyses", raising=False)
    return tmp_path


def test_it_is_told_in_all_forms(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch):
    drawn = evaluation_prompts(load(PATH), n_prompts=40, seed=1)
    expected = drawn.y_query.abs().pow(3.0).mean().item()
    few = ("--n-prompts", 40, "--seed", 1)
    asked = ("analyse", NAME, PATH, *few, "--power", 3)
    document = run(*asked, "--json").document
    assert (document["analysis"], document["rows"]) == ("mean-power", [{"mean": expected}])
    assert f"Power(mean={expected})" in run(*asked).out
    out = ("--out", folder / "page", *few)
    run("report", PATH, *out, "--analysis", "circuits", "--analysis", NAME)
    text = (folder / "page" / "index.html").read_text(encoding="utf-8")
    assert text.index("<h2>Circuits</h2>") < text.index("<h2>Mean power</h2>")
    assert "Mean power of the responses." in text
    squares = drawn.y_query.square().mean().item()
    assert pd.read_csv(folder / "page" / "mean_power.csv")["mean"].item() == pytest.approx(squares)
    # A line in the registry gives it a name; it suits every model, so that the page has it unasked.
    name, analysis = analysis_of(NAME)
    monkeypatch.setitem(ANALYSES, name, replace(analysis, on_page=nothing))
    assert name in default_names(load(PATH))
    assert run("analyse", name, *asked[2:], "--json").document == document


def test_a_function_is_as_good_as_its_name(folder: Path):
    _, analysis = analysis_of(NAME)
    written = write_report(load(PATH), folder / "page", n_prompts=8, analyses=[analysis.function])
    assert [table.name for table in written.tables] == ["mean_power.csv"]
    # Without a default for them, it is given the usual prompts.
    usual = run_analysis(analysis.function, load(PATH)).to_frame()
    assert usual.equals(run_analysis(NAME, load(PATH), n_prompts=4096, seed=0).to_frame())


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("nothing", "An analysis must be one of response, classify, "),
        ("own_analyses:nothing", "own_analyses has no function 'nothing'."),
        ("own_analyses:number", "own_analyses has no function 'number'."),
        ("no_such_module:mine", "no_such_module:mine: there is no module no_such_module."),
        (":mine", "has no function"),
        ("..:mine", "has no function"),
        ("own_analyses:no_result", "must give a result with to_frame and plot, got int."),
    ],
)
def test_what_is_no_analysis_is_refused(folder: Path, run: Run, named: str, words: str):
    run("analyse", named, PATH).assert_refused(words)


def test_options_come_from_the_signature():
    p_probe = ANALYSES["p-probe"]
    words = ["--layer", "2", "--steps=3"]
    assert settings_of("p-probe", p_probe, words) == {"layer": 2, "steps": 3}

    def mine(source, sizes: Sequence[int] = (1, 2), *, on: bool = False): ...

    order = analysis_of(mine)[1]
    words = ["--sizes", "3", "--sizes", "4", "--on"]
    assert settings_of("mine", order, words) == {"sizes": [3, 4], "on": True}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lyer", "1"], "p-probe takes --layer, --steps, --task, got --lyer."),
        (["--layer", "one"], "--layer: invalid int value: 'one'."),
        (["--layer"], "--layer: expected one argument."),
        (["1"], "got 1."),
    ],
)
def test_an_option_that_is_none_is_refused(run: Run, words: list[str], message: str):
    run("analyse", "p-probe", PATH, *words).assert_refused(message)
