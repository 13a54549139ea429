"""Where two files that should translate each other line by line part, by the lengths of their lines."""

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]
OFFSETS = 16  # places at which lines may be lacking that are told apart
SMALL = 3  # bytes on top of a length, so that very short lines do not count for much
CAP = 1.0  # the most that a pair of lines may cost: a damaged one outweighs no others
CERTAIN = 5.0  # times what chance does: files that have nothing to do with each other reach 3


def first_gap(short: Lengths, long: Lengths) -> int | None:
    """How many lines go together before `short` lacks one for the first time; None where the lengths do not tell.

    In the spirit of Gale and Church (1993), lines that translate each other have similar lengths: a pair costs the
    difference of the logarithms. Line i of `short` goes with line i + j of `long`, where j rises from 0 to the number
    of lines that are lacking, in steps (the first `OFFSETS` of them by one); the cheapest way of rising is found by
    running minima, in time and memory proportional to the lines.

    That way must be cheaper than lacking all lines at the start or at the end. What it saves over both is, where chance
    alone is at work and there is one gap, as long as a normal vector of three dimensions, in standard deviations of a
    random walk; with more gaps it grows like the square root of their number.
    """
    count, lacking = len(short), len(long) - len(short)
    if not count:
        return None
    scaled = short.astype(np.float64) * (float(np.median(long)) / max(float(np.median(short)), 1.0))
    costs = (cost(scaled, long[offset : offset + count]) for offset in (*range(min(lacking, OFFSETS)), lacking))
    together = next(costs)  # without an offset
    best = totals(together)  # of the lines before each place
    at_end = best[-1]
    first = np.arange(count + 1)  # where the best way to a place leaves offset 0
    for shifted in costs:
        total = totals(shifted)
        saved = best - total
        lowest = np.minimum.accumulate(saved)
        first = first[np.maximum.accumulate(np.where(saved == lowest, np.arange(count + 1), 0))]
        best = total + lowest
    evidence = at_end + total[-1] - 2 * best[-1]
    chance = np.linalg.norm(shifted - together) * np.sqrt(min(lacking, OFFSETS))
    return int(first[-1]) if evidence > CERTAIN * chance else None


def cost(short: Numbers, long: Lengths) -> Numbers:
    return np.minimum(np.abs(np.log((short + SMALL) / (long + SMALL))), CAP)


def totals(costs: Numbers) -> Numbers:
    return np.concatenate(([0.0], np.cumsum(costs)))
