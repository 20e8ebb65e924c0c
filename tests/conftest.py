"""Fixtures with known answers."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from mechinterp import cli
from mechinterp.analysis.one_layer import random_null as null
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts, draw_prompts, generator_for
from mechinterp.models.weights import Weights

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5}


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    """A file that is skipped for want of a library has failed where the library must be there (`make test-peers`)."""
    report = yield
    if report.skipped and "REQUIRED" in os.environ:
        report.outcome, report.longrepr = "failed", report.longrepr[2]
    return report


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random numbers that do not depend on which tests ran before."""
    torch.manual_seed(0)


def sampled(cases: Iterable, *, keep: Callable[[object], bool]) -> list:
    """Cases as parameters of a test, of which `make test` runs those to keep and `make test-all` the others too."""
    marked = [(case, () if keep(case) else pytest.mark.exhaustive) for case in cases]
    each = ((case if isinstance(case, tuple) else (case,), marks) for case, marks in marked)
    return [pytest.param(*case, marks=marks) for case, marks in each]


def assert_same(actual: Weights, expected: Weights):
    """Equal bits, and the same architecture."""
    actual, expected = with_sizes(actual), with_sizes(expected)
    for name in ("model", "d_x", "d_y", "scale"):
        assert getattr(actual, name) == getattr(expected, name)
    assert actual.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.equal(actual.tensors[name], tensor), name
        assert actual.tensors[name].dtype == tensor.dtype, name


def with_sizes(weights: Weights) -> Weights:
    """Weights by name, with d_head filled in where the architecture leaves it open."""
    d_head = weights.model.head_width(weights.d_x, weights.d_y)
    return replace(weights, model=replace(weights.model, d_head=d_head))


def changed(weights: Weights, **tensors: Tensor) -> Weights:
    """One attention layer with these weights and biases [head, ...]; W_O and b_O have the y columns alone."""
    biases = any(name.startswith("b_") for name in tensors) or weights.model.biases
    named = dict(weights.tensors)
    for name, tensor in tensors.items():
        wide = pad(tensor, (weights.d_x, 0)) if name in ("W_O", "b_O") else tensor
        named[f"attn.{name}"] = wide[None]
    return replace(weights, model=replace(weights.model, biases=biases), tensors=named)


def by_head(weights: Weights) -> dict[str, Tensor]:
    """Weights and biases [head, ...] of one attention layer; W_O and b_O have the y columns alone."""
    tensors = {name.removeprefix("attn."): tensor[0] for name, tensor in weights.tensors.items()}
    for name in {"W_O", "b_O"} & tensors.keys():
        tensors[name] = tensors[name][..., weights.d_x :].contiguous()
    return tensors


def assert_close_to_rounding(actual: Tensor | np.ndarray, expected: Tensor | np.ndarray):
    """Equal up to what another order of the same sums may change, in the dtype that is expected.

    Bits are compared only where the same code runs on the same shapes on the same machine; everything
    else is compared with this, relative to the largest entry.
    """
    actual, expected = torch.as_tensor(actual), torch.as_tensor(expected)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    error, largest = (actual - expected).abs().max().item(), expected.abs().max().item()
    assert error <= ROUNDING[expected.dtype] * largest, f"{error} of {largest}"


def without_hashes(folder: Path) -> None:
    """Make a folder an older one, whose config.json does not list the SHA-256 of the other files."""
    file = folder / "config.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    del document["files"]
    file.write_text(json.dumps(document), encoding="utf-8")


@pytest.fixture
def generator() -> torch.Generator:
    return generator_for(0, "eval", 0)


@pytest.fixture
def prompts(generator: torch.Generator) -> Prompts:
    """256 prompts of the softmax paper's task, in float64."""
    return draw_prompts(TaskConfig(), 256, generator=generator, dtype=torch.float64)


@contextmanager
def refused(*words: object, error: type[Exception] = ValueError) -> Iterator[None]:
    """What stands in it ends in an error of one line with these words: the thing, its value, the option."""
    with pytest.raises(error) as raised:
        yield
    assert "\n" not in str(raised.value)
    for word in words:
        assert str(word) in str(raised.value)


@dataclass
class Ran:
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def document(self):
        """The one JSON document on standard output; NaN and infinities are no JSON."""

        def refuse(name: str):
            raise AssertionError(f"{name} in JSON")

        return json.loads(self.out, parse_constant=refuse)

    def done(self, *, silent: bool = False) -> "Ran":
        """The same, with exit code 0; `silent` with nothing on standard error."""
        assert self.code == 0, self.err
        assert not silent or self.err == ""
        return self

    def assert_refused(self, *words: str, lines: int = 1):
        """Exit code 2, nothing on standard output, a line on standard error with these words; `lines` with others before."""
        assert (self.code, self.out) == (2, ""), self.err
        assert self.err.startswith("mechinterp: ")
        assert self.err.count("\n") <= lines
        assert self.err.endswith("\n")
        for word in words:
            assert str(word) in self.err.splitlines()[-1] + "\n"


def started(*command: object, **settings: object) -> Ran:
    """A program that has run in a process of its own."""
    words = [str(word) for word in command]
    ran = subprocess.run(words, capture_output=True, text=True, check=False, **settings)
    return Ran(ran.returncode, ran.stdout, ran.stderr)


def python(*arguments: object, **settings: object) -> Ran:
    """Python that has run with these arguments."""
    return started(sys.executable, *arguments, **settings)


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Runs a command in this process; those that train set the number of threads."""
    threads = torch.get_num_threads()

    def command(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["mechinterp", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return Ran(ended.value.code, *capsys.readouterr())

    yield command
    torch.set_num_threads(threads)


@pytest.fixture
def few() -> Prompts:
    """30 prompts of 9 pairs with d_x = 4, in float64."""
    task = TaskConfig(d_x=4, context_length=9)
    generator = generator_for(0, "eval", 0)
    return draw_prompts(task, 30, generator=generator, dtype=torch.float64)


@pytest.fixture(scope="module")
def small_null() -> Iterator[None]:
    """As few random models as a p-value below 0.01 needs, for tests of which no label hangs on more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(null, "MODELS", (100, 100))
        patch.setattr(null, "N_NULL_PROMPTS", 128)
        null.null_of.cache_clear()
        yield
    null.null_of.cache_clear()
