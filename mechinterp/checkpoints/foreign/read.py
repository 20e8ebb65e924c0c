"""Files of other people's code: names become parts, what they leave open is tried, the best reading is the checkpoint.

What neither the file nor the reader says is assumed: `Checkpoint.assumed` holds it by name.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.foreign.assemble import architecture
from mechinterp.checkpoints.foreign.choices import choices_of, combinations, given_choices
from mechinterp.checkpoints.foreign.formats import BARE, LAYERED, OWN_LAYERS, Format, recognised
from mechinterp.checkpoints.foreign.interpret import Case, open_choices, tried
from mechinterp.checkpoints.foreign.layout import Layout, mapped, of_file
from mechinterp.checkpoints.foreign.names import is_harmless
from mechinterp.checkpoints.foreign.options import ORIENTATIONS, Hints
from mechinterp.checkpoints.foreign.parsed import Parts, parts_of
from mechinterp.checkpoints.foreign.readings import Reading, Said, advice
from mechinterp.config import ExperimentConfig, TaskConfig
from mechinterp.fields import build, flatten

TASK_KEY = "mechinterp_task"
"""Where a folder that an earlier version wrote has fields of the task."""
MOST_SHOWN = 24
"""Readings that are listed under what was assumed; the checkpoint has all."""


Told = tuple[Format, Layout, dict[str, Tensor]]
"""What `recognised` finds."""


@dataclass(frozen=True, eq=False)
class Stored:
    """The tensors of a file that does not say what they are, and what stands beside it."""

    file: Path
    tensors: Mapping[str, Tensor]
    settings: Mapping[str, object]
    """What a config.json beside the file says, {} without one."""
    step: int = 0
    """Number of updates behind the file, where its name tells it."""


def read_foreign(run: Sequence[Stored], hints: Hints) -> Checkpoint:
    """The checkpoint that the tensors of a file are, or the last one of a run, whose others are read in the same way.

    Raises:
        CheckpointError: If they fit no format, are not those of such a model, or leave too much open.
    Example:
        >>> import torch
        >>> state = torch.nn.TransformerEncoderLayer(6, 2, 8).state_dict()
        >>> read_foreign([Stored(Path("x.pt"), state, {})], Hints(n_heads=2))
        Checkpoint(x.pt: 1 layer of 2 heads with MLPs, d_x=5, context_length=40)
    """
    last = run[-1]
    with of_file(last.file):
        stated, noise = last.settings.get(TASK_KEY), last.settings.get("noise_std")
        task: dict[str, object] = {"noise_var": noise**2} if isinstance(noise, float) else {}
        task |= {**(stated if isinstance(stated, Mapping) else {}), **(hints.task or {})}
        return _read(run, replace(hints, task=task))


def _read(run: Sequence[Stored], hints: Hints) -> Checkpoint:
    last = run[-1]
    told = _told(run, hints)
    form, layout, _ = told[-1]
    given = given_choices(hints, last.settings)
    stated_axes = form.settled.get("orientation", hints.orientation)
    usual_axes = ORIENTATIONS if layout.open_axes else ORIENTATIONS[:1]
    cases: list[Case] = []
    faults: list[ValueError] = []
    for axes in usual_axes if stated_axes is None else (str(stated_axes),):
        try:
            parts = _parts_of_run(run, told, axes, hints)[-1]
            form = _own(form, parts, hints)
            choices = choices_of(parts, form, given, hints)
        except ValueError as error:
            faults.append(error)
            continue
        source = _Source(last, form, hints, str(choices["score"][0]))
        for chosen in combinations(choices, given):
            try:
                cases.append(source.case(parts, {"orientation": axes, **chosen}))
            except ValueError as error:
                faults.append(error)
    if not cases:
        raise faults[0]
    closed = {*given, *({"attend_to_self"} & form.settled.keys())}
    first, readings = tried(cases, closed, source.case)
    checkpoint = source.checkpoint(first, given, readings, open_choices(cases))
    if len(run) == 1:
        return checkpoint
    kept, axes = {}, str(first.said["orientation"])
    for each, parts in zip(run, _parts_of_run(run, told, axes, hints), strict=True):
        with of_file(each.file):
            kept[each.step] = replace(first, parts=parts).weights()
    return replace(checkpoint, kept=kept)


def _told(run: Sequence[Stored], hints: Hints) -> list[Told]:
    """What the names in every file of a run tell."""
    told = []
    for each in run:
        with of_file(each.file):
            told.append(recognised(mapped(each.tensors, hints.map or ()), hints))
    return told


def _parts_of_run(
    run: Sequence[Stored], told: Sequence[Told], axes: str, hints: Hints
) -> list[Parts]:
    """The parts of every file of a run, with biases if any of them has such that are not zero."""
    every = []
    for each, (form, layout, tensors) in zip(run, told, strict=True):
        with of_file(each.file):
            every.append(parts_of(tensors, layout, axes, hints, each.settings, form.wide_heads))
    biases = any(parts.biases for parts in every)
    return [replace(parts, biases=biases) for parts in every]


def _own(form: Format, parts: Parts, hints: Hints) -> Format:
    """The format of a file; of names that no format has, by what is there."""
    if parts.alone and hints.model:
        raise ValueError(
            f"model ({', '.join(hints.model)}) is said of layers with norms or MLPs, got one of attention alone."
        )
    if form is not LAYERED or not parts.alone:
        return form
    return OWN_LAYERS if "out.weight" in parts.layers[0] else BARE


@dataclass(frozen=True, eq=False)
class _Source:
    """What is known of a file whatever its reading."""

    stored: Stored
    form: Format
    hints: Hints
    score: str
    """The most usual score, whose task is assumed."""

    def case(self, parts: Parts, chosen: Said) -> Case:
        """The parts under a reading, with the sizes of the task.

        Raises:
            ValueError: If there is no such model or task.
        """
        sizes = self._sizes(parts, chosen)
        stated = dict(self.hints.task or {})
        model, *_ = architecture(parts, chosen, sizes, self.hints)
        most, points = model.longest_context, self.stored.settings.get("n_points")
        if isinstance(points, int) and (most is None or points - 1 <= most):
            stated = {"context_length": points - 1, **stated}
        fields = {**self.form.task(*sizes, self.score), "d_x": sizes[0], "d_y": sizes[1], **stated}
        task = build(TaskConfig, fields, "task.")
        if most is not None and "context_length" not in stated:
            task = replace(task, context_length=max(1, min(task.context_length, most)))
        ExperimentConfig(task=task, model=model)
        known = {"task.d_x", *flatten(stated, "task.")}
        if shown_responses(parts) or any(self._asked(n) is not None for n in ("d_x", "d_y")):
            known.add("task.d_y")
        return Case(parts, chosen, task, self.hints, frozenset(known))

    def _sizes(self, parts: Parts, chosen: Said) -> tuple[int, int]:
        """d_x and d_y; columns of tokens behind (x, y), where the reader says both sizes, are positions."""
        d_x, given_d_y, n = self._asked("d_x"), self._asked("d_y"), parts.d_token
        in_turn = chosen.get("layout") == "in_turn"
        room = 0 if in_turn else 1
        d_y = shown_responses(parts) or given_d_y
        if d_y is None:
            d_y = n - d_x if d_x is not None and not in_turn else 1
        if not 1 <= d_y <= n - room:
            wide = f"tokens of x are {n} wide" if in_turn else f"tokens are d_x + d_y = {n} wide"
            raise ValueError(f"d_y must lie in 1 to {n - room}, as {wide}, got {d_y}.")
        sizes = {"d_x": n - room * d_y, "d_y": d_y}
        exact = "output_column" in self.form.settled or in_turn
        if d_x is not None and given_d_y is not None and d_x < sizes["d_x"] and not exact:
            sizes["d_x"] = d_x
        for label, values in (("task.", self.hints.task or {}), ("", self.hints.given)):
            for name, size in sizes.items():
                got = values.get(name, size)
                if type(got) is int and got != size:
                    raise ValueError(f"{label}{name} must be the weights' {size}, got {got}.")
        return sizes["d_x"], sizes["d_y"]

    def _asked(self, name: str) -> int | None:
        value = self.hints.given.get(name, (self.hints.task or {}).get(name))
        return value if type(value) is int else None

    def checkpoint(
        self,
        case: Case,
        given: Mapping[str, object],
        readings: tuple[Reading, ...],
        open_ones: Collection[str],
    ) -> Checkpoint:
        """The checkpoint that a reading is, with what was assumed."""
        weights, form, step = case.weights(), self.form, self.stored.step
        config = ExperimentConfig(task=case.task, model=weights.model)
        kinds = ("task.", "train.", "seed") if case.parts.alone else ("task.",)
        values = flatten(config.to_dict()).items()
        assumed = {n: v for n, v in values if n.startswith(kinds) and n not in case.known}
        closed = {**form.settled, **given}
        usual = [n for n in form.usual if n not in closed]
        unsaid = [n for n in (*usual, *open_ones) if n in case.said and n != "scale"]
        assumed |= {f"model.{name}": case.told(name) for name in unsaid}
        if "score" in usual:
            assumed["model.score_slope"] = 1.0
        if "scale" not in closed:
            assumed["attn_scale"] = 1 / case.scale
        assumed |= {**form.beside, **_left_out(case), "step": step}
        if readings:
            assumed["readings"] = [each.to_document() for each in readings[:MOST_SHOWN]]
            if not readings[0].predicts and any(each.predicts for each in readings[1:2]):
                assumed["doubt"] = advice(readings)
        tensors = self.stored.tensors.items()
        ignored = [name for name, tensor in tensors if is_harmless(name, tensor.ndim)]
        if ignored and form.name != "transformer-lens":
            assumed["ignored"] = ignored
        file = self.stored.file
        return Checkpoint(file, config, step, weights, form.name, assumed, readings=readings)


def shown_responses(parts: Parts) -> int | None:
    """d_y, where the shapes show it: of a read-out, or of heads that write less than a token."""
    if parts.has("read_out.weight"):
        return parts.ends["read_out.weight"].shape[1]
    narrow = parts.written < parts.width and not parts.has("mlp_out.weight")
    return parts.written if narrow else None


def _left_out(case: Case) -> dict[str, object]:
    """How many columns of tokens are not read, and their largest part of the norm of queries, keys and values."""
    parts, task = case.parts, case.task
    if case.said.get("layout") == "in_turn" or task.d_x + task.d_y == parts.d_token:
        return {}
    read = task.d_x + task.d_y
    left_out: dict[str, object] = {"model.position_columns_left_out": parts.d_token - read}
    if not parts.has("read_in.weight"):
        first = [parts.layers[0][f"{name}.weight"] for name in ("query", "key", "value")]
        rest = [t[read:].norm() / t.norm().clamp(min=1e-30) for t in first]
        left_out["model.position_columns_share"] = max(each.item() for each in rest)
    return left_out
