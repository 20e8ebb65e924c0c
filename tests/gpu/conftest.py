"""The device of these tests, and the table that they write.

`make test-gpu` sets the device to cuda; elsewhere it is the processor, so that the tests are known to run.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.evidence import stamp
from tests.gpu.machine import described

DEVICE = os.environ.get("MECHINTERP_TEST_DEVICE", "cpu")
TABLE = os.environ.get("MECHINTERP_TEST_TABLE")
"""A .json file; the same as a table goes beside it, as .md."""
ROWS = pytest.StashKey[list[dict[str, object]]]()
HEADER = """# Tests on a GPU

`make test-gpu` writes this page and the same as JSON.

"""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def device() -> str:
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.fail("MECHINTERP_TEST_DEVICE=cuda needs a GPU that PyTorch can use.")
    return DEVICE


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Adds a row to the table: what was measured, the value, and what it may be at most."""

    def add(what: str, value: float, limit: float | None = None) -> None:
        row = {"test": request.node.name, "what": what, "value": value, "limit": limit}
        request.config.stash[ROWS].append(row)
        if limit is not None:
            assert value <= limit, f"{what}: {value} > {limit}"

    return add


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    """Rows of a worker, where several run the tests."""
    node.config.stash[ROWS].extend(getattr(node, "workeroutput", {}).get("rows", ()))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if TABLE is None:
        return
    rows, machine = session.config.stash[ROWS], described(DEVICE)
    if hasattr(session.config, "workerinput"):
        session.config.workeroutput["rows"] = rows
        return
    rows.sort(key=lambda row: row["test"])
    document = {
        "machine": machine,
        "passed": session.testscollected - session.testsfailed,
        "failed": session.testsfailed,
        "rows": rows,
    }
    file = Path(TABLE)
    file.write_text(json.dumps(document, indent=1) + "\n")
    if DEVICE == "cuda":
        stamp("gpu")
    where = ", ".join(f"{name} {value}" for name, value in machine.items())
    counted = f"{document['passed']} of {session.testscollected} tests passed on {where}"
    table = ["| test | what | value | at most |", "|---|---|---:|---:|"]
    table += [
        f"| {row['test']} | {row['what']} | {row['value']:.3g} | "
        f"{'' if row['limit'] is None else format(row['limit'], '.3g')} |"
        for row in rows
    ]
    file.with_suffix(".md").write_text("\n".join([HEADER + counted + ".", "", *table, ""]))
