"""Checks of the interface that TransformerLens' tools need."""

import io
import re
import warnings
from contextlib import redirect_stderr
from dataclasses import dataclass

import torch
from transformer_lens.utilities import get_act_name

from tests.conformance import model as conformance_model
from tests.conformance import tools as conformance_tools
from tests.conformance.requirements import Check, Module

CHECKS: dict[str, Check] = conformance_model.CHECKS | conformance_tools.CHECKS


@dataclass(frozen=True)
class Conformance:
    """Which checks a hooked model passes."""

    failures: dict[str, str]
    """Why a check failed, by its name; a check that passed is not here."""
    lacking: tuple[str, ...]
    """Hook points and attributes that a check needs and did not find."""


def check_conformance(model: Module) -> Conformance:
    """What works with TransformerLens' tools on a hooked module that takes vectors, and why the rest does not.

    Args:
        model: It keeps its weights and switches. Its inputs [batch, pos, d_model] are random.
    """
    plain = not hasattr(model, "hook_dict")
    lacking = ["hook_dict (mechinterp.hook_module hooks a plain module)"] if plain else []
    reasons = {name: _reason(check, model, lacking) for name, check in CHECKS.items()}
    failures = {name: reason for name, reason in reasons.items() if reason}
    return Conformance(failures, tuple(dict.fromkeys(lacking)))


def _reason(check: Check, model: Module, lacking: list[str]) -> str:
    """Why the check fails, in one line; empty if it passes. It adds what the model lacks to a list."""
    try:
        with warnings.catch_warnings(), torch.enable_grad(), redirect_stderr(io.StringIO()):
            # A check may turn warnings on again; the sweeps of TransformerLens draw bars.
            warnings.simplefilter("ignore")
            check(model)
    except Exception as error:  # whatever a module of any class may raise
        text = " ".join(str(error).split())
        lacking += _lacks(error)
        by_check = isinstance(error, AssertionError) and text
        return text if by_check else f"{type(error).__name__}: {text}"
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
