"""Every analysis of the one dict answers as JSON, as text and as a section of the page, or refuses in one line."""

import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mechinterp.analysis.registry import (
    ANALYSES,
    analysis_of,
    run_analysis,
)
from mechinterp.checkpoints.checkpoint import load
from mechinterp.report.page import default_names, section_of
from mechinterp.report.to_html import page
from mechinterp.report.to_json import dumps, header, to_json
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


def test_a_page_shows_what_suits_the_model():
    """The distances to the posterior mean of a pool need a task with a pool."""
    pool = load(CHECKPOINTS / "pool-linear-m16-s0")
    config = replace(pool.config, task=replace(pool.config.task, n_tasks=None))
    assert "priors" in default_names(pool)
    assert "priors" not in default_names(replace(pool, config=config))


@pytest.mark.slow
def test_what_is_no_analysis_is_refused(run: Run, tmp_path: Path):
    path = CHECKPOINTS / "softmax-h1-s0"
    out = ("--out", tmp_path / "page", "--analysis")
    run("report", path, *out, "sise").assert_refused("An analysis must be one of ", "'sise'")
    run("report", path, path, *out, "fit").assert_refused("analyses need one checkpoint, got 2")
    deep = CHECKPOINTS / "sparse-h1-noise0.1-s0"
    run("report", deep, *out, "attention-entropy").assert_refused("that add up to 1")
    assert not (tmp_path / "page").exists()
