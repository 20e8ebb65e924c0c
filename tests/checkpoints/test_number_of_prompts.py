"""Number of prompts on which the readings of a file are compared, against numbers worked out by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from mechinterp.checkpoints.foreign import read
from mechinterp.checkpoints.foreign.readings.case import Case
from mechinterp.checkpoints.foreign.readings.losses import n_prompts_for
from mechinterp.checkpoints.load import load
from tests.checkpoints.files import saved
from tests.checkpoints.foreign_files import attention_module


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """A reading of one layer of width 4 with two heads, in tokens of 40 pairs and the query."""
    seen: list[Case] = []
    compare = read.try_cases

    def noted(cases: list[Case]):
        seen.extend(cases)
        return compare(cases)

    monkeypatch.setattr(read, "try_cases", noted)
    module = attention_module(0, width=4, n_heads=2, bias=False)
    load(saved(tmp_path, module.state_dict()), n_heads=2)
    return seen[0]


@pytest.mark.parametrize(
    ("n_cases", "more", "expected"),
    [
        (1, 1, 2048),  # one layer of attention
        (3, 4, 8192),  # four times as many for the second comparison
        # 41 positions; 64 weights and 16 biases, zero or not, and 16 * 41 * 2 for the attention weights of two heads:
        # 41 * (80 + 1312) = 57,072 products.
        (1000, 1, 2**34 // 57_072_000),  # 301
        (100_000, 1, 16),  # never fewer
        # 41 positions of width 4: 164 numbers for each prompt.
        (1, 100, 2**24 // 164),  # 102,300
    ],
)
def test_the_number_of_prompts_stays_within_both_limits(
    case: Case, n_cases: int, more: int, expected: int
):
    assert case.task.context_length == 40
    assert n_prompts_for([case] * n_cases, more) == expected


def test_tokens_in_turn_take_twice_the_positions(case: Case):
    in_turn = replace(case, tried={**case.tried, "layout": "in_turn"})
    # 82 positions of width 4, and 82 * (80 + 16 * 82 * 2) = 221,728 products.
    assert n_prompts_for([in_turn], 100) == 2**24 // 328
    assert n_prompts_for([in_turn] * 1000, 1) == 2**34 // 221_728_000
    # The largest case decides.
    assert n_prompts_for([case, in_turn], 100) == 2**34 // (2 * 221_728)


def test_layers_add_their_weights_and_their_patterns(case: Case):
    two = replace(case, parts=replace(case.parts, layers=case.parts.layers * 2))
    # 41 * (160 + 16 * 41 * 2 layers * 2 heads) = 114,144 products.
    assert n_prompts_for([two] * 1000, 1) == 2**34 // 114_144_000
