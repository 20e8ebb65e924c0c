"""Cases run one by one in worker processes, each within 4 s of the processor and 500 MB, and what came of them."""

import multiprocessing
import resource
import signal
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from random import Random
from shutil import rmtree

from tests.attack.targets import Subject, copied, is_marked, subjects, users_files

SECONDS, BYTES = 4.0, 500 * 2**20
PATIENCE = 60
"""Seconds on the clock after which a case hangs, however busy the machine."""
WORKERS = 2
FAULTS = ("hang", "crash", "memory", "fault", "lost")
Said = tuple[str, str, str]
"""A case (subject, seed and number), what came of it, and a note."""
SUBJECTS: dict[str, Subject] = {}
"""Subjects of a worker process."""


def attack(count: int, seed: int) -> Iterator[Said]:
    """What came of so many cases, all subjects in turn."""
    shares = [range(first, count, WORKERS) for first in range(WORKERS)]
    with ThreadPoolExecutor(WORKERS) as threads:
        for said in threads.map(lambda numbers: list(_share(seed, numbers)), shares):
            yield from said


def _share(seed: int, numbers: Iterable[int]) -> Iterator[Said]:
    """The outcomes of some cases in a process that lives on; after a hang or a crash a new one takes over."""
    with tempfile.TemporaryDirectory() as folder:
        worker = _worker(Path(folder))
        for number in numbers:
            start = time.monotonic()
            try:
                yield worker.submit(_case, Path(folder), seed, number).result()
            except BrokenProcessPool:
                outcome = "hang" if time.monotonic() - start >= PATIENCE else "crash"
                yield f"? seed {seed} number {number}", outcome, "its process has ended"
                rmtree(folder, ignore_errors=True)
                worker = _worker(Path(folder))
        worker.shutdown()


def _worker(folder: Path) -> ProcessPoolExecutor:
    worker = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    worker.submit(_prepare, folder).result()
    return worker


def _prepare(folder: Path) -> None:
    """Make the subjects of this process, and limit its memory."""
    warnings.simplefilter("ignore")
    SUBJECTS.update(subjects(folder / "subjects"))
    for subject in SUBJECTS.values():  # valid ones first: libraries load what they need
        if not subject.writes:
            subject.use(subject.folder)
    with open("/proc/self/statm") as used:
        limit = int(used.read().split()[0]) * resource.getpagesize() + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def _case(folder: Path, seed: int, number: int) -> Said:
    name = list(SUBJECTS)[number % len(SUBJECTS)]
    signal.alarm(PATIENCE)  # ends the process
    try:
        random = Random(f"{name} {seed} {number}")
        outcome, note = outcome_of(SUBJECTS[name], folder / "case", random)
    finally:
        signal.alarm(0)
    return f"{name} seed {seed} number {number}", outcome, note


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
