"""`python -m maxattn`: the command line."""

from __future__ import annotations

import sys

from maxattn.tools.cli import main

sys.exit(main())
