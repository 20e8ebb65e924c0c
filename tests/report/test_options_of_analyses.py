"""Every option of `analyse` changes what an analysis says, or is refused: none is ignored."""

import pytest

from mechinterp.analysis.registry import ANALYSES, run_analysis
from mechinterp.checkpoints.checkpoint import Checkpoint, load
from mechinterp.report.header import dumps
from mechinterp.report.to_json import to_json
from tests.conftest import CHECKPOINTS, Run
from tests.deep_models import descent_checkpoint
from tests.test_doors import SHORTENED, as_for_users

OPTIONS = {"n_prompts": 96, "seed": 1, "context_length": 30}
FEW = {"edges": 4, "edge-circuits": 4}
"""Edges take long."""
OF_SEVERAL_LAYERS = {"algorithm", "prune", *FEW}
SHIPPED = {
    "priors": "pool-linear-m16-s0",
    **dict.fromkeys(("components", "jumps"), "linear-separate-s0"),
}
"""Models that these need: of a pool of tasks, with labels that other prompts turn, and with components."""


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return descent_checkpoint(tmp_path_factory.mktemp("deep"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ANALYSES)
def test_an_option_changes_the_answer_or_is_refused(name: str, two_steps: Checkpoint):
    checkpoint = load(CHECKPOINTS / SHIPPED.get(name, "softmax-h2-s0"))
    checkpoint = two_steps if name in OF_SEVERAL_LAYERS else checkpoint
    if not ANALYSES[name].draws_prompts:
        for option, value in OPTIONS.items():
            with pytest.raises(
                ValueError, match=rf"^{name} draws no prompts and takes no {option}, got {value}\.$"
            ):
                run_analysis(name, checkpoint, **{option: value})
        return
    usual = {"n_prompts": FEW.get(name, 64), "seed": 0, "settings": SHORTENED.get(name)}
    others = OPTIONS | ({"context_length": 6} if name in OF_SEVERAL_LAYERS else {})
    others |= {"n_prompts": 6} if name in FEW else {}
    with as_for_users():
        first, *answers = (
            dumps(to_json(name, checkpoint, run_analysis(name, checkpoint, **usual | told)))
            for told in ({}, *({option: value} for option, value in others.items()))
        )
    for option, answer in zip(others, answers, strict=True):
        assert answer != first, option


def test_the_command_passes_options_on_and_refuses_what_is_of_no_use(
    run: Run, two_steps: Checkpoint
):
    few = ("--n-prompts", 4, "--json", "--quiet")
    short, shorter = (
        run("analyse", "edges", two_steps.path, "--context-length", length, *few).document["rows"]
        for length in (6, 4)
    )
    assert short != shorter
    one = CHECKPOINTS / "softmax-h1-s0"
    for option in ("--context-length", "--seed", "--n-prompts"):
        refused = run("analyse", "circuits", one, option, 5)
        name = option.removeprefix("--").replace("-", "_")
        refused.assert_refused(f"circuits draws no prompts and takes no {name}, got 5.")
