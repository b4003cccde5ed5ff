"""The objects that the training loop calls. Those here do nothing; profiles and evaluations are subclasses."""


class Profiler:
    """Profiles a window of steps."""

    def before_step(self, step: int) -> None:
        """Called before each step, counted from 0 over the whole run."""

    def close(self) -> None:
        """Called at the end of training."""


class Evaluation:
    """An evaluation that runs during training, after the validation of each epoch."""

    def after_epoch(self, epoch: int, step: int, is_last: bool) -> dict[str, float]:
        """Evaluates the network and returns scalars to log; every rank calls it.

        `epoch` is the number of the epoch that ends, counted from 1; `is_last`: no other follows. A long evaluation
        calls `world.pulse.meet` from time to time, on every rank at the same points; it raises Stopped after a stop
        signal.
        """
        return {}
