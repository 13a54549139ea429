"""Gold links from a file, a line for each pair of sentences."""

from pathlib import Path

from nmt.data.lines import LineReader, opened, read_lines
from nmt.data.words import script_of
from nmt.errors import UserError
from nmt.links import Gold, parse_gold

Sentences = list[list[str]]  # as words


def read_gold(path: Path, base: int, sources: Sentences, targets: Sentences) -> list[Gold]:
    """The gold links of each pair.

    Raises:
        UserError: file:line and what is wrong there, or another number of lines than there are pairs.
    """
    with opened(path) as file:
        lines = list(read_lines(LineReader(file, path)))
    if len(lines) != len(sources):
        raise UserError(f"{path} has {len(lines):,} lines for {len(sources):,} pairs of sentences")
    found = []
    for number, (line, source, target) in enumerate(zip(lines, sources, targets, strict=True), 1):
        try:
            found.append(parse_gold(line, base, len(source), len(target)))
        except ValueError as error:
            unspaced = script_of(source) or script_of(target)
            remedy = "; they count what stands between spaces: write spaces between the words of the text" * bool(
                unspaced
            )
            raise UserError(f"{path}:{number}: {error}{remedy}") from None
    return found
