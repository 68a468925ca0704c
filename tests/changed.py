"""Check what changed since the main branch: its types, and the tests of its folders.

`python -m tests.changed` is a part of `make check`. Tests mirror the package: a change of
`maxattn/masks/blocks.py` runs `tests/masks`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
ALWAYS = ("tests/test_house.py", "tests/test_import.py")
# Folders beside maxattn, and top-level pages, by the tests that read them.
READ_BY = {
    "benchmarks": ("tests/benchmarks",),
    "configs": ("tests/config",),
    "docs": ("tests/test_pages.py", "tests/test_site.py"),
    "pyproject.toml": ("tests/test_package.py",),
}


def main(arguments: Sequence[str] = ()) -> int:
    """Run pyright and pytest side by side; return 0 if both pass."""
    files = changed()
    tests = sorted({*ALWAYS, *(test for file in files for test in mirror_of(file))})
    print(f"{len(files)} files changed: {' '.join(tests)}", flush=True)
    typed = [file for file in files if file.endswith(".py") and (ROOT / file).exists()]
    types = subprocess.Popen([sys.executable, "-m", "pyright", *typed], cwd=ROOT) if typed else None
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", *arguments]
    failed = subprocess.run([*command, *tests], cwd=ROOT).returncode
    return (types.wait() if types else 0) or failed


def changed() -> list[str]:
    """List files that are new or differ from the commit at which this branch left main."""
    base = "HEAD"
    for branch in ("origin/main", "main"):
        try:
            base = git("merge-base", branch, "HEAD")[0]
            break
        except subprocess.CalledProcessError:
            continue
    new = git("ls-files", "--others", "--exclude-standard")
    return sorted({*git("diff", "--name-only", base), *new})


def git(*words: str) -> list[str]:
    run = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


def mirror_of(file: str) -> Iterator[str]:
    """Name the tests of a file: the deepest folder that mirrors its own, or files of its name."""
    path = PurePosixPath(file)
    top, *inner = path.parts
    if file in READ_BY or top in READ_BY:
        yield from READ_BY[file if file in READ_BY else top]
    elif path.suffix == ".md":
        yield "tests/test_pages.py"
    elif path.suffix != ".py":
        return
    elif top == "tests" and path.name.startswith("test_"):
        yield from there([file])
    elif top in ("maxattn", "tests", "examples"):
        inner = ["examples", *inner[1:]] if top == "examples" else inner
        folders = inner[:-1]
        if folders:
            above = ("/".join(["tests", *folders[:n]]) for n in range(len(folders), 0, -1))
            yield from list(there(above))[:1]
        elif top == "maxattn":
            found = (ROOT / "tests").glob(f"test_{path.stem.lstrip('_')}*.py")
            yield from (str(test.relative_to(ROOT)) for test in found)


def there(paths: Iterable[str]) -> Iterator[str]:
    return (path for path in paths if (ROOT / path).exists())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
