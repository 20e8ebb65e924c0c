"""Several checkpoints on one page; a bad one is named and the others go on."""

import html
import re
from pathlib import Path

import pandas as pd
import pytest
import torch

from mechinterp.checkpoints.checkpoint import load
from mechinterp.report.page import PAGE, write_report
from tests.conftest import CHECKPOINTS, Run
from tests.report.test_page import EVIL, unexplained_columns

NAMES = ("softmax-h2-s0", "softmax-h2-s8", "linear-merged-s0")


@pytest.mark.slow
def test_the_page_counts_patterns_by_setting(tmp_path: Path):
    models = [load(CHECKPOINTS / name) for name in NAMES]
    written = write_report(models, tmp_path / "page", n_prompts=128)
    assert written.verdict == (
        "3 models of 2 settings: linear-merged-s0: linear_gd 1; "
        "softmax-h2: debiased_gd 1, kernel_regression 1."
    )
    text = written.page.read_text(encoding="utf-8")
    plain = re.sub(r"<a [^>]*>|</a>", "", text)  # terms lead to their meaning
    assert html.escape(written.verdict) in plain
    headings = ["Settings and models"]
    assert re.findall(r"<h2>(.*?)</h2>", text) == headings
    assert [table.name for table in written.tables] == ["settings.csv", "models.csv", "fields.csv"]
    frame = pd.read_csv(tmp_path / "page" / "models.csv")
    assert frame["checkpoint"].tolist() == sorted(NAMES)
    fields = pd.read_csv(written.tables[2]).set_index("setting")
    assert unexplained_columns(written.page) == set(fields.columns)
    assert fields.loc["linear-merged-s0", "model.merged_qk"]
    assert "linear/L" in fields["model.score"].tolist()  # without quotation marks
    assert written.page.stat().st_size < 6_000_000


@pytest.mark.slow
def test_the_command_compares_several_and_names_the_bad_ones(run: Run, tmp_path: Path):
    paths = [CHECKPOINTS / name for name in NAMES]
    out, unread = tmp_path / "page", tmp_path / f"{EVIL}.pt"
    torch.save({f"{EVIL}.weight": torch.ones(2)}, unread)
    ran = run("report", *paths, unread, "--out", out, "--n-prompts", 64, "--json")
    assert ran.code == 2
    assert list(ran.document) == ["checkpoints", "page", "tables", "verdict"]
    *good, bad = ran.document["checkpoints"]
    assert good == [{"path": str(path)} for path in paths]
    assert bad["path"] == str(unread)
    assert f"{EVIL}.weight" in bad["error"]
    assert ran.document["verdict"].endswith(", kernel_regression 1. Left out: 1 of 4.")
    left_out = pd.read_csv(out / "left_out.csv")
    assert left_out.columns.tolist() == ["checkpoint", "error"]
    assert left_out["checkpoint"].tolist() == [bad["path"]]
    assert f"{bad['path']}: {left_out['error'].item()}" == bad["error"]
    assert ran.document["page"] == str(out / PAGE)
    assert EVIL not in (out / PAGE).read_text(encoding="utf-8")
    assert len(pd.read_csv(out / "models.csv")) == 3
    run("report", *paths, "--out", out, "--n-prompts", 64).assert_refused(out, "already exists")
    ran = run("report", *paths[:2], "--out", out, "--n-prompts", 64, "--overwrite").done()
    assert ran.out.startswith("2 models of 1 setting: softmax-h2: debiased_gd 1, kernel_regr")
