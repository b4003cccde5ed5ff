"""The configuration of a run: one named config of a YAML file, plus overrides; typed, checked and frozen.

`schema` declares every key. `files` reads YAML files and names the faults. `Config.for_world` sets what depends on the
number of ranks.
"""

from utils.config.files import (
    REMOVED_KEYS,
    RENAMED_KEYS,
    default_name,
    flatten,
    load,
    names,
    read_file,
    to_yaml,
    validate,
)
from utils.config.schema import (
    CheckpointConfig,
    Config,
    LrScheduleConfig,
    NetworkConfig,
    OptimizerConfig,
    ProfileConfig,
    Section,
    TimeoutsConfig,
    TransformConfig,
)
from utils.config.yaml_values import parse_value

__all__ = [
    "REMOVED_KEYS",
    "RENAMED_KEYS",
    "CheckpointConfig",
    "Config",
    "LrScheduleConfig",
    "NetworkConfig",
    "OptimizerConfig",
    "ProfileConfig",
    "Section",
    "TimeoutsConfig",
    "TransformConfig",
    "default_name",
    "flatten",
    "load",
    "names",
    "parse_value",
    "read_file",
    "to_yaml",
    "validate",
]
