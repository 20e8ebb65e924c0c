"""Lock of a hooked model: while one thread runs it or has hooks on it, other threads wait."""

import threading
from contextlib import AbstractContextManager
from weakref import WeakKeyDictionary

# Beside the models, so that a copied or unpickled model gets its own, free lock.
_LOCKS: WeakKeyDictionary[object, AbstractContextManager] = WeakKeyDictionary()


def lock_of(model: object) -> AbstractContextManager:
    """Re-entrant lock of a model, shared by all threads.

    Example:
        >>> model = threading.Thread()
        >>> lock_of(model) is lock_of(model)
        True
    """
    return _LOCKS.setdefault(model, threading.RLock())
