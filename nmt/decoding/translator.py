"""Translation of lines of text, in the order of the input.

Lines are sorted by length and batched internally; the translation of a line does not depend on the others. An empty
line becomes an empty line. A line of more than `search.max_source` pieces is split, and its parts are translated
separately and joined.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from tqdm import tqdm

from nmt.config import EOS, PAD, UNK, SearchConfig
from nmt.data.batch import make_batch, round_down_to_shape
from nmt.data.tokenizer import LanguageTokenizer, Tokenizer
from nmt.data.words import join_sentences, split_words
from nmt.decoding.alignment import EOS_PIECE, Record
from nmt.decoding.hypotheses import ActiveBatch, Hypothesis
from nmt.decoding.line_parts import LinePart, LineParts, split_long_line
from nmt.decoding.preparation import PreparedLine, Preparer
from nmt.decoding.search import NewSentences, SearchModel, score_targets, stream_search
from nmt.decoding.translation import Translation, drop_duplicate_texts
from nmt.errors import UserError
from nmt.model.out_of_memory import halve_until_it_fits
from nmt.system.distributed import all_gather, rank, shard
from nmt.system.logging import log
from nmt.system.messages import format_first_lines, pluralize
from nmt.system.text import read_dictionary

R = TypeVar("R")
BATCHES_PER_SEARCH = 8  # batches passed to one search, in which waiting sentences replace those that are done
JOIN_DIVISOR = 4  # lines join a running search when they make up 1 / JOIN_DIVISOR of its batch: few are slow to encode
LINE_BREAKS_TO_SPACES = str.maketrans("\n\r", "  ")


@dataclass(slots=True)
class Translator:
    """A model with its tokenizer and search settings."""

    model: SearchModel
    tokenizer: Tokenizer
    config: SearchConfig
    device: torch.device
    dictionary: dict[str, str] = field(init=False)  # target word by source word, to replace unknown words
    preparer: Preparer = field(init=False)
    languages: tuple[str, str] = ("", "")  # codes of source and target
    key: str = ""  # digest of the model's checkpoints, compared between the processes of a job

    def __post_init__(self) -> None:
        self.dictionary = read_dictionary("search.dictionary", self.config.dictionary)
        self.preparer = Preparer(self.config, self.tokenizer, self.languages)
        if self.config.replace_unknown and (self.tokenizer.target.has_byte_fallback or not self.model.attends):
            raise UserError(
                "search.replace_unknown=true needs a model with attention that can output <unk>, as with "
                "tokenizer.type=word; remove search.replace_unknown"
            )
        if self.config.coverage_penalty and not self.model.attends:
            raise UserError(
                f"search.coverage_penalty={self.config.coverage_penalty} needs a model with attention; remove "
                "search.coverage_penalty"
            )

    def translate(
        self,
        lines: Sequence[str],
        keep_weights: bool = False,
        first_line: int = 1,
        progress: bool = False,
        prefixes: Sequence[str] | None = None,
        results: list[list[Translation]] | None = None,
        watch: Mapping[int, Callable[[str], object]] | None = None,
        deliver: Callable[[int, list[Translation]], object] | None = None,
        get_more: Callable[[int, int], Sequence[str]] | None = None,
        on_step: Callable[[], object] | None = None,
    ) -> list[list[Translation]]:
        """Return the `search.n_best` translations of each line with different texts, best first, or that many samples.

        There are fewer translations if the search found fewer different ones.

        Args:
            keep_weights: whether translations get attention weights.
            first_line: number of the first line in warnings.
            progress: whether to show a progress bar.
            prefixes: text that the translation of each line starts with; in a line translated in parts, the first part.
            results: a list to append the results to. If an exception ends the work, it has those of the first lines.
            watch: functions by the index of a line, which are called after each step with the best translation so far.
            deliver: called once for each line, with its index and its translations, as soon as they are found. They
                are not kept, and an empty list is returned.
            get_more: called again and again, with two numbers of lines: how many are worth a change of the batch, and
                how many it has room for. It returns further lines, as many as the second number at most; they are
                numbered after those before, and translated together with them.
            on_step: called after each step. Its exceptions end the work.

        Raises:
            UserError: a prefix is longer than a translation may be, or memory is too small for a single line.
        """
        results = [] if results is None else results
        config = self.config
        if config.n_best > 1 and not config.sample:
            config = replace(config, n_best=config.beam)  # different pieces may spell the same text
        search_keeps_weights = keep_weights or config.replace_unknown
        work = LineParts(config.sample)
        lengths: list[int] = []  # pieces of each part
        texts_so_far: dict[int, dict[int, str]] = {}  # by line, and by the index of its part; used with `watch`

        def add_lines(lines: Sequence[str], prefixes: Sequence[str] | None) -> range:
            """Add lines to the work, and return the indices of their parts."""
            first = work.num_lines
            rows = work.add(len(lines), self.split_lines(lines, prefixes, first_line, first))
            lengths.extend(len(work.parts[row].ids) for row in rows)
            warn_if_out_of_reach(self.model, [lengths[row] + 1 for row in rows], "lines or parts of lines")
            for row in rows if watch else ():
                texts_so_far.setdefault(work.parts[row].line, {})[row] = ""
            for line in range(first, work.num_lines):
                deliver_if_complete(line)
            return rows

        def deliver_if_complete(line: int) -> None:
            if deliver is not None and work.is_complete(line):
                deliver(line, work.join_results(line))
                work.forget(line)
                texts_so_far.pop(line, None)

        def run(rows: list[int], size: int) -> Iterator[tuple[int, list[Translation]]]:
            nonlocal get_more
            # Nothing joins a search that is repeated after an error, in smaller batches.
            get_lines, get_more = get_more, None
            waiting: deque[int] = deque()  # parts that are not in the search yet
            if get_lines is not None:
                rows_of_search = set(rows)
                waiting.extend(row for row in work.find_missing() if row not in rows_of_search)

            def make_sentences(rows: list[int]) -> NewSentences:
                parts = [work.parts[row] for row in rows]
                ids = [part.ids for part in parts]
                batch = make_batch(ids).to(self.device)
                prefixes = [part.prefix_ids for part in parts]
                literals = self.preparer.find_required(ids, [part.prepared.prefix for part in parts])
                return NewSentences(batch.source_BS, batch.source_length_B, prefixes, literals)

            def get_sentences(num_active: int, positions: int) -> NewSentences | None:
                assert get_lines is not None
                longest = positions - 1 if num_active else 0
                room = choose_batch_size(longest, config.width, config, self.device) - num_active
                enough = max(1, num_active // JOIN_DIVISOR)
                if not waiting and room >= enough:
                    waiting.extend(add_lines(get_lines(enough, room), None))
                first = len(rows)
                while waiting:
                    longest = max(longest, lengths[waiting[0]])
                    limit = choose_batch_size(longest, config.width, config, self.device)
                    if num_active + len(rows) - first >= limit:
                        break
                    rows.append(waiting.popleft())
                if len(rows) == first:
                    return None
                rows[first:] = sort_longest_first(rows[first:], lengths)
                return make_sentences(rows[first:])

            def after_step(active: ActiveBatch) -> None:
                if on_step is not None:
                    on_step()
                if watch:
                    self.notify_watchers(watch, work.parts, rows, texts_so_far, active)

            first = make_sentences(rows)
            search_results = stream_search(
                self.model,
                first.source_BS,
                first.length_B,
                config,
                search_keeps_weights,
                first.prefixes,
                size,
                after_step,
                first.literals,
                get_sentences if get_lines is not None else None,
            )
            with closing(search_results):  # end the search at once if `deliver` fails
                for index, hypotheses in search_results:
                    part = work.parts[rows[index]]
                    options = [
                        self.to_translation(part.ids, hypothesis, part.source_words, part.prefix_words, part.prepared)
                        for hypothesis in hypotheses
                    ]
                    if not config.sample:
                        options = drop_duplicate_texts(options)[: self.config.n_best]
                    yield rows[index], options
                    deliver_if_complete(part.line)
            get_more = get_lines

        add_lines(lines, prefixes)
        try:
            while rows := work.find_missing():
                self.run_in_batches(rows, lengths, config.width, BATCHES_PER_SEARCH, run, progress, work.results)
                for line in [*work.rows_of_lines]:  # those whose delivery ran out of memory
                    deliver_if_complete(line)
        finally:
            if deliver is None:
                missing = (work.parts[row].line for row in work.find_missing())
                complete = next(missing, work.num_lines)  # lines before the first one that is not complete
                results += map(work.join_results, range(complete))
        if keep_weights and self.model.attends:
            best = enumerate((options[0] for options in results), first_line)
            unaligned = [line for line, option in best if option.weights_TS is None and option.source_pieces]
            if unaligned:
                lines = f"{pluralize(len(unaligned), 'line')} {'is' if len(unaligned) == 1 else 'are'}"
                log.warning(f"{lines} too long to be aligned ({format_first_lines(unaligned)})")
        return results

    def notify_watchers(
        self,
        watch: Mapping[int, Callable[[str], object]],
        parts: Mapping[int, LinePart],
        rows: Sequence[int],
        texts_so_far: dict[int, dict[int, str]],
        active: ActiveBatch,
    ) -> None:
        """Call the functions in `watch` with the best translations so far.

        Args:
            parts: the parts of lines, by index.
            rows: for each sentence of the search, the index of its part.
            texts_so_far: the best translations so far by line and by the index of its part; updated here.
            active: the batch after a step.
        """
        changed = set()  # lines
        unfinished_B = ~active.returned_B
        sentence_B, best_BT = active.inputs.sentence_B[unfinished_B], active.beams.tokens_BKT[unfinished_B, 0]
        for sentence, tokens in zip(sentence_B.tolist(), best_BT.tolist(), strict=True):
            part = parts[rows[sentence]]
            line = part.line
            if line in watch:
                ids = [token for token in tokens if token not in (PAD, EOS)]
                text = self.tokenizer.target.decode(ids)
                texts_so_far[line][rows[sentence]] = part.prepared.finish(text)
                changed.add(line)
        for line in changed:
            texts = texts_so_far[line].values()
            watch[line](next(iter(texts)) if len(texts) == 1 else join_sentences(texts))

    def prepare_lines(self, lines: Sequence[str], prefixes: Sequence[str], first_line: int) -> list[PreparedLine]:
        """Return the lines as they are to be translated, with the prefixes of their translations."""
        prepared_lines = [self.preparer.prepare(*pair) for pair in zip(lines, prefixes, strict=True)]
        left_out = [number for number, line in enumerate(prepared_lines, first_line) if line.left_out]
        if left_out:
            log.warning(
                f"{pluralize(len(left_out), 'line')} with more than tokenizer.literals={len(self.preparer.pieces)} "
                f"numbers, addresses, tags or terms; the last of them are translated like other text "
                f"({format_first_lines(left_out)})"
            )
        return prepared_lines

    def split_lines(
        self, lines: Sequence[str], prefixes: Sequence[str] | None, first_line: int, first_index: int = 0
    ) -> list[LinePart]:
        """Return the parts to translate: none for an empty line, several for a line that is too long.

        Args:
            first_line: number, in messages, of the line with index 0.
            first_index: index of the first of these lines.
        """
        first_line += first_index
        prepared_lines = self.prepare_lines(lines, [""] * len(lines) if prefixes is None else prefixes, first_line)
        ids_of_prefixes = self.tokenizer.target.encode([line.prefix for line in prepared_lines])
        ids_of_lines = self.tokenizer.source.encode([line.text for line in prepared_lines])
        limit = self.config.max_source
        parts = []
        split_line_numbers = []
        for index, (line, ids, prefix_ids) in enumerate(zip(lines, ids_of_lines, ids_of_prefixes, strict=True)):
            where = f"line {first_line + index}"
            if len(prefix_ids) >= self.config.max_length:
                raise UserError(
                    f"{where}: the prefix has {len(prefix_ids):,} pieces, and search.max_length="
                    f"{self.config.max_length} leaves no room after it; increase search.max_length or shorten the "
                    "prefix"
                )
            if not ids or not line.strip():
                if prefix_ids:
                    log.warning(f"{where} is empty, so its translation is empty too; its prefix is ignored")
                continue
            ids_of_parts = [ids]
            if limit is not None and len(ids) >= limit:
                split_line_numbers.append(first_line + index)
                ids_of_parts = split_long_line(ids, self.tokenizer.source.pieces(ids), limit - 1)
            source_words: list[str] = []
            prefix_words: list[str] = []
            if self.config.replace_unknown:
                source_words = self.tokenizer.source.normalized_words(prepared_lines[index].text)
                prefix_words = self.tokenizer.target.normalized_words(prepared_lines[index].prefix)
            start = 0
            for part_ids in ids_of_parts:
                end = start + len(part_ids)
                words = source_words[start:end]
                parts.append(
                    LinePart(first_index + index, part_ids, prefix_ids, prefix_words, words, prepared_lines[index])
                )
                prefix_ids, prefix_words = [], []
                start = end
        if split_line_numbers:
            log.warning(
                f"{pluralize(len(split_line_numbers), 'line')} of more than search.max_source={limit} pieces, "
                f"translated in parts ({format_first_lines(split_line_numbers)})"
            )
        return parts

    def score(self, sources: Sequence[str], targets: Sequence[str], progress: bool = False) -> list[Translation]:
        """Return the given targets with their log-probabilities, computed by forced decoding."""
        source_ids = self.tokenizer.source.encode(list(sources))
        target_ids = self.tokenizer.target.encode(list(targets))
        warn_if_out_of_reach(self.model, [len(ids) + 1 for ids in source_ids], "lines")
        hypotheses = self.force_decode(source_ids, target_ids, progress, keep_weights=False)
        return [
            self.to_translation(source, hypothesis) for source, hypothesis in zip(source_ids, hypotheses, strict=True)
        ]

    def align(
        self,
        sources: Sequence[list[str]],
        targets: Sequence[list[str]],
        max_length: int = 1000,
        first_line: int = 1,
        progress: bool = False,
        segment: bool = False,
    ) -> list[Record]:
        """Align pairs of sentences, given as lists of words, by forced decoding.

        The words of a record are exactly those given, unless `segment` is set: then words in scripts without spaces are
        segmented further.

        Args:
            max_length: pieces on either side, `</s>` included. Longer pairs get no weights, with a warning.
            first_line: number of the first pair in warnings.
            progress: whether to show a progress bar.
            segment: whether to segment words in scripts that are written without spaces.

        Raises:
            UserError: memory is too small for a single pair.
        """
        source_parts, target_parts = (
            split_unspaced_words(lines, side) if segment else [[[word] for word in line] for line in lines]
            for lines, side in ((sources, self.tokenizer.source), (targets, self.tokenizer.target))
        )
        sources, targets = (
            [[part for word in line for part in word] for line in lines] for lines in (source_parts, target_parts)
        )
        source_ids, source_index = self.tokenizer.source.encode_words(source_parts)
        target_ids, target_index = self.tokenizer.target.encode_words(target_parts)
        lengths = [max(len(s), len(t)) + 1 for s, t in zip(source_ids, target_ids, strict=True)]
        rows = [row for row, length in enumerate(lengths) if length <= max_length]
        warn_if_out_of_reach(self.model, [len(source_ids[row]) + 1 for row in rows], "lines")
        decoded = self.force_decode([source_ids[row] for row in rows], [target_ids[row] for row in rows], progress)
        hypotheses = dict(zip(rows, decoded, strict=True))
        records = []
        for row, length in enumerate(lengths):
            if row not in hypotheses:
                log.warning(
                    f"line {first_line + row} has {length:,} pieces, more than the {max_length:,} allowed, so it has "
                    "no links"
                )
                hypotheses[row] = Hypothesis([*target_ids[row], EOS], float("-inf"), None)
            translation = self.to_translation(source_ids[row], hypotheses[row])
            records.append(
                Record(
                    source_pieces=translation.source_pieces,
                    target_pieces=translation.target_pieces,
                    source_words=sources[row],
                    target_words=targets[row],
                    source_word_of_piece=[*source_index[row], -1],
                    target_word_of_piece=[*target_index[row], -1],
                    weights=translation.weights_TS,
                    score=translation.score,
                )
            )
        return records

    def encode_pieces(
        self, source_pieces: Sequence[str], target_pieces: Sequence[str]
    ) -> tuple[list[int], list[int]] | None:
        """Return source and target ids of a translation, without `</s>`.

        None stands for an empty line and for one that was translated in parts.
        """
        if source_pieces.count(EOS_PIECE) != 1:
            return None
        sides = (self.tokenizer.source, source_pieces), (self.tokenizer.target, target_pieces)
        source, target = (
            side.processor.piece_to_id([piece for piece in pieces if piece != EOS_PIECE]) for side, pieces in sides
        )
        return source, target

    def force_decode(
        self, source_ids: list[list[int]], target_ids: list[list[int]], progress: bool, keep_weights: bool = True
    ) -> list[Hypothesis]:
        """Score pairs of sentences given as ids."""

        def run(rows: list[int], size: int) -> Iterator[tuple[int, Hypothesis]]:
            batch = make_batch([source_ids[row] for row in rows], [target_ids[row] for row in rows]).to(self.device)
            hypotheses = score_targets(
                self.model, batch.source_BS, batch.source_length_B, batch.target_BT, keep_weights
            )
            return zip(rows, hypotheses, strict=True)

        lengths = [max(len(source), len(target)) for source, target in zip(source_ids, target_ids, strict=True)]
        results: dict[int, Hypothesis] = {}
        self.run_in_batches(range(len(lengths)), lengths, 1, 1, run, progress, results)
        return [results[row] for row in range(len(lengths))]

    def run_in_batches(
        self,
        rows: Iterable[int],
        lengths: Sequence[int],
        width: int,
        batches_per_call: int,
        run: Callable[[list[int], int], Iterable[tuple[int, R]]],
        progress: bool,
        results: dict[int, R],
    ) -> None:
        """Call `run(rows, size)` until each row has a result, and store the pairs (row, result) that it yields.

        The rows of a call have similar lengths and are sorted by decreasing length. There are up to
        `batches_per_call * size` of them, to be processed `size` at a time; `run` may append others. If memory is too
        small, sizes are halved from there on. The processes of a job share the rows, and all of them get all results.
        """
        remaining = list(shard(sort_longest_first(rows, lengths)))
        max_size = len(remaining)

        with tqdm(total=len(remaining), unit=" lines", disable=None if progress and not rank() else True) as bar:

            def process(rows: list[int], first_size: int, size: int) -> list[int]:
                if any(row in results for row in rows):  # from a call that has failed
                    rows = [row for row in rows if row not in results]
                if size < first_size:  # retry with a single batch, so that no waiting rows take up memory
                    rows = rows[:size]
                for row, result in run(rows, size) if rows else ():
                    results[row] = result
                    bar.update()
                return rows

            while remaining:
                longest = lengths[remaining[0]]
                full_size = choose_batch_size(longest, width, self.config, self.device)
                size = min(full_size, max_size, len(remaining))
                # Leave out much shorter lines, which can be processed in larger batches.
                rows = [
                    row
                    for row in remaining[: batches_per_call * size]
                    if choose_batch_size(lengths[row], width, self.config, self.device) < 2 * full_size
                ]
                taken = len(rows)
                width_key = "n_best" if self.config.sample else "beam"
                remedy = f"; lower search.{width_key}={width}" if width > 1 else ""
                error = UserError(f"out of memory for one line of {longest + 1:,} pieces{remedy}", any_rank=True)
                _, fitting_size = halve_until_it_fits(partial(process, rows, size), size, error)
                if fitting_size < size:
                    log.warning(
                        f"out of memory for {size:,} lines at a time; continuing with {fitting_size:,}",
                        extra={"any_rank": True},
                    )
                    max_size, batches_per_call = fitting_size, 1
                remaining = [row for row in rows[:taken] if row not in results] + remaining[taken:]
                if len(rows) > taken:
                    remaining = [row for row in remaining if row not in results]
        for part in all_gather(results):
            results.update(part)

    def to_translation(
        self,
        source_ids: list[int],
        hypothesis: Hypothesis,
        source_words: Sequence[str] = (),
        prefix_words: Sequence[str] = (),
        prepared: PreparedLine | None = None,
    ) -> Translation:
        """Return a hypothesis as text and pieces.

        With source words, one for each source id, unknown words in the text are replaced (see `to_text`). The
        preparation of the line is undone in the text.
        """
        weights_TS = hypothesis.weights_TS
        if weights_TS is not None:
            weights_TS = weights_TS[:, : len(source_ids) + 1].clone()  # a view would keep the whole batch in memory
        text = self.to_text(hypothesis, source_words, prefix_words)
        if prepared is not None:
            text = prepared.finish(text)
        return Translation(
            text=text,
            source_pieces=self.tokenizer.source.pieces([*source_ids, EOS]),
            target_pieces=self.tokenizer.target.pieces(hypothesis.tokens),
            score=hypothesis.score,
            weights_TS=None if weights_TS is None else weights_TS.numpy(),
            ended=hypothesis.tokens[-1:] == [EOS],
            ranking_score=hypothesis.ranking_score,
            prepared=prepared,
        )

    def to_text(self, hypothesis: Hypothesis, source_words: Sequence[str], prefix_words: Sequence[str]) -> str:
        """Return the text of a hypothesis. With source words, unknown words are replaced.

        An unknown word becomes the source word with the largest attention weight, or the translation of that word in
        the dictionary (Luong et al. 2015, section 4.2; Jean et al. 2015). Unknown words of the prefix stay.
        """
        decode = self.tokenizer.target.decode
        ids = [token for token in hypothesis.tokens if token != EOS]
        if not source_words or UNK not in ids:
            return decode(ids)
        assert hypothesis.weights_TS is not None
        best_source = hypothesis.weights_TS[: len(ids), : len(source_words)].argmax(1).tolist()
        aligned_words = [source_words[i] for i in best_source[len(prefix_words) :]]
        replacements = [*prefix_words, *(self.dictionary.get(word, word) for word in aligned_words)]
        words = [
            replacement if token == UNK else decode([token])
            for token, replacement in zip(ids, replacements, strict=True)
        ]
        return " ".join(words).translate(LINE_BREAKS_TO_SPACES)  # a source word may contain a lone \r


def split_unspaced_words(lines: Sequence[list[str]], side: LanguageTokenizer) -> list[list[list[str]]]:
    """Return the parts of the space-separated words of lines, several for scripts without spaces.

    A word tokenizer cannot encode parts of words, so for it nothing is split.
    """
    return [split_words(line) if side.has_byte_fallback else [[word] for word in line] for line in lines]


def warn_if_out_of_reach(model: SearchModel, lengths: Sequence[int] | np.ndarray, what: str) -> None:
    """Warn of sources that are longer than the attention can reach. `what` names the sources in the message."""
    if model.reach is None:
        return
    count = int((np.asarray(lengths) > model.reach).sum())
    if count:
        log.warning(
            f"{count:,} of {len(lengths):,} {what} have more than model.attention.max_positions={model.reach} source "
            "pieces; later pieces get no attention"
        )


def default_batch_tokens(device: torch.device) -> int:
    """Return the default of `search.batch_tokens`. A GPU needs larger batches to hide kernel launches."""
    return 64_000 if device.type == "cuda" else 8_000


def sort_longest_first(rows: Iterable[int], lengths: Sequence[int]) -> list[int]:
    """Return rows sorted by decreasing length, `lengths[row]`."""
    return sorted(rows, key=lambda row: -lengths[row])


def choose_batch_size(longest: int, width: int, config: SearchConfig, device: torch.device) -> int:
    """Return the number of sentences in a batch, at least 1.

    It is `search.batch_sentences` if set. Otherwise it is as many as `search.batch_tokens` allows, where each sentence
    counts as the longest one, `</s>` included, times `width` hypotheses.
    """
    if config.batch_sentences:
        return config.batch_sentences
    tokens = config.batch_tokens or default_batch_tokens(device)
    return round_down_to_shape(max(1, tokens // ((longest + 1) * width)))
