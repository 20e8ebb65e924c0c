"""Several checkpoints on one page; a bad one is named and the others go on."""

import html
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch

from mechinterp.checkpoints.checkpoint import load
from mechinterp.report.page import PAGE, write_page, write_report
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
def test_models_come_in_the_order_of_their_numbers_with_links_to_their_pages(tmp_path: Path):
    names = ("softmax-h2-s10", "softmax-h2-s2")
    models = [load(CHECKPOINTS / name) for name in names]
    write_page(tmp_path / names[0], names[0], "", "", [])
    (tmp_path / names[1]).mkdir()
    (tmp_path / names[1] / PAGE).write_text("somebody else's page")
    text = write_report(models, tmp_path / "all", n_prompts=64).page.read_text()
    frame = pd.read_csv(tmp_path / "all" / "models.csv")
    assert frame["checkpoint"].tolist() == list(reversed(names))
    assert '<a href="../softmax-h2-s10/index.html">softmax-h2-s10</a>' in text
    assert 'href="../softmax-h2-s2' not in text


@pytest.mark.slow
def test_models_without_history_have_no_curves(tmp_path: Path):
    for seed in (0, 1):
        folder = tmp_path / f"bare{seed}"
        shutil.copytree(CHECKPOINTS / f"softmax-h1-s{seed}", folder)
        (folder / "history.parquet").unlink()
    models = [load(tmp_path / f"bare{seed}") for seed in (0, 1)]
    text = write_report(models, tmp_path / "page", n_prompts=64).page.read_text()
    assert "Loss during training" not in text


@pytest.mark.slow
def test_names_are_never_tags(tmp_path: Path):
    shutil.copytree(CHECKPOINTS / "softmax-h1-s0", tmp_path / EVIL)
    written = write_report([load(tmp_path / EVIL)], tmp_path / "page", n_prompts=64)
    assert EVIL not in written.page.read_text()


@pytest.mark.slow
def test_the_command_compares_several_and_names_the_bad_ones(run: Run, tmp_path: Path):
    paths = [CHECKPOINTS / name for name in NAMES]
    out = tmp_path / "page"
    ran = run("report", *paths, tmp_path / "gone", "--out", out, "--n-prompts", 64, "--json")
    assert ran.code == 2
    assert list(ran.document) == ["checkpoints", "page", "tables", "verdict"]
    *good, bad = ran.document["checkpoints"]
    assert good == [{"path": str(path)} for path in paths]
    assert bad["path"] == str(tmp_path / "gone")
    assert "does not exist" in bad["error"]
    assert ran.document["verdict"].endswith(", kernel_regression 1. Left out: 1 of 4.")
    left_out = pd.read_csv(out / "left_out.csv")
    assert left_out.columns.tolist() == ["checkpoint", "error"]
    assert left_out["checkpoint"].tolist() == [bad["path"]]
    assert f"{bad['path']}: {left_out['error'].item()}" == bad["error"]
    assert ran.document["page"] == str(out / PAGE)
    assert len(pd.read_csv(out / "models.csv")) == 3
    run("report", *paths, "--out", out, "--n-prompts", 64).assert_refused(out, "already exists")
    ran = run("report", *paths[:2], "--out", out, "--n-prompts", 64, "--overwrite").done()
    assert ran.out.startswith("2 models of 1 setting: softmax-h2: debiased_gd 1, kernel_regr")


def test_what_is_left_out_is_named_with_its_reason_and_is_never_a_tag(run: Run, tmp_path: Path):
    bad = tmp_path / f"{EVIL}.pt"
    torch.save({f"{EVIL}.weight": torch.ones(2)}, bad)
    paths = [CHECKPOINTS / name for name in NAMES[:2]]
    ran = run("report", *paths, bad, "--out", tmp_path / "page", "--n-prompts", 64)
    assert ran.code == 2
    assert " Left out: 1 of 3. " in " ".join(ran.out.split())
    text = (tmp_path / "page" / PAGE).read_text(encoding="utf-8")
    assert re.findall(r"<h2>(.*?)</h2>", text)[:2] == ["Settings and models", "Left out"]
    row = text.partition("<caption>Left out</caption>")[2].partition("</table>")[0]
    path, reason = (html.unescape(cell) for cell in re.findall(r"<td.*?>(.*?)</td>", row))
    assert path == str(bad)
    assert reason.startswith("must hold the tensors of a format known here (transformer-lens, ")
    assert f"got {EVIL}.weight; state " in reason
    assert EVIL not in text


def test_the_command_takes_a_folder_of_checkpoints(run: Run, tmp_path: Path):
    for seed in (0, 1):
        shutil.copytree(CHECKPOINTS / f"softmax-h1-s{seed}", tmp_path / "all" / f"s{seed}")
    ran = run(
        "report", tmp_path / "all", "--out", tmp_path / "page", "--n-prompts", 64, "--json"
    ).done()
    assert len(ran.document["checkpoints"]) == 2


def test_nothing_to_compare_is_bad_input(run: Run, tmp_path: Path):
    ran = run("report", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "page")
    assert ran.code == 2
    assert ran.err.splitlines()[-1].endswith("compare needs at least one checkpoint, got none.")
    assert not (tmp_path / "page").exists()
