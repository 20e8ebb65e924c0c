"""Analyses give the same numbers whatever a notebook has set: gradients off, other defaults of torch, numpy's errors, threads."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
import torch

import mechinterp as mi
from mechinterp.analysis.registry import ANALYSES, run_analysis
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.icl.prompts import draw_prompts
from mechinterp.presets import preset
from mechinterp.training.general.trainer import initial_deep_weights
from mechinterp.training.one_layer.step import initial_weights
from tests.checkpoints.strange_modules import Grouped, Stack, random
from tests.conftest import CHECKPOINTS, sampled
from tests.deep_models import descent_checkpoint
from tests.test_doors import SHORTENED, as_for_users

KINDS = ("softmax-h2-s0", "linear-merged-s0", "descent", "plain module")
ONLY = {
    "attribute-edges": "descent",
    "compare-priors": "pool-linear-m16-s0",
    "jump-forecast": "linear-separate-s0",
    "linear-components": "linear-merged-s0",
}
"""Analyses that are run on one kind only."""
DEEP = {"name-algorithm", "circuit-faithfulness", "prune", "probe", "p-probe"}
"""Analyses of several layers."""
N_PROMPTS = {"response": 256}
"""Prompts of analyses that refuse 64."""


@contextmanager
def gradients_off() -> Iterator[None]:
    torch.set_grad_enabled(False)
    try:
        yield
    finally:
        torch.set_grad_enabled(True)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def notebook() -> Iterator[None]:
    """What the most hostile notebook sets at its top."""
    with (
        gradients_off(),
        default_dtype(torch.float64),
        torch.device("meta"),
        np.errstate(all="raise"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        yield


def in_a_thread(call: Callable[[], object], mode: Callable[[], AbstractContextManager]) -> object:
    """What a call gives in a mode, in another thread."""
    results: list[object] = []

    def work() -> None:
        with mode():
            try:
                results.append(call())
            except Exception as error:  # raised again below
                results.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


MODES = {
    "gradients off": gradients_off,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "meta": lambda: torch.device("meta"),
    "notebook": notebook,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], object]:
    descent = descent_checkpoint(tmp_path_factory.mktemp("hostile"))
    task = TaskConfig(d_x=3, context_length=6)
    plain = mi.hook_module(random(Stack(*(Grouped() for _ in range(2)))), task=task)
    own = {"descent": descent, "plain module": plain}
    return lambda kind: own.get(kind) or mi.load(CHECKPOINTS / kind)


@dataclass(frozen=True)
class Answer:
    """An analysis' rows, or its refusal."""

    frame: pd.DataFrame | None
    refusal: str = ""


def answer(name: str, model: object) -> Answer:
    n_prompts = N_PROMPTS.get(name, 64) if ANALYSES[name].draws_prompts else None
    try:
        result = run_analysis(name, model, n_prompts=n_prompts, settings=SHORTENED.get(name))
    except ValueError as error:
        return Answer(None, str(error))
    return Answer(result.to_frame())


PAIRS = [(n, kind) for n in ANALYSES for kind in ([ONLY[n]] if n in ONLY else KINDS)]
USUAL = ("notebook", "inference_mode")
"""Modes of `make test`: the first is gradients off, float64, meta and numpy's errors at once."""


def answering(name: str) -> str:
    """A kind for which an analysis has an answer."""
    return ONLY.get(name, "descent" if name in DEEP else "softmax-h2-s0")


def kept(case: tuple[str, str, tuple[str, ...]]) -> bool:
    name, kind, modes = case
    return modes == USUAL and kind == answering(name)


CASES = [
    (*pair, modes)
    for pair in PAIRS
    for modes in (USUAL, tuple(mode for mode in MODES if mode not in USUAL))
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "modes"), sampled(CASES, keep=kept))
def test_an_analysis_is_the_same_in_every_mode(
    name: str, kind: str, modes: tuple[str, ...], source
):
    with as_for_users():
        expected = answer(name, source(kind))
        assert kind != answering(name) or expected.frame is not None, expected.refusal
        for mode in modes:
            got = in_a_thread(lambda: answer(name, source(kind)), MODES[mode])
            assert got.refusal == expected.refusal, mode
            if expected.frame is not None:
                pd.testing.assert_frame_equal(
                    got.frame, expected.frame, rtol=1e-5, atol=1e-8, obj=mode
                )


DRAWS: dict[str, Callable[[], object]] = {
    "prompts": lambda: draw_prompts(TaskConfig(d_x=8, sparsity=2), 16, seed=3).y,
    "pool": lambda: TaskConfig(d_x=8, sparsity=2, n_tasks=4).pool(),
    "initial weights": lambda: initial_weights(preset("softmax-h2")).W_Q,
    "initial stack": lambda: initial_deep_weights(preset("sparse-h4")).W_Q,
    "initial GPT-2": lambda: initial_deep_weights(
        ExperimentConfig(
            task=TaskConfig(d_x=2, context_length=4),
            model=ModelConfig(
                n_heads=2, d_model=8, d_head=4, d_mlp=8, norm="before", biases=True, n_positions=9
            ),
        )
    ).tensors["pos_embed.W_pos"],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("draw", DRAWS)
def test_what_is_drawn_does_not_depend_on_torchs_defaults(draw, mode):
    got, expected = in_a_thread(DRAWS[draw], MODES[mode]), DRAWS[draw]()
    assert (got.dtype, got.device) == (expected.dtype, expected.device)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("mode", USUAL)
def test_training_gives_the_same_weights(mode, tmp_path):
    config = mi.override(preset("softmax-h2"), "train.steps=4", "train.n_eval_prompts=16")
    with as_for_users():
        expected = mi.train(config, out=tmp_path / "usual").weights
        got = in_a_thread(lambda: mi.train(config, out=tmp_path / "other").weights, MODES[mode])
    for name, tensor in expected.tensors.items():
        assert torch.equal(got.tensors[name], tensor), name
