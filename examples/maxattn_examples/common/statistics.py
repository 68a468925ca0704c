"""Distances of samples and of distributions, and tests of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float


def drift(x: Float[np.ndarray, "B ..."], of: Float[np.ndarray, "B ..."]) -> Float[np.ndarray, " B"]:
    """Return the relative distance of samples from reference samples `of`: |x - of| / |of|."""
    x, of = (np.asarray(a, np.float64).reshape(len(a), -1) for a in (x, of))
    return np.linalg.norm(x - of, axis=1) / np.linalg.norm(of, axis=1)


def frechet(a: Float[np.ndarray, "n D"], b: Float[np.ndarray, "m D"]) -> float:
    """Return the Frechet distance of two normal distributions fitted to features.

    |mean a - mean b|^2 + tr(A + B - 2 (A B)^(1/2)), with the covariances A and B.

    Source: Heusel et al. 2017, https://arxiv.org/abs/1706.08500.
    """
    if min(len(a), len(b)) < 2:
        return float("inf")
    apart = a.mean(0) - b.mean(0)
    first, second = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    values, vectors = np.linalg.eigh(first)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    both = np.linalg.eigvalsh(root @ second @ root)
    return float(
        apart @ apart + np.trace(first) + np.trace(second) - 2 * np.sqrt(np.maximum(both, 0)).sum()
    )


class Paired(NamedTuple):
    """The difference of two ways of sampling, over the same clips.

    Args:
        mean: mean difference of the scores.
        better, worse: number of clips whose score is better, or worse.
        p: of Wilcoxon's signed-rank test, two-sided; 1 if no clip differs.
    """

    mean: float
    better: int
    worse: int
    p: float


def paired(
    ours: Float[np.ndarray, " n"], theirs: Float[np.ndarray, " n"], better: int = 1
) -> Paired:
    """Compare scores of the same clips.

    Args:
        better: 1 if larger scores are better, -1 if smaller ones are.
    """
    from scipy.stats import wilcoxon

    apart = better * (np.asarray(ours, np.float64) - np.asarray(theirs, np.float64))
    differ = apart[np.abs(apart) > 1e-12]
    tested: Any = wilcoxon(differ) if len(differ) else None
    mean = float(better * apart.mean())
    p = 1.0 if tested is None else float(tested.pvalue)
    return Paired(mean, int((differ > 0).sum()), int((differ < 0).sum()), p)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table in Markdown."""
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
