"""Whatever a file or an override holds, it is a config or a ConfigError with all of its parts,
never anything else.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from maxattn.config.errors import ConfigErrors
from tests.config.settings import Settings
from tests.tries import tries

KEYS = st.sampled_from(
    [*Settings.model_fields, "block_q", "steps", "seed", "training.steps", "sampling", "<<", ""]
)
PIECES = [
    "attention", "flash", "ring", "training", "steps", "1e3", "-1", "no", "~", ": ", ":", "\n",
    "  ", "- ", "[", "]", "{", "}", ",", "!!bool ", "&a ", "*a", "<<", "!!int ", "!x ", "'", '"',
    "#", "---\n", "\t", "|", ">", "%", "?", "é", "\x01", "\ufeff",
]  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers(-2, 1024) | st.floats() | st.sampled_from(PIECES)
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(KEYS, v, max_size=3), max_leaves=5
)


TEXTS = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.dictionaries(KEYS, VALUES, max_size=5).map(json.dumps),
)
OVERRIDES = st.text(max_size=8) | st.tuples(KEYS, VALUES.map(json.dumps)).map("=".join)


@tries(30)
@given(TEXTS, st.lists(OVERRIDES, max_size=3))
def test_any_file_and_overrides_are_loaded_or_explained(text: str, overrides: list[str]):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "any.yml"
        path.write_text(text, encoding="utf-8")
        try:
            config = Settings.from_yaml(path, overrides)
        except ConfigErrors as error:
            for problem in error.problems:
                assert problem.setting and problem.rule and problem.remedy and str(problem.value)
        else:
            assert hash(config) == hash(config.replace())
