"""The input of a plain module: made from prompts, split into arguments, and tried."""

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from inspect import Parameter

import torch
from torch import Tensor, nn

from mechinterp.checkpoints.io.files import one_line, with_place
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.arguments import Split, whole, xs_and_ys


@dataclass(frozen=True, eq=False)
class ModuleInput:
    """Function from prompts to a module's input."""

    task: TaskConfig
    embed: Callable[[Prompts], Tensor] | None
    device: torch.device
    dtype: torch.dtype

    def __call__(self, prompts: Prompts) -> Tensor:
        if self.embed is None:  # tokens (x, y), the query last
            prompts.require_sizes(d_x=self.task.d_x, d_y=self.task.d_y)
        tokens = prompts.tokens if self.embed is None else self.embed(prompts)
        if not isinstance(tokens, Tensor):
            raise ValueError(
                f"embed must return one tensor, got {type(tokens).__name__}; wrap a module of several inputs in one that splits them."
            )
        return tokens.to(self.device, self.dtype)


@dataclass(frozen=True, eq=False)
class Trial:
    """A module, and a small input on which it runs while its layers are found."""

    module: nn.Module
    tokens: Tensor
    """Input as `embed` makes it, [batch, pos, width]."""
    split: Split
    """Function from `tokens` to the arguments of the module."""

    @property
    def name(self) -> str:
        """Name of the module's class."""
        return type(self.module).__name__

    def run(self, tokens: Tensor | None = None) -> object:
        """Output of the module, which gets a copy of the tokens since it may write into its input."""
        tokens = self.tokens if tokens is None else tokens
        return self.module(*self.split(tokens.clone()))

    def output(self) -> object:
        """Output of the module.

        Raises:
            ValueError: If it does not run; the message has its own error.
        """
        try:
            return self.run()
        except Exception as error:
            shape, n_prompts = list(self.tokens.shape), len(self.tokens)
            of_shape = isinstance(error, TypeError | RuntimeError | IndexError | AssertionError)
            said = one_line(error) if of_shape else with_place(error)
            raise ValueError(
                f"module must run on the input {shape} of {n_prompts} prompts, got: {said}; "
                "use embed= to make the input from prompts, and task= to state d_x and d_y."
            ) from None


def split_of(module: nn.Module, tokens: Tensor, task: TaskConfig) -> Split:
    """Function that splits tokens (x, y) into the arguments of a module: whole, or xs and ys, with ys [batch, n] if it runs on that."""
    if not _takes_two(module):
        return whole
    flat, three = (partial(xs_and_ys, d_x=task.d_x, flat=each) for each in (task.d_y == 1, False))
    for split in (flat, three):
        with suppress(ValueError):
            Trial(module, tokens, split).output()
            return split
    return flat


def _takes_two(module: nn.Module) -> bool:
    """True if the module's forward needs two inputs."""
    given = inspect.signature(module.forward).parameters.values()
    places = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    needed = [each for each in given if each.kind in places and each.default is Parameter.empty]
    return len(needed) == 2
