"""The logger `tensorboard`: scalars, pictures and hyperparameters in logs/ in the run directory."""

import contextlib
import re
import struct
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from utils import config as configs
from utils.config import Config
from utils.run.loggers.base import LoggedRun, Logger

HPARAMS = ".hparams"
# Hyperparameters that HPARAMS shows at once, also if they are the defaults; it has five columns for them.
COLUMNS = ("lr_schedule.start_lr", "optimizer.name", "network.width", "global_batch_size", "num_epochs")


class TensorBoardLogger(Logger):
    """TensorBoard's curves continue where the run resumes, and later points are hidden.

    The hyperparameters are those that differ from the defaults, so that HPARAMS has few columns. The files are opened
    with the first scalar or picture. After a full disk, TensorBoard's writer fails for good; its thread prints why.
    """

    def __init__(self, run: LoggedRun) -> None:
        self._run = run

    @cached_property
    def _writer(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        folder = self._run.directory.tensorboard
        _begin_later(folder)
        step, in_epoch = self._run.resumed, self._run.in_epoch
        # purge_step: points of an earlier process from there on are hidden.
        writer = SummaryWriter(str(folder), purge_step=step if in_epoch else step + 1)
        for record in self._run.kept_records() if in_epoch else ():
            for name in record.keys() - {"step", "seconds"} if record["step"] == step else ():
                writer.add_scalar(name, record[name], step)
        return writer

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def picture(self, name: str, png: bytes, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        # Not add_image, which would decode and encode it again. 4: with transparency, as matplotlib writes them.
        width, height = struct.unpack(">II", png[16:24])
        image = Summary.Image(height=height, width=width, colorspace=4, encoded_image_string=png)
        self._writer._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=name, image=image)]), step)

    def hparams(self, config: Config, results: Mapping[str, float], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        changed = [key for key in configs.differences(config) if configs.changes_result(key)]
        plain = {
            key: value if isinstance(value, bool | int | float | str) else str(value)
            for key, value in configs.flatten(config).items()
            if key in (*COLUMNS, *changed)
        }
        self.scalars(results, step)
        # In a file of their own, because TensorBoard shows the first ones of a run. add_hparams would create a run.
        for earlier in self._run.directory.tensorboard.glob(f"*{HPARAMS}"):
            earlier.unlink()
        with SummaryWriter(str(self._run.directory.tensorboard), filename_suffix=HPARAMS) as writer:
            for summary in _with_columns_first(*hparams(plain, dict(results))):
                writer._get_file_writer().add_summary(summary)

    def flush(self) -> None:
        if "_writer" in vars(self):  # a cached property that was never used has opened nothing
            self._writer.flush()

    def close(self, error: BaseException | None = None) -> None:
        if "_writer" in vars(self):
            self._writer.close()


def _with_columns_first(experiment: Any, *summaries: Any) -> list[Any]:
    """TensorBoard sorts hyperparameters by name, those that differ between runs first: marks COLUMNS as such."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    plugin = experiment.value[0].metadata.plugin_data
    content = HParamsPluginData.FromString(plugin.content)
    for info in content.experiment.hparam_infos:
        with contextlib.suppress(AttributeError):  # earlier versions have no such field, and do not sort
            info.differs = info.name in COLUMNS
    plugin.content = content.SerializeToString()
    return [experiment, *summaries]


def _begin_later(folder: Path) -> None:
    """Sets the clock that names TensorBoard's files past the second in the names of the earlier files.

    TensorBoard reads a run's files in the order of these seconds, and hides the new points unless they come last. The
    run may resume within the same second, on a node whose clock is behind, or after the clock was set back.
    """
    from tensorboard.summary.writer import event_file_writer

    seconds = [re.match(r"events\.out\.tfevents\.(\d+)", path.name) for path in folder.glob("events.*")]
    last = max((int(match[1]) for match in seconds if match), default=0)
    ahead = max(0.0, last + 1 - time.time())
    vars(event_file_writer)["time"] = SimpleNamespace(time=lambda: time.time() + ahead)
