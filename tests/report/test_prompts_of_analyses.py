"""Every analysis uses the number, the seed and the length of its prompts, or refuses them; too few are refused in one line."""

import re
import warnings

import pytest

from mechinterp.analysis.registry import ANALYSES, run_analysis
from mechinterp.checkpoints.checkpoint import Checkpoint, load
from mechinterp.report.to_json import dumps, to_json
from mechinterp.report.to_text import to_text
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
"""Models that these need: of a pool of tasks, and of linear attention."""
MOST = 64
"""More than any least number of prompts for these models, whose streams are at most 12 wide."""


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return descent_checkpoint(tmp_path_factory.mktemp("deep"))


def model_for(name: str, two_steps: Checkpoint) -> Checkpoint:
    if name in OF_SEVERAL_LAYERS:
        return two_steps
    return load(CHECKPOINTS / SHIPPED.get(name, "softmax-h2-s0"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ANALYSES)
def test_an_option_changes_the_answer_or_is_refused(name: str, two_steps: Checkpoint):
    checkpoint = model_for(name, two_steps)
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


def printed(name: str, checkpoint: Checkpoint, n_prompts: int) -> str:
    """What is printed, or the one line of the refusal; warnings are errors."""
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
def test_too_few_are_refused_and_the_least_number_gives_numbers(name: str, two_steps: Checkpoint):
    checkpoint = model_for(name, two_steps)
    for few in (0, 1):
        assert re.fullmatch(r"refused: .*\b\d+.*, got \d+\.", printed(name, checkpoint, few))
    texts = (printed(name, checkpoint, n_prompts) for n_prompts in range(2, MOST))
    assert not re.search(r"± ?nan", next(text for text in texts if not text.startswith("refused")))


def test_the_command_line_refuses_too_few(run: Run):
    path = CHECKPOINTS / "softmax-h2-s0"
    for command in (("fit",), ("classify",), ("analyse", "baselines")):
        run(*command, path, "--n-prompts", 4).assert_refused("n_prompts must be >= 8", "got 4")
    run("ablate", path, "--n-prompts", 1).assert_refused("n_prompts must be >= 2", "got 1")
