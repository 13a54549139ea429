"""Turn raw sentence pairs into clean training, validation and test text without leaks between them.

The pairs are read once, cleaned, and stored in a temporary file. Rules that need the whole text, and the choice of the
splits, work on 64-bit hashes and lengths of the pairs, so memory does not hold the text. Test pairs are those with the
smallest hashes, so the same pairs are chosen again when lines are added, except for a few displaced by new pairs.

Shapes: N stored pairs, in the order of the input.
"""

import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from heapq import heappush, heappushpop
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tqdm import tqdm
from xxhash import xxh3_64_intdigest

from nmt.config import PrepareRun
from nmt.data.overlap import EXACT, NEAR, UNSEEN, OverlapIndex, normalize_words
from nmt.data.prepare.clean import (
    NORMALIZATIONS,
    ScriptRule,
    clean_pairs,
    count_words,
    find_unusual_ratios,
    normalize_text,
)
from nmt.data.prepare.inputs import FoundInputs, InputFile, find_inputs, read_input
from nmt.data.readers import TEXT_SCHEMA, BadLine
from nmt.errors import UserError
from nmt.system.messages import format_first_lines, pluralize

log = logging.getLogger("nmt")
STORED_SCHEMA = TEXT_SCHEMA.append(pa.field("file", pa.int32())).append(pa.field("line", pa.int64()))
NEW_LINES = re.compile(r"[\r\n]+")  # within a sentence, which will be a line
STORED_NAME = "pairs.arrow"
MAX_EXAMPLES = 10  # of the pairs that each rule drops
SHOWN_TEXT = 500  # characters of a text in an example
CHUNK_ROWS = 10_000  # stored pairs in memory at a time
HELD_OUT_SPLITS = ("test", "valid")  # in the order of their choice
LEAK_RULES = {EXACT: "leaks", NEAR: "near_leaks"}


class Pair(NamedTuple):
    """A pair and where it was read."""

    source: str
    target: str
    file: str
    line: int


class StoredPairs:
    """Cleaned pairs in a file, of which little is held in memory."""

    def __init__(self, path: Path, files: Sequence[InputFile]) -> None:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        self.batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
        self.starts = np.cumsum([0, *map(len, self.batches)])
        self.files = list(map(str, files))

    def take(self, rows: npt.NDArray[np.int64]) -> list[Pair]:
        """Return the pairs of some rows, sorted by row."""
        pairs = []
        rows = np.sort(rows)
        ends = np.searchsorted(rows, self.starts)
        for batch, start, first, last in zip(self.batches, self.starts, ends, ends[1:], strict=False):
            if first < last:
                columns = batch.take(pa.array(rows[first:last] - start)).to_pydict().values()
                pairs += [
                    Pair(source, target, self.files[file], line)
                    for source, target, file, line in zip(*columns, strict=True)
                ]
        return pairs


class LeakFinder:
    """Finds pairs whose source or target is, or nearly is, that of a held-out pair."""

    def __init__(self, pairs: Sequence[Pair], near: bool) -> None:
        # Training text is normalized, an existing test set is not, so its normalized form is looked for, too.
        steps, changed = list(NORMALIZATIONS.items()), Counter[str]()
        sources, targets = [pair.source for pair in pairs], [pair.target for pair in pairs]
        self.sources = OverlapIndex([*sources, *(normalize_text(text, steps, changed) for text in sources)])
        self.targets = OverlapIndex([*targets, *(normalize_text(text, steps, changed) for text in targets)])
        self.near = near

    def __call__(self, pairs: Sequence[Pair]) -> list[int]:
        """Return for each pair the closest match of its two sentences: `UNSEEN`, `NEAR` or `EXACT`."""
        source_kinds = self.sources.find([pair.source for pair in pairs])
        target_kinds = self.targets.find([pair.target for pair in pairs])
        kinds = np.maximum(source_kinds, target_kinds)
        return (kinds if self.near else np.where(kinds == EXACT, EXACT, UNSEEN)).tolist()


@dataclass
class Preparation:
    """What was done to a corpus; the content of the report."""

    inputs: FoundInputs
    held_out_inputs: dict[str, FoundInputs] = field(default_factory=dict)  # existing sets by split
    read: Counter[str] = field(default_factory=Counter)  # pairs by input
    bad_lines: Counter[tuple[str, str]] = field(default_factory=Counter)  # invalid lines by file and problem
    first_bad_lines: dict[tuple[str, str], list[int]] = field(default_factory=dict)  # their first numbers
    changed: Counter[str] = field(default_factory=Counter)  # sentences that each normalization changed
    dropped: Counter[str] = field(default_factory=Counter)  # pairs by rule
    examples: dict[str, list[tuple[int, Pair]]] = field(default_factory=dict)  # by rule: heaps of hash and pair
    splits: Counter[str] = field(default_factory=Counter)  # pairs by split
    characters: tuple[Counter[str], Counter[str]] = field(default_factory=lambda: (Counter(), Counter()))
    lengths: tuple[Counter[int], Counter[int]] = field(default_factory=lambda: (Counter(), Counter()))

    def drop(self, rule: str, pair: Pair) -> None:
        """Count a dropped pair. Different ones with the smallest hashes, a random but fixed choice, become examples."""
        self.dropped[rule] += 1
        key = -hash_pair(pair.source, pair.target)  # the heap's smallest entry is the one to replace
        heap = self.examples.setdefault(rule, [])
        if len(heap) == MAX_EXAMPLES and key < heap[0][0] or any(key == other for other, _ in heap):
            return
        entry = key, pair._replace(source=shorten(pair.source), target=shorten(pair.target))
        if len(heap) < MAX_EXAMPLES:
            heappush(heap, entry)
        else:
            heappushpop(heap, entry)

    def count_bad_line(self, line: BadLine) -> None:
        key = str(line.file), line.kind
        self.bad_lines[key] += 1
        first = self.first_bad_lines.setdefault(key, [])
        if len(first) < MAX_EXAMPLES:
            first.append(line.number)


def shorten(text: str) -> str:
    """Return the beginning of a text for the report, with an ellipsis if it goes on."""
    return text if len(text) <= SHOWN_TEXT else f"{text[:SHOWN_TEXT]}…"


def hash_pair(source: str, target: str) -> int:
    """Return a signed 64-bit hash."""
    return xxh3_64_intdigest(f"{source}\0{target}".encode()) - 2**63


def prepare_corpus(command: PrepareRun, folder: Path) -> Preparation:
    """Write train, valid and test files to a folder. Returns what was done.

    Raises:
        UserError: the input cannot be read, or holds too few pairs for the splits.
    """
    done = Preparation(find_inputs("input", command.input, command))
    held_out: dict[str, list[Pair]] = {}
    for split in HELD_OUT_SPLITS:
        if (paths := getattr(command, split)) is not None:
            done.held_out_inputs[split] = find_inputs(split, paths, command)
            held_out[split] = list(read_held_out(split, done.held_out_inputs[split].files, command))
            if not held_out[split]:
                raise UserError(f"{split}={','.join(paths)} has no pairs")
    if len(held_out) == len(HELD_OUT_SPLITS):
        warn_of_common_sentences(held_out, command)
    path = folder / STORED_NAME
    hashes_N, lengths_2xN = store_cleaned(command, done, path)
    warn_of_unread_lines(done)
    stored = StoredPairs(path, done.inputs.files)
    is_kept_N = apply_corpus_rules(command, done, stored, hashes_N, lengths_2xN)
    for split in HELD_OUT_SPLITS:
        if split not in held_out:
            others = [pair for pairs in held_out.values() for pair in pairs]
            rows = choose_rows(split, command, done, stored, hashes_N, is_kept_N, others)
            is_kept_N[rows] = False
            held_out[split] = stored.take(rows)
    write_splits(command, done, stored, is_kept_N, held_out, folder)
    del stored  # Windows does not remove a file that is mapped into memory
    path.unlink()
    return done


def warn_of_unread_lines(done: Preparation) -> None:
    """Log which files and lines of the input were not read."""
    for path in done.inputs.unused:
        log.warning(f"{path} was not read: it is not a file with sentence pairs of these languages")
    for (file, problem), count in done.bad_lines.items():
        lines = pluralize(count, "line")
        log.warning(
            f"left out {lines} of {file}: {problem} ({format_first_lines(done.first_bad_lines[file, problem])})"
        )


def list_dropped(done: Preparation) -> str:
    """Return how many pairs each rule has dropped, for messages."""
    return ", ".join(f"{rule} {count:,}" for rule, count in done.dropped.items() if count) or "none"


def read_held_out(split: str, files: Sequence[InputFile], command: PrepareRun) -> Iterator[Pair]:
    """Yield the pairs of an existing validation or test set, whose lines must all be valid."""
    for file in files:
        for batch in read_input(file, command):
            if isinstance(batch, BadLine):
                raise UserError(
                    f"{batch.file}:{batch.number}: {batch.reason}; fix it, because {split}= is used as it is"
                )
            for source, target, line in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                yield Pair(NEW_LINES.sub(" ", source), NEW_LINES.sub(" ", target), str(file), line)


def warn_of_common_sentences(held_out: dict[str, list[Pair]], command: PrepareRun) -> None:
    """Log how many pairs of an existing validation set leak from an existing test set, since both are kept."""
    leaks = sum(kind != UNSEEN for kind in LeakFinder(held_out["test"], command.near)(held_out["valid"]))
    if leaks:
        log.warning(
            f"valid= has {pluralize(leaks, 'pair')} with a sentence that is the same or nearly the same as one of "
            "test=; both sets are kept unchanged"
        )


def store_cleaned(
    command: PrepareRun, done: Preparation, path: Path
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Read all inputs, and store the pairs that are not dropped by a rule that looks at a single pair.

    Returns:
        hashes_N, lengths_2xN: hashes of the pairs, and lengths of source and target in characters.
    """
    hashes = [np.empty(0, np.int64)]
    lengths = [np.empty((2, 0), np.int32)]
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_file(file, STORED_SCHEMA) as writer,
        tqdm(desc="reading", unit=" pairs", unit_scale=True, disable=None) as bar,
    ):
        for index, name in enumerate(map(str, done.inputs.files)):
            for batch in read_batches(done.inputs.files[index], command, done):
                bar.update(len(batch))
                done.read[name] += len(batch)
                sources, targets, lines = (column.to_pylist() for column in batch.columns)
                cleaned = clean_pairs(sources, targets, command.clean)
                done.changed += cleaned.changed
                kept = []
                for pair, reason in zip(
                    zip(cleaned.sources, cleaned.targets, lines, strict=True), cleaned.reasons, strict=True
                ):
                    if reason is None:
                        kept.append(pair)
                    else:
                        done.drop(reason, Pair(pair[0], pair[1], name, pair[2]))
                sources, targets, lines = zip(*kept, strict=True) if kept else ((), (), ())
                for characters, texts in zip(done.characters, (sources, targets), strict=True):
                    characters.update("".join(texts))
                hashes.append(np.fromiter(map(hash_pair, sources, targets), np.int64, len(kept)))
                lengths.append(np.array([list(map(len, sources)), list(map(len, targets))], np.int32).reshape(2, -1))
                files = np.full(len(kept), index)
                columns = [
                    pa.array(column, kind)
                    for column, kind in zip((sources, targets, files, lines), STORED_SCHEMA.types, strict=True)
                ]
                writer.write_batch(pa.record_batch(columns, schema=STORED_SCHEMA))
    return np.concatenate(hashes), np.concatenate(lengths, axis=1)


def read_batches(file: InputFile, command: PrepareRun, done: Preparation) -> Iterator[pa.RecordBatch]:
    """Yield the pairs of an input, and count its invalid lines.

    Raises:
        UserError: `invalid=refuse`, and there is such a line.
    """
    for batch in read_input(file, command):
        if not isinstance(batch, BadLine):
            yield batch
        elif command.invalid == "drop":
            done.count_bad_line(batch)
        else:
            raise UserError(
                f"{batch.file}:{batch.number}: {batch.reason}; fix the line, or drop such lines: invalid=drop"
            )


def apply_corpus_rules(
    command: PrepareRun,
    done: Preparation,
    stored: StoredPairs,
    hashes_N: npt.NDArray[np.int64],
    lengths_2xN: npt.NDArray[np.int32],
) -> npt.NDArray[np.bool_]:
    """Apply the rules that need the whole text. Returns which pairs are kept."""
    is_kept_N = np.ones(len(hashes_N), dtype=bool)

    def drop(rule: str, rows: npt.NDArray[np.int64]) -> None:
        is_kept_N[rows] = False
        for start in range(0, len(rows), CHUNK_ROWS):
            for pair in stored.take(rows[start : start + CHUNK_ROWS]):
                done.drop(rule, pair)

    if command.clean.duplicates:
        is_later_N = np.ones(len(hashes_N), dtype=bool)
        is_later_N[np.unique(hashes_N, return_index=True)[1]] = False
        drop("duplicates", np.flatnonzero(is_later_N))
    if command.clean.max_ratio is not None:
        rows = np.flatnonzero(is_kept_N)
        source_lengths, target_lengths = lengths_2xN[:, rows]
        drop("max_ratio", rows[find_unusual_ratios(source_lengths, target_lengths, command.clean.max_ratio)])
    if command.clean.min_script is not None:
        rules = [ScriptRule(characters, command.clean.min_script) for characters in done.characters]
        for batch, start in zip(stored.batches, stored.starts, strict=False):
            sides = (batch["source"].to_pylist(), batch["target"].to_pylist())
            is_broken = np.zeros(len(batch), dtype=bool)
            for rule, texts in zip(rules, sides, strict=True):
                is_broken |= np.fromiter(map(rule.is_broken_by, texts), bool, len(batch))
            drop("min_script", start + np.flatnonzero(is_broken & is_kept_N[start : start + len(batch)]))
    return is_kept_N


def choose_rows(
    split: str,
    command: PrepareRun,
    done: Preparation,
    stored: StoredPairs,
    hashes_N: npt.NDArray[np.int64],
    is_kept_N: npt.NDArray[np.bool_],
    others: Sequence[Pair],
) -> npt.NDArray[np.int64]:
    """Return the rows of a held-out split: the smallest hashes, without pairs that leak from `others`.

    No sentence occurs twice on a side, so each pair counts for itself.

    Raises:
        UserError: there are too few pairs.
    """
    size = getattr(command, f"{split}_size")
    find_leaks = LeakFinder(others, command.near)
    rows = np.flatnonzero(is_kept_N)
    rows = rows[np.argsort(hashes_N[rows], kind="stable")]
    chosen: list[int] = []
    used: tuple[set[str], set[str]] = set(), set()
    for start in range(0, len(rows), CHUNK_ROWS):
        if len(chosen) == size:
            break
        chunk = rows[start : start + CHUNK_ROWS]
        pairs = dict(zip(np.sort(chunk).tolist(), stored.take(chunk), strict=True))
        ordered = [pairs[row] for row in chunk.tolist()]
        for row, pair, kind in zip(chunk.tolist(), ordered, find_leaks(ordered), strict=True):
            keys = [" ".join(normalize_words(text)) for text in (pair.source, pair.target)]
            if (
                len(chosen) < size
                and kind == UNSEEN
                and not any(key in side for key, side in zip(keys, used, strict=True))
            ):
                chosen.append(row)
                for key, side in zip(keys, used, strict=True):
                    side.add(key)
    if len(chosen) < size:
        reason = f"only {pluralize(len(rows), 'pair')} left (dropped: {list_dropped(done)})"
        if size <= len(rows):
            reason = (
                f"of the {pluralize(len(rows), 'pair')} left, only {len(chosen):,} can be held out, "
                "because the others share a sentence with them"
            )
        raise UserError(f"{split}_size={size:,}: {reason}; use a smaller {split}_size=N")
    return np.array(chosen, np.int64)


def write_splits(
    command: PrepareRun,
    done: Preparation,
    stored: StoredPairs,
    is_kept_N: npt.NDArray[np.bool_],
    held_out: dict[str, list[Pair]],
    folder: Path,
) -> None:
    """Write the held-out pairs, and of the kept ones those that share no sentence with them.

    Raises:
        UserError: no pair is left for training.
    """
    names = command.source, command.target
    for split, pairs in held_out.items():
        done.splits[split] = len(pairs)
        for side, name in enumerate(names):
            with open(folder / f"{split}.{name}", "w", encoding="utf-8", newline="\n") as file:
                file.writelines(f"{pair[side]}\n" for pair in pairs)
    find_leaks = LeakFinder([pair for pairs in held_out.values() for pair in pairs], command.near)
    with ExitStack() as stack:
        files = [
            stack.enter_context(open(folder / f"train.{name}", "w", encoding="utf-8", newline="\n")) for name in names
        ]
        bar = stack.enter_context(
            tqdm(desc="writing", total=int(is_kept_N.sum()), unit=" pairs", unit_scale=True, disable=None)
        )
        for start, length in zip(stored.starts, map(len, stored.batches), strict=False):
            pairs = stored.take(start + np.flatnonzero(is_kept_N[start : start + length]))
            bar.update(len(pairs))
            for pair, kind in zip(pairs, find_leaks(pairs), strict=True):
                if kind != UNSEEN:
                    done.drop(LEAK_RULES[kind], pair)
                    continue
                done.splits["train"] += 1
                for file, text, lengths in zip(files, (pair.source, pair.target), done.lengths, strict=True):
                    file.write(f"{text}\n")
                    lengths[count_words(text)] += 1
    if not done.splits["train"]:
        raise UserError(
            f"no pairs are left for training (dropped: {list_dropped(done)}); use more text, hold out less, or turn "
            "off near or some of clean.*"
        )
    train, held_out_pairs = done.splits["train"], sum(map(len, held_out.values()))
    if train < held_out_pairs:
        log.warning(
            f"the training text has {pluralize(train, 'pair')}, fewer than valid and test together "
            f"({held_out_pairs:,}); use a smaller valid_size=N and test_size=N to train on more"
        )
