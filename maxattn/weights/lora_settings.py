"""How strong LoRA weights are, as their metadata say: the header that diffusers writes, or peft's
adapter_config.json.

    W' = W + alpha / rank * B A, or alpha / sqrt(rank) with use_rslora

Sources: Hu et al., https://arxiv.org/abs/2106.09685; Kalajdzievski,
https://arxiv.org/abs/2312.03732 (rsLoRA).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

from maxattn.config.errors import printable, show
from maxattn.config.numbers import finite
from maxattn.config.plain_json import parse_json, read_json
from maxattn.errors import WeightsError
from maxattn.weights.files import SafeTensors

HEADER, CONFIG, PEFT_FILE = "lora_adapter_metadata", "adapter_config.json", "adapter_model"
MOST_BYTES = 4 * 2**20  # of metadata, which name some thousand layers at most
MOST_PATTERNS = 10_000
# Python's `re` can need more time for a short expression than there is, and the file is not ours.
_PATTERN = re.compile(r"\^?(?:[\w-]|\.\*|\\?\.)+\$?")
_PLAIN_FIRST = ("gaussian", "eva", "orthogonal")  # they leave the kernels as they are
_OTHER_KINDS = ("layer_replication", "alora_invocation_tokens", "arrow_config")
_AGAIN = "save the LoRA again, or give its tensors with <layer>.alpha as a state dict"
_MERGE = "merge it with peft, and load the merged model"


@dataclass(frozen=True)
class Strength:
    """The factor of each layer's `B A`.

    Args:
        alpha: of the layers that no pattern names; None is the rank.
        patterns: of names, and their alphas; the first that matches counts.
        rooted: alpha is divided by the root of the rank, as rsLoRA does.
    """

    alpha: float | None = None
    patterns: tuple[tuple[str, float], ...] = ()
    rooted: bool = False

    def of(self, layer: str, rank: int) -> float:
        """Return the factor of one layer."""
        alpha = next((a for key, a in self.patterns if names_layer(key, layer)), self.alpha)
        if alpha is None:
            return 1.0
        return alpha / (sqrt(rank) if self.rooted else rank)


def names_layer(key: str, layer: str) -> bool:
    """Whether a key of peft's alpha_pattern names a layer.

    peft writes a layer's name or the end of one, diffusers the whole name behind `^`; `.*` is any
    text. peft matches `(.*\\.)?(key)$`; here `.` is a dot, and nothing is tried twice.

    >>> keys = ("to_q", "0.to_q", "^to_q", "^blocks.*_q")
    >>> [names_layer(key, "blocks.10.to_q") for key in keys]
    [True, False, False, True]
    """
    begin = "^." if key.startswith("^") else "."
    *parts, end = (begin + key.strip("^$").replace("\\.", ".")).split(".*")
    rest = f"^.{layer}"
    for part in filter(None, parts):
        _, found, rest = rest.partition(part)
        if not found:
            return False
    return rest.endswith(end)


def read_strength(held: Mapping[str, Any], prefix: str) -> Strength:
    """Read the metadata of LoRA weights; without any, as of a state dict, alpha is the rank.

    Args:
        held: the tensors; of `SafeTensors`, the headers are read and no tensor.
        prefix: of their names, which picks the part of a pipeline if there are settings of several.

    Raises:
        WeightsError: they are no JSON, are for other parts of a pipeline, have no finite alpha, or
            are of another method than LoRA.
    """
    where, said = _metadata(held) if isinstance(held, SafeTensors) else ("", {})
    if not where:
        return Strength()
    settings = _part(where, said, prefix)
    settings.check_method()
    alpha = settings.number("lora_alpha", settings.values.get("lora_alpha"))
    return Strength(alpha, settings.patterns(), settings.flag("use_rslora"))


def _metadata(held: SafeTensors) -> tuple[str, dict[str, Any]]:
    """Return the place of the metadata and the settings, ("", {}) if there are none.

    A header counts before a file beside it, which may be older. peft's file of settings is for its
    folder, or for the tensors that peft names.
    """
    texts = {header[HEADER] for header in held.headers() if HEADER in header}
    if len(texts) > 1:
        rule = f"the files of one LoRA say the same in {HEADER}"
        found = f"{held.path}: {len(texts)} sets of metadata"
        raise WeightsError("LoRA", found, rule, "fetch the folder again")
    path = held.path
    config = (path if path.is_dir() else path.parent) / CONFIG
    if texts:
        where, read = f"{HEADER} of {path}", partial(parse_json, texts.pop())
    elif (path.is_dir() or path.name.startswith(PEFT_FILE)) and config.is_file():
        where, read = str(config), partial(read_json, config, MOST_BYTES)
    else:
        return "", {}
    try:
        said = read()
    except (OSError, ValueError) as error:
        rule = f"LoRA's metadata are JSON, and whole: {error}"
        raise WeightsError("LoRA", where, rule, _AGAIN) from error
    if not isinstance(said, dict):
        rule = f"LoRA's metadata are settings by name, and this is a {type(said).__name__}"
        raise WeightsError("LoRA", where, rule, _AGAIN)
    is_empty_header = not said and where != str(config)
    return ("", {}) if is_empty_header else (where, said)


def _part(where: str, said: dict[str, Any], prefix: str) -> _Settings:
    """Return the settings of the prefix's part; keys are `<part>.<name>`, or the name alone."""
    parts: dict[str, dict[str, Any]] = {}
    for key, value in said.items():
        part, _, name = key.rpartition(".")
        parts.setdefault(part, {})[name] = value
    named = sorted(part for part in parts if part)
    wanted = prefix.removesuffix(".")
    if not named or (not wanted and "" in parts):
        return _Settings(where, "", parts.get("", {}))
    if not wanted and len(named) == 1:
        wanted = named[0]
    if wanted not in named:
        theirs = " and ".join(named)
        rule = f"they say alpha for {theirs}, and the prefix, {prefix!r}, picks one of them"
        remedy = f'pass prefix="{named[0]}.", or a state dict, whose alpha is the rank'
        raise WeightsError("LoRA", where, rule, remedy)
    return _Settings(where, f"{wanted}.", parts[wanted])


@dataclass(frozen=True)
class _Settings:
    """peft's settings of one part of a pipeline.

    Args:
        where: they are.
        part: the beginning of their names there.
        values: by their names.
    """

    where: str
    part: str
    values: Mapping[str, Any]

    def check_method(self) -> None:
        """Refuse all that is not merged by adding `B A` to the kernels as they are."""
        if (method := self.values.get("peft_type")) not in (None, "LORA"):
            rule = "the weights are of LoRA; those of other methods are no product of two matrices"
            raise self._wrong("peft_type", method, rule, _MERGE)
        if self.flag("use_dora"):
            rule = "LoRA adds to a kernel; DoRA also scales its columns by magnitudes"
            raise self._wrong("use_dora", True, rule, _MERGE)
        first = self.values.get("init_lora_weights")
        if not (first is None or isinstance(first, bool) or first in _PLAIN_FIRST):
            rule = "weights that begin so are added to kernels that were changed first"
            remedy = "save it with peft's path_initial_model_for_weight_conversion"
            raise self._wrong("init_lora_weights", first, rule, f"{remedy}, or merge it with peft")
        uses = [name for name in self.values if name.startswith("use_") and name != "use_rslora"]
        for name in (*uses, *_OTHER_KINDS):
            if self.values.get(name):
                rule = "LoRA adds B A to each kernel, and with this setting it is not that alone"
                raise self._wrong(name, self.values[name], rule, _MERGE)

    def flag(self, name: str) -> bool:
        """Return a setting that is true or false; a missing one is false."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(name, value, "it is true or false", _AGAIN)
        return bool(value)

    def number(self, name: str, value: Any) -> float:
        """Return a setting that is a finite number."""
        if (number := finite(value)) is None:
            raise self._wrong(name, value, "an alpha is a finite number", _AGAIN)
        return number

    def patterns(self) -> tuple[tuple[str, float], ...]:
        """Return the alphas of single layers, by their names or the ends of these."""
        held = self.values.get("alpha_pattern") or {}
        if not isinstance(held, dict):
            raise self._wrong("alpha_pattern", held, "it is alphas by names of layers", _AGAIN)
        if len(held) > MOST_PATTERNS:
            rule = f"it has an alpha for at most {MOST_PATTERNS:,} layers"
            raise self._wrong("alpha_pattern", f"{len(held):,} of them", rule, _AGAIN)
        wrong = next((key for key in held if not _PATTERN.fullmatch(key)), None)
        if wrong is not None:
            rule = "a key is the name of a layer, or the end of one, in which .* may be any text"
            remedy = "write whole names of layers, or save the LoRA with an alpha for each layer"
            raise self._wrong("alpha_pattern", wrong, rule, remedy)
        return tuple((key, self.number(f"alpha_pattern[{key}]", a)) for key, a in held.items())

    def _wrong(self, name: str, value: Any, rule: str, remedy: str) -> WeightsError:
        shown = "not set" if value is None else show(value)[:60]
        said = printable(f"{self.part}{name} is {shown}", 400)
        return WeightsError("LoRA", f"{said} in {self.where}", rule, remedy)
