"""Every analysis of the one dict answers as JSON, as text and as a section of the page, or refuses in one line."""

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
import pytest

from mechinterp.analysis.registry import (
    ANALYSES,
    Analysis,
    analysis_of,
    nothing,
    run_analysis,
)
from mechinterp.checkpoints.checkpoint import Checkpoint, load
from mechinterp.display import Result
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import Source
from mechinterp.report.contents import default_names, section_of
from mechinterp.report.header import dumps, header
from mechinterp.report.page import write_report
from mechinterp.report.to_html import page
from mechinterp.report.to_json import to_json
from mechinterp.report.to_text import to_text
from tests.conftest import CHECKPOINTS, Run, sampled
from tests.deep_models import descent_checkpoint
from tests.test_doors import SHORTENED, as_for_users, case_builder

N_PROMPTS = 64
KINDS = ("softmax", "linear-merged", "descent", "gpt2", "encoder")
SLOW = {"edges", "edge-circuits"}
"""Asked of one source only: that they answer elsewhere is the table of doors."""
RANDOM = {kind: {"learning-coefficient"} for kind in ("gpt2", "encoder")}
"""Random weights are no minimum."""
UNDRAWN = {("algorithm", "gpt2"), ("algorithm", "encoder")}
"""Nor do they follow a path that could be drawn."""
SOURCES = dict.fromkeys(SLOW, "descent")
PAIRS = sampled(
    [
        (name, kind)
        for name in ANALYSES
        for kind in KINDS
        if name not in SLOW or kind == SOURCES.get(name, "softmax")
    ],
    keep=lambda pair: pair[1] in ("softmax", "descent") or pair[0] in SLOW,
)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable:
    folder = tmp_path_factory.mktemp("kinds")
    build, descent = case_builder(folder), descent_checkpoint(folder)
    return lambda kind: descent if kind == "descent" else build(kind).source


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_it_is_told_in_three_forms(name: str, kind: str, case):
    analysis, checkpoint = ANALYSES[name], case(kind)
    n_prompts = N_PROMPTS if analysis.draws_prompts else None
    with as_for_users():
        if not analysis.needs(checkpoint) or name in RANDOM.get(kind, ()):
            with pytest.raises(ValueError, match=r"^[^\n]*\.$"):
                run_analysis(name, checkpoint, n_prompts=n_prompts)
            return
        settings = SHORTENED.get(name)
        found = run_analysis(name, checkpoint, n_prompts=n_prompts, settings=settings)
        document = json.loads(dumps(to_json(name, checkpoint, found)))
        assert len(document) > len(header(checkpoint))
        assert to_text(name, found).count("\n") > 0
        section = section_of(name, analysis, found)
        assert section.text
        assert section.method
        assert bool(section.figures) == ((name, kind) not in UNDRAWN)
        assert page("name", "about", "verdict", [section], files=[]).count("<h2>") == 1
        for key, table in section.tables.items():
            columns = set(map(str, table.frame.columns))
            assert columns - set(section.meanings) == set(), key


def test_an_analysis_is_described_in_sentences_by_its_docstring():
    for name, analysis in ANALYSES.items():
        assert analysis.described.endswith("."), name
        first = inspect.cleandoc(analysis.function.__doc__).partition("\n\n")[0]
        assert analysis.described.startswith(" ".join(first.split())), name
        assert analysis_of(name) == (name, analysis)
    with pytest.raises(ValueError, match=r"must be one of classify, circuits, .*, got 'nothing'"):
        analysis_of("nothing")


@dataclass(frozen=True)
class Size(Result):
    """How large the responses are."""

    mean_square: float

    def __repr__(self) -> str:
        return f"Size({self.mean_square:.3g})"

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame({"size": [self.mean_square]})

    def plot(self) -> go.Figure:
        return go.Figure(go.Bar(y=[self.mean_square]))


def size(source: Source, prompts=None, *, n_prompts: int = 16, seed: int = 0) -> Size:
    """Mean square of the responses.

    Args:
        prompts: As elsewhere.
    """
    prompts = evaluation_prompts(source, prompts, n_prompts=n_prompts, seed=seed)
    return Size(prompts.y_query.square().mean().item())


def test_a_new_analysis_is_one_function_and_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(ANALYSES, "size", Analysis(size, on_page=nothing))
    path = CHECKPOINTS / "softmax-h1-s0"
    checkpoint: Checkpoint = load(path)
    expected = size(checkpoint, n_prompts=40, seed=1).mean_square
    ran = run("analyse", "size", path, "--n-prompts", 40, "--seed", 1, "--json")
    assert ran.document["analysis"] == "size"
    assert ran.document["rows"] == [{"size": pytest.approx(expected, rel=1e-6)}]
    assert (
        f"Size({expected:.3g})" in run("analyse", "size", path, "--n-prompts", 40, "--seed", 1).out
    )
    written = write_report(checkpoint, tmp_path / "page", n_prompts=40, seed=1, analyses=["size"])
    text = written.page.read_text(encoding="utf-8")
    assert "<h2>Size</h2>" in text
    assert "Mean square of the responses." in text
    assert pd.read_csv(tmp_path / "page" / "size.csv")["size"].item() == pytest.approx(expected)
    # It suits every model, so that the page has it unasked.
    assert "size" in default_names(checkpoint)


@pytest.mark.slow
def test_what_is_no_analysis_is_refused(run: Run, tmp_path: Path):
    path = CHECKPOINTS / "softmax-h1-s0"
    run("analyse", "sise", path).assert_refused("An analysis must be one of classify, ", "'sise'")
    out = ("--out", tmp_path / "page", "--analysis")
    run("report", path, *out, "sise").assert_refused("An analysis must be one of ", "'sise'")
    run("report", path, path, *out, "fit").assert_refused("analyses need one checkpoint, got 2")
    deep = CHECKPOINTS / "sparse-h1-noise0.1-s0"
    run("report", deep, *out, "attention-entropy").assert_refused("that add up to 1")
    assert not (tmp_path / "page").exists()
