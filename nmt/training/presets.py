"""Settings that follow from the size of the corpus: one recipe for small corpora of any size (`by_pairs`)."""

import dataclasses
from collections.abc import Collection

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nmt.config import TrainRun
from nmt.data.mixing import load_mixture
from nmt.errors import UserError, suggest
from nmt.runtime.command_line import build_config, explain, schema_keys, to_dataclasses
from nmt.runtime.logging import log

SECTIONS = ("tokenizer", "model", "optim", "train")
WHY = {
    "tokenizer.vocab_size": "in few sentences only a small vocabulary's pieces are frequent",
    "model.embed": "the more pairs, the more a model can learn of each piece",
    "model.hidden": "the fewer the pairs, the sooner a large model knows them by heart",
    "model.encoder_layers": "more than one was better with 165,000 pairs, and not tried with fewer",
    "model.decoder_layers": "as many as in the encoder",
    "model.residual": "upper layers add to what lower ones found",
    "model.dropout": "it keeps a model from knowing few pairs by heart",
    "optim.lr": "the more layers, the lower the rate",
    "train.r_drop": "R-Drop, two passes over each batch, is for sizes at which it was measured to be better",
    "train.max_epochs": "a small corpus has few updates an epoch",
}


def apply_presets(run: TrainRun, given: Collection[str]) -> TrainRun:
    """The run with what `by_pairs` has for the number of its training pairs, in which those of `data.corpora` count by
    their weight; dotted keys that are `given` stay, and so do those whose table begins at more pairs.

    Raises:
        UserError: the table has no such key or a wrong value; or something is wrong with the text.
    """
    check(run)
    tables = {key: table for key, table in run.by_pairs.items() if table is not None and key not in given}
    run = dataclasses.replace(run, by_pairs={})  # it has done its work
    if not tables:
        return run
    loaded, shares = load_mixture(run.data)
    ends, weights = zip(*(shares or [(len(loaded), 1.0)]), strict=True)
    pairs = round(sum((end - start) * weight for start, end, weight in zip((0, *ends), ends, weights, strict=False)))
    config = build_config(TrainRun, dataclasses.asdict(run))
    begun = {key: table for key, table in tables.items() if min(table, default=pairs + 1) <= pairs}
    log.info(f"{pairs:,} training pairs, for which by_pairs has{'' if begun else ' nothing'}")
    for key, table in begun.items():
        least = max(bound for bound in table if bound <= pairs)
        above = min((bound for bound in table if bound > pairs), default=None)
        try:
            OmegaConf.update(config, key, table[least])
        except OmegaConfBaseException as error:
            raise UserError(f"by_pairs, {key}={table[least]}: {explain(error)}") from error
        bound = (f"from {least:,} to " if least else "") + f"below {above:,}" if above else f"from {least:,} on"
        log.info(f"  {key}={table[least]} ({bound})" + (f": {WHY[key]}" if key in WHY else ""))
    return to_dataclasses(config)


def check(run: TrainRun) -> None:
    """Refuse a table that cannot be."""
    if run.by_pairs and run.data.streaming:
        raise UserError("data.streaming=true knows no number of pairs, and by_pairs asks for it: write '~by_pairs'")
    known = [key for key in schema_keys(TrainRun) if key.partition(".")[0] in SECTIONS]
    for key in run.by_pairs:
        if key not in known or any(other.startswith(f"{key}.") for other in known):
            raise UserError(
                f"by_pairs: {key} is no key of {', '.join(SECTIONS[:-1])} or {SECTIONS[-1]}{suggest(key, known)}"
            )
