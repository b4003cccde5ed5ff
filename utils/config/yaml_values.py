"""YAML 1.2's numbers and booleans: 1e-4 is a number; `on` and 1:30 are strings. Duplicate keys are errors."""

from __future__ import annotations

import re
from typing import Any

import yaml

from utils.errors import UserError


class _StrictSafeLoader(yaml.SafeLoader):
    """PyYAML's safe loader with other implicit types, which refuses duplicate keys."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.YAMLError(f"line {key.start_mark.line + 1}: duplicate key {key.value}; remove one")
                seen.add(key.value)
        return node


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper; also quotes strings that this module's loader would read as something else."""


_REPLACED = {f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float", "timestamp")}
_StrictSafeLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_FLOAT = r"^[-+]?(?:(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+|\d+\.\d*|\.\d+|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$"
for _kind, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^[-+]?(?:0|[1-9]\d*)$", "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("null", "^None$", "N"),  # as in the tutorial's configs
):
    for _class in (_StrictSafeLoader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(_pattern), list(_first))


def parse_value(text: str, name: str = "a value") -> Any:
    """One YAML value. Errors mention `name`."""
    try:
        return yaml.load(text, Loader=_StrictSafeLoader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a wrong tag, such as !!int word
        reason = getattr(error, "problem", None) or str(error)
        if mark := getattr(error, "problem_mark", None):
            reason += f" in line {mark.line + 1}, column {mark.column + 1}"
        raise UserError(f"cannot read {name}: {' '.join(reason.split())}") from None


def dump(values: dict[str, Any]) -> str:
    """A YAML text that `parse_value` reads back to the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, default_flow_style=None)
