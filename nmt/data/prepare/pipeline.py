"""Turn raw sentence pairs into clean training, validation and test text without leaks between them.

The pairs are read once, cleaned, and stored in a temporary file. Rules that need the whole text, and the choice of the
splits, work on 64-bit hashes and lengths of the pairs, so memory does not hold the text. Test pairs are those with the
smallest hashes, so the same pairs are chosen again when lines are added, except for a few displaced by new pairs.

Shapes: N stored pairs, in the order of the input.
"""

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tqdm import tqdm
from xxhash import xxh3_64_intdigest

from nmt.config import PrepareRun
from nmt.data.overlap import EXACT, NEAR, UNSEEN, OverlapIndex, normalize_words
from nmt.data.prepare.clean import ScriptRule, find_reason, find_unusual_ratios, join_lines, normalize_text
from nmt.data.prepare.inputs import FoundInputs, InputFile, find_inputs, read_input
from nmt.data.readers import TEXT_SCHEMA, BadLine
from nmt.errors import UserError
from nmt.system.messages import format_first_lines, pluralize

log = logging.getLogger("nmt")
STORED_SCHEMA = TEXT_SCHEMA.append(pa.field("file", pa.int32())).append(pa.field("line", pa.int64()))
NEW_LINES = re.compile(r"[\r\n]+")  # within a sentence, which will be a line
STORED_NAME = "pairs.arrow"
MAX_EXAMPLES = 10  # of the pairs that each rule drops
CHUNK_ROWS = 10_000  # stored pairs in memory at a time
HELD_OUT_SPLITS = ("test", "valid")  # in the order of their choice
LEAK_RULES = {EXACT: "leaks", NEAR: "near_leaks"}
Rows = npt.NDArray[np.int64]


class Pair(NamedTuple):
    """A pair and where it was read."""

    source: str
    target: str
    file: str
    line: int


@dataclass
class Preparation:
    """What was done to a corpus; the content of the report."""

    inputs: FoundInputs
    held_out_inputs: dict[str, FoundInputs] = field(default_factory=dict)  # existing sets by split
    read: Counter[str] = field(default_factory=Counter)  # pairs by input
    bad_lines: dict[tuple[str, str], list[int]] = field(default_factory=lambda: defaultdict(list))  # by file, problem
    changed: int = 0  # sentences that normalization changed
    dropped: Counter[str] = field(default_factory=Counter)  # pairs by rule
    examples: dict[str, dict[tuple[str, str], Pair]] = field(default_factory=dict)  # by rule, and by text
    splits: Counter[str] = field(default_factory=Counter)  # pairs by split
    characters: tuple[Counter[str], Counter[str]] = field(default_factory=lambda: (Counter(), Counter()))

    def drop(self, rule: str, pair: Pair) -> None:
        """Count a dropped pair. The first different ones become examples."""
        self.dropped[rule] += 1
        examples = self.examples.setdefault(rule, {})
        if len(examples) < MAX_EXAMPLES:
            examples.setdefault((pair.source, pair.target), pair)

    def list_dropped(self) -> str:
        """Return how many pairs each rule has dropped, for messages."""
        return ", ".join(f"{rule} {count:,}" for rule, count in self.dropped.items()) or "none"

    def take(self, stored: pa.Table, rows: Rows) -> list[Pair]:
        """Return some of the stored pairs."""
        files = list(map(str, self.inputs.files))
        columns = stored.take(pa.array(rows)).to_pydict().values()
        return [Pair(source, target, files[file], line) for source, target, file, line in zip(*columns, strict=True)]


class LeakFinder:
    """Finds pairs whose source or target is, or nearly is, that of a held-out pair."""

    def __init__(self, pairs: Sequence[Pair], near: bool) -> None:
        # Training text is normalized, an existing test set is not, so its normalized form is looked for, too.
        self.sources, self.targets = (
            OverlapIndex([form for text in texts for form in (text, normalize_text(text))])
            for texts in ([pair.source for pair in pairs], [pair.target for pair in pairs])
        )
        self.near = near

    def __call__(self, pairs: Sequence[Pair]) -> list[int]:
        """Return for each pair the closest match of its two sentences: `UNSEEN`, `NEAR` or `EXACT`."""
        source_kinds = self.sources.find([pair.source for pair in pairs])
        target_kinds = self.targets.find([pair.target for pair in pairs])
        kinds = np.maximum(source_kinds, target_kinds)
        return (kinds if self.near else np.where(kinds == EXACT, EXACT, UNSEEN)).tolist()


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
    path = folder / STORED_NAME
    hashes_N, lengths_2xN = store_cleaned(command, done, path)
    warn_of_unread_lines(done)
    with pa.memory_map(str(path)) as file:
        stored = pa.ipc.open_file(file).read_all()
        is_kept_N = apply_corpus_rules(command, done, stored, hashes_N, lengths_2xN)
        for split in HELD_OUT_SPLITS:
            if split not in held_out:
                others = [pair for pairs in held_out.values() for pair in pairs]
                rows = choose_rows(split, command, done, stored, hashes_N, is_kept_N, others)
                is_kept_N[rows] = False
                held_out[split] = done.take(stored, rows)
        write_splits(command, done, stored, is_kept_N, held_out, folder)
        del stored  # which the file cannot be closed before
    path.unlink()
    return done


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


def store_cleaned(
    command: PrepareRun, done: Preparation, path: Path
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Read all inputs, and store the pairs that are not dropped by a rule that looks at a single pair.

    Returns:
        hashes_N, lengths_2xN: hashes of the pairs, and lengths of source and target in characters.
    """
    normalize = normalize_text if command.clean.normalize else join_lines
    hashes: list[Rows] = [np.empty(0, np.int64)]
    lengths: list[npt.NDArray[np.int32]] = [np.empty((2, 0), np.int32)]
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_file(file, STORED_SCHEMA) as writer,
        tqdm(desc="reading", unit=" pairs", unit_scale=True, disable=None) as bar,
    ):
        for index, name in enumerate(map(str, done.inputs.files)):
            for batch in read_batches(done.inputs.files[index], command, done):
                bar.update(len(batch))
                done.read[name] += len(batch)
                kept = []
                for *pair, line in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    source, target = map(normalize, pair)
                    done.changed += (source != pair[0]) + (target != pair[1])
                    reason = find_reason(source, target, command.clean)
                    if reason is None:
                        kept.append((source, target, index, line))
                    else:
                        done.drop(reason, Pair(source, target, name, line))
                columns = list(zip(*kept, strict=True)) or [()] * len(STORED_SCHEMA)
                for characters, texts in zip(done.characters, columns, strict=False):
                    characters.update("".join(texts))
                hashes.append(np.fromiter(map(hash_pair, columns[0], columns[1]), np.int64, len(kept)))
                lengths.append(np.array([list(map(len, texts)) for texts in columns[:2]], np.int32))
                arrays = [pa.array(column, kind) for column, kind in zip(columns, STORED_SCHEMA.types, strict=True)]
                writer.write_batch(pa.record_batch(arrays, schema=STORED_SCHEMA))
    return np.concatenate(hashes), np.concatenate(lengths, axis=1)


def hash_pair(source: str, target: str) -> int:
    """Return a signed 64-bit hash."""
    return xxh3_64_intdigest(f"{source}\0{target}".encode()) - 2**63


def read_batches(file: InputFile, command: PrepareRun, done: Preparation) -> Iterator[pa.RecordBatch]:
    """Yield the pairs of an input, and count its invalid lines."""
    for batch in read_input(file, command):
        if isinstance(batch, BadLine):
            done.bad_lines[str(batch.file), batch.kind].append(batch.number)
        else:
            yield batch


def warn_of_unread_lines(done: Preparation) -> None:
    """Log which files and lines of the input were not read."""
    for path in done.inputs.unused:
        log.warning(f"{path} was not read: it is not a file with sentence pairs of these languages")
    for (file, problem), numbers in done.bad_lines.items():
        lines = pluralize(len(numbers), "line")
        log.warning(f"left out {lines} of {file}: {problem} ({format_first_lines(numbers[:MAX_EXAMPLES])})")


def apply_corpus_rules(
    command: PrepareRun,
    done: Preparation,
    stored: pa.Table,
    hashes_N: npt.NDArray[np.int64],
    lengths_2xN: npt.NDArray[np.int32],
) -> npt.NDArray[np.bool_]:
    """Apply the rules that need the whole text. Returns which pairs are kept."""
    is_kept_N = np.ones(len(hashes_N), dtype=bool)

    def drop(rule: str, rows: Rows) -> None:
        is_kept_N[rows] = False
        for start in range(0, len(rows), CHUNK_ROWS):
            for pair in done.take(stored, rows[start : start + CHUNK_ROWS]):
                done.drop(rule, pair)

    drop("duplicates", np.setdiff1d(np.arange(len(hashes_N)), np.unique(hashes_N, return_index=True)[1]))
    if command.clean.max_ratio is not None:
        rows = np.flatnonzero(is_kept_N)
        source_lengths, target_lengths = lengths_2xN[:, rows]
        drop("max_ratio", rows[find_unusual_ratios(source_lengths, target_lengths, command.clean.max_ratio)])
    if command.clean.min_script is not None:
        rules = [ScriptRule(characters, command.clean.min_script) for characters in done.characters]
        for start in range(0, len(stored), CHUNK_ROWS):
            rows = start + np.flatnonzero(is_kept_N[start : start + CHUNK_ROWS])
            pairs = done.take(stored, rows)
            is_broken = [rules[0].is_broken_by(pair.source) or rules[1].is_broken_by(pair.target) for pair in pairs]
            drop("min_script", rows[np.array(is_broken, bool)])
    return is_kept_N


def choose_rows(
    split: str,
    command: PrepareRun,
    done: Preparation,
    stored: pa.Table,
    hashes_N: npt.NDArray[np.int64],
    is_kept_N: npt.NDArray[np.bool_],
    others: Sequence[Pair],
) -> Rows:
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
        pairs = done.take(stored, chunk)
        for row, pair, kind in zip(chunk.tolist(), pairs, find_leaks(pairs), strict=True):
            source, target = (" ".join(normalize_words(text)) for text in (pair.source, pair.target))
            if len(chosen) < size and kind == UNSEEN and source not in used[0] and target not in used[1]:
                chosen.append(row)
                used[0].add(source)
                used[1].add(target)
    if len(chosen) < size:
        raise UserError(
            f"{split}_size={size:,}: of the {pluralize(len(rows), 'pair')} left (dropped: {done.list_dropped()}), only "
            f"{len(chosen):,} can be held out, without a sentence in common; use a smaller {split}_size=N"
        )
    return np.array(chosen, np.int64)


def write_splits(
    command: PrepareRun,
    done: Preparation,
    stored: pa.Table,
    is_kept_N: npt.NDArray[np.bool_],
    held_out: dict[str, list[Pair]],
    folder: Path,
) -> None:
    """Write the held-out pairs, and of the kept ones those that share no sentence with them.

    Raises:
        UserError: no pair is left for training.
    """
    find_leaks = LeakFinder([pair for pairs in held_out.values() for pair in pairs], command.near)
    with ExitStack() as stack:
        bar = stack.enter_context(tqdm(desc="writing", total=len(stored), unit=" pairs", disable=None))
        files = {
            split: [
                stack.enter_context(open(folder / f"{split}.{name}", "w", encoding="utf-8", newline="\n"))
                for name in (command.source, command.target)
            ]
            for split in ("train", *held_out)
        }

        def write(split: str, pair: Pair) -> None:
            done.splits[split] += 1
            for file, text in zip(files[split], pair, strict=False):
                file.write(f"{text}\n")

        for split, pairs in held_out.items():
            for pair in pairs:
                write(split, pair)
        for start in range(0, len(stored), CHUNK_ROWS):
            pairs = done.take(stored, start + np.flatnonzero(is_kept_N[start : start + CHUNK_ROWS]))
            bar.update(min(CHUNK_ROWS, len(stored) - start))
            for pair, kind in zip(pairs, find_leaks(pairs), strict=True):
                if kind == UNSEEN:
                    write("train", pair)
                else:
                    done.drop(LEAK_RULES[kind], pair)
    if not done.splits["train"]:
        raise UserError(
            f"no pairs are left for training (dropped: {done.list_dropped()}); use more text, hold out less, or turn "
            "off near or some of clean.*"
        )
