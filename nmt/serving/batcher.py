"""Translate lines of many requests in common batches.

Requests are handled by an event loop, translation by one thread: the processor or GPU is shared, and requests that
wait are best translated together. The thread takes waiting lines in the order of their arrival, up to about one batch
of the search, translates them, and takes the lines that have arrived meanwhile. So a line that is alone is translated
at once, and the batches grow with the load. Each line is answered as soon as it is translated: most clients have sent
their next one when the round ends.
"""

import copy
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from nmt.decoding.translation import Translation, check_scores
from nmt.decoding.translator import Translator, default_batch_tokens
from nmt.runtime.logging import log
from nmt.serving.prometheus import BATCH_LINES, WAITING

CHARACTERS_PER_PIECE = 4  # of source text, about; limits a round by its text, which is not tokenized yet
# A round has few lines compared with a file, and its last lines leave the batch nearly empty. So it is one search in
# one large batch rather than several after each other: the default of search.batch_tokens is this many times that of
# the search.
BATCH_FACTOR = 4


class QueueFullError(Exception):
    """Too many requests wait."""


class ClosedError(Exception):
    """The server is being stopped."""


class Group(NamedTuple):
    """What lines must have in common to be translated in one batch."""

    translator: int  # index among those of the batcher
    n_best: int
    keep_weights: bool


@dataclass(eq=False, slots=True)
class Job:
    """Lines of one request."""

    group: Group
    lines: Sequence[str]
    show: Callable[[int, str], object] | None  # called with index and best translation so far of a line
    futures: "list[Future[list[Translation]]]" = field(init=False)  # of each line

    def __post_init__(self) -> None:
        self.futures = [Future() for _ in self.lines]


class JobLine(NamedTuple):
    """A line of a job."""

    job: Job
    number: int  # from 0

    @property
    def text(self) -> str:
        return self.job.lines[self.number]

    @property
    def future(self) -> "Future[list[Translation]]":
        return self.job.futures[self.number]


class Batcher:
    """A queue of jobs and the thread that works on them.

    Args:
        translators: the models, which only this thread uses.
        max_waiting: number of jobs that may wait, those being translated included.
    """

    def __init__(self, translators: Sequence[Translator], max_waiting: int) -> None:
        self.translators = [*map(enlarge_batches, translators)]
        self.max_waiting = max_waiting
        self.jobs: deque[Job] = deque()
        self.changed = threading.Condition()
        self.closed = False
        self.thread = threading.Thread(target=self.run, name="translation", daemon=True)
        self.thread.start()

    def submit(
        self, group: Group, lines: Sequence[str], show: Callable[[int, str], object] | None = None
    ) -> "list[Future[list[Translation]]]":
        """Add a job, and return a future for each line. Cancel those for whose results nobody waits any more.

        Args:
            show: called by the thread after each step of the search, with the index of a line and its best translation
                so far.

        Raises:
            QueueFullError, ClosedError: the job is not accepted.
        """
        job = Job(group, lines, show)
        with self.changed:
            if self.closed:
                raise ClosedError
            if len(self.jobs) >= self.max_waiting:
                self.remove_done_jobs()
            if len(self.jobs) >= self.max_waiting:
                raise QueueFullError
            self.jobs.append(job)
            WAITING.set(len(self.jobs))
            self.changed.notify()
        return job.futures

    def close(self) -> None:
        """Refuse new jobs, and end the thread after the current round. Jobs without a result are cancelled."""
        with self.changed:
            self.closed = True
            self.changed.notify()
        self.thread.join()
        for job in self.jobs:
            for future in job.futures:
                future.cancel()

    def run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.jobs or self.closed)
                if self.closed:
                    return
                lines = self.take_round()
            self.translate(lines)

    def remove_done_jobs(self) -> None:
        """Remove jobs from the queue of which each line has its result or was cancelled."""
        self.jobs = deque(job for job in self.jobs if not all(future.done() for future in job.futures))
        WAITING.set(len(self.jobs))

    def take_round(self) -> list[JobLine]:
        """Return lines of the first job, and of those after it in the same group, as many as make up a round."""
        self.remove_done_jobs()
        if not self.jobs:
            return []
        group = self.jobs[0].group
        translator = self.translators[group.translator]
        assert translator.config.batch_tokens is not None
        room = CHARACTERS_PER_PIECE * translator.config.batch_tokens // translator.config.width
        lines = []
        for job in self.jobs:
            for number in range(len(job.lines)) if job.group == group else ():
                line = JobLine(job, number)
                if not line.future.done():
                    lines.append(line)
                    room -= len(line.text) + 1
                    if room <= 0:
                        return lines
        return lines

    def translate(self, lines: list[JobLine]) -> None:
        """Translate lines of jobs; if that fails, each half by itself, so that only the lines that cannot be fail."""
        lines = [line for line in lines if not line.future.done()]  # some may have been cancelled meanwhile
        if not lines:
            return
        group = lines[0].job.group
        translator = copy.copy(self.translators[group.translator])
        translator.config = replace(translator.config, n_best=group.n_best)
        watch = {row: partial(job.show, number) for row, (job, number) in enumerate(lines) if job.show is not None}
        BATCH_LINES.observe(len(lines))

        def deliver(row: int, options: list[Translation]) -> None:
            check_scores(options[:1], lines[row].number + 1)
            # First the future becomes running: from then on it cannot be cancelled, and takes a result.
            if lines[row].future.set_running_or_notify_cancel():
                lines[row].future.set_result(options)

        try:
            translator.translate([line.text for line in lines], group.keep_weights, watch=watch, deliver=deliver)
        except Exception as error:
            if len(lines) > 1:
                log.warning(f"a batch of {len(lines)} lines failed; translating its halves")
                half = len(lines) // 2
                self.translate(lines[:half])
                self.translate(lines[half:])
            elif lines[0].future.set_running_or_notify_cancel():
                lines[0].future.set_exception(error)


def enlarge_batches(translator: Translator) -> Translator:
    """Return a copy of a translator with the batch size of the server, unless the user has set one."""
    enlarged = copy.copy(translator)
    tokens = translator.config.batch_tokens or BATCH_FACTOR * default_batch_tokens(translator.device)
    enlarged.config = replace(translator.config, batch_tokens=tokens)
    return enlarged
