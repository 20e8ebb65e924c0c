"""Arguments that a user gets wrong in Python work, or are refused in one line that says what is meant."""

import json
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import mechinterp as mi
from mechinterp import (
    Prompts,
    TaskConfig,
    ablate,
    attribute_edges,
    check,
    circuits,
    classify,
    compare_learners,
    hook_module,
    jump_forecast,
    load,
    masked,
    patch_activations,
    predictor_of,
    push_to_hub,
    sample_prompts,
)
from mechinterp.checkpoints.checkpoint import save
from mechinterp.checkpoints.modules.hooked import HookedModule
from mechinterp.icl.prompts import draw_prompts, generator_for
from mechinterp.models.constructions.one_layer import diagonal_heads
from tests.conftest import Run, refused
from tests.test_doors import as_for_users

SHIPPED, DEEP = "checkpoints/softmax-h2-s0", "checkpoints/sparse-h4-noise0.1-s0"
TASK = TaskConfig(d_x=3, context_length=6)


def drawn(task: TaskConfig, n_prompts: int = 8):
    return draw_prompts(task, n_prompts, generator=generator_for(0, "eval", 0))


def encoder(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.TransformerEncoderLayer(width, 2, 8, batch_first=True) for _ in "12")
    return nn.Sequential(nn.Linear(TASK.d_x + 1, width), *layers, nn.Linear(width, 1)).eval()


def hooked(module: nn.Module | None = None, **settings) -> HookedModule:
    return hook_module(encoder() if module is None else module, task=TASK, **settings)


def refusal(call) -> str:
    """The one line in which a call is refused."""
    with as_for_users(), pytest.raises(ValueError) as caught:  # noqa: PT011
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


REFUSED = {
    "a task as prompts": (
        lambda: classify(load(SHIPPED), load(SHIPPED).task),
        ["classify: prompts must be Prompts", "got a task (TaskConfig)", "task="],
    ),
    "prompts as the task of a function": (
        lambda: compare_learners(lambda given: given.y_query, task=drawn(TASK)),
        ["got Prompts; ", "compare_learners"],
    ),
    "rows as fields": (
        lambda: load(SHIPPED, model=["norm=before"]),
        ["model must be a mapping", "{'norm': 'before'}", "got ['norm=before']"],
    ),
    "no sum of streams": (
        lambda: attribute_edges(hooked(), n_prompts=8),
        ["model must have a residual stream that is the sum", "layer 0"],
    ),
    "no such hook": (
        lambda: patch_activations(hooked(), activation="attn_out", n_prompts=8),
        ["hook blocks.0."],
    ),
    "a hooked module for the hub": (
        lambda: push_to_hub(hooked(), "someone/one"),
        ["push_to_hub needs a checkpoint", "got a HookedModule", "module.state_dict()"],
    ),
    "a hooked module without a training": (
        lambda: jump_forecast(hooked()),
        ["jump_forecast needs a config", "got a HookedModule"],
    ),
    "an output that is no tensor": (lambda: hooked(Tupled()), ["read must be given", "got tuple"]),
    **{
        f"{name} {value!r}": (
            lambda name=name, value=value: hooked(**{name: value}),
            [f"{name} must be an integer", f"got {value!r}."],
        )
        for name, value in [
            *product(["n_heads"], [0, -1, True, 2.0, "2"]),
            *product(["position"], [True, 1.0, "last"]),
        ]
    },
    **{
        f"outputs {outputs}": (
            lambda outputs=outputs: hooked(outputs=outputs),
            ["outputs must be names of modules", "got 'merge'."],
        )
        for outputs in (["merge"], "merge", ["1.self_attn", "merge"])
    },
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_wrong_argument_is_refused_with_its_name_and_value(what: str):
    call, words = REFUSED[what]
    said = refusal(call)
    assert not [word for word in words if word not in said], said


def test_an_option_that_load_lacks_is_refused_with_those_it_has():
    with refused("heads", "n_heads", "attend_to_self", error=TypeError):
        load(SHIPPED, heads=2)


@pytest.mark.slow
def test_a_task_is_as_good_as_its_fields(tmp_path):
    file = tmp_path / "layer.pt"
    torch.save(nn.TransformerEncoderLayer(6, 2, 8).state_dict(), file)
    fields = {"noise_var": 0.3, "context_length": 12, "beta_var": 1.0}
    stated = tmp_path / "task.json"
    stated.write_text(json.dumps(fields))
    for task in (TaskConfig(**fields), fields, stated, str(stated)):
        checkpoint = load(file, n_heads=2, task=task)
        assert checkpoint.task == TaskConfig(**fields)
        assert not {f"task.{name}" for name in fields} & checkpoint.assumed.keys()
        assert {"covariance", "query_noise"} <= set(checkpoint.task.assumed)
    whole = load(file, n_heads=2, task=TaskConfig().assuming(()))
    assert not [name for name in whole.assumed if name.startswith("task.")]
    for wrong, word in (("noise_var=0.1", "JSON"), (TaskConfig(d_x=4, d_y=1), "d_x")):
        assert word in refusal(lambda wrong=wrong: load(file, n_heads=2, task=wrong))
    assert "task is only for" in refusal(lambda: load(SHIPPED, task=task))


@pytest.mark.parametrize("path", [SHIPPED, DEEP])
def test_a_checkpoint_is_masked_as_its_model_is(path):
    checkpoint = load(path)
    prompts = drawn(checkpoint.task)
    full, expected = predictor_of(checkpoint).run(prompts, [[], [(0, 1)]])
    with masked(checkpoint, [(0, 1)]), torch.no_grad():
        by_model = checkpoint.model.predict(prompts)
        by_predictor = checkpoint.predictor.predict(prompts)
    for found in (by_model, by_predictor):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert (expected - full).abs().max() > 1e-3
    torch.testing.assert_close(checkpoint.predictor.predict(prompts), full, rtol=1e-5, atol=1e-6)


class Tupled(nn.Module):
    """A prediction for each position, and something else."""

    def __init__(self):
        super().__init__()
        self.inner = encoder()

    def forward(self, tokens):
        return self.inner(tokens), tokens


class Learned(nn.Module):
    """As many positions as were learned."""

    def __init__(self, error: type[Exception]):
        super().__init__()
        self.inner, self.positions = encoder(), nn.Embedding(TASK.context_length + 1, 4)
        self.error = error

    def forward(self, tokens):
        if tokens.shape[1] > len(self.positions.weight):
            raise self.error(f"{tokens.shape[1]} are\ntoo many")
        return self.inner(tokens + self.positions(torch.arange(tokens.shape[1])))


@pytest.mark.parametrize("error", [IndexError, AssertionError, RuntimeError])
def test_a_module_of_few_positions_is_fitted_and_named_on_those(error):
    model = hooked(Learned(error))
    assert compare_learners(model, n_prompts=64).trained == (6, 6)
    # Twice the length is left out of what an algorithm's name rests on.
    assert "double length" not in classify(model, n_prompts=16).algorithm.risks
    said = refusal(lambda: compare_learners(model, context_lengths=[9], n_prompts=64))
    assert "[64, 10, 4]" in said


def test_faults_of_a_module_that_has_run_keep_their_kind():
    class Tired(Learned):
        tired = False

        def forward(self, tokens):
            if self.tired:
                raise RuntimeError("tired")
            return super().forward(tokens)

    model = hooked(Tired(IndexError))
    model.predict(drawn(TASK))
    model.model.module.tired = True
    with pytest.raises(RuntimeError, match="tired"):
        model.predict(drawn(TASK))


# Compiled by nothing: the wrappers are those of every backend, and none of their code may run.
compiled = partial(torch.compile, backend="eager")


def in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


def inside(module: nn.Sequential) -> nn.Module:
    module[1] = compiled(module[1])
    return module


@pytest.mark.parametrize("form", [compiled, in_place, inside])
def test_a_compiled_module_is_hooked_without_it(form):
    prompts, expected = drawn(TASK), hooked()
    model = hooked(form(encoder()))
    assert repr(model) == repr(expected)
    torch.testing.assert_close(model.predict(prompts), expected.predict(prompts))
    found, rises = (ablate(each, prompts, what="heads").rise for each in (model, expected))
    torch.testing.assert_close(*map(torch.tensor, (found, rises)))
    assert (abs(rises) > 0).all()


def test_a_read_makes_a_tensor_of_any_output():
    prompts = drawn(TASK)
    with as_for_users():
        found = hooked(Tupled(), read=lambda output: output[0][:, -1]).predict(prompts)
    torch.testing.assert_close(found, hooked().predict(prompts))


# Weights so large that predictions overflow.


@pytest.mark.parametrize(
    ("command", "factor"), [("compare-learners", 1e10), ("ablate", 1e19), ("report", 1e19)]
)
def test_predictions_that_overflow_are_named(run: Run, tmp_path: Path, command: str, factor: float):
    small = load("checkpoints/softmax-h1-s0")
    large = small.weights.with_tensors(
        {name: tensor * factor for name, tensor in small.weights.tensors.items()}
    )
    save(tmp_path / "model", small.config, large, step=1)
    options = ["--out", tmp_path / "report"] if command == "report" else []
    ran = run(command, tmp_path / "model", "--n-prompts", 64, "-q", *options)
    ran.assert_refused(tmp_path / "model", "The model's predictions overflow: they must lie within")
    assert not (tmp_path / "report").exists()


def test_weights_beyond_all_bounds_give_no_warning():
    """Warnings are errors in the tests."""
    heads = diagonal_heads([0.1, -0.1], [3.0, -3.0], d_x=5)
    huge = heads.with_tensors(
        {name: torch.full_like(tensor, 1e200) for name, tensor in heads.tensors.items()}
    )
    assert np.isinf(circuits(huge).qk_off_diagonal).all()
    assert classify(huge, n_prompts=64).label in ("undetermined", "other")
    trained = load("checkpoints/softmax-h2-s0").weights
    large = trained.with_tensors({n: 1e30 * tensor for n, tensor in trained.tensors.items()})
    assert classify(large, n_prompts=32).label == "undetermined"


ANALYSES_OF_NAN = ["ablate", "probe", "p_probe", "compare_learners", "error_curve", "response"]


@pytest.mark.parametrize("name", ANALYSES_OF_NAN)
def test_weights_that_are_no_numbers_end_in_one_line(name: str):
    model = load("checkpoints/softmax-h2-s0").model
    with torch.no_grad():
        model.blocks[0].attn.W_Q[0, 0, 0] = float("nan")
    with refused("must"):
        getattr(mi, name)(model, n_prompts=256)


@pytest.mark.parametrize("name", ["classify", "probe", "circuits"])
def test_a_model_without_numbers_is_refused(name: str):
    with refused("on the meta device", "assign=True"):
        getattr(mi, name)(load("checkpoints/softmax-h2-s0").model.to("meta"))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"context_length": 1.5}, ["context_length", "whole number", "1.5"]),
        ({"context_length": "9"}, ["context_length", "whole number", "'9'"]),
        ({"dtype": torch.int32}, ["dtype", "torch.int32"]),
        ({"dtype": "float32"}, ["dtype", "'float32'"]),
    ],
)
def test_settings_of_prompts_are_checked(wrong: dict, words: list[str]):
    with as_for_users(), refused(*words):
        sample_prompts(load("checkpoints/softmax-h2-s0"), 8, **wrong)


def test_check_of_a_bare_model_asks_for_its_checkpoint():
    with as_for_users(), refused("check needs a checkpoint", "ICLTransformer"):
        check(load("checkpoints/softmax-h2-s0").model)


def test_arrays_of_any_order_and_precision_are_prompts():
    x = np.random.default_rng(0).normal(size=(8, 4, 3))
    plain = Prompts.from_arrays(x[::-1], x.sum(2)[::-1], x[::-1, 0], x[::-1, 1, 0])
    for kind in (">f8", np.longdouble):
        other = x.astype(kind)
        turned = (other[::-1], other.sum(2)[::-1], other[::-1, 0], other[::-1, 1, 0])
        found = Prompts.from_arrays(*turned)
        assert torch.equal(found.x, plain.x)
        assert torch.equal(found.y_query, plain.y_query)
    hidden = np.ma.masked_array(x, x > 1)
    with refused("x must have no masked entries"):
        Prompts.from_arrays(hidden, x.sum(2), x[:, 0], x[:, 1, 0])
