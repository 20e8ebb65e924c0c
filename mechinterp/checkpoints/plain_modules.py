"""A plain torch module as a model that the analyses and the report take.

Its layers of attention are found by their names, in the order in which they run.
"""

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from mechinterp.checkpoints.io.errors import one_line
from mechinterp.checkpoints.runs import Run
from mechinterp.config import TaskConfig, TaskLike, as_task
from mechinterp.display import counted
from mechinterp.icl.prompts import Prompts, sample_prompts
from mechinterp.models.hooked.query_position import query_positions
from mechinterp.models.hooked.runner import HookedPredictor
from mechinterp.models.run.predictor import Predictor
from mechinterp.models.tokens import require_sizes

if TYPE_CHECKING:
    from mechinterp.models.hooked.module import ModuleHooks


@dataclass(frozen=True, eq=False)
class HookedModule(Run):
    """A module of somebody's with hooks on its heads; every analysis of heads and `write_report` take it."""

    name: str
    task: TaskConfig
    """The law of its prompts."""
    hooked: HookedPredictor
    outputs: tuple[str, ...]
    """Of each layer the name of the module that takes the heads' outputs side by side."""
    history: pd.DataFrame | None = None
    """Of a module that a `Monitor` watched: a row per kept step, layer and head."""
    snapshots: Mapping[int, "HookedModule"] = field(default_factory=dict)
    """Of such a module as it was, by step."""
    step: int | None = None
    """Number of updates behind such a module."""

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
        """The fields.

        Raises:
            ValueError: If `read` or `embed` cannot be pickled.
        """
        embed = getattr(self.hooked.embed, "embed", None)
        for name, function in (("read", self.hooked.read), ("embed", embed)):
            try:
                pickle.dumps(function)
            except (pickle.PicklingError, AttributeError, TypeError):
                raise ValueError(
                    f"{name} must be a function that a file defines with def, so that it can be pickled, got {function!r}; or keep "
                    "the module and the arguments, and call hook_module again."
                ) from None
        return dict(vars(self))

    def at_length(self, context_length: int) -> "HookedModule":
        """The same module of a task with another context length."""
        return replace(self, task=replace(self.task, context_length=context_length))

    @property
    def in_words(self) -> str:
        """One line on what the model is."""
        layers, heads = counted(self.hooked.n_layers, "layer"), counted(self.hooked.n_heads, "head")
        return f"{layers} of {heads}, a PyTorch module with hooks, {self.task.in_words}"

    @property
    def model(self) -> "ModuleHooks":
        """The hooked model, for `run_with_cache` and `run_with_hooks`."""
        return self.hooked.model  # type: ignore[return-value]

    @property
    def predictor(self) -> Predictor:
        """The model as the analyses take it."""
        hooked = self.hooked
        return Predictor(hooked.n_layers, hooked.n_heads, lambda: hooked, task=self.task)

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
    """A copy of a module, in evaluation mode, with hooks on the heads and the stream of each layer of attention.

    Layers are every torch.nn.MultiheadAttention, and every module with a usual name for the outputs of heads (o_proj,
    out_proj, to_out, c_proj, ...) beside those for queries, keys and values (q_proj, to_q, W_q, qkv, c_attn, ...). What is
    between them may be anything.

    Args:
        heads: Heads of every layer; None: as the modules of attention say it (num_heads, n_heads, ...).
        read: From the module's output to the prediction, [batch, d_y]; None: the output itself if it is that, else the last
            d_y entries at the last position.
        embed: From prompts to the module's input, [batch, pos, width]; None: tokens (x, y), the query last with y = 0.
        outputs: Names of the modules that take the heads' outputs side by side, where none are found, or the wrong ones.
        task: Law of the prompts: a TaskConfig, a dict of its fields or a JSON file; what is left out is assumed to
            be the softmax paper's setting.
        position: Position of the stream at which the prediction is read, from 0 or, below 0, from the end; None: the one
            that it depends on after the last layer or, where it depends on several, the last one of a stream that is as
            long as the input. What looks into another stream refuses it.
    Raises:
        ValueError: If no layer is found, a name in `outputs` is of no module, heads are not stated, are no number of heads, do
            not divide a width or differ between layers, a layer does not run, runs twice or is not in a module of its own,
            the module does not run on its input, the prediction has another shape, or there is no such position.
    See also:
        `load`, `Monitor`.
    Example:
        >>> layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        >>> hook_module(layer, task=TaskConfig())
        HookedModule(TransformerEncoderLayer: 1 x 2 heads, before self_attn; task: d_x 5, d_y 1, context_length 40, covariance identity, beta_var 0.2 (1/d_x), noise_var 0.1, query_noise yes; assumed: d_x, d_y, context_length, covariance, beta_var, noise_var, query_noise)
    """
    # Here and not above: they need TransformerLens.
    from mechinterp.checkpoints.module_places import layer_names, places_of
    from mechinterp.models.hooked.explained import follow
    from mechinterp.models.hooked.module import ModuleHooks

    task = as_task({} if task is None else task)
    if heads is not None and (type(heads) is not int or heads < 1):
        raise ValueError(f"heads must be an integer >= 1, got {heads!r}.")
    if position is not None and type(position) is not int:
        raise ValueError(f"position must be an integer, got {position!r}.")
    own = _uncompiled(module).eval()
    parameter = next(own.parameters(), torch.empty(0, dtype=torch.float32, device="cpu"))

    enter = _Entry(task, embed, parameter.device, parameter.dtype)
    # As many as no axis of positions is long.
    trial = sample_prompts(task, 2, dtype=parameter.dtype)
    if enter(trial).shape[1] == len(trial):
        trial = sample_prompts(task, 3, dtype=parameter.dtype)
    with torch.no_grad():
        tokens = enter(trial)
        output = _output_of(own, tokens)
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
            read=_own_read(output, tokens, task) if read is None else read,
            restarts=False,
            position=position,
            blocks=tuple(outputs.index(name) for name in names),
        )
        _note_sizes(hooked, trial)
        if position is not None:
            query_positions(hooked, trial)
    return HookedModule(type(own).__name__, task, hooked, tuple(names))


def _uncompiled(module: nn.Module) -> nn.Module:
    """A copy without torch.compile, which passes hooks by."""
    own = copy.deepcopy(getattr(module, "_orig_mod", module))
    for part in own.modules():
        for name, child in part.named_children():
            setattr(part, name, getattr(child, "_orig_mod", child))
    return own


@dataclass(frozen=True, eq=False)
class _Entry:
    """From prompts to a module's input."""

    task: TaskConfig
    embed: Callable[[Prompts], Tensor] | None
    device: torch.device
    dtype: torch.dtype

    def __call__(self, prompts: Prompts) -> Tensor:
        tokens = _pairs(prompts, self.task) if self.embed is None else self.embed(prompts)
        if not isinstance(tokens, Tensor):
            raise ValueError(
                f"embed must give one tensor, got {type(tokens).__name__}; a module of several inputs goes into one that splits them."
            )
        return tokens.to(self.device, self.dtype)


def _pairs(prompts: Prompts, task: TaskConfig) -> Float[Tensor, "batch pos d_token"]:
    """Tokens (x, y), the query last, of prompts that are of the task's sizes."""
    require_sizes(prompts, d_x=task.d_x, d_y=task.d_y)
    return prompts.tokens


def _own_read(output: object, tokens: Tensor, task: TaskConfig) -> Callable[[Tensor], Tensor]:
    """How the prediction is read from an output of this shape.

    Raises:
        ValueError: If it is no tensor, or it is not known where the prediction is.
    """
    if not isinstance(output, Tensor):
        raise ValueError(
            f"read must be given for a module whose output is no tensor, got {type(output).__name__}."
        )
    shape, n_prompts = tuple(output.shape), len(tokens)
    if shape == (n_prompts, task.d_y):
        return _whole
    if task.d_y == 1 and shape == (n_prompts,):
        return _as_column
    # One number for every token, or for every x.
    if task.d_y == 1 and shape in (
        (n_prompts, tokens.shape[1]),
        (n_prompts, task.context_length + 1),
    ):
        return _last_number
    if len(shape) < 3:
        raise ValueError(
            f"read must be given: the output {list(shape)} of {n_prompts} prompts is no prediction [batch, {task.d_y}], and not one "
            f"number for each of {tokens.shape[1]} positions."
        )
    return partial(_last_entries, d_y=task.d_y)


def _whole(output: Tensor) -> Tensor:
    """The output itself."""
    return output


def _as_column(output: Float[Tensor, " batch"]) -> Float[Tensor, "batch 1"]:
    """One number for each prompt, as a column."""
    return output[:, None]


def _last_number(output: Float[Tensor, "batch pos"]) -> Float[Tensor, "batch 1"]:
    """The number at the last position."""
    return output[:, -1:]


def _last_entries(output: Tensor, d_y: int) -> Tensor:
    """The last entries at the last position."""
    return output[:, -1, -d_y:]


def _output_of(module: nn.Module, inputs: Tensor) -> object:
    """The module's output; one that does not run on what it is given is refused in its own words."""
    try:
        return module(inputs)
    except (TypeError, RuntimeError, IndexError, AssertionError) as error:
        raise ValueError(
            f"module must run on the input {list(inputs.shape)} of {len(inputs)} prompts, got: {one_line(error)}; "
            "embed= makes the input from prompts, and task= says d_x and d_y."
        ) from None


def _note_sizes(hooked: HookedPredictor, prompts: Prompts) -> None:
    """Sizes of the stream and of heads, where TransformerLens' tools look for them.

    Raises:
        ValueError: If the prediction has not the shape of the prompts' y_query.
    """
    names = [f"blocks.0.{name}" for name in ("hook_resid_pre", "attn.hook_z")]
    output, (stream, z) = hooked.activations(prompts, names)
    hooked.prediction(output, prompts)
    tokens = hooked.embed(prompts)
    sizes = {"d_model": stream.shape[-1], "d_head": z.shape[-1], "d_token": tokens.shape[-1]}
    vars(hooked.model.cfg).update(sizes, n_ctx=2 * tokens.shape[1])
