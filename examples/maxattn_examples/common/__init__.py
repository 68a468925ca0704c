"""What training and sampling share: settings, processes, folders, pictures, small layers."""

from __future__ import annotations

import sys
from types import TracebackType

OF_EXTRA = {
    "examples": (
        *("maxattn", "jax", "flax", "optax", "orbax", "grain", "rich", "tensorboardX"),
        *("matplotlib", "sklearn", "PIL"),
    ),
    "torch": ("torch", "diffusers", "transformers", "accelerate", "ftfy", "imageio_ffmpeg"),
}
"""What is imported, by the extra that installs it."""


def say_what_is_missing() -> None:
    """Make a program that ends because a package is missing print how to install it."""
    others = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if said := missing(error):
            print(said, file=sys.stderr)
        else:
            others(kind, error, trace)

    sys.excepthook = hook


def missing(error: BaseException) -> str:
    """Return how to install the package that an error misses; empty for other errors."""
    name = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    package = name.partition(".")[0]
    for extra, packages in OF_EXTRA.items():
        if package in packages:
            rule = "the examples need more packages than maxattn itself"
            remedy = f"pip install '.[{extra}]', in the folder of the repository"
            return f"error: {package}: not installed\n  rule    {rule}\n  remedy  {remedy}"
    return ""


say_what_is_missing()
