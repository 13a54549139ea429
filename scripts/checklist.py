"""What does a translator make of numbers, addresses, tags, capitals, typos and names that it never saw?

python scripts/checklist.py checkpoint=runs/mine split=test cases=300 protect=false

For each kind of change, up to `cases` sentence pairs of a split are changed on both sides (a typo on the source side
only), and original and changed sentences are translated. `BLEU` and its difference compare each with its own
references, in lower case; `kept` is the share of the inserted literals and names that stand in the translation exactly
once. Words to replace are found by the aligner, trained on the split itself.

Where final marks are missing, those of the original and its reference do not count either. Of two sentences in a line,
the original is the two translated one by one.

The last lines are about terms (`search.terms`), if the model can use them: source words that
occur once in the split, with the word of the reference that each is linked to. `unseen` are those that are not in the
training text.
"""

import dataclasses
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from operator import and_
from pathlib import Path
from typing import NamedTuple

from common import parse_settings, write_lines
from sacrebleu.metrics import BLEU

import nmt
from nmt.config import DataConfig
from nmt.data.augmentation import (
    FINAL_MARKS,
    Edit,
    Link,
    PairLinks,
    apply_edits,
    draw_digits,
    find_shared_literals,
    is_shared_name,
    remove_final_marks,
    replace_digits,
)
from nmt.data.corpus import iter_column, load_pairs
from nmt.data.literals import find_numbers
from nmt.data.words import join_sentences, split_tokens
from nmt.evaluation.metrics import build_bleu_metric, score_corpus
from nmt.runs.checkpoint import find_checkpoint, load_config
from nmt.training.aligned_words import align_pairs

SYLLABLES = ("Bo", "ka", "ri", "mel", "tu", "san", "dor", "vi", "lun", "pe", "gar", "zo")


class Case(NamedTuple):
    """A changed sentence pair, and what its translation must contain exactly once."""

    source: str
    target: str
    inserted: Sequence[str] = ()


Change = Callable[[str, str, Sequence[Link], random.Random], Case | None]


def edit_pair(source: str, target: str, edits: Sequence[Edit], inserted: Sequence[str]) -> Case:
    new_source, new_target = apply_edits(source, target, edits)
    return Case(new_source, new_target, inserted)


def replace_word(source: str, target: str, links: Sequence[Link], rng: random.Random, text: str) -> Case | None:
    """Replace a word and its translation."""
    if not links or text in source:
        return None
    return edit_pair(source, target, [Edit(rng.choice(links), text, text)], [text])


def change_numbers(source: str, target: str, links: Sequence[Link], rng: random.Random) -> Case | None:
    """Give numbers other digits; those with a separator keep their length."""
    edits, inserted = [], []
    for link in find_shared_literals(source, target, ["numbers"]):
        old = source[link[0] : link[1]], target[link[2] : link[3]]
        is_plain = all(text.isdecimal() for text in old)
        digits = draw_digits(rng.randint(2, 8) if is_plain else sum(map(str.isdecimal, old[0])), rng)
        inserted.append(digits)
        edits.append(Edit(link, *([digits] * 2 if is_plain else [replace_digits(text, digits) for text in old])))
    return edit_pair(source, target, edits, inserted) if edits else None


def insert_number(source: str, target: str, links: Sequence[Link], rng: random.Random) -> Case | None:
    return replace_word(source, target, links, rng, draw_digits(rng.randint(2, 8), rng))


def insert_address(source: str, target: str, links: Sequence[Link], rng: random.Random) -> Case | None:
    name = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(4, 9)))
    address = rng.choice([f"{name}@example.org", f"https://example.org/{name}?id={rng.randint(1, 999)}"])
    return replace_word(source, target, links, rng, address)


def insert_tags(source: str, target: str, links: Sequence[Link], rng: random.Random) -> Case | None:
    """Put a pair of tags around a word and its translation."""
    if not links:
        return None
    link, name = rng.choice(links), rng.choice(["b", "i", "ent1", "span"])
    sides = source[link[0] : link[1]], target[link[2] : link[3]]
    edit = Edit(link, *(f"<{name}>{text}</{name}>" for text in sides))
    return edit_pair(source, target, [edit], [f"<{name}>", f"</{name}>"])


def write_capitals(source: str, target: str, links: Sequence[Link], rng: random.Random) -> Case | None:
    return Case(source.upper(), target.upper())


def drop_final_mark(source: str, target: str, links: Sequence[Link], rng: random.Random) -> Case | None:
    new_source, new_target = remove_final_marks([source, target])
    return Case(new_source, new_target) if new_source != source else None


def make_typo(source: str, target: str, links: Sequence[Link], rng: random.Random) -> Case | None:
    """Exchange two neighboring letters within a word of the source."""
    words = [match.span() for match in re.finditer(r"[^\W\d_]{4,}", source)]
    if not words:
        return None
    start, end = rng.choice(words)
    i = rng.randrange(start + 1, end - 2)
    return Case(source[:i] + source[i + 1] + source[i] + source[i + 2 :], target)


def change_name(source: str, target: str, links: Sequence[Link], rng: random.Random) -> Case | None:
    """Replace a name by one that does not exist."""
    names = [link for link in links if is_shared_name(source, target, link)]
    return replace_word(source, target, names, rng, "".join(rng.sample(SYLLABLES, 3)).capitalize())


CHANGES: dict[str, Change] = {
    "other numbers": change_numbers,
    "a number for a word": insert_number,
    "an address for a word": insert_address,
    "tags around a word": insert_tags,
    "capitals": write_capitals,
    "no final mark": drop_final_mark,
    "a typo": make_typo,
    "another name": change_name,
}


def strip_final_marks(text: str) -> str:
    return text.rstrip(FINAL_MARKS + " ")


# What is done to translations and references before they are scored
BEFORE_SCORING = {"no final mark": strip_final_marks}


def count_exactly_once(translation: str, inserted: Sequence[str]) -> int:
    """Return how many of the inserted texts stand in a translation once; numbers without regard to separators."""
    numbers = find_numbers(translation)
    return sum((numbers.count(text) if text.isdecimal() else translation.count(text)) == 1 for text in inserted)


def find_terms(sources: Sequence[str], targets: Sequence[str], links: PairLinks) -> dict[int, tuple[str, str]]:
    """Return source words that occur once, and their translations, by row; one for each sentence."""
    counts = Counter(word for source in sources for word in split_tokens(source))
    terms = {}
    for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
        pairs = [(source[link[0] : link[1]], target[link[2] : link[3]]) for link in links.of_pair(row)]
        single = [(s, t) for s, t in pairs if counts[s] == 1 and "\t" not in s + t]
        if single:
            terms[row] = single[0]
    return terms


class Checker(NamedTuple):
    """Sentence pairs, and how they are translated and scored."""

    checkpoint: str
    beam: int
    model: nmt.Model
    data: DataConfig
    metric: BLEU
    sources: Sequence[str]
    targets: Sequence[str]
    links: PairLinks
    cases: int  # of each kind, at most

    def translate(self, lines: Sequence[str]) -> list[str]:
        return [translation.text for translation in self.model.translate(list(lines))]

    def score(self, translations: Sequence[str], references: Sequence[str]) -> float:
        lowered = [text.lower() for text in translations]
        return score_corpus(self.metric, lowered, [text.lower() for text in references]) or 0.0

    def draw_cases(self, change: Change) -> dict[int, Case]:
        """Return changed pairs by row."""
        rng = random.Random(1)
        cases: dict[int, Case] = {}
        for row in rng.sample(range(len(self.sources)), len(self.sources)):
            case = change(self.sources[row], self.targets[row], self.links.of_pair(row), rng)
            if case is not None and len(cases) < self.cases:
                cases[row] = case
        return cases

    def print_changes(self) -> None:
        originals: dict[int, str] = {}
        for name, change in CHANGES.items():
            cases = self.draw_cases(change)
            if not cases:
                print(f"{name}: no sentence to change")
                continue
            new = [row for row in cases if row not in originals]
            originals |= zip(new, self.translate([self.sources[row] for row in new]), strict=True)
            translations = self.translate([case.source for case in cases.values()])
            change_text: Callable[[str], str] = BEFORE_SCORING.get(name, str)
            before, after = (
                self.score(*([change_text(text) for text in side] for side in sides))
                for sides in (
                    ([originals[row] for row in cases], [self.targets[row] for row in cases]),
                    (translations, [case.target for case in cases.values()]),
                )
            )
            inserted = sum(len(case.inserted) for case in cases.values())
            kept = sum(
                count_exactly_once(text, case.inserted) for text, case in zip(translations, cases.values(), strict=True)
            )
            share = f", {kept:,} of {inserted:,} kept ({kept / inserted:.1%})" if inserted else ""
            print(f"{name}: {len(cases):,} sentences, BLEU {format_change(before, after)}{share}")

    def print_couples(self) -> None:
        """Print what becomes of two sentences in one line."""
        count = min(self.cases, len(self.sources) // 2)
        rows = random.Random(1).sample(range(len(self.sources)), 2 * count)
        sources, references = (
            [join_sentences([side[a], side[b]]) for a, b in zip(rows[::2], rows[1::2], strict=True)]
            for side in (self.sources, self.targets)
        )
        alone = self.translate([self.sources[row] for row in rows])
        before = self.score([join_sentences(texts) for texts in zip(alone[::2], alone[1::2], strict=True)], references)
        after = self.score(self.translate(sources), references)
        print(f"two sentences in a line: {count:,} lines, BLEU {format_change(before, after)}")

    def print_terms(self) -> None:
        if not self.model.translator.tokenizer.source.literal_ids:
            return
        terms = dict(list(find_terms(self.sources, self.targets, self.links).items())[: self.cases])
        lines, references = ([side[row] for row in terms] for side in (self.sources, self.targets))
        training_sources = iter_column(load_pairs(self.data, "train"), "source")
        seen = {word for source in training_sources for word in split_tokens(source)}
        unseen = [term not in seen for term, _ in terms.values()]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "terms.tsv"
            write_lines(path, ["\t".join(term) for term in terms.values()])
            with_terms = nmt.load(self.checkpoint, terms=str(path), beam=self.beam)
            translators = {"without terms": self.model, "with terms": with_terms}
            for name, translator in translators.items():
                start = time.process_time()
                texts = [translation.text for translation in translator.translate(lines)]
                seconds = time.process_time() - start
                obeyed = [term in text for (_, term), text in zip(terms.values(), texts, strict=True)]
                print(
                    f"{name}: {len(terms):,} sentences, BLEU {self.score(texts, references):.2f}, {sum(obeyed):,} "
                    f"terms obeyed ({sum(obeyed) / len(terms):.1%}), {sum(map(and_, obeyed, unseen)):,} of "
                    f"{sum(unseen):,} unseen, {seconds:.1f} s"
                )


def format_change(before: float, after: float) -> str:
    return f"{before:.2f} to {after:.2f} ({after - before:+.2f})"


def main() -> None:
    settings = parse_settings(checkpoint="", split="test", cases="300", protect="false", path="", beam="5")
    checkpoint, beam = settings["checkpoint"], int(settings["beam"])
    run = load_config(find_checkpoint(checkpoint)[0])
    data = dataclasses.replace(run.data, path=settings["path"] or run.data.path)
    pairs = load_pairs(data, settings["split"])
    sources, targets = list(iter_column(pairs, "source")), list(iter_column(pairs, "target"))
    checker = Checker(
        checkpoint,
        beam,
        nmt.load(checkpoint, protect=settings["protect"] == "true", beam=beam),
        data,
        build_bleu_metric(run.bleu_tokenizer, targets),
        sources,
        targets,
        align_pairs(sources, targets),
        int(settings["cases"]),
    )
    checker.print_changes()
    checker.print_couples()
    checker.print_terms()


if __name__ == "__main__":
    main()
