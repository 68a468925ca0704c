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
from math import sqrt
from pathlib import Path
from typing import Any

from maxattn.config.errors import printable, show
from maxattn.config.numbers import finite
from maxattn.config.plain_json import parse_json, read_json
from maxattn.errors import WeightsError
from maxattn.weights.files import SafeTensors

HEADER, CONFIG, PEFT_FILE = "lora_adapter_metadata", "adapter_config.json", "adapter_model"
MOST_BYTES = 4 * 2**20  # of metadata, which name some thousand layers at most
_AGAIN = "save the LoRA again, or give its tensors with <layer>.alpha as a state dict"


_MERGE = "merge them with peft, and load the merged model"
_MERGE_IT = "merge it with peft, and load the merged model"
_CONVERT = "save it with peft's path_initial_model_for_weight_conversion, or merge it with peft"
_PLAIN_FIRST = ("gaussian", "eva", "orthogonal")  # they leave the kernels as they are
_KNOWN = ("use_dora", "use_rslora")
_OTHER_KINDS = ("layer_replication", "alora_invocation_tokens", "arrow_config")
_MOST_PATTERNS = 10_000
# Python's `re` can need more time for a short expression than there is, and the file is not ours.
_PATTERN = re.compile(r"\^?(?:[\w-]|\.\*|\\?\.)+\$?")
_NAMES = "write the whole names of the layers, or save the LoRA with an alpha tensor for each layer"


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


def strength(held: Mapping[str, Any], prefix: str) -> Strength:
    """Read the metadata of LoRA weights; those of a state dict, or of a file that has none, say
    alpha is the rank.

    Args:
        held: the tensors; of `SafeTensors`, the headers are read and no tensor.
        prefix: of their names, which says whose settings are meant where there are several.

    Raises:
        WeightsError: they are no JSON, are for other parts of a pipeline, have no finite alpha, or
            are of another method than LoRA.
    """
    found = _found(held) if isinstance(held, SafeTensors) else None
    if found is None:
        return Strength()
    said = _part(*found, prefix)
    said.check_method()
    return Strength(
        said.number("lora_alpha", said.values.get("lora_alpha")),
        said.patterns(),
        said.flag("use_rslora"),
    )


def _found(held: SafeTensors) -> tuple[str, dict[str, Any]] | None:
    """Return where metadata are and what they say: the header before a file beside it, which may be
    older.
    """
    said = (header.get(HEADER) for header in held.headers())
    texts = sorted({text for text in said if text is not None})
    if len(texts) > 1:
        rule = f"the files of one LoRA say the same in {HEADER}"
        raise WeightsError(
            "LoRA", f"{held.path}: {len(texts)} sets of metadata", rule, "fetch the folder again"
        )
    if texts:
        where = f"{HEADER} of {held.path}"
        settings = _parsed(where, texts[0])
        return (where, settings) if settings else None
    config = _config(held.path)
    return (str(config), _parsed(str(config), config)) if config else None


def _config(path: Path) -> Path | None:
    """Return peft's settings for a folder or for peft's own file; beside another file they are of
    something else.
    """
    folder = path if path.is_dir() else path.parent
    ours = path.is_dir() or path.name.startswith(PEFT_FILE)
    return folder / CONFIG if ours and (folder / CONFIG).is_file() else None


def _parsed(where: str, source: str | Path) -> dict[str, Any]:
    try:
        said = parse_json(source) if isinstance(source, str) else read_json(source, MOST_BYTES)
    except (OSError, ValueError) as error:
        rule = f"LoRA's metadata are JSON, and whole: {error}"
        raise WeightsError("LoRA", where, rule, _AGAIN) from error
    if not isinstance(said, dict):
        rule = f"LoRA's metadata are settings by name, and this is a {type(said).__name__}"
        raise WeightsError("LoRA", where, rule, _AGAIN)
    return said


def _part(where: str, said: dict[str, Any], prefix: str) -> _Settings:
    """Pick the settings of the part that the prefix names: keys are `<part>.<name>`, or the name
    alone.
    """
    parts: dict[str, dict[str, Any]] = {}
    for key, value in said.items():
        part, _, name = key.rpartition(".")
        parts.setdefault(part, {})[name] = value
    named = sorted(part for part in parts if part)
    wanted = prefix.removesuffix(".")
    if not named or (not wanted and "" in parts):
        wanted = ""
    elif not wanted and len(named) == 1:
        wanted = named[0]
    elif wanted not in named:
        raise _no_part(where, named, prefix)
    return _Settings(where, f"{wanted}." if wanted else "", parts.get(wanted, {}))


def _no_part(where: str, named: list[str], prefix: str) -> WeightsError:
    rule = (
        f"they say alpha for {' and '.join(named)}, and the prefix, {prefix!r}, picks one of them"
    )
    remedy = f'pass prefix="{named[0]}.", or a state dict, whose alpha is the rank'
    return WeightsError("LoRA", where, rule, remedy)


@dataclass(frozen=True)
class _Settings:
    """Read peft's settings of one part.

    Args:
        where: they are.
        part: what their names begin with there.
        values: by their names.
    """

    where: str
    part: str
    values: Mapping[str, Any]

    def check_method(self) -> None:
        """Refuse what is not merged by adding `B A`."""
        if (method := self.values.get("peft_type")) not in (None, "LORA"):
            rule = "the weights are of LoRA; those of other methods are no product of two matrices"
            raise self._wrong("peft_type", method, rule, _MERGE)
        if self.flag("use_dora"):
            rule = "LoRA adds to a kernel; DoRA also scales its columns by magnitudes"
            raise self._wrong("use_dora", True, rule, _MERGE_IT)
        self._check_kind()

    def _check_kind(self) -> None:
        """Refuse kinds of LoRA that train against other kernels, or add in another way."""
        first = self.values.get("init_lora_weights")
        if not (first is None or isinstance(first, bool) or first in _PLAIN_FIRST):
            rule = "weights that begin so are added to kernels that were changed first"
            raise self._wrong("init_lora_weights", first, rule, _CONVERT)
        others = [name for name in self.values if name.startswith("use_") and name not in _KNOWN]
        for name in (*others, *_OTHER_KINDS):
            if self.values.get(name):
                rule = "LoRA adds B A to each kernel, and with this setting it is not that alone"
                raise self._wrong(name, self.values[name], rule, _MERGE_IT)

    def flag(self, name: str) -> bool:
        """Return a setting that is true or false; where it is missing, false."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(name, value, "it is true or false", _AGAIN)
        return bool(value)

    def number(self, name: str, value: Any) -> float:
        """Return a setting that is a finite number, and refuse all else."""
        if (number := finite(value)) is None:
            raise self._wrong(name, value, "an alpha is a finite number", _AGAIN)
        return number

    def patterns(self) -> tuple[tuple[str, float], ...]:
        """Return the alphas of layers that differ, by their names or the ends of these."""
        held = self.values.get("alpha_pattern") or {}
        if not isinstance(held, dict):
            raise self._wrong("alpha_pattern", held, "it is alphas by names of layers", _AGAIN)
        if len(held) > _MOST_PATTERNS:
            rule = f"it has an alpha for at most {_MOST_PATTERNS:,} layers"
            raise self._wrong("alpha_pattern", f"{len(held):,} of them", rule, _AGAIN)
        return tuple(
            (self._pattern(key), self.number(f"alpha_pattern[{key}]", value))
            for key, value in held.items()
        )

    def _pattern(self, key: str) -> str:
        if not _PATTERN.fullmatch(key):
            rule = "a key is the name of a layer, or the end of one, in which .* may be any text"
            raise self._wrong("alpha_pattern", key, rule, _NAMES)
        return key

    def _wrong(self, name: str, value: Any, rule: str, remedy: str) -> WeightsError:
        shown = "not set" if value is None else show(value)[:60]
        said = printable(f"{self.part}{name} is {shown}", 400)
        return WeightsError("LoRA", f"{said} in {self.where}", rule, remedy)
