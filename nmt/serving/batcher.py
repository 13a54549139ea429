"""Translate the lines of many requests in common batches.

Requests are handled by an event loop, translation by one thread. The thread gets the jobs that wait, in the order of
their arrival, and translates all their lines at once; the search groups them by length. While it works, others arrive
and wait. So a request that is alone is translated at once, and the batch grows with the load.
"""

import asyncio
import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from starlette.exceptions import HTTPException

from nmt.decoding.batches import default_batch_tokens
from nmt.decoding.translation import Translation, check_scores
from nmt.decoding.translator import Translator
from nmt.system.logging import log

MAX_WAITING = 1_000  # jobs
GATHER_SECONDS = 0.005  # that a job waits for others to share its batch
# Characters of source text translated at once, for each of `search.batch_tokens`: about 4 of a piece, and 8 batches of
# the search, which then have lines of similar length.
CHARACTERS_PER_TOKEN = 32

Results = list[list[Translation]]  # the `n_best` translations of each line, best first


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
    future: asyncio.Future[Results]


class Batcher:
    """A queue of jobs and the thread that works on them. All methods but `translate` run in the event loop.

    Only the thread translates with the models; others may read what does not change, such as their tokenizers.
    """

    def __init__(self, translators: Sequence[Translator]) -> None:
        self.translators = translators
        self.waiting: list[Job] = []
        self.thread = ThreadPoolExecutor(1, "translation")
        self.worker: asyncio.Task[None] | None = None

    def submit(self, group: Group, lines: Sequence[str]) -> asyncio.Future[Results]:
        """Add a job, and return the future of its translations. Cancel it if nobody waits for them any more.

        Raises:
            HTTPException: 429 if too many jobs wait.
        """
        self.waiting = [job for job in self.waiting if not job.future.cancelled()]
        if len(self.waiting) >= MAX_WAITING:
            raise HTTPException(429, "too many requests wait; try again later", {"Retry-After": "1"})
        job = Job(group, lines, asyncio.get_running_loop().create_future())
        self.waiting.append(job)
        if self.worker is None or self.worker.done():
            self.worker = asyncio.create_task(self.run())
        return job.future

    async def run(self) -> None:
        """Translate until nothing waits."""
        while self.waiting:
            await asyncio.sleep(GATHER_SECONDS)
            jobs = self.take()
            translating = asyncio.get_running_loop().run_in_executor(self.thread, self.translate, jobs)
            for job, results in zip(jobs, await translating, strict=True):
                if job.future.cancelled():
                    continue
                if isinstance(results, Exception):
                    job.future.set_exception(results)
                else:
                    job.future.set_result(results)

    def take(self) -> list[Job]:
        """Return the first job and others of its group, in the order of their arrival, up to a limit of characters."""
        waiting = [job for job in self.waiting if not job.future.cancelled()]
        taken: list[Job] = []
        characters = 0
        for job in waiting:
            translator = self.translators[job.group.translator]
            tokens = translator.config.batch_tokens or default_batch_tokens(translator.device)
            limit = CHARACTERS_PER_TOKEN * tokens // translator.config.width
            if not taken or job.group == taken[0].group and characters < limit:
                taken.append(job)
                characters += sum(map(len, job.lines))
        self.waiting = [job for job in waiting if job not in taken]
        return taken

    def translate(self, jobs: Sequence[Job]) -> list[Results | Exception]:
        """Translate jobs of a group; if that fails, each by itself, so that only the bad ones fail."""
        if not jobs:
            return []
        group = jobs[0].group
        translator = copy.copy(self.translators[group.translator])
        translator.config = replace(translator.config, n_best=group.n_best)
        lines = [line for job in jobs for line in job.lines]
        try:
            translations = iter(translator.translate(lines, group.keep_weights))
            results = [list(islice(translations, len(job.lines))) for job in jobs]
            for options in results:
                check_scores([line[0] for line in options], 1)
            return [*results]
        except Exception as error:
            if len(jobs) == 1:
                return [error]
            log.warning(f"a batch of {len(jobs)} requests failed; translating each by itself")
            return [result for job in jobs for result in self.translate([job])]
