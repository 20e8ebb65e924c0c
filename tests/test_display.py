"""How results show in a notebook."""

import importlib
import pkgutil
from dataclasses import dataclass, is_dataclass

import pandas as pd

import mechinterp
from mechinterp.analysis.one_layer.classify import classify
from mechinterp.display import ROWS, Result
from mechinterp.models.constructions.one_layer import debiased_gradient_step


@dataclass(frozen=True, eq=False, repr=False)
class Count(Result):
    n: int
    name: str = "rows"

    def __repr__(self) -> str:
        return f"Count({self.n} {self.name})"

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame({"row": range(self.n)})


def test_a_result_shows_its_sentence_and_its_table():
    found = classify(debiased_gradient_step(d_x=5, eta=0.88, omega=0.01))
    shown = found._repr_html_()
    assert shown.startswith("<p><code>Classification(debiased_gd)<br>What it computes: ")
    assert shown.count("<tr") == 1 + 2
    assert "<th>label</th>" in shown
    assert "more rows" not in shown


def test_long_tables_are_cut_and_say_so():
    assert Count(ROWS)._repr_html_().count("<tr") == 1 + ROWS
    assert "more rows" not in Count(ROWS)._repr_html_()
    long = Count(ROWS + 3)._repr_html_()
    assert long.count("<tr") == 1 + ROWS
    assert "and 3 more rows: .to_frame()" in long


def test_text_of_a_result_is_no_markup():
    assert "<img" not in Count(1, name="<img src=x onerror=alert(1)>")._repr_html_()


def test_every_class_with_a_table_shows_it():
    found = set()
    for module in pkgutil.walk_packages(mechinterp.__path__, "mechinterp."):
        if module.name.endswith("__main__") or ".callbacks." in module.name:
            continue
        for thing in vars(importlib.import_module(module.name)).values():
            if isinstance(thing, type) and is_dataclass(thing) and "to_frame" in vars(thing):
                assert issubclass(thing, Result), thing
                found.add(thing)
    assert len(found) > 12
