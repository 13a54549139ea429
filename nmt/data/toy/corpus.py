"""The built-in parallel corpus: sentences of a small German-English grammar with gold word alignments.

The sides differ as the languages do. The German finite verb is in second or last position; separable prefixes and
participles are at the end of the clause; articles and adjectives are inflected; nouns form compounds. English has the
progressive, "do"-support and fixed word order. Still, each German sentence has exactly one English translation and vice
versa, so a perfect model reaches BLEU 100 in both directions. German present and perfect correspond to English present
and simple past; what is fronted in one language is fronted in the other; "you" is always "du", and pronouns do not
occur where their form would be ambiguous.

Gold links connect the words of a translation unit. The link between the two heads is sure, all others are possible:

- *im = in the*: im-in is sure, im-the possible; *Haustür = front door*: Haustür-door is sure, Haustür-front possible;
  *vor = in front of*: vor-front is sure, vor-in and vor-of possible; also *neben = next to*, *nach Hause = home*;
- *steht ... auf = gets up*, *hat ... gelesen = read*, *liest = is reading*, *muss = has to*, *möchte = would like to*:
  heads are the content words (steht, gets; gelesen, read; liest, reading; muss, has; möchte, like), so links of a
  prefix, a particle or an auxiliary are possible;
- *kein Buch = not ... a book*: kein-not is sure, kein-a possible; *kann nicht = cannot*: nicht-cannot is possible;
- "to" of an indirect object and "a" before a profession have no German word: they have possible links to the first word
  of that object (dem Kind = to the child) and to the profession (Lehrerin = a teacher);
- "do", "does" and "did" with another verb have no links, nor do German commas without a counterpart in English.
"""

import random
from dataclasses import dataclass, replace

from nmt.data.toy import lexicon
from nmt.data.toy.grammar import (
    COMMA,
    NOTHING,
    Clause,
    Nominal,
    Phrase,
    make_clause,
    make_copular_clause,
    nominal,
    pronoun_for,
    realize,
    unit,
    verbs_with,
)

SPLIT_SIZES = {"train": 20_000, "valid": 1_000, "test": 1_000}


@dataclass(frozen=True, slots=True)
class Pair:
    """A sentence pair. Links are (German word, English word), indices from 0 into `text.split()`."""

    german: str
    english: str
    sure: tuple[tuple[int, int], ...]
    possible: tuple[tuple[int, int], ...]


def generate(seed: int, sizes: dict[str, int] = SPLIT_SIZES) -> dict[str, list[Pair]]:
    """Generate splits of the given sizes, as a function of the seed.

    No sentence occurs twice on either side, within or across splits.
    """
    rng = random.Random(seed)
    seen: set[str] = set()
    splits: dict[str, list[Pair]] = {}
    for name, size in sizes.items():
        splits[name] = []
        while len(splits[name]) < size:
            kind = rng.choices((statement, question, subordinate, relative), (36, 19, 27, 18))[0]
            pair = make_pair(*kind(rng))
            if is_sensible(pair) and pair.german not in seen and pair.english not in seen:
                seen |= {pair.german, pair.english}
                splits[name].append(pair)
    return splits


def choose_person(rng: random.Random, pronouns: bool = True) -> Nominal:
    """Choose a person as the subject."""
    while (person := nominal(rng, lexicon.PEOPLE, "nom", definite=True)).pronoun and not pronouns:
        pass
    return person


def action(
    rng: random.Random, tense: str, subject: Nominal, negated: bool = False, timed: float = 0.0, lasting: bool = False
) -> Clause:
    """Make a clause that is not a state, so it can have a cause, condition or time; with `lasting`, not momentary."""
    verbs = [verb for verb in verbs_with(tense, subject.kind) if verb.aspect != "state"]
    if lasting:
        verbs = [verb for verb in verbs if verb.aspect == "action" and verb.auxiliary == "haben"]
    return make_clause(rng, tense, subject, negated, timed=timed, verb=rng.choice(verbs))


def statement(rng: random.Random) -> tuple[Phrase, str]:
    tense = rng.choices(("now", "habit", "past", "modal"), (30, 14, 32, 24))[0]
    if tense in ("now", "past") and rng.random() < 0.2:
        kinds = rng.choice((lexicon.PEOPLE, lexicon.THINGS))
        return realize(make_copular_clause(rng, tense, nominal(rng, kinds, "nom", definite=True), job=True)), "."
    clause = make_clause(rng, tense, negated=tense != "habit" and rng.random() < 0.16, timed=0.6)
    chance = rng.random()
    if chance < 0.55 and clause.time.german:
        return realize(replace(clause, time=NOTHING), front=clause.time), "."
    if chance < 0.4 and clause.place.german and clause.verb.aspect == "action" and not clause.negated:
        return realize(replace(clause, place=NOTHING), front=clause.place), "."
    return realize(clause), "."


QUESTION_WORDS = {
    "warum": "why",
    "wann": "when",
    "wo": "where",
    "wer": "who",
    "was": "what",
    "wen": "who",
    "wem": "who",
}


def question(rng: random.Random) -> tuple[Phrase, str]:
    word = rng.choices(("", "warum", "wann", "wo", "wer", "was", "wen"), (50, 10, 7, 8, 9, 10, 6))[0]
    tense = rng.choices(("now", "habit", "past", "modal"), (0, 0, 60, 40) if word == "wann" else (35, 8, 37, 20))[0]
    negated = word in ("", "warum") and tense != "habit" and rng.random() < 0.15
    who = Nominal(unit("wer", "who")) if word == "wer" else None
    while True:
        clause = make_clause(rng, tense, who, negated, definite=True, timed=0.0 if word == "wann" else 0.35)
        if not word and tense in ("now", "past") and rng.random() < 0.12:
            clause = make_copular_clause(rng, tense, clause.subject)
        if clause.subject.who[0] == "1" and tense != "modal":  # speakers do not ask about themselves
            continue
        asked = [noun.kind for noun in clause.objects.values()]
        if word == "wo" and clause.place.german:
            clause = replace(clause, place=NOTHING)
        elif word == "wen" and len(asked) == 1 and asked[0] in lexicon.PEOPLE:
            word, clause = "wem" if "dat" in clause.objects else "wen", replace(clause, objects={})
        elif word == "was" and len(asked) == 1 and asked[0] not in lexicon.PEOPLE + lexicon.ANIMALS:
            clause = replace(clause, objects={})
        elif word in ("wo", "wen", "was"):
            continue
        front = unit(word, QUESTION_WORDS[word]) if word else NOTHING
        return realize(clause) if word == "wer" else realize(clause, "question", front), "?"


# English conjunction; then triples: tense of the main clause, tense of the dependent clause, and content of the latter:
# state of the same person, weather, action of the same person (clause), action of somebody else (other), or lasting
# action of somebody else (meanwhile).
CONJUNCTIONS = {
    "weil": ("because", "now now state, past past state, modal now state, past past weather, now modal clause"),
    "obwohl": ("although", "now now state, past past state, modal now state, now now weather, past past weather"),
    "wenn": (
        "when",
        "habit habit state, habit habit weather, modal habit weather, habit habit clause, modal habit other",
    ),
    "während": ("while", "now now meanwhile, past past meanwhile, past past weather"),
    "bevor": ("before", "past past clause, modal habit clause, modal habit other"),
}


def reported(rng: random.Random) -> tuple[Phrase, str]:
    """Generate a sentence with reported speech: somebody says that, or asks whether."""
    conjunction = rng.choice(list(lexicon.REPORTS))
    verb = rng.choice(lexicon.REPORTS[conjunction])
    past = bool(verb.participle) and rng.random() < 0.4
    german, english = conjunction.split(":")
    tense = "past" if past else rng.choice(("now", "past", "modal"))
    inner = realize(make_clause(rng, tense, definite=True, timed=0.2), "final", unit(german, english))
    asking = verb.english in ("know", "believe") and not past and rng.random() < 0.4
    while (subject := choose_person(rng)).who[0] == "1" and asking:
        pass
    negated = verb.english == "know" and german == "ob" and not asking
    outer = Clause(subject, verb, "past" if past else "now", negated=negated)
    phrase = realize(outer, "question" if asking else "main", last=COMMA + inner)
    return phrase, "?" if asking else "."


def subordinate(rng: random.Random) -> tuple[Phrase, str]:
    if rng.random() < 0.3:
        return reported(rng)
    conjunction = rng.choice(list(CONJUNCTIONS))
    english, kinds = CONJUNCTIONS[conjunction]
    outer, inner, content = rng.choice(kinds.split(", ")).split()
    first = rng.random() < 0.4
    subject = choose_person(rng)
    if content == "weather":
        it = Nominal(unit("es", "it"), "weather", slot="n")
        clause = Clause(it, rng.choice(lexicon.WEATHER), inner)
    elif content in ("other", "meanwhile"):
        clause = action(rng, inner, choose_person(rng, pronouns=False), lasting=content == "meanwhile")
    else:
        while not (again := pronoun_for(subject)):
            subject = choose_person(rng)
        subject, same = (again, subject) if first else (subject, again)
        clause = make_copular_clause(rng, inner, same) if content == "state" else action(rng, inner, same)
    dependent = realize(clause, "final", unit(conjunction, english))
    negated = outer != "habit" and rng.random() < 0.15
    main = action(rng, outer, subject, negated, timed=0.0 if first or outer == "habit" else 0.3)
    if first:
        return realize(main, front=dependent + unit(",", ",")), "."
    return realize(main, last=COMMA + dependent), "."


def relative_clause(rng: random.Random, noun: Nominal) -> Phrase:
    """Generate a relative clause with its German commas, in which the noun is the subject or the object."""
    english = "who" if noun.kind in lexicon.PEOPLE else "which"
    tense = rng.choice(("now", "now", "past", "past", "modal"))
    doing, taking = verbs_with(tense, noun.kind), verbs_with(tense, "adult", noun.kind)
    if doing and (not taking or rng.random() < 0.6):
        pronoun = unit(lexicon.article("der", "nom", noun.slot), english)
        subject = Nominal(pronoun, noun.kind, noun.who, noun.slot)
        if english == "who" and tense != "modal" and rng.random() < 0.15:
            clause = make_copular_clause(rng, tense, subject)
        else:
            clause = make_clause(rng, tense, subject, timed=0.3)
        return COMMA + realize(clause, "final") + COMMA
    verb = rng.choice(taking)
    german = lexicon.article("der", verb.objects[0], noun.slot)
    front = unit("denen" if german == "den" and verb.objects == ["dat"] else german, english)
    # "die Frau, die das Kind sieht" has two readings, so here the subject must be a pronoun that cannot be an object.
    ambiguous = noun.kind in lexicon.PEOPLE + lexicon.ANIMALS
    subject = nominal(rng, verb.subjects, "nom", definite=True)
    while ambiguous and not (subject.pronoun and subject.phrase.german[0].text != "sie"):
        subject = nominal(rng, verb.subjects, "nom", definite=True)
    clause = replace(make_clause(rng, tense, subject, timed=0.2, verb=verb), objects={})
    return COMMA + realize(clause, "final", front) + COMMA


def relative(rng: random.Random) -> tuple[Phrase, str]:
    """Generate a sentence with a relative clause that modifies the subject or a final object."""
    while True:
        tense = rng.choice(("now", "past", "modal"))
        if tense != "modal" and rng.random() < 0.25:
            kinds = rng.choice((lexicon.PEOPLE, lexicon.THINGS))
            clause = make_copular_clause(rng, tense, nominal(rng, kinds, "nom", definite=True))
        else:
            clause = make_clause(rng, tense, negated=rng.random() < 0.1, timed=0.4)
        hosts = {"nom": clause.subject}
        if len(clause.objects) == 1 and not (clause.place + clause.complement).german:
            hosts |= clause.objects
        cases = [case for case, host in hosts.items() if host.article in ("der", "ein", "kein", "zwei", "drei", "viel")]
        if cases:
            break
    case = rng.choice(cases)
    front = NOTHING
    if clause.time.german and (case != "nom" or rng.random() < 0.4):  # "..., who laughed yesterday" has one reading
        front, clause = clause.time, replace(clause, time=NOTHING)
    modifier = relative_clause(rng, hosts[case])
    if case != "nom":
        return realize(clause, front=front, last=modifier), "."
    subject = replace(clause.subject, phrase=clause.subject.phrase + modifier)
    return realize(replace(clause, subject=subject), front=front), "."


def make_pair(phrase: Phrase, mark: str) -> Pair:
    """Convert a phrase to text and links: capitalize, add final punctuation, drop commas before other punctuation."""
    phrase += unit(mark, mark)
    following = [token.text for token in phrase.german[1:]] + [""]
    german = [t for t, after in zip(phrase.german, following, strict=True) if t.unit or after not in (",", ".", "?")]
    counterparts: dict[object, list[tuple[int, bool]]] = {}
    for j, word in enumerate(phrase.english):
        counterparts.setdefault(word.unit, []).append((j, word.head))
    counterparts.pop(None, None)
    links = [(i, j, w.head and head) for i, w in enumerate(german) for j, head in counterparts.get(w.unit, ())]
    texts = (" ".join(token.text for token in side) for side in (german, phrase.english))
    source, target = (text[0].upper() + text[1:] for text in texts)
    sure = tuple((i, j) for i, j, is_sure in links if is_sure)
    possible = tuple((i, j) for i, j, is_sure in links if not is_sure)
    return Pair(source, target, sure, possible)


def is_sensible(pair: Pair) -> bool:
    """Return whether a pair is short enough and repeats no content word ("The clever singer is clever .")."""
    words = pair.english.split()
    content = [lexicon.LEMMAS[word] for word in words if word in lexicon.LEMMAS]
    return max(len(words), len(pair.german.split())) <= 24 and len(set(content)) == len(content)
