"""Every key of a config, with its type, default and meaning; the rules that keys must obey together."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from utils.errors import UserError

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Section(BaseModel):
    """Types are meant as written: a string is no number, 1 is no truth value."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class WeightInitConfig(Section):
    """Weights ~ N(0, conv_scale), biases constant; 'default': torch's own; 'glorot': uniform, by each layer's size."""

    conv_init: Literal["normal", "default", "glorot"] = "normal"
    conv_scale: PositiveFloat = 0.02
    conv_bias: Finite = 0.0


class LrScheduleConfig(Section):
    """Learning rate: scaled start, linear warm-up, then half-cosine decay, steps or constant; see utils/optim/schedules.py."""

    shape: Literal["cosine", "step", "constant"] = "cosine"
    scaling: Literal["none", "linear", "sqrt"] = "none"
    start_lr: PositiveFloat = 2e-4
    end_lr: Rate = 0.0  # cosine: of the last step
    drop_epochs: list[Positive] = []  # step: after so many epochs each, the rate is multiplied by drop_factor
    drop_factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    warmup_steps: Count = 0
    warmup_epochs: Rate = 0.0  # instead of warmup_steps


class NetworkConfig(Section):
    """`width`: channels of the first scale; `scales`: how often the crop is halved (full_scale decides if None)."""

    name: str = "unet"
    width: Positive = 64
    scales: Positive | None = None
    space_to_depth: list[
        Literal["down1", "last"]
    ] = []  # layers as exact smaller convolutions; see networks/space_to_depth.py
    norm: str = "none"  # after each convolution: none, batch, sync_batch, ghost(n) or group; see networks/norms.py


class OptimizerConfig(Section):
    """One of utils/optim/optimizers.py's OPTIMIZERS; each takes what it knows of these."""

    name: str = "adam"
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(default=[0.9, 0.999], min_length=2, max_length=2)
    eps: PositiveFloat = 1e-8
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: Rate = 0.0


class DatasetConfig(Section):
    """Labelled samples instead of volumes: one of DATASETS in utils/data/datasets, and where its files lie."""

    name: str | None = None
    directory: str = "./data"
    verify: bool = True  # files must be the published ones, by their checksums


class TransformConfig(Section):
    """How channels are made of physical values, see utils/inference/channels.py; None: unknown, without physical units."""

    density_log_scale: PositiveFloat | None = 14.0  # x = ln(density / mean) / scale
    velocity_scale_km_s: PositiveFloat | None = 1000.0  # x = velocity / scale
    temperature_log10_center: Finite = 5.0  # x = (log10(T / K) - center) / scale
    temperature_log10_scale: PositiveFloat | None = 2.5


class EvaluationConfig(Section):
    """Whole-volume predictions of the validation box during training, judged by physics; see utils/evaluation."""

    every_epochs: Count = 0  # 0: never
    budget: Annotated[float, Field(gt=0, le=1)] = 0.1  # at most this share of the time that training has taken
    tile: Positive | None = None  # cells a side of what the network is given at once; None: data_size
    step: Positive | None = None  # cells from one tile to the next; None: half a tile


class VectorChannelsConfig(Section):
    """Channel triples that are the x, y, z components of a vector; all others are scalars."""

    inputs: list[list[Count]] = [[1, 2, 3]]
    targets: list[list[Count]] = [[1, 2, 3]]


class ProfileConfig(Section):
    """Under enable_manual_profiling: which steps, on which ranks, with what; see utils/profiling/profiler.py."""

    first_step: Count | None = None  # of the whole training; None: the sixth of the second epoch
    steps: Positive = 30
    ranks: Literal["root", "all"] = "root"
    profiler: Literal["auto", "nsys", "torch"] = "auto"  # auto: nsys on a GPU, else torch


class TimeoutsConfig(Section):
    """Seconds: `rendezvous` to find the other ranks, `collective` for one exchange, `hang` for a step (0: no limit)."""

    rendezvous: PositiveFloat = 600.0
    collective: PositiveFloat = 1800.0
    hang: Rate = 600.0


class CheckpointConfig(Section):
    """When checkpoints are written beside each epoch's end, and how many stay beside the best; see checkpoint.py."""

    every_steps: Positive | None = None
    every_minutes: PositiveFloat | None = 10.0
    keep_last: Positive = 2


class Config(Section):
    """Every key of a config; the first block is the original's, with its names and meaning."""

    # The original keys.
    weight_init: WeightInitConfig = WeightInitConfig()
    lambda_rho: Rate = 0.0  # weight of the density term of the loss
    full_scale: bool = True  # False leaves the sixth scale out
    global_batch_size: Positive = 64  # samples a step over all ranks
    base_batch_size: Positive = 64  # the batch that start_lr belongs to
    Nsamples: Positive = 65536  # training crops an epoch
    Nsamples_val: Positive = 8192  # validation crops
    num_epochs: Positive = 10
    enable_amp: bool = False  # mixed precision
    enable_apex: bool = False  # for optimizer.name adam: apex FusedAdam where installed, else torch's
    enable_benchy: bool = False  # measure throughput and end
    enable_jit: bool = False  # compile network and loss
    expdir: str = "/logs"  # runs go to <expdir>/<config>/<ranks>GPU/<run_num>
    lr_schedule: LrScheduleConfig = LrScheduleConfig()
    data_loader_config: str = "lowmem"  # one of utils/data's LOADERS
    box_size: list[Positive] = Field(default=[1024, 512], min_length=2, max_length=2)  # cells: train, validation
    data_size: Positive = 64  # cells a side of a crop
    num_data_workers: Count = 2  # loader threads a rank
    N_out_channels: Positive = 5
    train_path: str = "/data/train.h5"
    val_path: str = "/data/val.h5"
    train_path_npy_data: str | None = None  # (L, L, L, C) twins of the HDF5 files, for DALI
    train_path_npy_label: str | None = None
    val_path_npy_data: str | None = None
    val_path_npy_label: str | None = None
    use_cache: str | None = None  # a node-local directory to stage the files in

    # Flags of the original that were no keys.
    local_batch_size: Positive | None = None  # samples a step a rank; sets global_batch_size
    enable_manual_profiling: bool = False
    bucket_cap_mb: PositiveFloat = 25.0  # DDP gradient bucket, MB
    disable_broadcast_buffers: bool = False
    noddp: bool = False  # no gradient exchange: measures what communication costs

    # What the original hard-coded.
    N_in_channels: Positive = 4
    network: NetworkConfig = NetworkConfig()
    dataset: DatasetConfig = DatasetConfig()
    loss: str = "l1"  # one of networks' LOSSES
    metrics: list[str] = []  # of networks' METRICS: measured beside the validation loss
    optimizer: OptimizerConfig = OptimizerConfig()
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    precision: Literal["bfloat16", "float16"] = "bfloat16"  # under enable_amp; float16 takes a gradient scaler
    tf32: bool = True  # float32 convolutions with 10 bits of mantissa on tensor cores; NVIDIA_TF32_OVERRIDE=0 wins
    cudnn_benchmark: bool = True  # cuDNN tries its algorithms once per shape and takes the fastest
    compiler: Literal["inductor", "torchscript"] = "inductor"  # under enable_jit
    fused_pointwise: bool = False  # bias, activation, concatenation and loss in one kernel each; needs channels_last
    accumulation_steps: Positive = 1  # micro-batches a step
    clip_grad_norm: PositiveFloat | None = None
    log_noise_scale: bool = False  # on several ranks it adds a Python hook on every gradient bucket
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None  # of the weights' running mean, which is what is used
    channel_weights: list[PositiveFloat] | None = None  # of the target channels in the loss; their mean counts as 1
    vector_channels: VectorChannelsConfig = VectorChannelsConfig()
    transform: TransformConfig = TransformConfig()
    symmetries: Literal["full", "grid", "none"] = "full"  # grid: vector components stay, as in the original
    resident_dtype: Literal["float32", "float16"] = "float32"  # of the volume in device memory
    channels_last: bool = False  # batches and network in memory as N, D, H, W, C
    log_interval: Positive = 50  # steps between log lines, and between reads of the loss
    ddp: Literal["torch", "manual"] = "torch"  # who exchanges gradients; manual: see utils/steps/manual.py
    static_graph: bool = False  # DDP: the same parameters take part in every step
    gradient_compression: Literal["none", "bfloat16"] = "none"  # DDP: what gradients are sent as
    device: Literal["auto", "cpu", "cuda"] = "auto"
    profile: ProfileConfig = ProfileConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    # Beside SIGTERM: save, and end with exit code 75.
    stop_signal: Literal["SIGUSR1", "SIGUSR2", "SIGHUP", "SIGALRM"] = "SIGUSR1"
    max_consecutive_skips: Positive = (
        10  # in a row, of steps whose loss or gradient is no number, before training stops
    )
    timeouts: TimeoutsConfig = TimeoutsConfig()
    report_baselines: bool = False  # end with the losses of simple predictors beside the network's
    report_pictures: bool = True  # end with loss curves, slices and evaluations as pictures, where matplotlib is there

    @property
    def is_classification(self) -> bool:
        """Whether samples come with a label each, and not as pairs of volumes."""
        return self.dataset.name is not None

    @property
    def scales(self) -> int:
        return self.network.scales or (6 if self.full_scale else 5)

    @property
    def steps_per_epoch(self) -> int:
        return self.Nsamples // self.global_batch_size

    @property
    def total_steps(self) -> int:
        return self.num_epochs * self.steps_per_epoch

    @property
    def warms_up(self) -> bool:
        """Only a batch beyond the base one, with a scaled rate, needs a warm-up."""
        return self.lr_schedule.scaling != "none" and self.global_batch_size > self.base_batch_size

    @property
    def warmup_steps(self) -> int:
        """Of the learning rate, however they are given; 0 where nothing needs a warm-up."""
        schedule = self.lr_schedule
        asked = schedule.warmup_steps or round(schedule.warmup_epochs * self.steps_per_epoch)
        return asked if self.warms_up else 0

    def for_world(self, world_size: int) -> Config:
        """The config with both batch sizes settled for this many ranks; raises UserError where they cannot be."""
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
                f"a local batch of {local} is not divisible by accumulation_steps {self.accumulation_steps}; "
                f"global_batch_size must be a multiple of ranks × accumulation_steps = "
                f"{world_size * self.accumulation_steps}"
            )
        settled = self.model_copy(update={"local_batch_size": local, "global_batch_size": total})
        settled._check_steps()
        return settled

    def _check_steps(self) -> None:
        if self.steps_per_epoch == 0:
            raise UserError(
                f"Nsamples {self.Nsamples} is less than global_batch_size {self.global_batch_size}: an epoch would "
                f"have no step; raise Nsamples or lower the batch"
            )
        self._check_schedule()

    def _check_schedule(self) -> None:
        schedule = self.lr_schedule
        if schedule.warmup_steps and schedule.warmup_epochs:
            raise UserError(
                f"lr_schedule.warmup_steps {schedule.warmup_steps} and warmup_epochs {schedule.warmup_epochs} are "
                f"both given; set one of them to 0"
            )
        if self.warmup_steps and self.warmup_steps >= self.total_steps:
            key = "warmup_steps" if schedule.warmup_steps else "warmup_epochs"
            raise UserError(
                f"lr_schedule.{key} {getattr(schedule, key)} leaves nothing of the run's "
                f"{self.total_steps} steps; lower it or raise num_epochs"
            )
        drops = schedule.drop_epochs
        if any(second <= first for first, second in pairwise(drops)):
            raise UserError(f"lr_schedule.drop_epochs {drops} do not increase; put them in order, each once")
        if schedule.shape != "step":
            return
        if not drops:
            raise UserError("lr_schedule.shape is step, but there are no lr_schedule.drop_epochs; say when it drops")
        if drops[-1] >= self.num_epochs:
            raise UserError(
                f"lr_schedule.drop_epochs {drops}: after epoch {drops[-1]} nothing is left of {self.num_epochs} "
                f"epochs; leave it out or raise num_epochs"
            )
        if drops[0] * self.steps_per_epoch <= self.warmup_steps:
            raise UserError(
                f"lr_schedule.drop_epochs {drops}: the first drop does not come after the {self.warmup_steps} steps of "
                f"warm-up; make it later, or the warm-up shorter"
            )

    @model_validator(mode="after")
    def _cross_check(self) -> Config:
        if self.enable_benchy and self.enable_manual_profiling:
            raise ValueError("enable_benchy and enable_manual_profiling cannot be combined; choose one")
        if self.data_size > min(self.box_size):
            raise ValueError(f"data_size {self.data_size} is larger than the box {self.box_size}; lower data_size")
        for name, triples, channels in (
            ("inputs", self.vector_channels.inputs, self.N_in_channels),
            ("targets", self.vector_channels.targets, self.N_out_channels),
        ):
            used = [channel for triple in triples for channel in triple]
            if any(len(triple) != 3 for triple in triples) or len(set(used)) != len(used):
                raise ValueError(f"vector_channels.{name} {triples} must be triples of different channels")
            if used and max(used) >= channels:
                raise ValueError(f"vector_channels.{name} {triples} names a channel beyond the {channels} there are")
        block = 2**self.scales
        if self.evaluation.tile is not None and self.evaluation.tile % block:
            raise ValueError(
                f"evaluation.tile {self.evaluation.tile} is not a multiple of {block}, by which the network divides "
                f"the grid"
            )
        if self.channel_weights is not None and len(self.channel_weights) != self.N_out_channels:
            raise ValueError(
                f"channel_weights {self.channel_weights} must be one for each of the {self.N_out_channels} target channels"
            )
        if len(set(self.network.space_to_depth)) < len(self.network.space_to_depth):
            raise ValueError(f"network.space_to_depth {self.network.space_to_depth} names a layer twice")
        if (self.dataset.name is None) == (self.data_loader_config == "classification"):
            raise ValueError("data_loader_config classification and dataset.name go together; give both or neither")
        if self.ddp == "manual" and (self.static_graph or self.gradient_compression != "none"):
            raise ValueError("static_graph and gradient_compression are torch's; they cannot be had with ddp manual")
        if self.static_graph and self.accumulation_steps > 1:
            raise ValueError("static_graph needs accumulation_steps 1; turn one of them off")
        return self
