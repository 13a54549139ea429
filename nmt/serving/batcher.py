"""Translate lines of many requests in common batches.

Requests are handled by an event loop, translation by one thread: the processor or GPU is shared, and requests that
wait are best translated together. The thread takes waiting lines in the order of their arrival, up to about one batch
of the search, translates them, and takes the lines that have arrived meanwhile. So a line that is alone is translated
at once, and the batches grow with the load.
"""

import copy
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from nmt.decoding.translator import Translation, Translator, check_scores, default_batch_tokens
from nmt.runtime.logging import log
from nmt.serving.metrics import BATCH_LINES, WAITING

CHARACTERS_PER_PIECE = 4  # of source text, about; limits a round by its text, which is not tokenized yet
# A round has few lines beside a file, and its last lines leave the batch nearly empty. So it is one search in one large
# batch rather than several after each other: the default of search.batch_tokens is this many times that of the search.
BATCH_FACTOR = 4
# After a round with several requests, their clients are likely to send the next ones once they have their answers. The
# next round waits for these. As shares of the time of the last round: until none has arrived for so long, and in all.
MAX_GAP = 0.06
MAX_WAIT = 0.2


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
    texts: dict[int, str] | None  # if given, the best translation so far of each line by its index, kept up to date
    future: "Future[list[list[Translation]]]" = field(default_factory=Future)
    results: list[list[Translation]] = field(default_factory=list)  # of the first lines


class Share(NamedTuple):
    """The lines of a job that are translated in one round, which follow those that have results."""

    job: Job
    lines: Sequence[str]


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
        self, group: Group, lines: Sequence[str], texts: dict[int, str] | None = None
    ) -> "Future[list[list[Translation]]]":
        """Add a job. Its result is as of `Translator.translate`. Cancel it if nobody waits for the result any more.

        Args:
            texts: a dict that gets the best translation so far of each line by its index, at each step of the search.

        Raises:
            QueueFullError, ClosedError: the job is not accepted.
        """
        job = Job(group, lines, texts)
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
        return job.future

    def close(self) -> None:
        """Refuse new jobs, and end the thread after the current round. Jobs without a result are cancelled."""
        with self.changed:
            self.closed = True
            self.changed.notify()
        self.thread.join()
        for job in self.jobs:
            job.future.cancel()

    def run(self) -> None:
        requests, seconds = 0, 0.0  # of the last round
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.jobs or self.closed)
                if requests > 1:
                    self.wait_for_arrivals(requests, seconds)
                if self.closed:
                    return
                shares = self.take_round()
            start_time = time.monotonic()
            if shares:
                self.translate(shares)
            requests, seconds = len(shares), time.monotonic() - start_time
            with self.changed:
                self.remove_done_jobs()

    def remove_done_jobs(self) -> None:
        """Remove jobs that have their result or were cancelled from the queue."""
        self.jobs = deque(job for job in self.jobs if not job.future.done())
        WAITING.set(len(self.jobs))

    def wait_for_arrivals(self, requests: int, seconds: float) -> None:
        """Wait for more jobs after a round with so many requests, which took so many seconds."""
        deadline, count = time.monotonic() + MAX_WAIT * seconds, 0
        while count < len(self.jobs) < requests and time.monotonic() < deadline and not self.closed:
            count = len(self.jobs)
            self.changed.wait(MAX_GAP * seconds)

    def take_round(self) -> list[Share]:
        """Return lines of the first job, and of those after it in the same group, as many as make up a round."""
        pending = [job for job in self.jobs if not job.future.cancelled()]
        if not pending:
            return []
        group = pending[0].group
        translator = self.translators[group.translator]
        assert translator.config.batch_tokens is not None
        room = CHARACTERS_PER_PIECE * translator.config.batch_tokens // translator.config.width
        shares = []
        for job in pending:
            if job.group != group:
                continue
            start = end = len(job.results)
            while end < len(job.lines) and room > 0:
                room -= len(job.lines[end]) + 1
                end += 1
            shares.append(Share(job, job.lines[start:end]))
            if room <= 0:
                break
        return shares

    def translate(self, shares: list[Share]) -> None:
        """Translate lines of several jobs; one by one if that fails, so that a job fails for its own lines only."""
        group = shares[0].job.group
        lines = [line for share in shares for line in share.lines]
        translator = copy.copy(self.translators[group.translator])
        translator.config = replace(translator.config, n_best=group.n_best)
        places = [(job, len(job.results) + index) for job, job_lines in shares for index in range(len(job_lines))]
        watch = {
            index: partial(job.texts.__setitem__, number)
            for index, (job, number) in enumerate(places)
            if job.texts is not None
        }
        BATCH_LINES.observe(len(lines))
        try:
            results = translator.translate(lines, group.keep_weights, watch=watch)
            check_scores((options[0] for options in results), 1)
        except Exception as error:
            if len(shares) > 1:
                log.warning(f"a batch of {len(shares)} requests failed; translating them one by one")
                for share in shares:
                    self.translate([share])
            elif shares[0].job.future.set_running_or_notify_cancel():
                shares[0].job.future.set_exception(error)
            return
        start = 0
        for job, job_lines in shares:
            job.results += results[start : start + len(job_lines)]
            start += len(job_lines)
            # First the future becomes running: from then on it cannot be cancelled, and takes a result.
            if len(job.results) == len(job.lines) and job.future.set_running_or_notify_cancel():
                job.future.set_result(job.results)


def enlarge_batches(translator: Translator) -> Translator:
    """Return a copy of a translator with the batch size of the server, unless the user has set one."""
    enlarged = copy.copy(translator)
    tokens = translator.config.batch_tokens or BATCH_FACTOR * default_batch_tokens(translator.device)
    enlarged.config = replace(translator.config, batch_tokens=tokens)
    return enlarged
