"""Documents hold the promised fields, the numbers of the results, and nothing that JSON lacks."""

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mechinterp.analysis.ablation.single import Ablations, ablate_heads
from mechinterp.analysis.ablation.subsets import ablate_subsets
from mechinterp.analysis.learners.compare import FITTED, fit_learners
from mechinterp.analysis.one_layer.classify import classify
from mechinterp.checkpoints.checkpoint import Checkpoint, load, save
from mechinterp.checkpoints.native.folder import outline_of
from mechinterp.config import ExperimentConfig, override
from mechinterp.icl.prompts import generator_for, sample_prompts
from mechinterp.models.constructions.one_layer import debiased_gradient_step, zero_head
from mechinterp.models.heads import stack
from mechinterp.report.header import dumps
from mechinterp.report.info import info_document
from mechinterp.report.to_csv import write_csv, write_table
from mechinterp.report.to_json import to_json, training_document
from mechinterp.training.train import TrainingSummary, train_models

CONFIG = override(ExperimentConfig(), "model.n_heads=3", "seed=2")
HEADER = ["schema_version", "path", "format", "assumed", "n_layers", "n_heads", "d_x", "d_y"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Two heads that make a gradient step of size 0.88 and a zero head; no history."""
    folder = tmp_path_factory.mktemp("documents") / "step"
    weights = stack([debiased_gradient_step(0.88, 0.02, d_x=5), zero_head(d_x=5)])
    save(folder, CONFIG, weights, step=7)
    return load(folder)


def assert_header(document: dict, checkpoint: Checkpoint):
    assert list(document)[:8] == HEADER
    expected = (3, str(checkpoint.path), "native", {}, *(1, 3, 5, 1))
    assert tuple(document[name] for name in HEADER) == expected


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
    def refuse(name: str):
        raise AssertionError(name)

    assert json.loads(dumps({"value": value}), parse_constant=refuse) == {"value": expected}


def test_dumps_keeps_every_digit_and_the_order():
    document = {"b": 0.1 + 0.2, "a": 1e-300}
    assert list(json.loads(dumps(document)).items()) == list(document.items())


@pytest.mark.slow
def test_info_document(checkpoint: Checkpoint):
    document = info_document(checkpoint)
    assert_header(document, checkpoint)
    assert list(document)[8:] == [
        *("name", "id", "step", "experiment", "origin"),
        *("history_rows", "snapshots", "eval_loss", "weights", "hooks"),
    ]
    assert (document["name"], document["id"], document["step"]) == ("step", CONFIG.id, 7)
    assert json.loads(dumps(document))["experiment"] == json.loads(CONFIG.to_json())
    assert (document["history_rows"], document["snapshots"]) == (0, [])
    assert document["eval_loss"] is None
    assert document["weights"] == {f"blocks.0.attn.W_{name}": [3, 6, 6] for name in "QKVO"}
    hooks = {hook["name"]: hook for hook in json.loads(dumps(document))["hooks"]}
    assert list(hooks) == list(checkpoint.model.hook_dict)
    assert hooks["blocks.0.attn.hook_pattern"]["shape"] == ["batch", 3, "pos", "pos"]
    assert hooks["blocks.0.attn.hook_result"]["switch"] == "set_use_attn_result"


@pytest.mark.slow
def test_info_document_of_a_trained_model(tmp_path: Path):
    config = override(CONFIG, "train.steps=20", "train.log_every=10", "train.snapshot_every=20")
    train_models({".": override(config, "model.d_head=2")}, tmp_path / "run")
    trained = load(tmp_path / "run")
    document = json.loads(dumps(info_document(trained)))
    assert (document["step"], document["history_rows"], document["snapshots"]) == (20, 9, [0, 20])
    assert document["eval_loss"] == trained.history["eval_loss"].iloc[-1]
    outline = outline_of(tmp_path / "run")
    assert outline is not None
    assert json.loads(dumps(info_document(outline, hooks=False))) == {
        name: value for name, value in document.items() if name != "hooks"
    }
    assert document["weights"]["blocks.0.attn.W_V"] == [3, 6, 2]
    assert document["weights"]["blocks.0.attn.W_O"] == [3, 2, 6]


@pytest.mark.slow
def test_classification_document(checkpoint: Checkpoint):
    found = classify(checkpoint, n_prompts=256)
    document = json.loads(dumps(to_json("classify", checkpoint, found)))
    assert_header(document, checkpoint)
    assert list(document)[8:] == ["pattern", "reason", "heads", "evidence", "verdict"]
    assert (document["pattern"], document["reason"]) == ("debiased_gd", found.reason)
    assert [head["label"] for head in document["heads"]] == ["positive", "negative", "dummy"]
    assert [(head["layer"], head["head"]) for head in document["heads"]] == [(0, 0), (0, 1), (0, 2)]
    negative = document["heads"][1]
    assert list(negative) == [
        *("layer", "head", "label", "share", "omega", "omega_mean", "omega_form", "mu"),
        *("qk_diagonal", "qk_diagonal_p", "qk_off_diagonal", "qk_y_leak"),
        *("ov_last_entry", "ov_last_entry_p", "ov_x_leak", "task_leak"),
    ]
    assert negative["omega"] == pytest.approx([-0.02] * 5)
    assert negative["omega_mean"] == pytest.approx(-0.02)
    assert negative["mu"] == pytest.approx([-22])
    assert negative["qk_diagonal"] == pytest.approx(1)
    assert negative["ov_last_entry"] == pytest.approx(1)
    assert {negative[name] for name in ("qk_off_diagonal", "qk_y_leak", "ov_x_leak")} == {0}
    assert sum(head["share"] for head in document["heads"]) == pytest.approx(1)

    evidence = document["evidence"]
    assert (evidence["task"], evidence["best_factor"]) == (found.task.in_words, found.best_factor)
    assert evidence["best_factor"] == pytest.approx(1, abs=4 * evidence["best_factor_sem"])
    assert set(evidence) == {
        *("sign_matching", "omega_spread", "zero_sum", "eta", "eta_optimal"),
        *("theta", "supports", "support_leak", "theta_spread"),
        *("form", "isotropy", "shared", "rotation", "p_values", "n_random", "random_ranges"),
        *("loss", "learners", "task", "best_factor", "best_factor_sem", "n_prompts"),
        *("n_components", "learned", "off_diagonal"),
        *("substitution_r2", "substitution_r2_sem", "substitution_rms", "substitution_rms_sem"),
        *("learner_r2", "learner_r2_sem", "learner_rms", "learner_rms_sem"),
    }
    assert evidence["sign_matching"] is True
    assert evidence["eta"] == pytest.approx([0.88])
    assert evidence["eta_optimal"] == pytest.approx(1 / (1 + 1.1 * 5 / 40))
    assert evidence["zero_sum"] == pytest.approx(0, abs=1e-12)
    assert evidence["substitution_r2"] == pytest.approx(1)
    assert 0.99 < evidence["learner_r2"] < 1
    assert evidence["theta"] == [pytest.approx([0.88] * 5)]
    assert (evidence["form"], evidence["supports"]) == ("scalar", [[0, 1, 2, 3, 4]])
    assert evidence["p_values"]["zero_sum"] == pytest.approx(1 / 401)


def test_ablation_document(checkpoint: Checkpoint):
    prompts = sample_prompts(
        CONFIG.task, 256, generator=generator_for(0, "eval", 0), dtype=checkpoint.weights.W_Q.dtype
    )
    single = [ablate_heads(checkpoint.model, prompts, method=method) for method in ("zero", "mean")]
    subsets = ablate_subsets(checkpoint, prompts)
    document = json.loads(dumps(to_json("ablate", checkpoint, Ablations(tuple(single), subsets))))
    assert_header(document, checkpoint)
    assert list(document)[8:] == [
        *("excess_risk", "excess_risk_sem", "null_risk", "breaking", "heads", "layers"),
        *("shapley", "subsets"),
    ]
    assert document["excess_risk"] == single[0].full_risk
    assert document["excess_risk_sem"] == single[0].full_risk_sem
    assert [(row["method"], row["layer"], row["head"]) for row in document["heads"]] == [
        *(("zero", 0, 0), ("zero", 0, 1), ("zero", 0, 2)),
        *(("mean", 0, 0), ("mean", 0, 1), ("mean", 0, 2)),
    ]
    assert [row["rise"] for row in document["heads"][:3]] == single[0].rise[0].tolist()
    assert [row["rise_sem"] for row in document["heads"][3:]] == single[1].rise_sem[0].tolist()
    assert document["layers"] == [{"layer": 0, "effective_heads": single[0].effective_heads[0]}]
    assert [list(row) for row in document["shapley"]] == [["head", "shapley", "shapley_sem"]] * 3
    assert [row["kept"] for row in document["subsets"]] == [
        *("none", "H0", "H1", "H2", "H0 H1", "H0 H2", "H1 H2", "H0 H1 H2"),
    ]
    alone = to_json("ablate", checkpoint, Ablations(tuple(single), None))
    assert list(alone) == list(document)[:14]


def test_fits_document(checkpoint: Checkpoint):
    fits = fit_learners(checkpoint, context_lengths=[20], n_prompts=512)
    document = json.loads(dumps(to_json("fit", checkpoint, fits)))
    assert_header(document, checkpoint)
    assert list(document)[8:] == [
        *("best", "verdict", "trained_length", "n_prompts", "lead", "lead_sem", "fits"),
    ]
    assert (document["best"], document["verdict"]) == ("debiased_gd", fits.verdict)
    assert (document["trained_length"], document["n_prompts"]) == (40, 512)
    assert document["lead"] > 2 * document["lead_sem"] > 0
    rows = document["fits"]
    assert [(row["context_length"], row["learner"]) for row in rows] == [
        (length, learner) for length in (20, 40) for learner in FITTED
    ]
    by_learner = {row["learner"]: row for row in rows if row["context_length"] == 40}
    assert by_learner["ridge"]["factor"] is None
    assert by_learner["debiased_gd"]["factor"] == pytest.approx(0.88, abs=0.01)
    for row in rows:
        assert {"factor_sem", "r2", "r2_sem", "rms", "rms_sem", "loss", "loss_sem"} < set(row)
        assert {"loss_gap", "loss_gap_sem", "kernel_omega", "model_loss"} < set(row)


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


def test_training_document():
    summary = TrainingSummary((Path("run"),), steps=300, seconds=2.0, loss=0.25)
    numbers = {"steps": 300, "seconds": 2.0, "steps_per_second": 150.0, "loss": 0.25}
    assert training_document(summary, "run") == {"checkpoint": "run", **numbers}
    nothing_to_do = TrainingSummary((Path("run"),), steps=0, seconds=0.0, loss=math.nan)
    document = training_document(nothing_to_do, "run")
    assert document["steps_per_second"] == 0
    assert json.loads(dumps(document))["loss"] is None
