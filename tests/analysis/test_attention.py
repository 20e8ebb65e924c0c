"""Attention on prompts is that of the hooked model, and of a kernel head a function of likeness alone."""

import numpy as np
import pytest
import torch

from mechinterp.analysis.one_layer.attention import attention_patterns
from mechinterp.checkpoints.checkpoint import load
from mechinterp.icl.prompts import Prompts
from mechinterp.models.constructions.one_layer import kernel_head
from tests.conftest import CHECKPOINTS


@pytest.mark.parametrize("name", ["softmax-h2-s0", "tanh-h2-s0", "linear-separate-s0"])
def test_weights_are_those_of_the_hooked_model(name: str, generator: torch.Generator):
    from mechinterp.icl.prompts import sample_prompts

    checkpoint = load(CHECKPOINTS / name)
    prompts = sample_prompts(checkpoint.config.task, 4, generator=generator)
    found = attention_patterns(checkpoint, prompts)
    _, cache = checkpoint.model.run_with_cache(prompts.tokens)
    expected = cache["pattern", 0][:, :, -1, :-1].numpy(force=True)
    np.testing.assert_allclose(found.pattern, expected, rtol=1e-3, atol=1e-5)
    predicted = checkpoint.model.predict(prompts).numpy(force=True)
    np.testing.assert_allclose(found.prediction, predicted, rtol=1e-3, atol=1e-4)


def test_a_kernel_head_weighs_by_likeness_alone(prompts: Prompts):
    found = attention_patterns(kernel_head(0.5, 1.5, d_x=5), prompts[:3])
    weights = np.exp(0.5 * found.similarity)
    np.testing.assert_allclose(found.pattern[:, 0], weights / weights.sum(1, keepdims=True))
    np.testing.assert_array_equal(found.target, prompts.y_query_clean[:3].numpy())
    frame = found.to_frame()
    assert len(frame) == 3 * 1 * 40
    assert frame["attention"].groupby(frame["prompt"]).sum().tolist() == pytest.approx([1, 1, 1])


def test_figures_move_from_prompt_to_prompt(prompts: Prompts):
    found = attention_patterns(kernel_head(0.5, 1.5, d_x=5), prompts[:3])
    for figure in (found.plot(), found.plot_similarity()):
        assert [frame.name for frame in figure.frames] == ["0", "1", "2"]
        assert [step.label for step in figure.layout.sliders[0].steps] == ["0", "1", "2"]
        assert figure.layout.sliders[0].active == found.typical
    # A kernel head looks at a token the more, the more alike it is: sorted by likeness, weights rise.
    drawn = np.asarray(found.plot().frames[1].data[0].z)
    np.testing.assert_allclose(drawn, np.sort(found.pattern[1], axis=1), atol=1e-7)
    np.testing.assert_array_equal(found.plot_similarity().frames[1].data[0].x, found.similarity[1])


def test_of_many_prompts_those_at_even_quantiles_of_the_error_are_kept(prompts: Prompts):
    weights = kernel_head(0.5, 1.5, d_x=5)
    every = attention_patterns(weights, prompts, shown=len(prompts))
    error = np.square(every.prediction - every.target).mean(1)
    found = attention_patterns(weights, prompts, shown=3)
    order = error.argsort(kind="stable")
    places = [0, round((len(prompts) - 1) / 2), len(prompts) - 1]
    np.testing.assert_array_equal(found.pattern, every.pattern[order[places]])
    assert (found.typical, found.n_prompts) == (1, len(prompts))
    assert "Rank correlation with the weight: head 0 1.00" in found.sentences()[1]
    with pytest.raises(ValueError, match=r"shown must be >= 1, got 0"):
        attention_patterns(weights, prompts, shown=0)


def test_chosen_prompts_come_in_the_order_asked_for(prompts: Prompts):
    few = prompts[torch.tensor([7, 2])]
    assert torch.equal(few.x, prompts.x[[7, 2]])
    assert torch.equal(few.y_query_clean, prompts.y_query_clean[[7, 2]])
