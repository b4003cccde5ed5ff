"""Unpickles numpy arrays of objects without importing or calling anything that the pickle names.

Python's documentation, "Restricting Globals": `find_class` decides what the names in a pickle stand for. Here the names
that numpy writes stand for classes of this module, and all others are refused. numpy's own functions would not be safe:
a crafted dtype turns the bytes of a pickle into pointers.
"""

from __future__ import annotations

import io
import pickle
from typing import Any


class _ObjectDtype:
    """Stands for numpy.dtype."""

    def __init__(self, *_: Any) -> None:
        """Ignores the type: the elements are what the pickle holds."""

    def __setstate__(self, state: Any) -> None:
        """Ignores the byte order, which objects do not have."""


class _ObjectArray:
    """Stands for numpy.ndarray; keeps the elements as a list."""

    items: Any = None

    def __setstate__(self, state: Any) -> None:
        *_, self.items = state


def _reconstruct(subtype: Any, shape: Any, typecode: Any) -> _ObjectArray:
    return _ObjectArray()


ALLOWED = {
    ("numpy", "ndarray"): _ObjectArray,
    ("numpy", "dtype"): _ObjectDtype,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"its pickle names {module}.{name}")
        return ALLOWED[module, name]


def unpickle_object_array(data: bytes) -> list[Any]:
    """Returns the elements of a pickled array of objects [N]; raises ValueError for any other pickle."""
    try:
        result = _Unpickler(io.BytesIO(data), encoding="latin1").load()
    except Exception as error:  # a damaged pickle may raise anything, says the documentation of UnpicklingError
        raise ValueError(f"its pickle cannot be read: {error}") from None
    if not isinstance(result, _ObjectArray) or not isinstance(result.items, list):
        raise ValueError("its pickle is not one of an array of objects")
    return result.items
