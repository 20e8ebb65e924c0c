"""Documents hold the promised fields, the numbers of the results, and nothing that JSON lacks."""

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mechinterp.analysis.one_layer.classify import classify
from mechinterp.checkpoints.checkpoint import load, save
from mechinterp.config import ExperimentConfig, override
from mechinterp.models.constructions.one_layer import debiased_gradient_step, zero_head
from mechinterp.models.heads import stack
from mechinterp.report.to_csv import write_csv, write_table
from mechinterp.report.to_json import dumps, to_json


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
