"""One lock for each hooked model: while a thread has hooks on it, or runs it, others wait."""

import threading
from types import TracebackType


class ModelLock:
    """A re-entrant lock; a copy of it, in another model or process, is free."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> "ModelLock":
        self._lock.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type["ModelLock"], tuple[()]]:
        return ModelLock, ()


def lock_of(model: object) -> ModelLock:
    """The lock of a model, the same for all threads.

    Example:
        >>> model = threading.Thread()
        >>> lock_of(model) is lock_of(model)
        True
    """
    return vars(model).setdefault("_hooks_lock", ModelLock())
