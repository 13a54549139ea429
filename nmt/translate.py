"""Translate lines of text, or score given translations.

echo "Ein Hund schläft ." | python -m nmt.translate checkpoint=runs/NAME
python -m nmt.translate checkpoint=runs/NAME input=in.txt output=out.txt search.beam=5
python -m nmt.translate --help
"""

import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from nmt import open_translator
from nmt.alignment import as_written, writer
from nmt.config import TranslateRun, main
from nmt.distributed import OTHER_MODEL, OTHER_TEXT, in_turn, joined, log_to_stderr, mine, ranks, same
from nmt.errors import UserError
from nmt.files import check_readable, chunks, finite, output, read_text, sha256_of, typed, write
from nmt.translator import Translation, Translator, check_scores, warn_of_cuts

CHUNK = 4096  # lines in memory at a time


def as_text(line: str, options: list[Translation], command: TranslateRun) -> str:
    """Exactly n lines for each input, padded with empty ones."""
    texts = [option.text for option in options] + [""] * (command.search.n_best - len(options))
    return "".join(text + "\n" for text in texts)


def as_jsonl(line: str, options: list[Translation], command: TranslateRun) -> str:
    """One object for each input, with its translations best first."""
    translations = [
        {
            "text": option.text,
            **finite({"score": option.score, "ranking_score": option.ranking_score}),
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


def with_beginnings(command: TranslateRun, lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each line with the beginning of its translation, empty without `prefix=`.

    Raises:
        UserError: the file has fewer lines, or more.
    """
    if command.prefix is None:
        yield from ((line, "") for line in lines)
        return
    both = itertools.zip_longest(lines, read_text(command.prefix))
    for number, (line, beginning) in enumerate(both, 1):
        if line is None or beginning is None:
            raise UserError(f"prefix={command.prefix} and the input have different numbers of lines, from {number} on")
        yield line, beginning


def translate_lines(command: TranslateRun, translator: Translator, lines: Iterable[str]) -> None:
    """Write a translation for each line, in order, a chunk at a time."""
    want_links = command.alignments is not None or command.format != "text"
    interactive = command.input is None and sys.stdin.isatty()
    done = 0
    with ExitStack() as stack:
        text_file = stack.enter_context(output(mine(command.output)))
        align = None
        if command.alignments is not None:
            links_file = stack.enter_context(output(mine(command.alignments)))
            align = stack.enter_context(writer(command.alignments, links_file))
        for pairs in chunks(with_beginnings(command, lines), 1 if interactive else CHUNK):
            chunk, beginnings = zip(*pairs, strict=True)
            found = translator.translate(chunk, want_links, done + 1, command.output is not None, beginnings)
            best = [options[0] for options in found]
            check_scores(best, done + 1)
            warn_of_cuts(best, command.search, done + 1)
            as_wanted, both = FORMATS[command.format], zip(chunk, found, strict=True)
            write(text_file, "".join(as_wanted(line, options, command) for line, options in both))
            if align is not None:
                for options in found:
                    missing = [Translation("", score=float("-inf"))] * (command.search.n_best - len(options))
                    for record in (option.record for option in options + missing):
                        align(record, record.links(command.links))
            done += len(chunk)


def score_pairs(command: TranslateRun, translator: Translator) -> None:
    """Write the log-probability of each given pair."""
    sources, targets = (list(read_text(path)) for path in (command.input, command.target))
    if len(sources) != len(targets):
        raise UserError(f"input={command.input} has {len(sources):,} lines, target={command.target} {len(targets):,}")
    with output(mine(command.output)) as file:
        for start in range(0, len(sources), CHUNK):
            part = slice(start, start + CHUNK)
            scored = translator.score(sources[part], targets[part], progress=command.output is not None)
            check_scores(scored, start + 1)
            write(file, "".join(f"{one.score:.6f}\n" for one in scored))


def digests_of(paths: dict[str, str | None]) -> tuple[str, ...]:
    """What is in the files that all processes of a job read.

    Raises:
        UserError: one is a pipe.
    """
    given = {key: path for key, path in paths.items() if path is not None}
    for key, path in given.items():
        if not os.path.isfile(path):
            raise UserError(f"{ranks()} processes cannot share {key}={path}, which is no regular file; write a file")
    return tuple(sha256_of(Path(path)) for path in given.values())


@main("translate")
def translate(command: TranslateRun) -> None:
    log_to_stderr()
    files = {"input": command.input, "target": command.target, "prefix": command.prefix}
    with joined(command.device) as device:
        in_turn(lambda: check_readable(files))
        if command.input is None and ranks() > 1:
            raise UserError(f"{ranks()} processes cannot share standard input; write input=FILE")
        settings = command.precision, command.average, command.search
        translator = in_turn(lambda: open_translator(command.checkpoint, device, *settings))
        same(lambda: (translator.key, tuple(translator.dictionary.items())), OTHER_MODEL)
        if ranks() > 1:
            digests = in_turn(lambda: digests_of(files))
            same(lambda: digests, OTHER_TEXT)
        shows = f"alignments={command.alignments}" if command.alignments else f"format={command.format}"
        if (command.alignments or command.format == "links") and not translator.model.attends:
            raise UserError(f"{shows} shows where attention was, and the model has none; leave it out")
        if command.mode == "score":
            score_pairs(command, translator)
        else:
            talking = command.input is None and sys.stdin.isatty() and sys.stdout.isatty()
            translate_lines(command, translator, typed("> ") if talking else read_text(command.input))


if __name__ == "__main__":
    translate()
