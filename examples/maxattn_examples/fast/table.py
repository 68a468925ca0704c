"""What the steps of a run compute, as a table for a person."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .steps import Planned, Step, forwards

HEADINGS = "steps", "layers", "predictions", "kernel", "forwards"
PREDICTIONS = {
    "none": "one",
    "guided": "two",
    "gate": "one and the last difference",
    "zero": "zeros",
}
MOST = 4  # ranges of steps in a cell


def table(
    planned: Sequence[Planned],
    layers: int,
    guided: bool | Sequence[bool],
    kernels: Mapping[str | None, str],
    kept: int = 0,
) -> Iterator[str]:
    """Yield the lines of a table, and its sums; none if all steps compute everything as usual.

    Steps that are the same are one row, wherever they are in the run.

    Args:
        planned: the steps of a run.
        layers: of the model.
        guided: whether the run has classifier-free guidance, or each step has.
        kernels: names of what runs, by what the steps ask for, with None for the config's; empty:
            those that they ask for.
        kept: bytes that the run keeps between steps, on a device.
    """
    computed, whole = forwards(planned, layers, guided)
    decides = any(x.step.layers not in ("compute", "reuse") for x in planned)
    same: dict[tuple[str, ...], list[int]] = {}
    usual = kernels.get(None, "auto")
    for i, (step, *_) in enumerate(planned):
        name = kernels.get(step.kernel, step.kernel or "auto")
        same.setdefault((_layers(step), _predictions(step), name), []).append(i)
    each = [guided] * len(planned) if isinstance(guided, bool) else guided
    kinds = {(x.step.guidance, guides) for x, guides in zip(planned, each, strict=True)}
    as_usual = kinds <= {("guided", True), ("none", False)}
    as_usual &= not any(x.step.skips or x.step.layers != "compute" for x in planned)
    if as_usual and {kernel for *_, kernel in same} <= {usual}:
        return
    rows: list[tuple[str, ...]] = [HEADINGS]
    for cells, steps in same.items():
        count = sum(planned[i].step.forwards(layers) for i in steps)
        rows.append((ranges([i + 1 for i in steps]), *cells, f"{count:g}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "   ".join(cells).rstrip()
    most, memory = (
        "at most " * decides,
        f"; {_size(kept)} kept between steps on each device" if kept else "",
    )
    share = f"{most}{computed:g} of {whole} forwards are computed"
    share += f", {most}{computed / whole:.0%}"
    same_work = "the same forwards, by other kernels"
    yield f"approximate: {same_work if as_usual else share}{memory}"


def ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers in a few words: 1 to 5, 7 to 15 by 2; of many parts the ends."""
    parts: list[str] = []
    while numbers:
        step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
        regular = 1
        while regular < len(numbers) and numbers[regular] - numbers[regular - 1] == step:
            regular += 1
        if step > 1 and regular < 4:
            regular = 1
        first, last = numbers[0], numbers[regular - 1]
        if regular == 1:
            parts.append(f"{first}")
        else:
            parts.append(f"{first} to {last}" + (f" by {step}" if step > 1 else ""))
        numbers = numbers[regular:]
    return ", ".join(parts if len(parts) <= MOST else [*parts[:2], f"... {parts[-1]}"])


def _layers(step: Step) -> str:
    """Say which layers are computed."""
    if step.guidance == "zero":
        return "none"
    if step.layers == "compute":
        return "computed"
    if step.layers != "reuse":
        return "decided as it runs"
    return "reused" if step.span is None else f"{step.span[0]} to {step.span[1] - 1} reused"


def _predictions(step: Step) -> str:
    """Say which predictions are combined."""
    said = PREDICTIONS[step.guidance]
    if not step.skips:
        return said
    which = "the negative one" if step.skip_in == "negative" else "one more"
    return (
        f"{said}, {which} skips layer{'s' * (len(step.skip) > 1)} {', '.join(map(str, step.skip))}"
    )


def _size(count: int) -> str:
    """Write a number of bytes."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if count >= unit / 10:
            return f"{count / unit:.2f} {name}"
    return f"{count / 2**10:.2f} KiB"
