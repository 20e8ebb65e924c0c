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
    """Which checks a hooked model passes."""

    names: tuple[str, ...]
    """What is checked, in order."""
    reasons: tuple[str, ...]
    """Why a check failed; empty where it passed."""
    lacking: tuple[str, ...] = ()
    """Hook points and attributes that a check asked for and did not find."""

    def __repr__(self) -> str:
        failed = [f"\n  {name}: {reason}" for name, reason in self.failures.items()]
        passed = len(self.names) - len(failed)
        lacks = f"\n  it lacks: {', '.join(self.lacking)}" if self.lacking else ""
        return f"Compatibility({passed} of {len(self.names)} checks pass){lacks}{''.join(failed)}"

    @property
    def failures(self) -> dict[str, str]:
        """The reasons by the names of the checks that failed."""
        reasons = zip(self.names, self.reasons, strict=True)
        return {name: reason for name, reason in reasons if reason}

    def to_frame(self) -> pd.DataFrame:
        """One row per check."""
        passed = [not reason for reason in self.reasons]
        return pd.DataFrame({"name": self.names, "passed": passed, "reason": self.reasons})


def check_compatible(model: Module | Source) -> Compatibility:
    """What works with TransformerLens' tools on a hooked model that takes vectors, and what not, and why.

    Args:
        model: Any module, or what holds one (a checkpoint); it is left as it was, its weights and switches included. The inputs are
            [batch, pos, d_model], drawn at random.
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
    """Why the check fails, in one line; empty if it passes. What it lacks is added to a list."""
    try:
        with warnings.catch_warnings(), torch.enable_grad(), redirect_stderr(io.StringIO()):
            # What a model warns of is left to the check; the sweeps of TransformerLens draw bars.
            warnings.simplefilter("ignore")
            check(model)
    except Exception as error:  # whatever a module of any class may raise
        text = " ".join(str(error).split())
        lacking += _lacks(error)
        told = isinstance(error, AssertionError) and text
        return text if told else f"{type(error).__name__}: {text}"
    return ""


def _lacks(error: Exception) -> list[str]:
    """The hook point or attribute that was not found."""
    if isinstance(error, AttributeError) and error.name is not None:
        return [f"{type(error.obj).__name__}.{error.name}"]
    if isinstance(error, KeyError) and error.args:
        key = error.args[0]
        name = get_act_name(*key) if isinstance(key, tuple) else str(key)
        quoted = re.search(r"'([\w.]+)'", name)  # within a sentence
        return [quoted[1] if quoted else name]
    return []
