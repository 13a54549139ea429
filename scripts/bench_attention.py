"""Measure a decoder step with a global and with a local attention window, for short and for long sources.

python scripts/bench_attention.py

Times are processor time per step on one thread, in decoding (greedy, and with beam 5) and in training (forward and
backward), medians of runs that take turns. Work done once per sentence, such as encoding, projecting the keys, and
adding up the gradient of its memory, does not count: the time of a step is the difference between long and short
targets.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from nmt.config import AttentionConfig, ModelConfig
from nmt.model.decoder import RecurrentDecoder, RecurrentState
from nmt.model.windows import Memory
from nmt.system.standard_streams import use_utf8

LENGTHS = (40, 1000)  # source positions
SENTENCES, HIDDEN, HALF_WIDTH = 8, 256, 10
STEPS = (4, 24)  # target positions of the short and the long run
WARM_UP, ROUNDS = 2, 15
Run = Callable[[int], None]


def build_decoder(window: str, positions: int) -> tuple[RecurrentDecoder, Memory, RecurrentState]:
    """Return a decoder, and encoded sentences of the given length."""
    torch.manual_seed(1)
    attention = AttentionConfig(window=window, half_width=HALF_WIDTH)
    decoder = RecurrentDecoder(ModelConfig(embed=HIDDEN, hidden=HIDDEN, dropout=0.0, attention=attention))
    outputs_BSM = torch.randn(SENTENCES, positions, HIDDEN)
    with torch.no_grad():
        memory, state = decoder.start(outputs_BSM, [outputs_BSM[:, -1]], torch.full((SENTENCES,), positions))
    return decoder, memory, state


def make_decoding_run(decoder: RecurrentDecoder, memory: Memory, state: RecurrentState, beam: int) -> Run:
    """Return run(steps), which decodes one token at a time, as in search."""
    first = state.select(torch.arange(SENTENCES).repeat_interleave(beam))
    embedded_N1E = torch.randn(SENTENCES * beam, 1, HIDDEN)

    @torch.inference_mode()
    def run(steps: int) -> None:
        state = first
        for _ in range(steps):
            _, _, state = decoder(embedded_N1E, state, memory)

    return run


def make_training_run(decoder: RecurrentDecoder, memory: Memory, state: RecurrentState) -> Run:
    """Return run(steps), a forward and backward pass of teacher forcing, with the gradients of keys and values."""
    embedded_BTE = torch.randn(SENTENCES, max(STEPS), HIDDEN)
    keys, values = memory.keys_BHSA.clone().requires_grad_(), memory.values_BHSM.clone().requires_grad_()
    learned = memory._replace(keys_BHSA=keys, values_BHSM=values)
    learn = [keys, values, *decoder.parameters()]

    def run(steps: int) -> None:
        features_BTD, _, _ = decoder(embedded_BTE[:, :steps], state, learned)
        torch.autograd.grad(features_BTD.sum(), learn, allow_unused=True)

    return run


def measure_step_ms(runs: list[Run]) -> list[float]:
    """Return the milliseconds per step of each run; the runs take turns."""
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(WARM_UP + ROUNDS):
        for run, own in zip(runs, times, strict=True):
            short, long = (measure_ms(run, steps) for steps in STEPS)
            if turn >= WARM_UP:
                own.append((long - short) / (STEPS[1] - STEPS[0]))
    return [statistics.median(own) for own in times]


def measure_ms(run: Run, steps: int) -> float:
    started = time.process_time()
    run(steps)
    return (time.process_time() - started) * 1e3


def main() -> None:
    torch.set_num_threads(1)
    torch.zeros(7 * 2**20)  # once freed, glibc keeps memory of this size; otherwise page faults would dominate
    print(f"milliseconds per step of {SENTENCES} sentences: score additive, size {HIDDEN}, half_width {HALF_WIDTH}\n")
    print(
        f"{'window':<10}{'':<10}" + "".join(f"{f'S = {positions:,}':>12}" for positions in LENGTHS) + f"{'change':>10}"
    )
    for window in ("local_m", "local_p", "global"):
        parts = [build_decoder(window, positions) for positions in LENGTHS]
        for what, build in RUN_BUILDERS.items():
            short, long = measure_step_ms([build(*part) for part in parts])
            print(f"{window:<10}{what:<10}{short:>12.2f}{long:>12.2f}{long / short - 1:>+10.0%}", flush=True)


RUN_BUILDERS: dict[str, Callable[[RecurrentDecoder, Memory, RecurrentState], Run]] = {
    "greedy": partial(make_decoding_run, beam=1),
    "beam 5": partial(make_decoding_run, beam=5),
    "training": make_training_run,
}

if __name__ == "__main__":
    use_utf8()
    main()
