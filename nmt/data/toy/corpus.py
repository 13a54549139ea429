"""The built-in bilingual corpus: a small German-English grammar that knows its own word alignments.

The two sides differ as the languages do: the German verb stands second or last, prefixes and participles leave it for
the end, articles and adjectives are inflected, nouns are compounds; English has its progressive, its "do" and its fixed
order. Still each German sentence has exactly one English translation and the other way round, so a perfect model
reaches BLEU 100 in either direction. German present and perfect are English present and simple past; what is fronted in
one language is fronted in the other; "you" is always "du", and no pronoun occurs where its form would be ambiguous.

Gold links join the words of a translation unit. The link between the two heads is sure, all others are possible:

- *im = in the*: im-in is sure, im-the possible; *Haustür = front door*: Haustür-door is sure, Haustür-front possible;
  *vor = in front of*: vor-front is sure, vor-in and vor-of possible; so too *neben = next to*, *nach Hause = home*;
- *steht ... auf = gets up*, *hat ... gelesen = read*, *liest = is reading*, *muss = has to*, *möchte = would like to*:
  heads are the words with the meaning (steht, gets; gelesen, read; liest, reading; muss, has; möchte, like), so that
  links of a prefix, a particle or an auxiliary are possible;
- *kein Buch = not ... a book*: kein-not is sure, kein-a possible; *kann nicht = cannot*: nicht-cannot is possible;
- "to" of an indirect object and "a" before a profession have no German word: they are possible links of the first word
  of that object (dem Kind = to the child) and of the profession (Lehrerin = a teacher);
- "do", "does" and "did" beside another verb are linked to nothing, nor are German commas that English does without.
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
    anaphor,
    clause_of,
    copular,
    nominal,
    realise,
    unit,
    verbs_with,
)

SPLITS = {"train": 20_000, "valid": 1_000, "test": 1_000}


@dataclass(frozen=True, slots=True)
class Pair:
    """A sentence in both languages; links are (German word, English word), from 0, over `text.split()`."""

    german: str
    english: str
    sure: tuple[tuple[int, int], ...]
    possible: tuple[tuple[int, int], ...]
    tags: frozenset[str]


def generate(seed: int, sizes: dict[str, int] = SPLITS) -> dict[str, list[Pair]]:
    """Splits of the sizes asked for: a function of the seed, with no sentence twice, on either side, in any of them."""
    rng = random.Random(seed)
    seen: set[str] = set()
    splits: dict[str, list[Pair]] = {}
    for name, size in sizes.items():
        splits[name] = []
        while len(splits[name]) < size:
            kind = rng.choices((statement, question, subordinate, relative), (36, 19, 27, 18))[0]
            pair = finish(*kind(rng))
            if sensible(pair) and pair.german not in seen and pair.english not in seen:
                seen |= {pair.german, pair.english}
                splits[name].append(pair)
    return splits


def somebody(rng: random.Random, pronouns: bool = True) -> Nominal:
    """A person to be the subject."""
    while (found := nominal(rng, lexicon.PEOPLE, "nom", definite=True)).pronoun and not pronouns:
        pass
    return found


def action(
    rng: random.Random, tense: str, subject: Nominal, negated: bool = False, timed: float = 0.0, lasting: bool = False
) -> Clause:
    """A clause that can have a cause, a condition or a time: no state; `lasting`: nor what is over in a moment."""
    verbs = [verb for verb in verbs_with(tense, subject.kind) if verb.aspect != "state"]
    if lasting:
        verbs = [verb for verb in verbs if verb.aspect == "action" and verb.auxiliary == "haben"]
    return clause_of(rng, tense, subject, negated, timed=timed, verb=rng.choice(verbs))


def statement(rng: random.Random) -> tuple[Phrase, str]:
    tense = rng.choices(("now", "habit", "past", "modal"), (30, 14, 32, 24))[0]
    if tense in ("now", "past") and rng.random() < 0.2:
        kinds = rng.choice((lexicon.PEOPLE, lexicon.THINGS))
        return realise(copular(rng, tense, nominal(rng, kinds, "nom", definite=True), job=True)), "."
    clause = clause_of(rng, tense, negated=tense != "habit" and rng.random() < 0.16, timed=0.6)
    chance = rng.random()
    if chance < 0.55 and clause.time.german:
        return realise(replace(clause, time=NOTHING), front=clause.time.tagged("fronting")), "."
    if chance < 0.4 and clause.place.german and clause.verb.aspect == "action" and not clause.negated:
        return realise(replace(clause, place=NOTHING), front=clause.place.tagged("fronting")), "."
    return realise(clause), "."


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
        clause = clause_of(rng, tense, who, negated, definite=True, timed=0.0 if word == "wann" else 0.35)
        if not word and tense in ("now", "past") and rng.random() < 0.12:
            clause = copular(rng, tense, clause.subject)
        if clause.subject.who[0] == "1" and tense != "modal":  # we know what we do ourselves
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
        phrase = realise(clause) if word == "wer" else realise(clause, "question", front)
        return phrase.tagged("question"), "?"


# English; tense of the main and of the dependent clause, and what the latter tells: the state that the same person is
# in, the weather, what the same person does (clause) or what somebody else does (other, or for a while: meanwhile).
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
    """Somebody says that, or asks whether."""
    conjunction = rng.choice(list(lexicon.REPORTS))
    verb = rng.choice(lexicon.REPORTS[conjunction])
    past = bool(verb.participle) and rng.random() < 0.4
    german, english = conjunction.split(":")
    tense = "past" if past else rng.choice(("now", "past", "modal"))
    inner = realise(clause_of(rng, tense, definite=True, timed=0.2), "final", unit(german, english))
    asking = verb.english in ("know", "believe") and not past and rng.random() < 0.4
    while (subject := somebody(rng)).who[0] == "1" and asking:
        pass
    negated = verb.english == "know" and german == "ob" and not asking
    outer = Clause(subject, verb, "past" if past else "now", negated=negated)
    phrase = realise(outer, "question" if asking else "main", last=COMMA + inner).tagged("question", asking)
    return phrase.tagged("subordinate"), "?" if asking else "."


def subordinate(rng: random.Random) -> tuple[Phrase, str]:
    if rng.random() < 0.3:
        return reported(rng)
    conjunction = rng.choice(list(CONJUNCTIONS))
    english, kinds = CONJUNCTIONS[conjunction]
    outer, inner, content = rng.choice(kinds.split(", ")).split()
    first = rng.random() < 0.4
    subject = somebody(rng)
    if content == "weather":
        it = Nominal(unit("es", "it"), "weather", slot="n")
        clause = Clause(it, rng.choice(lexicon.WEATHER), inner)
    elif content in ("other", "meanwhile"):
        clause = action(rng, inner, somebody(rng, pronouns=False), lasting=content == "meanwhile")
    else:
        while not (again := anaphor(subject)):
            subject = somebody(rng)
        subject, same = (again, subject) if first else (subject, again)
        clause = copular(rng, inner, same) if content == "state" else action(rng, inner, same)
    dependent = realise(clause, "final", unit(conjunction, english)).tagged("subordinate")
    negated = outer != "habit" and rng.random() < 0.15
    main = action(rng, outer, subject, negated, timed=0.0 if first or outer == "habit" else 0.3)
    if first:
        return realise(main, front=dependent + unit(",", ",")), "."
    return realise(main, last=COMMA + dependent), "."


def relative_clause(rng: random.Random, noun: Nominal) -> Phrase:
    """The clause between its German commas, with the noun as its subject or its object."""
    english = "who" if noun.kind in lexicon.PEOPLE else "which"
    tense = rng.choice(("now", "now", "past", "past", "modal"))
    doing, taking = verbs_with(tense, noun.kind), verbs_with(tense, "adult", noun.kind)
    if doing and (not taking or rng.random() < 0.6):
        pronoun = unit(lexicon.article("der", "nom", noun.slot), english)
        subject = Nominal(pronoun, noun.kind, noun.who, noun.slot)
        if english == "who" and tense != "modal" and rng.random() < 0.15:
            clause = copular(rng, tense, subject)
        else:
            clause = clause_of(rng, tense, subject, timed=0.3)
        return (COMMA + realise(clause, "final") + COMMA).tagged("relative")
    verb = rng.choice(taking)
    german = lexicon.article("der", verb.objects[0], noun.slot)
    front = unit("denen" if german == "den" and verb.objects == ["dat"] else german, english)
    # "die Frau, die das Kind sieht" has two readings: who may see or be seen needs a subject that can be nothing else.
    ambiguous = noun.kind in lexicon.PEOPLE + lexicon.ANIMALS
    subject = nominal(rng, verb.subjects, "nom", definite=True)
    while ambiguous and not (subject.pronoun and subject.phrase.german[0].text != "sie"):
        subject = nominal(rng, verb.subjects, "nom", definite=True)
    clause = replace(clause_of(rng, tense, subject, timed=0.2, verb=verb), objects={})
    return (COMMA + realise(clause, "final", front) + COMMA).tagged("relative")


def relative(rng: random.Random) -> tuple[Phrase, str]:
    """A sentence with a relative clause at its subject, or at an object that it ends with."""
    while True:
        tense = rng.choice(("now", "past", "modal"))
        if tense != "modal" and rng.random() < 0.25:
            kinds = rng.choice((lexicon.PEOPLE, lexicon.THINGS))
            clause = copular(rng, tense, nominal(rng, kinds, "nom", definite=True))
        else:
            clause = clause_of(rng, tense, negated=rng.random() < 0.1, timed=0.4)
        hosts = {"nom": clause.subject}
        if len(clause.objects) == 1 and not (clause.place + clause.complement).german:
            hosts |= clause.objects
        cases = [case for case, host in hosts.items() if host.article in ("der", "ein", "kein", "zwei", "drei", "viel")]
        if cases:
            break
    case = rng.choice(cases)
    front = NOTHING
    if clause.time.german and (case != "nom" or rng.random() < 0.4):  # "..., who laughed yesterday" has one reading
        front, clause = clause.time.tagged("fronting"), replace(clause, time=NOTHING)
    modifier = relative_clause(rng, hosts[case])
    if case != "nom":
        return realise(clause, front=front, last=modifier), "."
    subject = replace(clause.subject, phrase=clause.subject.phrase + modifier)
    return realise(replace(clause, subject=subject), front=front), "."


def finish(phrase: Phrase, mark: str) -> Pair:
    """The sentence as text and links, with a capital, its full stop, and no comma before another mark."""
    phrase += unit(mark, mark)
    following = [token.text for token in phrase.german[1:]] + [""]
    german = [t for t, after in zip(phrase.german, following, strict=True) if t.unit or after not in (",", ".", "?")]
    counterparts: dict[object, list[tuple[int, bool]]] = {}
    for j, word in enumerate(phrase.english):
        counterparts.setdefault(word.unit, []).append((j, word.head))
    counterparts.pop(None, None)
    linked = [(i, j, w.head and head) for i, w in enumerate(german) for j, head in counterparts.get(w.unit, ())]
    texts = (" ".join(token.text for token in side) for side in (german, phrase.english))
    source, target = (text[0].upper() + text[1:] for text in texts)
    sure, possible = (tuple((i, j) for i, j, heads in linked if heads == wanted) for wanted in (True, False))
    return Pair(source, target, sure, possible, phrase.tags)


def sensible(pair: Pair) -> bool:
    """Not too long, and without a content word twice ("The clever singer is clever .")."""
    words = pair.english.split()
    content = [lexicon.LEMMAS[word] for word in words if word in lexicon.LEMMAS]
    return max(len(words), len(pair.german.split())) <= 24 and len(set(content)) == len(content)
