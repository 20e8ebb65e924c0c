"""Public functions say what is related to them, and analyses where they are from."""

import inspect
import re

import pytest

import mechinterp
from mechinterp.analysis.registry import ANALYSES

FUNCTIONS = {one.function.__name__: one.function for one in ANALYSES.values()} | {
    name: getattr(mechinterp, name) for name in mechinterp._HOMES
}
"""The top-level names, and the analyses of the command line."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_related_names_are_public(name: str):
    text = inspect.getdoc(FUNCTIONS[name]) or ""
    found = re.search(r"^See also:\n((?: +.+\n?)+)", text, re.M)
    assert found
    related = re.findall(r"`(\w+)`", found[1])
    assert related
    assert set(related) <= FUNCTIONS.keys() - {name}
