"""Curves of pruning are masks one by one; rules are those of `prune`."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mechinterp.analysis.ablation.masked_risk import masked_errors
from mechinterp.analysis.ablation.pruning import RULES, prune
from mechinterp.analysis.ablation.pruning_curves import prune_by_rules, pruning_curves
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts, generator_for, sample_prompts
from tests.deep_models import WIDE, random_gpt2, random_model

COSTS = ("risk", "risk_sem", "ratio", "ratio_sem")


@pytest.fixture
def many() -> Prompts:
    task = TaskConfig(d_x=4, context_length=9)
    return sample_prompts(task, 80, generator=generator_for(0, "eval", 1), dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("model", [random_model(2, 2, **WIDE), random_gpt2()], ids=["ours", "gpt2"])
def test_a_curve_masks_the_heads_of_an_order_one_after_another(model, many: Prompts):
    layers = 2 if model.__class__.__name__ == "ICLTransformer" else 3
    order = [(layer, head) for layer in range(layers) for head in (1, 0)]
    found = pruning_curves(model, many, {"down": order, "up": order[::-1]})
    for row, heads in enumerate((order, order[::-1])):
        errors = masked_errors(model, many, [heads[:size] for size in range(len(order) + 1)])
        np.testing.assert_allclose(found.risk[row], errors.mean(0), rtol=1e-9)
        np.testing.assert_allclose(found.ratio[row], errors.mean(0) / errors[:, 0].mean())
    assert found.heads[0][:2] == ("L0H1", "L0H0")
    assert (found.ratio[:, 0].tolist(), found.ratio_sem[:, 0].tolist()) == ([1, 1], [0, 0])
    frame = found.to_frame()
    assert frame["n_kept"].tolist() == [*range(len(order), -1, -1)] * 2
    assert frame.query("order == 'up'")["masked_next"].tolist() == [*found.heads[1], ""]
    assert list(found.plot().data[0].x) == [*range(len(order), -1, -1)]


def test_the_heads_needed_are_the_fewest_within_the_ratio(many: Prompts):
    found = pruning_curves(random_model(1, 2, **WIDE), many, {"all": [(0, 0), (0, 1)]})
    for ratios, needed in (([1, 1.5, 3], 1), ([1, 3, 1.5], 0), ([1, 3, 3], 2)):
        assert replace(found, ratio=np.array([ratios], dtype=float)).needed("all") == needed
    assert found.needed("all", ratio=1e9) == 0
    assert (
        repr(found)
        == f"PruningCurves(heads for twice the risk at most: all {found.needed('all')} of 2)"
    )


def test_an_order_must_name_every_head_once(many: Prompts):
    model = random_model(1, 2, **WIDE)
    with pytest.raises(ValueError, match="'short' must name each of 2 heads once, got 1 heads"):
        pruning_curves(model, many, {"short": [(0, 0)]})
    with pytest.raises(ValueError, match="at least one order"):
        pruning_curves(model, many, {})


@pytest.mark.slow
def test_rules_are_those_of_prune(many: Prompts):
    model = random_model(**WIDE)
    found = prune_by_rules(model, many)
    assert found.rules == ("full model", *RULES)
    for name, rule in RULES.items():
        expected, each = prune(model, many, rule=rule), found.by_rule[name]
        assert (each.kept == expected.kept).all()
        assert (each.chosen == expected.chosen).all()
        costs = [f"{kind}{cost}" for kind in ("", "refit_") for cost in COSTS]
        values = [getattr(each, cost) for cost in costs]
        assert values == pytest.approx([getattr(expected, cost) for cost in costs], rel=1e-9)
    full = found.by_rule["full model"]
    assert full.refit_risk == pytest.approx(expected.full_refit_risk, rel=1e-9)
    assert found.to_frame()["heads_per_layer"].tolist() == [
        *("4, 4, 4", "4, 1, 1", "4, 1, 1", "1, 4, 4")
    ]
    assert found.plot().layout.yaxis.type is None
    # A rule may cost a thousand times another.
    last = found.by_rule["best-first"]
    apart = replace(
        found, by_rule=found.by_rule | {"best-first": replace(last, risk=1000 * last.risk)}
    )
    assert apart.plot().layout.yaxis.type == "log"
    assert repr(found).startswith("Pruning(best-later ")


def test_a_risk_that_few_prompts_carry_is_read_with_a_new_read_out(many: Prompts):
    found = prune_by_rules(random_model(**WIDE), many)
    assert list(found.to_frame())[2:7:4] == ["risk", "refit_risk"]
    best = replace(found.by_rule["best-later"], carried_by_few=True)
    few = replace(found, by_rule=found.by_rule | {"best-later": best})
    assert list(few.to_frame())[2:7:4] == ["refit_risk", "risk"]
    assert best.to_read == (best.refit_ratio, best.refit_ratio_sem, " with a new read-out")
    assert "times with a new read-out" in repr(few)
    other = found.by_rule["best-first"]
    assert other.to_read == (other.ratio, other.ratio_sem, "")


def test_rules_that_prune_nothing_are_left_out(many: Prompts):
    assert prune_by_rules(random_model(1, 2, **WIDE), many).rules == ("full model", "best-first")
    alone = prune_by_rules(random_model(3, 1, **WIDE), many)
    assert alone.rules == ("full model",)
    assert repr(alone) == "Pruning(full model)"
