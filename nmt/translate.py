"""Translate lines of text, or score given translations.

echo "Ein Hund schläft ." | python -m nmt.translate checkpoint=runs/NAME
python -m nmt.translate checkpoint=runs/NAME input=in.txt output=out.txt search.beam=5
python -m nmt.translate --help
"""

import itertools
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from nmt import open_translator
from nmt.config import TranslateRun
from nmt.decoding.alignment import as_written, writer
from nmt.decoding.translator import Translation, Translator, check_scores, warn_of_cuts
from nmt.errors import UserError
from nmt.runtime.cli import main
from nmt.runtime.distributed import (
    OTHER_MODEL,
    OTHER_TEXT,
    check_same_on_all_ranks,
    local_rank0_first,
    process_group,
    rank0_path,
    world_size,
)
from nmt.runtime.files import sha256_of
from nmt.runtime.lines import count_of
from nmt.runtime.logging import log, log_to_stderr
from nmt.runtime.signals import held_signals
from nmt.runtime.streams import check_files, is_file, is_stdin, is_stdout
from nmt.runtime.text_io import TextInput, check_readable, finite_or_none, open_output, read_chunks, write


def as_text(line: str, options: list[Translation], command: TranslateRun) -> str:
    """Exactly n lines for each input, padded with empty ones."""
    texts = [option.text for option in options] + [""] * (command.search.n_best - len(options))
    return "".join(text + "\n" for text in texts)


def as_jsonl(line: str, options: list[Translation], command: TranslateRun) -> str:
    """One object for each input, with its translations best first."""
    translations = [
        {
            "text": option.text,
            **finite_or_none({"score": option.score, "ranking_score": option.ranking_score}),
            "source_words": as_written(line, record.source_words),
            "target_words": as_written(option.text, record.target_words),
            "source_pieces": option.source_pieces,
            "target_pieces": option.target_pieces,
            "links": record.links(command.links),
        }
        for option, record in ((option, option.record) for option in options)
    ]
    return json.dumps({"source": line, "translations": translations}, ensure_ascii=False) + "\n"


def as_links(line: str, options: list[Translation], command: TranslateRun) -> str:
    """Each text, and below it which words it was made from."""
    lines = []
    for option in options:
        record = option.record
        source, target = as_written(line, record.source_words), as_written(option.text, record.target_words)
        links = (f"{source[s]}={target[t]}" for s, t in record.links(command.links))
        lines += [option.text, "    " + "  ".join(links)]
    return "".join(text + "\n" for text in lines)


FORMATS = {"text": as_text, "jsonl": as_jsonl, "links": as_links}


def paired(lines: Iterable[str], command: TranslateRun, key: str) -> Iterator[tuple[str, str]]:
    """Each line of the input with the line of another file, `target=` or `prefix=`; with an empty one where that is not
    given.

    Raises:
        UserError: the file has fewer lines, or more.
    """
    path = getattr(command, key)
    if path is None:
        yield from ((line, "") for line in lines)
        return
    both = itertools.zip_longest(lines, TextInput(path))
    for number, (line, other) in enumerate(both, 1):
        if line is None or other is None:
            raise UserError(f"{key}={path} and the input have different numbers of lines, from {number} on")
        yield line, other


@contextmanager
def stopped(source: TextInput, path: str) -> Iterator[None]:
    """Say how far the work has come where a signal ends it."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if source.lines is not None:
            whole = f", but {path} appears only when it is whole" if is_file(path) else ""
            left = source.lines.count - source.done
            log.warning(
                f"stopped: {count_of(source.done, 'line')} translated{whole}; {count_of(left, 'line')} read and not "
                "translated"
            )
        raise


def translate_lines(command: TranslateRun, translator: Translator, source: TextInput) -> None:
    """Write a translation for each line, in order, a chunk at a time. Whatever ends the work, the first lines that are
    translated are written."""
    want_links = command.alignments is not None or command.format != "text"
    with ExitStack() as stack:
        text_file = stack.enter_context(open_output(rank0_path(command.output)))
        align = None
        if command.alignments is not None:
            links_file = stack.enter_context(open_output(rank0_path(command.alignments)))
            align = stack.enter_context(writer(command.alignments, links_file))
        stack.enter_context(stopped(source, command.output))
        for pairs in read_chunks(paired(source, command, "prefix"), source.more):
            chunk, beginnings = zip(*pairs, strict=True)
            first = source.done + 1
            found: list[list[Translation]] = []
            try:
                translator.translate(chunk, want_links, first, not is_stdout(command.output), beginnings, found)
            finally:
                with held_signals():
                    best = [options[0] for options in found]
                    check_scores(best, first)
                    warn_of_cuts(best, command.search, first)
                    as_wanted, both = FORMATS[command.format], zip(chunk, found, strict=False)
                    write(text_file, "".join(as_wanted(line, options, command) for line, options in both))
                    if align is not None:
                        for options in found:
                            missing = [Translation("", score=float("-inf"))] * (command.search.n_best - len(options))
                            for record in (option.record for option in options + missing):
                                align(record, record.links(command.links))
                        links_file.flush()
                    source.done += len(found)


def score_pairs(command: TranslateRun, translator: Translator, source: TextInput) -> None:
    """Write the log-probability of each given pair."""
    with open_output(rank0_path(command.output)) as file, stopped(source, command.output):
        for pairs in read_chunks(paired(source, command, "target"), source.more):
            sources, targets = zip(*pairs, strict=True)
            scored = translator.score(sources, targets, progress=not is_stdout(command.output))
            check_scores(scored, source.done + 1)
            with held_signals():
                write(file, "".join(f"{one.score:.6f}\n" for one in scored))
                source.done += len(scored)


def digests_of(paths: dict[str, str | None]) -> tuple[str, ...]:
    """What is in the files that all processes of a job read."""
    return tuple(sha256_of(Path(path)) for path in paths.values() if path is not None)


@main("translate")
def translate(command: TranslateRun) -> None:
    log_to_stderr()
    check_files(command, ("input", "target", "prefix"), ("output", "alignments"))
    read = {"input": command.input, "target": command.target, "prefix": command.prefix}
    with process_group(command.device) as device:
        local_rank0_first(lambda: check_readable(read))
        for key, path in read.items():
            if path and world_size() > 1 and not is_file(path):
                shared = "standard input" if is_stdin(path) else f"{key}={path}"
                raise UserError(f"{world_size()} processes cannot share {shared}; write {key}=FILE")
        settings = command.precision, command.average, command.search
        translator = local_rank0_first(lambda: open_translator(command.checkpoint, device, *settings))
        check_same_on_all_ranks(lambda: (translator.key, tuple(translator.dictionary.items())), OTHER_MODEL)
        if world_size() > 1:
            digests = local_rank0_first(lambda: digests_of(read))
            check_same_on_all_ranks(lambda: digests, OTHER_TEXT)
        shows = f"alignments={command.alignments}" if command.alignments else f"format={command.format}"
        if (command.alignments or command.format == "links") and not translator.model.attends:
            raise UserError(f"{shows} shows where attention was, and the model has none; leave it out")
        talking = is_stdin(command.input) and is_stdout(command.output) and os.isatty(0) and os.isatty(1)
        work = score_pairs if command.mode == "score" else translate_lines
        work(command, translator, TextInput(command.input, "> " if talking else None))


if __name__ == "__main__":
    translate()
