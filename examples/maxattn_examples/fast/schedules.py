"""A letter for each step of a run: X computes, . reuses, ? decides as it runs.

Each model of a pipeline has a schedule of its own: what one added is not what another would.

Sources: MagCache, Ma et al. 2025, https://arxiv.org/abs/2506.09045; intervals: DeepCache, Ma et al.
2023, https://arxiv.org/abs/2312.00858.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float

from maxattn.errors import ConfigError
from maxattn_examples.common.settings import Count

from .cache_settings import (
    COMPUTE,
    DECIDE,
    REUSE,
    CacheSettings,
    Ended,
    MagCacheSettings,
    ShapeSettings,
    TeaCacheSettings,
    ends_of,
)
from .curves import Facts, ratios_of, size_error
from .teacache import SIZES, teacache

FEW = 8  # steps: with fewer, what must be computed leaves next to nothing
SETTING = "sampling.fast.cache"
OF_TIMES = "it is computed from a model whose modulation is of the time alone, as Wan's is"


def letters_of(
    cache: CacheSettings | None, experts: Sequence[int], layers: int, facts: Facts | None = None
) -> str:
    """Return a letter for each step.

    Args:
        cache: `sampling.fast.cache`.
        experts: numbers of the steps of each model, in their order.
        layers: of a model.
        facts: of the run, for curves.

    Raises:
        ConfigError: settings that do not fit the run.
        ConfigErrors: a curve that does not.
    """
    steps, kind = sum(experts), None if cache is None else cache.kind
    if cache is None or kind is None:
        return COMPUTE * steps
    if cache.layers is not None and cache.layers[1] > layers:
        rule = f"the model has the layers 0 to {layers - 1}"
        remedy = f"write at most {layers} for the second number"
        raise ConfigError(f"{SETTING}.layers", list(cache.layers), rule, remedy)
    if cache.schedule is not None:
        return _as_written(cache.schedule, steps)
    if steps < FEW:
        rule = f"{kind} gains next to nothing in fewer than {FEW} steps"
        remedy = f"leave {SETTING}.{kind} out, or write the letters: {SETTING}.schedule"
        raise ConfigError("sampling.num_inference_steps", steps, rule, remedy)
    if cache.interval is not None:
        return "".join(_every(cache.interval, n) for n in experts)
    if cache.shape is not None:
        return "".join(_shaped(cache.shape, n) for n in experts)
    if (how := cache.magcache) is not None:
        assert how.ratios is not None, "they were filled in"
        ratios = ratios_of(how.ratios, steps, facts or Facts(), how.interpolate)
        parts = np.split(ratios, np.cumsum(experts)[:-1])
        return "".join(magcache(part, how) for part in parts)
    if cache.teacache is not None:
        return "".join(_of_times(cache.teacache, facts or Facts()))
    return "".join(_decided(cache, n, layers) for n in experts)


def magcache(ratios: Float[np.ndarray, "n b"], how: MagCacheSettings) -> str:
    """Return MagCache's schedule of a model.

    The ratios since the last computed step multiply to how much smaller what the layers add has
    become; its distance from 1 is the error of a step that reuses, and errors add up. A step with
    two predictions reuses if both may.

    Args:
        ratios: of each step, a column for each prediction.
        how: thresholds.
    """
    letters = ""
    product, error, row = np.ones(ratios.shape[1]), np.zeros(ratios.shape[1]), 0
    first, _ = ends_of(how, len(ratios))
    for i, ratio in enumerate(ratios):
        if i < first:
            letters += COMPUTE
            continue
        product = product * ratio
        error, row = error + np.abs(1 - product), row + 1
        reuse = bool((error < how.threshold).all()) and row <= how.most
        letters += REUSE if reuse else COMPUTE
        if not reuse:
            product, error, row = np.ones_like(product), np.zeros_like(error), 0
    return letters


def _of_times(how: TeaCacheSettings, facts: Facts) -> Iterator[str]:
    """Yield TeaCache's schedule of each model."""
    states = None if facts.states is None else facts.states(how.input)
    if states is None:
        remedy = f"set {SETTING}.first_block or {SETTING}.interval instead"
        raise ConfigError(f"{SETTING}.teacache", "given", OF_TIMES, remedy)
    if isinstance(name := how.polynomial, str):
        setting = f"{SETTING}.teacache.polynomial"
        if (problem := size_error(SIZES[name], facts, setting, name)) is not None:
            raise problem
    for own in states:
        yield teacache(own, how)


def _as_written(schedule: str, steps: int) -> str:
    if len(schedule) != steps:
        rule = f"it has a letter for each of the {steps} steps, and has {len(schedule)}"
        remedy = f"write {steps} letters, or set num_inference_steps={len(schedule)}"
        raise ConfigError(f"{SETTING}.schedule", schedule, rule, remedy)
    return schedule


def _every(interval: Count, steps: int) -> str:
    return "".join(COMPUTE if i % interval == 0 else REUSE for i in range(steps))


def _shaped(shape: ShapeSettings, steps: int) -> str:
    first, last = ends_of(shape, steps)
    letters = COMPUTE * first + shape.then * steps
    return (letters[: max(0, steps - last)] + COMPUTE * last)[:steps]


def _decided(cache: CacheSettings, steps: int, layers: int) -> str:
    """Return a model's letters where steps decide: all but the first and the last ones."""
    how, blocks = cache.first_block or cache.easycache, cache.first_block
    assert how is not None, "it is the last kind"
    if blocks is not None and blocks.blocks >= layers:
        rule = f"some layers come after the first ones, and the model has {layers} that it can skip"
        remedy = f"set it below {layers}"
        raise ConfigError(f"{SETTING}.first_block.blocks", blocks.blocks, rule, remedy)
    if how.threshold == 0:
        return COMPUTE * steps
    between = max(0, steps - how.first - how.last)
    return (COMPUTE * how.first + DECIDE * between + COMPUTE * how.last)[:steps]


def check_one_layer(cache: CacheSettings) -> None:
    """Refuse a cache that takes several layers; SDXL's UNet is one.

    Raises:
        ConfigError: naming its file, where it has one.
    """
    kind = str(cache.kind)
    own = getattr(cache, kind, None)
    named = {key: getattr(own, key, None) for key in ("calibrated", "ratios")}
    key, value = next(((k, x) for k, x in named.items() if isinstance(x, str)), ("", "given"))
    rules = {
        "teacache": OF_TIMES,
        "first_block": "its first layers decide about the rest, and this model has one layer, as"
        " SDXL's UNet",
    }
    if key:
        rules["magcache"] = "a curve is of layers that add to what they take, as a transformer's do"
    if kind in rules:
        remedy = f"set {SETTING}.interval instead, which needs no measurement"
        setting = f"{SETTING}.{kind}.{key}".rstrip(".")
        raise ConfigError(setting, value, rules[kind], remedy)


def check_reuse(cache: CacheSettings, experts: Sequence[int], letters: str, planned: str) -> None:
    """Refuse a cache with which no step can reuse anything.

    One that is set so is taken: a threshold of 0, or a schedule of X alone. A threshold that turns
    out too small is not known to be wrong, and `schedule_lines` says what it gives.

    Args:
        cache: `sampling.fast.cache`.
        experts: numbers of the steps of each model.
        letters: of the cache.
        planned: those of the steps, as they are planned.

    Raises:
        ConfigError: naming the cache.
    """
    kind = str(cache.kind)
    own = getattr(cache, kind, None)
    if own is None or set(planned) != {COMPUTE} or getattr(own, "threshold", None) == 0:
        return
    without, experts = f"{SETTING}=null, which draws the same", [n for n in experts if n]
    if isinstance(own, Ended) and all(sum(ends_of(own, n)) >= n for n in experts):
        most, parts = max(experts), " and ".join(map(str, experts))
        rule = "these steps compute, which leaves none to reuse anything: "
        rule += f"the run has {parts}" if len(experts) == 1 else f"the transformers have {parts}"
        keys: dict[str, float] = {"first": max(1, most // 5), "last": 1}
        keys = {"shape": {"first": 0.2, "last": 0}, "magcache": {"retained": 0.2}}.get(kind, keys)
        lower = " ".join(f"{SETTING}.{kind}.{key}={x:g}" for key, x in keys.items())
        value = "first {}, last {}".format(*ends_of(own, most))
        raise ConfigError(f"{SETTING}.{kind}", value, rule, f"set {lower}, or {without}")
    reuses = set(letters) != {COMPUTE}
    if reuses or kind in ("interval", "shape"):
        rule = f"with it no step of {len(letters)} reuses anything"
        why = ": the first one of each transformer and of each prediction computes, and one that"
        rule += f"{why} predicts zeros has nothing to reuse" if reuses else ""
        value = own if isinstance(own, str | int) else "given"
        raise ConfigError(f"{SETTING}.{kind}", value, rule, f"set {without}")


def schedule_lines(cache: CacheSettings | None, letters: str, zeros: int = 0) -> Iterator[str]:
    """Say the schedule, so that it can be written as `schedule`, and that all steps are computed.

    Args:
        cache: `sampling.fast.cache`.
        letters: of the steps, as they are planned.
        zeros: steps that predict zeros, which nothing computes.
    """
    if cache is None or cache.kind is None:
        return
    found = getattr(cache, cache.kind)
    threshold = getattr(found, "threshold", None)
    how = cache.kind if threshold is None else f"{cache.kind}, threshold {threshold:g}"
    if set(letters) == {COMPUTE}:
        computed = f"{len(letters) - zeros} of {len(letters)} steps are computed, the others zeros"
        computed = computed if zeros else f"all {len(letters)} steps are computed"
        yield f"{computed}: {how} reuses nothing"
    elif DECIDE in letters:
        yield f"schedule {letters}, {DECIDE} decided in the run ({how})"
    else:
        yield f"schedule {letters} ({how})"
