"""`maxattn audit`: a model by name, a file of tensors, its reports, and its refusals."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from maxattn.auditing import save_calls
from tests.auditing.models import without_config
from tests.golden_text import check_golden
from tests.tools.cli.command import run

MODULE = "tests.auditing.models"
QUICK = ("--kernel", "dot_product", "--seconds", "0")


def test_a_model_is_audited(capsys, tmp_path):
    path, words = tmp_path / "audit.json", ("audit", "attention=dot_product", "--call")
    ran = run(capsys, *words, f"{MODULE}:for_command", *QUICK, "--json", str(path))
    assert (ran.status, ran.err) == (0, "")
    assert "blocks.attn[3]" in ran.out and "unsafe: nothing was found" in ran.out
    found = json.loads(path.read_text())
    assert [layer["kernel"] for layer in found["layers"]] == ["dot_product"] * 4
    assert found["grid"].startswith("2 x 8 x 12")


def test_saved_calls_are_audited_as_in_the_model(capsys, tmp_path):
    model, inputs = without_config()
    saved, files = tmp_path / "calls.safetensors", [tmp_path / "a.json", tmp_path / "b.json"]
    save_calls(saved, model, **inputs)
    of_file = "--tensors", str(saved), "--grid", "2,8,12"
    for path, words in zip(files, (("--call", f"{MODULE}:without_config"), of_file), strict=True):
        ran = run(capsys, "audit", *words, *QUICK, "--queries", "all", "--json", str(path))
        assert (ran.status, ran.err) == (0, "")
    a, b = (json.loads(path.read_text())["layers"] for path in files)
    assert [layer["name"] for layer in a] == [layer["name"] for layer in b]
    for mine, theirs in zip(a, b, strict=True):
        for name in ("score", "entropy", "k_offset", "outside", "width"):
            np.testing.assert_allclose(mine["measures"][name], theirs["measures"][name], 1e-4, 1e-6)


@pytest.mark.slow
def test_a_light_sample_and_its_cost(capsys):
    words = ("--light", "--calls", "1", "--cost", "--by-head")
    ran = run(capsys, "audit", "--call", f"{MODULE}:without_config", *words)
    assert ran.status == 0 and "8 bits" not in ran.out
    assert len(re.findall(r"^blocks\.attn\[\d\] \d", ran.out, re.MULTILINE)) == 4
    assert re.search(r"a run takes [\d.]+ ms alone, [\d.]+ ms with the measures in it", ran.out)


def test_what_is_said_of_bad_input(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_file({"q": np.ones((1, 8, 2, 4), np.float32), "k": np.ones(3)}, "half.safetensors")
    (tmp_path / "text.safetensors").write_text("no tensors")
    of_model = "--call", f"{MODULE}:without_config"
    tried = [
        (),
        (*of_model, "--tensors", "x.safetensors"),
        ("--tensors", "x.safetensors"),
        ("--tensors", "half.safetensors"),
        ("--tensors", "half.safetensors", "--queries", "some"),
        (*of_model, "--grid", "4"),
        (*of_model, "--mask", "causal"),
        (*of_model, "--heads", "0"),
        ("attention=flash", *of_model),
        ("wan-1.3b-480p", *of_model),
        ("--call", MODULE),
        ("--call", "no_such_module:model"),
        ("--call", f"{MODULE}:no_such_function"),
        ("--call", f"{MODULE}:wrong"),
        ("--call", f"{MODULE}:LAYERS"),
    ]
    said = [
        f"$ maxattn audit {' '.join(words)}\n{run(capsys, 'audit', *words).text}" for words in tried
    ]
    check_golden("audit/refused", "\n\n".join(said))
    assert all(text.endswith("exit status 1") for text in said)
    ran = run(capsys, "audit", "--tensors", "text.safetensors")
    assert ran.status == 1 and "it must be a safetensors file" in ran.err
