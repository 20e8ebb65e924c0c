"""An analysis of the user's own, in a module outside of the package: JSON, terminal, page and CSV."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

import mechinterp as mi
from mechinterp.analysis.needs import nothing
from mechinterp.analysis.registry import ANALYSES, analysis_of, run_analysis
from mechinterp.checkpoints.load import load
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.report.page import write_report
from mechinterp.report.sections import default_names
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
        ("own_analyses:nothing", "own_analyses has no 'nothing'."),
        ("own_analyses:number", "own_analyses:number: must be a function, got int."),
        ("no_such_module:mine", "no_such_module:mine: there is no module no_such_module."),
        (":mine", ":mine: there is no module ''."),
        ("..:mine", "..:mine: there is no module '..'."),
        ("own_analyses:no_result", "must give a result with to_frame and plot, got int."),
    ],
)
def test_what_is_no_analysis_is_refused(folder: Path, run: Run, named: str, words: str):
    run("analyse", named, PATH).assert_refused(words)


def test_help_lists_the_options_of_a_function(folder: Path, run: Run):
    text = run("analyse", NAME, "--help").out
    assert "Mean power of the responses." in text
    for flag in ("--power", "--clip / --no-clip", "--n-prompts", "--over-steps"):
        assert flag in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lyer", "1"], "--lyer"),
        (["--layer", "one"], "one"),
        (["--layer"], "'--layer' requires"),
        (["1"], "(1)"),
    ],
)
def test_an_option_that_is_none_is_refused(run: Run, words: list[str], message: str):
    run("analyse", "p-probe", PATH, *words).assert_refused(message, "mechinterp analyse ")


@pytest.mark.parametrize("model", ["softmax-h2-s0", "garg-tiny-s0"])
def test_what_a_predictor_gives_an_analysis_has_the_shapes_of_the_page(model: str):
    """The table of docs/how/own_analysis.md names all of these."""
    source = load(model)
    predictor, prompts = mi.predictor_of(source), mi.sample_prompts(source, 4)
    layers, heads, pairs = predictor.n_layers, predictor.n_heads, source.task.context_length
    stream = predictor.streams(prompts)
    width = stream.shape[-1]
    positions = pairs + 1 if model == "softmax-h2-s0" else 2 * pairs + 1
    shapes = {
        "predict": (predictor.predict(prompts), (4, 1)),
        "run": (predictor.run(prompts, [[], [(0, 0)]]), (2, 4, 1)),
        "with_gradients": (predictor.with_gradients(prompts), (4, 1)),
        "streams": (stream, (layers + 1, 4, 1, width)),
        "stream": (predictor.stream(prompts, layers), (4, positions, width)),
        "query_writes": (predictor.query_writes(prompts), (layers, 4, heads, width)),
        "query_patterns": (predictor.query_patterns(prompts), (layers, 4, heads, positions)),
        "own_read_out": (predictor.own_read_out(stream[-1, :, 0], prompts), (4, 1)),
        "predict_at_every": (predictor.predict_at_every(prompts), (4, pairs + 1, 1)),
    }
    text = (Path(__file__).parents[2] / "docs/how/own_analysis.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `predictor\.(\w+)\(", text, re.M)) == set(shapes)
    for name, (value, shape) in shapes.items():
        if name == "predict_at_every" and model == "softmax-h2-s0":
            assert value is None
        else:
            assert value.shape == shape, name
    torch.testing.assert_close(
        shapes["own_read_out"][0], shapes["predict"][0], rtol=1e-4, atol=1e-5
    )
