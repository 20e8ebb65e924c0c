"""Lock of a hooked model: while one thread runs it or has hooks on it, other threads wait."""

import threading
from types import TracebackType


class ModelLock:
    """Re-entrant lock; copying or unpickling it gives a new, free lock."""

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
    """Lock of a model, shared by all threads.

    Example:
        >>> model = threading.Thread()
        >>> lock_of(model) is lock_of(model)
        True
    """
    return vars(model).setdefault("_hooks_lock", ModelLock())
