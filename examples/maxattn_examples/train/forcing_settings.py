"""The settings of training by forcing, on top of those of flow matching."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from annotated_types import Ge, Lt

from maxattn.errors import ConfigError
from maxattn_examples.common.settings import Share

from .flow_settings import FlowTraining
from .forcing import MOST, How, contradictions


class ForcedTraining(FlowTraining):
    """Training to make videos in the blocks of the section rollout."""

    forcing: How = "none"
    """Times of blocks drawn apart: blocks see earlier ones noisy (diffusion) or clean (teacher)."""
    context_noise: Annotated[float, Ge(0), Lt(MOST)] = 0.0
    """With teacher: the largest time, of 1000, of the clean frames; the model reads each time."""
    context_dropout: Share = 0.0
    """With teacher: share of clips whose clean frames are noise alone, so that texts count."""

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Refuse keys of a context that there is none of, and what every training refuses."""
        yield from super().contradictions(values)
        yield from contradictions(values)
        if values["forcing"] != "none" and (every := values["picture_every"]):
            rule = "a picture is of frames that all see each other, which forcing does not teach"
            remedy = "set it to 0, and stream from what is exported: examples/stream.py"
            yield ConfigError("picture_every", every, rule, remedy)
