"""Translate lines of text or an HTML document, or score given translations.

echo "Ein Hund schläft ." | python -m nmt.translate checkpoint=runs/NAME
python -m nmt.translate checkpoint=runs/NAME input=in.txt output=out.txt search.beam=5
python -m nmt.translate checkpoint=runs/NAME input=page.html output=out.html format=html
python -m nmt.translate --help
"""

import nmt.system.startup  # noqa: F401  # isort: skip  before anything that imports torch
import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack

from nmt.api import open_translator
from nmt.config import TranslateRun
from nmt.decoding.alignment import choose_alignment_format, restore_unknown_words
from nmt.decoding.html_translation import translate_html
from nmt.decoding.translation import Translation, check_scores, describe_translations, warn_if_truncated
from nmt.decoding.translator import Translator
from nmt.errors import UserError
from nmt.system.cli import main
from nmt.system.distributed import local_rank0_first, process_group, rank0_path, world_size
from nmt.system.logging import log
from nmt.system.text import (
    STDIN_PATH,
    STDOUT_PATH,
    TextInput,
    check_readable,
    is_regular_file,
    open_output,
    read_chunks,
    resolve_standard_streams,
    write_utf8,
)


def format_text(line: str, options: list[Translation], command: TranslateRun) -> str:
    """Return exactly `n_best` lines for an input line, padded with empty ones."""
    texts = [option.text for option in options] + [""] * (command.search.n_best - len(options))
    return "".join(text + "\n" for text in texts)


def format_jsonl(line: str, options: list[Translation], command: TranslateRun) -> str:
    """Return a JSON object for an input line, with its translations, best first."""
    return json.dumps(describe_translations(line, options, command.links), ensure_ascii=False) + "\n"


def format_links(line: str, options: list[Translation], command: TranslateRun) -> str:
    """Return each translation, and below it the links between source and target words."""
    lines = []
    for option in options:
        record = option.record
        source = restore_unknown_words(line, record.source_words)
        target = restore_unknown_words(option.text, record.target_words)
        links = [f"{source[s]}={target[t]}" for s, t in record.links(command.links)]
        lines += [option.text, "    " + "  ".join(links)]
    return "".join(text + "\n" for text in lines)


OUTPUT_FORMATS = {"text": format_text, "jsonl": format_jsonl, "links": format_links}


def zip_with_file(lines: Iterable[str], key: str, path: str | None) -> Iterator[tuple[str, str]]:
    """Pair each input line with the same line of the file `target=` or `prefix=`, or with "" if that is not set.

    Raises:
        UserError: the file has fewer or more lines than the input.
    """
    if path is None:
        yield from ((line, "") for line in lines)
        return
    for number, (line, file_line) in enumerate(itertools.zip_longest(lines, TextInput(path)), 1):
        if line is None or file_line is None:
            raise UserError(
                f"{key}={path} and the input have different numbers of lines: only one of them has a line {number}"
            )
        yield line, file_line


def translate_lines(command: TranslateRun, translator: Translator, source: TextInput) -> None:
    """Write the translations of all lines in order, a chunk at a time.

    A regular file appears only once it is complete.
    """
    keep_weights = command.alignments is not None or command.format != "text"
    format_line = OUTPUT_FORMATS[command.format]
    with ExitStack() as stack:
        text_file = stack.enter_context(open_output(rank0_path(command.output)))
        if command.alignments is not None:
            links_file = stack.enter_context(open_output(rank0_path(command.alignments)))
            format_record = choose_alignment_format(command.alignments)
        first_line = 1
        for pairs in read_chunks(zip_with_file(source, "prefix", command.prefix), source.has_more):
            lines, prefixes = zip(*pairs, strict=True)
            results = translator.translate(lines, keep_weights, first_line, command.output != STDOUT_PATH, prefixes)
            best = [options[0] for options in results]
            check_scores(best, first_line)
            warn_if_truncated(best, command.search, first_line)
            texts = [format_line(line, options, command) for line, options in zip(lines, results, strict=True)]
            write_utf8(text_file, "".join(texts))
            if command.alignments is not None:
                for options in results:
                    padding = [Translation("", score=float("-inf"))] * (command.search.n_best - len(options))
                    for record in (option.record for option in options + padding):
                        write_utf8(links_file, format_record(record, record.links(command.links)) + "\n")
            first_line += len(lines)


def score_lines(command: TranslateRun, translator: Translator, source: TextInput) -> None:
    """Write the log-probability of each line of `target=`, given the same line of the input."""
    first_line = 1
    with open_output(rank0_path(command.output)) as file:
        for pairs in read_chunks(zip_with_file(source, "target", command.target), source.has_more):
            lines, targets = zip(*pairs, strict=True)
            scored = translator.score(lines, targets, progress=command.output != STDOUT_PATH)
            check_scores(scored, first_line)
            write_utf8(file, "".join(f"{translation.score:.6f}\n" for translation in scored))
            first_line += len(lines)


def check_inputs(inputs: dict[str, str | None]) -> None:
    """Raise a `UserError` if a file cannot be read, or several processes would share a stream."""
    check_readable(inputs)
    for key, path in inputs.items():
        if path and world_size() > 1 and not is_regular_file(path):
            stream = "standard input" if path == STDIN_PATH else f"{key}={path}"
            raise UserError(f"{world_size()} processes cannot share {stream}; use {key}=FILE")


@main("translate")
def translate(command: TranslateRun) -> None:
    resolve_standard_streams(command, ("input", "target", "prefix"), ("output", "alignments"))
    with process_group(command.device) as device:
        inputs = {"input": command.input, "target": command.target, "prefix": command.prefix}
        local_rank0_first(lambda: check_inputs(inputs))
        translator = local_rank0_first(
            lambda: open_translator(command.checkpoint, device, command.precision, command.average, command.search)
        )
        if (command.alignments or command.format in ("links", "html")) and not translator.model.attends:
            key = "alignments" if command.alignments else "format"
            raise UserError(f"{key}={getattr(command, key)} needs a model with attention; remove {key}")
        if command.input == STDIN_PATH and sys.stdin.isatty():
            log.info("reading from the terminal: each line is translated as it ends; Ctrl-D ends the input")
        source = TextInput(command.input)
        if command.target is not None:
            score_lines(command, translator, source)
        elif command.format == "html":
            with open_output(rank0_path(command.output)) as file:
                document = "".join(f"{line}\n" for line in source)
                write_utf8(file, translate_html(translator, document, progress=command.output != STDOUT_PATH))
        else:
            translate_lines(command, translator, source)


if __name__ == "__main__":
    translate()
