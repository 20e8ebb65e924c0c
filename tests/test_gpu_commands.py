"""What `make test-gpu` and `make bench-gpu` say and do where there is no GPU, and that the timing runs."""

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import bench
from tests.gpu.machine import NO_DEVICE, WRONG_BUILD, state

MAKEFILE = Path(__file__).parents[1] / "Makefile"


def test_no_device_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert state([]) == (NO_DEVICE, "No CUDA device on this machine: nothing was tested.")


def test_a_device_that_pytorch_is_not_built_for_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    code, line = state(["Some GPU"])
    assert (code, line.startswith("Found Some GPU, but PyTorch")) == (WRONG_BUILD, True)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    code, line = state(["Some GPU"])
    assert (code, "cannot use" in line) == (NO_DEVICE, True)


@pytest.mark.exhaustive
def test_the_timing_runs_with_small_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "speed.json"
    asked = ["bench", "--device", "cpu", "--quick", "--out", str(file)]
    monkeypatch.setattr(sys, "argv", asked)
    assert bench.main() == 0
    rows = json.loads(file.read_text())["rows"]
    sizes = len(bench.QUICK.replicas) + len(bench.QUICK.widths) + 2
    assert len(rows) == sizes
    assert all(row["plain"] > 0 and row["ours"] > 0 for row in rows)
    assert file.with_suffix(".md").read_text().count("\n| ") == sizes + 1
