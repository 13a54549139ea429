"""Export a model as one HTML file that translates in any browser, offline.

The page has its data in two blocks: `data`, the JSON of `describe_model`, and `weights`, the base64 of the tensors, end
to end in little-endian order. A matrix has a scale (float32) and int8 values for each row r, with
w[r, i] = scale[r] * value[r, i]; all other tensors are float32. The JSON gives the shape of each tensor and the offsets
of its values and scales in bytes.
"""

import base64
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmt.config import SearchConfig, TrainRun
from nmt.data.literals import FINAL_MARKS, LITERAL
from nmt.data.tokenizer import BYTE_PIECES, SPECIALS, LanguageTokenizer, Tokenizer
from nmt.errors import UserError
from nmt.model.kernels.inference_weights import quantize_rows
from nmt.model.seq2seq import Seq2Seq
from nmt.system.page_template import dump_script_json, fill_template

FOLDER = Path(__file__).parent
StoredTensor = tuple[Tensor, Tensor | None]  # int8 values of a matrix and scales of its rows, or float values and None
WORKER_FILES = ("engine.js", "tokenizer.js", "rewriting.js", "search.js", "translator.js", "worker.js")
# Settings of search that the page follows. The number of alternatives that it shows is the beam.
SEARCH_KEYS = (
    "beam",
    "length_penalty",
    "coverage_penalty",
    "max_length",
    "max_ratio",
    "max_source",
    "capitals",
    "protect",
)


def build_page(model: Seq2Seq, tokenizer: Tokenizer, run: TrainRun, search: SearchConfig) -> str:
    """Return the HTML page of a model.

    Args:
        run: settings of the training, for the model's shape and the languages.
        search: settings of search; the reader of the page may change the beam.

    Raises:
        UserError: a setting of search does not work in the page.
    """
    check_search(search, tokenizer)
    search = search.with_source_limit_of(run.data)
    index, weights = pack_tensors(quantize_tensors(model) | get_scores(tokenizer))
    title = f"{run.data.source} \N{RIGHTWARDS ARROW} {run.data.target}"
    data = describe_model(model, tokenizer, run, search) | {"title": title, "tensors": index}
    parts = {
        "TITLE": escape(title),
        "DATA": dump_script_json(data),
        "WEIGHTS": base64.b64encode(weights).decode(),
        "WORKER": "".join((FOLDER / name).read_text(encoding="utf-8") for name in WORKER_FILES),
    }
    return fill_template(FOLDER / "translator.html", parts)


def check_search(search: SearchConfig, tokenizer: Tokenizer) -> None:
    """Raise a `UserError` if a setting is changed that the page does not follow, or the model cannot."""
    if search.protect and not tokenizer.source.literal_ids:
        raise UserError(
            "search.protect=true needs a model with pieces that stand for literals; train one with "
            "tokenizer.literals=16 augment.literals=0.1, or remove search.protect"
        )
    defaults = asdict(SearchConfig())
    for key, value in asdict(search).items():
        if key not in SEARCH_KEYS and value != defaults[key]:
            raise UserError(f"search.{key}={value} does not work in a page; remove search.{key}")


def describe_model(model: Seq2Seq, tokenizer: Tokenizer, run: TrainRun, search: SearchConfig) -> dict[str, Any]:
    """Return what the page needs to know besides the tensors."""
    target = None if tokenizer.source == tokenizer.target else describe_tokenizer(tokenizer.target)
    return {
        "languages": {"source": run.data.source, "target": run.data.target},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "model": asdict(run.model) | {"memory": run.model.memory},
        "maxSourcePositions": model.max_source_positions,
        "attends": model.attends,
        "literals": {"pattern": translate_pattern(LITERAL.pattern), "finalMarks": FINAL_MARKS},
        "search": {key: getattr(search, key) for key in SEARCH_KEYS},
        "tokenizers": {"source": describe_tokenizer(tokenizer.source), "target": target},
    }


def translate_pattern(pattern: str) -> str:
    """Return a regular expression of Python in the syntax of JavaScript with the flag u.

    Letters and digits are those of Unicode in Python. `\\w` must be in brackets.
    """
    return pattern.replace("(?P<", "(?<").replace(r"\w", r"\p{L}\p{M}\p{N}_").replace(r"\d", r"\p{Nd}")


def describe_tokenizer(side: LanguageTokenizer) -> dict[str, Any]:
    """Return the argument of the class of the same name in tokenizer.js, without the scores of the pieces.

    Type `char` is a unigram model of single characters.
    """
    first_symbol = len(SPECIALS)
    end = first_symbol + len(side.symbols)
    return {
        "kind": "word" if not side.has_byte_fallback else "bpe" if side.is_bpe else "unigram",
        "pieces": side.pieces(range(side.vocab_size)),
        "symbols": [first_symbol, end],
        "first": end + (BYTE_PIECES if side.has_byte_fallback else 0),
        "squeezesSpaces": side.squeezes_spaces,
        "characterMap": base64.b64encode(side.character_map).decode(),
    }


def get_scores(tokenizer: Tokenizer) -> dict[str, StoredTensor]:
    """Return the scores of all pieces of each side, as tensors for `pack_tensors`."""
    sides = {"tokenizer.source": tokenizer.source, "tokenizer.target": tokenizer.target}
    return {
        name: (torch.tensor([side.processor.get_score(i) for i in range(side.vocab_size)]), None)
        for name, side in sides.items()
    }


def pack_tensors(tensors: dict[str, StoredTensor]) -> tuple[dict[str, Any], bytes]:
    """Return shape and offsets of each tensor by name, and the bytes of all. Tied tensors are stored once."""
    index: dict[str, dict[str, Any]] = {name: {"shape": list(values.shape)} for name, (values, _) in tensors.items()}
    parts: list[bytes] = []
    offsets: dict[int, int] = {}  # by identity of the tensor
    end = 0

    def store(tensor: Tensor, dtype: str) -> int:
        nonlocal end
        if id(tensor) not in offsets:
            offsets[id(tensor)] = end
            parts.append(tensor.numpy().astype(dtype).tobytes())
            end += len(parts[-1])
        return offsets[id(tensor)]

    # int8 last, so that all float32 values are aligned
    for name, (values, scales) in tensors.items():
        if scales is None:
            index[name]["values"] = store(values, "<f4")
        else:
            index[name]["scales"] = store(scales, "<f4")
    for name, (values, scales) in tensors.items():
        if scales is not None:
            index[name]["values"] = store(values, "i1")
    return index, b"".join(parts)


def quantize_tensors(model: Seq2Seq) -> dict[str, StoredTensor]:
    """Return the parameters of a model by name, in int8 where they are matrices."""
    done: dict[int, StoredTensor] = {}  # tied parameters have several names
    tensors = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in done:
            exact = parameter.detach().float().cpu()
            values, scales = quantize_rows(exact) if exact.dim() == 2 else (exact, None)
            done[id(parameter)] = (values, None if scales is None else scales.squeeze(1))
        tensors[name] = done[id(parameter)]
    return tensors
