"""Documents and what is printed have the numbers of the results; a document holds nothing that JSON lacks."""

import contextlib
import io
import json
import math
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from mechinterp import cli
from mechinterp.analysis.learners.compare import compare_learners
from mechinterp.analysis.number_format import with_error
from mechinterp.analysis.one_layer.classify import classify
from mechinterp.analysis.result import Table
from mechinterp.checkpoints.checkpoint import load, save
from mechinterp.config import ExperimentConfig, override
from mechinterp.display import ROWS_SHOWN
from mechinterp.models.constructions.descent import gradient_descent_model
from mechinterp.models.constructions.one_layer import debiased_gradient_step, zero_head
from mechinterp.models.heads import stack
from mechinterp.report.text import frame_text, wrapped
from mechinterp.report.to_csv import write_csv, write_table
from mechinterp.report.to_json import dumps, to_json
from mechinterp.report.to_text import MOST_HEAD_LINES, classification_text, to_text
from tests.conftest import CHECKPOINTS


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, None),
        (math.inf, None),
        (-math.inf, None),
        (np.float32("nan"), None),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array([[1.0, math.nan], [math.inf, 2.0]]), [[1.0, None], [None, 2.0]]),
        (np.array(2), 2),
        ((1, (2, 3)), [1, [2, 3]]),
        ({0: [np.float64("-inf"), "text", None, False]}, {"0": [None, "text", None, False]}),
    ],
    ids=str,
)
def test_dumps_writes_what_json_has(value: object, expected: object):
    # NaN and infinities, which Python would read, are no JSON.
    assert json.loads(dumps({"value": value}), parse_constant=pytest.fail) == {"value": expected}


def test_dumps_keeps_every_digit_and_the_order():
    document = {"b": 0.1 + 0.2, "a": 1e-300}
    assert list(json.loads(dumps(document)).items()) == list(document.items())


@pytest.mark.slow
def test_a_classification_as_a_document_has_the_numbers_of_its_heads(tmp_path: Path):
    weights = stack([debiased_gradient_step(0.88, 0.02, d_x=5), zero_head(d_x=5)])
    save(tmp_path / "step", override(ExperimentConfig(), "model.n_heads=3"), weights, step=7)
    checkpoint = load(tmp_path / "step")
    found = classify(checkpoint, n_prompts=256)
    document = json.loads(dumps(to_json("classify", checkpoint, found)))
    assert (document["path"], document["pattern"]) == (str(checkpoint.path), "debiased_gd")
    heads = pd.DataFrame(document["heads"])
    assert heads["label"].tolist() == ["positive", "negative", "dummy"]
    assert heads["omega_mean"].tolist() == pytest.approx([0.02, -0.02, 0])
    assert heads["mu"].map(sum).tolist() == pytest.approx([22, -22, 0])
    assert heads["share"].sum() == pytest.approx(1)
    evidence = document["evidence"]
    assert evidence["eta"] == pytest.approx([0.88])
    assert evidence["eta_optimal"] == pytest.approx(1 / (1 + 1.1 * 5 / 40))
    assert evidence["p_values"]["zero_sum"] == pytest.approx(1 / 401)


def test_a_text_of_a_csv_is_no_formula_and_a_number_stays(tmp_path: Path):
    texts = ["=1+1", "+cmd|x", "-x", "@x", "\tx", "a=b", "-0.5", "–", None]
    write_csv(pd.DataFrame({"=text": texts, "number": -1.5}), tmp_path / "a.csv")
    read = pd.read_csv(tmp_path / "a.csv")
    guarded = ["'=1+1", "'+cmd|x", "'-x", "'@x", "'\tx", "a=b", "-0.5", "–"]
    assert read.iloc[:-1, 0].tolist() == guarded
    assert (read["number"] == -1.5).all()
    rows = [{"path": "=cmd|calc!A1", "format": "native", "error": "@x"}]
    write_table(tmp_path / "b.csv", rows)
    assert pd.read_csv(tmp_path / "b.csv").loc[0, ["path", "error"]].tolist() == [
        "'=cmd|calc!A1",
        "'@x",
    ]
    write_table(tmp_path / "b.parquet", rows)
    assert pd.read_parquet(tmp_path / "b.parquet")["path"][0] == "=cmd|calc!A1"


# On the terminal.


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def test_learners_are_shown_at_the_trained_length(narrow):
    pair = debiased_gradient_step(0.88, 0.1, d_x=5)
    fits = compare_learners(pair, context_lengths=[10, 40], n_prompts=512)
    text = to_text("compare-learners", fits)
    assert " ".join(text.split()).startswith(fits.verdict)
    rest = text.splitlines()
    assert max(map(len, rest)) <= 80
    row = [word for line in rest if line.split()[:1] == ["debiased_gd"] for word in line.split()]
    own = fits.at_trained.loc["debiased_gd"]
    for name in ("factor", "r2", "risk"):
        assert with_error(own[name], own[f"{name}_sem"]) in " ".join(row)


def test_a_table_has_at_most_twenty_rows_unless_all_are_asked_for(narrow):
    frame = pd.DataFrame({"head": range(30), "rise": np.linspace(0, 1, 30), "rise_sem": 0.1})
    units = {"rise": "y²"}
    *rows, more = frame_text(frame, units).splitlines()
    assert (len(rows), more) == (1 + ROWS_SHOWN, f"... and {30 - ROWS_SHOWN} more rows: --wide")
    assert rows[2].split() == ["1", "0.0", "±", "0.1"]
    wide = frame_text(frame, units, wide=True).splitlines()
    assert len(wide) == 32


def test_lines_break_between_words_only(narrow, monkeypatch):
    text = f"one two-three {'x' * 90} four " + "word " * 30
    lines = wrapped(text, "  ").splitlines()
    assert " ".join(text.split()) == " ".join(line.strip() for line in lines)
    assert sorted(map(len, lines))[-2] <= 80
    # A number and its error, a name and its value stay together.
    for start in range(1, 30):
        said = wrapped("a " * start + "R² = 0.9989 ± 0.0001 of it with p < 0.0025 " * 3)
        assert sum(line.count("R² = 0.9989 ± 0.0001") for line in said.splitlines()) == 3
        assert sum(line.count("p < 0.0025") for line in said.splitlines()) == 3
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert wrapped("ŷ = 0.887 Σ_l y_l (x_l − x̄)·x") == "y_hat = 0.887 sum_l y_l (x_l - x_mean)*x"


@pytest.mark.slow
def test_of_many_heads_of_layers_those_that_count_are_shown(narrow):
    model = gradient_descent_model([0.5, 0.3], d_x=4)
    found = classify(model, n_prompts=16)
    some = np.arange(30.0)
    rows = pd.DataFrame({"method": "zero", "layer": 0, "head": range(30)})
    rises = {**found.heads.columns, "rise": some, "median_rise": some, "rise_sem": np.ones(30)}
    heads = replace(found.heads, rows=rows, columns=rises, few=some < 0, full_risk=100.0)
    many = replace(found, heads=heads)
    lines = classification_text(many).split("\n\n")[1].splitlines()
    assert lines[2].split()[:4] == ["L0H29", "29", "±", "1"]
    # Rises of 0 to 2 with errors of 1 are not clear; 27 are.
    assert len(lines) == 2 + MOST_HEAD_LINES + 1
    assert all(word in lines[-1] for word in ("19", "L0H0, L0H1, L0H2", "--wide"))
    # A rise above the model's own risk is shown, whatever its error.
    unsure = replace(heads, columns=rises | {"rise_sem": np.full(30, 40.0)}, full_risk=20.0)
    heavy = replace(many, heads=unsure)
    named = [line.split()[0] for line in heavy.head_lines(30)[:-1]]
    assert named == [f"L0H{head}" for head in range(29, 20, -1)]


def on_a_terminal(*arguments: str) -> tuple[str, str]:
    """What the command line writes to standard output, a pipe, and to standard error, a terminal."""
    terminal_end, end = os.openpty()
    seen: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # what a terminal says when the other end is closed
            while piece := os.read(terminal_end, 1 << 16):
                seen.append(piece)

    reader = threading.Thread(target=read)
    reader.start()
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, os.fdopen(end, "w") as terminal:
        patch.setattr(sys, "argv", ["mechinterp", *arguments])
        patch.setattr(sys, "stdout", output)
        patch.setattr(sys, "stderr", terminal)
        with pytest.raises(SystemExit) as ended:
            cli.main()
    reader.join()
    os.close(terminal_end)
    assert ended.value.code == 0, seen
    return output.getvalue(), b"".join(seen).decode()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="there are no terminals to open here")
def test_a_long_analysis_shows_a_bar_on_a_terminal_and_nothing_of_it_in_the_output():
    arguments, text = (
        "compare-learners softmax-h1-s0 --n-prompts 512 --context-length 20",
        "learners at",
    )
    words = arguments.split()
    paths = [str(CHECKPOINTS / a) if (CHECKPOINTS / a).exists() else a for a in words]
    output, shown = on_a_terminal(*paths, "--json")
    json.loads(output)
    assert text in shown
    assert "1/1" in shown
    quiet, nothing = on_a_terminal(*paths, "--json", "--quiet")
    assert quiet == output
    assert text not in nothing
    plain, _ = on_a_terminal(*paths)
    assert text not in plain
    assert str(CHECKPOINTS) in plain


def test_a_table_without_rows_and_columns_without_text_are_left_out():
    class Told:
        def to_frame(self) -> pd.DataFrame:
            return pd.DataFrame({"n": [1, 2], "reason": ["", ""]})

        def plot(self) -> go.Figure:
            return go.Figure()

        def tables(self) -> dict[str, Table]:
            none = Table(pd.DataFrame({"a": []}), "None")
            return {"told": Table(self.to_frame(), "Told"), "none": none}

    text = to_text("told", Told())
    assert "Told" in text
    assert "reason" not in text
    assert "None" not in text
    assert "reason" in to_text("told", Told(), wide=True)
