"""Types of settings that the sections of every example share."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

Count = Annotated[int, Ge(1)]
Whole = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Lt(1)]
Dtype = Literal["float32", "bfloat16", "float16"]
