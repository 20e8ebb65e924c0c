"""The commands on other people's files: options for what a file cannot say, tables, layered models."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from mechinterp.checkpoints.io.errors import CheckpointError
from mechinterp.checkpoints.load import convert, load
from mechinterp.models.constructions.one_layer import debiased_gradient_step, diagonal_heads
from mechinterp.report.to_csv import classification_frame, write_table
from tests.checkpoints.foreign_files import (
    arrays,
    attention_module,
    random_heads,
    softmax_paper_state,
    whole_run,
)
from tests.conftest import Run
from tests.models.test_layered_models import garg

FEW = ("--n-prompts", "64")


def pair_of_heads(file: Path) -> Path:
    """A debiased gradient step as the softmax paper's code would save it."""
    weights = diagonal_heads([0.1, -0.1], [4.0, -4.0], d_x=3).to(torch.float32)
    torch.save(whole_run(softmax_paper_state(weights)), file)
    return file


def torch_file(file: Path) -> Path:
    torch.save(attention_module(5, width=6, n_heads=3, bias=True).state_dict(), file)
    return file


def test_classify_reads_somebody_elses_run(run: Run, tmp_path: Path):
    file = pair_of_heads(tmp_path / "run.pth")
    ran = run("classify", file, "--json", *FEW)
    document = json.loads(ran.out)[0]
    assert (ran.code, document["format"], document["pattern"]) == (
        0,
        "softmax-paper",
        "debiased_gd",
    )
    assert ran.err.startswith(f"mechinterp: {file}: assumed task.context_length = 40, ")
    assert "task.beta_var = 0.3333 (1/d_x), task.noise_var = 0.1, " in ran.err
    assert document["assumed"]["task.beta_var"] == 1 / 3
    assert document["evidence"]["task"] == (
        "d_x 3, d_y 1, context_length 40, covariance identity, beta_var 0.3333 (1/d_x), noise_var 0.1, query_noise yes; "
        "assumed: context_length, covariance, beta_var, noise_var, query_noise"
    )
    assert ran.err.count("\n") == 1


@pytest.mark.slow
def test_an_assumed_task_is_doubted_and_a_stated_one_is_not(run: Run, tmp_path: Path):
    """One step of gradient descent of the right size for covariates twice as large."""
    file, told = tmp_path / "run.pth", tmp_path / "task.json"
    weights = debiased_gradient_step(0.88 / 4, 0.02, d_x=5)
    torch.save(softmax_paper_state(weights), file)
    assumed = run("classify", file, "--json").document[0]
    evidence = assumed["evidence"]
    off = evidence["best_factor"] - 1
    assert off > 4 * evidence["best_factor_sem"] > 0
    assert evidence["best_factor"] == pytest.approx(4, abs=4 * evidence["best_factor_sem"])
    assert assumed["verdict"]["doubt"].startswith("the task may be another one")
    assert "What to doubt: the task may be another one" in run("classify", file).out
    assert "the task may be another one" in " ".join(run("classify", file, file).out.split())
    fields = {"context_length": 40, "covariance": {"kind": "identity"}, "beta_var": 0.2}
    told.write_text(json.dumps(fields | {"noise_var": 0.1, "query_noise": True}))
    stated = run("classify", file, "--json", "--task", told).document[0]
    assert stated["verdict"]["doubt"] == ""
    assert stated["evidence"]["best_factor"] == pytest.approx(evidence["best_factor"])


@pytest.mark.slow
@pytest.mark.parametrize("command", ["ablate", "fit", "info", "classify"])
def test_commands_take_the_hints(run: Run, tmp_path: Path, command: str):
    file = torch_file(tmp_path / "torch.pt")
    options = () if command == "info" else FEW
    options += ("--context-length", "5") if command == "fit" else ()
    refused = run(command, file, *options)
    assert refused.code == 2
    assert (
        refused.err
        == f"mechinterp: {file}: n_heads is not in the file; give --n-heads (n_heads=).\n"
    )
    hints = ("--n-heads", "3", "--d-y", "1", "--d-x", "5", "--attend-to-self")
    hints += ("--format", "torch-attention")
    ran = run(command, file, *hints, *options, "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    found = found[0] if isinstance(found, list) else found
    assert (found["n_heads"], found["d_x"]) == (3, 5)
    assert "model.attend_to_self" not in found["assumed"]
    assert "task.d_y" not in found["assumed"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one layer", "native", "gpt2"])
def test_a_context_length_that_is_given_is_not_assumed(run: Run, tmp_path: Path, kind: str):
    file = pair_of_heads(tmp_path / "run.pth")
    if kind == "native":
        convert(load(file), "native", tmp_path / "native")
        file = tmp_path / "native"
    hints = ()
    if kind == "gpt2":
        file, hints = tmp_path / "gpt2.pt", ("--n-heads", "4")
        torch.save(garg().state_dict(), file)
    classify = ("classify", file, *hints, *FEW, "--json")
    without, given = run(*classify), run(*classify, "--context-length", "3")
    assert "task.context_length = " in without.err
    assert given.code == 0
    assert "assumed task." in given.err
    assert "task.context_length" not in given.err
    before, after = without.document[0]["assumed"], given.document[0]["assumed"]
    assert set(before) - set(after) == {"task.context_length"}
    told = tmp_path / "task.json"
    told.write_text('{"context_length": 3}')
    if kind != "native":
        assert run(*classify, "--task", told).document == given.document


@pytest.mark.slow
def test_scale_and_context_only(run: Run, tmp_path: Path):
    np.savez(tmp_path / "a.npz", **arrays(random_heads()))
    out = tmp_path / "native"
    hints = ("--scale", "2", "--context-only", "--to", "native", "--out", out, "--json")
    assert run("convert", tmp_path / "a.npz", *hints).code == 0
    expected = 4 * random_heads().QK  # 2 for 1/sqrt(4)
    torch.testing.assert_close(load(out).weights.circuits.QK, expected)
    assert not {"attn_scale", "model.attend_to_self"} & set(load(out).assumed)
    ran = run("info", out, "--scale", "2")
    assert (ran.code, ran.out) == (2, "")
    assert "scale is only for files that do not state theirs" in ran.err
    for option in (("--scale", "0"), ("--scale", "x"), ("--d-x", "0"), ("--format", "onnx")):
        ran = run("info", tmp_path / "a.npz", *option)
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)


def test_convert_to_npz(run: Run, tmp_path: Path):
    file, out = pair_of_heads(tmp_path / "run.pth"), tmp_path / "arrays.npz"
    ran = run("convert", file, "--to", "npz", "--out", out)
    assert (ran.code, ran.out) == (0, f"{out}: written\n")
    document = json.loads(
        run("convert", out, "--to", "native", "--out", tmp_path / "n", "--json").out
    )
    assert document["format"] == "arrays"
    document = json.loads(
        run("convert", out, "--to", "npz", "--out", tmp_path / "b.npz", "--json").out
    )
    assert (document["n_ctx"], document["files"]) == (None, [str(tmp_path / "b.npz")])
    ran = run("convert", file, "--to", "npz", "--out", out)
    assert (
        ran.err.splitlines()[-1]
        == f"mechinterp: {out}: already exists; it is not overwritten; choose another --out."
    )


def test_classify_goes_through_a_folder_of_files(run: Run, tmp_path: Path):
    folder = tmp_path / "all"
    folder.mkdir()
    good = pair_of_heads(folder / "good.pth")
    convert(load(good), "native", folder / "native")
    convert(load(good), "npz", folder / "good.npz")
    (folder / "bad.pt").write_bytes(b"x")
    (folder / "notes.txt").write_text("x")
    (folder / "empty").mkdir()
    table = tmp_path / "table.csv"
    ran = run("classify", folder, folder / "gone.bin", "--json", *FEW, "--out", table)
    assert ran.code == 2
    documents = json.loads(ran.out)
    names = [Path(document["path"]).name for document in documents]
    assert names == ["bad.pt", "good.npz", "good.pth", "native", "gone.bin"]
    assert [list(document) == ["path", "error"] for document in documents] == [
        *(True, False, False, False, True)
    ]
    frame = pd.read_csv(table)
    assert frame["path"].tolist() == [document["path"] for document in documents]
    assert frame["pattern"].fillna("").tolist() == ["", *["debiased_gd"] * 3, ""]
    assert frame["format"].tolist()[1:4] == ["arrays", "softmax-paper", "native"]
    assert frame["error"].notna().tolist() == [True, False, False, False, True]
    assert frame["eta"].iloc[1] == pytest.approx(0.8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all", "table.csv"]


def test_a_table_is_new_and_of_a_known_kind(run: Run, tmp_path: Path):
    good = pair_of_heads(tmp_path / "good.pth")
    table = tmp_path / "table.parquet"
    assert run("classify", good, *FEW, "--out", table).code == 0
    frame = pd.read_parquet(table)
    assert (len(frame), frame["n_heads"].item(), frame["sign_matching"].item()) == (1, 2, True)
    before = table.read_bytes()
    for out, words in (
        (table, "already exists; it is not overwritten; choose another --out."),
        ("t.txt", "must end in .par"),
    ):
        ran = run("classify", good, *FEW, "--out", out)
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
        assert words in ran.err
    assert table.read_bytes() == before


def test_a_table_of_failures_and_of_nothing(tmp_path: Path):
    failed = [{"path": "x", "error": "gone"}]
    for name in ("a.csv", "a.parquet"):
        write_table(tmp_path / name, failed)
    assert pd.read_parquet(tmp_path / "a.parquet")["error"].tolist() == ["gone"]
    # The evidence of several layers has a table called path, which is not the checkpoint's.
    several = {"path": "x.pt", "evidence": {"path": [{"layer": 0}, {"layer": 1}], "r2": 0.5}}
    assert classification_frame([several]).iloc[0][["path", "r2"]].tolist() == ["x.pt", 0.5]
    assert list(classification_frame([]).columns) == [
        *("path", "format", "pattern", "reason", "n_layers", "n_heads", "d_x", "d_y", "error")
    ]
    mixed = [
        {
            "path": "a",
            "pattern": "p",
            "evidence": {"eta": [0.5], "ok": True, "many": [1, 2], "r2": None},
        },
        {"path": "b", "pattern": "q", "evidence": {"eta": [0.5, 0.6], "r2": float("nan")}},
        *failed,
    ]
    write_table(tmp_path / "b.parquet", mixed)
    frame = pd.read_parquet(tmp_path / "b.parquet")
    assert not {"many", "r2"} & set(frame.columns)
    assert (frame["eta"][0], frame["ok"][0]) == (0.5, True)
    assert frame["eta"].isna().tolist() == [False, True, True]
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_table(tmp_path / "file" / "a.csv", failed)


@pytest.mark.slow
def test_layered_models_are_classified_and_shown(run: Run, tmp_path: Path):
    file = tmp_path / "gpt2.pt"
    torch.save(garg().state_dict(), file)
    ran = run("classify", file, "--n-heads", "4", "--json", *FEW)
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)[0]
    assert (document["format"], document["n_layers"], document["n_heads"]) == ("gpt2", 3, 4)
    ran = run("classify", file, "--n-heads", "4", "--context-length", "3", *FEW)
    assert ran.out.startswith(f"{file}: ")
    assert run("info", file, "--n-heads", "4").out.startswith(
        "gpt2.pt: 3 layers of 4 heads, softmax attention, d_x 3, context length 6"
    )
    there = run("info", file, "--n-heads", "4", "--json").document
    assert (there["format"], there["experiment"]["model"]["d_mlp"]) == ("gpt2", 64)
    # What info says of the same model as a folder of this package has the same fields.
    ran = run("convert", file, "--n-heads", "4", "--to", "native", "--out", tmp_path / "n")
    assert ran.code == 0, ran.err
    here = run("info", tmp_path / "n", "--json").document
    assert list(here) == list(there)
    same = ("experiment", "assumed", "weights", "hooks", "id", "n_layers", "n_heads", "step")
    assert {name: here[name] for name in same} == {name: there[name] for name in same}
    ran = run("fit", file, "--n-heads", "4", "--context-length", "3", *FEW, "--json")
    assert ran.code == 0, ran.err
    assert {row["context_length"] for row in ran.document["fits"]} == {3, 6}
    lens = ("--to", "transformer-lens", "--out", tmp_path / "lens")
    ran = run("convert", file, "--n-heads", "4", *lens)
    assert (ran.code, ran.out) == (2, "")
    assert f"{file}: HookedTransformer takes one layer of attention" in ran.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpt2.pt", "n"]


def test_names_with_control_characters_stay_on_one_line(run: Run, tmp_path: Path):
    file = pair_of_heads(tmp_path / "a\nb\x1b[31m<b>.pth")
    ran = run("classify", file, *FEW)
    assert ran.code == 0
    assert r"a\nb\x1b[31m<b>.pth: debiased_gd" in ran.out.splitlines()[0]
    assert "\x1b" not in ran.err
    assert ran.err.count("\n") == 1


def test_a_context_that_needs_too_much_memory_is_one_line(run: Run, tmp_path: Path):
    file = pair_of_heads(tmp_path / "run.pth")
    for command in ("classify", "ablate"):
        ran = run(command, file, "--context-length", 10**15, *FEW)
        assert ran.code == 2
        assert ran.err.splitlines()[-1].startswith(f"mechinterp: {file}: ")
        assert "Traceback" not in ran.err


@pytest.mark.slow
def test_classifying_a_foreign_file_leaves_heavy_packages_out(tmp_path: Path):
    pair_of_heads(tmp_path / "run.pth")
    torch.save(garg().state_dict(), tmp_path / "gpt2.pt")
    code = (
        "import sys\nfrom mechinterp import cli\nsys.argv = ['mechinterp', 'classify', *sys.argv[1:], '--n-prompts', '64']\n"
        "try:\n    cli.main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print([n for n in ('transformer_lens', 'transformers', 'sklearn', 'ray') if n in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "gpt2.pt", "--n-heads", "4"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.splitlines()[-1] == "[]"
    ran = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "run.pth"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.splitlines()[-1] == "[]"
