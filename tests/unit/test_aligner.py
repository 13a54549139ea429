"""The statistical aligner against sums over all alignments, a slow lexicon, and gold links of the built-in corpus."""

import itertools
import tracemalloc
from collections import Counter

import numpy as np
import pytest

from nmt.aligner import aligner as aligner_module
from nmt.aligner import hmm
from nmt.aligner.aligner import MAX_CELLS, Aligner, align_sentences, index_corpus, train_aligner
from nmt.aligner.hmm import infer_independent_links, infer_links
from nmt.aligner.lexicon import BACKOFF, BASE_BACKOFF, IDENTICAL_LINKS, PREFIX_LENGTHS, normalize_word
from nmt.data.toy.corpus import generate
from nmt.data.word_links import GoldLinks, threshold_links
from nmt.errors import UserError
from nmt.evaluation.metrics import LinkCounts

SOURCE = np.array([3, 1, 2])  # lengths
TARGET = np.array([2, 3, 3])


def draw_emissions() -> tuple[np.ndarray, np.ndarray]:
    """Return emission_BTS, 0 at padding, and null_BT."""
    generator = np.random.default_rng(1)
    emission_BTS = generator.random((3, 3, 3)).astype(np.float32)
    for row, (source, target) in enumerate(zip(SOURCE, TARGET, strict=True)):
        emission_BTS[row, target:], emission_BTS[row, :, source:] = 0, 0
    return emission_BTS, generator.random((3, 3)).astype(np.float32)


def sum_over_alignments(
    emission_TS: np.ndarray, null_T: np.ndarray, jumps: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return links_TS and the expected jumps of a pair, by enumerating all alignments."""
    targets, sources = emission_TS.shape
    largest = hmm.MAX_JUMP + 1

    def jump_index(distance: int) -> int:
        return min(max(distance, -largest), largest) + largest

    def jump_probability(old: int, new: int) -> float:
        return jumps[jump_index(new - old)] / sum(jumps[jump_index(s - old)] for s in range(sources))

    links_TS, expected, total = np.zeros((targets, sources)), np.zeros(len(jumps)), 0.0
    # A hidden position before the first word is drawn as that of a first link, for words that NULL generates.
    for start in range(sources):
        for choices in itertools.product([None, *range(sources)], repeat=targets):
            if choices[0] is not None and choices[0] != start:
                continue
            probability, state, moves = jump_probability(-1, start), start, []
            for t, choice in enumerate(choices):
                if choice is None:
                    probability *= hmm.NULL_PROBABILITY * null_T[t]
                    continue
                probability *= (1 - hmm.NULL_PROBABILITY) * emission_TS[t, choice]
                probability *= jump_probability(state, choice) if t else 1
                moves.append(jump_index(choice - (state if t else -1)))
                state = choice
            total += probability
            for t, choice in enumerate(choices):
                if choice is not None:
                    links_TS[t, choice] += probability
            for move in moves:
                expected[move] += probability
    return links_TS / total, expected / total


def test_posteriors_match_sum_over_all_alignments() -> None:
    emission_BTS, null_BT = draw_emissions()
    jumps = np.random.default_rng(2).random(2 * hmm.MAX_JUMP + 3)
    posteriors = infer_links(emission_BTS, null_BT, jumps, SOURCE, TARGET)
    expected_jumps = np.zeros_like(jumps)
    for row, (source, target) in enumerate(zip(SOURCE, TARGET, strict=True)):
        links_TS, moves = sum_over_alignments(emission_BTS[row, :target, :source], null_BT[row, :target], jumps)
        np.testing.assert_allclose(posteriors.links_BTS[row, :target, :source], links_TS, atol=1e-6)
        assert not posteriors.links_BTS[row, target:].any() and not posteriors.links_BTS[row, :, source:].any()
        expected_jumps += moves
    np.testing.assert_allclose(posteriors.jumps, expected_jumps, atol=1e-5)


@pytest.mark.parametrize("states", [1, 2, 63, 64, 65, 128, 129, 200, 513])
def test_jumps_match_a_matrix_of_all_transitions(states: int) -> None:
    generator = np.random.default_rng(states)
    old_BS, new_BS = generator.random((2, 3, states)).astype(np.float32) ** 8
    old_BS[:, : states // 2] *= 1e-6  # sums from the other side stay exact beside much larger ones
    weights = generator.random(2 * hmm.MAX_JUMP + 3)
    distance_SS = np.arange(states) - np.arange(states)[:, None]
    index_SS = np.clip(distance_SS, -hmm.MAX_JUMP - 1, hmm.MAX_JUMP + 1) + hmm.MAX_JUMP + 1
    weights_NR = weights[hmm.NEAR_JUMPS].astype(np.float32)
    np.testing.assert_allclose(hmm.sum_jumps(old_BS, weights_NR), old_BS @ weights[index_SS], rtol=1e-5)
    jumps_NR = np.zeros(hmm.NEAR_JUMPS.shape)
    hmm.add_jumps(jumps_NR, old_BS, new_BS)
    counted = np.bincount(hmm.NEAR_JUMPS.ravel(), jumps_NR.ravel(), len(weights))
    expected = np.bincount(index_SS.ravel(), (old_BS.T.astype(float) @ new_BS).ravel(), len(weights))
    np.testing.assert_allclose(counted, expected, rtol=1e-5)


def test_memory_is_proportional_to_pairs_of_words() -> None:
    targets, sources = 20, 10_000
    emission_BTS, null_BT = np.ones((1, targets, sources), np.float32), np.ones((1, targets), np.float32)
    tracemalloc.start()
    try:
        posteriors = infer_links(emission_BTS, null_BT, hmm.INITIAL_JUMPS, np.array([sources]), np.array([targets]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 * emission_BTS.nbytes + 1e6
    assert posteriors.jumps.sum() == pytest.approx(posteriors.links_BTS.sum(), rel=1e-2)


def test_model_1_matches_its_equation() -> None:
    emission_BTS, null_BT = draw_emissions()
    links_BTS = infer_independent_links(emission_BTS, null_BT, SOURCE)
    null = hmm.NULL_PROBABILITY
    for row, t, s in np.argwhere(emission_BTS):
        word = (1 - null) / SOURCE[row] * emission_BTS[row, t]
        assert links_BTS[row, t, s] == pytest.approx(word[s] / (word.sum() + null * null_BT[row, t]), rel=1e-5)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("İstanbul", "istanbul"),
        ("STRASSE", normalize_word("Straße")),
        ("Cafe\u0301", "café"),
        ("(„don't“)!", "don't"),
        ("...", "..."),
        ("\u202bسلام\u202c،", "سلام"),
        ("می\u200cخواهم", "میخواهم"),
        ("\u200f", "\u200f"),
        ("." * 100_000 + "a", "a"),
    ],
)
def test_words_of_the_lexicon(word: str, expected: str) -> None:
    assert normalize_word(word) == expected


def read_links(aligner: Aligner) -> Counter:
    """Return the expected number of links of each pair of words in the training text."""
    sources, targets = (list(side.prefix_ids[-1]) for side in (aligner.lexicon.source, aligner.lexicon.target))
    table = aligner.lexicon.tables[-1]
    ids = zip(*np.divmod(table.codes, len(targets) + 1), strict=True)
    return Counter({(sources[s], targets[t]): links for (s, t), links in zip(ids, table.links, strict=True)})


def test_probabilities_match_slow_lexicon() -> None:
    """Count links of prefixes in dictionaries, after a round of training."""
    sources = [["Haus", "Häuser", "berlin"], ["häuslich", "ein"], ["ein", "Haus", "."]]
    targets = [["house", "houses", "Berlin"], ["homely", "one"], ["a", "house", "."]]
    aligner = train_aligner(sources, targets)
    links = read_links(aligner)
    sides = [[[normalize_word(word) for word in words] for words in side] for side in (sources, targets)]
    assert links["ein", "one"] > links["ein", "homely"] and links["berlin", "berlin"] < 1.01
    links.update({("berlin", "berlin"): IDENTICAL_LINKS, (".", "."): IDENTICAL_LINKS})
    words = Counter(word for sentence in sides[1] for word in sentence)
    vocabulary = [{word[:length] for word in words} for length in PREFIX_LENGTHS]

    def occurrences(prefix: str, level: int) -> float:
        return sum(count for word, count in words.items() if word[: PREFIX_LENGTHS[level]] == prefix) + 1

    def share(prefix: str, level: int) -> float:
        same = vocabulary[level]
        if level:
            shorter = PREFIX_LENGTHS[level - 1]
            same = {other for other in same if other[:shorter] == prefix[:shorter]}
        total = sum(occurrences(other, level) for other in same) + (0 if level else 1)  # 1: unknown prefixes
        return occurrences(prefix, level) / total

    def probability(s: str, t: str, level: int) -> float:
        if level < 0:
            return 1.0
        length = PREFIX_LENGTHS[level]
        both = sum(n for (a, b), n in links.items() if (a[:length], b[:length]) == (s[:length], t[:length]))
        either = sum(n for (a, _), n in links.items() if a[:length] == s[:length])
        base = share(t[:length], level) * probability(s, t, level - 1)
        weight = BACKOFF if level else BASE_BACKOFF
        return (both + weight * base) / (either + weight)

    _, pairs = index_corpus(aligner, sources, targets)
    forward_P, _ = pairs.probabilities()
    source_words, target_words = (list(dict.fromkeys(word for words in side for word in words)) for side in sides)
    together = {pair for words in zip(*sides, strict=True) for pair in itertools.product(*words)}
    ordered = [pair for pair in itertools.product(source_words, target_words) if pair in together]
    for (s, t), actual in zip(ordered, forward_P, strict=True):
        assert actual == pytest.approx(probability(s, t, len(PREFIX_LENGTHS) - 1), rel=1e-9), (s, t)


def read_toy(count: int) -> tuple[list[list[str]], list[list[str]], list[GoldLinks]]:
    pairs = generate(1, {"train": count})["train"]
    gold = [GoldLinks.from_pairs(pair.sure, pair.possible) for pair in pairs]
    return [pair.german.split() for pair in pairs], [pair.english.split() for pair in pairs], gold


@pytest.fixture(scope="module")
def toy() -> tuple[list[list[str]], list[list[str]], list[GoldLinks]]:
    return read_toy(2_000)


def test_alignment_error(toy: tuple) -> None:
    sources, targets, gold = toy
    aligner = train_aligner(sources, targets)
    counts = LinkCounts()
    weights = align_sentences(aligner, sources, targets)
    for weights_TS, links in zip(weights, gold, strict=True):
        counts.add(threshold_links(weights_TS, 0.5), links)
    aer = counts.scores()["aer"]
    assert aer is not None and aer < 0.05
    mixed = [
        (source[s], target[t])
        for source, target, weights_TS in zip(sources, targets, weights, strict=True)
        for s, t in threshold_links(weights_TS, 0.5)
        if (source[s] in ",.?") != (target[t] in ",.?")
    ]
    assert len(mixed) < 20, mixed  # above all, the comma before a relative clause is not linked to "who"


def test_other_sentences_do_not_change_links(toy: tuple) -> None:
    sources, targets, _ = toy
    aligner = train_aligner(sources[:300], targets[:300])
    # Unknown words, of which some begin as known ones do.
    sources = [*sources[:290], *([f"{word}x" for word in words] for words in sources[290:300])]
    targets = [*targets[:290], *([f"{word}y" for word in words] for words in targets[290:300])]
    together = align_sentences(aligner, sources, targets)
    for row in (*range(0, 290, 37), *range(290, 300)):
        [alone] = align_sentences(aligner, [sources[row]], [targets[row]])
        assert alone is not None
        np.testing.assert_allclose(alone, together[row], atol=1e-5)


@pytest.mark.parametrize(
    ("sources", "targets"),
    [
        ([], []),
        ([["a"]], [[]]),
        ([["a", "b"], []], [["a", "b"], ["c"]]),
        ([["x"] * 10_000], [["y"] * 10_000]),
        ([["狗"], ["…"]], [["dog"], ["..."]]),
    ],
)
def test_small_and_odd_corpora(sources: list[list[str]], targets: list[list[str]]) -> None:
    aligner = train_aligner(sources, targets)
    for source, target, weights_TS in zip(sources, targets, align_sentences(aligner, sources, targets), strict=True):
        if len(source) * len(target) > MAX_CELLS:
            assert weights_TS is None
            continue
        assert weights_TS is not None and weights_TS.shape == (len(target), len(source))
        assert np.isfinite(weights_TS).all() and (weights_TS >= 0).all() and (weights_TS <= 1 + 1e-5).all()


def test_text_that_does_not_fit_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aligner_module, "BYTES_PER_WORD_PAIR", 10**15)
    with pytest.raises(UserError, match=r"needs 1,000,000 GB of memory.*align the lines in parts"):
        train_aligner([["ein"]], [["a"]])
