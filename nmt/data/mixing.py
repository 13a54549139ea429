"""Several corpora as one (`data.corpora`): how often each is used, and by which tag a model tells it from others."""

import dataclasses
import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import datasets
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from xxhash import xxh3_128

from nmt.config import UNK, DataConfig
from nmt.data.cache import cache_folder, get_or_build
from nmt.data.corpus import CHUNK, PAIRS, load_pairs
from nmt.data.encoding import SIDES, text_key
from nmt.data.readers import TEXTS
from nmt.data.tokenizer import SPACE, Tokenizer
from nmt.errors import UserError


class MixturePart(NamedTuple):
    """A corpus of a mixture."""

    data: DataConfig
    weight: float
    tag: str | None  # as it stands in the text


def corpora_of(data: DataConfig) -> list[MixturePart]:
    """The corpora that are trained on, that of `data.path` first; where one leaves something open, it is as there."""
    alone = dataclasses.replace(data, corpora=[])
    found = [MixturePart(alone, 1.0, None)]
    for corpus in data.corpora:
        own = {k: v for k, v in dataclasses.asdict(corpus).items() if v and k not in ("weight", "tag")}
        tag = corpus.tag and f"<{corpus.tag}>"
        found.append(MixturePart(dataclasses.replace(alone, **own, limit=None), corpus.weight, tag))
    return found


def check_tags(data: DataConfig, tokenizer: Tokenizer) -> None:
    """See that each tag is a piece, also where the tokenizer is that of another run.

    Raises:
        UserError: one is not.
    """
    for part in corpora_of(data):
        if part.tag and tokenizer.source.processor.piece_to_id(SPACE + part.tag) == UNK:
            raise UserError(
                f"the tokenizer of init_from has no piece {part.tag}; leave out the tag of data.path={part.data.path}, "
                "or start without init_from"
            )


def load_mixture(data: DataConfig) -> tuple[Dataset, list[tuple[int, float]]]:
    """The training pairs, and where they are from several corpora: the row at which each of these ends, and its weight.

    Raises:
        UserError: as `load_pairs`.
    """
    parts = corpora_of(data)
    if len(parts) == 1:
        return load_pairs(data, "train"), []
    loaded = []
    for number, part in enumerate(parts):
        with named_corpus(number):
            loaded.append(tagged(load_pairs(part.data, "train"), part.tag, data))
    ends = itertools.accumulate(map(len, loaded))
    return datasets.concatenate_datasets(loaded), list(zip(ends, (part.weight for part in parts), strict=True))


@contextmanager
def named_corpus(number: int) -> Iterator[None]:
    """Say of what is wrong with a corpus of `corpora_of` which key names it: only the first is that of `data.path`."""
    try:
        yield
    except UserError as error:
        if not number:
            raise
        key = rf"data.corpora[{number - 1}].\1="
        message = re.sub(r"\bdata\.(path|format|subset|revision|source|target)=", key, str(error))
        raise UserError(message, error.any_rank) from None


def tagged(pairs: Dataset, tag: str | None, data: DataConfig) -> Dataset:
    """The texts of a corpus alone, with its tag before each source: in the cache, unless they are as they should be."""
    pairs = pairs.select_columns(SIDES)
    if tag is None and pairs.data.schema.types == TEXTS.types:
        return pairs

    def fill(part: Path) -> None:
        with open(part / PAIRS, "wb") as file, pa.ipc.new_stream(file, TEXTS) as writer:
            for table in pairs.with_format("arrow").iter(CHUNK):
                writer.write_table(with_tag(table.cast(TEXTS), tag))

    key = xxh3_128(f"{text_key(pairs)} {tag}".encode()).hexdigest()
    folder = get_or_build(cache_folder(data) / "text" / key, fill)
    return Dataset.from_file(str(folder / PAIRS))


def with_tag(table: pa.Table, tag: str | None) -> pa.Table:
    """The same with the tag and a space before each source; an empty one stays so."""
    if tag is None:
        return table
    source = table["source"]
    empty = pc.or_(pc.equal(source, ""), pc.utf8_is_space(source))
    texts = pc.if_else(empty, source, pc.binary_join_element_wise(tag, source, " "))
    return table.set_column(table.schema.get_field_index("source"), "source", texts)
