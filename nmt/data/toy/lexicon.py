"""The words of the built-in corpus: the tables of `lexicon.ini`, parsed, and their inflection."""

from configparser import ConfigParser
from dataclasses import dataclass
from pathlib import Path

TABLES = ConfigParser(delimiters="=", interpolation=None)
TABLES.optionxform = str  # type: ignore[assignment, method-assign]  # the keys are case-sensitive
TABLES.read_string(Path(__file__).with_suffix(".ini").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Noun:
    kind: str
    german: str
    gender: str
    plural: str  # empty for none
    english: str
    english_plural: str
    weak: bool
    prepositions: tuple[str, ...]  # of a place, German:English: location, direction

    def inflect(self, case: str, plural: bool) -> str:
        if plural:
            return self.plural + ("n" if case == "dat" and self.plural[-1] not in "ns" else "")
        return self.plural if self.weak and case != "nom" else self.german


@dataclass(frozen=True, slots=True)
class Verb:
    prefix: str
    infinitive: str
    third: str
    participle: str  # empty if there is no perfect
    auxiliary: str
    english: str
    particle: tuple[str, ...]
    past: str
    ing: str
    aspect: str
    subjects: tuple[str, ...]
    roles: dict[str, tuple[str, ...]]

    @property
    def objects(self) -> list[str]:
        return [role for role in self.roles if role in ("dat", "acc")]


@dataclass(frozen=True, slots=True)
class Modal:
    infinitive: str
    auxiliary: str  # the English word before "not"; empty for a verb that needs "do"
    rest: tuple[str, ...]


def parse_entries(table: str) -> list[list[str]]:
    return [entry.split() for entry in table.split(",")]


def expand_classes(text: str) -> tuple[str, ...]:
    return tuple(kind for word in text.split() for kind in TABLES["groups"].get(word, word).split())


def add_s(word: str) -> str:
    """Return the plural of an English noun, or the third person singular of a verb."""
    if word in ("have", "go", "do"):
        return {"have": "has", "go": "goes", "do": "does"}[word]
    if word[-1] == "y" and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + ("es" if word.endswith(("s", "x", "ch", "sh")) else "s")


def parse_noun(kind: str, row: list[str]) -> Noun:
    german, gender, plural, english, *rest = row
    english = english.replace("_", " ")
    irregular = [word for word in rest if ":" not in word] or [add_s(english)]
    places = tuple(word for word in rest if ":" in word)
    return Noun(kind, german, gender[0], plural.strip("-"), english, irregular[0], gender == "mw", places)


def parse_verb(frame: str, row: list[str]) -> Verb:
    left, _, right = frame.partition(":")
    subjects, _, aspect = left.partition(" [")
    roles = [part.split(maxsplit=1) for part in right.split(";") if part.strip()]
    german, third, participle, english, past, *ing = row
    prefix, _, infinitive = german.rpartition("|")
    movement, _, participle = participle.strip("-").rpartition("+")
    base, *particle = english.split("_")
    regular = (base[:-1] if base[-1] == "e" and base[-2] != "e" else base) + "ing"
    return Verb(
        prefix=prefix,
        infinitive=infinitive,
        third=third,
        participle=participle,
        auxiliary="sein" if movement else "haben",
        english=base,
        particle=tuple(particle),
        past=past,
        ing=ing[0] if ing else regular,
        aspect=aspect.strip("]") or "action",
        subjects=expand_classes(subjects),
        roles={role: expand_classes(kinds) for role, kinds in roles},
    )


def select_ending(name: str, case: str, slot: str) -> str:
    endings = TABLES["endings"][name].split()
    return endings[("nom", "acc", "dat").index(case) * 4 + "mfnp".index(slot)].strip("-")


def article(name: str, case: str, slot: str) -> str:
    """Return the German article; slot is the gender, or p for plural."""
    if name in ("zwei", "drei"):
        return name
    if name == "der":
        return select_ending("der", case, slot)
    return name + select_ending("strong" if name in ("dies", "jed", "viel") else "ein", case, slot)


def adjective(word: str, name: str, case: str, slot: str) -> str:
    """Inflect a German adjective after the article `name`, which may be empty."""
    endings = "mixed" if name in ("ein", "kein", "mein", "dein", "unser") else "strong"
    endings = "weak" if name in ("der", "dies", "jed") else endings
    stem = word[:-2] + word[-1] if word.endswith(("uer", "el")) else word.removesuffix("e")
    return stem + select_ending(endings, case, slot)


def present(infinitive: str, third: str, who: str) -> str:
    """Return the German finite form for person and number "1s" ... "3p", without the prefix."""
    if infinitive in FORMS:
        return FORMS[infinitive][("1s", "2s", "3s").index(who) if who[1] == "s" else 3]
    if who == "1s":
        return infinitive[:-1] if infinitive.endswith("en") else infinitive[:-1] + "e"
    if who == "2s":
        return third[:-1] + ("t" if third[-2] in "sßz" else "st")
    return third if who == "3s" else infinitive


OTHERS = TABLES["others"]
PEOPLE, ANIMALS, THINGS = map(expand_classes, ("person", "animal", TABLES["groups"]["object"]))
NOUNS = {
    kind: [parse_noun(kind, row) for row in parse_entries(table)]
    for section in ("nouns", "places")
    for kind, table in TABLES[section].items()
}
JOBS = [noun for noun in NOUNS["adult"] if noun.german in OTHERS["jobs"].split()]
ADJECTIVES = {
    kind: [
        row
        for kinds, table in TABLES["adjectives"].items()
        if kind in expand_classes(kinds)
        for row in parse_entries(table)
    ]
    for kind in NOUNS
}
POSITIONS = {
    name: (kinds.split(), parse_entries(table))
    for name, (kinds, table) in ((name, text.split(":")) for name, text in TABLES["positions"].items())
}
LOCATIONS = {kind: text.split() for kinds, text in TABLES["locations"].items() for kind in kinds.split()}
NO_POSSESSIVE, MASS_NOUNS, BARE_PLURALS = (kinds.split() for kinds in TABLES["classes"].values())
ARTICLES = {german: english for german, english in parse_entries(OTHERS["articles"])}
CONTRACTED = {(preposition, article): word for preposition, article, word in parse_entries(OTHERS["contractions"])}
PERSON_NAMES = parse_entries(OTHERS["names"])
PRONOUNS = parse_entries(OTHERS["pronouns"])
STATES = parse_entries(OTHERS["states"])
VERBS = [parse_verb(frame, row) for frame, table in TABLES["verbs"].items() for row in parse_entries(table)]
REPORTS = {
    key: [parse_verb("person [state]:", row) for row in parse_entries(table)]
    for key, table in TABLES["reports"].items()
}
WEATHER = [parse_verb("weather:", row) for row in parse_entries(OTHERS["weather"])]
COPULA = parse_verb("person:", OTHERS["copula"].split())
MODALS = [
    Modal(infinitive, auxiliary.strip("-"), () if rest == "-" else tuple(rest.split("_")))
    for infinitive, *_, auxiliary, rest in parse_entries(OTHERS["modals"])
]
FORMS = {row[0]: row[1:5] for row in parse_entries(OTHERS["irregular verbs"]) + parse_entries(OTHERS["modals"])}
TIMES = {tense: table.split(",") for tense, table in TABLES["times"].items()}
FREQUENCY_ADVERBS = OTHERS["frequency"].split(",")
# English content words, in all their forms.
LEMMAS = {word: word for _, word in sum(ADJECTIVES.values(), STATES)} | {name: name for name, _ in PERSON_NAMES}
LEMMAS |= {word: verb.english for verb in VERBS for word in (verb.english, add_s(verb.english), verb.past, verb.ing)}
LEMMAS |= {
    word: lemma
    for noun in sum(NOUNS.values(), [])
    for form in (noun.english, noun.english_plural)
    for word, lemma in zip(form.split(), noun.english.split(), strict=True)
}
