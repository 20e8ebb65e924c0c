"""An edit in place of the weights or of the model shows in both, and in everything that is computed from either."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from mechinterp import hook_module, load, sample_prompts
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts
from mechinterp.models.constructions.one_layer import debiased_gradient_step
from mechinterp.models.constructions.stack import stack_of_layers
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.run.predictor import predictor_of
from mechinterp.models.run.ways import predictions_kept
from tests.conftest import assert_close_to_rounding, refused

TASK = TaskConfig(d_x=5, context_length=40)
NAMES = ("softmax-h2-s0", "d4s1-linear-h1x5-l4-noise0.1-s0", "pool-gpt2-m16")
"""One layer in closed form, linear attention as a map of tokens, and blocks with norms and MLPs."""


def predicted(checkpoint: Checkpoint, prompts: Prompts) -> Tensor:
    """Predictions, the same from the weights alone, the checkpoint, its model and the model's own forward pass."""
    with torch.no_grad():
        plain = checkpoint.model(checkpoint.model.tokens(prompts.to(checkpoint.weights.dtype)))[
            :, -1
        ]
    for source in (checkpoint, checkpoint.model, checkpoint.weights, copy.deepcopy(checkpoint)):
        torch.testing.assert_close(
            predictor_of(source).predict(prompts), plain, atol=1e-5, rtol=1e-4
        )
    return plain.double()


def zero_head(checkpoint: Checkpoint) -> None:
    checkpoint.model.blocks[0].attn.W_O[0].zero_()


def step_of_sgd(checkpoint: Checkpoint) -> None:
    model = checkpoint.model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with torch.enable_grad():
        model(sample_prompts(checkpoint.task, 8, seed=3), return_type="loss").backward()
    optimizer.step()


def assigned(checkpoint: Checkpoint) -> None:
    state = {name: 1.1 * tensor for name, tensor in checkpoint.model.state_dict().items()}
    checkpoint.model.load_state_dict(state, assign=True)


def replaced(checkpoint: Checkpoint) -> None:
    attn = checkpoint.model.blocks[0].attn
    attn.W_O = nn.Parameter(2 * attn.W_O.detach())


def doubled_and_edited(checkpoint: Checkpoint) -> None:
    checkpoint.model.double()
    checkpoint.weights.W_O.mul_(2)


def assigned_and_edited(checkpoint: Checkpoint) -> None:
    checkpoint.model.load_state_dict(checkpoint.model.state_dict(), assign=True)
    checkpoint.weights.W_O.mul_(2)


def by_numpy(checkpoint: Checkpoint) -> None:
    checkpoint.weights.W_O.numpy()[...] *= 2


def by_a_vector(checkpoint: Checkpoint) -> None:
    model = checkpoint.model
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(1.1 * vector, model.parameters())


EDITS: dict[str, Callable[[Checkpoint], object]] = {
    "a head of the model": zero_head,
    "the model's data": lambda c: c.model.blocks[0].attn.W_O.data.mul_(2),
    "the weights": lambda c: c.weights.W_O.zero_(),
    "one layer of the weights": lambda c: c.weights.by_name["blocks.0.attn.W_V"].mul_(2),
    "the weights by numpy": by_numpy,
    "an optimiser step": step_of_sgd,
    "load_state_dict": lambda c: c.model.load_state_dict(
        {name: 1.1 * tensor for name, tensor in c.model.state_dict().items()}
    ),
    "load_state_dict, assign": assigned,
    "another parameter": replaced,
    "a vector of all parameters": by_a_vector,
    "double, then the weights": doubled_and_edited,
    "assign, then the weights": assigned_and_edited,
    "double, then the model": lambda c: (c.model.double(), zero_head(c)),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_shows_in_model_weights_and_predictions(edit: str, name: str):
    checkpoint = load(name)
    prompts = sample_prompts(checkpoint.task, 16, seed=0)
    before = predicted(checkpoint, prompts)
    with torch.no_grad():
        EDITS[edit](checkpoint)
    after = predicted(checkpoint, prompts)
    assert (after - before).abs().max() > 1e-3 * before.abs().max()


def masked(source: object, prompts: Prompts) -> Tensor:
    return predictor_of(source).run(prompts, [[], [(0, 0)], [(0, 1)]])


def test_masks_of_the_checkpoint_are_those_of_the_edited_model():
    checkpoint = load("softmax-h2-s0")
    prompts = sample_prompts(checkpoint.task, 64, seed=0)
    masked(checkpoint, prompts)
    with torch.no_grad():
        zero_head(checkpoint)
    full, first, _ = masked(checkpoint, prompts)
    assert torch.equal(full, first)
    assert torch.equal(masked(checkpoint.model, prompts), masked(checkpoint, prompts))
    checkpoint.weights.W_O.zero_()
    assert not masked(checkpoint.model, prompts).any()
    assert not masked(checkpoint, prompts).any()


def test_equal_prompts_are_predicted_again_after_an_edit():
    checkpoint = load("softmax-h2-s0")
    prompts = sample_prompts(checkpoint.task, 8, seed=0)
    with predictions_kept():
        before = predictor_of(checkpoint).predict(prompts)
        checkpoint.weights.W_O.mul_(2)
        assert_close_to_rounding(predictor_of(checkpoint).predict(prompts), 2 * before)
        checkpoint.model.blocks[0].attn.W_O.data.mul_(2)
        with torch.no_grad():
            checkpoint.model.blocks[0].attn.W_O.mul_(2)
        assert_close_to_rounding(predictor_of(checkpoint).predict(prompts), 8 * before)


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda checkpoint: pickle.loads(pickle.dumps(checkpoint)),
        lambda checkpoint: checkpoint.to("cpu"),
        lambda checkpoint: replace(checkpoint, weights=checkpoint.weights.without([])),
        lambda checkpoint: replace(checkpoint, weights=checkpoint.weights.compact()),
        lambda checkpoint: replace(checkpoint, weights=checkpoint.weights.with_model()),
    ],
    ids=("deep copy", "pickle", "to", "without", "compact", "with_model"),
)
@pytest.mark.parametrize("when", ["before the model exists", "after"])
def test_a_copy_is_separate(copied: Callable[[Checkpoint], Checkpoint], when: str):
    checkpoint = load("softmax-h2-s0")
    prompts = sample_prompts(checkpoint.task, 8, seed=0)
    if when == "after":
        predicted(checkpoint, prompts)
    other = copied(checkpoint)
    before = predicted(other, prompts)
    for weights in (checkpoint.weights, checkpoint.model.weights):
        for tensor in weights.tensors.values():
            tensor.mul_(2)
    assert torch.equal(predicted(other, prompts), before)
    edited = predicted(checkpoint, prompts)
    with torch.no_grad():
        zero_head(other)
    assert torch.equal(predicted(checkpoint, prompts), edited)


def test_a_deep_copy_of_a_model_is_separate_and_follows_its_own_edits():
    model = load("softmax-h2-s0").model
    prompts = sample_prompts(TASK, 8, seed=0)
    other = copy.deepcopy(model)
    model.weights.W_O.zero_()
    before = predictor_of(other).predict(prompts)
    assert before.any()
    other.weights.W_O.mul_(2)
    assert_close_to_rounding(predictor_of(other).predict(prompts), 2 * before)
    assert_close_to_rounding(other.predict(prompts).detach(), 2 * before)


def test_snapshots_keep_their_numbers():
    run = load("softmax-h2-s0")
    early, prompts = run.at(1000), sample_prompts(run.task, 8, seed=0)
    before = predicted(early, prompts)
    early.weights.W_O.zero_()
    assert torch.equal(predicted(run.at(1000), prompts), before)


def test_from_weights_copies():
    weights = debiased_gradient_step(0.88, 0.02, d_x=5)
    model = ICLTransformer.from_weights(weights, task=TASK)
    model.weights.W_O.zero_()
    assert weights.W_O.any()


def cloned(model: ICLTransformer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


LEAVES: dict[str, Callable[[ICLTransformer], object]] = {
    "double": lambda model: model.double(),
    "assign": lambda model: model.load_state_dict(cloned(model), assign=True),
    "both": lambda model: model.double().load_state_dict(cloned(model), assign=True),
}


@pytest.mark.parametrize("leave", LEAVES)
def test_edits_of_weights_that_the_model_has_left_are_refused(leave: str):
    checkpoint = load("softmax-h2-s0")
    prompts = sample_prompts(checkpoint.task, 8, seed=0)
    predicted(checkpoint, prompts)
    old = checkpoint.weights
    LEAVES[leave](checkpoint.model)
    predicted(checkpoint, prompts)
    old.W_O[0].zero_()
    for read in (lambda: checkpoint.weights, lambda: predictor_of(checkpoint).predict(prompts)):
        with refused("weights", "edited"):
            read()
    del old
    predicted(checkpoint, prompts)


def test_tied_parameters_are_followed_and_edits_of_their_copies_refused():
    model = load("d8s2-softmax-h8x9-l3-noise0.1-s0").model
    prompts = sample_prompts(TaskConfig(d_x=8, context_length=20), 8, seed=0)
    model.blocks[1].attn.W_Q = model.blocks[0].attn.W_Q
    with torch.no_grad():
        model.blocks[0].attn.W_Q.mul_(2)
        plain = model(model.tokens(prompts))[:, -1]
    torch.testing.assert_close(predictor_of(model).predict(prompts), plain, atol=1e-5, rtol=1e-4)
    copied = model.weights
    copied.W_Q.zero_()
    with refused("weights", "edited"):
        predictor_of(model).predict(prompts)


def test_what_cannot_follow_an_edit_is_refused():
    read_out = load("softmax-h2-s0").model
    read_out.unembed.W_U.mul_(2)
    computed = load("softmax-h2-s0").model
    nn.utils.parametrize.register_parametrization(computed.blocks[0].attn, "W_O", nn.Identity())
    mixed = load("pool-gpt2-m16").model
    mixed.blocks[0].double()
    for model, word in ((read_out, "W_U"), (computed, "W_O"), (mixed, "float64")):
        with refused(word):
            model.weights  # noqa: B018


@pytest.mark.parametrize("layers", [1, 2])
def test_weights_whose_tensors_share_memory_become_parameters_of_their_own(layers: int):
    one = torch.rand(layers, 1, 6, 6)
    weights = stack_of_layers(one, one, one, one.mT, d_y=1, scale=1.0)
    predictor = predictor_of(weights)
    model = predictor.model
    with torch.no_grad():
        model.blocks[0].attn.W_Q.zero_()
    assert model.blocks[0].attn.W_K.all()
    assert predictor.weights.W_K.all()
    assert not predictor.weights.W_Q[0].any()
    one.zero_()
    with refused("weights", "edited"):
        predictor.weights  # noqa: B018


def test_hooks_on_any_module_count():
    checkpoint = load("softmax-h2-s0")
    prompts = sample_prompts(checkpoint.task, 8, seed=0)
    assert predictor_of(checkpoint).predict(prompts).any()
    handle = checkpoint.model.blocks[0].attn.register_forward_hook(lambda *given: 0 * given[2])
    assert not predictor_of(checkpoint).predict(prompts).any()
    handle.remove()
    assert predictor_of(checkpoint).predict(prompts).any()


def test_edits_in_inference_mode_are_followed():
    checkpoint = load("softmax-h2-s0")
    prompts = sample_prompts(checkpoint.task, 8, seed=0)
    before = predicted(checkpoint, prompts)
    with torch.inference_mode():
        checkpoint.model.double()
        checkpoint.model.load_state_dict(cloned(checkpoint.model), assign=True)
        checkpoint.weights.W_O.mul_(2)
    assert_close_to_rounding(predicted(checkpoint, prompts).float(), 2 * before.float())


def test_training_moves_the_weights_with_the_parameters():
    checkpoint = load("softmax-h2-s0")
    old = checkpoint.weights.W_O.clone()
    parameter, weights = checkpoint.model.blocks[0].attn.W_O, checkpoint.weights
    step_of_sgd(checkpoint)
    assert checkpoint.model.blocks[0].attn.W_O is parameter
    assert checkpoint.weights is weights
    assert torch.equal(weights.W_O[0], parameter)
    assert not torch.equal(weights.W_O, old)


def test_weights_loaded_into_a_hooked_copy_are_refused_and_edits_of_its_projection_count():
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    module = nn.Sequential(nn.Linear(6, 8), layer, nn.Linear(8, 1)).eval()
    hooked = hook_module(module, task=TASK)
    prompts = sample_prompts(TASK, 4, seed=0)
    with torch.no_grad():
        module[1].self_attn.out_proj.weight.mul_(2)
        again = hook_module(module, task=TASK).predict(prompts)
        hooked.model.blocks[0].attn.projection.weight.mul_(2)
        torch.testing.assert_close(hooked.predict(prompts), again)
        hooked.model.module.load_state_dict(module.state_dict())
        with refused("out_proj", "hook_module"):
            hooked.predict(prompts)


def test_weights_that_are_computed_from_other_parameters_are_refused_until_they_are_plain():
    attention = (checkpoint := load("softmax-h2-s0")).model.blocks[0].attn
    old = checkpoint.weights.W_V.clone()
    prune.l1_unstructured(attention, "W_V", amount=0.5)
    with refused("W_V", "prune.remove"):
        checkpoint.weights  # noqa: B018
    with refused("W_V", "prune.remove"):
        predictor_of(checkpoint).predict(sample_prompts(checkpoint, 8))
    prune.remove(attention, "W_V")
    assert torch.equal(checkpoint.weights.W_V[0], attention.W_V)
    assert not torch.equal(checkpoint.weights.W_V, old)
    parametrize.register_parametrization(attention, "W_Q", nn.ReLU())
    with refused("W_Q", "remove_parametrizations"):
        checkpoint.weights  # noqa: B018
