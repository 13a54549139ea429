"""Mix several training corpora (`data.corpora`), each with a weight and optionally a tag before each source."""

import dataclasses
import itertools
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from nmt.config import SIDES, UNK, DataConfig
from nmt.data.corpus import load_pairs
from nmt.data.readers import TEXT_SCHEMA
from nmt.data.tokenizer import SPACE_SYMBOL, Tokenizer
from nmt.errors import UserError

log = logging.getLogger("nmt")


class MixturePart(NamedTuple):
    """A corpus of a mixture."""

    data: DataConfig
    weight: float  # how often its pairs are used for each use of a pair of data.path
    tag: str | None  # as written before each source, e.g. <bt>


def list_corpora(data: DataConfig) -> list[MixturePart]:
    """Return the training corpora, that of `data.path` first; the others inherit the keys that they do not set."""
    main_corpus = dataclasses.replace(data, corpora=[])
    parts = [MixturePart(main_corpus, 1.0, None)]
    for corpus in data.corpora:
        settings = {k: v for k, v in dataclasses.asdict(corpus).items() if v and k not in ("weight", "tag")}
        tag = corpus.tag and f"<{corpus.tag}>"
        parts.append(MixturePart(dataclasses.replace(main_corpus, **settings, limit=None), corpus.weight, tag))
    return parts


def check_tags(data: DataConfig, tokenizer: Tokenizer) -> None:
    """Raise a `UserError` unless each tag is a piece of the tokenizer, which may come from another run."""
    for part in list_corpora(data):
        if part.tag and tokenizer.source.processor.piece_to_id(SPACE_SYMBOL + part.tag) == UNK:
            raise UserError(
                f"the tokenizer of init_from has no piece {part.tag}; remove the tag of data.path={part.data.path}, or "
                "start without init_from"
            )


def load_mixture(data: DataConfig) -> tuple[pa.Table, list[tuple[int, float]]]:
    """Load all training pairs and, if there are several corpora, the end row and the weight of each."""
    parts = list_corpora(data)
    if len(parts) == 1:
        return load_pairs(data, "train"), []
    loaded = []
    for number, part in enumerate(parts):
        with name_corpus_in_errors(number):
            pairs = load_pairs(part.data, "train").select(SIDES)
            loaded.append(prepend_tag(pairs.cast(TEXT_SCHEMA), part.tag))
    ends = itertools.accumulate(map(len, loaded))
    return pa.concat_tables(loaded), list(zip(ends, (part.weight for part in parts), strict=True))


@contextmanager
def name_corpus_in_errors(number: int) -> Iterator[None]:
    """Replace `data.KEY=` by `data.corpora[i].KEY=` in errors of a corpus of `list_corpora` other than the first."""
    try:
        yield
    except UserError as error:
        if not number:
            raise
        key = rf"data.corpora[{number - 1}].\1="
        message = re.sub(r"\bdata\.(path|format|subset|revision|source|target)=", key, str(error))
        raise UserError(message, error.any_rank) from None


def prepend_tag(table: pa.Table, tag: str | None) -> pa.Table:
    """Put the tag and a space before each source, except for empty ones."""
    if tag is None:
        return table
    source = table["source"]
    empty = pc.or_(pc.equal(source, ""), pc.utf8_is_space(source))
    texts = pc.if_else(empty, source, pc.binary_join_element_wise(tag, source, " "))
    return table.set_column(table.schema.get_field_index("source"), "source", texts)
