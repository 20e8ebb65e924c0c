"""The adapter: a regression GPT-2 in a Bridge predicts as its parts do, and masks as zeroed weights do.

And what is said of an adapter that does not fit its model, or of prompts that do not.
"""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from mechinterp.analysis.ablation.measured import masked_errors
from mechinterp.analysis.ablation.pruning import prune
from mechinterp.analysis.probing.p_probe import p_probe
from mechinterp.analysis.probing.probe import probe
from mechinterp.config import ModelConfig, TaskConfig
from mechinterp.icl.prompts import draw_prompts
from mechinterp.models.hooked.masks import z_name
from mechinterp.models.hooked.runner import HookedPredictor, hooked_predictor
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.layers import interleaved
from mechinterp.models.run.predictor import predictor_of
from tests.conftest import refused
from tests.deep_models import WIDE, gpt2_predictor, random_model, small_gpt2


@pytest.fixture
def prompts():
    return draw_prompts(TaskConfig(d_x=4, context_length=9), 16)


@pytest.fixture
def parts():
    torch.manual_seed(0)
    return small_gpt2().eval(), nn.Linear(4, 8), nn.Linear(8, 1)


def plain(parts, prompts):
    """Garg's forward pass, without any hook."""
    backbone, read_in, read_out = parts
    with torch.no_grad():
        stream = backbone(inputs_embeds=read_in(interleaved(prompts))).last_hidden_state
        return read_out(stream)[:, ::2][:, -1]


def test_a_bridge_predicts_as_its_parts(parts, prompts):
    expected = plain(copy.deepcopy(parts), prompts)
    predictor = gpt2_predictor(*parts)
    with torch.no_grad():
        prediction = predictor.predict(prompts)
    torch.testing.assert_close(prediction, expected, rtol=1e-5, atol=1e-6)
    assert (predictor.n_layers, predictor.n_heads) == (2, 2)
    assert hooked_predictor(predictor) is predictor


def test_a_bridge_masks_as_zeroed_weights(parts, prompts):
    without = copy.deepcopy(parts)
    with torch.no_grad():
        without[0].h[1].attn.c_proj.weight[4:] = 0  # the rows of head 1
    predictor = gpt2_predictor(*parts)

    def mask(z, hook):
        return torch.cat([z[:, :, :1], 0 * z[:, :, 1:]], dim=2)

    with torch.no_grad(), predictor.model.hooks(fwd_hooks=[(z_name(1), mask)]):
        masked_out = predictor.predict(prompts)
    torch.testing.assert_close(masked_out, plain(without, prompts), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert not torch.allclose(masked_out, predictor.predict(prompts), atol=1e-3)


def encoder(dropout: float = 0.0) -> HookedPredictor:
    """Two layers of one head as torch's are, for d_x = 4; beside them a dropout."""
    layers = {"norm": "after", "d_mlp": 8, "context_only": True, "attend_to_self": True}
    model = random_model(2, 1, **layers).float().train()
    model.add_module("dropout", nn.Dropout(dropout))
    return hooked_predictor(model)


def run(source, prompts, masks):
    return predictor_of(source).run(prompts, masks)


MISFITS = {
    "read": (lambda p: replace(p, read=lambda out: out), ("read", "[16, 1]", "[16, 19, 1]")),
    "flat read": (lambda p: replace(p, read=lambda out: out[:, -1, 0]), ("read", "[16]")),
    "n_heads": (lambda p: replace(p, n_heads=3), ("n_heads", "hook_z", "[16, 19, 2, 4]")),
}


@pytest.mark.parametrize(("change", "words"), MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_the_model_is_refused(change, words, parts, prompts):
    with refused(*words):
        masked_errors(change(gpt2_predictor(*parts)), prompts, [[], [(0, 1)]])


def of_whole() -> HookedPredictor:
    predictor = encoder()
    predictor.model.__class__ = Whole
    return replace(predictor, n_heads=1)


READ = {"embed": lambda prompts: prompts.tokens, "read": lambda output: output[:, -1]}
NO_ADAPTERS = {
    "layers": (lambda: replace(encoder(), n_layers=1), ("n_layers", 1)),
    "stream": (
        lambda: replace(without(encoder(), "hook_resid_pre"), n_heads=1),
        ("blocks.1.hook_resid_pre",),
    ),
    "no hooks": (lambda: HookedPredictor(nn.Linear(5, 1), 1, 1, **READ), ("hooks", "Linear")),
    "no start": (of_whole, ("start_at_layer", "Whole")),
}


@pytest.mark.parametrize(("make", "words"), NO_ADAPTERS.values(), ids=NO_ADAPTERS)
def test_what_is_no_adapter_is_refused(make, words):
    with refused(*words):
        make()


@pytest.mark.parametrize("rate", ["resid_pdrop", "attn_pdrop", "embd_pdrop"])
def test_a_bridge_that_drops_at_random_is_refused(rate, prompts):
    backbone = small_gpt2(**{rate: 0.1})
    read_in = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5))
    predictor = gpt2_predictor(backbone, read_in, nn.Linear(8, 1))
    expected = predictor.predict(prompts)
    predictor.model.train()
    uses = (
        lambda: predictor.predict(prompts),
        lambda: run(predictor, prompts, [[], [(0, 1)]]),
        lambda: predictor_of(predictor).streams(prompts),
        lambda: p_probe({"m": predictor}, prompts),
    )
    for use in uses:
        with refused("evaluation mode", ".eval()", "got a Transformer"):
            use()
    predictor.model.eval()
    assert torch.equal(predictor.predict(prompts), expected)


def test_training_mode_without_dropout_is_fine(prompts):
    plain = hooked_predictor(ICLTransformer(ModelConfig(n_heads=2), d_x=4, d_y=1))
    for predictor in (encoder(), plain):
        predictor.model.train()
        first, second = (run(predictor, prompts, [[], [(0, 0)]]) for _ in "ab")
        assert torch.equal(first, second)
    attention = encoder()
    attention.model.add_module("attn", nn.MultiheadAttention(4, 1, dropout=0.5))
    for drops in (encoder(dropout=0.5), attention):
        with refused("evaluation mode"):
            drops.predict(prompts)


def without(predictor: HookedPredictor, hook: str) -> HookedPredictor:
    """Its last layer passes by this hook, and by that on the stream that is normed again."""
    for name in {hook, "hook_normalized_resid_post"}:
        setattr(predictor.model.blocks[-1], name, nn.Identity())
    predictor.model.setup()
    return predictor


@pytest.mark.parametrize("make", [encoder, lambda: hooked_predictor(random_model(2).float())])
def test_the_last_stream_is_asked_for_where_it_is_read(make, prompts):
    predictor = without(make(), "hook_resid_post")
    assert run(predictor, prompts, [[(1, 0)]]).shape == (1, 16, 1)
    uses = (
        probe,
        partial(prune, refit=True),
        lambda model, given: p_probe({"m": model}, given, layer=2),
    )
    enough = draw_prompts(TaskConfig(d_x=4, context_length=9), 32)  # for the read-outs of prune
    for use in uses:
        with refused("the hook blocks.1.hook_resid_post", "does not run through it"):
            use(predictor, enough)
    assert p_probe({"m": predictor}, prompts, layer=1, steps=2).risk.shape == (3, 3)


class Whole(ICLTransformer):
    """A model that runs from its first layer."""

    def forward(self, tokens, *, stop_at_layer=None):
        return super().forward(tokens, stop_at_layer=stop_at_layer)


def test_our_linear_model_is_read_as_its_adapter_says(few):
    model = random_model(**WIDE, score="linear/L")
    turned = HookedPredictor(
        model, 3, 4, embed=lambda prompts: -prompts.tokens, read=lambda output: 2 * output[:, -1]
    )
    expected = 2 * model(-few.tokens)[:, -1]
    torch.testing.assert_close(run(turned, few, [[]])[0], expected)
