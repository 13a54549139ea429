"""Measure translation speed: one sentence at a time, many sentences at once, and long sentences.

python scripts/bench_search.py                           # LSTM of 512, 8,000 pieces, on the CPU
python scripts/bench_search.py size=gnmt device=cuda     # eight LSTM layers of 1,024, 32,000 pieces, on a GPU

Weights are random, and `</s>` is never generated, so translations have a fixed length and the work is that of a trained
model. Times are medians, without loading and tokenization. Other settings: rounds=15.
"""

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable

import torch
from settings import parse_settings

from nmt.config import EOS, AttentionConfig, ModelConfig, SearchConfig
from nmt.data.tokenizer import SPECIALS
from nmt.decoding.search import stream_search
from nmt.model.kernels.cuda_graphs import with_cuda_graphs
from nmt.model.seq2seq import Seq2Seq, build_model
from nmt.system.device import choose_device, prepare_model

SENTENCE_PIECES = 16  # per sentence, as for 12 words of Multi30k
SOURCE_LENGTHS = (50, 100, 200, 500, 1000)
WINDOWS = ("global", "local_m", "local_p")
SMALL = ModelConfig(style="luong", embed=256, hidden=512, attention=AttentionConfig(score="additive"))
GNMT = ModelConfig(
    style="gnmt",
    embed=1024,
    hidden=1024,
    encoder_layers=4,
    decoder_layers=4,
    residual=True,
    bridge="last",
    attention=AttentionConfig(score="additive"),
)
SIZES = {"small": (SMALL, 8000, 64), "gnmt": (GNMT, 32000, 512)}  # model, vocabulary size, sentences per batch


def build_random_model(config: ModelConfig, vocabulary: int, device: torch.device, precision: str) -> Seq2Seq:
    torch.manual_seed(1)
    model = build_model(config, vocabulary, vocabulary).eval()
    with torch.no_grad():
        model.output.bias[EOS] = -1e4  # translations get the maximum length
    prepare_model(model, precision, device)
    return model


def measure_seconds(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Return the median seconds of `rounds` calls, after one warm-up."""
    times = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def measure_translation(
    model: Seq2Seq, device: torch.device, rounds: int, sentences: int, positions: int, written: int, beam: int
) -> float:
    """Return the seconds to translate `sentences` of `positions` pieces into `written` pieces each."""
    source_BS = torch.randint(len(SPECIALS), model.output.out_features, (sentences, positions), device=device)
    config = SearchConfig(beam=beam, max_length=written)
    length_B = torch.full((sentences,), positions, device=device)
    quick = with_cuda_graphs(model, device)
    return measure_seconds(lambda: list(stream_search(quick, source_BS, length_B, config)), device, rounds)


def main() -> None:
    settings = parse_settings(size="small", device="auto", rounds="15")
    if settings["size"] not in SIZES:
        sys.exit(__doc__)
    device, rounds = choose_device(settings["device"]), int(settings["rounds"])
    config, vocabulary, many = SIZES[settings["size"]]
    precisions = ("fp32", "bf16", "int8") if device.type == "cpu" else ("fp32", "bf16")
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    print(f"size={settings['size']} on {device}{threads}; {SENTENCE_PIECES} pieces in, {SENTENCE_PIECES} out\n")

    print(f"{'':<12}{'greedy, 1 sentence':>20}{f'beam 5, {many} sentences':>26}")
    for precision in precisions:
        model = build_random_model(config, vocabulary, device, precision)
        one = measure_translation(model, device, rounds, 1, SENTENCE_PIECES, SENTENCE_PIECES, 1)
        all_of_them = measure_translation(model, device, max(1, rounds // 3), many, SENTENCE_PIECES, SENTENCE_PIECES, 5)
        print(f"{precision:<12}{one * 1e3:>17.1f} ms{many / all_of_them:>14,.0f} sentences/s", flush=True)

    print(f"\nmilliseconds a written piece, beam 5, fp32, for sources of so many pieces, 20 written\n{'':<12}", end="")
    print("".join(f"{positions:>9,}" for positions in SOURCE_LENGTHS))
    for window in WINDOWS:
        attention = dataclasses.replace(config.attention, window=window)
        model = build_random_model(dataclasses.replace(config, attention=attention), vocabulary, device, "fp32")
        print(f"{window:<12}", end="", flush=True)
        for positions in SOURCE_LENGTHS:
            short, long = (measure_translation(model, device, max(1, rounds // 3), 1, positions, n, 5) for n in (4, 24))
            print(f"{(long - short) / 20 * 1e3:>9.2f}", end="", flush=True)
        print()


if __name__ == "__main__":
    main()
