"""All keys of a config, with types, defaults and meaning, and the checks of their combinations."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from utils.config import sections
from utils.config.channels import Channel, Side, known_channels, vectors_of
from utils.config.sections import Count, Fraction, Name, PathText, PathTexts, Positive, PositiveFloat, Rate
from utils.errors import UserError

CHANNELS_KEYS: dict[Side, str] = {"inputs": "N_in_channels", "targets": "N_out_channels"}


class NeutralKeys(sections.Section):
    """Keys that change no result: where files are, how they are read, what is logged and saved in addition.

    An interrupted run is continued regardless of their values, but not with data files of other content, nor with
    other SPEED_KEYS. All loaders but synthetic, and resident if it rounds, give the same samples.
    """

    # Keys and flags of the tutorial (SC21).

    enable_benchy: bool = False  # measure the throughput, then exit
    expdir: PathText = "/logs"  # run directories are <expdir>/<config>/<ranks>GPU/<run_num>; CPUs: <ranks>ranks
    data_loader_config: str = "lowmem"  # a name of LOADERS in utils/data
    num_data_workers: Count = 2  # loader threads per rank, at least one
    train_path: PathTexts = "/data/train.h5"  # one file, or a list of files
    # One file, or a list of files: the validation loss is the mean of the losses of their volumes.
    val_path: PathTexts = "/data/val.h5"
    train_path_npy_data: PathTexts | None = None  # .npy copies of the inputs of train_path, (X, Y, Z, C), for DALI
    train_path_npy_label: PathTexts | None = None  # .npy copies of the targets of train_path
    val_path_npy_data: PathTexts | None = None  # .npy copies of the inputs of val_path
    val_path_npy_label: PathTexts | None = None  # .npy copies of the targets of val_path
    use_cache: PathText | None = None  # node-local directory that the data files are copied to
    local_batch_size: Positive | None = None  # samples per step and rank; sets global_batch_size
    enable_manual_profiling: bool = False  # profile some steps; see profile
    enable_apex: bool = False  # no effect: torch's fused Adam, the default, equals apex's (optimizer.name apex_adam)
    enable_fused: bool = False  # of SC22; no effect: adam is always fused

    # Options of this project.

    allow_physical_values: bool = False  # train although the values are not scaled to about [-1, 1]
    log_interval: Positive = 50  # steps between two log lines, and between two reads of the loss from the device
    profile: sections.ProfileConfig = sections.ProfileConfig()
    checkpoint: sections.CheckpointConfig = sections.CheckpointConfig()
    evaluation: sections.EvaluationConfig = sections.EvaluationConfig()
    # In addition to SIGTERM: save a checkpoint and exit with code 75.
    stop_signal: Literal["SIGUSR1", "SIGUSR2", "SIGHUP", "SIGALRM"] = "SIGUSR1"
    timeouts: sections.TimeoutsConfig = sections.TimeoutsConfig()
    integrity: sections.IntegrityConfig = sections.IntegrityConfig()
    report_baselines: bool = False  # at the end, compare the loss with those of simple predictors
    # Names of LOGGERS in utils/run/loggers. out.log and metrics.jsonl are always written.
    loggers: list[str] = Field(default=["tensorboard"])
    report_pictures: bool = True  # draw evaluations, and at the end loss curves and slices
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU if this machine has one; run directories differ


class Config(NeutralKeys):
    # Keys and flags of the tutorial (SC21), with its names and meaning.

    weight_init: sections.WeightInitConfig = sections.WeightInitConfig()
    lambda_rho: Rate = 0.0  # weight of the density term of the loss
    full_scale: bool = True  # false: five scales instead of six
    global_batch_size: Positive = 64  # samples per step, over all ranks
    base_batch_size: Positive = 64  # global batch size at which start_lr holds
    Nsamples: Positive = 65536  # training samples per epoch
    # Validation samples per epoch; several volumes share them equally, so that each has a loss, and the rest is unused.
    Nsamples_val: Positive = 8192
    num_epochs: Positive = 10  # epochs of the whole run
    enable_amp: bool = False  # mixed precision
    enable_jit: bool = False  # compile the network and the loss with torch.compile
    lr_schedule: sections.LrScheduleConfig = sections.LrScheduleConfig()
    # Cells per side of the cubes for training and for validation; a config without this key reads them from the files.
    # In place of several volumes, or of one that is not a cube, the number has no effect: the run replaces it by a list
    # of their shapes [x, y, z].
    box_size: list[sections.CellsOrShapes] = Field(default=[1024, 512], min_length=2, max_length=2)
    data_size: Positive = 64  # cells per side of a crop
    N_out_channels: Positive = 5  # channels of the targets; files that name their channels, or `channels`, replace it
    bucket_cap_mb: PositiveFloat = 25.0  # DDP: size of a gradient bucket, MB
    disable_broadcast_buffers: bool = False  # DDP: do not broadcast buffers
    noddp: bool = False  # no gradient exchange, to measure the cost of communication

    # Values that the tutorial hard-coded, and options of this project.

    N_in_channels: Positive = 4  # channels of the inputs, likewise
    # Names of the datasets of inputs and targets in the HDF5 files.
    dataset_names: list[Name] = Field(default=["Nbody", "Hydro"], min_length=2, max_length=2)
    network: sections.NetworkConfig = sections.NetworkConfig()
    dataset: sections.DatasetConfig = sections.DatasetConfig()
    # a name of LOSSES in networks; for classes cross_entropy, for volumes any other; or my_module.MyLoss
    loss: str = "l1"
    # Options of the loss's constructor; one of your own that has `channels` also gets those of the targets, and
    # `simulation`, if it is here, becomes what all training files state.
    loss_options: dict[str, Any] = Field(default={})
    # Computed along with the validation loss: names of METRICS in networks, for classes, or my_module.f, a function or
    # a Module (outputs, targets) -> scalar
    metrics: list[str] = Field(default=[])
    optimizer: sections.OptimizerConfig = sections.OptimizerConfig()
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0  # of the initial weights and of the sample plan
    precision: Literal["bfloat16", "float16"] = "bfloat16"  # with enable_amp; float16 uses a gradient scaler
    tf32: bool = True  # float32 convolutions on tensor cores, 10-bit mantissa; NVIDIA_TF32_OVERRIDE=0 overrides it
    cudnn_benchmark: bool = True  # cuDNN times its algorithms once per shape and uses the fastest
    deterministic: bool = False  # on a GPU: slower algorithms that give the same bits each time; no cudnn_benchmark
    # What computes the layers on a GPU, with channels_last. auto: for each the fastest operation, on Hopper Triton
    # kernels alone, else cuDNN's convolutions with Triton kernels around them; cudnn: the latter; torch: PyTorch alone.
    kernels: Literal["auto", "cudnn", "torch"] = "auto"
    accumulation_steps: Positive = 1  # micro-batches per step
    clip_grad_norm: PositiveFloat | None = None  # largest norm of the gradient; None: no clipping
    log_noise_scale: bool = False  # log the gradient noise scale; on several ranks a Python hook per gradient bucket
    # Decay of the exponential moving average of the weights, which validation and checkpoints use; None: no average.
    ema_decay: Fraction | None = None
    channel_weights: list[PositiveFloat] | None = None  # of the target channels in the loss, normalized to mean 1
    channels: sections.ChannelsConfig = sections.ChannelsConfig()
    # Augmentation by rotations and reflections; grid: vector components unchanged; tutorial: likewise, 24 of the 48.
    symmetries: Literal["full", "grid", "tutorial", "none"] = "full"
    resident_dtype: Literal["float32", "float16"] = "float32"  # type of the volume in device memory, loader resident
    channels_last: bool = False  # memory layout N, D, H, W, C of batches and weights
    ddp: Literal["torch", "manual"] = "torch"  # gradient exchange: torch's DDP, or ours in utils/steps/data_parallel.py

    @property
    def volume_channels(self) -> tuple[tuple[Channel, ...], tuple[Channel, ...]]:
        inputs = self.channels.inputs or known_channels("inputs", self.N_in_channels)
        return tuple(inputs), tuple(self.channels.targets or known_channels("targets", self.N_out_channels))

    @property
    def vectors(self) -> tuple[list[list[int]], list[list[int]]]:
        """The places of the x, y and z components of each vector of inputs and targets."""
        inputs, targets = ([*vectors_of(channels).values()] for channels in self.volume_channels)
        return inputs, targets

    def paths(self, key: str) -> list[str]:
        """The files that a key of files names; none if it is not set."""
        value = getattr(self, key)
        return list(value) if isinstance(value, list) else [] if value is None else [value]

    @property
    def scales(self) -> int:
        """Number of downsamplings of the U-Net."""
        return self.network.scales or (6 if self.full_scale else 5)

    @property
    def window_multiple(self) -> int:
        """Sides of the network's input are multiples of it; of one's own network, without scales, of data_size."""
        is_own = "." in self.network.name and self.network.scales is None
        return self.data_size if is_own else 2**self.scales

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

    def for_world(self, world_size: int) -> "Config":
        """The config with both batch sizes set for this many ranks; raises UserError if they do not suit the run."""
        total = self.local_batch_size * world_size if self.local_batch_size else self.global_batch_size
        multiple = world_size * self.accumulation_steps
        if total % multiple:
            steps = f" × accumulation_steps {self.accumulation_steps}" if self.accumulation_steps > 1 else ""
            parts = f"{world_size} ranks{steps}"
            fitting = [ranks for ranks in range(1, world_size) if total % (ranks * self.accumulation_steps) == 0]
            fault = f"global_batch_size {total} is not divisible by {parts}; use a multiple of {multiple}"
            raise UserError(f"{fault}, or start {fitting[-1]} of them" if fitting else fault)
        if self.Nsamples < total:
            fault = f"Nsamples {self.Nsamples} is less than global_batch_size {total}"
            raise UserError(f"{fault}; raise it or lower the batch size")
        return self.model_copy(update={"local_batch_size": total // world_size, "global_batch_size": total})

    @model_validator(mode="after")
    def _check_combinations(self) -> "Config":
        count, weights, batch = len(self.paths("val_path")), self.channel_weights, self.local_batch_size
        if self.enable_benchy and self.enable_manual_profiling:
            raise ValueError("enable_benchy and enable_manual_profiling cannot be combined; choose one")
        if weights is not None and len(weights) != self.N_out_channels:
            raise ValueError(f"channel_weights must have {self.N_out_channels} values, one per target channel")
        if (self.dataset.name is not None) != (self.data_loader_config == "classification"):
            raise ValueError("data_loader_config classification and dataset.name must be set together, or neither")
        if (batch or 0) % self.accumulation_steps:
            raise ValueError(f"accumulation_steps {self.accumulation_steps} must divide local_batch_size {batch}")
        if self.Nsamples_val < count:
            raise ValueError(f"Nsamples_val {self.Nsamples_val} is less than the {count} volumes of val_path; raise it")
        return self

    @model_validator(mode="before")
    @classmethod
    def _count_channels(cls, given: Any) -> Any:
        """Named channels state how many there are."""
        named: Any = given.get("channels") if isinstance(given, dict) else None
        for side, key in CHANNELS_KEYS.items() if isinstance(named, dict) else ():
            if isinstance(listed := named.get(side), list) and listed:
                given = {**given, key: len(listed)}
        return given
