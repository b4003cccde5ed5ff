"""All keys of a config, with types, defaults and meaning, and the checks of their combinations.

The keys of its sections are in `sections`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, Tag, model_validator

from utils.config.paths import LIST, ONE, PathText, PathTexts, one_or_list
from utils.config.sections import (
    BatchSize,
    Cells,
    Channels,
    CheckpointConfig,
    DatasetConfig,
    EarlyStoppingConfig,
    Epochs,
    EvaluationConfig,
    LrScheduleConfig,
    Name,
    NetworkConfig,
    OptimizerConfig,
    Positive,
    PositiveFloat,
    ProfileConfig,
    Rate,
    Samples,
    Section,
    Threads,
    TimeoutsConfig,
    TransformConfig,
    VectorChannelsConfig,
    WeightInitConfig,
)
from utils.errors import UserError

Shape = Annotated[list[Cells], Field(min_length=3, max_length=3)]
CellsOrShapes = Annotated[
    Annotated[Cells, Tag(ONE)] | Annotated[list[Shape], Field(min_length=1), Tag(LIST)], one_or_list
]


class Config(Section):
    """All keys of a config."""

    # Keys of the tutorial (SC21), with its names and meaning.
    weight_init: WeightInitConfig = WeightInitConfig()
    lambda_rho: Rate = 0.0  # weight of the density term of the loss
    full_scale: bool = True  # false: five scales instead of six
    global_batch_size: BatchSize = 64  # samples per step, over all ranks
    base_batch_size: BatchSize = 64  # global batch size at which start_lr holds
    Nsamples: Samples = 65536  # training samples per epoch
    Nsamples_val: Samples = 8192  # validation samples per epoch
    num_epochs: Epochs = 10
    enable_amp: bool = False  # mixed precision
    enable_apex: bool = False  # no effect: torch's fused Adam, the default, equals apex's
    enable_benchy: bool = False  # measure the throughput, then exit
    enable_jit: bool = False  # compile the network and the loss with torch.compile
    expdir: PathText = "/logs"  # run directories are <expdir>/<config>/<ranks>GPU/<run_num>; CPUs: <ranks>ranks
    lr_schedule: LrScheduleConfig = LrScheduleConfig()
    data_loader_config: str = "lowmem"  # a name of LOADERS in utils/data
    # Cells per side of the cubes for training and for validation. In place of several volumes, or of one that is not a
    # cube, the number has no effect: the run replaces it by a list of their shapes [x, y, z], read from the files.
    box_size: list[CellsOrShapes] = Field(default=[1024, 512], min_length=2, max_length=2)
    data_size: Cells = 64  # cells per side of a crop
    num_data_workers: Threads = 2  # loader threads per rank, at least one
    N_out_channels: Channels = 5
    train_path: PathTexts = "/data/train.h5"  # one file, or a list of files
    val_path: PathText = "/data/val.h5"
    train_path_npy_data: PathTexts | None = None  # .npy copies of the HDF5 files, shape (X, Y, Z, C), for DALI
    train_path_npy_label: PathTexts | None = None
    val_path_npy_data: PathText | None = None
    val_path_npy_label: PathText | None = None
    use_cache: PathText | None = None  # node-local directory that the data files are copied to

    # Command-line flags of the tutorial that had no key.
    local_batch_size: BatchSize | None = None  # samples per step and rank; sets global_batch_size
    enable_manual_profiling: bool = False  # profile some steps; see profile
    bucket_cap_mb: PositiveFloat = 25.0  # DDP: size of a gradient bucket, MB
    disable_broadcast_buffers: bool = False  # DDP: do not broadcast buffers
    noddp: bool = False  # no gradient exchange, to measure the cost of communication

    # Values that the tutorial hard-coded, and options of this project.
    N_in_channels: Channels = 4
    # Names of the datasets of inputs and targets in the HDF5 files.
    dataset_names: list[Name] = Field(default=["Nbody", "Hydro"], min_length=2, max_length=2)
    allow_physical_values: bool = False  # train although the values are not scaled to about [-1, 1]
    network: NetworkConfig = NetworkConfig()
    dataset: DatasetConfig = DatasetConfig()
    loss: str = "l1"  # a name of LOSSES in networks: l1, mse, huber; for classes cross_entropy
    metrics: list[str] = Field(default=[])  # names of METRICS in networks, computed along with the validation loss
    optimizer: OptimizerConfig = OptimizerConfig()
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    precision: Literal["bfloat16", "float16"] = "bfloat16"  # with enable_amp; float16 uses a gradient scaler
    tf32: bool = True  # float32 convolutions on tensor cores, 10-bit mantissa; NVIDIA_TF32_OVERRIDE=0 overrides it
    cudnn_benchmark: bool = True  # cuDNN times its algorithms once per shape and uses the fastest
    # Number of algorithms that it times; 0: all. A lower one does not save the time to build all of them.
    cudnn_benchmark_limit: Annotated[int, Field(ge=0, le=1000)] = 10
    deterministic: bool = False  # on a GPU: slower algorithms that give the same bits each time; no cudnn_benchmark
    # One Triton kernel for bias, activation and concatenation, another for the loss; needs a GPU and channels_last.
    fused_pointwise: bool = False
    # One Triton kernel for all that follows the last layer's convolution: bias, tanh, loss, and their gradient. Needs
    # last in network.space_to_depth and loss l1 alone; a GPU, channels_last and bfloat16 autocast.
    fused_tail: bool = False
    accumulation_steps: BatchSize = 1  # micro-batches per step
    clip_grad_norm: PositiveFloat | None = None  # largest norm of the gradient; None: no clipping
    log_noise_scale: bool = False  # log the gradient noise scale; on several ranks a Python hook per gradient bucket
    # Decay of the exponential moving average of the weights, which validation and checkpoints use; None: no average.
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    channel_weights: list[PositiveFloat] | None = None  # of the target channels in the loss, normalized to mean 1
    vector_channels: VectorChannelsConfig = VectorChannelsConfig()
    transform: TransformConfig = TransformConfig()
    # Augmentation by rotations and reflections; grid: vector components unchanged, as in the tutorial.
    symmetries: Literal["full", "grid", "none"] = "full"
    resident_dtype: Literal["float32", "float16"] = "float32"  # type of the volume in device memory, loader resident
    channels_last: bool = False  # memory layout N, D, H, W, C of batches and weights
    log_interval: Positive = 50  # steps between two log lines, and between two reads of the loss from the device
    ddp: Literal["torch", "manual"] = "torch"  # gradient exchange: torch's DDP, or ours in utils/steps/data_parallel.py
    static_graph: bool = False  # DDP: every step uses the same parameters
    gradient_compression: Literal["none", "bfloat16"] = "none"  # DDP: type in which gradients are exchanged
    device: Literal["auto", "cpu", "cuda"] = "auto"
    profile: ProfileConfig = ProfileConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    early_stopping: EarlyStoppingConfig = EarlyStoppingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    # In addition to SIGTERM: save a checkpoint and exit with code 75.
    stop_signal: Literal["SIGUSR1", "SIGUSR2", "SIGHUP", "SIGALRM"] = "SIGUSR1"
    # Training stops after this many consecutive steps with a non-finite (NaN or infinite) loss or gradient.
    max_consecutive_skips: Positive = 10
    timeouts: TimeoutsConfig = TimeoutsConfig()
    report_baselines: bool = False  # at the end, compare the loss with those of simple predictors
    # Names of LOGGERS in utils/training/loggers.py. out.log and metrics.jsonl are always written.
    loggers: list[str] = Field(default=["tensorboard"])
    report_pictures: bool = True  # at the end, draw loss curves, slices and evaluations, if matplotlib is installed

    @property
    def is_classification(self) -> bool:
        """True if the samples have labels, false if they are pairs of volumes."""
        return self.dataset.name is not None

    def paths(self, key: str) -> list[str]:
        """The files that a key of files names; none if it is not set."""
        value = getattr(self, key)
        return list(value) if isinstance(value, list) else [] if value is None else [value]

    @property
    def scales(self) -> int:
        """Number of downsamplings of the U-Net."""
        return self.network.scales or (6 if self.full_scale else 5)

    @property
    def steps_per_epoch(self) -> int:
        return self.Nsamples // self.global_batch_size

    @property
    def total_steps(self) -> int:
        return self.num_epochs * self.steps_per_epoch

    @property
    def warms_up(self) -> bool:
        """Warm-up is used only if the learning rate is scaled up for a large batch."""
        return self.lr_schedule.scaling != "none" and self.global_batch_size > self.base_batch_size

    @property
    def warmup_steps(self) -> int:
        """Steps of warm-up, from warmup_steps or warmup_epochs; 0 if the run has none."""
        schedule = self.lr_schedule
        requested = schedule.warmup_steps or round(schedule.warmup_epochs * self.steps_per_epoch)
        return requested if self.warms_up else 0

    def for_world(self, world_size: int) -> Config:
        """The config with both batch sizes set for this many ranks.

        Raises UserError if they do not divide evenly, or if the epochs or the learning rate schedule do not fit them.
        """
        if self.local_batch_size is not None:
            local, total = self.local_batch_size, self.local_batch_size * world_size
        else:
            local, total = self.global_batch_size // world_size, self.global_batch_size
            if total % world_size:
                raise UserError(
                    f"global_batch_size {total} is not divisible by {world_size} ranks; "
                    f"use {world_size * max(1, round(total / world_size))}, or set local_batch_size"
                )
        if local % self.accumulation_steps:
            raise UserError(
                f"the local batch size {local} is not divisible by accumulation_steps {self.accumulation_steps}; "
                f"global_batch_size must be a multiple of ranks × accumulation_steps = "
                f"{world_size * self.accumulation_steps}"
            )
        if self.Nsamples < total:
            raise UserError(
                f"Nsamples {self.Nsamples} is less than global_batch_size {total}, so an epoch has no step; raise "
                f"Nsamples or lower the batch size"
            )
        resolved = self.model_copy(update={"local_batch_size": local, "global_batch_size": total})
        resolved._check_schedule()
        return resolved

    def _check_schedule(self) -> None:
        schedule = self.lr_schedule
        if schedule.warmup_steps and schedule.warmup_epochs:
            raise UserError(
                f"lr_schedule.warmup_steps {schedule.warmup_steps} and warmup_epochs {schedule.warmup_epochs} are "
                f"both set; set one of them to 0"
            )
        if self.warmup_steps and self.warmup_steps >= self.total_steps:
            key = "warmup_steps" if schedule.warmup_steps else "warmup_epochs"
            raise UserError(
                f"lr_schedule.{key} {getattr(schedule, key)}: the warm-up is not shorter than the run of "
                f"{self.total_steps} steps; lower it or raise num_epochs"
            )
        drops = schedule.drop_epochs
        if any(second <= first for first, second in pairwise(drops)):
            raise UserError(f"lr_schedule.drop_epochs {drops} must increase; sort them and remove duplicates")
        if schedule.shape != "step":
            return
        if not drops:
            raise UserError("lr_schedule.shape step needs lr_schedule.drop_epochs; set them")
        if drops[-1] >= self.num_epochs:
            raise UserError(
                f"lr_schedule.drop_epochs {drops}: epoch {drops[-1]} must be less than num_epochs "
                f"{self.num_epochs}; remove it or raise num_epochs"
            )
        if drops[0] * self.steps_per_epoch <= self.warmup_steps:
            raise UserError(
                f"lr_schedule.drop_epochs {drops}: the first drop is within the {self.warmup_steps} steps of "
                f"warm-up; move it to a later epoch or shorten the warm-up"
            )

    @model_validator(mode="after")
    def _cross_check(self) -> Config:
        if self.enable_benchy and self.enable_manual_profiling:
            raise ValueError("enable_benchy and enable_manual_profiling cannot be combined; choose one")
        for name, triples, key in (
            ("inputs", self.vector_channels.inputs, "N_in_channels"),
            ("targets", self.vector_channels.targets, "N_out_channels"),
        ):
            channels = getattr(self, key)
            used = [channel for triple in triples for channel in triple]
            if any(len(triple) != 3 for triple in triples) or len(set(used)) != len(used):
                raise ValueError(f"vector_channels.{name} {triples} must be lists of three different channels")
            if used and max(used) >= channels:
                raise ValueError(
                    f"vector_channels.{name} {triples}: channel {max(used)} does not exist; {key} is {channels}, so "
                    f"use 0 to {channels - 1}"
                )
        block = 2**self.scales
        if self.evaluation.window is not None and self.evaluation.window % block:
            raise ValueError(
                f"evaluation.window {self.evaluation.window} is not a multiple of {block} (2**scales of the network)"
            )
        if self.channel_weights is not None and len(self.channel_weights) != self.N_out_channels:
            raise ValueError(
                f"channel_weights {self.channel_weights} must have {self.N_out_channels} values, one per target channel"
            )
        if len(set(self.network.space_to_depth)) < len(self.network.space_to_depth):
            raise ValueError(f"network.space_to_depth {self.network.space_to_depth} contains a layer twice; remove one")
        if (self.dataset.name is None) == (self.data_loader_config == "classification"):
            raise ValueError(
                "data_loader_config classification and dataset.name must be set together; set both or neither"
            )
        if self.ddp == "manual" and (self.static_graph or self.gradient_compression != "none"):
            raise ValueError("static_graph and gradient_compression need ddp torch; unset them or set ddp=torch")
        if self.static_graph and self.accumulation_steps > 1:
            raise ValueError("static_graph needs accumulation_steps 1; change one of them")
        return self

    @model_validator(mode="after")
    def _check_needs(self) -> Config:
        """Options for which others must be set."""
        if self.fused_tail and self.network.name == "smooth_unet":
            raise ValueError("fused_tail: network smooth_unet has no such tail; set fused_tail=false")
        needs = {
            "last in network.space_to_depth": "last" in self.network.space_to_depth,
            "loss l1": self.loss == "l1",
            "lambda_rho 0": self.lambda_rho == 0,
            "no channel_weights": self.channel_weights is None,
        }
        missing = [name for name, holds in needs.items() if not holds]
        if self.fused_tail and missing:
            raise ValueError(f"fused_tail needs {', '.join(missing)}; change that, or set fused_tail=false")
        return self


# Keys and sections that change no result: where files are, how they are read, what is logged and saved in addition. An
# interrupted run is continued regardless of their values. Loaders give the same samples, but see result_changes.
NEUTRAL_KEYS = frozenset(
    f"{part}_path{kind}" for part in ("train", "val") for kind in ("", "_npy_data", "_npy_label")
) | frozenset(
    {
        "allow_physical_values",
        "checkpoint",
        "data_loader_config",
        "dataset.directory",
        "dataset.verify",
        "enable_benchy",
        "enable_manual_profiling",
        "evaluation",
        "expdir",
        "local_batch_size",  # global_batch_size counts
        "log_interval",
        "loggers",
        "num_data_workers",
        "profile",
        "report_baselines",
        "report_pictures",
        "stop_signal",
        "timeouts",
        "use_cache",
    }
)
