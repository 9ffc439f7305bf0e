"""Python imports this at its start where the folder is on PYTHONPATH: puts a fault into the writer process alone."""

import json
import os
import sys

if "titan_ckpt.formats.native.writer_process" in " ".join(sys.orig_argv):
    from tests.faults import shim

    fault = json.loads(os.environ["TITAN_CKPT_FAULT"])
    kind = getattr(shim, fault.pop("kind"))
    context = shim.intercepted(kind(**fault))
    context.__enter__()
