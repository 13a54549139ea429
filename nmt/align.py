"""Align pairs of sentences word by word with a trained model, or with two models of opposite directions.

python -m nmt.align checkpoint=runs/NAME source=a.de target=a.en output=links.pharaoh gold=gold.txt
python -m nmt.align checkpoint=runs/NAME output=links.pharaoh           the test split of the run's own data
python -m nmt.align --help
"""

import hashlib
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from nmt.config import AlignRun, SearchConfig, TrainRun
from nmt.config.data import is_opposite_direction
from nmt.data.corpus import column, load_pairs
from nmt.data.word_links import (
    SYMMETRIZATIONS,
    GoldLinks,
    Link,
    Sentences,
    alignment_targets,
    gold_links,
    read_gold,
    transpose_links,
)
from nmt.decoding.alignment import Record, writer
from nmt.decoding.translator import Translator
from nmt.errors import UserError
from nmt.evaluation.metrics import LinkCounts
from nmt.runtime.cli import main
from nmt.runtime.device import choose_precision, move_model
from nmt.runtime.distributed import (
    OTHER_MODEL,
    OTHER_TEXT,
    check_same_on_all_ranks,
    local_rank0_first,
    process_group,
    rank,
    rank0_path,
)
from nmt.runtime.lines import split_on_spaces
from nmt.runtime.logging import log_to_stderr
from nmt.runtime.streams import check_files, is_stdout
from nmt.runtime.text_io import CHUNK, TextInput, check_readable, open_output
from nmt.training.checkpoint import load_model


def read_pairs(command: AlignRun, run: TrainRun) -> tuple[Sentences, Sentences, list[GoldLinks] | None]:
    """Sources, targets and, where there are any, gold links. Words are what stands between white space; for the gold
    links of a corpus, what stands between spaces. (Without gold links the translator divides them further where their
    script is written without spaces.)

    Raises:
        UserError: numbers of lines that differ, or a line of gold that is none.
    """
    if command.source and command.target:
        sources, targets = list(TextInput(command.source)), list(TextInput(command.target))
        if len(sources) != len(targets):
            raise UserError(
                f"source={command.source} has {len(sources):,} lines, target={command.target} has {len(targets):,}; "
                "each line of one must translate the same line of the other"
            )
        gold = None
    else:
        data = command.data.over(run.data)
        pairs = load_pairs(data, data.split)
        sources, targets = list(column(pairs, "source")), list(column(pairs, "target"))
        gold = gold_links(pairs) if command.links.unit == "words" and command.gold is None else None
    divide = str.split if gold is None else split_on_spaces
    words = [divide(line) for line in sources], [divide(line) for line in targets]
    if command.gold is not None:
        gold = read_gold(Path(command.gold), command.gold_base, *words)
    return *words, gold


def load_translator(path: str, command: AlignRun, device: torch.device) -> tuple[Translator, TrainRun]:
    """A model, ready for forced decoding, and the settings of its run.

    Raises:
        UserError: it has no attention.
    """
    model, tokenizer, run, *_, key = load_model(path)
    if run.model.attention.score == "none":
        raise UserError(f"{path} was trained with model.attention.score=none: without attention it aligns nothing")
    move_model(model, choose_precision(command.precision, device), device)
    return Translator(model, tokenizer, SearchConfig(batch_tokens=command.batch_tokens), device, key), run


def check_reverse_direction(command: AlignRun, forward: TrainRun, backward: TrainRun) -> None:
    """See that the second model goes back to where the first came from.

    Raises:
        UserError: it does not.
    """
    if is_opposite_direction(forward.data, backward.data) is False:
        there, back = ((run.data.source, run.data.target) for run in (forward, backward))
        raise UserError(
            f"reverse_checkpoint={command.reverse_checkpoint} translates {back[0]} to {back[1]}, but beside "
            f"checkpoint={command.checkpoint}, {there[0]} to {there[1]}, a model of {there[1]} to {there[0]} is needed"
        )


def combine_links(forward: Record, backward: Record | None, command: AlignRun) -> list[Link]:
    """The links of one model, or those of both put together."""
    links = forward.links(command.links)
    if backward is None:
        return links
    symmetrize = SYMMETRIZATIONS[command.symmetrize or "grow_diag_final_and"]
    return list(symmetrize(set(links), transpose_links(backward.links(command.links))))


def oracle_record(record: Record, gold: GoldLinks) -> Record:
    """The record of a model that knows the gold links; of a pair that is too long it has no weights either."""
    if record.weights is None:
        return record
    weights = alignment_targets(gold, record.source_word_of_piece, record.target_word_of_piece)
    return replace(record, weights=weights)


def align_pairs(
    command: AlignRun, forward: Translator, backward: Translator | None,
    sources: Sentences, targets: Sentences, gold: list[GoldLinks] | None,
) -> dict[str, float | None]:  # fmt: skip
    """Write the links of all pairs, some thousand pairs at a time. Returns how good they are, by the gold links."""
    counts, oracle = LinkCounts(), LinkCounts()
    shown = not is_stdout(command.output)
    with open_output(rank0_path(command.output)) as file, writer(command.output, file) as put:
        for start in range(0, len(sources), CHUNK):
            pairs = sources[start : start + CHUNK], targets[start : start + CHUNK]
            how = command.max_length, start + 1, shown, gold is None
            records = forward.align(pairs[0], pairs[1], *how)
            backs = backward.align(pairs[1], pairs[0], *how) if backward else [None] * len(records)
            for row, (record, back) in enumerate(zip(records, backs, strict=True), start):
                links = combine_links(record, back, command)
                put(record, links)
                if gold is not None:
                    counts.add(links, gold[row])
                    best = oracle_record(record, gold[row]), back and oracle_record(back, gold[row].turned())
                    oracle.add(combine_links(*best, command), gold[row])
        file.flush()
    return counts.scores() | {"oracle_aer": oracle.scores()["aer"]}


@main("align")
def align(command: AlignRun) -> float | None:
    """Returns the alignment error rate, None where there are no gold links."""
    log_to_stderr()
    check_files(command, ("source", "target", "gold"), ("output",))
    assert command.checkpoint is not None
    with process_group(command.device) as device:
        files = {"source": command.source, "target": command.target, "gold": command.gold}
        local_rank0_first(lambda: check_readable(files))
        forward, run = local_rank0_first(partial(load_translator, command.checkpoint, command, device))
        backward = None
        if command.reverse_checkpoint is not None:
            backward, reverse_run = local_rank0_first(
                partial(load_translator, command.reverse_checkpoint, command, device)
            )
            check_reverse_direction(command, run, reverse_run)
        models = [forward, backward] if backward else [forward]
        check_same_on_all_ranks(lambda: " ".join(model.key for model in models), OTHER_MODEL)
        sources, targets, gold = local_rank0_first(lambda: read_pairs(command, run))
        check_same_on_all_ranks(lambda: hashlib.sha256(repr((sources, targets, gold)).encode()).digest(), OTHER_TEXT)
        measures = align_pairs(command, forward, backward, sources, targets, gold)
        if gold is not None and not rank():
            for name, value in measures.items():
                text = "-" if value is None else f"{value:.4f}"
                print(f"{name:<22}{text}", file=sys.stderr if is_stdout(command.output) else sys.stdout)
    return measures["aer"]


if __name__ == "__main__":
    align()
