"""Cases run one by one in worker processes, each within 4 s of the processor and 500 MB, and what came of them."""

import multiprocessing
import resource
import tempfile
import time
import warnings
from collections.abc import Iterator
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from shutil import rmtree

from tests.attack.targets import Subject, copied, is_marked, subjects, users_files

SECONDS, BYTES = 4.0, 500 * 2**20
PATIENCE = 60.0
"""Seconds on the clock after which a case hangs, however busy the machine."""
START = 600.0
"""Seconds on the clock that a worker may take to import what it needs."""
WORKERS = 2
FAULTS = ("hang", "crash", "memory", "fault", "lost")
Said = tuple[str, str, str]
"""A case (subject, seed and number), what came of it, and a note."""


def attack(count: int, seed: int) -> Iterator[Said]:
    """What came of so many cases, all subjects in turn."""
    context = multiprocessing.get_context("spawn")
    numbers = [round(at * count / WORKERS) for at in range(WORKERS + 1)]
    shares = [list(range(*ends)) for ends in pairwise(numbers)]
    running = [_Worker(context, seed, share) for share in shares]
    while running:
        for worker in list(running):
            yield from worker.news()
            if worker.done:
                running.remove(worker)
        time.sleep(0.01)


class _Worker:
    """A process that works through its cases; a new one takes over after a hang or a crash."""

    def __init__(self, context: multiprocessing.context.SpawnContext, seed: int, left: list[int]):
        self.context, self.seed, self.left = context, seed, left
        self.done = False
        self._start()

    def news(self) -> Iterator[Said]:
        """What it has sent since the last time."""
        while self.pipe.poll():
            try:
                message = self.pipe.recv()
            except (EOFError, OSError):
                self.process.join()
                yield self._replaced("crash", f"exit code {self.process.exitcode}")
                return
            self.since = time.monotonic()
            if message is None:
                self.done = True
                self.process.join()
                return
            if message == "ready":
                continue
            self.left.pop(0)
            yield message
        if time.monotonic() - self.since > PATIENCE:
            self.process.kill()
            self.process.join()
            yield self._replaced("hang", f"no answer in {PATIENCE:.0f} s")

    def _replaced(self, outcome: str, note: str) -> Said:
        case = (f"? seed {self.seed} number {self.left.pop(0)}", outcome, note)
        self._start()
        return case

    def _start(self) -> None:
        self.pipe, theirs = self.context.Pipe()
        self.process = self.context.Process(
            target=_work, args=(theirs, self.seed, list(self.left)), daemon=True
        )
        self.process.start()
        theirs.close()
        self.since = time.monotonic() + START


def _work(pipe: Connection, seed: int, numbers: list[int]) -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        by_name = subjects(Path(folder) / "subjects")
        for subject in by_name.values():  # valid ones first: libraries load what they need
            if not subject.writes:
                subject.use(subject.folder)
        pipe.send("ready")
        with open("/proc/self/statm") as used:
            limit = int(used.read().split()[0]) * resource.getpagesize() + BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        for number in numbers:
            name = list(by_name)[number % len(by_name)]
            outcome, note = outcome_of(
                by_name[name], Path(folder) / "case", Random(f"{name} {seed} {number}")
            )
            pipe.send((f"{name} seed {seed} number {number}", outcome, note))
    pipe.send(None)


def outcome_of(subject: Subject, place: Path, random: Random) -> tuple[str, str]:
    """What comes of a case, and a note on it.

    "answered" and "refused" are as it should be; "hang", "memory", "fault" (another exception than a ValueError, or
    a message of several lines) and "lost" (a file of the user is gone or changed) are not.
    """
    before = copied(subject, place, random)
    start = time.process_time()
    try:
        outcome, note = _tried(subject, place)
        seconds = time.process_time() - start
        if seconds > SECONDS:
            return "hang", f"{seconds:.1f} s, {note}"
        after = users_files(place)
        for name, content in before.items():
            if after.get(name) != content and not is_marked(content):
                return "lost", f"{name} was {content!r:.80}, is {after.get(name)!r:.80}"
        if not subject.writes and after.keys() > before.keys():
            return "fault", f"left {sorted(after.keys() - before.keys())}"
        return outcome, note
    finally:
        rmtree(place)


def _tried(subject: Subject, place: Path) -> tuple[str, str]:
    try:
        subject.use(place)
    except ValueError as error:
        message = str(error)
        if "MemoryError" in message or "allocate" in message:
            return "memory", message
        if not message.isprintable():
            return "fault", f"not one printable line: {message!r}"
        return "refused", message
    except Exception as error:
        memory = isinstance(error, MemoryError) or "allocate" in str(error)
        return "memory" if memory else "fault", f"{type(error).__name__}: {error}"
    return "answered", ""
