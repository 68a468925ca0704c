"""Draw the masks of the README with `Mask.plot`, four in a row.

python docs/pictures/make_masks.py        # needs maxattn[plot]
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from matplotlib import image
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from maxattn import masks as m

TOKENS = 960
CLIPS = np.repeat(np.arange(3), (400, 240, 320))[None]
MASKS = {
    "causal": m.Causal(),
    "block window": m.BlockSlidingWindow(80, 4),
    "video, blocks of 3 frames, window of 3, sink of 2": m.VideoMask(
        24, 40, frames_per_block=3, window=3, sink=2
    ),
    "window within packed clips": m.LocalWindow(160, 160) & m.Segments(CLIPS, CLIPS),
}


def main() -> None:
    """Write masks.png beside this file."""
    figure = Figure(figsize=(12, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    with TemporaryDirectory() as folder:
        for i, (name, mask) in enumerate(MASKS.items()):
            path = mask.plot(Path(folder) / f"{i}.png", TOKENS, TOKENS)
            axes = figure.add_subplot(1, len(MASKS), i + 1)
            axes.imshow(image.imread(path)[60:])
            axes.set_title(name, fontsize=9)
            axes.set_axis_off()
    figure.savefig(Path(__file__).with_name("masks.png"), dpi=90)


if __name__ == "__main__":
    main()
