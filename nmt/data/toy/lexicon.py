"""The words of the built-in corpus: plain tables, followed by the code that parses and inflects them.

Every entry has a single translation in both directions; to keep it so, do not add synonyms. An underscore stands for a
space. Semantic classes restrict which nouns, verbs and adjectives go together, so that sentences make sense.
"""

from dataclasses import dataclass

GROUPS = {
    "person": "adult child kin",
    "animal": "pet cattle",
    "object": "fruit cake dish bread drink text clothes thing device door vehicle furniture landmark home town animal",
}

# German, gender (m f n; mw: masculine, all forms but the nominative singular equal the plural), plural (- for none),
# English, English plural if irregular.
NOUN_TABLES = {
    "adult": """Mann m Männer man men, Frau f Frauen woman women, Lehrerin f Lehrerinnen teacher, Arzt m Ärzte doctor,
        Student mw Studenten student, Nachbar mw Nachbarn neighbour, Sängerin f Sängerinnen singer,
        Koch m Köche chef, Polizist mw Polizisten policeman policemen, Künstlerin f Künstlerinnen artist,
        Krankenschwester f Krankenschwestern nurse, Gärtner m Gärtner gardener, Busfahrer m Busfahrer bus_driver""",
    "child": "Kind n Kinder child children, Junge mw Jungen boy, Mädchen n Mädchen girl",
    "kin": """Bruder m Brüder brother, Schwester f Schwestern sister, Mutter f - mother, Vater m - father,
        Tante f Tanten aunt, Großmutter f - grandmother, Sohn m Söhne son, Tochter f Töchter daughter,
        Freund m Freunde friend""",
    "pet": "Hund m Hunde dog, Katze f Katzen cat, Vogel m Vögel bird",
    "cattle": "Pferd n Pferde horse, Kuh f Kühe cow",
    "fruit": "Apfel m Äpfel apple, Ei n Eier egg, Tomate f Tomaten tomato tomatoes",
    "cake": "Kuchen m Kuchen cake, Apfelkuchen m Apfelkuchen apple_pie",
    "dish": "Tomatensuppe f - tomato_soup, Kartoffelsalat m - potato_salad",
    "bread": "Brot n - bread, Käse m - cheese, Reis m - rice",
    "drink": "Wasser n - water, Milch f - milk, Kaffee m - coffee, Orangensaft m - orange_juice",
    "text": """Buch n Bücher book, Brief m Briefe letter, Gedicht n Gedichte poem,
        Zeitungsartikel m Zeitungsartikel newspaper_article, Liebesbrief m Liebesbriefe love_letter""",
    "paper": "Zeitung f Zeitungen newspaper, Postkarte f Postkarten postcard",
    "clothes": """Mantel m Mäntel coat, Hemd n Hemden shirt, Hut m Hüte hat, Jacke f Jacken jacket,
        Wintermantel m Wintermäntel winter_coat""",
    "thing": """Schlüssel m Schlüssel key, Tasche f Taschen bag, Koffer m Koffer suitcase, Ball m Bälle ball,
        Regenschirm m Regenschirme umbrella, Autoschlüssel m Autoschlüssel car_key, Geschenk n Geschenke present,
        Kaffeetasse f Kaffeetassen coffee_cup""",
    "device": "Lampe f Lampen lamp, Fernseher m Fernseher television, Waschmaschine f Waschmaschinen washing_machine",
    "door": """Tür f Türen door, Fenster n Fenster window, Haustür f Haustüren front_door,
        Gartentor n Gartentore garden_gate""",
    "vehicle": "Auto n Autos car, Fahrrad n Fahrräder bicycle, Boot n Boote boat",
    "furniture": """Tisch m Tische table, Stuhl m Stühle chair, Sofa n Sofas sofa, Bett n Betten bed,
        Küchentisch m Küchentische kitchen_table""",
    "landmark": """Haus n Häuser house, Kirche f Kirchen church, Rathaus n Rathäuser town_hall,
        Brücke f Brücken bridge, Bushaltestelle f Bushaltestellen bus_stop""",
}

# As above, then the prepositions for location and direction, German:English.
PLACE_TABLES = {
    "home": """Garten m - garden in:in in:into, Küche f - kitchen in:in in:into, Keller m - cellar in:in in:into,
        Wohnzimmer n - living_room in:in in:into""",
    "shop": """Supermarkt m - supermarket in:at in:to, Markt m - market auf:at auf:to, Bäckerei f - bakery in:in zu:to,
        Fahrradladen m - bicycle_shop in:in in:to""",
    "town": """Park m - park in:in in:to, Bibliothek f - library in:in in:to, Bahnhof m - station an:at zu:to,
        Kino n - cinema in:at in:to, Strand m - beach an:on zu:to, Schule f - school in:at zu:to,
        Flughafen m - airport an:at zu:to, Spielplatz m - playground auf:in zu:to""",
}
# Where something is put or found: classes of nouns; German preposition, English preposition, index of its head.
POSITION_TABLES = {
    "furniture": ("furniture", "auf on 0, unter under 0, neben next_to 0"),
    "outside": ("landmark", "vor in_front_of 1, hinter behind 0, neben next_to 0"),
    "nearby": ("landmark town", "bei near 0, neben next_to 0"),
}

NAME_TABLE = "Anna f, Maria f, Lena f, Sophie f, Peter m, Paul m, Felix m, Thomas m"

# Person and number, gender, German nominative, accusative, dative (- where the form would be ambiguous), English.
PRONOUN_TABLE = """1s - ich mich mir I me, 2s - du dich dir you you, 3s m er ihn ihm he him, 3s f sie - ihr she her,
    1p - wir uns uns we us, 3p - sie - ihnen they them"""

# Frames and their verbs. Left of the colon: classes of the subject, and the aspect in [brackets]: action ("is reading",
# the default), sense ("sees"), state ("knows": no time, no modal) or event ("found": only past or habitual). Right: the
# complements by case (acc, dat), place (at: optional, in: required), goal (to), source (from) or preposition:English,
# each with its classes.
# A verb: prefix|infinitive, third person, participle (ist+ if the perfect is formed with sein), English, past, and the
# -ing form if irregular.
VERB_TABLES = {
    "person: at home town": """lachen lacht gelacht laugh laughed, tanzen tanzt getanzt dance danced,
        singen singt gesungen sing sang""",
    "adult kin: at hause home shop town": "arbeiten arbeitet gearbeitet work worked",
    "person: at shop": "ein|kaufen kauft eingekauft shop shopped shopping",
    "person pet: at hause home": "schlafen schläft geschlafen sleep slept",
    "child pet: at home town": "spielen spielt gespielt play played",
    "person:": "auf|stehen steht ist+aufgestanden get_up got getting, weg|gehen geht ist+weggegangen leave left",
    "person [event]:": """auf|wachen wacht ist+aufgewacht wake_up woke, an|kommen kommt ist+angekommen arrive arrived,
        ein|schlafen schläft ist+eingeschlafen fall_asleep fell""",
    "person: to hause home shop town": "gehen geht ist+gegangen go went",
    "adult kin: to hause shop town": "fahren fährt ist+gefahren drive drove",
    "person: from shop town": "zurück|kommen kommt ist+zurückgekommen come_back came",
    "person: in hause home town": "bleiben bleibt ist+geblieben stay stayed",
    "person [state]: in nearby": "wohnen wohnt gewohnt live lived",
    "person: in home town outside nearby": "sitzen sitzt gesessen sit sat sitting, stehen steht gestanden stand stood",
    "pet: in furniture outside": "sitzen sitzt gesessen sit sat sitting",
    "cattle: in outside": "stehen steht gestanden stand stood",
    "pet thing: in furniture": "liegen liegt gelegen lie lay lying",
    "person: auf:for person": "warten wartet gewartet wait waited",
    "person: mit:to person": "sprechen spricht gesprochen talk talked",
    "person: acc text paper; at home town": "lesen liest gelesen read read",
    "adult kin: acc text": "schreiben schreibt geschrieben write wrote",
    "person: acc fruit cake dish bread; at home": "essen isst gegessen eat ate",
    "person: acc drink; at home": "trinken trinkt getrunken drink drank",
    "adult kin: acc cake dish bread drink": "bestellen bestellt bestellt order ordered",
    "adult kin: acc fruit bread paper clothes thing vehicle furniture; at shop": "kaufen kauft gekauft buy bought",
    "adult kin: acc vehicle furniture device": "verkaufen verkauft verkauft sell sold",
    "person: acc person": """besuchen besucht besucht visit visited, an|rufen ruft angerufen call called,
        ein|laden lädt eingeladen invite invited, ab|holen holt abgeholt collect collected""",
    "person: acc person; at town": "treffen trifft getroffen meet met",
    "person: acc person thing animal": "suchen sucht gesucht look_for looked",
    "person [state]: acc person": "kennen kennt gekannt know knew",
    "person [state]: acc animal fruit dish bread drink text": "mögen mag gemocht like liked",
    "person [sense]: acc person animal": "sehen sieht gesehen see saw",
    "person [state]: acc thing clothes": "brauchen braucht gebraucht need needed",
    "person [event]: acc thing clothes": """finden findet gefunden find found, verlieren verliert verloren lose lost,
        vergessen vergisst vergessen forget forgot""",
    "adult kin: acc vehicle device door": "reparieren repariert repariert repair repaired",
    "person: acc vehicle clothes cattle": "waschen wäscht gewaschen wash washed",
    "person: acc door furniture vehicle": "putzen putzt geputzt clean cleaned",
    "adult kin: acc thing furniture": "tragen trägt getragen carry carried",
    "person: acc animal landmark town": "malen malt gemalt paint painted",
    "person: acc animal": "füttern füttert gefüttert feed fed",
    "pet: acc pet": "jagen jagt gejagt chase chased",
    "person: acc door": """zu|machen macht zugemacht close closed, auf|machen macht aufgemacht open opened,
        ab|schließen schließt abgeschlossen lock locked""",
    "person: acc device": "an|machen macht angemacht turn_on turned, aus|machen macht ausgemacht turn_off turned",
    "person: acc home": "auf|räumen räumt aufgeräumt tidy_up tidied",
    "person: acc clothes": """an|ziehen zieht angezogen put_on put putting,
        an|probieren probiert anprobiert try_on tried""",
    "person: acc text paper fruit": "weg|werfen wirft weggeworfen throw_away threw",
    "person: acc thing clothes; to furniture": "legen legt gelegt put put putting",
    "adult kin: acc person; to town": "bringen bringt gebracht take took",
    "person: dat person": """helfen hilft geholfen help helped, danken dankt gedankt thank thanked,
        folgen folgt ist+gefolgt follow followed, zu|hören hört zugehört listen_to listened""",
    "thing clothes vehicle [state]: dat person": "gehören gehört - belong_to belonged",
    "person: dat person; acc text paper thing": "geben gibt gegeben give gave, zeigen zeigt gezeigt show showed",
}

# Verbs that take a clause, by conjunction.
REPORT_TABLES = {
    "dass:that": """sagen sagt gesagt say said, glauben glaubt geglaubt believe believed,
        hoffen hofft gehofft hope hoped, wissen weiß - know knew""",
    "ob:whether": "fragen fragt gefragt ask asked, wissen weiß - know knew",
}
WEATHER_TABLE = "regnen regnet geregnet rain rained, schneien schneit geschneit snow snowed"
COPULA_TABLE = "sein ist - be was"

# Infinitive; first, second and third person singular; plural.
IRREGULAR_TABLE = """sein bin bist ist sind, haben habe hast hat haben, war war warst war waren,
    wissen weiß weißt weiß wissen, mögen mag magst mag mögen"""
# As above, then the English words before "not" (- for a verb that needs "do") and after it.
MODAL_TABLE = """können kann kannst kann können can -, müssen muss musst muss müssen - have_to,
    wollen will willst will wollen - want_to, dürfen darf darfst darf dürfen be allowed_to,
    sollen soll sollst soll sollen should -, werden werde wirst wird werden will -,
    möchten möchte möchtest möchte möchten would like_to"""

# Predicates of people: temporary states and professions.
STATE_TABLE = """müde tired, hungrig hungry, traurig sad, glücklich happy, krank ill, allein alone, nervös nervous,
    zufrieden satisfied"""
JOB_TABLE = "Lehrerin Arzt Student Sängerin Koch Polizist Künstlerin Krankenschwester Gärtner Busfahrer"
# Adjectives by class.
ADJECTIVE_TABLES = {
    "adult child": "freundlich friendly, klug clever, müde tired, glücklich happy, traurig sad, groß tall",
    "adult": "jung young, alt old, berühmt famous",
    "child": "klein small",
    "animal": "klein small, groß big, jung young, alt old, weiß white, schwarz black, hungrig hungry, schnell fast",
    "fruit cake dish bread": "frisch fresh, lecker delicious, billig cheap",
    "drink": "kalt cold, heiß hot",
    "text": "kurz short, lang long, interessant interesting",
    "paper thing": "neu new, alt old",
    "clothes": "rot red, blau blue, grün green, schwarz black, neu new, teuer expensive, warm warm",
    "thing": "klein small, schwarz black, rot red, teuer expensive, schwer heavy",
    "device vehicle": "neu new, alt old, teuer expensive, billig cheap, kaputt broken",
    "vehicle": "rot red, blau blue, schnell fast",
    "door": "alt old, neu new, weiß white, grün green, kaputt broken, schwer heavy",
    "furniture": "klein small, groß big, weiß white, schwer heavy",
    "landmark": "alt old, neu new, klein small, groß big, schön beautiful",
    "shop town": "klein small, groß big, schön beautiful, berühmt famous",
    "home": "klein small, groß big, warm warm, kalt cold",
}

# Time phrases by tense, aligned word by word.
TIME_TABLES = {
    "now": "heute = today, jetzt = now, heute Nachmittag = this afternoon",
    "habit": """jeden Tag = every day, jeden Morgen = every morning, jeden Abend = every evening,
        am Morgen = in_the morning""",
    "past": """gestern = yesterday, heute = today, letzte Woche = last week, gestern Abend = yesterday evening,
        am Wochenende = at_the weekend, am Montag = on Monday""",
    "modal": """heute = today, morgen = tomorrow, nächste Woche = next week, am Abend = in_the evening,
        am Wochenende = at_the weekend, am Freitag = on Friday""",
}
FREQUENCY_TABLE = "oft = often, immer = always, manchmal = sometimes, selten = rarely"

# Kinds of nouns: their locations; those without possessives ("mein Mann" is a husband, not a man); those without "a"
# and plural; those that may be plural without an article.
LOCATIONS_BY_KIND = {
    **dict.fromkeys(("adult", "child"), "home town outside nearby"),
    **dict.fromkeys(("thing", "text", "clothes"), "furniture"),
    **dict.fromkeys(("pet", "cattle", "vehicle"), "outside nearby"),
}
NO_POSSESSIVE_KINDS = {"adult", "child", "landmark", "shop", "town"}
MASS_NOUN_KINDS = {"bread", "drink"}
BARE_PLURAL_KINDS = {"fruit", "cake", "text", "paper", "clothes", "thing", "pet", "cattle"}

# Articles; endings ("-" for none) by case (nominative, accusative, dative) and gender or plural (m, f, n, p).
ARTICLES = {"der": "the", "ein": "a", "kein": "a", "jed": "every", "viel": "many", "zwei": "two", "drei": "three"}
ARTICLES |= {"dies": "this", "mein": "my", "dein": "your", "unser": "our"}
DER = "der die das die den die das die dem der dem den"
EIN = "- e - e en e - e em er em en"
STRONG = "er e es e en e es e em er em en"
WEAK = "e e e en en e e en en en en en"
MIXED = "er e es en en e es en en en en en"
CONTRACTED = {
    ("in", "dem"): "im",
    ("in", "das"): "ins",
    ("an", "dem"): "am",
    ("von", "dem"): "vom",
    ("zu", "dem"): "zum",
    ("zu", "der"): "zur",
    ("bei", "dem"): "beim",
}

# ------------------------------------------------------------------------------------------------ reading the tables


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


def parse_lines(table: str) -> list[str]:
    return [" ".join(entry) for entry in parse_entries(table)]


def expand_classes(text: str) -> tuple[str, ...]:
    return tuple(kind for word in text.split() for kind in GROUPS.get(word, word).split())


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


def parse_modal(row: list[str]) -> Modal:
    return Modal(row[0], row[5].strip("-"), () if row[6] == "-" else tuple(row[6].split("_")))


def select_ending(endings: str, case: str, slot: str) -> str:
    return endings.split()[("nom", "acc", "dat").index(case) * 4 + "mfnp".index(slot)].strip("-")


def article(name: str, case: str, slot: str) -> str:
    """Return the German article; slot is the gender, or p for plural."""
    if name in ("zwei", "drei"):
        return name
    if name == "der":
        return select_ending(DER, case, slot)
    return name + select_ending(STRONG if name in ("dies", "jed", "viel") else EIN, case, slot)


def adjective(word: str, name: str, case: str, slot: str) -> str:
    """Inflect a German adjective after the article `name`, which may be empty."""
    endings = MIXED if name in ("ein", "kein", "mein", "dein", "unser") else STRONG
    endings = WEAK if name in ("der", "dies", "jed") else endings
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


PEOPLE, ANIMALS, THINGS = expand_classes("person"), expand_classes("animal"), expand_classes(GROUPS["object"])
NOUNS = {k: [parse_noun(k, row) for row in parse_entries(table)] for k, table in (NOUN_TABLES | PLACE_TABLES).items()}
JOBS = [noun for noun in NOUNS["adult"] if noun.german in JOB_TABLE.split()]
ADJECTIVES = {
    kind: [
        row
        for kinds, table in ADJECTIVE_TABLES.items()
        if kind in expand_classes(kinds)
        for row in parse_entries(table)
    ]
    for kind in NOUNS
}
POSITIONS = {name: (kinds.split(), parse_entries(table)) for name, (kinds, table) in POSITION_TABLES.items()}
PERSON_NAMES = parse_entries(NAME_TABLE)
PRONOUNS = parse_entries(PRONOUN_TABLE)
STATES = parse_entries(STATE_TABLE)
VERBS = [parse_verb(frame, row) for frame, table in VERB_TABLES.items() for row in parse_entries(table)]
REPORTS = {
    key: [parse_verb("person [state]:", row) for row in parse_entries(table)] for key, table in REPORT_TABLES.items()
}
WEATHER = [parse_verb("weather:", row) for row in parse_entries(WEATHER_TABLE)]
COPULA = parse_verb("person:", COPULA_TABLE.split())
MODALS = [parse_modal(row) for row in parse_entries(MODAL_TABLE)]
FORMS = {row[0]: row[1:5] for row in parse_entries(IRREGULAR_TABLE) + parse_entries(MODAL_TABLE)}
TIMES = {tense: parse_lines(table) for tense, table in TIME_TABLES.items()}
FREQUENCY_ADVERBS = parse_lines(FREQUENCY_TABLE)
# English content words, in all their forms.
LEMMAS = {word: word for _, word in sum(ADJECTIVES.values(), STATES)} | {name: name for name, _ in PERSON_NAMES}
LEMMAS |= {word: verb.english for verb in VERBS for word in (verb.english, add_s(verb.english), verb.past, verb.ing)}
LEMMAS |= {
    word: lemma
    for noun in sum(NOUNS.values(), [])
    for form in (noun.english, noun.english_plural)
    for word, lemma in zip(form.split(), noun.english.split(), strict=True)
}
