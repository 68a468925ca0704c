"""Configs in YAML, valid and mutated: every setting as it is written, or all of it refused."""

from __future__ import annotations

from random import Random

from tests.fuzz.case import Case, Machine
from tests.fuzz.mutate import mutated_bytes
from tests.fuzz.yaml_checks import check_of
from tests.fuzz.yaml_texts import draw_yaml

SOURCE = """\
import pathlib, tempfile
path = pathlib.Path(tempfile.mkdtemp()) / 'a.yml'
path.write_bytes({data!r})
config = ma.AttentionConfig.{read}(path)
"""


def draw(rng: Random, seed: int, machine: Machine) -> Case:
    """Draw a file with no change, one or several, in its text or in its bytes."""
    changes = rng.choice([0, 1, 1, 1, 2, 3])
    data = draw_yaml(rng, changes, model=rng.random() < 0.4).encode("utf-8", "surrogatepass")
    if changes and rng.random() < 0.2:
        data = mutated_bytes(rng, data)
    read = rng.choice(["from_yaml"] * 4 + ["from_maxdiffusion"])
    source = SOURCE.format(data=data, read=read)
    check = check_of(data, read == "from_yaml")
    facts = {"data": data, "read": read}
    return Case("yaml", seed, source, check, facts=facts, seconds=5)
