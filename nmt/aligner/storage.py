"""Save a trained aligner to a folder, and load it."""

import io
import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from nmt.aligner.aligner import Aligner
from nmt.aligner.lexicon import PREFIX_LENGTHS, LinkTable, Vocabulary
from nmt.config import SIDES
from nmt.errors import UserError
from nmt.runtime.files import write_atomically

ALIGNER_FILE = "aligner.npz"
FORMAT = 2
MIN_LINKS = 0.001  # smaller expected numbers of links are not stored
ARRAYS = ("null_source", "null_target", "jumps_forward", "jumps_backward")


def is_aligner(path: str) -> bool:
    return Path(path, ALIGNER_FILE).is_file()


def save_aligner(aligner: Aligner, folder: Path) -> None:
    """Write `aligner.npz`. It has the words of the training text, and no sentence."""
    lexicon = aligner.lexicon
    arrays: dict[str, np.ndarray] = {name: getattr(aligner, name) for name in ARRAYS}
    texts: dict[str, Any] = {"format": FORMAT, "prefix_lengths": PREFIX_LENGTHS}
    for side, vocabulary in (("source", lexicon.source), ("target", lexicon.target)):
        texts[f"{side}_prefixes"] = [list(ids) for ids in vocabulary.prefix_ids]
        for level, counts in enumerate(vocabulary.counts):
            arrays[f"{side}_counts_{level}"] = np.array(counts, np.int64)
    for level, table in enumerate(lexicon.tables):
        kept = table.links >= MIN_LINKS
        arrays[f"codes_{level}"], arrays[f"links_{level}"] = table.codes[kept], table.links[kept].astype(np.float32)
    arrays["texts"] = np.frombuffer(json.dumps(texts, ensure_ascii=False).encode(), np.uint8)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / ALIGNER_FILE, [buffer.getvalue()])


def load_aligner(folder: Path) -> Aligner:
    """Load an aligner.

    Raises:
        UserError: the file is damaged, or of another version of the program.
    """
    path = folder / ALIGNER_FILE
    try:
        with np.load(path, allow_pickle=False) as arrays:
            texts = json.loads(arrays["texts"].tobytes())
            if (texts["format"], tuple(texts["prefix_lengths"])) != (FORMAT, PREFIX_LENGTHS):
                raise UserError(f"{path} was written by another version of nmt; train the aligner again")
            sides = [
                Vocabulary(
                    [
                        {prefix: number for number, prefix in enumerate(prefixes)}
                        for prefixes in texts[f"{side}_prefixes"]
                    ],
                    [arrays[f"{side}_counts_{level}"].tolist() for level in range(len(PREFIX_LENGTHS))],
                )
                for side in SIDES
            ]
            aligner = Aligner(*sides)
            aligner.lexicon.tables = [
                LinkTable(arrays[f"codes_{level}"], arrays[f"links_{level}"].astype(np.float64))
                for level in range(len(PREFIX_LENGTHS))
            ]
            for name in ARRAYS:
                setattr(aligner, name, arrays[name])
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} is damaged ({error}); train the aligner again") from error
    return aligner
