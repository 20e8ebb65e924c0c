"""Patching by position: as many columns as positions, and the numbers that patching by hand gives."""

import re

import numpy as np
import plotly.graph_objects as go
import pytest
import torch
from transformer_lens.utilities import get_act_name

from mechinterp.analysis.heads.patching import (
    HEAD_PARTS,
    STREAMS,
    first_prediction,
    patch_positions,
)
from mechinterp.config import ModelConfig, TaskConfig
from mechinterp.icl.prompts import Prompts, generator_for, sample_prompts
from mechinterp.models.constructions import diagonal_heads
from mechinterp.models.transformer import ICLTransformer

TASK = TaskConfig(d_x=3, d_y=2)


def random_prompts(length: int, step: int) -> Prompts:
    generator = generator_for(0, "eval", step)
    return sample_prompts(TASK, 6, generator=generator, context_length=length, dtype=torch.float64)


def random_model() -> ICLTransformer:
    architecture = ModelConfig(n_layers=2, n_heads=3, d_head=4)
    model = ICLTransformer(architecture, d_x=3, d_y=2).to(torch.float64)
    generator = generator_for(2, "init", 0)
    for weights in model.parameters():
        torch.nn.init.normal_(weights, std=0.5, generator=generator)
    return model.eval()


# d_model is 5: TransformerLens, left to itself, would patch the first five positions, or a sixth of five.
@pytest.mark.slow
@pytest.mark.parametrize("length", [2, 4, 11])
@pytest.mark.parametrize("activation", STREAMS + HEAD_PARTS)
def test_columns_are_positions_and_values_those_by_hand(activation: str, length: int):
    model, clean, corrupted = random_model(), random_prompts(length, 1), random_prompts(length, 2)
    before = corrupted.tokens.clone()
    found = patch_positions(model, clean, corrupted, activation=activation, metric=first_prediction)
    heads = (3,) if activation in HEAD_PARTS else ()
    assert found.effect.shape == found.effect_sem.shape == (2, length + 1, *heads)
    _, cache = model.run_with_cache(clean.tokens)
    unpatched = model.predict(corrupted)[:, 0]
    for place in np.ndindex(found.effect.shape):
        layer, pos, *head = place
        index = (slice(None), *head, pos) if activation == "pattern" else (slice(None), pos, *head)
        name = get_act_name(activation, layer)

        def patch(values, hook, index=index, name=name):
            values = values.clone()
            values[index] = cache[name][index]
            return values

        with torch.no_grad():
            patched = model.run_with_hooks(corrupted.tokens, fwd_hooks=[(name, patch)])[:, -1, 0]
        change = (patched - unpatched).detach()
        assert found.effect[place] == pytest.approx(change.mean().item(), abs=1e-5)
        assert found.effect_sem[place] == pytest.approx(change.std().item() / 6**0.5, abs=1e-5)
    gained = (model.predict(clean) - model.predict(corrupted))[:, 0]
    assert found.total == pytest.approx(gained.mean().item())
    assert found.total_sem == pytest.approx(gained.std().item() / 6**0.5)
    assert np.abs(found.effect).max() > 1e-2
    assert torch.equal(corrupted.tokens, before)
    assert not [name for name, point in model.hook_dict.items() if point.fwd_hooks]


def test_an_averaging_head_carries_each_label_alike():
    # Head 0 attends uniformly and adds mu mean(y); head 1 adds nothing.
    model = ICLTransformer.from_weights(
        diagonal_heads([0.0, 0.0], [1.5, 0.0], d_x=3, d_y=2), task=TASK
    )
    clean, corrupted = random_prompts(8, 1), random_prompts(8, 2)
    found = patch_positions(
        model, clean, corrupted, activation="v", metric=lambda logits: logits[:, -1, 1]
    )
    expected = 1.5 / 8 * (clean.y - corrupted.y)[:, :, 1].mean(0).numpy()
    np.testing.assert_allclose(found.effect[0, :-1, 0], expected, atol=1e-6)
    assert found.effect[0, -1, 0] == 0
    assert not found.effect[0, :, 1].any()
    assert found.effect.sum() == pytest.approx(found.total, abs=1e-5)


@pytest.mark.parametrize("activation", ["attn_out", "z"])
def test_result(activation: str):
    model = random_model()
    found = patch_positions(
        model, random_prompts(4, 1), random_prompts(4, 2), activation=activation
    )
    frame = found.to_frame()
    head = ["head"] if activation == "z" else []
    assert list(frame) == ["activation", "layer", "pos", *head, "effect", "effect_sem"]
    assert len(frame) == found.effect.size
    row = frame.query("layer == 1 and pos == 4" + (" and head == 2" if head else "")).iloc[0]
    assert row["effect"] == found.effect[(1, 4, 2) if head else (1, 4)]
    figure = found.plot()
    assert isinstance(figure, go.Figure)
    names = [f"L{i}H{j}" for i in range(2) for j in range(3)] if head else ["L0", "L1"]
    assert [curve.name for curve in figure.data] == names
    last = found.effect[1, :, 2] if head else found.effect[1]
    np.testing.assert_array_equal(figure.data[-1].y, last)
    size = rf"{np.abs(found.effect).max():.3g} of [+-]{abs(found.total):.3g}"
    place = r"L\dH\d" if head else r"L\d"
    assert re.fullmatch(
        rf"PositionPatching\({activation}: {place} position 4 [+-]{size}\)", repr(found)
    )


def test_unknown_activation_is_refused():
    known = "resid_pre, attn_out, resid_post, q, k, v, z, pattern"
    prompts = random_prompts(4, 1)
    with pytest.raises(ValueError, match=rf"^activation must be one of {known}, got 'mlp'\.$"):
        patch_positions(random_model(), prompts, prompts, activation="mlp")


def test_prompts_of_other_lengths_are_refused():
    rule = r"^clean and corrupted tokens must have one shape, got \[6, 5, 5\] and \[6, 6, 5\]\.$"
    with pytest.raises(ValueError, match=rule):
        patch_positions(random_model(), random_prompts(4, 1), random_prompts(5, 2))


def test_a_model_in_training_mode_is_refused():
    with pytest.raises(ValueError, match="evaluation mode"):
        patch_positions(random_model().train(), random_prompts(4, 1), random_prompts(4, 2))


def test_nothing_is_printed(capfd):
    patch_positions(random_model(), random_prompts(3, 1), random_prompts(3, 2))
    assert capfd.readouterr() == ("", "")
