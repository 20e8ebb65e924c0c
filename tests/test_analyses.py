"""The scripts in analyses/: that they run, and that the table of claims is the one they wrote."""

import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

ANALYSES = Path(__file__).parents[1] / "analyses"
CHECKPOINTS = ANALYSES.parent / "checkpoints"
SCRIPTS = sorted(
    file.stem
    for file in ANALYSES.glob("*.py")
    if "\n    run(measure" in file.read_text(encoding="utf-8")
)
IDS = (
    *("O1a", "O1b", "O1c", "O1d", "O1e", "O2a", "O2b", "O2c", "O3a", "O3b", "O3c", "O3d", "O3e"),
    *("O4a", "O4b", "O4c", "O4d", "S1", "L1", "A1", "A2", "N1", "N2", "N3"),
    *("M-I", "M-II", "M-III", "M-IV", "M-loss", "T1", "T2", "T3", "T4", "T5", "T6", "T7"),
    *(f"C{number}" for number in range(1, 17)),
)


def claims(folder: Path) -> pd.DataFrame:
    files = sorted(folder.glob("*.claims.csv"))
    return pd.concat([pd.read_csv(file, dtype=str, keep_default_na=False) for file in files])


def test_every_claim_of_the_papers_is_measured_and_stands_in_the_table():
    found = claims(ANALYSES / "results")
    assert set(IDS) <= set(found.id)
    assert {f"L-{number}" for number in range(1, 21)} <= set(found.id)
    assert found.ours.str.len().min() > 0
    table = (ANALYSES / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .*`\w+\.py`.*$", table, re.MULTILINE)
    assert len(rows) == len(found)
    for row, ours in zip(rows, found.ours, strict=True):
        assert ours.replace("|", "\\|") in row


def test_the_table_of_trained_models_is_that_of_the_results():
    sys.path.insert(0, str(ANALYSES))
    try:
        from sparse_table import markdown
    finally:
        sys.path.remove(str(ANALYSES))
    table = markdown(ANALYSES / "results")
    assert table in (ANALYSES / "README.md").read_text(encoding="utf-8")
    models = sorted(file.parent.name for file in CHECKPOINTS.glob("sparse-h*/config.json"))
    assert sorted(re.findall(r"^\| (sparse-[^ ]+)", table, re.MULTILINE)) == models


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_run_and_measure_the_claims_they_have_shipped(script: str, tmp_path: Path):
    command = [sys.executable, str(ANALYSES / f"{script}.py"), "--quick", "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    assert (tmp_path / f"{script}.csv").stat().st_size > 0
    shipped = ANALYSES / "results" / f"{script}.claims.csv"
    if shipped.exists():
        again, first = claims(tmp_path), pd.read_csv(shipped, dtype=str, keep_default_na=False)
        # A quick run may have fewer models.
        rows = ["id", "claim"]
        assert again[rows].to_numpy().tolist() == first[rows].to_numpy().tolist()


def test_the_library_of_the_scripts():
    sys.path.insert(0, str(ANALYSES))
    try:
        from measured import near, numbers, shipped
    finally:
        sys.path.remove(str(ANALYSES))
    assert numbers([0.1302, 0.1291]) == "0.129 to 0.130"
    assert numbers([0.13, 0.1301]) == "0.130"
    assert near([0.126, 0.131], 0.128, within=0.03)
    assert not near([0.126, 0.133], 0.128, within=0.03)
    assert shipped("softmax-h2-s1*") == ["softmax-h2-s1", "softmax-h2-s10", "softmax-h2-s11"]
