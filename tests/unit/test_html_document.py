"""HTML documents: what is translated, and where tags go, given how words of both sides belong together."""

import random
import re
from collections import Counter
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmt.data.html_document import Block, parse_document, restore_block
from nmt.data.words import find_spans
from nmt.decoding.html_translation import find_words, list_texts, restore
from nmt.decoding.translation import Translation


def only_block(document: str) -> Block:
    [block] = [part for part in parse_document(document) if isinstance(part, Block)]
    return block


def translate(document: str, target: str, links: str) -> str:
    """Translate a document with one block, given links in Pharaoh format between words and punctuation marks."""
    block = only_block(document)
    source_words, target_words = find_words(block.text, block.places), find_words(target)
    shares_TS = np.zeros((len(target_words), len(source_words)))
    for link in links.split():
        source, target_index = map(int, link.split("-"))
        shares_TS[target_index, source] = 1
    new = restore_block(block, source_words, target, target_words, shares_TS)
    return "".join(part if isinstance(part, str) else new for part in parse_document(document))


def translate_at_random(document: str, rng: random.Random) -> str:
    """Translate into random words that belong to random words."""
    parts = []
    for part in parse_document(document):
        if isinstance(part, Block):
            source = find_words(part.text, part.places)
            words = rng.choices(["foo", "<b", "&amp;", "ü", "中", "</a>"], k=rng.randint(0, len(source) + 3))
            target = " ".join(words)
            shares_TS = np.random.default_rng(rng.randrange(1000)).random((len(words), len(source))) ** 4
            part = restore_block(part, source, target, find_spans(target, words), shares_TS)
        parts.append(part)
    return "".join(parts)


# ---------------------------------------------------------------------------------------------------------- placement
PLACED = {
    "reordered": ("Ich <b>sah</b> <i>ihn</i> gestern", "Yesterday I saw him", "0-1 1-2 2-3 3-0")
    + ("Yesterday I <b>saw</b> <i>him</i>",),
    "no space at the ends": ("<p>\n <b>Hund</b>.\t</p>", "dog.", "0-0 1-1", "<p>\n <b>dog</b>.\t</p>"),
    "words in a row": ("x <b>hat gesehen</b>", "has it seen x", "0-3 1-0 2-2", "<b>has it seen</b> x"),
    "nested": ('<a href="?x&amp;y">ein <b>Hund</b></a> da', "there one dog", "0-1 1-2 2-0")
    + ('there <a href="?x&amp;y">one <b>dog</b></a>',),
    "a stray word": ("<b>a b c</b> <i>d e</i>", "A B D E C", "0-0 1-1 2-4 3-2 4-3", "<b>A B</b> <i>D E</i> C"),
    "nothing linked": ("a <b>b</b> <i>c</i>", "X Y", "", "X <b></b><i></i>Y"),
    "no translation": ("a <b>b <i>c</i></b>", "", "", "<b><i></i></b>"),
    "images": ('a <img src="x"> b <input>c', "A B C", "0-0 1-1 2-2", 'A <img src="x"> B <input>C'),
    "code": ("Starte <code>a &amp; b</code> jetzt", "Now start a & b", "0-1 1-2 2-3 3-4 4-0")
    + ("Now start <code>a &amp; b</code>",),
    "code between words": ("<kbd>x</kbd> und y", "y and the x too", "0-3 1-1 2-0", "y and the <kbd>x</kbd> too"),
    "formula": ("H<sub>2</sub>O ist", "is H2O", "0-1 1-2 2-3 3-0", "is H<sub>2</sub>O"),
    "note": ("Wort<sup><a>[1]</a></sup>, da", "there word,", "0-1 1-2 2-0", "there word<sup><a>[1]</a></sup>,"),
    "entities": ("a &lt; <b>&auml;</b>&nbsp;b", "ö > b & c\u00a0d", "2-0", "<b>ö</b> &gt; b &amp; c\u00a0d"),
    "into Arabic": ("I love <i>cats</i><b>!</b>", "أحب القطط!", "1-0 2-1 3-2", "أحب <i>القطط</i><b>!</b>"),
    "Chinese": ("我<b>爱</b>你。", "I love you.", "0-0 1-1 2-2 3-3", "I <b>love</b> you."),
    "element across blocks": ("<a>x <div>1</div></a>", "X", "0-0", "<a>X <div>1</div></a>"),
    "bare signs": ("a < b & c <3", "A < B & C <3", "", "A &lt; B &amp; C &lt;3"),
}


@pytest.mark.parametrize("case", PLACED)
def test_tags_go_around_the_words_that_belong_to_them(case: str) -> None:
    source, target, links, expected = PLACED[case]
    assert translate(source, target, links) == expected


BLOCKS = {
    "<html lang=de><title>A &amp; B</title><p>Ein <b>Hund</b>,\n\t eine&nbsp;Katze": ["A & B", "Ein Hund, eine Katze"],
    "<ul><li>a<li>b</ul><td>c</td><x-y>d</x-y>": ["a", "b", "c", "d"],
    "1 &lt; 2<p>– | –<p>&nbsp;<p>&#8212;": [],
    "<!DOCTYPE html><!-- a --><?xml a='1'?><![CDATA[ a > b ]]><script>a</b>'<p>'</script><style>a</style>b": ["b"],
    "<textarea>a</textarea><pre>b <i>c</i></pre><svg><text>d</text></svg><math>e</math>": [],
    "a <svg><text>b</text></svg> c<math>d</math>e": ["a c e"],
    '<p translate="no">a <b>b</b></p><p class="x notranslate y">c</p><p translate=yes class=notranslated>d': ["d"],
    "<div translate='no'>a<div>b</div>c</div>d": ["d"],
    "<div title=' translate=no'>a</div><div title='translate=\"no\"'>b</div>": ["a", "b"],
    "a <code>b</code> <span translate=no>c <i>d</i></span> e": ["a b c d e"],
    f"a <code>{'b ' * 101}</code> c": ["a c"],
    "a.<br>b<br>c<br><br>d: <br/>e": ["a.", "b c", "d:", "e"],
    "a. b<br>c <b>&quot;d.&quot;</b>\n<br>e": ['a. b c "d."', "e"],
    "a<wbr>b<span></span>c<img>d&shy;e": ["abc de"],
    "<A HREF='>'>b</A><b/>c": ["bc"],
    '<a href="x"">b</a> c<p class="k">d</p>': ["b c", "d"],
    "<a href=x title=it's>b</a> c<p>don't": ["b c", "don't"],
    "<style-guide>a</style-guide><!--><p>b": ["a", "b"],
    "wrongly <b>a <i>b</b> c</i> d": ["wrongly", "a", "b", "c", "d"],
}


@pytest.mark.parametrize("document", BLOCKS, ids=lambda document: document[:40])
def test_blocks_are_the_text_between_block_tags(document: str) -> None:
    assert list_texts(parse_document(document)) == BLOCKS[document]


# --------------------------------------------------------------------------------------------------------- properties
class Tags(HTMLParser):
    """Reads a document: its tags with attributes, each with those around it."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.around: list[str] = []
        self.tags: Counter[tuple[str, ...]] = Counter()
        self.feed(document)
        self.close()
        assert not self.around, "an element has no end"

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.around.append(f"{tag} {attributes}")
        self.tags[tuple(self.around)] += 1
        if tag in ("br", "img"):
            self.around.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.around.pop().split()[0] == tag, "elements overlap"

    def handle_comment(self, data: str) -> None:
        self.tags[*self.around, data] += 1


def generate(rng: random.Random, depth: int = 0) -> str:
    """Return random well-formed mark-up: blocks, inline elements in them and around them, text."""
    parts = []
    for _ in range(rng.randint(0, 4)):
        kind = rng.random()
        attributes = f' id="{rng.randrange(10**6)}" title="&lt;&amp;>"'
        if kind < 0.5 or depth > 6:
            parts.append(rng.choice(["Hund ", " und", "a", "  ", "\n", "&nbsp;", "3 &lt; 4 ", "Haus. ", "中", "<3 "]))
        elif kind < 0.6:
            parts.append(rng.choice([f"<br{attributes}>", f"<img{attributes}>", f"<!-- {attributes} -->"]))
        else:
            tag = rng.choice(["a", "b", "i", "em", "span", "code", "sub", "div", "ul", "x-y"])
            parts.append(f"<{tag}{attributes}>{generate(rng, depth + 1)}</{tag}>")
    return "".join(parts)


@pytest.mark.parametrize("seed", range(2))
def test_well_formed_documents_stay_so_and_keep_their_tags(seed: int) -> None:
    """In 500 documents, whatever the words are."""
    for number in range(250):
        rng = random.Random(1000 * seed + number)
        document = f"<body>{generate(rng)}</body>"
        assert Tags(translate_at_random(document, rng)).tags == Tags(document).tags, document


FRAGMENTS = (
    "<b> </b> <i> </i> <p> </p> < <3 </ <!-- --> <script> </script> & &amp <a|href=' '> \"> \" > Hund x \0 = ' "
    "<![CDATA[ ]]> <? ?> <code> </code> <div|translate=no> </div> <li> <br/> | \n"
)


@given(st.lists(st.sampled_from(FRAGMENTS.split(" ")), max_size=30))
def test_nothing_of_a_damaged_document_is_lost(fragments: list[str]) -> None:
    """Where a translation is the text itself."""
    document = "".join(fragments).replace("|", " ")
    out = []
    for part in parse_document(document):
        if isinstance(part, Block):
            words = find_words(part.text, part.places)
            part = restore_block(part, words, part.text, words, np.eye(len(words)))
        out.append(part)
    before, after = ("".join(unescape(text).split()) for text in (document, "".join(out)))
    assert before == after


def test_deep_nesting_is_kept() -> None:
    document = "x <b>y" + "<i>" * 10_000 + "z" + "</i>" * 10_000 + "</b>"
    translated = translate_at_random(document, random.Random(1))
    assert re.findall("<.*?>", re.sub("&.*?;", "", translated)) == re.findall("<.*?>", document)


# -------------------------------------------------------------------------------------------------------------- links
@given(st.permutations(range(6)), st.integers(0, 10**6))
def test_tags_follow_a_permutation_behind_noise(order: list[int], seed: int) -> None:
    """Also where one word, here the last one, draws attention from all others."""
    sources, targets = [[f"{letter}a" for letter in letters] for letters in ("uvwxyz", "UVWXYZ")]
    targets = [targets[s].lower() + "e" for s in order]
    document = " ".join(f"<b id={word}>{word}</b>" for word in sources)
    weights_TS = 0.1 * np.random.default_rng(seed).random((6, 7)) + np.pad(np.eye(6)[order], ((0, 0), (0, 1)))
    weights_TS[:, 5] += 1
    block = only_block(document)
    pieces = ["▁" + word for word in sources] + ["</s>"], ["▁" + word for word in targets]
    translated = restore(block, Translation(" ".join(targets), *pieces, weights_TS=weights_TS))
    assert translated == " ".join(f"<b id={sources[s]}>{targets[t]}</b>" for t, s in enumerate(order))


def test_the_same_number_or_name_belongs_to_itself() -> None:
    block = only_block("<p><b>Tom</b> wiegt 80 <i>kg</i>, <u>Eva</u> 60")
    pieces = ["▁" + word for word in block.text.split()], ["▁60", "▁80", "▁Eva", "▁Tom"]
    translation = Translation("60 80 Eva Tom", *pieces, weights_TS=np.ones((4, 6)))
    assert re.search("<u>Eva</u> <b>Tom</b>", restore(block, translation))


def test_without_weights_words_belong_by_their_places() -> None:
    block = only_block("<p>a <b>b</b> c")
    assert restore(block, Translation("d e f g h i")) == "d e <b>f g</b> h i"
    assert restore(block, Translation("")) == "<b></b>"
