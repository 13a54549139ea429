"""Noun phrases and clauses of the built-in corpus (see `corpus.py`), built in both languages at once.

Every function builds both sides of a phrase from units that translate each other, so translations and alignments are
correct by construction. Random choices use the generator passed in.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

from nmt.data.toy import lexicon
from nmt.data.toy.lexicon import Modal, Noun, Verb


class Token(NamedTuple):
    text: str
    unit: object  # shared by the words that translate each other; None for a word without a counterpart
    head: bool = True


@dataclass(frozen=True, slots=True)
class Phrase:
    """Part of a sentence in both languages, each in its own word order."""

    german: tuple[Token, ...] = ()
    english: tuple[Token, ...] = ()

    def __add__(self, other: "Phrase") -> "Phrase":
        return Phrase(self.german + other.german, self.english + other.english)


NOTHING = Phrase()
COMMA = Phrase(german=(Token(",", None),))


def tokens(words: Iterable[str], key: object, head: int = 0) -> tuple[Token, ...]:
    """Create the tokens of one unit; with head -1, none of them is the head."""
    return tuple(Token(word, key, i == head) for i, word in enumerate(words))


def unit(german: str, english: str, german_head: int = 0, english_head: int = 0) -> Phrase:
    """Create a phrase of words that translate each other as a whole."""
    key = object()
    return Phrase(tokens(german.split(), key, german_head), tokens(english.split(), key, english_head))


def parse_phrase(text: str) -> Phrase:
    """Parse text like 'am Wochenende = at_the weekend', with one unit per word."""
    german, english = (side.split() for side in text.split(" = "))
    units = [unit(g, e.replace("_", " ")) for g, e in zip(german, english, strict=True)]
    return sum(units, NOTHING)


# ---------------------------------------------------------------------------------------------------- noun phrases


@dataclass(frozen=True, slots=True)
class Nominal:
    """A noun phrase, name or pronoun in one case."""

    phrase: Phrase
    kind: str = "adult"
    who: str = "3s"
    slot: str = "p"  # gender, or p for plural
    article: str = ""  # "name" for names, pronouns and other phrases that take no article
    pronoun: bool = False
    negator: tuple[Token, ...] = ()  # "not" in the English clause, for a German "kein"

    @property
    def definite(self) -> bool:
        return self.kind == "kin" or self.article in ("der", "dies", "mein", "dein", "unser", "name")


def choose_article(rng: random.Random, noun: Noun, case: str, plural: bool, definite: bool) -> str:
    if noun.kind == "kin":
        return rng.choice(("mein", "dein", "unser"))
    weights = {"der": 10, "dies": 2}
    if noun.kind not in lexicon.NO_POSSESSIVE:
        weights |= {"mein": 1, "dein": 1, "unser": 1}
    if not definite and plural:
        weights |= {"viel": 2, "zwei": 2, "drei": 2, "": 3 * (case != "nom" and noun.kind in lexicon.BARE_PLURALS)}
    elif not definite:
        weights |= {"": 12} if noun.kind in lexicon.MASS_NOUNS else {"ein": 8, "jed": 2 * (case == "nom")}
    return rng.choices(list(weights), list(weights.values()))[0]


def noun_phrase(
    rng: random.Random, noun: Noun, case: str, definite: bool, negated: bool = False, many: float = 0.3
) -> Nominal:
    """Build a noun with an article ("kein" if negated), sometimes an adjective, and plural with probability `many`."""
    plural = bool(noun.plural) and rng.random() < many
    slot = "p" if plural else noun.gender
    name = "kein" if negated else choose_article(rng, noun, case, plural, definite)
    english = noun.english_plural if plural else noun.english
    phrase = unit(noun.inflect(case, plural), english, english_head=english.count(" "))
    if lexicon.ADJECTIVES[noun.kind] and rng.random() < 0.3:
        german, english = rng.choice(lexicon.ADJECTIVES[noun.kind])
        phrase = unit(lexicon.adjective(german, name, case, slot), english) + phrase
    if not name:
        return Nominal(phrase, noun.kind, "3p" if plural else "3s", slot)
    german, english = lexicon.article(name, case, slot), lexicon.ARTICLES[name]
    if plural and name == "dies":
        english = "these"
    elif english == "a":
        vowel = phrase.english[0].text[0] in "aeiou"
        english = "any" if plural or noun.kind in lexicon.MASS_NOUNS else "an" if vowel else "a"
    article = unit(german, english, english_head=-1 if negated else 0)
    negator = (Token("not", article.german[0].unit),) if negated else ()
    return Nominal(article + phrase, noun.kind, "3p" if plural else "3s", slot, name, negator=negator)


def nominal(
    rng: random.Random, kinds: Sequence[str], case: str, definite: bool = False, negated: bool = False, beside: str = ""
) -> Nominal:
    """Choose a noun phrase, name or pronoun of these kinds.

    Pronouns of the same grammatical person as the subject, given as `beside`, are excluded.
    """
    chance = rng.random() if "adult" in kinds and not negated else 1.0
    if chance < 0.12:
        name, gender = rng.choice(lexicon.PERSON_NAMES)
        return Nominal(unit(name, name), slot=gender, article="name")
    if chance < 0.32:
        german, english = {"nom": (2, 5), "acc": (3, 6), "dat": (4, 6)}[case]
        rows = [row for row in lexicon.PRONOUNS if row[german] != "-" and (row[0][0] == "3" or row[0][0] != beside[:1])]
        row = rng.choice(rows)
        return Nominal(unit(row[german], row[english]), who=row[0], slot=row[1], article="name", pronoun=True)
    noun = rng.choice([noun for kind in kinds for noun in lexicon.NOUNS[kind]])
    return noun_phrase(rng, noun, case, definite, negated and noun.kind != "kin")


def pronoun_for(noun: Nominal) -> Nominal | None:
    """Return the pronoun for a person mentioned before; None for a neuter: "das Kind ... es" could be he or she."""
    for who, slot, german, *_, english, _ in lexicon.PRONOUNS:
        if who == noun.who and slot in (noun.slot, "-"):
            return Nominal(unit(german, english), who=who, slot=slot, article="name", pronoun=True)
    return None


def prepositional(preposition: str, english: str, head: int, noun: Nominal) -> Phrase:
    contraction = lexicon.CONTRACTED.get((preposition, noun.phrase.german[0].text)) if noun.article == "der" else None
    if not contraction:
        return unit(preposition, english, english_head=head) + noun.phrase
    rest = Phrase(noun.phrase.german[1:], noun.phrase.english[1:])
    return unit(contraction, f"{english} the", english_head=head) + rest


def place(rng: random.Random, kinds: Sequence[str], role: str) -> Phrase:
    """Choose a place where somebody is (role at or in), goes (to) or comes from (from)."""
    kind = rng.choice(kinds)
    if kind == "hause":
        return unit("nach Hause", "home", german_head=1) if role == "to" else parse_phrase("zu Hause = at home")
    if kind in lexicon.POSITIONS:
        nouns, prepositions = lexicon.POSITIONS[kind]
        noun = rng.choice([noun for name in nouns for noun in lexicon.NOUNS[name]])
        german, english, head = rng.choice(prepositions)
    else:
        noun = rng.choice([n for n in lexicon.NOUNS[kind] if role != "from" or n.prepositions[1][:2] != "in"])
        german, english = ("von:from" if role == "from" else noun.prepositions[role == "to"]).split(":")
        head = "0"
    case = "acc" if role == "to" and german != "zu" else "dat"
    phrase = noun_phrase(rng, noun, case, definite=rng.random() < 0.8, many=0)
    return prepositional(german, english.replace("_", " "), int(head), phrase)


# ---------------------------------------------------------------------------------------------------------- clauses


@dataclass(frozen=True, slots=True)
class Clause:
    subject: Nominal
    verb: Verb
    tense: str  # now, habit, past, modal
    modal: Modal | None = None
    negated: bool = False
    objects: dict[str, Nominal] = field(default_factory=dict)  # by case, the dative first
    place: Phrase = NOTHING
    complement: Phrase = NOTHING
    time: Phrase = NOTHING
    frequency: Phrase = NOTHING


class Forms(NamedTuple):
    """The verb forms of a clause."""

    second: tuple[Token, ...]  # German, in second position
    end: tuple[Token, ...]  # German, at the end of the same clause
    final: tuple[Token, ...]  # German, all at the end of a dependent clause
    auxiliary: tuple[Token, ...]  # English, before "not"
    rest: tuple[Token, ...]  # English, after "not"


def be(who: str, past: bool = False) -> str:
    if past:
        return "was" if who[1] == "s" and who != "2s" else "were"
    return {"1s": "am", "3s": "is"}.get(who, "are")


def conjugate(clause: Clause, supported: bool) -> Forms:
    """Return the verb forms of a clause; `supported` adds a form of "do" where English has no other auxiliary."""
    verb, who, past, key = clause.verb, clause.subject.who, clause.tense == "past", object()
    do = (Token("did" if past else "does" if who == "3s" else "do", None),) if supported else ()
    agreeing = lexicon.add_s if who == "3s" and not supported else str
    if verb is lexicon.COPULA:
        finite = (Token(lexicon.present("war" if past else "sein", "", who), key),)
        return Forms(finite, (), finite, (Token(be(who, past), key),), ())
    if clause.modal:
        modal, modal_key = clause.modal, object()
        finite = (Token(lexicon.present(modal.infinitive, "", who), modal_key),)
        infinitive = (Token(verb.prefix + verb.infinitive, key),)
        auxiliary, rest = do, modal.rest
        if modal.auxiliary:
            auxiliary = (Token(be(who) if modal.auxiliary == "be" else modal.auxiliary, modal_key, not rest),)
        else:
            rest = (agreeing(rest[0]), *rest[1:])
        english = tokens(rest, modal_key) + tokens((verb.english, *verb.particle), key)
        return Forms(finite, infinitive, infinitive + finite, auxiliary, english)
    if past:
        finite = (Token(lexicon.present(verb.auxiliary, "", who), key, False),)
        participle = (Token(verb.participle, key),)
        english = tokens((verb.english if supported else verb.past, *verb.particle), key)
        return Forms(finite, participle, participle + finite, do, english)
    word = lexicon.present(verb.infinitive, verb.third, who)
    german = (Token(word, key),), tokens(verb.prefix.split(), key, -1), (Token(verb.prefix + word, key),)
    if clause.tense == "now" and verb.aspect == "action":
        return Forms(*german, (Token(be(who), key, False),), tokens((verb.ing, *verb.particle), key))
    return Forms(*german, do, tokens((agreeing(verb.english), *verb.particle), key))


def realize(clause: Clause, order: str = "main", front: Phrase = NOTHING, last: Phrase = NOTHING) -> Phrase:
    """Linearize a clause between `front` and `last`.

    Args:
        order: position of the German verb: second ("main"), first ("question") or last ("final").
    """
    asking = order == "question"
    forms = conjugate(clause, supported=asking or clause.negated)
    auxiliary = forms.auxiliary
    negator = sum((noun.negator for noun in clause.objects.values()), ())
    nicht = NOTHING
    if clause.negated and not negator:
        nicht = unit("nicht", "not")
        negator = nicht.english
        if auxiliary[0].text == "can" and not asking:
            auxiliary, negator = (auxiliary[0]._replace(text="cannot"),), ()
            nicht = Phrase(german=(Token("nicht", auxiliary[0].unit, False),))

    subject, objects = clause.subject.phrase, list(clause.objects.values())
    pronouns = sum((noun.phrase for noun in objects if noun.pronoun), NOTHING)
    nouns = sum((noun.phrase for noun in objects if not noun.pronoun), NOTHING)
    # "das Buch im Garten" if all are definite, else "im Garten ein Buch".
    definite = all(noun.definite for noun in objects)
    inner = nouns + nicht + clause.place if definite else clause.place + nouns + nicht
    middle = (clause.time + clause.frequency + inner + clause.complement).german
    if order == "final":
        german = subject.german + pronouns.german + middle + forms.final
    elif asking or front.german:  # "heute besucht sie mich", but "heute besucht mich die Frau"
        subjects = subject + pronouns if clause.subject.pronoun else pronouns + subject
        german = forms.second + subjects.german + middle + forms.end
    else:
        german = subject.german + forms.second + pronouns.german + middle + forms.end

    english_objects = (pronouns + nouns).english
    if len(objects) == 2 and not objects[0].pronoun:
        receiver, gift = (noun.phrase for noun in objects)
        english_objects = gift.english + (Token("to", receiver.german[0].unit, False),) + receiver.english
    english = auxiliary + subject.english if asking else subject.english + auxiliary
    english += negator + clause.frequency.english + forms.rest + english_objects
    english += (clause.place + clause.complement + clause.time).english
    return Phrase(front.german + german + last.german, front.english + english + last.english)


@cache
def verbs_with(tense: str, subject: str = "", thing: str = "") -> list[Verb]:
    """Return the verbs that have this tense, take a subject of this kind and take `thing` as their only object."""
    excluded = {"now": ["event"], "habit": ["state"], "past": [], "modal": ["event", "state"]}[tense]
    verbs = [verb for verb in lexicon.VERBS if verb.aspect not in excluded and (verb.participle or tense != "past")]
    if subject:
        verbs = [verb for verb in verbs if subject in verb.subjects]
    if thing:
        verbs = [verb for verb in verbs if len(verb.objects) == 1 and verb.roles.keys() <= {"acc", "dat", "at"}]
        verbs = [verb for verb in verbs if thing in verb.roles[verb.objects[0]]]
    return verbs


def make_clause(
    rng: random.Random,
    tense: str,
    subject: Nominal | None = None,
    negated: bool = False,
    definite: bool = False,
    timed: float = 0.5,
    verb: Verb | None = None,
) -> Clause:
    """Make a clause about the subject, or a random one if None; `timed` is the probability of a time phrase."""
    verb = verb or rng.choice(verbs_with(tense, subject.kind if subject else ""))
    subject = subject or nominal(rng, verb.subjects, "nom", definite or negated)
    person = subject.kind in lexicon.PEOPLE
    modals = [modal for modal in lexicon.MODALS if person or not modal.rest]  # things have no wishes or duties
    modal = rng.choice(modals) if tense == "modal" else None
    objects = {}
    for case in verb.objects:
        kein = negated and case == "acc" and rng.random() < 0.5 and not (modal and modal.auxiliary == "can")
        objects[case] = nominal(rng, verb.roles[case], case, negated, kein, subject.who)
    where, complement = NOTHING, NOTHING
    for role, kinds in verb.roles.items():
        if role == "in" or (role == "at" and rng.random() < 0.45 and not (negated and objects)):
            where = place(rng, kinds, role)
        elif role in ("to", "from"):
            complement = place(rng, kinds, role)
        elif ":" in role:
            german, english = role.split(":")
            other = nominal(rng, kinds, "dat" if german == "mit" else "acc", negated, beside=subject.who)
            complement = prepositional(german, english, 0, other)
    if len(objects) == 1 and not (negated or verb.prefix or where.german or complement.german) and rng.random() < 0.2:
        case, noun = next(iter(objects.items()))
        if noun.article == "der" and noun.kind in lexicon.LOCATIONS:
            located = noun.phrase + place(rng, lexicon.LOCATIONS[noun.kind], "at")
            objects[case] = replace(noun, phrase=located, article="name")
    time, frequency = NOTHING, NOTHING
    if tense == "habit" and timed and rng.random() < 0.5:
        frequency = parse_phrase(rng.choice(lexicon.FREQUENCY_ADVERBS))
    elif tense == "habit" and timed or verb.aspect != "state" and rng.random() < timed:
        time = parse_phrase(rng.choice(lexicon.TIMES[tense]))
    return Clause(subject, verb, tense, modal, negated, objects, where, complement, time, frequency)


def make_copular_clause(rng: random.Random, tense: str, subject: Nominal, job: bool = False) -> Clause:
    """Make a clause with "be": the subject is in a state, has a profession or a property."""
    person = subject.kind in lexicon.PEOPLE
    jobs = [noun for noun in lexicon.JOBS if noun.gender == subject.slot]
    if job and jobs and person and subject.kind != "child" and subject.article in ("mein", "dein", "unser", "name"):
        noun = rng.choice(jobs)
        article = "an" if noun.english[0] in "aeiou" else "a"
        complement = unit(noun.german, f"{article} {noun.english}", english_head=1 + noun.english.count(" "))
    else:
        german, english = rng.choice(lexicon.STATES if person else lexicon.ADJECTIVES[subject.kind])
        complement = unit(german, english)
    return Clause(subject, lexicon.COPULA, tense, negated=not job and rng.random() < 0.1, complement=complement)
