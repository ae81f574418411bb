"""How sure a mean over documents is: documents are the sampled units, since tokens of one document are not independent.

Documents are given in an order that does not depend on how they were read, so that resampling with a fixed seed gives
the same interval for the same texts in any order and on any number of processes.
"""

from __future__ import annotations

import math

import numpy as np

RESAMPLES = 1000
_BLOCK = 2**22  # counts drawn at once, 32 MiB


def standard_error(sums: np.ndarray, counts: np.ndarray) -> float | None:
    """Return the standard error of sum(sums) / sum(counts) (Cochran 1977, section 2.11); None for one document.

    Args:
        sums, counts: (documents,) float64 numerators and denominators.
    """
    n = len(sums)
    if n < 2:
        return None
    total = math.fsum(counts)
    residuals = sums - math.fsum(sums) / total * counts
    return math.sqrt(math.fsum(residuals**2) * n / (n - 1)) / total


def bootstrap(sums: np.ndarray, counts: np.ndarray, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the 2.5 % and 97.5 % quantiles of sum(sums) / sum(counts) over resampled documents; None for one document.

    Percentile bootstrap (Efron 1979) with 1,000 resamples.

    Args:
        sums: (documents, values) or (documents,) float64 numerators.
        counts: (documents,) denominators.
        seed: of the resampling.
    """
    n = len(sums)
    if n < 2:
        return None
    generator = np.random.default_rng(seed)
    means = []
    step = max(1, _BLOCK // n)
    for first in range(0, RESAMPLES, step):
        size = min(step, RESAMPLES - first)
        times = generator.multinomial(n, np.full(n, 1 / n), size=size).astype(np.float64)  # (resamples, documents)
        totals = times @ counts  # (resamples,)
        means.append((times @ sums) / (totals if sums.ndim == 1 else totals[:, None]))
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975], axis=0)
    return low, high


def wilson(hits: float, trials: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of `trials` independent trials (Wilson 1927), within 0 and 1.

    Unlike a bootstrap it does not call a share of 0 or 1 certain. Trials that count by parts make it too wide.
    """
    z, share = 1.959964, hits / trials
    middle = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2)
    scale = 1 + z * z / trials
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)
