"""Unpickles numpy arrays of objects without importing or calling anything that the pickle names.

Python's documentation, "Restricting Globals": `find_class` decides what the names in a pickle stand for. Here the names
that numpy writes stand for a class of this module, and all others are refused. numpy's own functions would not be safe:
a crafted dtype turns the bytes of a pickle into pointers.
"""

from __future__ import annotations

import io
import pickle
from typing import Any


class _StandIn:
    """Stands for all that numpy's pickles name. Of an array's state, it keeps the last item: the elements as a list."""

    items: Any = None

    def __init__(self, *_: Any) -> None:
        """Ignores types and shapes: the elements are what the pickle holds."""

    def __setstate__(self, state: Any) -> None:
        *_, self.items = state


ALLOWED = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"its pickle names {module}.{name}")
        return _StandIn


def unpickle_object_array(data: bytes) -> list[Any]:
    """Returns the elements of a pickled array of objects [N]; raises ValueError for any other pickle."""
    try:
        result = _Unpickler(io.BytesIO(data), encoding="latin1").load()
    except Exception as error:  # a damaged pickle may raise anything, says the documentation of UnpicklingError
        raise ValueError(f"its pickle cannot be read: {error}") from None
    if not isinstance(result, _StandIn) or not isinstance(result.items, list):
        raise ValueError("its pickle is not one of an array of objects")
    return result.items
