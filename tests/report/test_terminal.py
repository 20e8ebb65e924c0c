"""What is printed: the numbers are those of the results."""

import contextlib
import io
import json
import os
import re
import sys
import threading
from dataclasses import replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from rich.console import Console

from mechinterp import cli
from mechinterp.analysis.ablation.single import Ablations, ablate_heads
from mechinterp.analysis.ablation.subsets import ablate_subsets
from mechinterp.analysis.learners.compare import fit_learners
from mechinterp.analysis.number_format import digits, explained, with_error
from mechinterp.analysis.one_layer.classify import classify
from mechinterp.analysis.result import Table
from mechinterp.config import TaskConfig
from mechinterp.models.constructions.descent import gradient_descent_model
from mechinterp.models.constructions.one_layer import debiased_gradient_step, zero_head
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.report import bars
from mechinterp.report.text import ROWS, frame_text, wrapped
from mechinterp.report.to_text import HEADS, brief_text, classification_text, to_text
from mechinterp.training.run import Progress
from tests.conftest import CHECKPOINTS, sampled


@pytest.fixture
def pair():
    return debiased_gradient_step(0.88, 0.1, d_x=5)


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def test_fits_are_shown_at_the_trained_length_and_r2_over_all(pair, narrow):
    fits = fit_learners(pair, context_lengths=[10, 20], n_prompts=512)
    text = to_text("fit", fits)
    assert " ".join(text.split()).startswith(fits.verdict)
    rest = text.splitlines()
    assert max(map(len, rest)) <= 80
    assert "Fits at L = 40; loss gap is the model's loss minus the learner's" in rest
    (row,) = [line.split() for line in rest if line.split()[:1] == ["debiased_gd"]]
    assert row[1:4] == with_error(fits.factor[2, 2], fits.factor_sem[2, 2]).split()
    over_length = rest[rest.index("R² over context length") + 1 :]
    assert over_length[1].split() == ["length", "zero", "gd", "gd", "head", "ridge"]
    values = np.array([line.split() for line in over_length[2:]], dtype=float)
    assert values[:, 0].tolist() == [10, 20, 40]
    np.testing.assert_allclose(values[:, 1:], fits.r2, rtol=5e-3)  # three digits


def test_ablations_without_subsets(pair, prompts):
    single = (ablate_heads(ICLTransformer.from_weights(pair, task=TaskConfig()), prompts),)
    text = to_text("ablate", Ablations(single, None))
    risk = with_error(single[0].full_risk, single[0].full_risk_sem)
    assert text.splitlines()[0] == f"excess risk {risk} y²."
    subsets = ablate_subsets(pair, prompts)
    last = to_text("ablate", Ablations(single, subsets)).splitlines()[-1].split()
    assert last[:3] == ["H0", "H1", "2"]
    assert last[3:6] == with_error(subsets.risk[-1], subsets.risk_sem[-1]).split()


def test_a_table_has_at_most_twenty_rows_unless_all_are_asked_for(narrow):
    frame = pd.DataFrame({"head": range(30), "rise": np.linspace(0, 1, 30), "rise_sem": 0.1})
    units = {"rise": "y²"}
    *rows, more = frame_text(frame, units).splitlines()
    assert (len(rows), more) == (1 + ROWS, f"... and {30 - ROWS} more rows: --wide")
    assert rows[0].split() == ["head", "rise", "(y²)"]
    assert rows[2].split() == ["1", "0.0", "±", "0.1"]
    wide = frame_text(frame, units, wide=True).splitlines()
    assert len(wide) == 32
    assert wide[0].split() == ["rise", "rise"]
    assert wide[1].split() == ["head", "(y²)", "sem"]


def test_columns_that_do_not_fit_stand_below_under_the_same_heads(narrow):
    frame = pd.DataFrame({"head": [0, 1], **{f"a_long_name_{n}": [1.0, 2.5] for n in range(20)}})
    lines = frame_text(frame, wide=True).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.split()[0] == "1" for line in lines) == 2
    assert sum(line.split().count("2.50") for line in lines) == 20


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


@pytest.mark.parametrize("n_heads", [1, 2])
def test_a_classification_is_five_columns_below_the_verdict(pair, narrow, n_heads):
    found = classify(pair if n_heads == 2 else zero_head(d_x=5), n_prompts=64)
    said, table = classification_text(found).split("\n\n")
    assert said.splitlines()[0] == found.pattern
    assert str(found.verdict).split() == said.split()[1 : 1 + len(str(found.verdict).split())]
    assert f"Loss on its task: {found.loss}." in " ".join(said.split())
    words, heads, *rows = table.splitlines()
    assert words == "Heads: share = part of the output; a head multiplies x·x by omega and y by mu"
    assert heads.split() == ["head", "label", "share", "omega", "(1/x²)", "mu"]
    assert len(rows) == n_heads
    assert max(map(len, [words, heads, *rows, *said.splitlines()])) <= 80
    if n_heads == 2:
        share = digits(found.share[0])
        assert rows[0].split() == ["0", "positive", share, "0.100", "4.40"]


@pytest.mark.slow
def test_of_many_heads_of_layers_those_that_count_are_shown(narrow):
    model = gradient_descent_model([0.5, 0.3], d_x=4)
    found = classify(model, n_prompts=16)
    rises = {"increase": np.arange(30.0)[None], "increase_sem": np.ones((1, 30))}
    many = replace(found, **rises, excess_risk=100.0)
    lines = classification_text(many).split("\n\n")[1].splitlines()
    assert lines[0] == "Heads: what the excess risk rises by when one is masked"
    assert lines[2].split()[:4] == ["L0H29", "29", "±", "1"]
    # Rises of 0 to 2 with errors of 1 are not clear; 27 are.
    assert len(lines) == 2 + HEADS + 1
    assert all(word in lines[-1] for word in ("19", "L0H0, L0H1, L0H2", "--wide"))
    # A rise above the model's own risk is shown, whatever its error.
    heavy = replace(many, increase_sem=np.full((1, 30), 40.0), excess_risk=20.0)
    named = [line.split()[0] for line in heavy.head_lines(30)[:-1]]
    assert named == [f"L0H{head}" for head in range(29, 20, -1)]
    rows = re.findall(r"^ +0 +\d+ +L0H", classification_text(many, wide=True), re.MULTILINE)
    assert len(rows) == 30


@pytest.mark.parametrize("several_layers", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_of_many_models_each_has_its_loss_and_r2_on_one_line(pair, narrow, several_layers):
    model = gradient_descent_model([0.5, 0.3], d_x=4) if several_layers else pair
    task = TaskConfig(d_x=4 if several_layers else 5)
    # A model built by hand was not trained here, so its task may be doubted; that is the last part of this test.
    found = replace(classify(model, task, n_prompts=128), trained_here=True)
    label, line, *heads = brief_text(found).splitlines()
    if several_layers:
        r2 = explained(*found.algorithm.explained(found.algorithm.nearest))
    else:
        r2 = explained(found.learner.r2, found.learner.r2_sem)
    loss, ridge, zero = (digits(getattr(found.loss, name)) for name in ("model", "ridge", "zero"))
    assert label == found.pattern
    assert line == f"  loss {loss} y² (ridge {ridge}, predicting 0 {zero}), {r2}"
    assert len(line) <= 80
    assert len(heads) == (found.increase.size if several_layers else len(found.labels))
    # Of a task that nobody stated it says on further lines that it may be another one.
    doubted = replace(found, trained_here=False, best_factor=0.5, best_factor_sem=0.01)
    said = " ".join(brief_text(doubted).split())
    assert f"{r2}; {doubted.task_doubt}" in said
    assert "the task may be another one" in said


def test_a_p_value_at_its_floor_is_below_it(pair, narrow):
    found = classify(pair, n_prompts=64)
    wide = classification_text(found, wide=True)
    assert f"< {1 / (2 * found.n_random):.2g}" in wide
    assert found.reason in " ".join(wide.split())


def test_the_bar_shows_models_loss_speed_and_time_left(monkeypatch):
    shown = io.StringIO()
    console = Console(file=shown, width=120, force_terminal=True)
    monkeypatch.setattr(bars, "Console", lambda stderr: console)
    with bars.progress_bar() as on_log:
        on_log(Progress(step=400, steps=1000, n_models=2, loss=0.25, steps_per_second=10.0))
    assert "2 models, loss 0.2500, 10 steps/s, 0:01:00 left" in shown.getvalue()
    assert "400/1000" in shown.getvalue()


@pytest.mark.parametrize("quiet", [True, False])
def test_a_bar_that_is_quiet_or_was_never_used_prints_nothing(capsys, quiet):
    with bars.progress_bar(quiet=quiet) as on_log:
        if quiet:
            on_log(Progress(step=400, steps=1000, n_models=2, loss=0.25, steps_per_second=10.0))
    assert capsys.readouterr() == ("", "")


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
@pytest.mark.parametrize(
    ("arguments", "text", "lines"),
    sampled(
        [
            ("fit softmax-h1-s0 --n-prompts 512 --context-length 20", "fitting", "2"),
            ("classify softmax-h1-s0 softmax-h2-s0 --n-prompts 64", "classifying", "2"),
            ("ablate sparse-h1-noise0.1-s0 --n-prompts 64", "masking heads", "1"),
        ],
        keep=lambda case: case[1] == "fitting",
    ),
)
def test_long_analyses_show_a_bar_on_a_terminal_and_nothing_of_it_in_the_output(
    arguments, text, lines
):
    words = arguments.split()
    paths = [str(CHECKPOINTS / a) if (CHECKPOINTS / a).exists() else a for a in words]
    output, shown = on_a_terminal(*paths, "--json")
    json.loads(output)
    assert text in shown
    assert f"{lines}/{lines}" in shown
    quiet, nothing = on_a_terminal(*paths, "--json", "--quiet")
    assert quiet == output
    assert text not in nothing
    plain, _ = on_a_terminal(*paths)
    assert text not in plain
    assert str(CHECKPOINTS) in plain


def test_where_there_is_no_terminal_nothing_is_told(capsys):
    with bars.progress_bars() as progress:
        assert list(progress([1, 2, 3], "counting")) == [1, 2, 3]
    assert capsys.readouterr() == ("", "")


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
