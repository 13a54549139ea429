"""Translate the lines of many requests in common batches.

Requests are handled by an event loop, translation by one thread. The thread takes the jobs that wait, in the order of
their arrival, and translates all their lines at once; the search groups them by length. While it works, others arrive
and wait. So a request that is alone is translated at once, and the batch grows with the load.
"""

import copy
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from nmt.decoding.translation import Translation, check_scores
from nmt.decoding.translator import Translator, default_batch_tokens
from nmt.serving.prometheus import SEARCH_LINES, WAITING
from nmt.system.logging import log

GATHER_SECONDS = 0.005  # that a job waits for others to share its batch
CHARACTERS_PER_PIECE = 4  # of source text, about; limits what is translated at once, which is not tokenized yet
BATCHES_AT_ONCE = 8  # of the search, about; in a larger share lines of similar length find each other


class QueueFullError(Exception):
    """Too many requests wait."""


class ClosedError(Exception):
    """The server is being stopped."""


class Group(NamedTuple):
    """What jobs must have in common to be translated together."""

    translator: int  # index among those of the batcher
    n_best: int
    keep_weights: bool


@dataclass(eq=False, slots=True)
class Job:
    """Lines of one request."""

    group: Group
    lines: Sequence[str]
    future: "Future[list[list[Translation]]]" = field(default_factory=Future)


class Batcher:
    """A queue of jobs and the thread that works on them.

    Args:
        translators: the models. Only the thread of the batcher translates with them; others may read what does not
            change, such as their tokenizers.
        max_waiting: number of jobs that may wait, those being translated included.
    """

    def __init__(self, translators: Sequence[Translator], max_waiting: int) -> None:
        self.translators = translators
        self.max_waiting = max_waiting
        self.waiting: deque[Job] = deque()
        self.in_work: list[Job] = []
        self.changed = threading.Condition()
        self.closed = False
        self.thread = threading.Thread(target=self.run, name="translation", daemon=True)
        self.thread.start()

    def submit(self, group: Group, lines: Sequence[str]) -> "Future[list[list[Translation]]]":
        """Add a job, and return the future of its translations. Cancel it if nobody waits for them any more.

        Raises:
            QueueFullError, ClosedError: the job is not accepted.
        """
        job = Job(group, lines)
        with self.changed:
            if self.closed:
                raise ClosedError
            self.waiting = deque(other for other in self.waiting if not other.future.cancelled())
            if len(self.waiting) + len(self.in_work) >= self.max_waiting:
                raise QueueFullError
            self.waiting.append(job)
            self.count_jobs()
            self.changed.notify()
        return job.future

    def close(self) -> None:
        """Refuse new jobs, and end the thread after those in work. The others are cancelled."""
        with self.changed:
            self.closed = True
            self.changed.notify()
        self.thread.join()
        for job in self.waiting:
            job.future.cancel()

    def run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting or self.closed)
                if self.closed:
                    return
            time.sleep(GATHER_SECONDS)
            with self.changed:
                self.in_work = self.take()
                self.count_jobs()
            self.translate(self.in_work)
            with self.changed:
                self.in_work = []
                self.count_jobs()

    def count_jobs(self) -> None:
        WAITING.set(len(self.waiting) + len(self.in_work))

    def take(self) -> list[Job]:
        """Return the first job and others of its group, in the order of their arrival, up to a limit of characters.

        From then on they cannot be cancelled.
        """
        taken: list[Job] = []
        others: deque[Job] = deque()
        characters = 0
        for job in self.waiting:
            if taken and (job.group != taken[0].group or characters >= self.max_characters(job.group)):
                others.append(job)
            elif job.future.set_running_or_notify_cancel():
                taken.append(job)
                characters += sum(map(len, job.lines))
        self.waiting = others
        return taken

    def max_characters(self, group: Group) -> int:
        """Return how many characters of source text are translated at once, about."""
        translator = self.translators[group.translator]
        tokens = translator.config.batch_tokens or default_batch_tokens(translator.device)
        return BATCHES_AT_ONCE * CHARACTERS_PER_PIECE * tokens // translator.config.width

    def translate(self, jobs: Sequence[Job]) -> None:
        """Translate jobs of a group; if that fails, each half of them, so that only the bad ones fail."""
        if not jobs:
            return
        group = jobs[0].group
        translator = copy.copy(self.translators[group.translator])
        translator.config = replace(translator.config, n_best=group.n_best)
        lines = [line for job in jobs for line in job.lines]
        try:
            results = iter(translator.translate(lines, group.keep_weights))
            options_of_jobs = [[next(results) for _ in job.lines] for job in jobs]
            for options in options_of_jobs:
                check_scores([line[0] for line in options], 1)
        except Exception as error:
            if len(jobs) == 1:
                jobs[0].future.set_exception(error)
                return
            log.warning(f"a batch of {len(jobs)} requests failed; translating each half of them")
            half = len(jobs) // 2
            self.translate(jobs[:half])
            self.translate(jobs[half:])
            return
        SEARCH_LINES.observe(len(lines))
        for job, options in zip(jobs, options_of_jobs, strict=True):
            job.future.set_result(options)
