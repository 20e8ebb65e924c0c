"""Modules and functions of the user's own code as models of the commands: my_module:model."""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from torch import Tensor

    from mechinterp.checkpoints.checkpoint import Checkpoint
    from mechinterp.checkpoints.foreign.options import Hints
    from mechinterp.checkpoints.modules.hooked import HookedModule
    from mechinterp.icl.prompts import Prompts
    from mechinterp.models.run.predictor import Learner

TAKEN = ("task", "n_heads")
"""Settings of files that commands take for a module, too."""
OF_FUNCTIONS = ("response", "name-algorithm", "compare-learners", "error-curve")
"""Commands that take a function of prompts."""


def is_own_model(path: Path) -> bool:
    """True for module:name, such as my_module:model, unless there is a file of that name."""
    return bool(re.fullmatch(r"[\w.]+:\w+", str(path))) and not os.path.lexists(path)


def require_file(path: Path, command: str) -> None:
    """Refuse a module where a command needs a file.

    Raises:
        ValueError: If the path names a module.
    """
    if is_own_model(path):
        raise ValueError(
            f"{path}: {command} needs a checkpoint or a file of weights, got a module."
        )


def require_model(
    path: Path, source: "Checkpoint | HookedModule | Learner"
) -> "Checkpoint | HookedModule":
    """The source, if it is a model and not a function of prompts.

    Raises:
        ValueError: If the source is a function.
    """
    from mechinterp.models.run.predictor import is_learner

    if is_learner(source):
        raise ValueError(
            f"{path}: takes an argument and so is a function of prompts, without heads, for {', '.join(OF_FUNCTIONS)}; "
            "a function that makes a module takes none."
        )
    return cast("Checkpoint | HookedModule", source)


def own_source(named: str, hints: "Hints", device: str) -> "HookedModule | Learner":
    """The module `my_module:model` with hooks, under this name; or a function of prompts as it is.

    Args:
        hints: Settings that the options state; of these a module takes its task and number of heads.
        device: Where a module runs that is not hooked yet.
    Raises:
        ValueError: If there is no such name; it is neither a module, nor a function that makes one or that predicts for
            prompts; or an option does not suit it.
    """
    from torch import nn

    from mechinterp.analysis.registry import own_object
    from mechinterp.checkpoints.io.files import with_place
    from mechinterp.checkpoints.modules.hooked import HookedModule, hook_module
    from mechinterp.models.run.predictor import is_learner

    _require_taken(named, hints)
    made = own_object(named)
    if is_learner(made) and _n_required(made) == 1:
        if hints.n_heads is not None:
            raise ValueError(
                f"{named}: a function of prompts has no heads, got n_heads {hints.n_heads}."
            )
        return _named_in_errors(made, named)
    rule = (
        f"{named}: must be a torch.nn.Module, a hooked module, a function that makes one without arguments, "
        "or a function of prompts"
    )
    if callable(made) and not isinstance(made, nn.Module | HookedModule):
        try:
            made = made()
        except (Exception, SystemExit) as error:
            raise ValueError(f"{rule}; its call ended in {with_place(error)}.") from None
    if isinstance(made, nn.Module):
        made = hook_module(made.to(device), task=hints.task, n_heads=hints.n_heads)
    elif not isinstance(made, HookedModule):
        raise ValueError(f"{rule}, got {type(made).__name__}.")
    elif hints.given:
        raise ValueError(
            f"{named}: is hooked already, with its own settings, got {', '.join(hints.given)}: state them in hook_module."
        )
    return replace(made, name=named)


def module_of_file(path: Path, hints: "Hints", device: str) -> "HookedModule":
    """The module of a file with recurrent layers of transformers or flash-linear-attention, with hooks, under the path.

    Raises:
        ValueError: As `recurrent_module` raises, or if an option does not suit a module.
    """
    from mechinterp.checkpoints.foreign.recurrent import recurrent_module
    from mechinterp.checkpoints.modules.hooked import hook_module

    _require_taken(str(path), hints)
    module = recurrent_module(path).to(device)
    return replace(hook_module(module, task=hints.task, n_heads=hints.n_heads), name=str(path))


def _require_taken(named: str, hints: "Hints") -> None:
    for name in hints.given:
        if name not in TAKEN:
            raise ValueError(
                f"{named}: {name} is a setting of other files; a module takes task and n_heads, and all else by hook_module, such as "
                "model = hook_module(module, read=...) in a Python file."
            )


class OwnFunctionError(ValueError, RuntimeError):
    """Error of a user's function in one line; analyses catch a RuntimeError where a dtype or gradients are tried."""


def _named_in_errors(function: "Learner", named: str) -> "Learner":
    """The function under this name, whose errors are one line with their place."""
    from mechinterp.checkpoints.io.files import with_place

    @wraps(function)
    def run(prompts: "Prompts") -> "Tensor":
        try:
            return function(prompts)
        except (Exception, SystemExit) as error:
            raise OwnFunctionError(f"{named}: ended in {with_place(error)}.") from None

    # A lambda and a functools.partial have no name of their own.
    run.__module__, _, run.__name__ = named.partition(":")
    return run


def _n_required(function: Callable[..., object]) -> int:
    """Number of arguments without a default."""
    parameters = signature(function).parameters.values()
    named = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return sum(each.default is Parameter.empty and each.kind in named for each in parameters)
