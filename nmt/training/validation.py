"""Validation: loss, accuracy, attention entropy and alignment error rate under teacher forcing, and BLEU.

Shapes: B sentences, S source and T target positions.
"""

import math
import time
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from nmt.config import EOS, PAD, SearchConfig
from nmt.data.batch import make_batch
from nmt.data.corpus import get_gold_links, iter_column
from nmt.data.tokenizer import Tokenizer
from nmt.decoding.alignment import extract_links
from nmt.decoding.batches import default_batch_tokens, run_in_batches
from nmt.decoding.translator import Translator
from nmt.evaluation.metrics import LinkCounts, bleu, format_number, sentence_chrf
from nmt.evaluation.report import build_pair
from nmt.model.out_of_memory import run_unless_out_of_memory
from nmt.model.seq2seq import Seq2Seq
from nmt.runs.history import METRICS_FILE, SAMPLES_FILE
from nmt.system.distributed import all_gather
from nmt.system.logging import log
from nmt.system.messages import format_first_lines, pluralize
from nmt.training.meter import write_event
from nmt.training.state import TrainState

SAMPLES = 4  # validation pairs whose translations are written down at each validation
MAX_VALIDATION_PIECES = 1_000  # of the longer side: a longer pair of damaged lines might take all memory and hours


def validate(state: TrainState) -> dict[str, Any]:
    """Measure the scores of `evaluate_loss`, and BLEU of greedy translations against the raw references.

    They are logged and written to metrics.jsonl, and the first translations to samples.jsonl.
    """
    started = time.perf_counter()
    data, tokenizer = state.data, state.data.corpus.tokenizer
    scores = evaluate_loss(state.model, tokenizer, data.valid, state.device)
    model = run_unless_out_of_memory(partial(copy_for_inference, state.model)) or state.model
    search = SearchConfig(beam=1).with_source_limit_of(state.run.data)
    translator = Translator(model, tokenizer, search, state.device, state.run.data.languages)
    sources, references = list(iter_column(data.valid, "source")), list(iter_column(data.valid, "target"))
    samples = translator.translate(sources[:SAMPLES], keep_weights=True)
    translations = samples + translator.translate(sources[SAMPLES:], first_line=SAMPLES + 1)
    hypotheses = [options[0].text for options in translations]
    scores["bleu"] = bleu(hypotheses, references, state.run.bleu_tokenizer) or 0.0
    chrf = sentence_chrf(hypotheses[:SAMPLES], references[:SAMPLES])
    pairs = [
        build_pair(row + 1, sources[row], references[row], options[0], chrf[row]) for row, options in enumerate(samples)
    ]
    event = {"event": "validate", "step": state.progress.step, "epoch": state.progress.epoch}
    write_event(state.folder / SAMPLES_FILE, event | {"pairs": pairs})
    attention = {"AER": scores["aer"], "attention entropy": scores["entropy"]}
    log.info(
        f"validation at step {state.progress.step}: loss {scores['loss']:.3f}, ppl {format_number(scores['ppl'])}, "
        f"accuracy {scores['accuracy']:.1%}, BLEU {scores['bleu']:.2f}"
        + "".join(f", {name} {value:.3f}" for name, value in attention.items() if value is not None)
        + f" ({time.perf_counter() - started:.0f} s)"
    )
    write_event(state.folder / METRICS_FILE, event | scores)
    return scores


def copy_for_inference(model: Seq2Seq) -> Seq2Seq:
    """Copy the model for translation, so that weights are cast and laid out once instead of at each step."""
    model = deepcopy(model).eval().to(model.dtype)
    model.prepare_for_inference(int8=False)
    return model


@torch.inference_mode()
def evaluate_loss(model: Seq2Seq, tokenizer: Tokenizer, pairs: pa.Table, device: torch.device) -> dict[str, Any]:
    """Measure a model under teacher forcing, with the pairs shared among all ranks.

    Returns:
        loss: without label smoothing, in nats per target token, `</s>` included.
        ppl: perplexity.
        accuracy: of target tokens.
        aer: alignment error rate of the links extracted from attention, None without gold links.
        entropy: mean entropy of attention weights in nats per target token, None without attention.

        Pairs of more than `MAX_VALIDATION_PIECES` pieces are left out, with a warning.

    Raises:
        UserError: memory is too small for a single pair.
    """
    model.eval()
    source_lines, target_lines = list(iter_column(pairs, "source")), list(iter_column(pairs, "target"))
    sources, targets = tokenizer.source.encode(source_lines), tokenizer.target.encode(target_lines)
    gold_links, link_counts = get_gold_links(pairs), LinkCounts()
    lengths = [max(len(source), len(target)) for source, target in zip(sources, targets, strict=True)]
    kept = [row for row, length in enumerate(lengths) if length <= MAX_VALIDATION_PIECES]
    if too_long := [row + 1 for row, length in enumerate(lengths) if length > MAX_VALIDATION_PIECES]:
        log.warning(
            f"{pluralize(len(too_long), 'pair')} of more than {MAX_VALIDATION_PIECES:,} pieces "
            f"({format_first_lines(too_long)}): not counted in loss, accuracy, entropy and AER, but counted in BLEU"
        )
    totals = np.zeros(4)  # nats, correct, tokens, entropy

    def add_batch(places: list[int]) -> None:
        rows = [kept[place] for place in places]
        batch = make_batch([sources[row] for row in rows], [targets[row] for row in rows]).to(device)
        loss, weights_BTS = model.loss(batch.source_BS, batch.source_length_B, batch.target_BT)
        batch_entropy, weights = 0.0, None
        if weights_BTS is not None:
            batch_entropy = compute_entropy(weights_BTS)[batch.target_BT[:, 1:] != PAD].sum().item()
            weights = weights_BTS.cpu().numpy()
        # Only here, since memory may run out before.
        totals[:] += [loss.nats.item(), loss.correct.item(), int(batch.target_length_B.sum()), batch_entropy]
        if gold_links is None or weights is None:
            return
        for row, weights_TS in zip(rows, weights, strict=True):
            source = tokenizer.source.word_indices(source_lines[row], [*sources[row], EOS])
            target = tokenizer.target.word_indices(target_lines[row], [*targets[row], EOS])
            links = extract_links(weights_TS[: len(target), : len(source)], source, target)
            link_counts.add(links, gold_links[row])

    # Half the default batch size, because the decoder takes the target side as well.
    run_in_batches(add_batch, [lengths[row] for row in kept], default_batch_tokens(device) // 2)
    parts = all_gather((totals, link_counts))
    nats, correct, tokens, entropy = np.sum([part for part, _ in parts], axis=0).tolist()
    loss_per_token = accuracy = math.nan
    if tokens:
        loss_per_token, accuracy = nats / tokens, correct / tokens
    return {
        "loss": loss_per_token,
        "ppl": math.exp(min(loss_per_token, 700)),
        "accuracy": accuracy,
        "aer": sum((counts for _, counts in parts), LinkCounts()).scores()["aer"],
        "entropy": entropy / tokens if tokens and model.attends else None,
    }


def compute_entropy(weights_BTS: torch.Tensor) -> torch.Tensor:
    """Return entropy_BT, in nats, of each target position's weights normalized to sum 1; 0 where all are 0."""
    tiny = torch.finfo(weights_BTS.dtype).tiny
    return torch.special.entr(weights_BTS / weights_BTS.sum(2, keepdim=True).clamp(min=tiny)).sum(2)
