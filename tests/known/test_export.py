"""The archive of the suite: the lines of its README read every truth where neither this package nor torch can be imported."""

import json
import re
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest

from analyses.known.export import export
from mechinterp.known import Suite, suite
from mechinterp.known.truth import TRUTH_NAMES
from tests.conftest import python, refused

LONGEST = 30
"""Largest number of lines of the reader."""
CHOSEN = ("gd-2", "preprocess-2-rotated", "gd-3-dead-heads", "debiased-pair", "minimum-2")
BLOCKED = """
import sys

for name in ("mechinterp", "torch", "safetensors", "pandas", "transformer_lens"):
    sys.modules[name] = None
"""
PRINTED = """
def plain(value):
    return [plain(each) for each in value] if value.ndim else float(value)


print(json.dumps({name: plain(value) for name, value in truths.items()}))
print(json.dumps(entries))
"""
PREDICTED = """
def predicted(entry, prompts, weights):
    model = entries[entry]["model"]
    assert model["score"] == "linear/L"
    x, y, query = (prompts[f"clean/{name}"] for name in ("x", "y", "x_query"))
    pairs, last = np.concatenate([x, y], 2), np.concatenate([query, 0 * y[:, 0]], 1)
    stream = np.concatenate([pairs, last[:, None]], 1) @ weights["W_in"]
    for Q, K, V, O in zip(*(weights[f"attn.W_{name}"] for name in "QKVO")):
        scores = model["scale"] * np.einsum("nld,hdk,nme,hek->nhlm", stream, Q, stream[:, :-1], K)
        values = np.einsum("nmd,hdk,hke->nhme", stream[:, :-1], V, O)
        stream = stream + model["score_slope"] * (scores @ values).sum(1) / x.shape[1]
    return stream[:, -1] @ weights["unembed.W_U"]


for entry in ("gd-2", "preprocess-2-rotated"):
    weights = read(archive, f"weights/{entry}.safetensors")
    prompts = read(archive, f"prompts/{entry}.safetensors")
    np.testing.assert_allclose(predicted(entry, prompts, weights), prompts["clean/prediction"], atol=1e-12)
"""


@pytest.fixture(scope="module")
def chosen() -> Suite:
    hand_made = suite(1, trained="none")
    return Suite(1, {name: hand_made[name] for name in CHOSEN})


@pytest.fixture(scope="module")
def archive(chosen: Suite, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(chosen, tmp_path_factory.mktemp("archive"))


def reader_of(archive: Path) -> str:
    with ZipFile(archive) as opened:
        text = opened.read("README.md").decode()
    return re.search(r"```python\n(.*?)```", text, flags=re.DOTALL)[1]


def test_numpy_alone_reads_equal_truths(archive: Path, chosen: Suite):
    code = reader_of(archive)
    assert code.count("\n") <= LONGEST
    ran = python("-c", BLOCKED + code + PRINTED, cwd=archive.parent).done(silent=True)
    truths, entries = map(json.loads, ran.out.splitlines())
    assert entries.keys() == chosen.keys()
    n_arrays = 0
    for name, entry in chosen.items():
        for answer in TRUTH_NAMES:
            known, stated = getattr(entry.truth, answer), entries[name]["truth"].get(answer)
            assert (known is None) == (stated is None)
            if known is None:
                continue
            assert (known.how, known.error) == (stated["how"], stated["error"])
            if isinstance(known.value, np.ndarray):
                np.testing.assert_array_equal(known.value, np.array(truths[f"{name}/{answer}"]))
                n_arrays += 1
            else:
                assert known.value == stated["value"]
    assert n_arrays == len(truths)


def test_a_model_runs_from_the_archive_alone(archive: Path):
    """A stack of linear attention, written down again in numpy."""
    code = reader_of(archive)
    python("-c", BLOCKED + code + PREDICTED, cwd=archive.parent).done(silent=True)


def test_the_same_suite_gives_the_same_bytes(archive: Path, chosen: Suite, tmp_path: Path):
    assert export(chosen, tmp_path).read_bytes() == archive.read_bytes()


def test_an_archive_is_never_overwritten(archive: Path, chosen: Suite):
    with refused(archive.name, "not overwritten"):
        export(chosen, archive.parent)


def test_variables_of_version_2_are_arrays_by_name(tmp_path: Path):
    known = suite(2, trained="none")
    one = Suite(2, {"gd-2": known["gd-2"]})
    code = reader_of(archive := export(one, tmp_path))
    ran = python("-c", BLOCKED + code + PRINTED, cwd=archive.parent).done(silent=True)
    truths = json.loads(ran.out.splitlines()[0])
    for name, basis in known["gd-2"].truth.variables.value.items():
        np.testing.assert_array_equal(basis, np.array(truths[f"gd-2/variables/{name}"]))
    effects = known["gd-2"].truth.edges_out.value
    np.testing.assert_array_equal(effects, np.array(truths["gd-2/edges_out"]))
