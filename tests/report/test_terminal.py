"""What is printed: the numbers are those of the results."""

import contextlib
import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

from mechinterp.analysis.heads.ablation import ablate_heads
from mechinterp.analysis.heads.masking import Ablations
from mechinterp.analysis.heads.subsets import ablate_subsets
from mechinterp.analysis.learners.fits import fit_learners
from mechinterp.config import TaskConfig
from mechinterp.models.constructions import debiased_gradient_step
from mechinterp.models.transformer import ICLTransformer
from mechinterp.report import terminal
from mechinterp.training.run import Progress
from tests.conftest import CHECKPOINTS


@pytest.fixture
def pair():
    return debiased_gradient_step(0.88, 0.1, d_x=5)


def test_fits_are_shown_at_the_trained_length_and_r2_over_all(pair):
    fits = fit_learners(pair, context_lengths=[10, 20], n_prompts=512)
    text = terminal.fits_text(fits)
    verdict, *rest = text.splitlines()
    assert verdict == fits.verdict
    assert "Fits at L = 40; loss_gap is the model's loss minus the learner's" in rest
    (row,) = [line.split() for line in rest if line.split()[:1] == ["debiased_gd"]]
    assert row[1] == f"{fits.factor[2, 2]:.4g}"
    over_length = rest[rest.index("R² over context length") + 1 :]
    assert over_length[0].split() == [
        "context_length",
        "zero",
        "vanilla_gd",
        "debiased_gd",
        "kernel_head",
        "ridge",
    ]
    values = np.array([line.split() for line in over_length[1:]], dtype=float)
    assert values[:, 0].tolist() == [10, 20, 40]
    np.testing.assert_allclose(values[:, 1:], fits.r2, rtol=1e-3)


def test_ablations_say_when_subsets_are_left_out(pair, prompts):
    single = (ablate_heads(ICLTransformer.from_weights(pair, task=TaskConfig()), prompts),)
    text = terminal.ablation_text(Ablations(single, None))
    assert (
        text.splitlines()[0]
        == f"excess risk {single[0].full_risk:.4f} ± {single[0].full_risk_sem:.4f} y²"
    )
    assert text.endswith(
        "Subsets are left out: they are of one layer of attention with at most 12 heads."
    )
    subsets = ablate_subsets(pair, prompts)
    last = terminal.ablation_text(Ablations(single, subsets)).splitlines()[-1].split()
    assert last[:3] == ["H0", "H1", "2"]
    assert last[3] == f"{subsets.risk[-1]:.4g}"


def test_the_bar_shows_models_loss_speed_and_time_left(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(
        terminal, "Console", lambda stderr: Console(file=shown, width=120, force_terminal=True)
    )
    with terminal.progress_bar() as on_log:
        on_log(Progress(step=400, steps=1000, n_models=2, loss=0.25, steps_per_second=10.0))
    assert "2 models, loss 0.2500, 10 steps/s, 0:01:00 left" in shown.getvalue()
    assert "400/1000" in shown.getvalue()


def test_a_quiet_bar_shows_nothing(capsys):
    with terminal.progress_bar(quiet=True) as on_log:
        on_log(Progress(step=400, steps=1000, n_models=2, loss=0.25, steps_per_second=10.0))
    assert capsys.readouterr() == ("", "")


def test_a_bar_that_was_never_used_prints_nothing(capsys):
    with terminal.progress_bar():
        pass
    assert capsys.readouterr() == ("", "")


def on_a_terminal(*arguments: str) -> tuple[str, str]:
    """What the command line writes to standard output, a pipe, and to standard error, a terminal."""
    terminal_end, end = os.openpty()
    command = [sys.executable, "-m", "mechinterp", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=end, text=True) as process:
        os.close(end)
        seen = b""
        with contextlib.suppress(OSError):  # what a terminal says when the other end is closed
            while piece := os.read(terminal_end, 1 << 16):
                seen += piece
        output = process.stdout.read()
    os.close(terminal_end)
    assert process.returncode == 0, seen
    return output, seen.decode()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="there are no terminals to open here")
@pytest.mark.parametrize(
    ("arguments", "text", "lines"),
    [
        (["fit", "softmax-h1-s0", "--n-prompts", "512", "--context-length", "20"], "fitting", "2"),
        (["classify", "softmax-h1-s0", "softmax-h2-s0", "--n-prompts", "64"], "classifying", "2"),
        (["ablate", "sparse-h1-noise0.1-s0", "--n-prompts", "64"], "masking heads", "1"),
    ],
)
def test_long_analyses_show_a_bar_on_a_terminal_and_nothing_of_it_in_the_output(
    arguments, text, lines
):
    paths = [str(CHECKPOINTS / a) if (CHECKPOINTS / a).exists() else a for a in arguments]
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
    with terminal.progress_bars() as progress:
        assert list(progress([1, 2, 3], "counting")) == [1, 2, 3]
    assert capsys.readouterr() == ("", "")
