"""Every analysis refuses too few prompts in one line, and says no NaN of the least number that it takes."""

import re
import warnings

import pytest

from mechinterp.analysis.registry import ANALYSES, run_analysis
from mechinterp.checkpoints.checkpoint import Checkpoint, load
from mechinterp.report.to_text import to_text
from tests.conftest import CHECKPOINTS, Run
from tests.deep_models import descent_checkpoint
from tests.report.test_options_of_analyses import OF_SEVERAL_LAYERS, SHIPPED
from tests.test_doors import SHORTENED, as_for_users

DRAWING = [name for name, analysis in ANALYSES.items() if analysis.draws_prompts]
MOST = 64
"""More than any least number for these models, whose streams are at most 12 wide."""


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return descent_checkpoint(tmp_path_factory.mktemp("deep"))


def ran(name: str, checkpoint: Checkpoint, n_prompts: int) -> str:
    """What is printed, or the one line of the refusal; warnings are errors."""
    with as_for_users(), warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            found = run_analysis(
                name, checkpoint, n_prompts=n_prompts, settings=SHORTENED.get(name)
            )
            return to_text(name, found)
        except ValueError as error:
            return f"refused: {error}"


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWING)
def test_too_few_are_refused_and_the_least_number_gives_numbers(name: str, two_steps: Checkpoint):
    checkpoint = load(CHECKPOINTS / SHIPPED.get(name, "softmax-h2-s0"))
    checkpoint = two_steps if name in OF_SEVERAL_LAYERS else checkpoint
    for n_prompts in (0, 1):
        assert re.fullmatch(r"refused: .*\b\d+.*, got \d+\.", ran(name, checkpoint, n_prompts))
    least = next(n for n in range(2, MOST) if not ran(name, checkpoint, n).startswith("refused"))
    assert not re.search(r"± ?nan", ran(name, checkpoint, least))


def test_the_command_line_says_the_same(run: Run):
    path = CHECKPOINTS / "softmax-h2-s0"
    for command in (("fit",), ("classify",), ("analyse", "baselines")):
        run(*command, path, "--n-prompts", 4).assert_refused("n_prompts must be >= 8", "got 4")
    run("ablate", path, "--n-prompts", 1).assert_refused("n_prompts must be >= 2", "got 1")
