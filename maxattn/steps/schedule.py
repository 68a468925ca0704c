"""A letter for each step of a model: X computes, . reuses, ? decides in the run.

Sources: MagCache, Ma et al. 2025, https://arxiv.org/abs/2506.09045; intervals: DeepCache, Ma et al.
2023, https://arxiv.org/abs/2312.00858; first block: https://github.com/chengzeyi/ParaAttention.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np
from jaxtyping import Float

from maxattn.errors import ConfigError
from maxattn.steps.settings import COMPUTE, DECIDE, REUSE, CacheSettings, MagCacheSettings


def letters_of(
    cache: CacheSettings | None, counts: Sequence[int], model: int, layers: int, place: str
) -> str:
    """Return the letters of the steps of one model of a pipeline.

    Each model has its own schedule, since sums of one model's layers do not fit another's.

    Args:
        cache: the settings, named `place` in errors; None computes every step.
        counts: numbers of the steps of each model of the run.
        model: number of the model.
        layers: number of layers of a model.

    Raises:
        ConfigError: the settings do not fit the run.
    """
    n, total = counts[model], sum(counts)
    if cache is None or not n:
        return COMPUTE * n
    if cache.layers is not None and cache.layers[1] > layers:
        rule = f"the model has the layers 0 to {layers - 1}"
        remedy = f"write at most {layers} for the second number"
        raise ConfigError(f"{place}.layers", list(cache.layers), rule, remedy)
    own = cache.first_block
    if own is not None and own.blocks >= layers:
        rule = f"its first layers decide about the rest, and the model has {layers}"
        remedy = "set interval instead" if layers == 1 else f"set it below {layers}"
        raise ConfigError(f"{place}.first_block.blocks", own.blocks, rule, remedy)
    if cache.schedule is not None:
        if len(cache.schedule) != total:
            rule = f"it has a letter for each of the {total} steps, and has {len(cache.schedule)}"
            remedy = f"write {total} letters, or run {len(cache.schedule)} steps"
            raise ConfigError(f"{place}.schedule", cache.schedule, rule, remedy)
        return cache.schedule[sum(counts[:model]) :][:n]
    if cache.interval is not None:
        return "".join(COMPUTE if i % cache.interval == 0 else REUSE for i in range(n))
    if (shape := cache.shape) is not None:
        first, last = (ceil(share * n - 1e-9) for share in (shape.first, shape.last))
        return _between(max(1, first), last, shape.then * n, n)
    if cache.magcache is not None:
        curve = _curve(cache.magcache, total, f"{place}.magcache.ratios")
        return _magcache(np.split(curve, np.cumsum(counts)[:-1])[model], cache.magcache)
    if own is not None and own.threshold:
        return _between(own.first, own.last, DECIDE * n, n)
    return COMPUTE * n


def _between(first: int, last: int, letters: str, n: int) -> str:
    """Return n letters: X for some steps at the start and at the end, others between them."""
    return ((COMPUTE * first + letters)[: max(0, n - last)] + COMPUTE * last)[:n]


def _curve(how: MagCacheSettings, steps: int, setting: str) -> Float[np.ndarray, "n 2"]:
    """Return the ratios of each step, with the text and without."""
    if isinstance(how.ratios, str):
        raise ConfigError(setting, how.ratios, "it names a file", "read it, and give its numbers")
    curve = np.array([x if isinstance(x, tuple) else (x, x) for x in how.ratios], np.float64)
    if len(curve) != steps and not how.interpolate:
        rule = f"it is a curve of {len(curve)} steps, and the run has {steps}"
        remedy = f"run {len(curve)} steps, measure a curve of {steps}, or set interpolate: true"
        raise ConfigError(setting, f"{len(curve)} ratios", rule, remedy)
    # The first and the last step of one are those of the other.
    places = np.round(np.linspace(0, len(curve) - 1, steps)) if steps > 1 else [len(curve) - 1]
    return curve[np.asarray(places, int)]


def _magcache(ratios: Float[np.ndarray, "n 2"], how: MagCacheSettings) -> str:
    """Return MagCache's schedule of a model.

    The ratios since the last computed step multiply to the relative size of the layers' sum. Its
    distance from 1 is the error of a step that reuses, and errors add up. A step with two
    predictions reuses only if both may.
    """
    letters = COMPUTE * max(1, int(how.retained * len(ratios) + 0.5))
    product, error, row = np.ones(2), np.zeros(2), 0
    for ratio in ratios[len(letters) :]:
        product = product * ratio
        error, row = error + np.abs(1 - product), row + 1
        reuse = bool((error < how.threshold).all()) and row <= how.most
        letters += REUSE if reuse else COMPUTE
        if not reuse:
            product, error, row = np.ones(2), np.zeros(2), 0
    return letters
