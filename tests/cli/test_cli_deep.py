"""Models of several layers on the command line: trained, shown, classified; refused where one layer is meant."""

import json
from pathlib import Path

import pandas as pd
import pytest

from mechinterp.analysis.learners.compare import fit_learners
from mechinterp.analysis.one_layer.classify import classify
from mechinterp.checkpoints.load import load
from mechinterp.config import override
from mechinterp.presets import preset
from mechinterp.training.train import train
from tests.conftest import CHECKPOINTS, Run, assert_same

SHORT = ("train.steps=6", "train.log_every=3", "train.batch_size=8", "train.n_eval_prompts=16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "model"
    train(override(preset("sparse-h4"), *SHORT), out=path)
    return path


def test_a_preset_is_trained(folder: Path, tmp_path: Path, run: Run):
    changes = [part for assignment in SHORT for part in ("--set", assignment)]
    done = run("train", "sparse-h4", *changes, "--out", tmp_path / "model", "--json")
    assert (done.code, done.document["steps"]) == (0, 6)
    checkpoint = load(tmp_path / "model")
    assert checkpoint.config == override(preset("sparse-h4"), *SHORT)
    assert (checkpoint.step, checkpoint.weights.n_layers) == (6, 4)
    assert checkpoint.history is not None
    assert len(checkpoint.history) == 3 * 16
    assert_same(checkpoint.weights, load(folder).weights)


@pytest.mark.slow
def test_info_shows_every_layer(folder: Path, run: Run):
    document = run("info", folder, "--json").document
    assert (document["n_layers"], document["n_heads"], document["history_rows"]) == (4, 4, 48)
    assert document["weights"]["blocks.3.attn.W_Q"] == [4, 64, 16]
    assert document["weights"]["W_in"] == [17, 64]
    names = [hook["name"] for hook in document["hooks"]]
    assert "blocks.3.attn.hook_z" in names
    assert "4 heads, linear/L attention" in run("info", folder).out
    wide = run("info", folder, "--wide").out.splitlines()
    assert max(map(len, wide)) <= 80
    (line,) = [line for line in wide if "blocks.3.attn.hook_q_input" in line]
    assert line.split()[1:] == ["[batch,", "pos,", "4,", "64]", "set_use_split_qkv_input"]


@pytest.mark.slow
def test_classify_names_no_algorithm_of_a_model_after_six_steps(folder: Path, run: Run):
    (document,) = run("classify", folder, "--json", "--n-prompts", 64).document
    assert document["pattern"] == "unstructured"
    found = classify(load(folder), n_prompts=64)
    assert document["evidence"]["relative_risk"] == found.algorithm.measured.relative_risk >= 0.95
    assert document["evidence"]["function"] == "undetermined"
    rises = [row["excess_risk_increase"] for row in document["heads"]]
    assert rises == found.increase.ravel().tolist()
    ran = run("classify", folder, "--n-prompts", 64)
    assert ": unstructured\nWhat it computes: nothing that helps on its task" in ran.out
    assert found.verdict.is_not in " ".join(ran.out.split())


@pytest.mark.slow
def test_fit_answers_for_them(folder: Path, run: Run):
    options = ("--n-prompts", 64, "--context-length", 8)
    found = fit_learners(load(folder), context_lengths=[8], n_prompts=64)
    document = run("fit", folder, *options, "--json").document
    assert document["verdict"] == found.verdict
    assert [row["r2"] for row in document["fits"]] == found.r2.ravel().tolist()
    assert found.verdict in " ".join(run("fit", folder, *options).out.split())


@pytest.mark.slow
def test_convert_writes_them(folder: Path, tmp_path: Path, run: Run):
    for target, name in (("native", "copy"), ("npz", "copy.npz")):
        ran = run("convert", folder, "--to", target, "--out", tmp_path / name, "--json")
        assert (ran.code, ran.document["to"]) == (0, target)
        assert_same(load(tmp_path / name).weights, load(folder).weights)
    refused = run("convert", folder, "--to", "transformer-lens", "--out", tmp_path / "lens")
    refused.assert_refused(folder, "needs one layer of attention, got several layers (4)")
    assert not (tmp_path / "lens").exists()


@pytest.mark.slow
def test_report_writes_a_page(folder: Path, tmp_path: Path, run: Run):
    out = tmp_path / "page"
    options = ("--out", out, "--n-prompts", 64, "--json", "--quiet")
    document = run("report", folder, *options).document
    assert (document["path"], document["page"]) == (str(folder), str(out / "index.html"))
    assert document["verdict"].startswith("What it computes: ")
    assert {Path(table).stem for table in document["tables"]} == {
        *("classify", "algorithms"),
        *("circuits", "attention", "baselines", "ablation", "layers", "edges"),
        *("pruning", "chosen", "probes", "read_out_by_layer"),
        *("ablate_heads_over_steps", "history"),
    }


@pytest.mark.slow
def test_report_does_not_compare_them(folder: Path, tmp_path: Path, run: Run):
    one = CHECKPOINTS / "softmax-h1-s0"
    ran = run("report", one, folder, "--out", tmp_path / "page", "--n-prompts", 64, "--json")
    assert ran.code == 2
    good, bad = ran.document["checkpoints"]
    assert (good, bad["path"]) == ({"path": str(one)}, str(folder))
    assert "a comparison needs models of one layer of attention" in bad["error"]
    assert "got several layers (4)" in bad["error"]


@pytest.mark.slow
def test_a_sweep_has_a_row_for_each_model(tmp_path: Path, run: Run):
    changes = {name: int(value) for name, value in (each.split("=") for each in SHORT)}
    changes |= {"model.n_layers": 2}
    entry = {"preset": "sparse-h1", "set": changes, "grid": {"model.n_heads": [1, 4]}}
    file = tmp_path / "sweep.json"
    file.write_text(json.dumps(entry))
    run("sweep", file, "--out", tmp_path / "run").done()
    frame = pd.read_parquet(tmp_path / "run" / "results.parquet")
    assert frame["pattern"].tolist() == ["unstructured"] * 2
    assert frame["model.n_heads"].tolist() == [1, 4]
    assert frame["eval_loss"].between(0.1, 10).all()
