"""Align the words of sentence pairs: with an aligner trained on them, or with the attention of one or two models.

python -m nmt.align source=a.de target=a.en output=links.pharaoh
python -m nmt.align checkpoint=runs/NAME source=a.de target=a.en output=links.pharaoh gold=gold.txt
python -m nmt.align checkpoint=runs/NAME output=links.pharaoh           # the test split of the run's data
python -m nmt.align --help
"""

import nmt.system.startup  # noqa: F401  # isort: skip  before anything that imports torch
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nmt.aligner.aligner import LINK_THRESHOLD, MAX_CELLS, align_sentences, train_aligner
from nmt.api import open_translator
from nmt.config import AlignRun, SearchConfig, TrainRun
from nmt.config.data import is_opposite_direction
from nmt.data.corpus import get_gold_links, iter_column, load_pairs
from nmt.data.word_links import SYMMETRIZATIONS, GoldLinks, Link, read_gold_links, threshold_links
from nmt.data.words import find_parts, find_spans, segment_words, split_tokens
from nmt.decoding.alignment import Record, choose_alignment_format
from nmt.errors import UserError
from nmt.evaluation.metrics import LinkCounts
from nmt.runs.checkpoint import find_checkpoint, load_config
from nmt.system.cli import main
from nmt.system.device import choose_device
from nmt.system.logging import log
from nmt.system.messages import format_first_lines, pluralize
from nmt.system.text import (
    MAX_CHUNK_LINES,
    STDOUT_PATH,
    TextInput,
    check_readable,
    open_output,
    resolve_standard_streams,
    split_on_spaces,
)

AlignedPair = tuple[Record, list[Link], Iterable[Link]]  # links of its words, and of the words that gold links count


@main("align")
def align(command: AlignRun) -> float | None:
    """Write the links of all pairs. With gold links, print precision, recall and AER.

    Returns:
        the alignment error rate (AER); None without gold links.
    """
    resolve_standard_streams(command, ("source", "target", "gold"), ("output",))
    check_readable({"source": command.source, "target": command.target, "gold": command.gold})
    run = load_config(find_checkpoint(command.checkpoint)[0]) if command.checkpoint else None
    sources, targets, gold = read_pairs(command, run)
    if run:
        pairs = align_with_models(command, run, sources, targets, gold)
    else:
        pairs = align_with_aligner(command, sources, targets)
    format_record, counts = choose_alignment_format(command.output), LinkCounts()
    with open_output(command.output) as file:  # a file that cannot be written is found before the first pair
        for row, (record, links, counted_links) in enumerate(pairs):
            file.write(f"{format_record(record, links)}\n".encode())
            if gold is not None:
                counts.add(counted_links, gold[row])
    measures = counts.scores()
    if gold is not None:
        for name, value in measures.items():
            shown = "-" if value is None else f"{value:.4f}"
            print(f"{name:<22}{shown}", file=sys.stderr if command.output == STDOUT_PATH else sys.stdout)
    return measures["aer"]


def read_pairs(command: AlignRun, run: TrainRun | None) -> tuple[list[str], list[str], list[GoldLinks] | None]:
    """Return source lines, target lines and, if available, gold links, from files or from the corpus of a run.

    Gold links of a file count words between white space; those of a corpus, words between U+0020.

    Raises:
        UserError: the files have different numbers of lines, or a line of the gold file is invalid.
    """
    gold = None
    if run is None or command.source:
        sources, targets = list(TextInput(str(command.source))), list(TextInput(str(command.target)))
        if len(sources) != len(targets):
            raise UserError(
                f"source={command.source} has {len(sources):,} lines, target={command.target} has {len(targets):,}; "
                "each line of one must translate the same line of the other"
            )
    else:
        data = command.data.apply_to(run.data)
        pairs = load_pairs(data, data.split)
        sources, targets = list(iter_column(pairs, "source")), list(iter_column(pairs, "target"))
        gold = get_gold_links(pairs)
    if command.gold is not None:
        words = ([*map(str.split, side)] for side in (sources, targets))
        gold = read_gold_links(Path(command.gold), command.gold_base, *words)
    return sources, targets, gold


# ---------------------------------------------------------------------------------------------- models with attention
def align_with_models(
    command: AlignRun, run: TrainRun, source_lines: list[str], target_lines: list[str], gold: list[GoldLinks] | None
) -> Iterator[AlignedPair]:
    """Yield all pairs with the links of one model, or the symmetrized links of two of opposite directions.

    Without gold links, words of scripts without spaces are segmented further.

    Raises:
        UserError: a model has no attention, or both have one direction.
    """
    if command.reverse_checkpoint:
        data, reverse_data = run.data, load_config(find_checkpoint(command.reverse_checkpoint)[0]).data
        if is_opposite_direction(data, reverse_data) is False:
            raise UserError(
                f"reverse_checkpoint={command.reverse_checkpoint} translates {reverse_data.source} to "
                f"{reverse_data.target}, but checkpoint={command.checkpoint} translates {data.source} to "
                f"{data.target}; give a reverse_checkpoint= that translates {data.target} to {data.source}"
            )
    device, translators = choose_device(command.device), []
    for path in filter(None, (command.checkpoint, command.reverse_checkpoint)):
        translators.append(open_translator([path], device, command.precision, 1, SearchConfig()))
        if not translators[-1].model.attends:
            raise UserError(
                f"{path} was trained with model.attention.score=none, so it cannot align; use a model with attention"
            )
    split = str.split if gold is None or command.gold else split_on_spaces
    sources, targets = [*map(split, source_lines)], [*map(split, target_lines)]
    symmetrize = SYMMETRIZATIONS[command.symmetrize or "grow_diag_final_and"]
    for start in range(0, len(sources), MAX_CHUNK_LINES):
        chunk = sources[start : start + MAX_CHUNK_LINES], targets[start : start + MAX_CHUNK_LINES]
        settings: Any = {"first_line": start + 1, "progress": command.output != STDOUT_PATH, "segment": gold is None}
        directions = zip(translators, (chunk, chunk[::-1]), strict=False)
        records = [translator.align(*texts, **settings) for translator, texts in directions]
        for record, *reverse in zip(*records, strict=True):
            links = record.links(command.links)
            if reverse:
                links = list(symmetrize(set(links), {(s, t) for t, s in reverse[0].links(command.links)}))
            yield record, links, links


# ------------------------------------------------------------------------------------------------- statistical aligner
def align_with_aligner(command: AlignRun, source_lines: list[str], target_lines: list[str]) -> Iterator[AlignedPair]:
    """Train an aligner, then yield all pairs with their links. The pieces of a record are its words."""
    split = split_tokens if command.tokenize else segment_words
    sources, targets = [*map(split, source_lines)], [*map(split, target_lines)]
    aligner = train_aligner(sources, targets)
    threshold = LINK_THRESHOLD if command.links.threshold is None else command.links.threshold
    too_long = []
    hidden = True if command.output == STDOUT_PATH else None  # None: hidden unless on a terminal
    with tqdm(total=len(sources), desc="aligning", unit=" lines", disable=hidden) as bar:
        for start in range(0, len(sources), MAX_CHUNK_LINES):
            chunk = sources[start : start + MAX_CHUNK_LINES], targets[start : start + MAX_CHUNK_LINES]
            for row, weights_TS in enumerate(align_sentences(aligner, *chunk), start):
                if weights_TS is None:
                    too_long.append(row + 1)
                source, target = sources[row], targets[row]
                indices = list(range(len(source))), list(range(len(target)))
                spans = find_spans(source_lines[row], source), find_spans(target_lines[row], target)
                record = Record(source, target, source, target, *indices, weights_TS, math.nan, *spans)
                links = threshold_links(weights_TS, threshold)
                parts = find_parts(source_lines[row], source), find_parts(target_lines[row], target)
                yield record, links, {(parts[0][s], parts[1][t]) for s, t in links}
            bar.update(len(chunk[0]))
    if too_long:
        log.warning(
            f"{pluralize(len(too_long), 'line')} of more than {MAX_CELLS:,} pairs of words without links "
            f"({format_first_lines(too_long)})"
        )


if __name__ == "__main__":
    align()
