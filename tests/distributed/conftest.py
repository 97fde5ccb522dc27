"""Lets the tests of this folder import their shared harness, however pytest is started. Not for fixtures."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
