"""Further ways to an old number: optimiser steps, replaced parts, threads, copied folders, prompts edited in place.

Each returns True if the answer is that of the weights, the folder or the prompts at hand.
"""

import copy
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mechinterp import TaskConfig, hook_module, load, sample_prompts
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.predictor import predictor_of
from tests.conftest import refused

DEEP, ONE = "d8s2-softmax-h8x9-l3-noise0.1-s0", "softmax-h2-s0"


def built(name: str = DEEP) -> tuple[Checkpoint, Prompts]:
    """A checkpoint whose model exists, and prompts that it has predicted."""
    checkpoint = load(name)
    prompts = sample_prompts(checkpoint, 16)
    predictor_of(checkpoint).predict(prompts)
    assert agrees(checkpoint, prompts)
    return checkpoint, prompts


def agrees(checkpoint: Checkpoint, prompts: Prompts) -> bool:
    """True if the weights alone predict what the model's own forward pass does."""
    with torch.no_grad():
        tokens = checkpoint.model.tokens(prompts.to(checkpoint.weights.dtype))
        return same(predictor_of(checkpoint).predict(prompts), checkpoint.model(tokens)[:, -1])


def same(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=1e-4, atol=1e-5)


def five_steps() -> bool:
    checkpoint, prompts = built()
    optimizer = torch.optim.AdamW(checkpoint.model.parameters(), lr=0.01)
    after = []
    for _ in range(5):
        optimizer.zero_grad()
        checkpoint.model(prompts, return_type="loss").backward()
        optimizer.step()
        after.append(agrees(checkpoint, prompts))
    return all(after)


def steps_by_hand() -> bool:
    checkpoint, prompts = built()
    for parameter in checkpoint.model.parameters():
        parameter.data.add_(0.01)
    return agrees(checkpoint, prompts)


def another_seed(*, assign: bool) -> bool:
    checkpoint, prompts = built(ONE)
    other = load("softmax-h2-s1")
    checkpoint.model.load_state_dict(other.model.state_dict(), assign=assign)
    return same(predictor_of(checkpoint).predict(prompts), predictor_of(other).predict(prompts))


def half_and_back() -> bool:
    checkpoint, prompts = built()
    checkpoint.model.half().float()
    checkpoint.weights.W_O.mul_(2)
    return agrees(checkpoint, prompts)


def another_block() -> bool:
    checkpoint, prompts = built()
    checkpoint.model.blocks[1] = copy.deepcopy(checkpoint.model.blocks[0])
    return agrees(checkpoint, prompts)


def another_scale() -> bool:
    checkpoint, prompts = built()
    checkpoint.model.cfg.scale = 0.1
    return agrees(checkpoint, prompts)


def swapped_tensors() -> bool:
    checkpoint, prompts = built()
    own = checkpoint.model.blocks[0].attn.W_O
    torch.utils.swap_tensors(own, nn.Parameter(2 * own.detach()))
    return agrees(checkpoint, prompts)


def learned_read_out() -> bool:
    checkpoint, prompts = built("pool-gpt2-m16")
    checkpoint.weights.tensors["unembed.W_U"].mul_(2)
    with torch.no_grad():
        checkpoint.model.pos_embed["W_pos"].mul_(0.5)
    return agrees(checkpoint, prompts)


def inference_mode() -> bool:
    checkpoint, prompts = built()
    with torch.inference_mode():
        checkpoint.weights.W_O.mul_(2)
        found = predictor_of(checkpoint).predict(prompts)
    return same(found, predictor_of(checkpoint).predict(prompts)) and agrees(checkpoint, prompts)


def pickled_between_edits() -> bool:
    checkpoint, prompts = built()
    checkpoint.weights.W_O.mul_(3)
    other = pickle.loads(pickle.dumps(checkpoint))
    checkpoint.weights.W_O.zero_()
    return agrees(other, prompts) and bool(other.weights.W_O.any())


def another_length() -> bool:
    checkpoint, prompts = built(ONE)
    checkpoint.weights.W_O.mul_(2)
    longer = predictor_of(checkpoint.at_length(20)).predict(prompts)
    return same(longer, predictor_of(checkpoint).predict(prompts))


def edited_snapshot() -> bool:
    run = load(ONE)
    prompts = sample_prompts(run, 16)
    before = predictor_of(run.at(1000)).predict(prompts)
    run.at(1000).model.weights.W_O.zero_()
    return same(predictor_of(run.at(1000)).predict(prompts), before)


def a_thread_that_edits() -> bool:
    checkpoint, prompts = built()
    stop = threading.Event()

    def edit() -> None:
        while not stop.is_set():
            with torch.no_grad():
                checkpoint.model.blocks[0].attn.W_O.neg_()  # any number of edits leaves its size

    thread = threading.Thread(target=edit)
    thread.start()
    for _ in range(20):
        predictor_of(checkpoint).predict(prompts)
    stop.set()
    thread.join()
    checkpoint.weights.W_O.mul_(2)
    return agrees(checkpoint, prompts)


def threads_that_read() -> bool:
    checkpoint, prompts = built()
    checkpoint.model.double()
    threads = [threading.Thread(target=lambda: checkpoint.weights) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    checkpoint.weights.W_O.zero_()
    return agrees(checkpoint, prompts) and not checkpoint.model.blocks[0].attn.W_O.any()


def edited_prompts() -> bool:
    checkpoint, prompts = built()
    prompts.x.mul_(2)
    return agrees(checkpoint, prompts)


def another_order_of_pairs() -> bool:
    _, prompts = built(ONE)
    turned = Prompts(**vars(prompts) | {"x": prompts.x.flip(1), "y": prompts.y.flip(1)})
    pairs = {n: (v, getattr(turned, n)) for n, v in vars(prompts).items() if v is not None}
    both = Prompts(**{n: torch.cat(pair) for n, pair in pairs.items()})
    return len(both.distinct()) == 32


def edited_module() -> bool:
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    module = nn.Sequential(nn.Linear(6, 8), layer, nn.Linear(8, 1))
    hooked = hook_module(module, task=TaskConfig(d_x=5))
    prompts = sample_prompts(hooked, 16)
    before = predictor_of(hooked).predict(prompts)
    with torch.no_grad():
        for parameter in hooked.model.module[2].parameters():
            parameter.mul_(2)
    return same(predictor_of(hooked).predict(prompts), 2 * before)


WAYS: dict[str, Callable[[], bool]] = {
    each.__name__: each
    for each in (
        *(five_steps, steps_by_hand, half_and_back, another_block, another_scale),
        *(swapped_tensors, learned_read_out, inference_mode, pickled_between_edits),
        *(another_length, edited_snapshot, a_thread_that_edits, threads_that_read),
        *(edited_prompts, another_order_of_pairs, edited_module),
    )
}


@pytest.mark.parametrize("way", WAYS)
def test_no_old_number_comes_back(way: str):
    assert WAYS[way]()


@pytest.mark.parametrize("assign", [False, True])
def test_weights_of_another_seed_give_its_numbers(assign: bool):
    assert another_seed(assign=assign)


def test_a_folder_after_an_edit_has_the_edited_model_and_no_part_of_another(tmp_path: Path):
    checkpoint, prompts = built(ONE)
    with torch.no_grad():
        checkpoint.model.blocks[0].attn.W_V.mul_(2)
    checkpoint.save_pretrained(tmp_path / "edited", card="")
    again = load(tmp_path / "edited")
    assert same(predictor_of(again).predict(prompts), predictor_of(checkpoint).predict(prompts))
    load("softmax-h2-s1").save_pretrained(tmp_path / "other", card="")
    shutil.copy(tmp_path / "other" / "snapshots.safetensors", tmp_path / "edited")
    with refused("snapshots.safetensors"):
        load(tmp_path / "edited").at(1000)
    os.remove(tmp_path / "edited" / "history.parquet")
    with refused("history.parquet"):
        load(tmp_path / "edited").history  # noqa: B018
