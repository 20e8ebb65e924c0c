"""Checks of the interface that TransformerLens' tools need."""

import io
import re
import warnings
from contextlib import redirect_stderr
from dataclasses import dataclass

import pandas as pd
import torch
from transformer_lens.utilities import get_act_name

from mechinterp.display import Result
from mechinterp.models.compatibility import model as conformance_model
from mechinterp.models.compatibility import tools as conformance_tools
from mechinterp.models.compatibility.requirements import Check, Module
from mechinterp.models.run.predictor import Source, predictor_of

CHECKS: dict[str, Check] = conformance_model.CHECKS | conformance_tools.CHECKS


@dataclass(frozen=True, eq=False, repr=False)
class Compatibility(Result):
    """Results of the compatibility checks of a hooked model."""

    names: tuple[str, ...]
    """Names of the checks, in order."""
    reasons: tuple[str, ...]
    """Reason of each failure; empty for checks that passed."""
    lacking: tuple[str, ...] = ()
    """Hook points and attributes that a check needed and the model lacks."""

    def __repr__(self) -> str:
        failed = [f"\n  {name}: {reason}" for name, reason in self.failures.items()]
        passed = len(self.names) - len(failed)
        lacks = f"\n  it lacks: {', '.join(self.lacking)}" if self.lacking else ""
        return f"Compatibility({passed} of {len(self.names)} checks pass){lacks}{''.join(failed)}"

    @property
    def failures(self) -> dict[str, str]:
        """Reasons by name, for the checks that failed."""
        reasons = zip(self.names, self.reasons, strict=True)
        return {name: reason for name, reason in reasons if reason}

    def to_frame(self) -> pd.DataFrame:
        """One row per check."""
        passed = [not reason for reason in self.reasons]
        return pd.DataFrame({"name": self.names, "passed": passed, "reason": self.reasons})


def check_compatible(model: Module | Source) -> Compatibility:
    """Which TransformerLens tools work on a hooked model with vector inputs, and why the others fail.

    Args:
        model: Any module, or an object that contains one (a checkpoint). Its weights and switches are left unchanged.
            The inputs are random vectors [batch, pos, d_model].
    Example:
        >>> from mechinterp import load
        >>> check_compatible(load("checkpoints/softmax-h2-s0").model)
        Compatibility(40 of 40 checks pass)
    """
    if not isinstance(model, torch.nn.Module):
        model = predictor_of(model).hooked.model
    plain = not hasattr(model, "hook_dict")
    lacking = ["hook_dict (mechinterp.hook_module hooks a plain module)"] if plain else []
    reasons = tuple(_reason(check, model, lacking) for check in CHECKS.values())
    return Compatibility(tuple(CHECKS), reasons, tuple(dict.fromkeys(lacking)))


def _reason(check: Check, model: Module, lacking: list[str]) -> str:
    """Reason why the check fails, in one line; empty if it passes. Missing names are appended to `lacking`."""
    try:
        with warnings.catch_warnings(), torch.enable_grad(), redirect_stderr(io.StringIO()):
            # The checks decide, not the model's warnings; TransformerLens' sweeps draw progress bars.
            warnings.simplefilter("ignore")
            check(model)
    except Exception as error:  # a third-party module may raise anything
        text = " ".join(str(error).split())
        lacking += _lacks(error)
        told = isinstance(error, AssertionError) and text
        return text if told else f"{type(error).__name__}: {text}"
    return ""


def _lacks(error: Exception) -> list[str]:
    """Name of the missing hook point or attribute, as a list; empty if the error is of another kind."""
    if isinstance(error, AttributeError) and error.name is not None:
        return [f"{type(error.obj).__name__}.{error.name}"]
    if isinstance(error, KeyError) and error.args:
        key = error.args[0]
        name = get_act_name(*key) if isinstance(key, tuple) else str(key)
        quoted = re.search(r"'([\w.]+)'", name)  # a name within a sentence
        return [quoted[1] if quoted else name]
    return []
