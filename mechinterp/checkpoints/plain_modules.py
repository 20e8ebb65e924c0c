"""A plain torch module as a model for the analyses and the report.

Its attention layers are found by name, in order of running."""

import copy
import inspect
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import Parameter
from typing import TYPE_CHECKING

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from mechinterp.checkpoints.io.files import one_line
from mechinterp.checkpoints.runs import Run
from mechinterp.config import TaskConfig, TaskLike, as_task
from mechinterp.display import counted
from mechinterp.icl.prompts import Prompts, draw_prompts
from mechinterp.models.hooked.runner import HookedPredictor, query_positions
from mechinterp.models.run.predictor import ModelPredictor, Predictor

if TYPE_CHECKING:
    from mechinterp.models.hooked.module import ModuleHooks


@dataclass(frozen=True, eq=False)
class HookedModule(Run):
    """A user's module with hooks on its heads, for every analysis of heads and for `write_report`."""

    name: str
    task: TaskConfig
    """Law of its prompts."""
    hooked: HookedPredictor
    outputs: tuple[str, ...]
    """For each layer, the name of the module that takes the heads' outputs side by side."""
    history: pd.DataFrame | None = None
    """History of a module watched by a `Monitor`: one row per saved step, layer and head."""
    snapshots: Mapping[int, "HookedModule"] = field(default_factory=dict)
    """Copies of a watched module, by step."""
    step: int | None = None
    """Number of updates of a watched module."""
    law_stated: bool = False
    """True: the task was given to `hook_module`, so that it is the law of given prompts, too."""

    def __repr__(self) -> str:
        layers, heads = self.hooked.n_layers, self.hooked.n_heads
        step = "" if self.step is None else f", step {self.step}"
        return (
            f"HookedModule({self.name}: {layers} x {heads} heads, before {', '.join(self.outputs)}{step}; "
            f"task: {self.task.in_words})"
        )

    @property
    def steps(self) -> list[int]:
        """Steps of the snapshots."""
        return list(self.snapshots)

    def _after(self, step: int) -> "HookedModule":
        return self.snapshots[step]

    def __getstate__(self) -> dict[str, object]:
        """Fields for pickling.

        Raises:
            ValueError: If `read` or `embed` cannot be pickled.
        """
        embed = getattr(self.hooked.embed, "embed", None)
        for name, function in (("read", self.hooked.read), ("embed", embed)):
            try:
                pickle.dumps(function)
            except (pickle.PicklingError, AttributeError, TypeError):
                raise ValueError(
                    f"{name} must be a function defined by def in a file, so that it can be pickled, got {function!r}; or keep the module "
                    "and the arguments, and call hook_module again."
                ) from None
        return dict(vars(self))

    def at_length(self, context_length: int) -> "HookedModule":
        """The same module for a task with another context length."""
        return replace(self, task=replace(self.task, context_length=context_length))

    @property
    def in_words(self) -> str:
        """One line on the model."""
        layers, heads = counted(self.hooked.n_layers, "layer"), counted(self.hooked.n_heads, "head")
        return f"{layers} of {heads}, a PyTorch module with hooks, {self.task.in_words}"

    @property
    def model(self) -> "ModuleHooks":
        """The hooked model, for `run_with_cache` and `run_with_hooks`."""
        return self.hooked.model  # type: ignore[return-value]

    @property
    def predictor(self) -> Predictor:
        """The model in the form that the analyses use."""
        return ModelPredictor(own=self.hooked, task=self.task, law_stated=self.law_stated)

    def predict(self, prompts: Prompts) -> Float[Tensor, "batch d_y"]:
        """Prediction of y_query."""
        return self.hooked.predict(prompts)


@torch.inference_mode(False)
def hook_module(
    module: nn.Module,
    *,
    heads: int | None = None,
    read: Callable[[Tensor], Tensor] | None = None,
    embed: Callable[[Prompts], Tensor] | None = None,
    outputs: Sequence[str] = (),
    task: TaskLike | None = None,
    position: int | None = None,
) -> HookedModule:
    """A copy of a module in evaluation mode, with hooks on the heads and the stream of each
    attention layer.

    Layers are every torch.nn.MultiheadAttention, and every module with a common name for the
    outputs of heads (o_proj, out_proj, to_out, c_proj, ...) beside those for queries, keys and
    values (q_proj, to_q, W_q, qkv, c_attn, ...). The code between them is arbitrary.

    Args:
        heads: Number of heads in every layer; None means that stated by the modules (num_heads,
            n_heads, ...).
        read: Function from the module's output to the prediction, [batch, d_y]. None means the
            output itself if it has that shape, else the last d_y entries at the last position.
        embed: Function from prompts to the module's input, [batch, pos, width]; None means tokens
            (x, y), the query last with y = 0. A module that takes two inputs is called as
            `model(xs, ys)` with xs [batch, n, d_x] and ys [batch, n], or [batch, n, d_y] if it
            fails on the former.
        outputs: Names of the modules that take the heads' outputs side by side, if they are not
            found or found wrongly.
        task: Law of the prompts: a TaskConfig, a dict of its fields or a JSON file; missing fields
            are assumed to be those of the softmax paper. It stays in force for given prompts, unless
            an analysis gets task="unknown". None: assumed, and unknown for given prompts.
        position: Position of the stream at which the prediction is read, from 0, or from the end if
            negative. None means the position on which the prediction depends after the last layer.
            If it depends on several, it is the last one of a stream as long as the input; analyses
            of any other stream refuse it.
    Raises:
        ValueError: If no layer is found, a name in `outputs` is not a module, the number of heads
            is unknown, invalid, does not divide a width or differs between layers, a layer does not
            run or is not a separate module, the module does not run on its input, the prediction
            has another shape, or the position does not exist.
    See also:
        `load`, `Monitor`.
    Example:
        >>> layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        >>> hook_module(layer, task=TaskConfig())
        HookedModule(TransformerEncoderLayer: 1 x 2 heads, before self_attn; task: d_x 5, d_y 1, context_length 40, covariance identity, beta_var 0.2 (1/d_x), noise_var 0.1, query_noise yes; assumed: d_x, d_y, context_length, covariance, beta_var, noise_var, query_noise)
    """
    # Imported here because they need TransformerLens.
    from mechinterp.checkpoints.module_places import layer_names, places_of
    from mechinterp.models.hooked.explained import follow
    from mechinterp.models.hooked.module import ModuleHooks

    law_stated = task is not None
    task = as_task({} if task is None else task)
    if heads is not None and (type(heads) is not int or heads < 1):
        raise ValueError(f"heads must be an integer >= 1, got {heads!r}.")
    if position is not None and type(position) is not int:
        raise ValueError(f"position must be an integer, got {position!r}.")
    own = _uncompiled(module).eval()
    name = type(own).__name__
    parameter = next(own.parameters(), torch.empty(0, dtype=torch.float32, device="cpu"))

    enter = _Entry(task, embed, parameter.device, parameter.dtype)
    # A number of prompts that differs from the number of positions.
    trial = draw_prompts(task, 2, dtype=parameter.dtype)
    if enter(trial).shape[1] == len(trial):
        trial = draw_prompts(task, 3, dtype=parameter.dtype)
    with torch.no_grad():
        tokens, prefix = enter(trial), ""
        if embed is None and _takes_xs_and_ys(own):
            own, prefix = _of_xs_and_ys(own, tokens, task), INNER
            stated = [outputs] if isinstance(outputs, str) else outputs
            outputs = [f"{prefix}{name}" for name in stated]
        output = _output_of(own, tokens)
        if read is None:
            _require_readable(output, tokens, task)
        names = layer_names(own, outputs, tokens)
        places = places_of(own, names, heads, tokens)
        outputs = [place.output for place in places]
        model = ModuleHooks(own, places, [outputs.index(name) for name in names])
        follow(model, tokens)
        hooked = HookedPredictor(
            model=model,
            n_layers=len(names),
            n_heads=places[0].n_heads,
            embed=enter,
            read=partial(_last_entries, d_y=task.d_y) if read is None else read,
            read_every=partial(_at_every_x, d_y=task.d_y) if read is None else None,
            restarts=False,
            position=position,
            blocks=tuple(outputs.index(name) for name in names),
        )
        _note_sizes(hooked, trial)
        if position is not None:
            query_positions(hooked, trial)
    places_of_heads = tuple(each.removeprefix(prefix) for each in names)
    return HookedModule(name, task, hooked, places_of_heads, law_stated=law_stated)


INNER = "module."
"""Beginning of the names of the parts of a module inside `_OfXsAndYs`."""


class _OfXsAndYs(nn.Module):
    """A module that takes xs and ys, as one that takes tokens (x, y)."""

    def __init__(self, module: nn.Module, d_x: int, flat: bool) -> None:
        super().__init__()
        self.module, self.d_x, self.flat = module, d_x, flat

    def forward(self, tokens: Float[Tensor, "batch n d_token"]) -> object:
        ys = tokens[..., self.d_x :]
        return self.module(tokens[..., : self.d_x], ys[..., 0] if self.flat else ys)


def _of_xs_and_ys(module: nn.Module, tokens: Tensor, task: TaskConfig) -> _OfXsAndYs:
    """The module with ys of shape [batch, n] if it runs on that, else [batch, n, d_y]."""
    flat, whole = (_OfXsAndYs(module, task.d_x, flat) for flat in (task.d_y == 1, False))
    try:
        _output_of(flat, tokens)
    except ValueError:
        with suppress(ValueError):
            _output_of(whole, tokens)
            return whole
    return flat


def _takes_xs_and_ys(module: nn.Module) -> bool:
    """True if the module's forward needs two inputs."""
    given = inspect.signature(module.forward).parameters.values()
    places = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    needed = [each for each in given if each.kind in places and each.default is Parameter.empty]
    return len(needed) == 2


def _uncompiled(module: nn.Module) -> nn.Module:
    """A copy without torch.compile, which bypasses hooks."""
    own = copy.deepcopy(getattr(module, "_orig_mod", module))
    for part in own.modules():
        for name, child in part.named_children():
            setattr(part, name, getattr(child, "_orig_mod", child))
    return own


@dataclass(frozen=True, eq=False)
class _Entry:
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


def _require_readable(output: object, tokens: Tensor, task: TaskConfig) -> None:
    """Refuse an output whose shape does not show the place of the prediction."""
    if not isinstance(output, Tensor):
        raise ValueError(
            f"read must be given for a module whose output is not a tensor, got {type(output).__name__}."
        )
    shape, n_prompts = tuple(output.shape), len(tokens)
    # One prediction, or one number for every token or for every x.
    numbers = (1, tokens.shape[1], task.context_length + 1) if task.d_y == 1 else (task.d_y,)
    flat = task.d_y == 1 and shape == (n_prompts,)
    if not flat and len(shape) < 3 and shape not in [(n_prompts, each) for each in numbers]:
        raise ValueError(
            f"read must be given: the output {list(shape)} of {n_prompts} prompts is neither a prediction [batch, {task.d_y}] nor one "
            f"number for each of {tokens.shape[1]} positions."
        )


def _last_entries(output: Tensor, d_y: int) -> Float[Tensor, "batch d_y"]:
    """Prediction in an output [batch], [batch, d_y], [batch, pos] or [batch, pos, width]."""
    if output.ndim == 1:
        return output[:, None]
    return (output if output.ndim == 2 else output[:, -1])[:, -d_y:]


def _at_every_x(output: Tensor, n_pairs: int, d_y: int) -> Tensor:
    """Output at every x, if it has one row for each x or one for each of x and y in turn."""
    rows = output[..., None] if output.ndim == 2 else output
    return (rows if rows.shape[1] == n_pairs + 1 else rows[:, ::2])[..., -d_y:]


def _output_of(module: nn.Module, inputs: Tensor) -> object:
    """Output of the module; its own error message if it does not run."""
    try:
        return module(inputs)
    except (TypeError, RuntimeError, IndexError, AssertionError) as error:
        raise ValueError(
            f"module must run on the input {list(inputs.shape)} of {len(inputs)} prompts, got: {one_line(error)}; "
            "use embed= to make the input from prompts, and task= to state d_x and d_y."
        ) from None


def _note_sizes(hooked: HookedPredictor, prompts: Prompts) -> None:
    """Store the sizes of the stream and of heads where TransformerLens' tools look for them.

    Raises:
        ValueError: If the prediction does not have the shape of y_query.
    """
    names = [f"blocks.0.{name}" for name in ("hook_resid_pre", "attn.hook_z")]
    output, (stream, z) = hooked.activations(prompts, names)
    hooked.prediction(output, prompts)
    tokens = hooked.embed(prompts)
    sizes = {"d_model": stream.shape[-1], "d_head": z.shape[-1], "d_token": tokens.shape[-1]}
    vars(hooked.model.cfg).update(sizes, n_ctx=2 * tokens.shape[1])
