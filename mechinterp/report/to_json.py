"""Results as JSON documents, the interface for scripts: their common header and their encoding."""

import json
import math
from inspect import isroutine
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from mechinterp.analysis.result import Finding
    from mechinterp.checkpoints.checkpoint import Checkpoint
    from mechinterp.checkpoints.modules.hooked import HookedModule
    from mechinterp.checkpoints.native.folder import Outline
    from mechinterp.models.run.predictor import Learner

SURE_GROUNDS = ("proven", "stated", "known")
"""Grounds of the settings that are not assumed; JSON documents show those of external files."""
SCHEMA_VERSION = 3
"""Version 2 adds to version 1 the layer_rise of ablate and every table that `analyse` prints."""


def to_json(name: str, model: "Checkpoint | HookedModule | Learner", result: "Finding") -> dict:
    """Document with the result of an analysis of a model."""
    from mechinterp.analysis.result import fields_of  # loads plotly, which `info` needs not

    return {**header(model), "analysis": name, **fields_of(name, result)}


def header(model: "Checkpoint | HookedModule | Outline | Learner") -> dict:
    """Common first fields of every document about a model, or a function of prompts."""
    if isroutine(model):
        path = f"{model.__module__}:{model.__name__}"
        return {"schema_version": SCHEMA_VERSION, "path": path, "format": "function"}
    model = cast("Checkpoint | HookedModule | Outline", model)
    task, identity = model.task, model.identity
    number = {"task.beta_var": task.beta_variance} if "task.beta_var" in model.assumed else {}
    return {
        "schema_version": SCHEMA_VERSION,
        **{name: identity.pop(name) for name in ("path", "format")},
        "assumed": {**getattr(model, "assumed_and_doubt", model.assumed), **number},
        **{n: dict(v) for n in SURE_GROUNDS if (v := model.grounds.get(n))},
        **identity,
    }


def dumps(document: object) -> str:
    """The document as JSON text; NaN and infinities, which JSON does not have, become null."""
    return json.dumps(_plain(document), indent=2, allow_nan=False)


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if hasattr(value, "tolist"):  # an array or a numpy scalar
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
