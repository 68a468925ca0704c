"""Two processes save into one folder, and a third reads it: each read is one whole save.

Also after a kill. tests/fuzz/writers.py draws the cases.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from maxattn import weights
from maxattn.errors import WeightsError
from maxattn.weights.saves import Form, save_tensors
from tests.fuzz.loop import draw
from tests.fuzz.run import describe, run
from tests.waiting import but

# Files of the same names, and a writer that is killed.
QUICK = (0,)


@pytest.mark.parametrize("seed", but(range(24), QUICK))
def test_every_read_is_one_save(seed: int) -> None:
    outcome = run(draw(f"writers:{seed}", describe()))
    assert outcome.kind == "right", f"{outcome.what}\n{outcome.snippet}"


def test_a_folder_without_a_save_is_refused(tmp_path: Path) -> None:
    left = tmp_path / "model.safetensors.1-abcdef01.partial"
    for half in (b"", b"half"):  # of a first save that goes on, or was killed
        with pytest.raises(WeightsError, match="it must be an existing"):
            weights.SafeTensors(tmp_path)
        left.write_bytes(half)
    forms = {"a": Form((64,), np.dtype("float32"))}
    files = save_tensors(forms, lambda _: np.zeros(64, "f"), tmp_path, "model", 256)
    assert {file.name for file in files} == {f.name for f in tmp_path.iterdir()}
