"""Translation of lines of text, in the order of the input.

Lines are sorted by length and batched internally; the translation of a line does not depend on the others. An empty
line becomes an empty line. A line of more than `search.max_source` pieces is split, and its parts are translated
separately and joined.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from tqdm import tqdm

from nmt.config import EOS, SearchConfig
from nmt.data.batch import make_batch
from nmt.data.tokenizer import Tokenizer
from nmt.data.words import split_words
from nmt.decoding.alignment import EOS_PIECE, Record
from nmt.decoding.batches import default_batch_tokens, run_in_batches
from nmt.decoding.beams import Hypothesis
from nmt.decoding.rewriting import LineRewriter, RewrittenLine
from nmt.decoding.search import score_targets, search_translations
from nmt.decoding.step import SearchModel
from nmt.decoding.translation import Translation, combine_parts, drop_duplicate_texts
from nmt.errors import UserError
from nmt.system.distributed import all_gather, rank, shard
from nmt.system.logging import log
from nmt.system.messages import format_first_lines, pluralize

R = TypeVar("R")
MAX_ALIGNED_PIECES = 1000  # on either side, `</s>` included
SENTENCE_END_MARKS = tuple(".!?;:。！？；…")
FULL_WIDTH_END_MARKS = tuple("。！？；…")  # need no space after them
CONTINUATION_BYTE = re.compile("<0x[89AB][0-9A-F]>")  # the piece of a byte of UTF-8 that does not begin a character


class LinePart(NamedTuple):
    """What is translated as one sentence: a line, or a part of a line that is too long."""

    line: int  # index of the line
    ids: list[int]  # source ids
    prefix_ids: list[int]  # target ids that the translation starts with
    rewritten: RewrittenLine  # the line as it is translated


@dataclass(slots=True)
class Translator:
    """A model with its tokenizer and search settings."""

    model: SearchModel
    tokenizer: Tokenizer
    config: SearchConfig
    device: torch.device
    rewriter: LineRewriter = field(init=False)
    languages: tuple[str, str] = ("", "")  # codes of source and target

    def __post_init__(self) -> None:
        self.rewriter = LineRewriter(self.config, self.tokenizer, self.languages)
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
    ) -> list[list[Translation]]:
        """Return the `search.n_best` translations of each line with different texts, best first, or that many samples.

        There are fewer translations if the search found fewer different ones.

        Args:
            keep_weights: whether translations get attention weights.
            first_line: number of the first line in warnings.
            progress: whether to show a progress bar.
            prefixes: text that the translation of each line starts with; in a line translated in parts, the first part.

        Raises:
            UserError: a prefix is longer than a translation may be, or memory is too small for a single line.
        """
        parts = self.split_lines(lines, prefixes, first_line)
        warn_of_long_sources(self.model, [len(part.ids) + 1 for part in parts], "lines or parts of lines")
        options_of_lines: list[list[list[Translation]]] = [[] for _ in lines]
        for part, options in zip(parts, self.translate_parts(parts, keep_weights, progress), strict=True):
            options_of_lines[part.line].append(options)
        results = [combine_parts(options, self.config.sample) for options in options_of_lines]
        if keep_weights and self.model.attends:
            best = enumerate((options[0] for options in results), first_line)
            unaligned = [line for line, option in best if option.weights_TS is None and option.source_pieces]
            if unaligned:
                count = f"{pluralize(len(unaligned), 'line')} {'is' if len(unaligned) == 1 else 'are'}"
                log.warning(f"{count} too long to be aligned ({format_first_lines(unaligned)})")
        return results

    def translate_parts(self, parts: Sequence[LinePart], keep_weights: bool, progress: bool) -> list[list[Translation]]:
        """Return the `search.n_best` translations of each part, as `translate` does."""
        config = self.config
        if config.n_best > 1 and not config.sample:
            config = replace(config, n_best=config.beam)  # different pieces may spell the same text

        def translate_batch(rows: list[int]) -> Iterator[tuple[int, list[Translation]]]:
            chosen = [parts[row] for row in rows]
            ids = [part.ids for part in chosen]
            batch = make_batch(ids).to(self.device)
            for index, hypotheses in search_translations(
                self.model,
                batch.source_BS,
                batch.source_length_B,
                config,
                keep_weights,
                prefixes=[part.prefix_ids for part in chosen],
                literals=self.rewriter.find_required(ids, [part.rewritten.prefix for part in chosen]),
            ):
                options = [self.to_translation(ids[index], found, chosen[index].rewritten) for found in hypotheses]
                yield rows[index], options if config.sample else drop_duplicate_texts(options)[: self.config.n_best]

        lengths = [len(part.ids) for part in parts]
        return self.collect_in_batches(lengths, config.width, translate_batch, progress)

    def split_lines(self, lines: Sequence[str], prefixes: Sequence[str] | None, first_line: int) -> list[LinePart]:
        """Return the parts to translate: none for an empty line, several for a line that is too long.

        Args:
            first_line: number, in messages, of the line with index 0.
        """
        prefixes = [""] * len(lines) if prefixes is None else prefixes
        rewritten_lines = [self.rewriter.rewrite(*pair) for pair in zip(lines, prefixes, strict=True)]
        if left_out := [number for number, line in enumerate(rewritten_lines, first_line) if line.left_out]:
            log.warning(
                f"{pluralize(len(left_out), 'line')} with more than tokenizer.literals={len(self.rewriter.pieces)} "
                f"numbers, addresses, tags or terms; the last of them are translated like other text "
                f"({format_first_lines(left_out)})"
            )
        ids_of_prefixes = self.tokenizer.target.encode([line.prefix for line in rewritten_lines])
        ids_of_lines = self.tokenizer.source.encode([line.text for line in rewritten_lines])
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
            for part_ids in ids_of_parts:
                parts.append(LinePart(index, part_ids, prefix_ids, rewritten_lines[index]))
                prefix_ids = []
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
        warn_of_long_sources(self.model, [len(ids) + 1 for ids in source_ids], "lines")
        hypotheses = self.force_decode(source_ids, target_ids, progress, keep_weights=False)
        return [
            self.to_translation(source, hypothesis) for source, hypothesis in zip(source_ids, hypotheses, strict=True)
        ]

    def align(
        self,
        sources: Sequence[list[str]],
        targets: Sequence[list[str]],
        first_line: int = 1,
        progress: bool = False,
        segment: bool = False,
    ) -> list[Record]:
        """Align pairs of sentences, given as lists of words, by forced decoding.

        The words of a record are exactly those given, unless `segment` is set: then words in scripts without spaces are
        segmented further. Pairs with more than MAX_ALIGNED_PIECES on a side get no weights, with a warning.

        Args:
            first_line: number of the first pair in warnings.
            progress: whether to show a progress bar.
            segment: whether to segment words in scripts that are written without spaces.

        Raises:
            UserError: memory is too small for a single pair.
        """
        source_parts, target_parts = (
            # A word tokenizer cannot encode parts of words.
            [split_words(line) if segment and side.has_byte_fallback else [[word] for word in line] for line in lines]
            for lines, side in ((sources, self.tokenizer.source), (targets, self.tokenizer.target))
        )
        sources, targets = (
            [[part for word in line for part in word] for line in lines] for lines in (source_parts, target_parts)
        )
        source_ids, source_index = self.tokenizer.source.encode_words(source_parts)
        target_ids, target_index = self.tokenizer.target.encode_words(target_parts)
        lengths = [max(len(s), len(t)) + 1 for s, t in zip(source_ids, target_ids, strict=True)]
        rows = [row for row, length in enumerate(lengths) if length <= MAX_ALIGNED_PIECES]
        warn_of_long_sources(self.model, [len(source_ids[row]) + 1 for row in rows], "lines")
        decoded = self.force_decode([source_ids[row] for row in rows], [target_ids[row] for row in rows], progress)
        hypotheses = dict(zip(rows, decoded, strict=True))
        records = []
        for row, length in enumerate(lengths):
            if row not in hypotheses:
                log.warning(
                    f"line {first_line + row} has {length:,} pieces, more than the {MAX_ALIGNED_PIECES:,} allowed, so "
                    "it has no links"
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

    def compute_weights(self, translations: Sequence[Translation]) -> list[np.ndarray | None]:
        """Return the attention weights_TS of translations that exist already, by forced decoding.

        None stands for an empty line and for one that was translated in parts.
        """
        encoded = [self.encode_pieces(option.source_pieces, option.target_pieces) for option in translations]
        ids = {row: pair for row, pair in enumerate(encoded) if pair is not None}
        hypotheses = self.force_decode([pair[0] for pair in ids.values()], [pair[1] for pair in ids.values()], False)
        weights: list[np.ndarray | None] = [None] * len(translations)
        for (row, (source_ids, _)), hypothesis in zip(ids.items(), hypotheses, strict=True):
            weights_TS = self.to_translation(source_ids, hypothesis).weights_TS
            weights[row] = None if weights_TS is None else weights_TS[: len(translations[row].target_pieces)]
        return weights

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

        def score_batch(rows: list[int]) -> Iterator[tuple[int, Hypothesis]]:
            batch = make_batch([source_ids[row] for row in rows], [target_ids[row] for row in rows]).to(self.device)
            hypotheses = score_targets(
                self.model, batch.source_BS, batch.source_length_B, batch.target_BT, keep_weights
            )
            return zip(rows, hypotheses, strict=True)

        lengths = [max(len(source), len(target)) for source, target in zip(source_ids, target_ids, strict=True)]
        return self.collect_in_batches(lengths, 1, score_batch, progress)

    def collect_in_batches(
        self,
        lengths: Sequence[int],
        width: int,
        run: Callable[[list[int]], Iterable[tuple[int, R]]],
        progress: bool,
    ) -> list[R]:
        """Return the results of rows with the given lengths, for which `run(rows)` yields pairs (row, result).

        The processes of a job share the rows, and all of them get all results.
        """
        results: dict[int, R] = {}
        tokens = self.config.batch_tokens or default_batch_tokens(self.device)
        width_key = "n_best" if self.config.sample else "beam"
        remedy = f"; lower search.{width_key}={width}" if width > 1 else ""
        share = len(shard(range(len(lengths))))
        with tqdm(total=share, unit=" lines", disable=None if progress and not rank() else True) as bar:

            def collect(rows: list[int]) -> None:
                for row, result in run(rows):
                    results[row] = result
                    bar.update(len(results) - bar.n)  # after an error, rows are processed again

            run_in_batches(collect, lengths, tokens, width, remedy)
        for part in all_gather(results):
            results.update(part)
        return [results[row] for row in range(len(lengths))]

    def to_translation(
        self, source_ids: list[int], hypothesis: Hypothesis, rewritten: RewrittenLine | None = None
    ) -> Translation:
        """Return a hypothesis as text and pieces. What was changed in the line comes back in the text."""
        text = self.tokenizer.target.decode([token for token in hypothesis.tokens if token != EOS])
        return Translation(
            text=text if rewritten is None else rewritten.undo(text),
            source_pieces=self.tokenizer.source.pieces([*source_ids, EOS]),
            target_pieces=self.tokenizer.target.pieces(hypothesis.tokens),
            score=hypothesis.score,
            weights_TS=None if hypothesis.weights_TS is None else hypothesis.weights_TS.numpy(),
            ended=hypothesis.tokens[-1:] == [EOS],
            ranking_score=hypothesis.ranking_score,
            rewritten=rewritten,
        )


def split_long_line(ids: list[int], pieces: list[str], limit: int) -> list[list[int]]:
    """Split the ids of a line into parts of at most `limit` pieces.

    Splits after punctuation at the end of a word if possible, else before a word, else before a character.
    """
    parts = []
    start = 0
    while len(ids) - start > limit:
        places = range(start + max(1, limit // 2) + 1, start + limit + 1)
        word_starts = [i for i in places if pieces[i].startswith("▁")]
        is_word_start = set(word_starts)
        sentence_ends = [
            i
            for i in places
            if pieces[i - 1].endswith(SENTENCE_END_MARKS if i in is_word_start else FULL_WIDTH_END_MARKS)
        ]
        characters = [i for i in places if not CONTINUATION_BYTE.fullmatch(pieces[i])]
        end = (sentence_ends or word_starts or characters or [start + limit])[-1]
        parts.append(ids[start:end])
        start = end
    return [*parts, ids[start:]]


def warn_of_long_sources(model: SearchModel, lengths: Sequence[int] | np.ndarray, what: str) -> None:
    """Warn of sources that have more pieces than attention can have weights for. `what` names the sources."""
    limit = model.max_source_positions
    if limit is not None and (count := int((np.asarray(lengths) > limit).sum())):
        log.warning(
            f"{count:,} of {len(lengths):,} {what} have more than {limit} source pieces; with "
            "model.attention.score=location later pieces get no attention"
        )
