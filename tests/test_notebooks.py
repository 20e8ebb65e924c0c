"""The notebooks as files: cells ran in order, and a cell shows the numbers of the text beside it.

`make notebooks` runs them.
"""

import json
import math
import re
from html import unescape
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SHOWN = ("text/plain", "text/html")
NUMBER = re.compile(r"\d+\.\d+(?:e[+-]\d+)?")

pytestmark = pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)


def cells(file: Path, kind: str) -> list[dict]:
    document = json.loads(file.read_text(encoding="utf-8"))
    return [cell for cell in document["cells"] if cell["cell_type"] == kind]


def source(cell: dict) -> str:
    return "".join(cell["source"])


def test_cells_ran_in_order_without_errors_or_warnings(file: Path):
    code = cells(file, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not [output for output in outputs if "Warning" in "".join(output.get("text", []))]


def numbers_of(cell: dict) -> set[float]:
    """Numbers in the code and the text outputs of a cell."""
    texts = [source(cell)]
    for output in cell["outputs"]:
        texts.append("".join(output.get("text", [])))
        texts += ["".join(output.get("data", {}).get(kind, [])) for kind in SHOWN]
    return {float(number) for text in texts for number in NUMBER.findall(unescape(text))}


def test_a_number_of_the_text_is_shown_by_the_cell_beside_it(file: Path):
    """Text takes its numbers from the last code cell before it or the first one after it."""
    document = json.loads(file.read_text(encoding="utf-8"))["cells"]
    code = [row for row, cell in enumerate(document) if cell["cell_type"] == "code"]
    for row, cell in enumerate(document):
        if cell["cell_type"] == "code":
            continue
        beside = [
            *[other for other in code if other < row][-1:],
            *[other for other in code if other > row][:1],
        ]
        shown = set().union(*(numbers_of(document[other]) for other in beside))
        # Links and code are no claims, and neither is the name of the wheel in the setup.
        text = re.sub(r"\(http\S*\)|`[^`]*`", "", source(cell))
        for number in NUMBER.findall(text):
            # A number may be rounded, or written as a percentage.
            tolerance = 0.5001 * 10.0 ** -len(number.partition(".")[2])
            distances = [
                abs(scale * value - float(number)) for value in shown for scale in (1, 100)
            ]
            assert min(distances, default=math.inf) <= tolerance, (
                f"{number} stands in no cell beside."
            )
