"""The commands on other people's files and on several layers: options for what a file cannot say, tables, pruning, conversion."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from mechinterp.checkpoints.io.files import CheckpointError
from mechinterp.checkpoints.load import convert
from mechinterp.icl.prompts import draw_prompts, generator_for
from mechinterp.models.constructions.one_layer import diagonal_heads
from mechinterp.report.to_csv import classification_frame, write_table
from tests.checkpoints.files import read as load
from tests.checkpoints.foreign_files import (
    arrays,
    attention_module,
    matrices,
    random_heads,
    softmax_paper_state,
    whole_run,
)
from tests.checkpoints.recordings import recorded
from tests.conftest import CHECKPOINTS, Run
from tests.deep_models import wide_checkpoint
from tests.models.test_layered_models import garg

FEW, OF_GPT2 = ("--n-prompts", "64"), ("--n-heads", 4)


def pair_of_heads(file: Path) -> Path:
    """A debiased gradient step as the softmax paper's code would save it."""
    weights = diagonal_heads([0.1, -0.1], [4.0, -4.0], d_x=3).to(torch.float32)
    torch.save(whole_run(softmax_paper_state(weights)), file)
    return file


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    return pair_of_heads(tmp_path / "run.pth")


def test_classify_reads_somebody_elses_run(run: Run, pair: Path):
    ran = run("classify", pair, "--json", *FEW).done()
    (document,) = ran.document
    assert (document["format"], document["pattern"]) == ("softmax-paper", "debiased_gd")
    title, row = ran.err.splitlines()
    assert title.startswith(f"mechinterp: {pair}: ")
    assert row.startswith("  assumed  task.context_length = 40, ")
    assert "task.beta_var = 0.3333 (1/d_x), task.noise_var = 0.1, " in row
    assert document["assumed"]["task.beta_var"] == 1 / 3
    full = run("classify", pair, "--verbose", "--json", *FEW).err.splitlines()
    assert full[:2] == [title, row]
    assert full[2].startswith("  known    task.d_x = 3, task.d_y = 1, ")
    assert "model.sign = plus" in full[2]
    given = run("classify", pair, "--json", *FEW, "--context-length", 3).document[0]["assumed"]
    assert set(document["assumed"]) - set(given) == {"task.context_length"}


def test_assumptions_are_short_and_in_full_under_verbose(run: Run, tmp_path: Path):
    state = attention_module(5, width=6, n_heads=3, bias=True).state_dict()
    state |= {"mask": torch.ones(9, 9).tril(), "out_proj.scale_of_it": torch.randn(3, 3)}
    torch.save(state, tmp_path / "a.pt")
    hints = ("--n-heads", 3, "--map", "out_proj.scale_of_it=unused", "--json", *FEW)
    short = run("classify", tmp_path / "a.pt", *hints).err
    full = run("classify", tmp_path / "a.pt", "--verbose", *hints).err
    for line in (short, full):
        assert re.search("\n  unused +tensors mask, out_proj.scale_of_it\n", line)
        assert "attend_to_self = False" in line
    assert len(short) < len(full)
    assert ("  readings " in short, "  readings " in full) == (False, True)


def test_info_shows_every_ground(run: Run, tmp_path: Path):
    """Known by shapes, stated by an option, proven by predictions, assumed; so does a folder that keeps them."""
    heads = diagonal_heads([0.1, -0.1], [4.0, -4.0], d_x=3).to(torch.float32)
    state = {f"attn.{n}_proj.weight": t for n, t in matrices(heads).items()}
    torch.save(state, tmp_path / "a.pt")

    def predict(x: Tensor, y: Tensor, x_query: Tensor) -> Tensor:
        query, keys = pad(x_query, (0, 1)), torch.cat([x, y[..., None]], -1)
        scores = torch.einsum("bi,hij,blj->bhl", query, heads.QK, keys)
        return torch.einsum("bhl,bli,hio->bo", scores.softmax(-1), keys, heads.OV)

    batch = recorded(tmp_path / "batch.npz", predict, d_x=3, length=8)
    hints = ("--n-heads", 2, "--columns", "x,y", "--predictions", batch)
    card = run("info", tmp_path / "a.pt", *hints).done().out
    run("convert", tmp_path / "a.pt", *hints, "--to", "native", "--out", tmp_path / "kept").done()
    kept = run("info", tmp_path / "kept").done().out
    for text in (card, kept):
        rows = {line.split()[0]: " ".join(line.split()[1:]) for line in whole_lines(text)}
        assert "task.noise_var = 0.1" in rows["assumed"]
        assert "model.columns = x,y" in rows["stated"]
        assert "model.score = softmax" in rows["proven"]
        assert "recorded predictions" in rows["proven"]
        assert "model.score_slope = 1" in rows["known"]
    (document,) = [run("info", tmp_path / "a.pt", *hints, "--json").document]
    assert document["proven"]["model.score"] == "softmax"
    assert document["stated"]["model.columns"] == "x,y"


def whole_lines(card: str) -> list[str]:
    """Lines of a card, each with its continuation."""
    lines: list[str] = []
    for line in card.splitlines():
        if line.startswith(" " * 10) and lines:
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
    return lines


@pytest.mark.slow
def test_classify_takes_the_hints(run: Run, tmp_path: Path):
    file = tmp_path / "torch.pt"
    torch.save(attention_module(5, width=6, n_heads=3, bias=True).state_dict(), file)
    words = f"{file}: n_heads is not stated in the file; give --n-heads (n_heads=).\n"
    run("classify", file, *FEW).assert_refused(words)
    hints = ("--n-heads", "3", "--d-y", "1", "--d-x", "5", "--attend-to-self")
    hints += ("--format", "torch-attention")  # random weights
    (found,) = run("classify", file, *hints, *FEW, "--json").done().document
    assert (found["n_heads"], found["d_x"]) == (3, 5)
    assert not {"model.attend_to_self", "task.d_y"} & found["assumed"].keys()


@pytest.mark.slow
def test_scale_and_context_only(run: Run, tmp_path: Path):
    np.savez(tmp_path / "a.npz", **arrays(random_heads()))
    out = tmp_path / "native"
    hints = ("--scale", "2", "--no-attend-to-self")
    hints += ("--to", "native", "--out", out, "--json")
    run("convert", tmp_path / "a.npz", *hints).done()
    expected = 4 * random_heads().QK  # 2 for 1/sqrt(4)
    torch.testing.assert_close(load(out).weights.QK, expected)
    assert not {"attn_scale", "model.attend_to_self"} & set(load(out).assumed)
    words = "scale is only for files that do not state it"
    run("info", out, "--scale", "2").assert_refused(words)
    for option in (("--scale", "0"), ("--scale", "x"), ("--d-x", "0"), ("--format", "onnx")):
        run("info", tmp_path / "a.npz", *option).assert_refused()


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
    documents = ran.document
    errors = [f"mechinterp: {each['error']}" for each in documents if "error" in each]
    assert [line for line in ran.err.splitlines() if "assumed" not in line] == errors
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


def test_a_table_is_new_and_of_a_known_kind(run: Run, tmp_path: Path, pair: Path):
    table = tmp_path / "table.parquet"
    run("classify", pair, *FEW, "--out", table).done()
    frame = pd.read_parquet(table)
    assert (len(frame), frame["n_heads"].item(), frame["sign_matching"].item()) == (1, 2, True)
    before = table.read_bytes()
    for out, words in (
        (table, "already exists; it is not overwritten; choose another --out."),
        ("t.txt", "must end in .par"),
    ):
        run("classify", pair, *FEW, "--out", out).assert_refused(words)
    assert table.read_bytes() == before


def test_a_table_of_failures_and_of_nothing(tmp_path: Path):
    failed = [{"path": "x", "error": "gone"}]
    for name in ("a.csv", "a.parquet"):
        write_table(tmp_path / name, failed)
    assert pd.read_parquet(tmp_path / "a.parquet")["error"].tolist() == ["gone"]
    assert list(classification_frame([]).columns) == [
        *("path", "format", "pattern", "reason", "n_layers", "n_heads", "d_x", "d_y", "error")
    ]
    mixed = [
        {"path": "a", "pattern": "p", "eta": 0.5, "ok": True, "many": None, "r2": None},
        {"path": "b", "pattern": "q", "eta": None, "r2": float("nan"), "labels": ["positive"]},
        *failed,
    ]
    write_table(tmp_path / "b.parquet", mixed)
    frame = pd.read_parquet(tmp_path / "b.parquet")
    assert not {"many", "r2"} & set(frame.columns)
    assert (frame["eta"][0], frame["ok"][0]) == (0.5, True)
    assert frame["labels"][1].tolist() == ["positive"]
    assert frame["eta"].isna().tolist() == [False, True, True]
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_table(tmp_path / "file" / "a.csv", failed)


# Several layers, ours and others'.


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    return wide_checkpoint(tmp_path / "deep").path


@pytest.mark.slow
def test_a_pruned_model_is_trained_further(run: Run, deep: Path, tmp_path: Path):
    out, longer = tmp_path / "pruned", tmp_path / "longer"
    ran = run("prune", deep, "--n-prompts", 80, "--refit", "--out", out, "--json").done()
    assert ran.document["refit_ratio"] > 0
    assert ran.document["checkpoint"] == str(out)
    few = (
        "--set",
        "train.steps=8",
        "--set",
        "train.n_eval_prompts=16",
        "--set",
        "train.batch_size=16",
    )
    run("train", "--start", out, *few, "--out", longer, "--quiet").done()
    trained = load(longer)
    assert trained.step == 8
    assert trained.origin["started_from"] == "pruned"
    assert trained.origin["kept_heads"] == load(out).origin["kept_heads"]
    assert trained.weights.heads_per_layer == load(out).weights.heads_per_layer
    assert "origin     pruned from deep, kept heads [[" in run("info", out).out
    run("train", out / "config.json").assert_refused("made from another", "--start")


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    torch.save(garg().state_dict(), tmp_path / "gpt2.pt")
    return tmp_path / "gpt2.pt"


@pytest.mark.slow
def test_prune_somebody_elses_layers(run: Run, gpt2: Path, tmp_path: Path):
    out, options = tmp_path / "pruned", (*OF_GPT2, "--n-prompts", 80)
    ran = run("prune", gpt2, *options, "--out", out, "--json").done()
    assert ran.document["heads_per_layer"] == [4, 1, 1]
    gone = [(row["layer"], row["head"]) for row in ran.document["heads"] if not row["kept"]]
    before, after = load(gpt2, n_heads=4), load(out)
    assert after.task == before.task
    assert after.assumed == json.loads(json.dumps(before.assumed_and_doubt))
    assert (after.format, after.config.model) == ("native", before.config.model)
    assert after.origin["pruned_from"] == "gpt2.pt"
    drawn = draw_prompts(before.task, 16, generator=generator_for(1, "eval", 0))
    full, expected = before.predictor.run(drawn, [[], gone])
    torch.testing.assert_close(after.model.predict(drawn), expected)
    assert (expected - full).abs().max() > 1e-3


@pytest.mark.slow
def test_what_several_layers_refuse(run: Run, deep: Path, gpt2: Path):
    run("prune", deep, "--rule", "all").assert_refused("rule", "best-later", "'all'")
    run("prune", CHECKPOINTS / "softmax-h2-s0").assert_refused("prune", "several layers")
    run("probe", deep, "--n-prompts", 12).assert_refused(deep, "n_prompts must be >= 24", "got 12")
    run("probe", gpt2).assert_refused("n_heads", "--n-heads")
    long, few = ("--context-length", 10, "<= 9"), ("--n-prompts", 16, ">= 32")
    for command, (option, value, rule) in (("ablate", long), ("prune", long), ("probe", few)):
        ran = run(command, gpt2, *OF_GPT2, option, value)
        ran.assert_refused(gpt2, rule, lines=5)  # a table of settings comes first


# Conversion.

CHECKPOINT = CHECKPOINTS / "softmax-h2-s0"


def test_convert_there_and_back(run: Run, tmp_path: Path):
    out, back = tmp_path / "exchange", tmp_path / "back"
    there = ("convert", CHECKPOINT, "--to", "transformer-lens", "--out", out, "--json")
    document = run(*there).done(silent=True).document
    assert list(document)[:4] == ["schema_version", "path", "format", "assumed"]
    said = [document[name] for name in ("format", "to", "n_ctx", "left_out")]
    assert said == ["native", "transformer-lens", 1024, ["history", "snapshots"]]
    assert sorted(map(Path, document["files"])) == sorted(out.iterdir())
    document = run("convert", out, "--to", "native", "--out", back, "--json").document
    said = [document[name] for name in ("format", "n_ctx", "left_out")]
    assert said == ["transformer-lens", None, []]
    file = "model.safetensors"
    assert (back / file).read_bytes() == (CHECKPOINT / file).read_bytes()


def test_an_unknown_format_is_refused_with_the_known_ones(run: Run, tmp_path: Path):
    ran = run("convert", CHECKPOINT, "--to", "onnx", "--out", tmp_path / "new")
    ran.assert_refused("native, transformer-lens", "'onnx'")
    assert not list(tmp_path.iterdir())
