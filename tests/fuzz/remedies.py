"""Follow remedies: after the named setting is set, the call runs or fails differently.

Settings that a plan or the config refuses are drawn. Each remedy that names a setting and a value
is followed, and so are those of the errors after it: none may lead in a circle.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any, NamedTuple

import jax
import numpy as np

import maxattn as ma
from maxattn import masks
from maxattn.errors import MaxattnError
from tests.fuzz import plans
from tests.fuzz.case import Case, Machine, Names, Wrong
from tests.fuzz.settings import STRATEGIES, draw_some

State = Mapping[str, Any]
SOURCE = """\
from tests.fuzz.remedies import {how} as attempt, follow
paths = follow({state!r}, attempt)
"""
MOST, DEEPEST = 40, 6
DTYPE = re.compile(r"(?:cast q, k and v to|use) (bfloat16|float32|float16)\b")
SETTING = re.compile(r"\b([a-z_]+): (?:(true|false)\b|([\w.]+)((?: or \w+)*)(?! *\())")
TO = re.compile(r"\bset ([a-z_]+) to (\w+)")
WITH = re.compile(r"--with ([\w-]+)=([\w.]+)")
BATCH = re.compile(r"use a batch of (\d+)")
MEANT = re.compile(r"did you mean '([^']*)'\?")
WRITE = re.compile(r"^write (\S+?)(?:,? without quotes|,|$| or )")
# A way out that asks for more than a setting is not followed.
MORE = ("more devices", "fewer devices", "ids to", "pad ", "another")


class Step(NamedTuple):
    """An error on the way, and the state that it refused."""

    state: State
    error: tuple[str, str, str]
    remedy: str


def follow(state: State, attempt: Callable[[State], None]) -> list[tuple[Step, ...]]:
    """Return the circles: remedies that lead back to the error that named them.

    A circle over several errors does not count if another remedy of one of them runs, unless that
    only replaces the kernel or the strategy, as `fallback` does.
    """
    circles: list[tuple[Step, ...]] = []
    left: set[tuple[str, str, str]] = set()  # refusals out of which a way leads
    open_ways: list[tuple[tuple[Step, ...], State]] = [((), state)]
    seen = {str(state)}
    while open_ways and len(seen) < MOST:
        way, state = open_ways.pop()
        try:
            attempt(state)
        except MaxattnError as error:
            error = getattr(error, "errors", (error,))[0]
            fault = (str(error.setting), str(error.value), str(error.rule))
            is_circle = any(fault == step.error for step in way)
            way = (*way, Step(state, fault, str(error.remedy)))
        else:
            if not _falls_back(state):
                left |= {step.error for step in way if not _falls_back(step.state)}
            continue
        if is_circle:
            circles.append(way)
        elif len(way) < DEEPEST:
            ways = outcomes_of(way[-1].remedy, fault[0], state)
            new = {str(other): other for other in ways if str(other) not in seen}
            seen |= new.keys()
            open_ways += [(way, other) for other in new.values()]
    return [way for way in circles if way[-1].error == way[-2].error or not _leaves(way, left)]


def _falls_back(state: State) -> bool:
    return state["settings"].get("fallback") in ("warn", "allow")


def _leaves(way: tuple[Step, ...], left: set[tuple[str, str, str]]) -> bool:
    return any(step.error in left for step in way)


def outcomes_of(remedy: str, setting: str, state: State) -> Iterator[State]:
    """Return the states after each remedy that names a setting, a dtype, a package or a size."""
    last = setting
    for part in re.split(r"[;,] or (?:set |in Python )?", remedy):
        if any(word in part for word in MORE):
            continue
        changes: list[dict[str, Any]] = [{}]
        known = [m for m in SETTING.finditer(part) if m[1] in ma.AttentionConfig.model_fields]
        for found in known:
            values = [found[2] == "true"] if found[2] else [found[3], *found[4].split(" or ")[1:]]
            changes = [c | {found[1]: _value(v)} for c in changes for v in values]
            last = found[1]
        if found := TO.search(part):
            changes = [{found[1]: _value(found[2])}]
        words = re.sub(r"^(use|set) ", "", part).split(" with ")[0]
        if setting in ("context_parallel", "attention", last) and words in (*STRATEGIES, "one_way"):
            key = "context_parallel" if words in STRATEGIES else last
            changes = [c | {key: words} for c in changes]
        for change in changes:
            if change:
                yield {**state, "settings": {**state["settings"], **change}}
        yield from _other_than_settings(part, setting, state)


def _other_than_settings(part: str, setting: str, state: State) -> Iterator[State]:
    settings, key = state["settings"], setting.rpartition(".")[2]
    if found := DTYPE.search(part):
        yield {**state, "dtype": found[1]}
    if found := WITH.search(part):
        kept = [p for p in state["packages"] if p[0] != found[1]]
        yield {**state, "packages": (*kept, (found[1], found[2]))}
    if found := BATCH.search(part):
        yield {**state, "b": int(found[1])}
    if "bias.astype(q.dtype)" in part:
        yield {**state, "bias_dtype": state["dtype"]}
    if found := MEANT.search(part):
        if setting in settings and setting not in ma.AttentionConfig.model_fields:
            renamed = {found[1] if k == setting else k: v for k, v in settings.items()}
            yield {**state, "settings": renamed}
        elif key in settings:
            yield {**state, "settings": {**settings, key: found[1]}}
    elif (found := WRITE.search(part)) and key in settings and found[1] not in ("one", "a", "its"):
        yield {**state, "settings": {**settings, key: found[1]}}
    elif part.startswith("remove the line") and key in settings:
        yield {**state, "settings": {k: v for k, v in settings.items() if k != key}}


def _value(text: str | bool) -> Any:
    return int(text) if isinstance(text, str) and text.isdigit() else text


# ---- what is attempted ---------------------------------------------------------------------------


def plan(state: State) -> None:
    """Make a plan."""
    s, dtype = state, state["dtype"]
    target = ma.Target.named(s["target"], packages=s["packages"])
    shapes = (s["b"], s["t"], s["n"], s["h"]), (s["b"], s["s"], s["k"], s["h"])
    q, k = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    bias = s["bias"] and jax.ShapeDtypeStruct((1, 1, 1, s["s"]), s["bias_dtype"])
    mask = eval(s["mask"], {"M": masks, "np": np})  # drawn masks are text
    call = ma.Call.of(q, k, mask=mask, bias=bias, return_lse=s["lse"], role=s["role"])
    ma.plan(call, ma.AttentionConfig(**s["settings"]), s["mesh"], target).explain()


def overrides(state: State) -> None:
    """Convert settings to command-line overrides."""
    text = {k: str(v).lower() if isinstance(v, bool) else v for k, v in state["settings"].items()}
    ma.AttentionConfig.from_overrides([f"{key}={value}" for key, value in text.items()])


def draw(rng: Random, machine: Machine) -> Case:
    """Draw a call that a plan may refuse, or settings of which one is mistyped."""
    settings: dict[str, Any] = {"context_parallel": rng.choice(STRATEGIES)}
    settings |= draw_some(rng, plans.SETTINGS, 0.15)
    settings |= {
        key: rng.choice(("auto", *plans.KERNELS)) for key in ("attention", "cross_attention")
    }
    if rng.random() < 0.25:
        return _case("overrides", {"settings": _mistyped(rng, settings)})
    axes = plans.draw_mesh(rng)
    sizes = plans.draw_sizes(rng, axes or {})
    state = sizes._asdict() | {
        "settings": settings, "mesh": axes, "target": rng.choice(plans.TARGETS),
        "packages": tuple(p for p in plans.PACKAGES if rng.random() < 0.6),
        "dtype": rng.choice(plans.DTYPES), "bias_dtype": rng.choice(plans.DTYPES),
        "mask": plans.draw_mask(rng, sizes), "role": rng.choice(plans.ROLES),
        "lse": rng.random() < 0.2, "bias": rng.random() < 0.15 or None,
    }  # fmt: skip
    return _case("plan", state)


def _mistyped(rng: Random, settings: dict[str, Any]) -> dict[str, Any]:
    """Misspell a key or value: drop, double or exchange letters, or change case."""
    key = rng.choice(list(settings))
    text = str(rng.choice([key, settings[key]]))
    at = rng.randrange(len(text))
    wrong = rng.choice(
        [text[:at] + text[at + 1 :], text[:at] + text[at:][:1] + text[at:], text.upper(),
         text[:at] + text[at:][1:2] + text[at] + text[at + 2 :], f'"{text}"', f"{text}.5"]
    )  # fmt: skip
    if text == key:
        return {wrong if k == key else k: v for k, v in settings.items()}
    return settings | {key: wrong}


def _case(how: str, state: State) -> Case:
    return Case(SOURCE.format(how=how, state=state), check, seconds=60)


def check(names: Names) -> None:
    """Raise `Wrong` if a remedy leads back to the error that named it."""
    for way in names["paths"]:
        steps = "\n".join(f"{' '.join(step.error)} -> {step.remedy}" for step in way)
        show = "for step in paths[0]:\n    print(step)"
        raise Wrong(f"a remedy leads in a circle:\n{steps}", show)
