"""Save a trained aligner to a folder, and load it."""

import io
import json
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nmt.aligner.aligner import Aligner
from nmt.aligner.lexicon import PREFIX_LENGTHS, LinkTable, Vocabulary
from nmt.config import SIDES
from nmt.errors import UserError

ALIGNER_FILE = "aligner.npz"
FORMAT = 2
MIN_LINKS = 0.001  # smaller expected numbers of links are not stored
MAX_COMPRESSION = 300  # bytes for each byte of the file; DEFLATE reaches 1,032
DAMAGE = (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, zipfile.BadZipFile)
ARRAYS = ("null_source", "null_target", "jumps_forward", "jumps_backward")


def is_aligner(path: str) -> bool:
    return Path(path, ALIGNER_FILE).is_file()


def save_aligner(aligner: Aligner, file: BinaryIO) -> None:
    """Write the content of `aligner.npz`. It has the words of the training text, and no sentence."""
    lexicon = aligner.lexicon
    arrays: dict[str, np.ndarray] = {name: getattr(aligner, name) for name in ARRAYS}
    texts: dict[str, Any] = {"format": FORMAT, "prefix_lengths": PREFIX_LENGTHS, "tokenize": aligner.tokenize}
    for side, vocabulary in (("source", lexicon.source), ("target", lexicon.target)):
        texts[f"{side}_prefixes"] = [list(ids) for ids in vocabulary.prefix_ids]
        for level, counts in enumerate(vocabulary.counts):
            arrays[f"{side}_counts_{level}"] = np.array(counts, np.int64)
    for level, table in enumerate(lexicon.tables):
        kept = table.links >= MIN_LINKS
        arrays[f"codes_{level}"], arrays[f"links_{level}"] = table.codes[kept], table.links[kept].astype(np.float32)
    arrays["texts"] = np.frombuffer(json.dumps(texts, ensure_ascii=False).encode(), np.uint8)
    content = io.BytesIO()  # NumPy takes no stream that can only be written
    np.savez_compressed(content, **arrays)  # type: ignore[arg-type]
    file.write(content.getvalue())


def load_aligner(folder: Path) -> Aligner:
    """Load an aligner. Nothing in the file is executed, and it cannot unpack to much more than its size.

    Raises:
        UserError: the file is damaged, or of another version of the program.
    """
    path = folder / ALIGNER_FILE
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
        if unpacked > MAX_COMPRESSION * path.stat().st_size:
            raise ValueError(f"{unpacked:,} bytes when unpacked")
        with np.load(path, allow_pickle=False) as arrays:
            texts = json.loads(arrays["texts"].tobytes())
            if (texts["format"], tuple(texts["prefix_lengths"])) != (FORMAT, PREFIX_LENGTHS):
                raise UserError(f"{path} was written by another version of nmt; train the aligner again")
            aligner = Aligner(*(read_vocabulary(texts[f"{side}_prefixes"], arrays, side) for side in SIDES))
            aligner.tokenize = texts["tokenize"]
            tables = [(arrays[f"codes_{level}"], arrays[f"links_{level}"]) for level in range(len(PREFIX_LENGTHS))]
            aligner.lexicon.set_tables([LinkTable(codes, links.astype(np.float64)) for codes, links in tables])
            for name in ARRAYS:
                values = arrays[name]
                if values.shape != getattr(aligner, name).shape:
                    raise ValueError(name)
                setattr(aligner, name, values)
    except (*DAMAGE, zlib.error) as error:
        raise UserError(f"{path} is damaged ({error}); train the aligner again") from error
    return aligner


def read_vocabulary(prefixes: list[list[str]], arrays: Any, side: str) -> Vocabulary:
    """Return the vocabulary of a side. Raises a ValueError unless each prefix has its count."""
    ids = [{prefix: number for number, prefix in enumerate(level)} for level in prefixes]
    counts = [arrays[f"{side}_counts_{level}"].tolist() for level in range(len(PREFIX_LENGTHS))]
    if list(map(len, ids)) != list(map(len, counts)):
        raise ValueError(f"{side}_prefixes")
    return Vocabulary(ids, counts)
