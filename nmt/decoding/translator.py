"""Lines of text in, translations out, in the order of the input.

Lines are sorted by length and batched inside; what one line becomes does not depend on the others. An empty line
becomes an empty line; a line of more than `search.max_source` pieces is split, translated in parts and joined.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from tqdm import tqdm

from nmt.config import EOS, UNK, SearchConfig
from nmt.data.batching import SHAPE_MULTIPLE, make_batch
from nmt.data.tokenizer import JOINT, LanguageTokenizer, Tokenizer, split_at_words
from nmt.data.words import join_sentences, split_words
from nmt.decoding.alignment import Record
from nmt.decoding.hypotheses import Hypothesis
from nmt.decoding.search import Model, score_targets, stream
from nmt.errors import UserError
from nmt.model.out_of_memory import halve_until_it_fits
from nmt.runtime.distributed import all_gather, rank, shard
from nmt.runtime.lines import count_of, first_few
from nmt.runtime.logging import log
from nmt.runtime.text_io import read_dictionary

R = TypeVar("R")
WEIGHTS = 2**21  # attention weights of one line at most; of a damaged one of 100,000 characters they would fill memory
QUEUE = 8  # batches that are searched as one, where the next sentence takes the place of one that is done
BREAKS = str.maketrans("\n\r", "  ")
SENTENCE_END, WIDE = tuple(".!?;:。！？；…"), tuple("。！？；…")  # wide ones need no space after them


@dataclass(frozen=True, slots=True)
class Translation:
    """A line's translation. Pieces end with `</s>`, unless the translation was cut at its maximum length."""

    text: str
    source_pieces: list[str] = field(default_factory=list)
    target_pieces: list[str] = field(default_factory=list)
    score: float = 0.0  # summed log-probability, `</s>` included, without penalties
    weights_TS: np.ndarray | None = None  # a row for each target piece, a column for each source piece
    ended: bool = True  # at `</s>`; of a line in parts, each of them
    ranking_score: float | None = None  # the score after length and coverage penalty, by which the n best are in order;
    # of a line in parts the sum over its parts; None of samples and of given targets, which are not ranked

    @property
    def record(self) -> Record:
        """Its alignment; words are what stands between spaces in the text of the pieces, divided where its script is
        written without them."""
        source_words, source_index = split_at_words(self.source_pieces)
        target_words, target_index = split_at_words(self.target_pieces)
        return Record(
            *(self.source_pieces, self.target_pieces, source_words, target_words),
            *(source_index, target_index, self.weights_TS, self.score),
        )


@dataclass(frozen=True, slots=True)
class LinePart:
    """What is translated at a time: a line, or a part of one that is too long."""

    line: int  # its index among all lines
    ids: list[int]
    beginning: list[int]  # the target ids that its translation begins with
    given: list[str]  # ... and their words, where unknown words are replaced,
    words: list[str]  # and the source word of each id


def split_long(ids: list[int], pieces: list[str], limit: int) -> list[list[int]]:
    """Cut a long line into parts of at most `limit` pieces: after a mark that ends a word, else before a word, else
    anywhere."""
    parts, begin = [], 0
    while len(ids) - begin > limit:
        places = range(begin + max(1, limit // 2) + 1, begin + limit + 1)
        starts = [i for i in places if pieces[i].startswith("▁")]
        opening = set(starts)
        ends = [i for i in places if pieces[i - 1].endswith(SENTENCE_END if i in opening else WIDE)]
        cut = (ends or starts or [begin + limit])[-1]
        parts.append(ids[begin:cut])
        begin = cut
    return [*parts, ids[begin:]]


def distinct(options: list[Translation]) -> list[Translation]:
    """The first of each text."""
    found: dict[str, Translation] = {}
    for option in options:
        found.setdefault(option.text, option)
    return list(found.values())


def alternatives(own: list[list[Translation]], sample: bool) -> list[Translation]:
    """Translations of a line by those of its parts: the best of each, or the samples one by one. An empty line, which
    has no parts, has an empty one."""
    if len(own) == 1:
        return own[0]
    rows = own if sample else [options[:1] for options in own]
    return [join(list(parts)) for parts in zip(*rows, strict=True)] or [
        Translation("", ranking_score=None if sample else 0.0)
    ]


def join(parts: list[Translation]) -> Translation:
    """One translation of the translations of a line's parts; weights become blocks along the diagonal, if they are not
    more than `WEIGHTS`."""
    source_pieces = [piece for part in parts for piece in part.source_pieces]
    target_pieces = [piece for part in parts for piece in part.target_pieces]
    blocks = [torch.from_numpy(part.weights_TS) for part in parts if part.weights_TS is not None]
    ranked = [part.ranking_score for part in parts if part.ranking_score is not None]
    known = len(blocks) == len(parts) and len(source_pieces) * len(target_pieces) <= WEIGHTS
    return Translation(
        text=join_sentences(part.text for part in parts),
        source_pieces=source_pieces,
        target_pieces=target_pieces,
        score=sum(part.score for part in parts),
        weights_TS=torch.block_diag(*blocks).numpy() if known else None,
        ended=all(part.ended for part in parts),
        ranking_score=sum(ranked) if len(ranked) == len(parts) else None,
    )


@dataclass(slots=True)
class Translator:
    """A model with its tokenizer, and how to search with it."""

    model: Model
    tokenizer: Tokenizer
    config: SearchConfig
    device: torch.device
    dictionary: dict[str, str] = field(init=False)  # target words by unknown source words
    key: str = ""  # digest of the model's checkpoints, by which processes compare what they have loaded

    def __post_init__(self) -> None:
        self.dictionary = read_dictionary(self.config.dictionary)
        if self.config.replace_unknown and (self.tokenizer.target.bytes_fall_back or not self.model.attends):
            raise UserError(
                "search.replace_unknown=true is for models with attention that write <unk>, as tokenizer.type=word does"
            )
        if self.config.coverage_penalty and not self.model.attends:
            raise UserError(
                f"search.coverage_penalty={self.config.coverage_penalty} is about attention, and the model has none"
            )

    def translate(
        self, lines: Sequence[str], keep_weights: bool = False, first_line: int = 1, progress: bool = False,
        beginnings: Sequence[str] | None = None, found: list[list[Translation]] | None = None,
    ) -> list[list[Translation]]:  # fmt: skip
        """For each line its `search.n_best` translations, different as text, best first, fewer where there are no more;
        or so many samples.

        Args:
            keep_weights: whether translations have attention weights.
            first_line: the number of the first line in warnings.
            beginnings: with what words the translation of each line begins; of a line in parts that of the first.
            found: a list that gets what is returned; where the work ends early it gets that of the first lines.

        Raises:
            UserError: a beginning is longer than a translation may be; or memory does not suffice for one line.
        """
        found = [] if found is None else found
        parts = self.parts(lines, beginnings, first_line)
        warn_of_reach(self.model, [len(part.ids) + 1 for part in parts], "lines or parts of lines")
        config = self.config
        if config.n_best > 1 and not config.sample:
            config = replace(config, n_best=config.beam)  # some may be the same text in other pieces

        def run(rows: list[int], size: int) -> Iterator[tuple[int, list[Translation]]]:
            batch = make_batch([parts[row].ids for row in rows]).to(self.device)
            given = [parts[row].beginning for row in rows]
            keep = keep_weights or config.replace_unknown
            for place, own in stream(self.model, batch.source_BS, batch.source_length_B, config, keep, given, size):
                part = parts[rows[place]]
                options = [self.read(part.ids, hypothesis, part.words, part.given) for hypothesis in own]
                yield rows[place], options if config.sample else distinct(options)[: self.config.n_best]

        results: dict[int, list[Translation]] = {}
        try:
            self.in_batches([len(part.ids) for part in parts], config.width, QUEUE, run, progress, results)
        finally:
            complete = next((part.line for row, part in enumerate(parts) if row not in results), len(lines))
            options_of: list[list[list[Translation]]] = [[] for _ in range(complete)]
            for row, part in enumerate(parts):
                if part.line < complete:
                    options_of[part.line].append(results[row])
            found += [alternatives(own, config.sample) for own in options_of]
        if keep_weights and self.model.attends:
            best = enumerate((own[0] for own in found), first_line)
            if long := [line for line, one in best if one.weights_TS is None and one.source_pieces]:
                log.warning(f"{count_of(len(long), 'line')} too long to be aligned ({first_few(long)})")
        return found

    def parts(self, lines: Sequence[str], beginnings: Sequence[str] | None, first_line: int) -> list[LinePart]:
        """What is to be translated: nothing of an empty line, several parts of one that is too long."""
        given = [[] for _ in lines] if beginnings is None else self.tokenizer.target.encode(list(beginnings))
        found, long, limit = [], [], self.config.max_source
        for number, (line, ids, beginning) in enumerate(
            zip(lines, self.tokenizer.source.encode(list(lines)), given, strict=True)
        ):
            where = f"line {first_line + number}"
            if len(beginning) >= self.config.max_length:
                raise UserError(
                    f"{where}: the given beginning has {len(beginning):,} pieces; "
                    f"search.max_length={self.config.max_length} allows no more after it"
                )
            if not ids or not line.strip():
                if beginning:
                    log.warning(f"{where} is empty, and so is its translation, whatever it should begin with")
                continue
            cut = [ids]
            if limit is not None and len(ids) >= limit:
                long.append(first_line + number)
                cut = split_long(ids, self.tokenizer.source.pieces(ids), limit - 1)
            words_left, words_given, place = [], [], 0
            if self.config.replace_unknown:
                words_left = self.tokenizer.source.spelled(line)
                words_given = self.tokenizer.target.spelled(beginnings[number]) if beginnings and beginning else []
            for part in cut:
                found.append(LinePart(number, part, beginning, words_given, words_left[place : place + len(part)]))
                beginning, words_given, place = [], [], place + len(part)
        if long:
            log.warning(
                f"{count_of(len(long), 'line')} of more than search.max_source={limit} pieces, translated in parts "
                f"({first_few(long)})"
            )
        return found

    def score(self, sources: Sequence[str], targets: Sequence[str], progress: bool = False) -> list[Translation]:
        """Forced decoding: the log-probability of each given pair.

        Raises:
            UserError: memory does not suffice for one pair.
        """
        source_ids = self.tokenizer.source.encode(list(sources))
        found = self.forced(source_ids, self.tokenizer.target.encode(list(targets)), progress, keep_weights=False)
        return [self.read(source, hypothesis) for source, hypothesis in zip(source_ids, found, strict=True)]

    def align(
        self, sources: Sequence[list[str]], targets: Sequence[list[str]], max_length: int = 1000, first_line: int = 1,
        progress: bool = False, divide: bool = False,
    ) -> list[Record]:  # fmt: skip
        """Forced alignment of pairs given as words; a record's words are these, whatever is in them, with `divide`
        divided where their script is written without spaces.

        A pair of more than `max_length` pieces on a side, `</s>` counted, gets no weights. `first_line` is the
        number of the first pair in the warning of that.

        Raises:
            UserError: memory does not suffice for one pair.
        """
        joined = sources, targets
        if divide:
            sources, joined_sources = divided(sources, self.tokenizer.source)
            targets, joined_targets = divided(targets, self.tokenizer.target)
            joined = joined_sources, joined_targets
        source_ids, source_index = self.tokenizer.source.encode_words(joined[0])
        target_ids, target_index = self.tokenizer.target.encode_words(joined[1])
        lengths = [max(len(s), len(t)) + 1 for s, t in zip(source_ids, target_ids, strict=True)]
        rows = [row for row, length in enumerate(lengths) if length <= max_length]
        found = self.forced([source_ids[row] for row in rows], [target_ids[row] for row in rows], progress)
        hypotheses = dict(zip(rows, found, strict=True))
        records = []
        for row, length in enumerate(lengths):
            if row not in hypotheses:
                log.warning(f"line {first_line + row} has {length:,} pieces, more than {max_length:,}: it has no links")
                hypotheses[row] = Hypothesis([*target_ids[row], EOS], float("-inf"), None)
            pair = self.read(source_ids[row], hypotheses[row])
            owners = [*source_index[row], -1], [*target_index[row], -1]
            records.append(Record(pair.source_pieces, pair.target_pieces, sources[row], targets[row], *owners,
                                  pair.weights_TS, pair.score))  # fmt: skip
        return records

    def forced(
        self, source_ids: list[list[int]], target_ids: list[list[int]], progress: bool, keep_weights: bool = True
    ) -> list[Hypothesis]:
        """Forced decoding of ids."""
        warn_of_reach(self.model, [len(ids) + 1 for ids in source_ids], "lines")

        def run(rows: list[int], size: int) -> Iterator[tuple[int, Hypothesis]]:
            batch = make_batch([source_ids[row] for row in rows], [target_ids[row] for row in rows]).to(self.device)
            given = batch.source_BS, batch.source_length_B, batch.target_BT
            return zip(rows, score_targets(self.model, *given, keep_weights), strict=True)

        lengths = [max(len(s), len(t)) for s, t in zip(source_ids, target_ids, strict=True)]
        results: dict[int, Hypothesis] = {}
        self.in_batches(lengths, 1, 1, run, progress, results)
        return [results[row] for row in range(len(lengths))]

    def in_batches(
        self, lengths: list[int], width: int, queue: int,
        run: Callable[[list[int], int], Iterable[tuple[int, R]]], progress: bool, results: dict[int, R],
    ) -> None:  # fmt: skip
        """Fill `results` with what `run(rows, size)` yields with the row that each is of.

        It gets rows of like length, the longest first: up to `queue` times `size` of them, of which `size` are in work
        at a time. Where memory does not suffice, sizes are halved from there on. The processes of a job share the rows.

        Raises:
            UserError: it does not suffice for one line.
        """
        order = list(shard(sort_by_length(lengths)))
        most = len(order)

        with tqdm(total=len(order), unit=" lines", disable=None if progress and not rank() else True) as bar:

            def work(rows: list[int], first_size: int, size: int) -> list[int]:
                if size < first_size:  # no others wait in memory for their turn
                    rows = [row for row in rows if row not in results][:size]
                for row, result in run(rows, size):
                    results[row] = result
                    bar.update()
                return rows

            while order:
                whole = batch_size(lengths[order[0]], width, self.config, self.device)
                size = min(whole, most, len(order))
                # Much shorter lines can be more at a time.
                rows = [
                    row
                    for row in order[: queue * size]
                    if batch_size(lengths[row], width, self.config, self.device) < 2 * whole
                ]
                key = "n_best" if self.config.sample else "beam"
                remedy = f"; lower search.{key}={width}" if width > 1 else ""
                error = UserError(
                    f"out of memory for one line of {lengths[order[0]] + 1:,} pieces{remedy}", any_rank=True
                )
                _, fits = halve_until_it_fits(partial(work, rows, size), size, error)
                if fits < size:
                    log.warning(
                        f"out of memory for {size:,} lines at a time: going on with {fits:,}", extra={"any_rank": True}
                    )
                    most, queue = fits, 1
                order = [row for row in rows if row not in results] + order[len(rows) :]
        for part in all_gather(results):
            results.update(part)

    def read(
        self, source: list[int], hypothesis: Hypothesis, source_words: Sequence[str] = (), given: Sequence[str] = ()
    ) -> Translation:
        """A hypothesis as text and pieces; with source words, one for each id, unknown words are replaced by the one
        that attention found, or by what the dictionary has for it (Luong et al. 2015, section 4.2; Jean et al. 2015);
        those that it was `given` to begin with, by themselves.
        """
        weights = hypothesis.weights_TS
        if weights is not None:
            weights = weights[:, : len(source) + 1].clone()  # a view would keep those of the whole batch
        return Translation(
            text=self.spell(hypothesis, source_words, given),
            source_pieces=self.tokenizer.source.pieces([*source, EOS]),
            target_pieces=self.tokenizer.target.pieces(hypothesis.tokens),
            score=hypothesis.score,
            weights_TS=None if weights is None else weights.numpy(),
            ended=hypothesis.tokens[-1:] == [EOS],
            ranking_score=hypothesis.ranking_score,
        )

    def spell(self, hypothesis: Hypothesis, source_words: Sequence[str], given: Sequence[str]) -> str:
        decode, ids = self.tokenizer.target.decode, [token for token in hypothesis.tokens if token != EOS]
        if not source_words or UNK not in ids:
            return decode(ids)
        assert hypothesis.weights_TS is not None
        found = [source_words[i] for i in hypothesis.weights_TS[: len(ids), : len(source_words)].argmax(1).tolist()]
        found = [*given, *(self.dictionary.get(word, word) for word in found[len(given) :])]
        text = " ".join(word if token == UNK else decode([token]) for token, word in zip(ids, found, strict=True))
        return text.translate(BREAKS)  # a word of the source may have a lone \r in it


def divided(lines: Sequence[list[str]], side: LanguageTokenizer) -> tuple[list[list[str]], list[list[str]]]:
    """Lines given as what stands between spaces: their words, and the same with `JOINT` between those that no space
    divides. For a tokenizer of words nothing is divided, for it knows no part of them."""
    if not side.bytes_fall_back:
        return list(lines), list(lines)
    parts = [split_words(line) if not any(JOINT in word for word in line) else [[word] for word in line]
             for line in lines]  # fmt: skip
    return [[word for part in line for word in part] for line in parts], [[*map(JOINT.join, line)] for line in parts]


def warn_of_cuts(translations: Sequence[Translation], config: SearchConfig, first_line: int) -> None:
    """Say which translations reached their maximum length before their end."""
    cut = [line for line, translation in enumerate(translations, first_line) if not translation.ended]
    if cut:
        log.warning(
            f"{count_of(len(cut), 'translation')} cut at the maximum length ({first_few(cut)}): "
            f"search.max_length={config.max_length} and search.max_ratio={config.max_ratio} allow no more"
        )


def check_scores(translations: Iterable[Translation], first_line: int) -> None:
    """Refuse what a model gives whose numbers overflow.

    Raises:
        UserError: a score is not a number.
    """
    for line, translation in enumerate(translations, first_line):
        if math.isnan(translation.score):
            raise UserError(
                f"line {line}: the model's score is not a number: its weights are damaged, or too large for this "
                "precision; try precision=fp32, or another checkpoint"
            )


def warn_of_reach(model: Model, lengths: Sequence[int] | np.ndarray, what: str) -> None:
    """Say how many sources are longer than attention can reach."""
    beyond = 0 if model.reach is None else int((np.asarray(lengths) > model.reach).sum())
    if beyond:
        log.warning(
            f"{beyond:,} of {len(lengths):,} {what} have more than model.attention.max_positions={model.reach} source "
            "pieces: nothing attends to the others"
        )


def default_batch_tokens(device: torch.device) -> int:
    """`search.batch_tokens` where it is not set. With few rows a GPU waits for launches."""
    return 64_000 if device.type == "cuda" else 8_000


def sort_by_length(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda row: -lengths[row])


def batch_size(longest: int, width: int, config: SearchConfig, device: torch.device) -> int:
    """Sentences at a time: `search.batch_sentences`, or as many as `search.batch_tokens` allows when each counts like
    the longest, `</s>` included, times the beam; at least one."""
    tokens = config.batch_tokens or default_batch_tokens(device)
    size = config.batch_sentences or max(1, tokens // ((longest + 1) * width))
    return size if config.batch_sentences or size < SHAPE_MULTIPLE else size - size % SHAPE_MULTIPLE
