"""Every analysis of the one dict answers as JSON, as text and as a section of the page, or refuses in one line.

It uses the number, the seed and the length of its prompts, or refuses them; too few are refused, too.
"""

import copy
import inspect
import json
import pickle
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from mechinterp.analysis.comparison import compare
from mechinterp.analysis.needs import Model
from mechinterp.analysis.registry import ANALYSES, analysis_of, run_analysis
from mechinterp.analysis.result import Finding
from mechinterp.checkpoints.checkpoint import load
from mechinterp.known.entries import suite
from mechinterp.known.scores import score
from mechinterp.report.sections import default_names, section_of
from mechinterp.report.to_html import page
from mechinterp.report.to_json import dumps, header, to_json
from mechinterp.report.to_text import to_text
from tests.conftest import CHECKPOINTS, Run, refused, sampled
from tests.deep_models import descent_checkpoint
from tests.test_doors import SHORTENED, as_for_users, case_builder

OPTIONS = {"n_prompts": 96, "seed": 1, "context_length": 30}
FEW = {"attribute-edges": 8, "circuit-faithfulness": 8}
"""Number of prompts of analyses that take long."""
USUAL = {"response": 256, **FEW}
"""Number of prompts of an analysis; 64 for the others. The response needs 30 effective ones."""
OWN = {
    **{
        "compare-priors": "deep-linear",
        "linear-components": "linear-separate",
        "jump-forecast": "linear-separate",
    },
    **dict.fromkeys(("name-algorithm", "prune", *FEW), "descent"),
}
"""Kind of model that an analysis needs; softmax for the others."""
MOST = 64
"""More than any least number of prompts for these models, whose streams are at most 12 wide; `USUAL` suffices too."""
KINDS = ("softmax", "linear-merged", "descent", "gpt2", "encoder")
UNDRAWN = {("name-algorithm", "gpt2"), ("name-algorithm", "encoder")}
"""Random weights follow no path that could be drawn."""
OTHERS = sampled(
    [
        (name, kind)
        for name in ANALYSES
        for kind in KINDS
        if name not in FEW and kind != OWN.get(name, "softmax")
    ],
    keep=lambda pair: pair[1] in ("softmax", "descent"),
)
"""Pairs of an analysis and a kind of model that it does not need; edges of other kinds are in the table of doors."""


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """Model of a kind."""
    folder = tmp_path_factory.mktemp("kinds")
    build, descent = case_builder(folder), descent_checkpoint(folder)
    return lambda kind: descent if kind == "descent" else build(kind).source


def require_copies(found: Finding) -> None:
    """A changed table changes neither the result nor its next table."""
    before = found.to_frame().copy(deep=True)
    changed = found.to_frame()
    changed["added"] = 1
    for column in before:
        changed[column] = None
    changed.columns = [f"{column} changed" for column in changed]
    pd.testing.assert_frame_equal(found.to_frame(), before)


def require_carried(found: Finding) -> None:
    """A result can be copied, and sent to another process."""
    for other in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        pd.testing.assert_frame_equal(other.to_frame(), found.to_frame())
        assert repr(other) == repr(found)


def require_forms(name: str, checkpoint: Model, found: object, *, drawn: bool = True) -> str:
    """A result is shown as text and as a section that explains its columns; its JSON document."""
    document = dumps(to_json(name, checkpoint, found))
    assert len(json.loads(document)) > len(header(checkpoint))
    assert to_text(name, found).count("\n") > 0
    section = section_of(name, ANALYSES[name], found)
    assert section.text
    assert section.method
    assert bool(section.figures) == drawn
    assert page("name", "about", "verdict", [section], files=[]).count("<h2>") == 1
    require_copies(found)
    require_carried(found)
    for key, table in section.tables.items():
        assert set(map(str, table.frame.columns)) == set(table.meanings), key
    return document


def test_tables_are_copies():
    """Of what the registry does not hold; every analysis in it goes through `require_forms` below."""
    models = [load(CHECKPOINTS / f"linear-separate-s{seed}") for seed in (0, 1)]
    for found in (
        compare(models, n_prompts=64),
        score(lambda entry: {}, suite(1, trained="none")),
    ):
        require_copies(found)
        require_carried(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ANALYSES)
def test_it_is_told_in_three_forms_and_an_option_changes_the_answer_or_is_refused(name: str, case):
    kind = OWN.get(name, "softmax")
    checkpoint, settings = case(kind), SHORTENED.get(name)
    with as_for_users():
        if not ANALYSES[name].draws_prompts:
            require_forms(name, checkpoint, run_analysis(name, checkpoint, settings=settings))
            for option, value in OPTIONS.items():
                with refused(f"{name} draws no prompts and takes no {option}, got {value}."):
                    run_analysis(name, checkpoint, **{option: value})
            return
        usual = {"n_prompts": USUAL.get(name, 64), "seed": 0, "settings": settings}
        first = require_forms(name, checkpoint, run_analysis(name, checkpoint, **usual))
        others = OPTIONS | ({"context_length": 6} if kind == "descent" else {})
        others |= {"n_prompts": usual["n_prompts"] + 2} if name in USUAL else {}
        for option, value in others.items():
            answer = run_analysis(name, checkpoint, **usual | {option: value})
            assert dumps(to_json(name, checkpoint, answer)) != first, option


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), OTHERS)
def test_of_another_kind_of_model_it_is_told_or_refused(name: str, kind: str, case):
    analysis, checkpoint = ANALYSES[name], case(kind)
    asked = {"settings": SHORTENED.get(name)} | (
        {"n_prompts": USUAL.get(name, 64)} if analysis.draws_prompts else {}
    )
    with as_for_users():
        if not analysis.needs(checkpoint):
            with pytest.raises(ValueError, match=r"^[^\n]*\.$"):
                run_analysis(name, checkpoint, **asked)
            return
        found = run_analysis(name, checkpoint, **asked)
        require_forms(name, checkpoint, found, drawn=(name, kind) not in UNDRAWN)


def printed(name: str, checkpoint: Model, n_prompts: int) -> str:
    """The text of an analysis, or the one line of its refusal; warnings are errors."""
    with as_for_users(), warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            settings = SHORTENED.get(name)
            found = run_analysis(name, checkpoint, n_prompts=n_prompts, settings=settings)
            return to_text(name, found)
        except ValueError as error:
            return f"refused: {error}"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, each in ANALYSES.items() if each.draws_prompts])
def test_too_few_are_refused_and_the_least_number_gives_numbers(name: str, case):
    checkpoint = case(OWN.get(name, "softmax"))
    for few in (0,) if name == "attention-patterns" else (0, 1):  # one prompt can be looked at
        assert re.fullmatch(r"refused: .*\b\d+.*, got \d+\.", printed(name, checkpoint, few))
    numbers = range(2, max(MOST, USUAL.get(name, 0) + 1), 2 if name in USUAL else 1)
    texts = (printed(name, checkpoint, n_prompts) for n_prompts in numbers)
    assert not re.search(r"± ?nan", next(text for text in texts if not text.startswith("refused")))


def test_the_commands_pass_options_on_and_refuse_too_few(run: Run, tmp_path: Path):
    two_steps, few = descent_checkpoint(tmp_path).path, ("--n-prompts", 8, "--json", "--quiet")
    edges = ("analyse", "attribute-edges", two_steps, *few, "--context-length")
    assert run(*edges, 6).document["rows"] != run(*edges, 4).document["rows"]
    one = CHECKPOINTS / "softmax-h2-s0"
    run("analyse", "circuits", one, "--n-prompts", 5).assert_refused("takes no n_prompts, got 5.")
    for command in (("compare-learners",), ("classify",)):
        run(*command, one, "--n-prompts", 4).assert_refused("n_prompts must be >= 8", "got 4")
    run("ablate", one, "--n-prompts", 1).assert_refused("n_prompts must be >= 8", "got 1")


def test_an_analysis_is_described_in_sentences_by_its_docstring():
    for name, analysis in ANALYSES.items():
        assert analysis.described.endswith("."), name
        first = inspect.cleandoc(analysis.function.__doc__).partition("\n\n")[0]
        assert analysis.described.startswith(" ".join(first.split())), name
        assert analysis_of(name) == (name, analysis)
    with pytest.raises(ValueError, match=r"must be one of response, classify, .*, got 'nothing'"):
        analysis_of("nothing")


def test_a_page_shows_what_suits_the_model():
    """The response comes first; the distances to the posterior mean of a pool need a task with a pool."""
    assert default_names(load(CHECKPOINTS / "softmax-h2-s0"))[0] == "response"
    pool = load(CHECKPOINTS / "pool-linear-m16-s0")
    config = replace(pool.config, task=replace(pool.config.task, n_tasks=None))
    assert "compare-priors" in default_names(pool)
    assert "compare-priors" not in default_names(replace(pool, config=config))


@pytest.mark.slow
def test_what_is_no_analysis_of_a_model_is_refused(run: Run, tmp_path: Path):
    path = CHECKPOINTS / "softmax-h1-s0"
    out = ("--out", tmp_path / "page", "--analysis")
    run("report", path, *out, "sise").assert_refused("An analysis must be one of ", "'sise'")
    run("report", path, path, *out, "compare-learners").assert_refused(
        "analyses need one checkpoint, got 2"
    )
    assert not (tmp_path / "page").exists()
