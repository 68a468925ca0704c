"""Promises of SECURITY.md: others' files run no code, open no other files and cost little."""

from __future__ import annotations

import ast
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from maxattn import AttentionConfig, weights
from maxattn.errors import MaxattnError, WeightsError
from maxattn.tools.cli import main

ROOT = Path(__file__).parents[1]

# ---- no pickle, no code --------------------------------------------------------------------------

UNPICKLES = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
RUNS = {"eval", "exec", "compile", "__import__"}
UNSAFE = {"np.load", "numpy.load", "torch.load", "yaml.load", "yaml.unsafe_load", "os.system"}


def offences(tree: ast.AST) -> Iterator[str]:
    """Yield code in a file that could execute another file's content."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in UNPICKLES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNPICKLES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in RUNS | UNSAFE or any(k.arg == "allow_pickle" for k in node.keywords):
                yield name


def test_nothing_unpickles_or_evaluates_a_file():
    for text in ("import pickle", "from shelve import open", "eval(x)", "np.load(p)"):
        assert list(offences(ast.parse(text)))
    files = [*(ROOT / "maxattn").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    assert len(files) > 200
    trees = {str(f.relative_to(ROOT)): ast.parse(f.read_text(encoding="utf-8")) for f in files}
    assert not {path for path, tree in trees.items() if list(offences(tree))}


class Runs:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return Path.touch, (self.made,)


LOADS = ("load_diffusers", "check_diffusers", "merge_lora", "check_lora")


def layer() -> nnx.Linear:
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0))


NAMES = ("m.bin", "m.pt", "m.pth", "m.ckpt", "m.safetensors", "m.json", "m")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("load", LOADS)
def test_no_pickle_is_read_whatever_its_name(load: str, name: str, tmp_path: Path):
    made, model = tmp_path / "made", tmp_path / "model"
    model.mkdir()
    (model / name).write_bytes(pickle.dumps(Runs(made)))
    for source in (model, model / name):
        with pytest.raises(WeightsError):
            getattr(weights, load)(layer(), source)
    assert not made.exists()
    pickle.loads((model / name).read_bytes())
    assert made.exists()  # the file would have run


TAGS = [
    '!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ["MADE"]]',
    '!!python/object/apply:os.system ["touch MADE"]',
    '!!python/object/new:os.system ["touch MADE"]',
    "!!python/name:os.system",
    "!!python/module:os",
    "!!python/object/apply:builtins.eval [\"open('MADE', 'w')\"]",
    "!apply:os.system [touch MADE]",
]


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("key", ["attention", "model", "training"])
def test_no_code_comes_from_a_config(key: str, tag: str, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("any.yml").write_text(f"{key}: {tag}\n")
    for read in (AttentionConfig.from_yaml, AttentionConfig.from_maxdiffusion):
        with pytest.raises(MaxattnError):
            read("any.yml")
    with pytest.raises(MaxattnError):
        AttentionConfig.from_overrides([f"{key}={tag}"])
    assert main(["check", "any.yml"]) == 1 and capsys.readouterr().err
    assert not Path("MADE").exists()


# ---- bounded work --------------------------------------------------------------------------------

MEGABYTE = 10**6
BOUNDED = """
import json, resource, sys, time
from pathlib import Path
from flax import nnx
from maxattn import AttentionConfig, weights
from maxattn.errors import MaxattnError
from maxattn.target import Target
from maxattn.tools.cli import main

def used():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024

class Layers(nnx.Module):
    def __init__(self):
        self.to_q = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

READ = {
    "yml": lambda path: (AttentionConfig.from_yaml(path), main(["check", str(path)])),
    "other": AttentionConfig.from_maxdiffusion,
    "folder": lambda path: weights.load_diffusers(Layers(), path),
    "lora": lambda path: weights.merge_lora(Layers(), path),
    "tuned": lambda path: Target.here(),
}
Layers(), Target.here()
found = {}
for kind, path in json.loads(sys.stdin.read()):
    before = used()
    try:
        READ[kind](Path(path))
        said = "read"
    except MaxattnError as error:
        said = "refused"
    found[f"{kind} {path}"] = [said, *(b - a for a, b in zip(before, used()))]
Path(sys.argv[1]).write_text(json.dumps(found))
"""


def aliases(levels: int) -> str:
    lines = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]" for i in range(levels)]
    return "model:\n  " + "\n  ".join(lines)


YAMLS = {
    "nodes": "model:\n" + "- a\n" * (MEGABYTE // 4),
    "flow": "model: [" + "1," * (MEGABYTE // 2) + "]",
    "open": "[" * MEGABYTE,
    "maps": "{a: " * (MEGABYTE // 4),
    "aliases": aliases(10) + "\n#" + "x" * MEGABYTE,
    "keys": "".join(f"k{i}: 1\n" for i in range(MEGABYTE // 10)),
    "same_keys": "k: 1\n" * (MEGABYTE // 5),
    "one_word": "attention: " + "a" * MEGABYTE,
    "one_number": "attention: " + "1" * MEGABYTE,
    "sixties": "attention: !!int " + "1:" * (MEGABYTE // 2) + "1",
    "spaces": "attention:" + " " * MEGABYTE + "x",
    "quotes": "attention: '" + "''" * (MEGABYTE // 2) + "'",
    "escapes": 'attention: "' + "\\n" * (MEGABYTE // 2) + '"',
    "comments": "#\n" * (MEGABYTE // 2) + "attention: auto",
    "tags": "- !!binary aaaa\n" * (MEGABYTE // 16),
    "anchors": "".join(f"k{i}: &a{i} 1\n" for i in range(MEGABYTE // 14)),
}
JSONS = {
    "lists": '{"weight_map": [' + "[]," * (MEGABYTE // 3) + "[]]}",
    "open": "[" * MEGABYTE,
    "digits": '{"weight_map": ' + "9" * MEGABYTE + "}",
    "float": '{"weight_map": 0.' + "9" * MEGABYTE + "}",
    "names": json.dumps({"weight_map": {f"t{i}": f"f{i}" for i in range(MEGABYTE // 20)}}),
    "dots": json.dumps({"weight_map": {"t": "a/" * (MEGABYTE // 2) + "b"}}),
}
PATTERNS = {
    "star": {"([a-z_.]+)+X" + "a" * 20 + str(i): 8 for i in range(MEGABYTE // 45)},
    "nested": {f"{'(' * 10}a*{')*' * 10}{i}": 8 for i in range(9_000)},
    "literal": {f"blocks.{i}.to_q": 8 for i in range(9_900)},
    "long": {"a.*" * (MEGABYTE // 3): 8},
    "wild": {"a.*" * 100 + str(i): 8 for i in range(MEGABYTE // 310)},
}


def hostile(folder: Path) -> Iterator[tuple[str, str]]:
    """Write files of about a megabyte each; yield how each is read."""
    for name, text in YAMLS.items():
        path = folder / f"{name}.yml"
        path.write_text(text)
        yield from (("yml", str(path)), ("other", str(path)))
    for name, text in JSONS.items():
        index = folder / "model" / name / "m.safetensors.index.json"
        index.parent.mkdir(parents=True)
        index.write_text(text)
        yield "folder", str(index.parent)
    one = np.ones((4, 4), np.float32)
    for name, patterns in PATTERNS.items():
        path = folder / f"{name}.safetensors"
        header = {"lora_adapter_metadata": json.dumps({"lora_alpha": 4, "alpha_pattern": patterns})}
        save_file({"to_q.lora_A.weight": one, "to_q.lora_B.weight": one}, path, header)
        yield "lora", str(path)
    fields = dict.fromkeys(("device_kind", "versions", "kernel", "call"), "cpu")
    measured = fields | {"sizes": {"query_chunk_size": 1}, "forward_ms": 1.0, "training_ms": None}
    many = [measured | {"call": str(i)} for i in range(MEGABYTE // 160)]
    text = json.dumps({"version": 1, "measurements": many})
    (folder / "cache").mkdir()
    (folder / "cache" / "tuned.json").write_text(text)
    yield "tuned", str(folder / "cache")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted in KiB on Linux")
def test_a_file_of_a_megabyte_takes_seconds_and_some_memory(tmp_path: Path):
    """The limits allow for a busy machine."""
    reads, out = list(hostile(tmp_path)), tmp_path / "found.json"
    variables = os.environ | {"MAXATTN_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", BOUNDED, str(out)]
    child = subprocess.run(
        words, input=json.dumps(reads), text=True, env=variables, capture_output=True, timeout=500
    )
    assert child.returncode == 0, child.stderr[-2000:]
    found = json.loads(out.read_text())
    assert found.keys() == {" ".join(read) for read in reads}
    slow = {Path(path).name: f for path, f in found.items() if f[1] > 20 or f[2] > 400}
    assert not slow
    assert sum(said == "refused" for said, *_ in found.values()) > len(found) // 2
