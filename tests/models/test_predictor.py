"""Every way in which `Predictor` computes masks and streams gives what plain hooks give, to rounding in float64.

The plain way is written out here: one run with hooks for each mask, z of a masked head replaced.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from mechinterp import hook_module
from mechinterp.config import ModelConfig, TaskConfig
from mechinterp.icl.prompts import Prompts, draw_prompts, generator_for
from mechinterp.models.hooked import runner
from mechinterp.models.hooked.masks import METHODS, Head
from mechinterp.models.hooked.runner import hooked_predictor
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.run import general
from mechinterp.models.run.predictor import predictor_of
from mechinterp.models.run.ways import predictions_kept
from mechinterp.models.weights import Weights
from tests.conftest import assert_close_to_rounding, refused, sampled
from tests.deep_models import GPT2

CONTEXT = {"context_only": True, "n_layers": 3}
READ_IN = {"d_model": 7}
ONE_LAYER = {
    "softmax": {},
    "self": {"attend_to_self": True},
    "biases": {"biases": True},
    "self, biases": {"attend_to_self": True, "biases": True},
    "merged": {"merged_qk": True, "d_head": None},
    "merged, biases": {"merged_qk": True, "d_head": None, "biases": True, "attend_to_self": True},
    # Of linear scores b_K counts.
    "merged, linear": {"merged_qk": True, "d_head": None, "biases": True, "score": "linear/L"},
    "linear/L": {"score": "linear/L"},
    "1+tanh, self": {"score": "1+tanh", "attend_to_self": True},
    "context only": {"context_only": True},
    "context only, self": {"context_only": True, "attend_to_self": True, "biases": True},
    "relu/L": {"context_only": True, "score": "relu/L"},
}
TOKEN_MAP = {
    "linear": {**CONTEXT, "score": "linear"},
    "linear/L": {**CONTEXT, "score": "linear/L"},
    "linear, read-in": {**CONTEXT, **READ_IN, "score": "linear"},
    "linear/L, read-in": {**CONTEXT, **READ_IN, "score": "linear/L"},
    "one layer, read-in": {**CONTEXT, **READ_IN, "score": "linear/L", "n_layers": 1},
    "four layers": {**CONTEXT, **READ_IN, "score": "linear/L", "n_layers": 4},
    "wider heads": {**CONTEXT, **READ_IN, "score": "linear/L", "d_head": 17},
}
TAKEN_AWAY = {
    "softmax": CONTEXT,
    "softmax, read-in": {**CONTEXT, **READ_IN},
    "relu/L": {**CONTEXT, **READ_IN, "score": "relu/L"},
    "linear/L, self": {**CONTEXT, "score": "linear/L", "attend_to_self": True},
    "causal": {"n_layers": 3},
    "causal, self, biases": {"n_layers": 3, "attend_to_self": True, "biases": True},
    "causal, merged": {"n_layers": 2, "merged_qk": True, "d_head": None, "biases": True},
    "causal, linear": {"n_layers": 3, "score": "linear/L"},
    "read-in, biases": {"n_layers": 2, **READ_IN, "biases": True},
    "in turn": {"n_layers": 2, "d_model": 8, "layout": "in_turn"},
    "one layer, read-in": {**READ_IN, "biases": True},
}
PLAIN = {
    "pre-norm": {"n_layers": 2, "norm": "before", "d_mlp": 6},
    "post-norm": {"n_layers": 2, "norm": "after", "d_mlp": 6, "biases": True},
    "post-norm, context": {**CONTEXT, "norm": "after", "d_mlp": 6, "attend_to_self": True},
    "norm alone": {"norm": "before"},
    "last norm alone": {"final_norm": True},
    "MLP alone": {"d_mlp": 6, "activation": "silu"},
    "positions alone": {"n_positions": 21},
    "read in by an MLP": {"n_layers": 2, **READ_IN, "d_read_in": 5, "biases": True},
    "linear with MLP": {**CONTEXT, "score": "linear/L", "d_mlp": 6},
    "GPT-2": {**GPT2, "n_layers": 3, "n_positions": 21},
}
WAYS = {"one layer": ONE_LAYER, "token map": TOKEN_MAP, "taken away": TAKEN_AWAY, "plain": PLAIN}
ALL = {f"{way}: {name}": each for way, kind in WAYS.items() for name, each in kind.items()}
PATHS = {
    *("softmax", "merged, biases", "merged, linear", "1+tanh, self", "relu/L", "linear/L, read-in"),
    *("four layers", "softmax, read-in", "causal, self, biases", "causal, merged", "in turn"),
    *("pre-norm", "post-norm, context", "read in by an MLP", "linear with MLP", "GPT-2"),
}
EACH = pytest.mark.parametrize(
    "architecture",
    sampled(ALL.values(), keep=[ALL[n] for n in ALL if n.split(": ")[1] in PATHS].__contains__),
)
FIRST = [next(iter(kind.values())) for kind in WAYS.values()]
FEW = pytest.mark.parametrize("architecture", sampled(ALL.values(), keep=FIRST.__contains__))
"""One of each way, and the others in `make test-all`."""
N_HEADS = 4


def random_weights(architecture: dict) -> Weights:
    """Four heads a layer for d_x = 3 and d_y = 2, every parameter random, in float64."""
    config = ModelConfig(**{"n_heads": N_HEADS, "d_head": 2, "score_slope": 0.2} | architecture)
    model = ICLTransformer(config, d_x=3, d_y=2).double()
    generator = generator_for(9, "init", 0)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=float(name.endswith(".w")), std=0.4, generator=generator)
    return model.weights


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 prompts, where there are 256 otherwise."""
    for name in ("general", "hooks", "linear"):
        monkeypatch.setattr(f"mechinterp.models.run.{name}.CHUNK", 16)


def drawn(n_prompts: int = 40) -> Prompts:
    """More prompts than two chunks have; 5 pairs each."""
    task = TaskConfig(d_x=3, d_y=2, context_length=5)
    return draw_prompts(task, n_prompts, seed=2, dtype=torch.float64)


def masks_of(n_layers: int) -> list[list[Head]]:
    last = n_layers - 1
    everything = [(layer, head) for layer in range(n_layers) for head in range(N_HEADS)]
    middle = [(layer, 1) for layer in range(1, last)]
    several = [(0, 0), (0, 2), (last, 1)]
    return [
        [],
        [(0, 1)],
        [(last, 3)],
        several,
        *([middle[:1], middle, several + middle] if middle else []),
        everything[1:],
        everything,
    ]


def hooked(weights: Weights) -> ICLTransformer:
    return ICLTransformer.from_weights(weights, task=TaskConfig(d_x=3, d_y=weights.d_y))


@torch.no_grad()
def by_hooks(weights: Weights, prompts: Prompts, masks: list[list[Head]], method: str) -> Tensor:
    """One run of the hooked model for each mask, all prompts at once."""
    model = hooked(weights)
    tokens = model.tokens(prompts)
    _, cache = model.run_with_cache(tokens)
    outputs = []
    for heads in masks:
        edits = []
        for layer, head in heads:
            z = cache["z", layer]
            instead = {
                "zero": torch.zeros_like(z),
                "mean": z.mean(0, keepdim=True).expand_as(z),
                "resample": z[torch.arange(len(z)) ^ 1],
            }[method]

            def edit(z: Tensor, hook: object, head=head, instead=instead) -> Tensor:
                z = z.clone()
                z[:, :, head] = instead[:, :, head]
                return z

            edits.append((f"blocks.{layer}.attn.hook_z", edit))
        outputs.append(model.run_with_hooks(tokens, fwd_hooks=edits)[:, -1])
    return torch.stack(outputs)


@EACH
def test_masks_are_those_of_plain_hooks(architecture: dict):
    weights, prompts = random_weights(architecture), drawn()
    masks, predictor = masks_of(weights.n_layers), predictor_of(weights)
    for method in METHODS:
        expected = by_hooks(weights, prompts, masks, method)
        assert_close_to_rounding(predictor.run(prompts, masks, method=method), expected)
        changes = (expected[1:] - expected[0]).abs().amax((1, 2))
        assert changes.min() > 1e-6 * expected.abs().max()  # no mask is a mask of nothing
    assert_close_to_rounding(predictor.predict(prompts).detach(), expected[0])


@EACH
def test_streams_are_those_of_plain_hooks(architecture: dict):
    weights, prompts = random_weights(architecture), drawn()
    model = hooked(weights)
    tokens, n_layers = model.tokens(prompts), weights.n_layers
    predictor, heads = predictor_of(weights), [(0, 1), (n_layers - 1, 2)]

    def zero(z: Tensor, hook) -> Tensor:
        layer = int(hook.name.split(".")[1])
        gone = [head for at, head in heads if at == layer]
        kept = torch.tensor([float(head not in gone) for head in range(N_HEADS)]).double()
        return z * kept[:, None]

    for masked, edits in (([], []), (heads, [(lambda name: name.endswith("hook_z"), zero)])):
        with torch.no_grad(), model.hooks(fwd_hooks=edits):
            layers = range(n_layers + 1)
            expected = torch.stack([model(tokens, stop_at_layer=layer) for layer in layers])
            if not masked:
                with_x = [
                    model(model.tokens(replace(prompts, x_query=x)), stop_at_layer=n_layers)[:, -1]
                    for x in [*prompts.x.unbind(1), prompts.x_query]
                ]
        streams = predictor.streams(prompts, heads=masked, positions=[-1, -2, -6])
        assert_close_to_rounding(streams, expected[:, :, [-1, -2, -6]])
        assert_close_to_rounding(predictor.streams(prompts, heads=masked), expected[:, :, [-1]])
        if not masked:
            for layer in range(n_layers + 1):
                assert_close_to_rounding(predictor.stream(prompts, layer), expected[layer])
    at_query = predictor.query_streams(prompts, n_layers)
    assert_close_to_rounding(at_query, torch.stack(with_x, dim=1))


@EACH
def test_a_stream_that_is_put_in_gives_the_predictions_of_plain_hooks(architecture: dict):
    weights, prompts = random_weights(architecture), drawn()
    model, n_layers, generator = hooked(weights), weights.n_layers, generator_for(3, "init", 0)
    tokens = model.tokens(prompts)
    kinds = {"weights": predictor_of(weights), "hooks": predictor_of(hooked_predictor(model))}
    hooks_alone = replace(kinds["hooks"], transformer=None)  # without the weights
    assert kinds["weights"].one_stream_width(prompts)
    assert hooks_alone.one_stream_width(prompts)
    for layer in range(n_layers + 1):
        name = hooks_alone.hooked.stream_name(layer)
        width = weights.model.stream_width(weights.d_x, weights.d_y)
        own = torch.randn(len(prompts), width, generator=generator, dtype=torch.float64)

        def put(stream: Tensor, hook: object, own: Tensor = own) -> Tensor:
            return torch.cat([stream[:, :-1], own[:, None]], dim=1)

        with torch.no_grad():
            expected = model.run_with_hooks(tokens, fwd_hooks=[(name, put)])[:, -1]
        for predictor in (kinds["weights"], hooks_alone):
            assert_close_to_rounding(predictor.predict_from(prompts, layer, own), expected)


@FEW
def test_predictions_in_chunks_are_those_of_all_prompts_at_once(architecture: dict):
    weights, prompts = random_weights(architecture), drawn()
    expected = general.predictions(weights, prompts)
    assert_close_to_rounding(general.predictions_in_chunks(weights, prompts), expected)


def with_hook(weights: Weights) -> ICLTransformer:
    """The model with somebody's permanent hook on its first z, which doubles head 0's."""
    model = hooked(weights)

    def double(z: Tensor, hook: object) -> Tensor:
        return torch.cat([2 * z[:, :, :1], z[:, :, 1:]], dim=2)

    model.add_hook("blocks.0.attn.hook_z", double, is_permanent=True)
    return model


@FEW
def test_somebodys_hooks_are_not_missed(architecture: dict):
    weights, prompts = random_weights(architecture), drawn()
    model, masks = with_hook(weights), masks_of(weights.n_layers)[:3]
    doubled = weights.W_O.clone()
    doubled[0, 0] *= 2
    as_if = weights.with_tensors({"attn.W_O": doubled})
    expected = by_hooks(as_if, prompts, masks, "zero")
    plain = by_hooks(weights, prompts, masks, "zero")
    assert (expected - plain).abs().max() > 1e-3 * expected.abs().max()
    n_layers, doubling = weights.n_layers, predictor_of(as_if)
    uses = [
        lambda each: each.run(prompts, masks, method="mean"),
        lambda each: each.streams(prompts),
        lambda each: each.query_streams(prompts, n_layers),
        lambda each: each.stream(prompts, n_layers),
    ]
    for source in (model, hooked_predictor(model)):
        predictor = predictor_of(source)
        assert_close_to_rounding(predictor.run(prompts, masks), expected)
        assert_close_to_rounding(predictor.predict(prompts).detach(), expected[0])
        for use in uses:
            assert_close_to_rounding(use(predictor), use(doubling))


@FEW
def test_prompts_of_another_dtype_are_run_in_that_of_the_weights(architecture: dict):
    weights, prompts = random_weights(architecture), drawn(n_prompts=4)
    predictor, single = predictor_of(weights), prompts.to(torch.float32)
    assert predictor.run(single).dtype == predictor.predict(single).dtype == torch.float64
    assert_close_to_rounding(predictor.run(single), predictor.run(single.to(torch.float64)))


ASKED = {
    "layer of a head": (lambda each, prompts: each.run(prompts, [[(1, 0)]]), ("1 layers", "L1H0")),
    "head": (lambda each, prompts: each.streams(prompts, heads=[(0, 4)]), ("4 heads", "L0H4")),
    "negative head": (lambda each, prompts: each.run(prompts, [[(0, -1)]]), ("heads", -1)),
    "layer": (lambda each, prompts: each.stream(prompts, 2), ("layer", "0 to 1", 2)),
    "layer to put in": (
        lambda each, prompts: each.predict_from(prompts, 2, torch.zeros(3, 5)),
        ("layer", "0 to 1", 2),
    ),
    "negative layer": (lambda each, prompts: each.query_streams(prompts, -1), ("layer", -1)),
    "method": (
        lambda each, prompts: each.run(prompts, [[]], method="noise"),
        ("method", "zero, mean, resample", "'noise'"),
    ),
    "odd": (lambda each, prompts: each.run(prompts, [[]], method="resample"), ("even", "got 3")),
    "no model": (lambda each, prompts: predictor_of(nn.Linear(2, 2)), ("model", "ICLTransformer")),
}


@pytest.mark.parametrize(("use", "words"), ASKED.values(), ids=ASKED)
def test_what_does_not_exist_is_refused(use, words):
    with refused(*words):
        use(predictor_of(random_weights({})), drawn(n_prompts=3))


class Counted(nn.Module):
    """A step of gradient descent that counts its calls."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.read_in, self.read_out = nn.Linear(5, 8), nn.Linear(8, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        Counted.calls += 1
        return self.read_out(self.inner(self.read_in(tokens)))


def test_equal_prompts_are_predicted_once_while_predictions_are_kept():
    task = TaskConfig(d_x=4, context_length=6)
    hooked = hook_module(Counted(), task=task)
    one, same, other = (draw_prompts(task, 8, seed=seed) for seed in (0, 0, 1))

    def calls(*prompts: Prompts) -> int:
        before = Counted.calls
        for each in prompts:
            hooked.predictor.predict(each)
        return Counted.calls - before

    assert calls(one, same) == 2
    expected = hooked.predictor.predict(one)
    with predictions_kept():
        assert calls(one, same, one) == 1
        kept = hooked.predictor.predict(same)
        assert torch.equal(kept, expected)
        kept.zero_()
        assert torch.equal(hooked.predictor.predict(one), expected)
        assert calls(other) == 1
        masks = [[], [(0, 1)]]
        assert not torch.equal(*hooked.predictor.run(one, masks))
        # A mask that is on the model itself is not missed.
        with runner.masked(hooked, [(0, 0), (0, 1)]):
            assert not torch.equal(hooked.predictor.predict(one), hooked.predictor.predict(other))
            without = hooked.predictor.predict(one)
        assert not torch.equal(without, hooked.predictor.predict(one))
    assert calls(one) == 1
