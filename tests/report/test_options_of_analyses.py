"""Every option of `analyse` changes what an analysis says, or is refused: none is ignored."""

from collections.abc import Callable
from functools import partial, update_wrapper

import pytest

from mechinterp.analysis.ablation.gates import learn_gates
from mechinterp.analysis.registry import ANALYSES, Analysis, run_analysis
from mechinterp.checkpoints.load import load
from mechinterp.report.header import dumps
from mechinterp.report.to_json import to_json
from tests.conftest import CHECKPOINTS, Run
from tests.test_doors import case_builder

OPTIONS = {"n_prompts": 96, "seed": 1, "context_length": 30}
USUAL = {"n_prompts": 64, "seed": 0}
FEW = {"edges": 4, "snapshots": 2}
"""Edges take long; of snapshots only labels hang on prompts, which few of them turn."""
OF_SEVERAL_LAYERS = {"algorithm", "algorithm-steps", "edges", "head-snapshots"}
SHIPPED = {"snapshots": "linear-h2-s0"} | dict.fromkeys(
    ("priors", "prior-heads", "prior-snapshots"), "pool-linear-m16-s0"
)
"""Models that these need: one that has learned, those of a pool of tasks."""


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable:
    return case_builder(tmp_path_factory.mktemp("kinds"))


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ANALYSES)
def test_an_option_changes_the_answer_or_is_refused(
    name: str, option: str, case, monkeypatch: pytest.MonkeyPatch
):
    shorter = update_wrapper(partial(learn_gates, steps=2), learn_gates)
    monkeypatch.setitem(ANALYSES, "gates", Analysis(shorter))
    kind = "deep-linear" if name in OF_SEVERAL_LAYERS else "softmax"
    kind = "linear-merged" if name == "component-snapshots" else kind
    shipped = SHIPPED.get(name)
    checkpoint = load(CHECKPOINTS / shipped) if shipped else case(kind).source
    value = OPTIONS[option]
    if not ANALYSES[name].draws_prompts:
        with pytest.raises(
            ValueError, match=rf"^{name} draws no prompts and takes no {option}, got {value}\.$"
        ):
            run_analysis(name, checkpoint, **{option: value})
        return
    usual = USUAL | {"n_prompts": FEW.get(name, USUAL["n_prompts"])}
    other = usual | {option: 6 if (name, option) == ("edges", "n_prompts") else value}
    found = [
        dumps(to_json(name, checkpoint, run_analysis(name, checkpoint, **each)))
        for each in (usual, other)
    ]
    assert found[0] != found[1]


def test_the_command_passes_options_on_and_refuses_what_is_of_no_use(run: Run):
    deep = CHECKPOINTS / "sparse-h4-noise0.1-s0"
    few = ("--n-prompts", 4, "--json", "--quiet")
    short, shorter = (
        run("analyse", "edges", deep, "--context-length", length, *few).document["rows"]
        for length in (6, 4)
    )
    assert short != shorter
    one = CHECKPOINTS / "softmax-h1-s0"
    for option in ("--context-length", "--seed", "--n-prompts"):
        refused = run("analyse", "circuits", one, option, 5)
        name = option.removeprefix("--").replace("-", "_")
        refused.assert_refused(f"circuits draws no prompts and takes no {name}, got 5.")
