"""What a folder of quantised weights says about the modules that are not.

Owns the list that config.json calls modules_to_not_convert. Knows no scheme.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from titan_ckpt.tensors import TensorInfo

_EXPERT = re.compile(r"(.*\.experts)\.\d+\..*")


def plain_modules(infos: Mapping[str, TensorInfo], quantised: Collection[str]) -> list[str]:
    """Return the modules whose weights a reader must not take for quantised ones, by their names in the files.

    Experts count as one module, as which transformers holds them. The output head is always one of them unless it is
    quantised: a tied one is in no file, and yet a module.
    """
    names = {"lm_head"} - {key.removesuffix(".weight") for key in quantised}
    for key, info in infos.items():
        if key.endswith(".weight") and len(info.shape) >= 2 and key not in quantised:
            name = key.removesuffix(".weight")
            expert = _EXPERT.fullmatch(name)
            names.add(expert[1] if expert else name)
    return sorted(names)
