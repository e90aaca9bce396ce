"""The script that makes the sample dumps, as a module: ``from sample_dumps import make``."""

from __future__ import annotations

from conftest import SAMPLES, load_script

make = load_script(SAMPLES / "rollouts" / "make.py")
