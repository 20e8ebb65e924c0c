"""Files of other people's code: names become parts, what they leave open is tried, the best reading is the checkpoint.

What neither the file nor the reader says is assumed: `Checkpoint.assumed` holds it by name.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch import Tensor

from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.foreign.assemble import architecture
from mechinterp.checkpoints.foreign.choices import choices_of, combinations, given_choices
from mechinterp.checkpoints.foreign.formats import BARE, LAYERED, OWN_LAYERS, Format, recognised
from mechinterp.checkpoints.foreign.interpret import Case, tried
from mechinterp.checkpoints.foreign.layout import mapped
from mechinterp.checkpoints.foreign.names import is_harmless
from mechinterp.checkpoints.foreign.options import ORIENTATIONS, Hints
from mechinterp.checkpoints.foreign.parsed import Parts, parts_of
from mechinterp.checkpoints.foreign.readings import Reading, Said, advice
from mechinterp.checkpoints.io.errors import CheckpointError, one_line
from mechinterp.config import ExperimentConfig, TaskConfig
from mechinterp.fields import build, flatten

TASK_KEY = "mechinterp_task"
"""Where a folder that an earlier version wrote has fields of the task."""
MOST_SHOWN = 24
"""Readings that are listed under what was assumed; the checkpoint has all."""


@dataclass(frozen=True, eq=False)
class Stored:
    """The tensors of a file that does not say what they are, and what stands beside it."""

    path: Path
    """What the reader names: the file or its folder."""
    file: Path
    tensors: Mapping[str, Tensor]
    settings: Mapping[str, object]
    """What a config.json beside the file says, {} without one."""
    step: int = 0


def read_foreign(
    tensors: Mapping[str, Tensor],
    file: Path,
    *,
    hints: Hints,
    settings: Mapping[str, object],
    others: Sequence[Stored] = (),
    step: int = 0,
) -> Checkpoint:
    """The checkpoint that the tensors of a file are.

    Args:
        settings: What a config.json beside the file says, {} without one.
        others: Files of earlier steps of a run, whose tensors are read in the same way.
        step: Number of updates behind the file, where its name tells it.
    Raises:
        CheckpointError: If they fit no format, are not those of such a model, or leave too much open.
    Example:
        >>> import torch
        >>> state = torch.nn.TransformerEncoderLayer(6, 2, 8).state_dict()
        >>> read_foreign(state, Path("x.pt"), hints=Hints(n_heads=2), settings={})
        Checkpoint(x.pt: 1 layer of 2 heads with MLPs, d_x=5, context_length=40)
    """
    stated = settings.get(TASK_KEY)
    if isinstance(stated, Mapping):
        hints = replace(hints, task={**stated, **(hints.task or {})})
    run = [*others, Stored(file, file, tensors, settings, step)]
    form, layout, _ = recognised(mapped(tensors, hints.map or (), file), file, hints)
    given = given_choices(form, hints, settings, file)
    stated_axes = form.settled.get("orientation", hints.orientation)
    usual_axes = ORIENTATIONS if layout.open_axes else ORIENTATIONS[:1]
    cases: list[Case] = []
    faults: list[CheckpointError] = []
    for axes in usual_axes if stated_axes is None else (stated_axes,):
        try:
            parts = _parts_of_run(run, str(axes), hints)[-1]
            form = _own(form, parts, file, hints)
            choices = choices_of(parts, form, given, hints, file)
        except CheckpointError as error:
            faults.append(error)
            continue
        source = _Source(file, form, hints, settings, str(choices["score"][0]))
        for said in combinations(choices, given):
            try:
                cases.append(source.case(parts, {"orientation": str(axes), **said}))
            except CheckpointError as error:
                faults.append(error)
    if not cases:
        raise faults[0]
    closed = {*given, *({"attend_to_self"} & form.settled.keys())}
    first, readings = tried(cases, closed, source.case, file)
    found = source.checkpoint(first, given, readings, _open(cases))
    found = replace(found, step=step, assumed={**found.assumed, "step": step})
    if others:
        every = _parts_of_run(run, str(first.said["orientation"]), hints)
        kept = zip(run, every, strict=True)
        found = replace(
            found, kept={e.step: replace(first, parts=p, file=e.file).weights() for e, p in kept}
        )
    ignored = [name for name, tensor in tensors.items() if is_harmless(name, tensor.ndim)]
    if not ignored or form.name == "transformer-lens":
        return found
    return replace(found, assumed={**found.assumed, "ignored": ignored})


def _parts_of_run(run: Sequence[Stored], axes: str, hints: Hints) -> list[Parts]:
    """The parts of every file of a run, with biases if any of them has such that are not zero."""
    found = []
    for each in run:
        tensors = mapped(each.tensors, hints.map or (), each.file)
        form, layout, useful = recognised(tensors, each.file, hints)
        parts = parts_of(
            useful,
            layout,
            each.file,
            axes=axes,
            hints=hints,
            settings=each.settings,
            wide_heads=form.wide_heads,
        )
        found.append(parts)
    biases = any(parts.biases for parts in found)
    return [replace(parts, biases=biases) for parts in found]


def _own(form: Format, parts: Parts, file: Path, hints: Hints) -> Format:
    """The format of a file; of names that no format has, by what is there."""
    if parts.alone and hints.model:
        raise CheckpointError(
            f"{file}: model ({', '.join(hints.model)}) is said of layers with norms or MLPs, got one of attention alone."
        )
    if form is not LAYERED or not parts.alone:
        return form
    return OWN_LAYERS if "out.weight" in parts.layers[0] else BARE


@dataclass(frozen=True, eq=False)
class _Source:
    """What is known of a file whatever its reading."""

    file: Path
    form: Format
    hints: Hints
    settings: Mapping[str, object]
    score: str
    """The most usual score, whose task is assumed."""

    def case(self, parts: Parts, said: Said) -> Case:
        """The parts under a reading, with the sizes of the task.

        Raises:
            CheckpointError: If there is no such model or task.
        """
        d_x, d_y = self._sizes(parts, said)
        task = dict(self.hints.task or {})
        try:
            model, *_ = architecture(parts, said, (d_x, d_y), self.hints)
            most = model.longest_context
            fields = {
                **self.form.task(d_x, d_y, self.score),
                **self._stated(most),
                "d_x": d_x,
                "d_y": d_y,
                **task,
            }
            filled = build(TaskConfig, fields, "task.")
            if most is not None and "context_length" not in task:
                filled = replace(filled, context_length=max(1, min(filled.context_length, most)))
            ExperimentConfig(task=filled, model=model)
        except ValueError as error:
            raise CheckpointError(f"{self.file}: {one_line(error)}") from None
        return Case(parts, said, filled, self.hints, self.file)

    def _stated(self, most: int | None) -> dict[str, object]:
        """Fields of the task that settings beside the weights state, a context no longer than there are positions."""
        noise, points = self.settings.get("noise_std"), self.settings.get("n_points")
        found: dict[str, object] = {}
        if isinstance(points, int) and (most is None or points - 1 <= most):
            found["context_length"] = points - 1
        if isinstance(noise, float):
            found["noise_var"] = noise**2
        return found

    def _sizes(self, parts: Parts, said: Said) -> tuple[int, int]:
        """d_x and d_y; columns of tokens behind (x, y), where the reader says both sizes, are positions."""
        given = {n: self._asked(n) for n in ("d_x", "d_y")}
        d_x, d_y, n = given["d_x"], shown_responses(parts) or given["d_y"], parts.d_token
        in_turn = said.get("layout") == "in_turn"
        if d_y is None:
            d_y = n - d_x if d_x is not None and not in_turn else 1
        most = n if in_turn else n - 1
        if not 1 <= d_y <= most:
            wide = f"tokens of x are {n} wide" if in_turn else f"tokens are d_x + d_y = {n} wide"
            raise CheckpointError(
                f"{self.file}: d_y must lie in 1 to {most}, as {wide}, got {d_y}."
            )
        sizes = {"d_x": n if in_turn else n - d_y, "d_y": d_y}
        exact = "output_column" in self.form.settled or in_turn
        if None not in given.values() and d_x is not None and d_x < sizes["d_x"] and not exact:
            sizes["d_x"] = d_x
        for label, values in (("task.", self.hints.task or {}), ("", self.hints.given)):
            for name, size in sizes.items():
                got = values.get(name, size)
                if type(got) is int and got != size:
                    raise CheckpointError(
                        f"{self.file}: {label}{name} must be the weights' {size}, got {got}."
                    )
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
        weights = case.weights()
        config = ExperimentConfig(task=case.task, model=weights.model)
        assumed = self._assumed_task(case, config)
        usual = [n for n in self.form.usual if n not in {**self.form.settled, **given}]
        unsaid = [n for n in (*usual, *open_ones) if n in case.said and n != "scale"]
        assumed |= {f"model.{name}": case.said[name] for name in unsaid}
        if "score" in usual:
            assumed["model.score_slope"] = 1.0
        if "scale" not in {**self.form.settled, **given}:
            scale = case.said["scale"]
            assert not isinstance(scale, str)
            assumed["attn_scale"] = 1 / (case.parts.d_head**-0.5 if scale is None else scale)
        assumed |= {**self.form.beside, **_left_out(case), "step": 0}
        if readings:
            assumed["readings"] = [each.to_document() for each in readings[:MOST_SHOWN]]
            if not readings[0].predicts and len(readings) > 1 and readings[1].predicts:
                assumed["doubt"] = advice(readings)
        return Checkpoint(self.file, config, 0, weights, self.form.name, assumed, readings=readings)

    def _assumed_task(self, case: Case, config: ExperimentConfig) -> dict[str, object]:
        values = flatten(asdict(config))
        said = {"task.d_x", *flatten(dict(self.hints.task or {}), "task.")}
        if shown_responses(case.parts) or any(self._asked(n) is not None for n in ("d_x", "d_y")):
            said.add("task.d_y")
        said |= {f"task.{name}" for name in self._stated(config.model.longest_context)}
        kinds = ("task.", "train.", "seed") if case.parts.alone else ("task.",)
        return {n: v for n, v in values.items() if n.startswith(kinds) and n not in said}


def shown_responses(parts: Parts) -> int | None:
    """d_y, where the shapes show it: of a read-out, or of heads that write less than a token."""
    if parts.has("read_out.weight"):
        return parts.ends["read_out.weight"].shape[1]
    narrow = parts.written < parts.width and not parts.has("mlp_out.weight")
    return parts.written if narrow else None


def _open(cases: Sequence[Case]) -> list[str]:
    return [n for n in cases[0].said if len({case.said.get(n) for case in cases}) > 1]


def _left_out(case: Case) -> dict[str, object]:
    """How many columns of tokens are not read, and their largest part of the norm of queries, keys and values."""
    parts, task = case.parts, case.task
    if case.said.get("layout") == "in_turn" or task.d_x + task.d_y == parts.d_token:
        return {}
    said: dict[str, object] = {
        "model.position_columns_left_out": parts.d_token - task.d_x - task.d_y
    }
    if not parts.has("read_in.weight"):
        read = [parts.layers[0][f"{name}.weight"] for name in ("query", "key", "value")]
        rest = [t[task.d_x + task.d_y :].norm() / t.norm().clamp(min=1e-30) for t in read]
        said["model.position_columns_share"] = max(each.item() for each in rest)
    return said
