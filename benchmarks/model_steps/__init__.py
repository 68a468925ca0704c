"""Steps of models at real size, compiled from shapes alone, and the clock that times them.

The models are those of examples/, which need not be installed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
