"""Two processes save into one folder, some are killed, and a third one reads at the same time."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np

from tests.fuzz.case import Case, Check, Machine, Names, Wrong

# A writer waits for a line, saves its numbers one after the other, and prints each that is saved.
BEGIN = """\
import sys
from pathlib import Path
import numpy as np
folder, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
{how}print('ready', flush=True)
sys.stdin.readline()
for number in range(first, last):
    save(number)
    print(number, flush=True)
"""
OF_WEIGHTS = """\
from maxattn.weights.saves import Form, save_tensors
forms = {{name: Form(shape, np.dtype(dtype)) for name, (shape, dtype) in {forms!r}.items()}}
def save(number, most=int(sys.argv[4])):
    full = lambda name: np.full(forms[name].shape, number, forms[name].dtype)
    return save_tensors(forms, full, folder, 'model', most)
"""
OF_MEASUREMENTS = """\
from maxattn.tools.tune.store import add
def save(number, _=0):
    add(folder / 'tuned.json', {{
        'device_kind': 'cpu', 'versions': 'x', 'kernel': 'memory_efficient',
        'call': f'self-attention B=1 T=S={{number}} N=2 H=8 f32 Full()',
        'sizes': {{'query_chunk_size': 1, 'key_chunk_size': 2}},
        'forward_ms': 1.0, 'training_ms': None}})
"""
READ_WEIGHTS = """\
def read():
    tensors = ma.weights.SafeTensors(folder)
    return sorted({float(x) for name in tensors for x in np.ravel(tensors[name][()])})
"""
READ_MEASUREMENTS = """\
from maxattn.config.measurements import read_kept
def read():
    kept = read_kept(folder / 'tuned.json')
    assert not kept.damage, kept.damage
    return [int(m['call'].split('T=S=')[1].split()[0]) for m in kept.measurements]
"""
RUN = """\
import pathlib, subprocess, sys, tempfile, time
folder = pathlib.Path(tempfile.mkdtemp())
sys.argv = ['', str(folder), '0', '0', '{mosts[0]}']
{how}save({start})
{read}logs = [folder.with_name(f'{{folder.name}}.{{i}}') for i in range(2)]
lines = lambda log: log.read_text().split()[1:]
code, kills, reads, writers = {code!r}, {kills!r}, [], []
try:
    for log, first, last, most in zip(logs, {firsts!r}, {lasts!r}, {mosts!r}):
        words = [sys.executable, '-c', code, *map(str, (folder, first, last, most))]
        writers.append(subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=log.open('w'), stderr=subprocess.DEVNULL,
            env=os.environ | {{'JAX_PLATFORMS': 'cpu'}}))
    while any(w.poll() is None and not log.read_text() for w, log in zip(writers, logs)):
        time.sleep(0.01)
    for writer in writers:
        writer.stdin.write(b'go\\n')
        writer.stdin.close()
    while any(writer.poll() is None for writer in writers):
        before = [lines(log) for log in logs]
        reads.append((before, read()))
        for writer, done, kill in zip(writers, before, kills):
            if kill is not None and len(done) >= kill[0]:
                time.sleep(kill[1])
                writer.kill()
finally:
    for writer in writers:
        writer.kill()
        writer.wait()
saved = [list(map(int, lines(log))) for log in logs]
ended = [writer.returncode for writer in writers]
reads.append(([lines(log) for log in logs], read()))
files = save(1)
after, names = read(), sorted(path.name for path in folder.iterdir())
"""
FIRSTS = (100, 1000)
DTYPES = ("<f4", "<f4", "<f2", "<i4", "<f8")
START = 2


def draw(rng: Random, machine: Machine) -> Case:
    """Draw the saved values, the number of files of each writer, and when writers are killed."""
    counts = [rng.choice([5, 12, 25]) for _ in FIRSTS]
    kills = [(rng.randint(1, n), rng.random() * 0.02) if rng.random() < 0.4 else None
             for n in counts]  # fmt: skip
    is_weights = rng.random() < 0.7
    forms = {
        name: (rng.choice([(), (1,), (64,), (3, 50), (5000,)]), rng.choice(DTYPES))
        for name in "abcdef"[: rng.choice([2, 6])]
    }
    total = sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in forms.values())
    how = (OF_WEIGHTS if is_weights else OF_MEASUREMENTS).format(forms=forms)
    lasts = [first + n for first, n in zip(FIRSTS, counts, strict=True)]
    source = RUN.format(
        how=BEGIN.format(how=how).partition("print(")[0], start=START, code=BEGIN.format(how=how),
        read=READ_WEIGHTS if is_weights else READ_MEASUREMENTS, kills=kills, firsts=FIRSTS,
        lasts=lasts, mosts=[rng.choice([1, total // 3 + 1, total // 2 + 1, total]) for _ in FIRSTS],
    )  # fmt: skip
    check = _check_of(is_weights, [kill is not None for kill in kills], lasts)
    return Case(source, check, never_refused=True, seconds=60)


def _check_of(is_weights: bool, killed: list[bool], lasts: list[int]) -> Check:
    def check(names: Names) -> None:
        for i, (code, saved, last) in enumerate(
            zip(names["ended"], names["saved"], lasts, strict=True)
        ):
            whole = list(range(FIRSTS[i], last))
            if saved != whole[: len(saved)] or (code == 0) != (saved == whole and code == 0):
                raise Wrong(f"writer {i} saved {saved} and ended with {code}", "print(saved)")
            if code != 0 and not killed[i]:
                raise Wrong(f"writer {i} ended with {code}", "print(ended)")
        (_check_weights if is_weights else _check_measurements)(names)

    return check


def _check_weights(names: Names) -> None:
    """Check that each read is one whole save, no older than its writer's last completed one."""
    newest = [0, 0]
    for before, read in names["reads"]:
        if len(read) != 1:
            raise Wrong(f"one read has numbers of several saves: {read}", "print(reads)")
        (number,) = map(int, read)
        if number == START:
            if any(before):
                raise Wrong("a read is of the first save after others", "print(reads)")
            continue
        of = int(number >= FIRSTS[1])
        least = max(newest[of], int(before[of][-1]) if before[of] else 0)
        if number < least:
            raise Wrong(f"a read is save {number} after save {least}", "print(reads)")
        newest[of] = number
    if names["after"] != [1]:
        raise Wrong(f"the last save is read as {names['after']}", "print(after)")
    files: Any = sorted(path.name for path in names["files"])
    if files != names["names"]:
        raise Wrong(f"the folder has {names['names']}, and the save {files}", "print(names)")


def _check_measurements(names: Names) -> None:
    """Check that each read has all earlier saves, and no number twice."""
    known = {1, START} | {n + d for n in FIRSTS for d in range(50)}
    for before, read in [*names["reads"], (names["saved"], names["after"])]:
        if lost := {int(n) for done in before for n in done} - set(read):
            raise Wrong(f"measurements {sorted(lost)} are lost", "print(reads)")
        if len(read) != len(set(read)) or not set(read) <= known or START not in read:
            raise Wrong(f"a read has {read}", "print(reads)")
