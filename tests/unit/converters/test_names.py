"""The two names of the converters in a checkout."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

from titan_ckpt.converters import LoRAConverter
from titan_ckpt.converters.float8 import gather

ROOT = Path(__file__).parents[3]


def test_a_checkouts_second_name_is_the_same_modules() -> None:
    """A class is the same one whichever name was imported first, and a module below it, too."""
    assert importlib.import_module("converters.float8.gather") is gather
    assert importlib.import_module("converters").LoRAConverter is LoRAConverter
    first = (
        "from converters.lora.converter import LoRAConverter as first\n"
        "from titan_ckpt.converters import LoRAConverter as second\n"
        "assert first is second and first.__module__ == 'titan_ckpt.converters.lora.converter'\n"
    )
    subprocess.run([sys.executable, "-c", first], cwd=ROOT, check=True, timeout=280)
