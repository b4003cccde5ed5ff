"""The logger `wandb`: scalars, pictures, config and final results on Weights & Biases; see docs/logging.md.

One run across restarts: wandb/id in the run directory holds its id. W&B appends rows of increasing numbers and never
replaces one. Here the number is 2 × step for a logging interval, one more for the end of an epoch. So a run that
resumes skips the rows that W&B has received, and adds those that it lacks from metrics.jsonl; offline, all of them.
"""

import contextlib
import io
import os
import secrets
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from utils.config import Config
from utils.errors import EXIT_RESUMABLE, Stopped, UserError
from utils.files import atomic_write
from utils.log import once_per_job
from utils.run import tags
from utils.run.loggers.base import LoggedRun, Logger

log = once_per_job(__name__)

PROJECT = "nbody-unet"
PROVENANCE = ("command", "git_commit", "device", "world_size", "launcher", "versions")
# Only what this module logs is uploaded. The console and the exit codes stay the run's own.
SETTINGS: dict[str, Any] = {
    **dict.fromkeys(("silent", "disable_code", "disable_git", "disable_job_creation", "finish_timeout_raises"), True),
    **dict.fromkeys(("x_disable_machine_info", "x_disable_meta", "x_disable_stats"), True),
    **dict.fromkeys(("save_code", "x_save_requirements"), False),
    **dict.fromkeys(("init_timeout", "finish_timeout"), 30.0),
    "console": "off",
}


def _is_online(wandb: Any) -> bool:
    """True unless WANDB_MODE or wandb's settings file says otherwise; sets wandb up, for otherwise it is not silent."""
    return wandb.setup(wandb.Settings(**SETTINGS)).settings.mode == "online"


class WandbLogger(Logger):
    """A run of W&B, opened with the first scalar or picture."""

    def __init__(self, run: LoggedRun) -> None:
        self._logged, self._first_row, self._has_service = run, 0, False

    @staticmethod
    def check() -> None:
        """Raises UserError if the package or an API key is missing or unusable; asks for none and does not connect."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # of errors inside wandb, to its developers
        try:
            import wandb

            lacks_key = _is_online(wandb) and not wandb.login(prompt=False, verify=False)
        except ImportError:
            raise UserError("the logger wandb needs the package wandb; pip install -e '.[wandb]'") from None
        except Exception as error:  # such as a short key, or an unknown WANDB_MODE
            reason = " ".join(str(error).split())
            raise UserError(f"the logger wandb refuses its settings: {reason}; correct the variable WANDB_…") from None
        if lacks_key:
            raise UserError(
                "the logger wandb has no API key; run `wandb login`, or set WANDB_API_KEY, or record offline with "
                "WANDB_MODE=offline"
            )

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._add(self._run, values, step)

    def picture(self, name: str, png: bytes, step: int) -> None:
        import wandb
        from PIL import Image

        self._add(self._run, {name: wandb.Image(Image.open(io.BytesIO(png)))}, step)

    def hparams(self, config: Config, results: Mapping[str, float], step: int) -> None:
        self._run.summary.update(dict(results))

    def close(self, error: BaseException | None = None) -> None:
        if not self._has_service:
            return
        import wandb

        try:
            if "_run" in vars(self):  # otherwise its start has failed
                if isinstance(error, Stopped):
                    self._run.mark_preempting()
                self._run.finish(exit_code={type(None): 0, Stopped: EXIT_RESUMABLE}.get(type(error), 1))
        finally:
            with contextlib.suppress(Exception, SystemExit):
                wandb.teardown()  # it would otherwise be ended at exit, with a traceback if it has failed

    @cached_property
    def _run(self) -> Any:
        import wandb

        self._has_service = True
        directory = self._logged.directory
        config, ranks, _ = directory.path.absolute().parts[-3:]
        directory.wandb.mkdir(exist_ok=True)
        provenance = {name: self._logged.provenance.get(name) for name in PROVENANCE}
        run = wandb.init(
            id=self._id(),
            resume="allow" if _is_online(wandb) else None,  # `wandb sync` would append it to the earlier directories
            dir=str(directory.path.absolute()),
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            group=os.environ.get("WANDB_RUN_GROUP", config),
            name=directory.title,
            tags=None if "WANDB_TAGS" in os.environ else [config, ranks],
            config={**self._logged.config, "provenance": provenance},
            settings=wandb.Settings(**SETTINGS),
        )
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        self._first_row = run.starting_step
        for record in self._logged.kept_records():
            self._add(run, {name: record[name] for name in record.keys() - {"step", "seconds"}}, record["step"])
        if not run.disabled:  # WANDB_MODE=disabled
            log.info("Weights & Biases: %s", run.url or f"offline; upload with: wandb sync {run.sync_dir}")
        return run

    def _id(self) -> str:
        """The id of the W&B run that resumes, or a new one for a training run from scratch."""
        path = self._logged.directory.wandb / "id"
        if self._logged.resumed >= 0 and path.exists():
            return path.read_text().strip()
        new = secrets.token_hex(8)
        with atomic_write([path]) as (partial,):
            partial.write_text(new + "\n")
        return new

    def _add(self, run: Any, values: Mapping[str, Any], step: int) -> None:
        """Adds values to the row of a step, unless W&B has received the row from an earlier process."""
        row = 2 * step + tags.ends_epoch(values)
        if row >= self._first_row:
            run.log({**values, "step": step}, step=row)
