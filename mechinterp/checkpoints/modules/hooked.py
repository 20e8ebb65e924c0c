"""A plain torch module as a model for the analyses and the report.

Its attention layers are found by name, in order of running."""

import copy
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from mechinterp.checkpoints.io.files import one_line
from mechinterp.checkpoints.modules.function import (
    TRIAL_PROMPTS,
    random_states_kept,
    require_function_of_prompt,
)
from mechinterp.checkpoints.modules.input import ModuleInput, Trial, split_of
from mechinterp.checkpoints.runs import Run
from mechinterp.config import TaskConfig, TaskLike, as_task
from mechinterp.display import counted
from mechinterp.fields import flatten
from mechinterp.icl.prompts import Prompts, draw_prompts
from mechinterp.models.hooked.arguments import whole
from mechinterp.models.hooked.query_position import query_positions
from mechinterp.models.hooked.runner import HookedPredictor, read_prediction
from mechinterp.models.run.predictor import ModelPredictor
from mechinterp.models.run.ways import Predictor

if TYPE_CHECKING:
    from mechinterp.models.hooked.module import ModuleHooks

Readers = tuple[Callable[[Any], Tensor], Callable[[Any, int], Tensor] | None]
"""Functions from the output to the prediction at the query, and, if known, to those at every x."""


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

    @property
    def identity(self) -> dict[str, object]:
        """Name as path, format "module", and sizes, for tables of models and JSON documents."""
        return {
            "path": self.name,
            "format": "module",
            "n_layers": self.hooked.n_layers,
            "n_heads": self.hooked.n_heads,
            "d_x": self.task.d_x,
            "d_y": self.task.d_y,
        }

    @property
    def assumed(self) -> dict[str, object]:
        """Fields of the task that nobody stated, by dotted name."""
        return self._fields_of_task(self.task.assumed)

    @property
    def grounds(self) -> dict[str, Mapping[str, object]]:
        """Settings that are not assumed, by their ground: the stated fields of the task."""
        return {"stated": self._fields_of_task(self.task.given)}

    def _fields_of_task(self, names: Collection[str]) -> dict[str, object]:
        values = flatten(asdict(self.task)).items()
        return {f"task.{name}": v for name, v in values if name.partition(".")[0] in names}

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
        """Copy for a task with another context length."""
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
    n_heads: int | None = None,
    read: Callable[[Tensor], Tensor] | None = None,
    embed: Callable[[Prompts], Tensor] | None = None,
    outputs: Sequence[str] = (),
    task: TaskLike | None = None,
    position: int | None = None,
) -> HookedModule:
    """A copy of a module in evaluation mode, with hooks on the heads and the stream of each
    attention layer.

    Layers are every torch.nn.MultiheadAttention, and every module with a common name for the outputs of heads (o_proj,
    to_out, c_proj, ...) beside those for queries, keys and values (q_proj, to_q, W_q, qkv, c_attn, ...).
    If no name is known, layers are the projections whose input is a product of attention weights and values in a run.

    Args:
        n_heads: Number of heads in every layer; None means that stated by the modules (num_heads, n_heads, ...).
        read: Function from the module's output to the prediction, [batch, d_y]. None means the output itself if it has
            that shape, else the last d_y entries at the last position.
        embed: Function from prompts to the module's input, [batch, pos, width]; None means tokens (x, y), the query last
            with y = 0. A module of two inputs is called as `model(xs, ys)` with xs [batch, n, d_x] and ys [batch, n], or
            [batch, n, d_y] if it fails on the former.
        outputs: Names of the modules that take the heads' outputs side by side, if they are not found or found wrongly.
        task: Law of the prompts: a TaskConfig, a dict of its fields or a JSON file; missing fields are those of the
            softmax paper. It stays in force for given prompts, unless an analysis gets task="unknown". None: assumed.
        position: Position of the stream at which the prediction is read, from 0, or from the end if negative. None means
            the one on which the prediction depends after the last layer, or the last one of a stream as long as the input.
    Raises:
        ValueError: If the prediction is not a function of the prompt alone (random, a state between calls, the rest of the
            batch) or has another shape; if no layer is found, or one does not run or is no separate module; if the number
            of heads is unknown, does not divide a width or differs between layers; if a name or position does not exist.
    See also:
        `load`, `Monitor`.
    Example:
        >>> layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        >>> hook_module(layer, task=TaskConfig())
        HookedModule(TransformerEncoderLayer: 1 x 2 heads, before self_attn; task: d_x 5, d_y 1, context_length 40, covariance identity, beta_var 0.2 (1/d_x), noise_var 0.1, query_noise yes; assumed: d_x, d_y, context_length, covariance, beta_var, noise_var, query_noise)
    """
    law_stated = task is not None
    task = as_task({} if task is None else task)
    _require_integers(n_heads, position)
    own = _copied(module).eval()
    like = _first_number(own)
    enter = ModuleInput(task, embed, like.device, like.dtype)
    with random_states_kept(), torch.no_grad():
        prompts = _trial_prompts(enter, task)
        tokens = enter(prompts)
        trial = Trial(own, tokens, whole if embed else split_of(own, tokens, task))
        readers = _readers(read, task)
        _require_prediction(trial, enter, read, task)
        hooked = _hooked(trial, enter, readers, n_heads, outputs, position)
        _note_sizes(hooked, prompts)
        if position is not None:
            query_positions(hooked, prompts)
    model: Any = hooked.model
    names = [model.places[block].output for block in hooked.blocks]
    return HookedModule(trial.name, task, hooked, tuple(names), law_stated=law_stated)


def _require_integers(n_heads: object, position: object) -> None:
    if n_heads is not None and (type(n_heads) is not int or n_heads < 1):
        raise ValueError(f"n_heads must be an integer >= 1, got {n_heads!r}.")
    if position is not None and type(position) is not int:
        raise ValueError(f"position must be an integer, got {position!r}.")


def _trial_prompts(enter: ModuleInput, task: TaskConfig) -> Prompts:
    """Two or three prompts, so that their number differs from the number of positions."""
    prompts = draw_prompts(task, 2, dtype=enter.dtype)
    if enter(prompts).shape[1] == len(prompts):
        return draw_prompts(task, 3, dtype=enter.dtype)
    return prompts


def _require_prediction(
    trial: Trial, enter: ModuleInput, read: Callable[[Tensor], Tensor] | None, task: TaskConfig
) -> None:
    """Refuse an output without a prediction, or one that is not a function of the prompt alone."""
    output = trial.output()
    if read is None:
        _require_readable(output, trial.tokens, task)
    _require_function(trial, enter, _readers(read, task)[0], task)


def _readers(read: Callable[[Tensor], Tensor] | None, task: TaskConfig) -> Readers:
    if read is not None:
        return read, None
    return partial(_last_entries, d_y=task.d_y), partial(_at_every_x, d_y=task.d_y)


def _require_function(
    trial: Trial, enter: ModuleInput, read: Callable[[Any], Tensor], task: TaskConfig
) -> None:
    """Refuse a module whose prediction is not a function of the prompt alone."""

    def predict(prompts: Prompts) -> Float[Tensor, "batch d_y"]:
        return read_prediction(read, replace(trial, tokens=enter(prompts)).output(), prompts)

    prompts = draw_prompts(task, TRIAL_PROMPTS, seed=1, dtype=enter.dtype)
    require_function_of_prompt(predict, prompts, enter.dtype)


def _hooked(
    trial: Trial,
    enter: ModuleInput,
    readers: Readers,
    n_heads: int | None,
    outputs: Sequence[str],
    position: int | None,
) -> HookedPredictor:
    """The module of a trial with hooks on its layers."""
    # Imported here because they need TransformerLens.
    from mechinterp.checkpoints.modules.outputs import layer_names
    from mechinterp.checkpoints.modules.places import places_of
    from mechinterp.checkpoints.modules.streams import find_stream
    from mechinterp.models.hooked.explained import follow
    from mechinterp.models.hooked.module import ModuleHooks

    names = layer_names(trial, outputs)
    places = places_of(trial, names, n_heads)
    order = [[place.output for place in places].index(name) for name in names]
    model = ModuleHooks(trial.module, places, order, trial.split)
    follow(model, trial.tokens)
    read, read_every = readers
    hooked = HookedPredictor(
        model=model,
        n_layers=len(names),
        n_heads=places[0].n_heads,
        embed=enter,
        read=read,
        read_every=read_every,
        restarts=False,
        position=position,
        blocks=tuple(order),
    )
    find_stream(hooked, model, trial.tokens)
    return hooked


def _copied(module: nn.Module) -> nn.Module:
    """A copy without torch.compile, which bypasses hooks.

    Raises:
        ValueError: If the module cannot have hooks or cannot be copied.
    """
    module = getattr(module, "_orig_mod", module)
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            where = f"{name} is" if name else "this is"
            raise ValueError(
                f"module must not be compiled by torch.jit.trace or torch.jit.script, since its parts cannot have hooks, but {where}: "
                "hook the Python module that was traced, after model.load_state_dict(traced.state_dict())."
            )
    # Tensors with a gradient are not copied by deepcopy: stored patterns, weights under the old weight_norm.
    made = [value for part in module.modules() for value in vars(part).values()]
    made += module.buffers()
    kept = {id(v): v.detach().clone() for v in made if isinstance(v, Tensor) and not v.is_leaf}
    try:
        own = copy.deepcopy(module, kept)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise ValueError(
            f"module must be one that copy.deepcopy copies, got: {one_line(error)}; delete what forward stores on it."
        ) from None
    for part in own.modules():
        for name, child in part.named_children():
            setattr(part, name, getattr(child, "_orig_mod", child))
    return own


def _first_number(module: nn.Module) -> Tensor:
    """The first parameter or buffer of floating-point numbers, whose device and dtype the input gets."""
    tensors = (*module.parameters(), *module.buffers())
    numbers = (tensor for tensor in tensors if tensor.is_floating_point())
    return next(numbers, torch.empty(0, dtype=torch.float32, device="cpu"))


def _require_readable(output: object, tokens: Tensor, task: TaskConfig) -> None:
    """Refuse an output whose shape does not show the place of the prediction."""
    if not isinstance(output, Tensor):
        raise ValueError(
            f"read must be given for a module whose output is not a tensor, got {type(output).__name__}: "
            "pass a function such as read=lambda output: output[0][:, -1, -1:], or output['logits'] for a dict."
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
