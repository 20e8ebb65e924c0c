"""Learning coefficient: a gradient of the chains, and weights that are no minimum, against hooks in float64."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mechinterp.analysis.training.local_losses import loss_on
from mechinterp.analysis.training.minimum import FALL, fall_nearby, lowest_nearby
from mechinterp.analysis.training.module_losses import predictor_loss
from mechinterp.analysis.training.sampler import NBETA, BatchLoss, Tempered
from mechinterp.checkpoints.load import load
from mechinterp.icl.prompts import draw_prompts

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
N_PROMPTS, N_CHAINS, ROUNDS = 256, 4, 3


@pytest.mark.parametrize(
    ("name", "what", "pattern"),
    [
        ("d8s2-softmax-h8x9-l3-noise0.1-s0", "3 layers of 8 softmax heads", None),
        ("garg-tiny-s0", "garg-tiny, 3 layers with MLPs", None),
        ("garg-tiny-s0", "a head of garg-tiny's last layer", "blocks.2.attn.W_*[0]"),
        ("sparse-h4-noise0.1-s0", "a head of sparse-h4's last layer", "blocks.3.attn.W_*[0]"),
        ("softmax-h2-s0", "1 layer of 2 softmax heads", "blocks.0.attn.W_*"),
    ],
)
def test_a_gradient_of_the_chains(versus, name: str, what: str, pattern: str | None):
    checkpoint = load(CHECKPOINTS / name)
    prompts = draw_prompts(checkpoint.task, N_PROMPTS, seed=0)
    ours = loss_on(prompts, checkpoint, pattern)
    plain = predictor_loss(checkpoint, prompts, weights=pattern or "*")
    assert ours.in_float32 is not None
    at_points(ours.in_float32, ours.at)()
    found, expected = ours.in_float32(ours.at[None])[0], plain.function(plain.at[None])[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    versus(
        f"gradient of {N_CHAINS} chains, {what}, {N_PROMPTS} prompts (plain: hooks, float64)",
        at_points(ours.in_float32, ours.at),
        at_points(plain.function, plain.at),
        rounds=ROUNDS,
    )


def at_points(function: BatchLoss, at: np.ndarray) -> Callable[[], object]:
    points = np.repeat(at[None], N_CHAINS, axis=0)
    return lambda: function(points)


def test_weights_that_are_no_minimum(versus):
    """Plain: 200 steps of descent."""
    checkpoint = load(CHECKPOINTS / "sparse-h4-noise0.1-s0")
    loss = loss_on(draw_prompts(checkpoint.task, N_PROMPTS, seed=0), checkpoint)
    law = Tempered(loss, NBETA, 1.0)
    assert fall_nearby(law)[0] > FALL
    versus(
        f"sparse-h4 is no minimum of {N_PROMPTS} prompts (plain: all 200 steps of descent, float64)",
        lambda: fall_nearby(law),
        lambda: lowest_nearby(law),
        rounds=1,
    )
