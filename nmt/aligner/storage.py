"""Save a trained aligner to a folder, and load it."""

import io
import json
import lzma
import struct
import zipfile
import zlib
from collections.abc import Collection, Mapping
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
MAX_COUNT = 2**50  # of words or links
MIN_PARAMETER = 1e-3  # all are smoothed with more
MAX_COMPRESSION = 300  # bytes for each byte of the file; DEFLATE reaches 1,032
DAMAGE = (
    OSError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    MemoryError,
    OverflowError,
    RuntimeError,  # nested too deep, encrypted, or an unknown compression
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)
ARRAYS = ("null_source", "null_target", "jumps_forward", "jumps_backward")


def is_aligner(path: str) -> bool:
    return Path(path, ALIGNER_FILE).is_file()


def check_save_folder(path: str) -> None:
    """Raise a `UserError` if `save=` names a file, or a folder with anything but an aligner, such as a run."""
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"save={path} is a file; give a folder")
    others = sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []
    others = [name for name in others if name != ALIGNER_FILE and not name.startswith(f".{ALIGNER_FILE}.")]
    if others:
        raise UserError(f"save={path} has other files ({', '.join(others[:3])}); give a folder for the aligner alone")


def save_aligner(aligner: Aligner, file: BinaryIO) -> None:
    """Write the content of `aligner.npz`. It has the words of the training text, and no sentence."""
    lexicon = aligner.lexicon
    arrays: dict[str, np.ndarray] = {name: getattr(aligner, name) for name in ARRAYS}
    texts: dict[str, Any] = {"format": FORMAT, "prefix_lengths": PREFIX_LENGTHS}
    texts |= {"tokenize": aligner.tokenize, "segmenter": aligner.segmenter}
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
    """Load an aligner.

    Raises:
        UserError: the file is damaged, or of another version of the program.
    """
    path = folder / ALIGNER_FILE
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
        require(unpacked <= MAX_COMPRESSION * path.stat().st_size, f"{unpacked:,} bytes when unpacked")
        with np.load(path, allow_pickle=False) as arrays:
            texts = json.loads(arrays["texts"].tobytes())
            if (texts["format"], tuple(texts["prefix_lengths"])) != (FORMAT, PREFIX_LENGTHS):
                raise UserError(f"{path} was written by another version of nmt; train the aligner again")
            aligner = Aligner(*(read_vocabulary(texts[f"{side}_prefixes"], arrays, side) for side in SIDES))
            aligner.tokenize, aligner.segmenter = texts["tokenize"], texts["segmenter"]
            require(isinstance(aligner.tokenize, bool), "tokenize")
            require(isinstance(aligner.segmenter, str | None), "segmenter")
            aligner.lexicon.set_tables([read_table(aligner, arrays, level) for level in range(len(PREFIX_LENGTHS))])
            for name in ARRAYS:
                values, shape = arrays[name], getattr(aligner, name).shape
                in_range = values.shape == shape and ((values >= MIN_PARAMETER) & (values <= MAX_COUNT)).all()
                require(in_range and values.dtype == np.float64, name)
                setattr(aligner, name, values)
    except DAMAGE as error:
        raise UserError(f"{path} is damaged ({error}); train the aligner again") from error
    return aligner


def read_vocabulary(prefixes: list[list[str]], arrays: Mapping[str, np.ndarray], side: str) -> Vocabulary:
    """Raise a ValueError unless prefixes are distinct, have their counts, and begin with a shorter one each."""
    require(len(prefixes) == len(PREFIX_LENGTHS), f"{side}_prefixes")
    vocabulary = Vocabulary([{prefix: number for number, prefix in enumerate(level)} for level in prefixes], [])
    shorter: Collection[str] = {""}
    for level, ids in enumerate(vocabulary.prefix_ids):
        parent_length, length = PREFIX_LENGTHS[level - 1] if level else 0, PREFIX_LENGTHS[level]
        are_valid = all(word.encode() and word[:length] == word and word[:parent_length] in shorter for word in ids)
        require(are_valid and len(ids) == len(prefixes[level]), f"{side}_prefixes, level {level}")
        counts = arrays[f"{side}_counts_{level}"]
        in_range = counts.shape == (len(ids),) and ((counts >= 1) & (counts <= MAX_COUNT)).all()
        require(in_range and counts.dtype == np.int64, f"{side}_counts_{level}")
        vocabulary.counts.append(counts.tolist())
        shorter = ids
    return vocabulary


def read_table(aligner: Aligner, arrays: Mapping[str, np.ndarray], level: int) -> LinkTable:
    """Raise a ValueError unless codes are sorted and of pairs that the vocabularies have, each with its links."""
    sources, targets = (len(side.counts[level]) for side in (aligner.lexicon.source, aligner.lexicon.target))
    codes, links = arrays[f"codes_{level}"], arrays[f"links_{level}"]
    require(codes.ndim == 1 and codes.dtype == np.int64 and (codes[1:] > codes[:-1]).all(), f"codes_{level}")
    source_ids, target_ids = np.divmod(codes, targets + 1)
    require(((source_ids >= 0) & (source_ids < sources) & (target_ids < targets)).all(), f"codes_{level}")
    in_range = links.shape == codes.shape and ((links >= 0) & (links <= MAX_COUNT)).all()
    require(in_range and links.dtype == np.float32, f"links_{level}")
    return LinkTable(codes, links.astype(np.float64))


def require(is_valid: bool | np.bool_, what: str) -> None:
    if not is_valid:
        raise ValueError(what)
