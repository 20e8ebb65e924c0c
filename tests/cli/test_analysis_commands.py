"""Commands of the analyses: their options are those of the functions' signatures.

`python -m tests.cli.test_analysis_commands` writes the table of options after a signature or its description has changed.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import mechinterp as mi
from mechinterp import Chains, load
from mechinterp.analysis.registry import ANALYSES, Analysis
from mechinterp.analysis.training.sampler import changed_chains
from mechinterp.cli.table import row_of
from mechinterp.report.to_json import dumps, to_json
from tests.conftest import CHECKPOINTS, Run, refused

FILE = Path(mi.__file__).parent / "cli" / "options.json"
DEEP = CHECKPOINTS / "sparse-h4-noise0.1-s0"


def table() -> str:
    """The table of options, as JSON."""
    rows = [row_of(each) for each in ANALYSES.values()]
    return json.dumps(rows, indent=1, ensure_ascii=False) + "\n"


def test_the_table_of_options_is_that_of_the_signatures():
    assert FILE.read_text(encoding="utf-8") == table()


def test_every_option_has_a_text():
    for name, analysis in ANALYSES.items():
        row = row_of(analysis)
        assert row["text"].endswith("."), name
        for each in row["options"]:
            assert each["help"].endswith("."), (name, each["name"])


@dataclass(frozen=True)
class Sizes:
    """Sizes."""

    small: int = 1
    """Smallest size."""


def test_options_come_from_the_signature():
    def mine(
        source,
        prompts=None,
        *,
        sizes: Sequence[int] = (1, 2),
        on: bool = False,
        names: str | Sequence[str] | None = None,
        out: str | Path | None = None,
        limits: Sizes | Mapping[str, object] | None = None,
        weights: str = "",
        heads: Sequence[tuple[int, int]] = (),
        n_prompts: int = 5,
    ):
        """Mine.

        Args:
            sizes: Sizes to
                try.
            on: True: on.
        """

    kinds = {
        each["name"]: (each["type"], each.get("several", False), each.get("of"), each["help"])
        for each in row_of(Analysis(mine))["options"]
    }
    assert kinds == {
        "sizes": ("int", True, None, "Sizes to try."),
        "on": ("bool", False, None, "True: on."),
        "names": ("str", True, None, ""),
        "out": ("path", False, None, ""),
        "small": ("int", False, "limits", "Smallest size."),
    }


def test_help_lists_the_names_of_the_registry(run: Run):
    listed = re.findall(r"^  ([a-z-]+)  ", run("--help").out.partition("Commands:")[2], re.M)
    assert [name for name in listed if name in ANALYSES and name != "classify"] == [
        name for name in ANALYSES if name != "classify"
    ]
    assert "classify" in listed


@pytest.mark.slow
def test_an_option_reaches_the_function(run: Run):
    few = ("--n-prompts", 64, "--json")
    checkpoint = load(DEEP)
    found = mi.p_probe(checkpoint, layer=2, steps=3, n_prompts=64)
    expected = json.loads(dumps(to_json("p-probe", checkpoint, found)))
    for words in (("p-probe",), ("analyse", "p_probe")):
        document = run(*words, DEEP, *few, "--layer", 2, "--steps=3").document
        assert document["rows"] == expected["rows"]
    document = run("prune", DEEP, "--n-prompts", 256, "--refit", "--json").document
    assert document["refit_risk"] is not None


@pytest.mark.slow
def test_chains_are_stated_on_the_command_line(run: Run):
    model = CHECKPOINTS / "linear-separate-s0"
    given = ("--n-chains", 2, "--n-draws", 8, "--n-warmup", 8)
    document = run("local-learning-coefficient", model, *given, "--json").document
    found = mi.local_learning_coefficient(load(model), chains=Chains(2, 8, 8))
    assert document["rows"][0]["estimate"] == found.to_frame()["estimate"][0]


def test_chains_by_name_change_the_usual_ones():
    assert changed_chains(Chains(n_chains=4), {"n_draws": 9}) == Chains(n_chains=4, n_draws=9)
    with refused("n_chains, n_draws", "'draws'"):
        mi.local_learning_coefficient(load(CHECKPOINTS / "linear-separate-s0"), chains={"draws": 9})


if __name__ == "__main__":
    FILE.write_text(table(), encoding="utf-8")
