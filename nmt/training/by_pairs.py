"""Settings that depend on the size of the corpus (`by_pairs`): one recipe for small corpora of any size."""

import dataclasses
from collections.abc import Collection

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nmt.config import TrainRun
from nmt.data.mixing import load_mixture
from nmt.errors import UserError, suggest
from nmt.system.command_line import build_config, describe_error, list_keys, to_dataclasses
from nmt.system.logging import log

BY_PAIRS_SECTIONS = ("tokenizer", "augment", "model", "optim", "train")


def apply_by_pairs(run: TrainRun, given: Collection[str]) -> TrainRun:
    """Apply the values of `by_pairs` for the number of training pairs, and return the run.

    Pairs of `data.corpora` count by their weight. Keys in `given` (dotted) keep their values, as do keys whose table
    starts at more pairs. With `augment` in `given` (`'~augment'`) pairs are not changed at any size.

    Raises:
        UserError: the table has an unknown key or an invalid value, or the text is invalid.
    """
    check_by_pairs(run)
    left_out = [key for key in run.by_pairs if key in given or key.startswith("augment.") and "augment" in given]
    tables = {key: table for key, table in run.by_pairs.items() if table is not None and key not in left_out}
    run = dataclasses.replace(run, by_pairs={})  # the settings below replace it
    if not tables:
        return run
    loaded, shares = load_mixture(run.data)
    ends, weights = zip(*(shares or [(len(loaded), 1.0)]), strict=True)
    pairs = round(sum((end - start) * weight for start, end, weight in zip((0, *ends), ends, weights, strict=False)))
    config = build_config(TrainRun, dataclasses.asdict(run))
    tables = {key: table for key, table in tables.items() if min(table, default=pairs + 1) <= pairs}
    if tables:
        log.info(f"by_pairs settings for {pairs:,} training pairs:")
    else:
        log.info(f"no by_pairs setting applies to {pairs:,} training pairs")
    for key, table in tables.items():
        lower = max(bound for bound in table if bound <= pairs)
        upper = min((bound for bound in table if bound > pairs), default=None)
        try:
            OmegaConf.update(config, key, table[lower])
        except OmegaConfBaseException as error:
            raise UserError(f"by_pairs, {key}={table[lower]}: {describe_error(error)}") from error
        if upper is None:
            interval = f"from {lower:,} on"
        else:
            interval = f"from {lower:,} to below {upper:,}" if lower else f"below {upper:,}"
        log.info(f"  {key}={table[lower]} ({interval})")
    return to_dataclasses(config)


def check_by_pairs(run: TrainRun) -> None:
    """Raise a `UserError` if a key of `by_pairs` is unknown, or if the text is streamed."""
    if run.by_pairs and run.data.streaming:
        raise UserError(
            "by_pairs needs the number of pairs, which is unknown with data.streaming=true; use '~by_pairs'"
        )
    known = [key for key in list_keys(TrainRun) if key.partition(".")[0] in BY_PAIRS_SECTIONS]
    sections = f"{', '.join(BY_PAIRS_SECTIONS[:-1])} or {BY_PAIRS_SECTIONS[-1]}"
    for key in run.by_pairs:
        if key not in known:
            raise UserError(f"by_pairs: {key} is not a key of {sections}{suggest(key, known)}")
