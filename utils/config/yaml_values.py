"""YAML without PyYAML's surprises: 1e-4 is a number; `on` and 1:30 are strings; duplicate keys are errors.

The size of a value is limited. An alias counts as often as it is used, because whoever processes the value visits what
it stands for each time: ten lines can stand for a billion values.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import yaml

from utils.errors import UserError

LARGEST_VALUE = 50_000  # nodes: scalars, lists and mappings; shipped files have fewer than 2,000


class _StrictSafeLoader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2's booleans and numbers; refuses duplicate keys and what is too large."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._sizes: dict[int, int] = {}  # nodes of each value read so far, by the id of its own node

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Counts the nodes of each value before any is constructed."""
        event = self.peek_event()
        line = event.start_mark.line + 1
        node: Any = super().compose_node(parent, index)
        if not isinstance(event, yaml.AliasEvent):
            parts = itertools.chain(*node.value) if isinstance(node, yaml.MappingNode) else node.value
            is_scalar = isinstance(node, yaml.ScalarNode)
            self._sizes[id(node)] = 1 if is_scalar else 1 + sum(self._sizes[id(part)] for part in parts)
        elif id(node) not in self._sizes:
            raise yaml.YAMLError(f"line {line}: the value with the anchor {event.anchor} contains itself")
        if max(self._sizes[id(node)], len(self._sizes)) > LARGEST_VALUE:
            raise yaml.YAMLError(f"line {line}: more than {LARGEST_VALUE} values; each use of an alias counts")
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # The constructor refuses a list or a mapping as a key.
            if key.value in seen:
                raise yaml.YAMLError(f"line {key.start_mark.line + 1}: duplicate key {key.value}; remove one")
            seen.add(key.value)
        return node


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper; also quotes strings that this module's loader would read as something else."""


_FLOAT, _BOOL, _INT, _DATE, _NULL = (
    f"tag:yaml.org,2002:{kind}" for kind in ("float", "bool", "int", "timestamp", "null")
)
_StrictSafeLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_FLOAT, _BOOL, _INT, _DATE)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_StrictSafeLoader.add_implicit_resolver(_BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_StrictSafeLoader.add_implicit_resolver(_INT, re.compile(r"^[-+]?(?:0|[1-9]\d*)$"), list("-+0123456789"))
_FLOAT_PATTERN = re.compile(
    r"^[-+]?(?:(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+|\d+\.\d*|\.\d+|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$"
)
for _kind in (_StrictSafeLoader, _Dumper):
    _kind.add_implicit_resolver(_FLOAT, _FLOAT_PATTERN, list("-+.0123456789"))
    _kind.add_implicit_resolver(_NULL, re.compile("^None$"), ["N"])


def parse_value(text: str, name: str = "a value") -> Any:
    """One YAML value; None without quotes means null, as in the original's configs. Errors mention `name`."""
    try:
        return yaml.load(text, Loader=_StrictSafeLoader)
    except RecursionError:
        raise UserError(f"cannot read {name}: it is nested too deeply") from None
    except (yaml.YAMLError, ValueError, AttributeError, LookupError, TypeError, OverflowError) as error:
        # PyYAML raises its own errors, and those of Python for a wrong tag: !!int word, !!bool word, !!int "".
        is_own = isinstance(error, yaml.YAMLError | ValueError)
        if "sys.set_int_max_str_digits" in str(error):
            raise UserError(f"cannot read {name}: a number has too many digits") from None
        reason = str(error).replace('in "<unicode string>", ', "") if is_own else "a value does not match its tag"
        raise UserError(f"cannot read {name}: {' '.join(reason.split())}") from None


def dump(values: dict[str, Any]) -> str:
    """A YAML text that `parse_value` reads back to the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, default_flow_style=None)
