"""Uses of a trained network: predictions, evaluations, the Lyman-alpha forest."""

import sys
from pathlib import Path

_place = getattr(sys.modules.get("utils"), "__file__", None)
if "utils" in sys.modules and Path(__file__).parents[1] not in Path(str(_place)).parents:
    raise ImportError(f"another module utils ({_place}) is imported; import analysis before it, in a new process")

import utils  # noqa: E402, F401 # sets variables that torch reads when it is imported
