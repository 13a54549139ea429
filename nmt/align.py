"""Align the words of sentence pairs: with an aligner trained on them, or with the attention of one or two models.

python -m nmt.align source=a.de target=a.en output=links.pharaoh
python -m nmt.align checkpoint=runs/NAME source=a.de target=a.en output=links.pharaoh gold=gold.txt
python -m nmt.align checkpoint=runs/NAME output=links.pharaoh           # the test split of the run's data
python -m nmt.align --help
"""

import nmt.system.startup  # noqa: F401  # isort: skip  before anything that imports torch
import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from nmt.aligner.aligner import LINK_THRESHOLD, MAX_CELLS, Aligner, align_sentences, find_links, train_aligner
from nmt.aligner.storage import ALIGNER_FILE, check_save_folder, is_aligner, load_aligner, save_aligner
from nmt.config import AlignRun, SearchConfig, TrainRun
from nmt.config.data import is_opposite_direction
from nmt.data.corpus import get_gold_links, iter_column, load_pairs
from nmt.data.word_links import (
    SYMMETRIZATIONS,
    GoldLinks,
    Link,
    Sentences,
    alignment_targets,
    read_gold_links,
    transpose_links,
)
from nmt.data.words import find_parts, find_spans, segment_words, segmenter_name, split_tokens
from nmt.decoding.alignment import Record, choose_alignment_format
from nmt.decoding.translator import Translator
from nmt.errors import UserError
from nmt.evaluation.metrics import LinkCounts
from nmt.runs.checkpoint import load_model
from nmt.system.cli import main
from nmt.system.device import choose_device, choose_precision, prepare_model
from nmt.system.logging import log, log_to_stderr
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
from nmt.system.torchrun import check_single_process

MAX_LENGTH = 1000  # pieces on either side, with </s>; longer pairs get no links
MIN_LEXICON_LINKS = 0.5  # expected links of a pair of words in the lexicon


def read_sides(command: AlignRun) -> tuple[list[str], list[str]]:
    """Return the lines of `source=` and `target=`.

    Raises:
        UserError: the files have different numbers of lines.
    """
    assert command.source and command.target
    sources, targets = list(TextInput(command.source)), list(TextInput(command.target))
    if len(sources) != len(targets):
        raise UserError(
            f"source={command.source} has {len(sources):,} lines, target={command.target} has {len(targets):,}; "
            "each line of one must translate the same line of the other"
        )
    return sources, targets


def read_pairs(command: AlignRun, run: TrainRun) -> tuple[Sentences, Sentences, list[GoldLinks] | None]:
    """Return source sentences, target sentences and, if available, gold links.

    Words are separated by white space. If the gold links come from a corpus, only U+0020 separates words.

    Raises:
        UserError: the files have different numbers of lines, or a line of the gold file is invalid.
    """
    gold = None
    if command.source and command.target:
        sources, targets = read_sides(command)
    else:
        data = command.data.apply_to(run.data)
        pairs = load_pairs(data, data.split)
        sources, targets = list(iter_column(pairs, "source")), list(iter_column(pairs, "target"))
        if command.gold is None:
            gold = get_gold_links(pairs)
    split = str.split if gold is None else split_on_spaces
    source_words = [split(line) for line in sources]
    target_words = [split(line) for line in targets]
    if command.gold is not None:
        gold = read_gold_links(Path(command.gold), command.gold_base, source_words, target_words)
    return source_words, target_words, gold


def load_translator(path: str, command: AlignRun, device: torch.device) -> tuple[Translator, TrainRun]:
    """Load a model for forced decoding. Returns its translator and the configuration of its run.

    Raises:
        UserError: the model has no attention.
    """
    model, tokenizer, run, *_ = load_model(path)
    if run.model.attention.score == "none":
        raise UserError(
            f"{path} was trained with model.attention.score=none, so it cannot align; use a model with attention"
        )
    prepare_model(model, choose_precision(command.precision, device), device)
    return Translator(model, tokenizer, SearchConfig(), device), run


def check_reverse_direction(command: AlignRun, forward: TrainRun, backward: TrainRun) -> None:
    """Raise a `UserError` unless the second model translates in the opposite direction of the first."""
    if is_opposite_direction(forward.data, backward.data) is False:
        source, target = forward.data.source, forward.data.target
        raise UserError(
            f"reverse_checkpoint={command.reverse_checkpoint} translates {backward.data.source} to "
            f"{backward.data.target}, but checkpoint={command.checkpoint} translates {source} to {target}; give a "
            f"reverse_checkpoint= that translates {target} to {source}"
        )


def combine_links(forward: Record, backward: Record | None, command: AlignRun) -> list[Link]:
    """Return the links of one model, or the symmetrized links of both."""
    links = forward.links(command.links)
    if backward is None:
        return links
    symmetrize = SYMMETRIZATIONS[command.symmetrize or "grow_diag_final_and"]
    return list(symmetrize(set(links), transpose_links(backward.links(command.links))))


def make_oracle_record(record: Record, gold: GoldLinks) -> Record:
    """Return a record with ideal attention weights for the gold links; without weights if `record` has none."""
    if record.weights is None:
        return record
    weights = alignment_targets(gold, record.source_word_of_piece, record.target_word_of_piece)
    return replace(record, weights=weights)


def align_pairs(
    command: AlignRun,
    forward: Translator,
    backward: Translator | None,
    sources: Sentences,
    targets: Sentences,
    gold: list[GoldLinks] | None,
) -> dict[str, float | None]:
    """Write the links of all pairs, a chunk at a time. Returns precision, recall, AER and oracle AER."""
    counts, oracle_counts = LinkCounts(), LinkCounts()
    progress = command.output != STDOUT_PATH
    format_record = choose_alignment_format(command.output, command.weights)
    with open_output(command.output) as file:
        for start in range(0, len(sources), MAX_CHUNK_LINES):
            source_chunk = sources[start : start + MAX_CHUNK_LINES]
            target_chunk = targets[start : start + MAX_CHUNK_LINES]
            settings = MAX_LENGTH, start + 1, progress, gold is None
            records = forward.align(source_chunk, target_chunk, *settings)
            reverse_records: Sequence[Record | None] = [None] * len(records)
            if backward:
                reverse_records = backward.align(target_chunk, source_chunk, *settings)
            for row, (record, reverse_record) in enumerate(zip(records, reverse_records, strict=True), start):
                links = combine_links(record, reverse_record, command)
                file.write(f"{format_record(record, links)}\n".encode())
                if gold is not None:
                    counts.add(links, gold[row])
                    oracle = make_oracle_record(record, gold[row])
                    reverse_oracle = None
                    if reverse_record is not None:
                        reverse_oracle = make_oracle_record(reverse_record, gold[row].transpose())
                    oracle_counts.add(combine_links(oracle, reverse_oracle, command), gold[row])
        file.flush()
    return counts.scores() | {"oracle_aer": oracle_counts.scores()["aer"]}


# ------------------------------------------------------------------------------------------------- statistical aligner
def align_with_aligner(command: AlignRun) -> dict[str, float | None]:
    """Train an aligner on the pairs, or load one, and write their links. Returns precision, recall and AER.

    Raises:
        UserError: a setting is for models with attention, the files have different numbers of lines, or a line of the
            gold file is invalid.
    """
    check_aligner_settings(command)
    aligner = load_aligner(Path(command.checkpoint)) if command.checkpoint else None
    lines = read_sides(command)
    segmenter = find_segmenter(itertools.chain(*lines))
    if aligner:
        check_same_words(command, aligner, segmenter)
    gold = None
    if command.gold is not None:  # it counts words between spaces
        gold = read_gold_links(Path(command.gold), command.gold_base, *([*map(str.split, side)] for side in lines))
    sources, targets = ([*map(split_tokens if command.tokenize else segment_words, side)] for side in lines)
    threshold = LINK_THRESHOLD if command.links.threshold is None else command.links.threshold
    counts, too_long = LinkCounts(), []
    with ExitStack() as stack:  # a file that cannot be written is found before training
        if command.save is not None:
            Path(command.save).mkdir(parents=True, exist_ok=True)
            save_file = stack.enter_context(open_output(str(Path(command.save, ALIGNER_FILE))))
        if command.lexicon is not None:
            lexicon_file = stack.enter_context(open_output(command.lexicon))
        file = stack.enter_context(open_output(command.output))
        format_record = choose_alignment_format(command.output, command.weights)
        if not aligner:
            aligner = train_aligner(sources, targets)
            aligner.tokenize, aligner.segmenter = command.tokenize, segmenter
        hidden = True if command.output == STDOUT_PATH else None  # None: hidden unless on a terminal
        bar = stack.enter_context(tqdm(total=len(sources), desc="aligning", unit=" lines", disable=hidden))
        for start in range(0, len(sources), MAX_CHUNK_LINES):
            rows = range(start, min(start + MAX_CHUNK_LINES, len(sources)))
            chunk = [sources[row] for row in rows], [targets[row] for row in rows]
            for row, weights_TS in zip(rows, align_sentences(aligner, *chunk), strict=True):
                if weights_TS is None:
                    too_long.append(row + 1)
                links = find_links(weights_TS, threshold)
                record = make_word_record(lines[0][row], lines[1][row], sources[row], targets[row], weights_TS)
                file.write(f"{format_record(record, links)}\n".encode())
                if gold is not None:
                    parts = find_parts(lines[0][row], sources[row]), find_parts(lines[1][row], targets[row])
                    counts.add({(parts[0][s], parts[1][t]) for s, t in links}, gold[row])
            bar.update(len(rows))
        file.flush()
        if command.save is not None:
            save_aligner(aligner, save_file)
        if command.lexicon is not None:
            for source, target, expected in aligner.lexicon.list_links():
                if expected < MIN_LEXICON_LINKS:
                    break
                lexicon_file.write(f"{source}\t{target}\t{expected:.2f}\n".encode())
    if too_long:
        log.warning(
            f"{pluralize(len(too_long), 'line')} of more than {MAX_CELLS:,} pairs of words without links "
            f"({format_first_lines(too_long)})"
        )
    return counts.scores()


def check_aligner_settings(command: AlignRun) -> None:
    """Raise a `UserError` if there are no files to align, or a setting is for models with attention."""
    if not command.source:
        raise UserError(f"checkpoint={command.checkpoint} is an aligner; give the files source= and target=")
    defaults = {item.name: item.default for item in fields(AlignRun)}
    for key in ("reverse_checkpoint", "symmetrize", "device", "precision"):
        if (value := getattr(command, key)) != defaults[key]:
            raise UserError(f"{key}={value} is for models with attention, not for an aligner; remove {key}")
    if command.checkpoint and command.save:
        raise UserError(f"save={command.save} is for a newly trained aligner; remove checkpoint={command.checkpoint}")
    if command.save:
        check_save_folder(command.save)


def find_segmenter(lines: Iterable[str]) -> str | None:
    """Return the segmenter of words, or None if all words are separated by white space."""
    return segmenter_name() if any(segment_words(line) != line.split() for line in lines) else None


def check_same_words(command: AlignRun, aligner: Aligner, segmenter: str | None) -> None:
    """Raise a `UserError` unless the words of a text are found as those that the aligner was trained on."""
    if command.tokenize != aligner.tokenize:
        trained, given = (str(value).lower() for value in (aligner.tokenize, command.tokenize))
        raise UserError(
            f"checkpoint={command.checkpoint} was trained with tokenize={trained}, not tokenize={given}; set "
            f"tokenize={trained}"
        )
    kinds = {name.split("-")[0] for name in (segmenter, aligner.segmenter) if name}
    if len(kinds) > 1:
        remedy = "install the extra cjk or " if segmenter == "characters" else ""
        raise UserError(
            f"checkpoint={command.checkpoint} was trained on words of the segmenter {aligner.segmenter}, but those of "
            f"this text are found by {segmenter}; {remedy}train an aligner again"
        )


def make_word_record(
    source_line: str, target_line: str, source: list[str], target: list[str], weights_TS: np.ndarray | None
) -> Record:
    """Return the record of a pair whose pieces are its words."""
    indices = list(range(len(source))), list(range(len(target)))
    spans = find_spans(source_line, source), find_spans(target_line, target)
    return Record(source, target, source, target, *indices, weights_TS, math.nan, *spans)


@main("align")
def align(command: AlignRun) -> float | None:
    """Return the alignment error rate; None without gold links."""
    log_to_stderr()
    check_single_process("nmt.align")
    resolve_standard_streams(command, ("source", "target", "gold"), ("output",))
    check_readable({"source": command.source, "target": command.target, "gold": command.gold})
    if command.checkpoint is None or is_aligner(command.checkpoint):
        measures = align_with_aligner(command)
        if command.gold is not None:
            print_measures(measures, command)
        return measures["aer"]
    for key in ("save", "lexicon", "tokenize"):
        if value := getattr(command, key):
            shown = "true" if value is True else value
            raise UserError(f"{key}={shown} is for an aligner; remove {key}= or checkpoint={command.checkpoint}")
    device = choose_device(command.device)
    forward, run = load_translator(command.checkpoint, command, device)
    backward = None
    if command.reverse_checkpoint is not None:
        backward, reverse_run = load_translator(command.reverse_checkpoint, command, device)
        check_reverse_direction(command, run, reverse_run)
    sources, targets, gold = read_pairs(command, run)
    measures = align_pairs(command, forward, backward, sources, targets, gold)
    if gold is not None:
        print_measures(measures, command)
    return measures["aer"]


def print_measures(measures: dict[str, float | None], command: AlignRun) -> None:
    """Print precision, recall and error rates; to standard error if the links go to standard output."""
    file = sys.stderr if command.output == STDOUT_PATH else sys.stdout
    for name, value in measures.items():
        shown = "-" if value is None else f"{value:.4f}"
        print(f"{name:<22}{shown}", file=file)


if __name__ == "__main__":
    align()
