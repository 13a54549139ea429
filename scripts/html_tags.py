"""How often the tags of HTML are put around the right words.

python scripts/html_tags.py checkpoint=runs/mine source=test.de train_source=train.de train_target=train.en

In each of the first `lines` of `source`, five random groups of one to three words get a tag. The right words are those
linked to the group by the statistical aligner, trained on the lines with their translations and on the first
`train_lines` of the training text. Groups without such links are left out. Prints for the links that nmt uses for HTML,
and for those of alignment files, how many tags are around exactly these words, around some of them, and around nothing.
"""

import random
from collections import Counter
from html import unescape
from itertools import islice
from pathlib import Path

from settings import parse_settings

import nmt
from nmt.aligner.aligner import LINK_THRESHOLD, align_sentences, find_links, train_aligner
from nmt.data.html_document import Node, Unit
from nmt.data.html_tags import Alignment, restore_unit
from nmt.data.words import split_tokens
from nmt.decoding.alignment import extract_links
from nmt.decoding.html_translation import align_text, find_owners

GROUPS, LONGEST = 5, 3


def read(path: str, lines: str) -> list[str]:
    with Path(path).open(encoding="utf-8") as file:
        return [line.strip() for line in islice(file, int(lines))]


def tag_group(text: str, alignment: Alignment, first: int, end: int) -> tuple[int, int]:
    """Return where in the translation the tag around the source words `first` to `end` (exclusive) starts and ends."""
    node = Node("<b>", alignment.source_words[first][0], alignment.source_words[end - 1][1], "</b>")
    before, _, rest = unescape(restore_unit(Unit(text, [node]), alignment)).partition("<b>")
    return len(before), len(before) + len(rest.partition("</b>")[0])


def main() -> None:
    settings = parse_settings(
        checkpoint="", source="", train_source="", train_target="", lines="1000", train_lines="60000"
    )
    lines = read(settings["source"], settings["lines"])
    model = nmt.load(settings["checkpoint"], device="cpu", precision="fp32")
    tokenizer = model.translator.tokenizer
    translations = model.translate(lines, weights=True)
    sources = [*lines, *read(settings["train_source"], settings["train_lines"])]
    targets = [*(t.text for t in translations), *read(settings["train_target"], settings["train_lines"])]
    words = [[split_tokens(line) for line in side] for side in (sources, targets)]
    weights = align_sentences(train_aligner(*words), *(side[: len(lines)] for side in words))
    counts: dict[str, Counter[str]] = {"html": Counter(), "alignment files": Counter()}
    rng = random.Random(1)
    for line, translation, weights_TS in zip(lines, translations, weights, strict=True):
        html = align_text(line, translation, tokenizer)
        normalized, offsets = tokenizer.source.processor.normalize(line, with_offsets=True)
        characters = range(len(translation.text))
        owners = (
            find_owners(translation.source_pieces, normalized, offsets, html.source_words),
            find_owners(translation.target_pieces, translation.text, characters, html.target_words),
        )
        assert translation.weights_TS is not None
        files = Alignment(
            html.text, html.source_words, html.target_words, extract_links(translation.weights_TS, *owners)
        )
        for _ in range(GROUPS):
            size = rng.randint(1, LONGEST)
            first = rng.randrange(max(1, len(html.source_words) - size))
            end = min(first + size, len(html.source_words))
            right = [t for s, t in find_links(weights_TS, LINK_THRESHOLD) if first <= s < end]
            has_word = any(map(str.isalnum, line[html.source_words[first][0] : html.source_words[end - 1][1]]))
            if not right or not has_word:
                continue
            start, stop = html.target_words[min(right)][0], html.target_words[max(right)][1]
            for name, alignment in (("html", html), ("alignment files", files)):
                got = tag_group(line, alignment, first, end)
                counts[name]["tags"] += 1
                counts[name]["exactly"] += got == (start, stop)
                counts[name]["some"] += min(got[1], stop) > max(got[0], start)
                counts[name]["nothing"] += got[0] == got[1]
    print("| Links | Tags | Exactly | Some | Nothing |\n|---|---|---|---|---|")
    for name, count in counts.items():
        shares = " | ".join(f"{count[key] / count['tags']:.1%}" for key in ("exactly", "some", "nothing"))
        print(f"| {name} | {count['tags']:,} | {shares} |")


if __name__ == "__main__":
    main()
