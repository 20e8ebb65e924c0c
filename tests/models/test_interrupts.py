"""Ctrl-C at any place of an analysis leaves no hook that counts; the user's own hooks stay."""

import signal
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mechinterp import load, sample_prompts
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import draw_prompts
from mechinterp.models.hooked.contexts import hooks_on
from mechinterp.models.hooked.runner import masked
from mechinterp.models.run.predictor import predictor_of
from tests.deep_models import random_gpt2

NAME = "d4s1-linear-h1x5-l4-noise0.1-s0"


def interrupted(work: Callable[[], object], at: int) -> bool:
    """True if the work was interrupted, before its line number `at` (counted in all files that it runs through)."""
    lines = 0

    def count(frame: object, event: str, argument: object) -> Callable:
        nonlocal lines
        lines += event == "line"
        if lines == at and event == "line":
            lines += 1
            signal.raise_signal(signal.SIGINT)
        return count

    # Other tests of the process may have set a handler, and an interrupt inside of torch.no_grad leaves gradients off.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    with_gradients = torch.is_grad_enabled()
    try:
        sys.settrace(count)
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGINT, handler)
        torch.set_grad_enabled(with_gradients)
    return False


@pytest.mark.slow
def test_an_interrupt_at_any_line_of_a_masked_run_changes_no_later_number():
    model = load(NAME).model
    prompts = sample_prompts(load(NAME), 8, seed=0)
    expected = predictor_of(model).predict(prompts)

    def work() -> None:
        with torch.no_grad(), masked(model, [(0, 0), (3, 0)]):
            model.predict(prompts)

    work()
    after, at = [], 1
    while interrupted(work, at):
        after.append(predictor_of(model).predict(prompts))
        with torch.no_grad():
            after.append(model.predict(prompts))
        at += 23
    assert at > 500
    wrong = [n for n, each in enumerate(after) if not torch.allclose(each, expected, rtol=1e-4)]
    assert wrong == []
    assert not predictor_of(model).is_hooked


def test_a_hook_on_a_bridge_whose_block_has_ended_does_nothing_and_is_taken_off():
    hooked = random_gpt2()
    prompts = draw_prompts(TaskConfig(d_x=4, context_length=3), 2)
    hooks = [("blocks.0.attn.hook_z", lambda z, hook: 0 * z)]
    with torch.no_grad():
        expected = hooked.predict(prompts)
        block = hooks_on(hooked.model, hooks)
        block.__enter__()
        assert not torch.equal(hooked.predict(prompts), expected)
        (handle,) = hooked.model.hook_dict["blocks.0.attn.hook_z"].fwd_hooks
        handle.user_hook.args[0].open = False  # as after an interrupt in the middle of its end
        assert torch.equal(hooked.predict(prompts), expected)
        assert not hooked.is_hooked
        block.__exit__(None, None, None)
        assert not torch.equal(hooked.run(hooked.inputs(prompts), hooks)[:, -1], expected)
        assert torch.equal(hooked.predict(prompts), expected)


@pytest.mark.parametrize("permanent", [False, True])
def test_the_users_own_hooks_stay(permanent: bool):
    model = load(NAME).model
    prompts = sample_prompts(load(NAME), 8, seed=0)
    model.add_hook("blocks.0.attn.hook_z", lambda z, hook: 0 * z, is_permanent=permanent)
    expected = predictor_of(model).predict(prompts)
    assert interrupted(lambda: masked(model, [(3, 0)]).__enter__(), 200)
    predictor = predictor_of(model)
    assert predictor.is_hooked
    assert torch.equal(predictor.predict(prompts), expected)


def test_a_hook_whose_block_has_ended_does_nothing_and_is_taken_off():
    model = load(NAME).model
    prompts = sample_prompts(load(NAME), 8, seed=0)
    expected = model.predict(prompts)

    def zero(z: Tensor, hook: object) -> Tensor:
        return 0 * z

    block = model.hooks(fwd_hooks=[("blocks.0.attn.hook_z", zero)])
    block.__enter__()
    (handle,) = model.hook_dict["blocks.0.attn.hook_z"].fwd_hooks
    assert not torch.equal(model.predict(prompts), expected)
    handle.user_hook.args[0].open = False  # as after an interrupt in the middle of its end
    assert torch.equal(model.predict(prompts), expected)
    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_z", zero)]):
        assert len(model.hook_dict["blocks.0.attn.hook_z"].fwd_hooks) == 1
    assert not predictor_of(model).is_hooked
    block.__exit__(None, None, None)


def test_hooks_that_shall_stay_stay():
    model = load(NAME).model
    prompts = sample_prompts(load(NAME), 8, seed=0)
    hooks = [("blocks.0.attn.hook_z", lambda z, hook: 0 * z)]
    expected = model.run_with_hooks(prompts, fwd_hooks=hooks)
    with model.hooks(fwd_hooks=hooks, reset_hooks_end=False):
        pass
    assert torch.equal(model(prompts), expected)
    model.reset_hooks()
    assert not torch.equal(model(prompts), expected)
