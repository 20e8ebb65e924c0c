"""One reading of a file: its parts under one value of each choice, with the task and the model that follow."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.checkpoints.foreign.options import Hints
from mechinterp.checkpoints.foreign.readings.assemble import Tried, architecture, assembled, columns
from mechinterp.checkpoints.foreign.readings.choices import Choices, refinements
from mechinterp.checkpoints.foreign.tensors.formats import Format
from mechinterp.checkpoints.foreign.tensors.parts import Parts
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.fields import build, flatten
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.predictor import predictor_of
from mechinterp.models.weights import Weights


@dataclass(frozen=True, eq=False)
class FileFacts:
    """Facts about a file that hold for all its readings."""

    form: Format
    choices: Choices
    given: Mapping[str, object]
    """Choices that the user or the file's settings state."""
    hints: Hints
    """Arguments of `load`; `task` has the fields that the file's settings state, too."""
    settings: Mapping[str, object]
    usual_length: int | None = None
    """Number of pairs to assume; None: that of the format's paper."""
    _tasks: dict[object, tuple[TaskConfig, frozenset[str]]] = field(
        default_factory=dict, init=False
    )

    @property
    def closed(self) -> Mapping[str, object]:
        """Choices that are stated, or that the format fixes."""
        return {**self.form.fixed, **self.given}

    @cached_property
    def stated(self) -> tuple[int | None, int | None]:
        """d_x and d_y, where the user or the file states them."""
        given = {**(self.hints.task or {}), **self.hints.given}
        d_x, d_y = (given.get(name) for name in ("d_x", "d_y"))
        return (d_x if type(d_x) is int else None, d_y if type(d_y) is int else None)

    @property
    def context_length(self) -> int | None:
        """Number of pairs in a prompt, if the file's settings state it."""
        points, length = (self.settings.get(name) for name in ("n_points", "context_length"))
        length = points - 1 if isinstance(points, int) else length
        return length if isinstance(length, int) else None

    def task(self, sizes: tuple[int, int], most: int | None) -> tuple[TaskConfig, frozenset[str]]:
        """Task of these sizes with at most so many pairs, made once; and its stated fields, such as task.d_x."""
        if (sizes, most) not in self._tasks:
            stated, length = dict(self.hints.task or {}), self.context_length
            if length is not None and (most is None or length <= most):
                stated = {"context_length": length, **stated}
            paper = self.form.task
            usual = {} if paper is None else paper(*sizes, str(self.choices["score"][0]))
            if self.usual_length is not None:
                usual["context_length"] = self.usual_length
            fields = {**usual, "d_x": sizes[0], "d_y": sizes[1], **stated}
            task = build(TaskConfig, fields, "task.")
            if most is not None and "context_length" not in stated:
                task = replace(task, context_length=max(1, min(task.context_length, most)))
            self._tasks[sizes, most] = task, frozenset(flatten(stated, "task."))
        return self._tasks[sizes, most]

    def room(self, parts: Parts, tried: Tried) -> int | None:
        """Largest number of pairs that fits the number of positions in the file's settings.

        None if a table of positions shows it, as Garg et al. state half of the rows of their table.
        """
        room = self.settings.get("n_positions")
        if not isinstance(room, int) or room < 2 or "pos_embed.W_pos" in parts.ends:
            return None
        return (room - 1) // 2 if tried.get("layout") == "in_turn" else room - 1

    def sizes(self, parts: Parts, tried: Tried) -> tuple[int, int]:
        """d_x and d_y; if the user states both and the token is longer, its further columns are
        positions."""
        (stated_d_x, stated_d_y), n = self.stated, parts.d_token
        in_turn = tried.get("layout") == "in_turn"
        room = 0 if in_turn else 1
        d_y = parts.shown_responses or stated_d_y
        if d_y is None:
            d_y = 1 if stated_d_x is None or in_turn else n - stated_d_x
        if not 1 <= d_y <= n - room:
            wide = f"tokens of x are {n} wide" if in_turn else f"tokens are d_x + d_y = {n} wide"
            raise ValueError(f"d_y must lie in 1 to {n - room}, as {wide}, got {d_y}.")
        d_x = n - room * d_y
        exact = "output_column" in self.form.fixed or in_turn
        if stated_d_x is not None and stated_d_y is not None and not exact:
            d_x = min(d_x, stated_d_x)
        for label, values in (("task.", self.hints.task or {}), ("", self.hints.given)):
            for name, size in {"d_x": d_x, "d_y": d_y}.items():
                got = values.get(name, size)
                if type(got) is int and got != size:
                    raise ValueError(f"{label}{name} must be the weights' {size}, got {got}.")
        return d_x, d_y


@dataclass(frozen=True, eq=False)
class Case:
    """Parts of a file under one reading."""

    source: FileFacts
    parts: Parts
    tried: Tried
    model: ModelConfig
    task: TaskConfig
    known: frozenset[str]
    """Fields of the task that are stated or that shapes show, such as task.d_x."""
    stated: frozenset[str]
    """Fields of the task that the file's settings or the user state."""
    _predicted: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)
    """Predictions by number of prompts, as a case is compared several times."""

    def changed(self, changes: Iterable[Tried]) -> list["Case"]:
        """The case with each of these changes to its choices, where there is such a model."""
        cases = []
        for change in changes:
            with suppress(ValueError):  # rotary positions, for one, need heads of even width
                cases.append(case_of(self.source, self.parts, {**self.tried, **change}))
        return cases

    def refined(self) -> list["Case"]:
        """Cases with choices that leave no trace in names and shapes."""
        source = self.source
        return self.changed(refinements(self.tried, self.parts, source.form, source.closed))

    def predicted(self, prompts: Prompts) -> Tensor:
        """Predictions for the evaluation prompts of its task, in double precision.

        Raises:
            ValueError: If the weights are not finite.
        """
        count = len(prompts)
        if count not in self._predicted:
            self._predicted[count] = predicted_by(self.weights(), prompts)
        return self._predicted[count]

    @property
    def key(self) -> tuple[object, ...]:
        """Key of the parts and choices, equal for equal cases."""
        return (id(self.parts), *sorted(self.tried.items(), key=lambda item: item[0]))

    def weights(self) -> Weights:
        """Weights of this reading."""
        return assembled(self.parts, self.tried, (self.task.d_x, self.task.d_y), self.model)

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        scale = self.tried["scale"]
        return self.parts.d_head**-0.5 if scale is None else float(scale)

    def value_of(self, name: str) -> str | float | bool | None:
        """Value of a choice; the default scale and the entry of y are given as numbers."""
        if name == "scale":
            return self.scale
        if name == "output_column" and self.tried[name] is None:
            return columns(self.parts, self.tried, (self.task.d_x, self.task.d_y))[1][0]
        return self.tried.get(name)


def case_of(source: FileFacts, parts: Parts, tried: Tried) -> Case:
    """The parts under one reading, with the sizes of the task.

    Raises:
        ValueError: If no model or task has these sizes.
    """
    sizes = source.sizes(parts, tried)
    model = architecture(parts, tried, sizes)
    limits = (model.longest_context, source.room(parts, tried))
    task, known = source.task(sizes, min((n for n in limits if n is not None), default=None))
    ExperimentConfig(task=task, model=model)
    d_x, d_y = source.stated
    stated = known | {f"task.{n}" for n in ("d_x", "d_y") if n in source.hints.given}
    if parts.shown_responses or (d_x, d_y) != (None, None):
        in_doubt = len(source.choices.get("layout", ())) > 1 and d_x is None
        known |= {"task.d_y"} if in_doubt else {"task.d_x", "task.d_y"}
    return Case(source, parts, tried, model, task, known, stated)


def predicted_by(weights: Weights, prompts: Prompts) -> Float[Tensor, "batch d_y"]:
    """Predictions in double precision; one layer of attention also runs in it."""
    if weights.model.one_attention:
        weights = weights.to(torch.float64)
    return predictor_of(weights).predict(prompts.to(weights.dtype)).double()
