"""A column means what the class of its table says, and has that unit; no name has a meaning of its own."""

from dataclasses import dataclass
from typing import ClassVar

import pandas as pd
import plotly.graph_objects as go
import pytest

from mechinterp import ablate, circuits, classify, load, name_algorithm, over_steps, p_probe, probe
from mechinterp.analysis.registry import Analysis
from mechinterp.analysis.response.frames import FRAME_MEANINGS
from mechinterp.analysis.result import Table, known, tables_of
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.report.sections import section_of
from mechinterp.report.to_text import to_text
from tests.conftest import CHECKPOINTS
from tests.deep_models import descent_checkpoint


@pytest.fixture(scope="module")
def descent(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return descent_checkpoint(tmp_path_factory.mktemp("descent"))


def test_a_column_of_two_tables_has_the_meaning_of_each(descent: Checkpoint):
    found = classify(descent, n_prompts=64)
    tables = tables_of("classify", found)
    assert "L0H0" in tables["classify"].meanings["label"]
    assert tables["classify"].frame["label"][0] == "L0H0"
    assert tables["classify"].units["rise"] == "y²"
    algorithms = tables["algorithms"].meanings
    assert algorithms == tables_of("name-algorithm", found.algorithm)["algorithms"].meanings
    assert algorithms["r2"].startswith("1 - mean (model - learner)^2 / mean model^2")
    assert set(algorithms) == set(tables["algorithms"].frame)


def test_steps_and_positions_are_those_of_their_analysis(descent: Checkpoint):
    steps = tables_of("p-probe", p_probe(descent, n_prompts=64))["descent"].meanings["step"]
    assert "gradient descent" in steps
    assert steps != tables_of("circuits", over_steps(load(PATH), "circuits"))[OVER].meanings["step"]
    probes = tables_of("probe", probe(descent, n_prompts=64, targets="y"))["probes"].meanings
    positions = ablate(descent, n_prompts=32, what="positions")
    masked = tables_of("ablate", positions)["positions"].meanings
    assert probes["pos"] != masked["pos"]
    assert probes["r2"].startswith("1 - excess risk / mean square of the target")


PATH, OVER = CHECKPOINTS / "softmax-h2-s0", "circuits_over_steps"


@dataclass
class Own:
    """A user's own result, whose columns have the names of the package's."""

    COLUMNS: ClassVar = {"mu": "Mean of my numbers."}
    UNITS: ClassVar = {"x²": ("mu",)}
    mu: float = 1.0

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame({name: [1.0] for name in ("mu", "step", "value", "model", "head")})

    def plot(self) -> go.Figure:
        return go.Figure()


def test_columns_of_a_users_own_result_mean_what_the_user_says():
    (table,) = tables_of("own", Own()).values()
    assert table.meanings == {"mu": "Mean of my numbers, unit x²."}
    assert table.units == {"mu": "x²"}
    section = section_of("own", Analysis(Own), Own())
    assert section.meanings == [("mu", "Mean of my numbers, unit x².")]
    assert "(x²)" in to_text("own", Own())


def test_units_are_read_whole():
    frame = tables_of("circuits", circuits(load(PATH)))["circuits"]
    assert frame.units["qk_y_leak"] == "1/(x y)"
    assert frame.units["omega_0"] == "1/x²"
    assert frame.units["ov_x_leak"] == "y/x"


def test_no_column_of_a_user_has_a_meaning_of_the_package():
    frame = pd.DataFrame({name: [1] for name in ("seed_p", "rise", "layer", "risk_sem")})
    assert Table(frame).meanings == {}


def test_a_table_may_take_meanings_of_its_own():
    table = Table(
        pd.DataFrame({"a": [1], "a_sem": [1], "b_0": [1], "c": [1]}),
        known={"a": "A.", "b": ("B.", "y")},
    )
    assert table.meanings == {
        "a": "A.",
        "a_sem": "Standard error of a.",
        "b_0": "One entry. B, unit y.",
    }


def test_every_frame_of_a_response_has_its_meanings_with_units():
    filters = Table(pd.DataFrame({"phi": [1.0]}), known=FRAME_MEANINGS["filter"])
    assert filters.meanings == {"phi": "Weight of a direction with this eigenvalue, unit 1/x²."}
    assert filters.units == {"phi": "1/x²"}
    weights = {
        name: Table(pd.DataFrame({"weight": [1.0]}), known=FRAME_MEANINGS[name]).units
        for name in ("position", "similarity")
    }
    assert weights == {"position": {"weight": "1/x²"}, "similarity": {"weight": ""}}
    assert FRAME_MEANINGS["forms"]["left"] != FRAME_MEANINGS["left"]["left"]


def test_the_first_result_says_what_a_column_means(descent: Checkpoint):
    named = name_algorithm(descent, n_prompts=64)
    assert known(Own, named)["mu"] == ("Mean of my numbers.", "x²")
    assert known(Own, named)["learner"] == known(named)["learner"]
