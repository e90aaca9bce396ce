"""The script that makes the sample dumps, as a module: ``from sample_dumps import make``."""

from __future__ import annotations

import importlib.util
import sys

from conftest import SAMPLES

_spec = importlib.util.spec_from_file_location("make_dumps", SAMPLES / "rollouts" / "make.py")
assert _spec is not None
assert _spec.loader is not None
make = importlib.util.module_from_spec(_spec)
sys.modules["make_dumps"] = make
_spec.loader.exec_module(make)
