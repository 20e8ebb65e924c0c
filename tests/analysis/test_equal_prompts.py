"""Equal prompts are one prompt: errors, labels and means are those of the distinct ones."""

import warnings

import numpy as np
import pandas as pd
import pytest
import torch

from mechinterp import attention_patterns, classify, load, sample_prompts
from mechinterp.analysis.patching.pairing import clean_and_corrupted
from mechinterp.analysis.registry import ANALYSES
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import evaluation_prompts, prompts_and_law
from mechinterp.models.run.predictor import predictor_of
from tests.conftest import refused

MODEL = load("softmax-h2-s0")
ONCE = sample_prompts(MODEL, 16, seed=0)
REPEATED = ONCE[torch.arange(256) % 16]


def test_distinct_rows_have_other_pairs_another_order_of_pairs_or_another_query():
    turned = Prompts(**vars(ONCE) | {"x": ONCE.x.flip(1), "y": ONCE.y.flip(1)})
    queried = Prompts(**vars(ONCE) | {"x_query": ONCE.x_query.flip(0)})
    together = {
        name: torch.cat([getattr(each, name) for each in (ONCE, turned, queried, ONCE)])
        for name, value in vars(ONCE).items()
        if value is not None
    }
    assert len(Prompts(**together).distinct()) == 48


DEEP = pytest.param("d4s1-linear-h4x5-l4-noise0.1-s0", marks=pytest.mark.slow)
MODELS = ["softmax-h2-s0", DEEP]
TAKE_PROMPTS = [name for name, each in ANALYSES.items() if each.takes_prompts_as]


def answer(name: str, model: object, prompts: Prompts) -> list[pd.DataFrame]:
    """Tables of an analysis of given prompts; warnings are counted by the tests."""
    analysis = ANALYSES[name]
    result = analysis.function(model, **{analysis.takes_prompts_as: prompts})
    return [result.to_frame()]


@pytest.mark.parametrize("name", sorted(set(TAKE_PROMPTS) - {"attention-patterns"}))
@pytest.mark.parametrize("model", MODELS)
def test_every_analysis_counts_equal_prompts_once(name: str, model: str):
    source = load(model)
    if not ANALYSES[name].needs(source) or (name == "error-curve" and source.weights.n_layers > 1):
        pytest.skip("it does not accept this model, or the model overflows after one pair")
    n = {"probe": 128, "prune": 256, "response": 512}.get(name, 64)
    once = sample_prompts(source, n, seed=0)
    expected = answer(name, source, once)
    with pytest.warns(UserWarning, match=f"{n} distinct prompts of {2 * n}"):
        found = answer(name, source, once[torch.arange(2 * n) % n])
    for table, other in zip(expected, found, strict=True):
        pd.testing.assert_frame_equal(table, other)


@pytest.mark.parametrize("name", TAKE_PROMPTS)
@pytest.mark.parametrize("model", MODELS)
def test_errors_and_labels_of_fewer_than_8_distinct_prompts_are_refused(name: str, model: str):
    source = load(model)
    if not ANALYSES[name].needs(source):
        pytest.skip("it does not accept this model")
    once = sample_prompts(source, 7, seed=0)
    for prompts in (once, once[torch.arange(64) % 7]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if name == "attention-patterns":
                assert len(answer(name, source, prompts)[0])
                continue
            with refused("distinct", "got 7" if name != "prune" else "7"):
                answer(name, source, prompts)


def test_predictions_and_patterns_of_one_prompt_stay():
    one = ONCE[:1]
    assert predictor_of(MODEL).predict(one).shape == (1, 1)
    patterns = attention_patterns(MODEL, one)
    assert patterns.pattern.shape == (1, 2, 40)
    assert np.isnan(patterns.entropy_sem).all()
    repeated = attention_patterns(MODEL, one[torch.zeros(64, dtype=int)])
    assert repeated.n_prompts == 64
    assert np.isnan(repeated.entropy_sem).all()


@pytest.mark.parametrize("n", [2, 7, 8])
def test_entropies_have_an_error_from_8_distinct_prompts_on(n: int):
    once = attention_patterns(MODEL, ONCE[:n])
    repeated = attention_patterns(MODEL, ONCE[torch.arange(64) % n])
    np.testing.assert_allclose(repeated.entropy, once.entropy, rtol=1e-6)
    np.testing.assert_allclose(repeated.entropy_sem, once.entropy_sem, rtol=1e-5)
    assert np.isfinite(once.entropy_sem).all() == (n == 8)


def test_copies_of_one_prompt_get_no_label():
    copies = ONCE[torch.zeros(64, dtype=int)]
    with pytest.warns(UserWarning, match="1 distinct"), refused("8", "got 1"):
        classify(MODEL, prompts=copies)


def test_distinct_prompts_are_returned_as_they_are():
    assert prompts_and_law(MODEL, ONCE, analysis="probe")[0] is ONCE
    assert evaluation_prompts(MODEL, ONCE) is ONCE


def test_pairs_of_clean_and_corrupted_prompts_count_once():
    clean, corrupted = ONCE, sample_prompts(MODEL, 16, seed=1)
    found = clean_and_corrupted(MODEL, clean, corrupted, n_prompts=1, seed=0)
    assert found[0] is clean
    assert found[1] is corrupted
    with pytest.warns(UserWarning, match="16 distinct"):
        found = clean_and_corrupted(MODEL, REPEATED, REPEATED, n_prompts=1, seed=0)
    assert torch.equal(found[0].x, clean.x)
    one = clean[torch.zeros(16, dtype=int)]
    assert len(clean_and_corrupted(MODEL, one, corrupted, n_prompts=1, seed=0)[0]) == 16


def test_prompts_edited_in_place_give_new_numbers():
    prompts = sample_prompts(MODEL, 16, seed=0)
    before = predictor_of(MODEL).predict(prompts)
    prompts.y.mul_(2)
    after = predictor_of(MODEL).predict(prompts)
    assert not torch.equal(after, before)
    assert torch.equal(after, predictor_of(MODEL).predict(prompts[:]))
