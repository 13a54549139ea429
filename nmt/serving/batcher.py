"""Translate lines of many requests in common batches.

Requests are handled by an event loop, translation by one thread: the processor or GPU is shared, and requests that
wait are best translated together. The thread takes waiting lines in the order of their arrival, up to about one batch
of the search. While it translates them, others join the search when there is room in the batch, as soon as they are
many enough to be worth a change of it or have waited for `JOIN_STEPS` of its steps. So a line that is alone is
translated at once, and the batch grows with the load. Each line is answered as soon as it is translated. A search ends
early when nobody waits for any of its lines.
"""

import copy
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from nmt.decoding.translation import Translation, check_scores
from nmt.decoding.translator import Translator, default_batch_tokens
from nmt.serving.prometheus import SEARCH_LINES, WAITING
from nmt.system.logging import log
from nmt.system.memory import release_memory

CHARACTERS_PER_PIECE = 4  # of source text, about; limits the first lines of a search, which are not tokenized yet
# Lines of many clients are better translated in one large batch than after each other: the default of
# search.batch_tokens is this many times that of the search.
BATCH_FACTOR = 8
JOIN_STEPS = 8  # of a search, after which lines join it even if they are few; chosen on a CPU
RELEASE_SECONDS = 10.0  # without work, after which freed memory is returned to the system
LINES_PER_SEARCH = 32768  # after which none joins: a search keeps a few numbers for each of its lines


class QueueFullError(Exception):
    """Too many requests wait."""


class ClosedError(Exception):
    """The server is being stopped."""


class AbandonedError(Exception):
    """Nobody waits for any line of the search."""


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
    taken: int = 0  # lines that the thread has taken, which are the first ones
    futures: "list[Future[list[Translation]]]" = field(init=False)  # of each line

    def __post_init__(self) -> None:
        self.futures = [Future() for _ in self.lines]

    @property
    def num_waiting(self) -> int:
        """The number of lines that the thread has not taken."""
        return len(self.lines) - self.taken


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
        translators: the models. Only the thread of the batcher translates with them; others may read what does not
            change, such as their tokenizers.
        max_waiting: number of jobs that may wait, those being translated included.
    """

    def __init__(self, translators: Sequence[Translator], max_waiting: int) -> None:
        self.translators = [*map(enlarge_batches, translators)]
        self.max_waiting = max_waiting
        self.jobs: deque[Job] = deque()
        self.changed = threading.Condition()
        self.closed = False
        self.steps_waited = 0  # calls of `take_more_lines` since lines have waited to join the search
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
        """Refuse new jobs, and end the thread after the current search. Jobs without a result are cancelled."""
        with self.changed:
            self.closed = True
            self.changed.notify()
        self.thread.join()
        for job in self.jobs:
            for future in job.futures:
                future.cancel()

    def run(self) -> None:
        patience: float | None = None  # seconds to wait before memory is returned; None if that has been done
        while True:
            with self.changed:
                has_work = self.changed.wait_for(lambda: self.jobs or self.closed, patience)
                if self.closed:
                    return
                lines = self.take_first_lines()
            if has_work:
                self.translate(lines, self.take_more_lines)
                patience = RELEASE_SECONDS
            else:
                release_memory()
                patience = None

    def remove_done_jobs(self) -> None:
        """Remove jobs from the queue of which each line has its result or was cancelled."""
        self.jobs = deque(job for job in self.jobs if not all(future.done() for future in job.futures))
        WAITING.set(len(self.jobs))

    def take_first_lines(self) -> list[JobLine]:
        """Return the lines to begin a search with: of the first job, and of those after it in the same group."""
        self.remove_done_jobs()
        if not self.jobs:
            return []
        group = self.jobs[0].group
        translator = self.translators[group.translator]
        assert translator.config.batch_tokens is not None
        return self.take(group, CHARACTERS_PER_PIECE * translator.config.batch_tokens // translator.config.width)

    def take_more_lines(self, group: Group, min_lines: int, max_lines: int) -> list[JobLine]:
        """Return lines that join a search, which calls this after each step for which its batch has room.

        There are none if fewer than `min_lines` wait and have done so for at most `JOIN_STEPS` calls, if a job of
        another group waits, or if the batcher is closed.
        """
        with self.changed:
            self.remove_done_jobs()  # those of clients that have gone, too
            waiting = [job for job in self.jobs if job.num_waiting]
            if not waiting:
                self.steps_waited = 0
            if not waiting or self.closed or any(job.group != group for job in waiting):
                return []
            self.steps_waited += 1
            if self.steps_waited <= JOIN_STEPS and sum(job.num_waiting for job in waiting) < min_lines:
                return []
            return self.take(group, max_lines=max_lines)

    def take(self, group: Group, max_characters: float = math.inf, max_lines: float = math.inf) -> list[JobLine]:
        """Return the next lines of a group in the order of their arrival: at least one, unless all are cancelled."""
        self.steps_waited = 0
        lines: list[JobLine] = []
        for job in self.jobs:
            while job.group == group and job.num_waiting:
                if lines and (max_characters <= 0 or len(lines) >= max_lines):
                    return lines
                line = JobLine(job, job.taken)
                job.taken += 1
                if not line.future.done():
                    lines.append(line)
                    max_characters -= len(line.text) + 1
        return lines

    def translate(
        self, lines: list[JobLine], take_more: Callable[[Group, int, int], list[JobLine]] | None = None
    ) -> None:
        """Translate lines of jobs; if that fails, each half of the unfinished ones, so that only the bad ones fail.

        Args:
            take_more: returns further lines of a group that join the search, see `take_more_lines`.
        """
        lines = [line for line in lines if not line.future.done()]  # some may have been cancelled meanwhile
        if not lines:
            return
        group = lines[0].job.group
        translator = copy.copy(self.translators[group.translator])
        translator.config = replace(translator.config, n_best=group.n_best)
        unfinished: dict[int, JobLine] = {}  # by the index of a line in the search
        watch: dict[int, Callable[[str], object]] = {}
        num_lines = 0

        def add_lines(new_lines: Sequence[JobLine]) -> list[str]:
            nonlocal num_lines
            for index, line in enumerate(new_lines, num_lines):
                unfinished[index] = line
                if line.job.show is not None:
                    watch[index] = partial(line.job.show, line.number)
            num_lines += len(new_lines)
            return [line.text for line in new_lines]

        def stop_if_abandoned() -> None:
            if all(line.future.done() for line in unfinished.values()):
                raise AbandonedError

        def deliver(index: int, options: list[Translation]) -> None:
            check_scores(options[:1], unfinished[index].number + 1)
            future = unfinished.pop(index).future
            watch.pop(index, None)
            # First the future becomes running: from then on it cannot be cancelled, and takes a result.
            if future.set_running_or_notify_cancel():
                future.set_result(options)

        def get_more(min_lines: int, max_lines: int) -> list[str]:
            assert take_more is not None
            return add_lines(take_more(group, min_lines, max_lines) if num_lines < LINES_PER_SEARCH else [])

        try:
            translator.translate(
                add_lines(lines),
                group.keep_weights,
                watch=watch,
                deliver=deliver,
                get_more=None if take_more is None else get_more,
                on_step=stop_if_abandoned,
            )
        except AbandonedError:
            pass
        except Exception as error:
            left = [*unfinished.values()]
            if num_lines > 1:
                log.warning(f"a search failed with {len(left)} of {num_lines} lines unfinished; translating two halves")
                half = len(left) // 2
                self.translate(left[:half])
                self.translate(left[half:])
            elif not left:
                log.exception("a search failed after its last line was finished")
            elif left[0].future.set_running_or_notify_cancel():
                left[0].future.set_exception(error)
        SEARCH_LINES.observe(num_lines)


def enlarge_batches(translator: Translator) -> Translator:
    """Return a copy of a translator with the batch size of the server, unless the user has set one."""
    enlarged = copy.copy(translator)
    tokens = translator.config.batch_tokens or BATCH_FACTOR * default_batch_tokens(translator.device)
    enlarged.config = replace(translator.config, batch_tokens=tokens)
    return enlarged
