"""The sections of a config: their keys with types, defaults, limits and meaning."""

import os
import re
from typing import Annotated, Any, Literal

import pydantic
from pydantic import AfterValidator, BaseModel, Field, Tag, model_validator

from utils.config.channels import Channel, vectors_of

# The limits are far above all useful values. They keep a digit too many from filling the memory.
Positive = Annotated[int, Field(ge=1, le=10**9)]
Count = Annotated[int, Field(ge=0, le=10**9)]
PositiveFloat = Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]
Finite = Annotated[float, Field(ge=-1e30, le=1e30, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Name = Annotated[str, Field(min_length=1)]

EXPAND = {"expand": True}  # the context of a validation that expands paths
FOR_A_FILE = "file"  # the mode of model_dump that writes paths so that reading them expands nothing
VARIABLE = re.compile(r"\$(?:(\$)|(\w+)|\{(\w+)\})", re.ASCII)


def expand(path: str) -> str:
    """The path with `~` and environment variables expanded, and $$ as a dollar sign; ValueError if one is unknown."""

    def value(match: re.Match[str]) -> str:
        name = match[2] or match[3]
        if name and not os.environ.get(name):
            raise ValueError(f"the environment variable {name} in {path!r} is not set; set it, or write $$ for $")
        return os.environ[name] if name else "$"

    home = os.path.expanduser(path)
    if home.startswith("~"):
        raise ValueError(f"no home directory for {path.split('/')[0]} in {path!r}; write the whole path")
    return VARIABLE.sub(value, home)


def _distinct(paths: list[str]) -> list[str]:
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"{path} is listed twice; remove one")
    return paths


PathText = Annotated[
    str,
    Field(min_length=1),
    AfterValidator(lambda path, info: expand(path) if info.context == EXPAND else path),
    pydantic.PlainSerializer(lambda path, info: path.replace("$", "$$") if info.mode == FOR_A_FILE else path),
]

# Tags of the two types of a value that may also be a list; error messages omit them.
ONE, LIST = "=one", "=list"
one_or_list = pydantic.Discriminator(lambda value: LIST if isinstance(value, list) else ONE)
PathTexts = Annotated[
    Annotated[PathText, Tag(ONE)]
    | Annotated[list[PathText], Field(min_length=1), AfterValidator(_distinct), Tag(LIST)],
    one_or_list,
]

Shape = Annotated[list[Positive], Field(min_length=3, max_length=3)]
CellsOrShapes = Annotated[
    Annotated[Positive, Tag(ONE)] | Annotated[list[Shape], Field(min_length=1), Tag(LIST)], one_or_list
]


class Section(BaseModel):
    """Base class of all sections. Types are strict: a string is not a number, and 1 is not a boolean."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)


class WeightInitConfig(Section):
    """Initial weights and biases of all layers."""

    # normal, torch's defaults, or Glorot uniform; auto: normal, but a network of one's own keeps what it has set
    conv_init: Literal["auto", "normal", "default", "glorot"] = "auto"
    conv_scale: PositiveFloat = 0.02  # standard deviation of the normal distribution
    conv_bias: Finite = 0.0  # initial value of all biases


class LrScheduleConfig(Section):
    """Learning rate: scaling with the batch size, linear warm-up, then the shape; see utils/optim/schedules.py."""

    # half-cosine decay, constant, or constant with a linear decay to end_lr over the last fifth of the steps
    shape: Literal["cosine", "constant", "cooldown"] = "cosine"
    scaling: Literal["none", "linear", "sqrt"] = "none"  # with global_batch_size / base_batch_size
    start_lr: PositiveFloat = 2e-4  # learning rate at base_batch_size, before scaling
    end_lr: Rate = 0.0  # not constant: learning rate of the last step; cosine: without a warm-up
    warmup_steps: Count = 0  # only if scaling is not none and global_batch_size > base_batch_size
    warmup_epochs: Rate = 0.0  # alternative to warmup_steps

    @model_validator(mode="after")
    def _check(self) -> "LrScheduleConfig":
        if self.warmup_steps and self.warmup_epochs:
            raise ValueError("warmup_steps and warmup_epochs are both set; set one of them to 0")
        return self


Condition = Literal["redshift", "cell", "hubble", "omega_m", "omega_l", "omega_b", "sigma8", "n_s"]
Range = Annotated[list[Finite], Field(min_length=2, max_length=2)]


class NetworkConfig(Section):
    # a name of NETWORKS in networks, or my_module.MyNetwork, a class that Python finds from the working directory
    name: str = "unet"
    options: dict[str, Any] = {}  # options of the constructor of a network of one's own
    width: Positive = 64  # unet: channels at the first scale
    # unet: number of downsamplings; None: 6, or 5 if full_scale is false
    scales: Positive | None = None
    adds_vectors: bool = False  # unet: adds the inputs' vectors, smoothed over 3³ cells, to those of the same quantity
    norm: str = "none"  # after each convolution: none, batch, sync_batch, ghost(n) or group; see networks/norms.py
    # unet: scalars of each volume, from its file's attributes, that the network also takes; see networks/film.py. cell
    # is the side of a cell in comoving Mpc/h, hubble is H0 in km/s/Mpc.
    conditions: list[Condition] = []
    # Lowest and highest value of each condition in training; [] reads them from the training files.
    condition_ranges: list[Range] = []

    @model_validator(mode="after")
    def _check(self) -> "NetworkConfig":
        if len(set(self.conditions)) < len(self.conditions):
            raise ValueError(f"conditions {', '.join(self.conditions)} has a name twice; remove one")
        if self.condition_ranges and len(self.condition_ranges) != len(self.conditions):
            fault = f"condition_ranges has {len(self.condition_ranges)} ranges for {len(self.conditions)} conditions"
            raise ValueError(f"{fault}; set [lowest, highest] for each condition, or remove condition_ranges")
        for low, high in self.condition_ranges:
            if low > high:
                raise ValueError(f"condition_ranges has [{low:g}, {high:g}]; set [lowest, highest]")
        return self


class OptimizerConfig(Section):
    """The optimizer and its options; an optimizer ignores options that it does not have."""

    # a name of OPTIMIZERS in utils/optim/optimizers.py, or my_module.MyOptimizer, derived from torch.optim.Optimizer
    name: str = "adam"
    options: dict[str, Any] = {}  # options of the constructor of an optimizer of one's own; it also gets params and lr
    # Decay of the averages of the gradient and of its square; the default for soap is [0.95, 0.95].
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(default=[0.9, 0.999], min_length=2, max_length=2)
    eps: PositiveFloat = 1e-8  # keeps the divisor of an update from being zero
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0  # sgd: decay of the sum of earlier gradients
    weight_decay: Rate = 0.0  # factor of the weights in the gradient; adamw, lamb, soap: in the update
    # soap: weights with more elements have no learned bases, but a fixed one along the cells of their kernel
    max_precondition_size: Positive = 10_000_000
    precondition_frequency: Positive = 10  # soap: updates from one renewal of the learned bases to the next

    @model_validator(mode="before")
    @classmethod
    def _defaults_by_name(cls, given: Any) -> Any:
        is_soap = isinstance(given, dict) and given.get("name") == "soap"
        return {"betas": [0.95, 0.95], **given} if is_soap else given


class DatasetConfig(Section):
    """Data set of a classification task, used instead of volumes."""

    name: str | None = None  # a name of DATASETS in utils/data/datasets
    directory: PathText = "./data"  # directory of the data set's files
    verify: bool = True  # check the files against the published checksums


class ChannelsConfig(Section):
    """Channels of volumes whose files do not name them, see docs/data.md; []: those of the published data."""

    inputs: list[Channel] = []  # name, unit, scale, center, is_log and component of each input channel
    targets: list[Channel] = []  # likewise of each target channel

    @model_validator(mode="after")
    def _check(self) -> "ChannelsConfig":
        for channels in (self.inputs, self.targets):
            names = [channel.name for channel in channels]
            if repeated := next((name for name in names if names.count(name) > 1), None):
                raise ValueError(f"two channels have the name {repeated}; rename one")
            vectors_of(channels)
        return self


class EvaluationConfig(Section):
    """Evaluation of the whole validation volume, the first of several, during training; see analysis/evaluation."""

    every_epochs: Count = 0  # epochs between two evaluations, and after the last one; 0: never
    # evaluate the flux of the Lyman-alpha forest, if the file states redshift, cosmology and box size
    flux: bool = True
    sightlines: Count = 65536  # number of sight-lines along each of x, y and z, at most; 0: all


class ProfileConfig(Section):
    """Options of enable_manual_profiling; see utils/profiling/profiler.py."""

    # first profiled step, counted from 0 over the whole run; None: the sixth step of the second epoch
    first_step: Count | None = None
    steps: Positive = 30  # number of profiled steps
    profiler: Literal["auto", "nsys", "torch"] = "auto"  # auto: nsys on a GPU, otherwise torch


class TimeoutsConfig(Section):
    rendezvous: PositiveFloat = 600.0  # seconds until all ranks are connected
    hang: Rate = 600.0  # seconds without progress of any rank; then the run ends; 0: no limit
    silence: Rate = 30.0  # seconds without a heartbeat of a rank; then it is gone; 0: no limit


class IntegrityConfig(Section):
    """Checks that the ranks agree on weights and results; see utils/training/integrity.py."""

    every: Count = 0  # steps between two checks; 0: none. A difference ends the run with exit code 77.


class CheckpointConfig(Section):
    """Checkpoints in addition to the one at the end of the run; see utils/run/checkpoint.py."""

    # epochs from one checkpoint to the next; 0: not by epochs, only at the end of the run; the best is one of these
    every_epochs: Count = 1
    every_steps: Positive | None = None  # steps between two checkpoints; None: not by steps
    every_minutes: PositiveFloat | None = 10.0  # minutes between two checkpoints; None: not by time
    keep_last: Positive = 2  # checkpoints to keep in addition to the best one
