"""Blocks with hooks on a model: an interrupt leaves no hook that counts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from mechinterp.interrupts import uninterrupted
from mechinterp.models.hooked.masks import Hook, lock_of


@dataclass(eq=False)
class Context:
    """A block with hooks on a model."""

    ends: bool
    """True: the hooks are on until the end of the block. False: they stay, as the user wants."""
    open: bool = True
    """False: the block has ended, and its hooks do nothing."""
    entered: bool = False

    def scoped(self, hooks: list[tuple]) -> list[tuple]:
        """The hooks, which do nothing once the block has ended."""
        if not self.ends:
            return hooks
        return [(name, partial(_while_open, self, hook)) for name, hook in hooks]

    @contextmanager
    def of(self, model: Any, added: AbstractContextManager) -> Iterator[None]:
        """Block of `added`, TransformerLens' own, which puts scoped hooks on the model and takes them off.

        Ctrl-C waits meanwhile. Hooks that an interrupted block left on are removed first.
        """
        try:
            with uninterrupted():
                remove_ended(model)
                added.__enter__()
                self.entered = True
            yield
        finally:
            self.open = False
            with uninterrupted():
                if self.entered:
                    added.__exit__(None, None, None)


def _while_open(context: Context, function: Callable, value: Any, hook: object) -> Any:
    return function(value, hook=hook) if context.open else None


def _has_ended(hook: object) -> bool:
    """True for a hook of a block that has ended."""
    return isinstance(hook, partial) and hook.func is _while_open and not hook.args[0].open


def remove_ended(model: Any) -> None:
    """Take off the hooks whose blocks have ended, as an interrupt may leave them on; all others stay."""
    for point in model.hook_dict.values():
        for handles in (point.fwd_hooks, point.bwd_hooks):
            for handle in [each for each in handles if _has_ended(each.user_hook)]:
                handle.hook.remove()
                handles.remove(handle)


@contextmanager
def hooks_on(model: Any, hooks: Sequence[Hook]) -> Iterator[None]:
    """Block with forward hooks on a hooked model or a TransformerLens Bridge; an interrupt leaves none that counts."""
    with lock_of(model):
        if getattr(model, "scopes_hooks", False):
            block: AbstractContextManager = model.hooks(fwd_hooks=hooks)
        else:
            context = Context(ends=True)
            block = context.of(model, model.hooks(fwd_hooks=context.scoped(list(hooks))))
        with block:
            yield
