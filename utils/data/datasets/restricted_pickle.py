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

    def __init__(self, code: str, *_: Any) -> None:
        if code not in ("O", "O8"):
            raise pickle.UnpicklingError(f"its elements are of type {code}")

    def __setstate__(self, state: Any) -> None:
        """Ignores the byte order, which objects do not have."""


class _ObjectArray:
    """Stands for numpy.ndarray; keeps the elements as a list."""

    items: list[Any]

    def __setstate__(self, state: Any) -> None:
        _, (count,), dtype, _, items = state
        if type(dtype) is not _ObjectDtype or type(items) is not list or len(items) != count:
            raise pickle.UnpicklingError("its array is not one of objects [N]")
        self.items = items


def _reconstruct(subtype: Any, shape: Any, typecode: Any) -> _ObjectArray:
    return _ObjectArray()


def _encode(text: str, encoding: str) -> bytes:
    """Protocol 2 has no opcode for bytes; Python 3 writes them as a call of _codecs.encode."""
    return text.encode("latin1")


ALLOWED = {
    ("numpy", "ndarray"): _ObjectArray,
    ("numpy", "dtype"): _ObjectDtype,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("_codecs", "encode"): _encode,
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
    except pickle.UnpicklingError as error:
        raise ValueError(str(error)) from None
    except Exception:  # a damaged pickle may raise anything, says the documentation of UnpicklingError
        raise ValueError("its pickle is damaged") from None
    if not isinstance(result, _ObjectArray):
        raise ValueError(f"its pickle holds a {type(result).__name__}")
    return result.items
