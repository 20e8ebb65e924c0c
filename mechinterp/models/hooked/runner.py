"""One interface to hooked models of any make: prompts in, predictions out, heads by number.

Ours fit as they are. A TransformerLens Bridge around somebody else's layers needs to be told how prompts
become its input and which part of its output is the prediction; that is all there is to an adapter.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor, nn

from mechinterp.icl.prompts import Prompts
from mechinterp.memory import chunks, layers_bytes, require_memory, together
from mechinterp.models.hooked.lock import lock_of
from mechinterp.models.hooked.masks import (
    Head,
    Values,
    by_layers,
    mask_heads,
    require_heads,
    resid_name,
    z_name,
)

if TYPE_CHECKING:
    from transformer_lens import HookedRootModule
    from transformer_lens.model_bridge import TransformerBridge

    from mechinterp.models.hooked.transformer import ICLTransformer


# Where torch's MultiheadAttention and Hugging Face's attention keep the rate of a functional dropout.
DROPOUT_RATES = ("dropout", "attention_dropout")


@runtime_checkable
class Predicts(Protocol):
    """What holds a hooked model: a checkpoint or a predictor."""

    @property
    def hooked(self) -> "HookedPredictor": ...


@dataclass(frozen=True, eq=False)
class HookedPredictor:
    """A model with TransformerLens' hooks, how prompts go into it and where its prediction comes out.

    Raises:
        ValueError: If the model has no hooks, lacks those of a layer's heads or of its input, has more layers, or
            cannot be started and stopped at a layer. When it runs: if it drops at random, has another number of
            heads, or `read` gives something else than [batch, d_y].
    """

    model: "HookedRootModule | TransformerBridge"
    """Takes `start_at_layer` and `stop_at_layer` as HookedTransformer does, if it `restarts`."""
    n_layers: int
    n_heads: int
    """Heads of every layer."""
    embed: Callable[[Prompts], Tensor]
    """Prompts to the model's input, [batch, pos, width]; the query is at the last position."""
    read: Callable[[Tensor], Tensor]
    """The model's output to the prediction at the query, [batch, d_y]."""
    restarts: bool = True
    """Whether the model can be started and stopped at a layer; if not, each mask takes a run of the whole."""
    position: int | None = -1
    """Position of the stream at which the prediction is read; None: it is found."""
    blocks: tuple[int, ...] = ()
    """Block that each layer is a run of, where blocks run several times; empty: each layer is a block."""

    def __post_init__(self) -> None:
        kind = type(self.model).__name__
        if not hasattr(self.model, "hook_dict"):
            raise ValueError(f"model must have TransformerLens' hooks (hook_dict), got a {kind}.")
        hooks = self.model.hook_dict
        for layer in range(self.n_layers):
            for name in (z_name(layer), resid_name(layer)):
                if name not in hooks:
                    raise ValueError(
                        f"A model of {self.n_layers} layers must have the hook {name}, got a {kind} without it."
                    )
        if self.n_layers < 1 or z_name(self.n_layers) in hooks:
            raise ValueError(
                f"n_layers must be the number of all layers of the {kind}, got {self.n_layers}."
            )
        for name in ("start_at_layer", "stop_at_layer"):
            if self.restarts and not _takes(self.model.forward, name):
                raise ValueError(
                    f"The model's forward must take {name}, got a {kind}'s without it."
                )

    def predict(self, prompts: Prompts) -> Float[Tensor, "batch d_y"]:
        """Prediction of y_query, in units of y, on the device of the prompts."""
        with lock_of(self.model):
            prediction = self.prediction(self.model(self.inputs(prompts)), prompts)
        return prediction.to(prompts.x.device)

    def inputs(self, prompts: Prompts) -> Float[Tensor, "batch pos width"]:
        """What goes into the model, which must not drop at random.

        Raises:
            ValueError: If some dropout is in training mode.
        """
        # A Bridge lists the parts it wraps; what lies between them is in the model it was made of.
        for part in (self.model, getattr(self.model, "original_model", None)):
            if isinstance(part, nn.Module) and any(map(_drops, part.modules())):
                raise ValueError(
                    f"The model must be in evaluation mode, call .eval(); got a {type(self.model).__name__} "
                    f"with dropout in training mode."
                )
        needed = len(prompts) * self.prompt_bytes(prompts)
        require_memory(needed, f"{len(prompts)} prompts of {prompts.x.shape[1]} pairs at once")
        return self.embed(prompts)

    def prompt_bytes(self, prompts: Prompts) -> int:
        """What one of the prompts takes while it runs through the layers."""
        tokens = self.embed(prompts[:1])
        sizes = {
            name: getattr(self.model.cfg, name, None) or 0
            for name in ("d_model", "d_head", "d_mlp")
        }
        return layers_bytes(
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            n_tokens=tokens.shape[1],
            width=tokens.element_size(),
            **sizes,
        )

    def chunks(self, prompts: Prompts, most: int) -> list[slice]:
        """The prompts by as many as run together, an even number.

        Raises:
            ValueError: If not even two fit into memory.
        """
        what = f"{self.n_layers} layers on prompts of {prompts.x.shape[1]} pairs"
        return chunks(len(prompts), together(self.prompt_bytes(prompts), what, most=most))

    def prediction(self, output: Tensor, prompts: Prompts) -> Float[Tensor, "batch d_y"]:
        """What `read` makes of the output for these prompts.

        Raises:
            ValueError: If it is not of the shape of their y_query; broadcast, it would give numbers all the same.
        """
        prediction = self.read(output)
        if prediction.shape != prompts.y_query.shape:
            raise ValueError(
                f"read must give [batch, d_y], {list(prompts.y_query.shape)} for these prompts, "
                f"got {list(prediction.shape)}."
            )
        return prediction

    def activations(self, prompts: Prompts, names: Sequence[str]) -> tuple[Tensor, list[Tensor]]:
        """The model's output, and what passes these hooks.

        Raises:
            ValueError: If the model has no such hook or does not run through it, or has another number of heads.
        """
        known = [name for name in names if name in self.model.hook_dict]
        with lock_of(self.model):
            output, cache = self.model.run_with_cache(self.inputs(prompts), names_filter=known)
        for name in names:
            if name not in cache:
                reasons = getattr(self.model, "unfollowed", {})
                why = f": {next(iter(reasons.values()))}" if reasons else ""
                raise ValueError(
                    f"This needs the hook {name}, got a {type(self.model).__name__} that does not run through it{why}."
                )
        for layer in range(self.n_layers):
            if z_name(layer) in names:
                self.require_z(layer, cache[z_name(layer)])
        return output, [cache[name] for name in names]

    def stream_name(self, layer: int) -> str:
        """Name of the hook on the stream after this number of layers."""
        last = self.n_layers - 1
        if layer <= last:
            return resid_name(layer)
        normed = f"blocks.{last}.hook_normalized_resid_post"
        return normed if normed in self.model.hook_dict else f"blocks.{last}.hook_resid_post"

    def require_z(self, layer: int, z: Tensor) -> None:
        """Refuse a layer with another number of heads.

        Raises:
            ValueError: If there are not `n_heads` along the third axis.
        """
        if z.ndim != 4 or z.shape[2] != self.n_heads:
            raise ValueError(
                f"n_heads must be that of {z_name(layer)}, [batch, pos, head, d_head], "
                f"got {self.n_heads} for {list(z.shape)}."
            )

    def in_all_runs(self, heads: Sequence[Head]) -> list[Head]:
        """The heads, and the same heads of all other runs of their blocks."""
        blocks = self.blocks or tuple(range(self.n_layers))
        every = {(other, head) for layer, head in heads for other in _runs_of(blocks, layer)}
        return sorted(every)

    @property
    def is_hooked(self) -> bool:
        """Whether somebody's forward hooks are on the model, which shortcuts past its modules would miss."""
        with lock_of(self.model):  # those of another thread are not meant
            return any(point.fwd_hooks for point in self.model.hook_dict.values())


@contextmanager
def masked(
    model: "HookedPredictor | ICLTransformer | Predicts",
    heads: Sequence[Head],
    *,
    values: Values | None = None,
    runs: str = "one",
) -> Iterator[None]:
    """A context in which the model runs with these heads masked, and which says so if it did not.

    Args:
        values: As in `mask_heads`.
        runs: "one": a head is masked in its layer alone; "all": in all runs of the block that its layer is a run of.
    Raises:
        ValueError: If there is no such head; when it runs, if a layer has another number of heads; at the end,
            if a layer with masked heads never ran.
    Example:
        >>> from mechinterp import load
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> checkpoint = load("checkpoints/softmax-h2-s0")
        >>> prompts = sample_prompts(checkpoint.task, 4, generator=generator_for(0, "eval", 0))
        >>> with masked(checkpoint.model, [(0, 0), (0, 1)]):
        ...     checkpoint.model.predict(prompts).any()
        tensor(False)
    """
    predictor = hooked_predictor(model)
    require_heads(heads, predictor.n_layers, predictor.n_heads)
    require_runs(runs)
    heads = predictor.in_all_runs(heads) if runs == "all" else heads
    by_layer = by_layers(heads)
    fired: set[int] = set()

    def note(layer: int, z: Tensor, hook: object) -> None:
        predictor.require_z(layer, z)
        fired.add(layer)

    notes = [(z_name(layer), partial(note, layer)) for layer in by_layer]
    hooked = predictor.model
    with lock_of(hooked), hooked.hooks(fwd_hooks=[*notes, *mask_heads(heads, values=values)]):
        yield
    idle = [(layer, head) for layer, head in heads if layer not in fired]
    if idle:
        names = ", ".join(f"L{layer}H{head}" for layer, head in idle)
        raise ValueError(
            f"Masking {names} changed nothing: the hook {z_name(idle[0][0])} never fired."
        )


def require_runs(runs: str) -> None:
    """Refuse anything else than "one" or "all".

    Raises:
        ValueError: Naming it.
    """
    if runs not in ("one", "all"):
        raise ValueError(f"runs must be 'one' or 'all', got {runs!r}.")


def _runs_of(blocks: Sequence[int], layer: int) -> list[int]:
    return [other for other, block in enumerate(blocks) if block == blocks[layer]]


def hooked_predictor(model: "HookedPredictor | ICLTransformer | Predicts") -> HookedPredictor:
    """One of our hooked models, or anything that holds one, as a model to run with hooks.

    Raises:
        ValueError: If it is none.
    Example:
        >>> from mechinterp.config import ModelConfig
        >>> from mechinterp.models.hooked.transformer import ICLTransformer
        >>> hooked_predictor(ICLTransformer(ModelConfig(n_layers=3), d_x=5, d_y=1)).n_layers
        3
    """
    if isinstance(model, HookedPredictor):
        return model
    for holder in (model, getattr(model, "predictor", None)):
        if isinstance(holder, Predicts):
            return holder.hooked
    from mechinterp.models.hooked.transformer import ICLTransformer

    if not isinstance(model, ICLTransformer):
        hint = "; hook_module makes one of it" if isinstance(model, nn.Module) else ""
        raise ValueError(
            f"model must be a checkpoint, an ICLTransformer or a HookedPredictor, got {type(model).__name__}{hint}."
        )
    own, cfg = model, model.cfg

    def embed(prompts: Prompts) -> Tensor:
        return own.tokens(prompts).to(cfg.device, cfg.dtype)

    return HookedPredictor(own, cfg.n_layers, cfg.n_heads, embed, lambda output: output[:, -1])


def _takes(function: Callable, name: str) -> bool:
    """Whether there is such an argument, or any name is taken."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind == p.VAR_KEYWORD for p in parameters.values())


def _drops(module: nn.Module) -> bool:
    """Whether it is dropout, or attention that holds its rate, in training mode."""
    if not module.training:
        return False
    names = ("p",) if isinstance(module, nn.modules.dropout._DropoutNd) else DROPOUT_RATES
    rates = [getattr(module, name, None) for name in names]
    return any(isinstance(rate, int | float) and rate > 0 for rate in rates)
