"""Gates: heads that help, do nothing and harm get their roles; the scores are shares."""

import numpy as np
import pytest
import torch

from mechinterp.analysis.ablation import gates
from mechinterp.analysis.ablation.gates import HeadGates, learn_gates
from mechinterp.analysis.ablation.masked_risk import masked_errors
from mechinterp.analysis.ablation.single import ablate_heads
from mechinterp.config import TaskConfig
from mechinterp.models.constructions.one_layer import diagonal_heads
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.run.predictor import predictor_of
from tests.deep_models import random_gpt2, random_model


@pytest.mark.slow
def test_roles_of_heads_that_help_do_nothing_and_harm(prompts):
    prompts = prompts[:128]
    # A kernel smoother; a zero head; and a head that takes away a share of the first one's prediction.
    weights = diagonal_heads([0.5, 0.0, 0.5], [1.5, 0.0, -0.8], d_x=5)
    model = ICLTransformer.from_weights(weights, task=TaskConfig())
    found = learn_gates(model, prompts, steps=50, learning_rate=0.3)
    assert found.roles == ["facilitating", "irrelevant", "interfering"]
    np.testing.assert_allclose(found.scores.sum(0), 1, rtol=1e-12)
    assert found.closed[0, 0] > 0.8
    assert found.opened[0, 2] < 0.2
    assert (found.opened[0, 1], found.closed[0, 1]) == pytest.approx((0.982, 0.018), abs=1e-3)
    alone = ablate_heads(model, prompts[64:])
    assert np.array_equal(found.rise, alone.rise)
    assert found.risks[0] < found.full_risk
    columns = ["layer", "head", "role", "facilitating", "irrelevant", "interfering"]
    assert list(found.to_frame().columns)[:6] == columns
    assert repr(found).startswith("HeadGates(1 facilitating, 1 irrelevant, 1 interfering; risk ")
    assert found.plot().data[0].z.shape == (1, 3)


@pytest.mark.parametrize("make", [random_model, random_gpt2])
def test_a_gate_of_zero_is_a_mask(make, few):
    predictor = predictor_of(make())
    factors = torch.ones(predictor.n_layers, predictor.n_heads, dtype=torch.float64)
    factors[1, 1] = 0
    with torch.no_grad():
        risk = gates._risk(predictor, few, factors).item()
    assert risk == pytest.approx(masked_errors(predictor, few, [[(1, 1)]]).mean(), rel=1e-10)


@pytest.mark.slow
def test_progress_is_told_of_masking_and_of_each_fit(few):
    told: list[tuple[str, int]] = []

    def progress(items, text):
        for done, item in enumerate(items, 1):
            yield item
            told.append((text, done))

    found = learn_gates(random_model(1), few, steps=3, progress=progress)
    fits = [
        (f"fitting gates ({kind})", n) for kind in ("free", "opened", "closed") for n in (1, 2, 3)
    ]
    assert told[-9:] == fits
    assert {text for text, _ in told[:-9]} == {"masking heads (zero)"}
    untold = learn_gates(random_model(1), few, steps=3)
    assert np.array_equal(found.closed, untold.closed)


def test_gates_leave_the_model_as_it_was(few):
    model = random_model(2)
    before = model.predict(few)
    found = learn_gates(model, few, steps=3)
    assert isinstance(found, HeadGates)
    assert torch.equal(model.predict(few), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_bad_settings_are_refused(few):
    with pytest.raises(ValueError, match=r"pressure must be > 0, got 0\.0"):
        learn_gates(random_model(1), few, pressure=0.0)
    with pytest.raises(ValueError, match="steps must be >= 1, got 0"):
        learn_gates(random_model(1), few, steps=0)
