"""Checks of the interface that TransformerLens' tools need."""

import io
import warnings
from contextlib import redirect_stderr

import torch

from tests.conformance import model as conformance_model
from tests.conformance import tools as conformance_tools
from tests.conformance.requirements import Check, Module

CHECKS: dict[str, Check] = conformance_model.CHECKS | conformance_tools.CHECKS


def failures(model: Module) -> dict[str, str]:
    """Why each check fails on a hooked module that takes vectors, by the name of the check; empty if all pass.

    Args:
        model: It keeps its weights and switches. Its inputs [batch, pos, d_model] are random.
    """
    reasons = {name: _reason(check, model) for name, check in CHECKS.items()}
    return {name: reason for name, reason in reasons.items() if reason}


def _reason(check: Check, model: Module) -> str:
    """Why the check fails; empty if it passes."""
    try:
        with warnings.catch_warnings(), torch.enable_grad(), redirect_stderr(io.StringIO()):
            # A check may turn warnings on again; the sweeps of TransformerLens draw bars.
            warnings.simplefilter("ignore")
            check(model)
    except Exception as error:  # whatever a module of any class may raise
        return str(error) or type(error).__name__
    return ""
