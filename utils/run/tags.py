"""Names of the scalars and pictures that a run records in TensorBoard and in metrics.jsonl."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

# Per epoch, and once before training.
TRAIN_LOSS = "Loss/train"
VALID_LOSS = "Loss/valid"
ITERATIONS_PER_SECOND = "Avg iters per sec"
LEARNING_RATE = "Learning Rate"
VOLUME_LOSS = f"{VALID_LOSS}/"  # followed by the name of one of several validation volumes
VALID_SUFFIX = "/valid"  # of the validation loss and of every validation metric

# Per logging interval.
STEP_LOSS = "Step/loss"
STEP_GRADIENT_NORM = "Step/gradient norm"
STEP_SAMPLES_PER_SECOND = "Step/samples per sec"
STEP_TFLOPS_PER_RANK = "Step/TFLOP per sec per rank"
STEP_DATA_WAIT = "Step/data wait fraction"
STEP_SLOWEST_RANK = "Step/slowest rank per median rank"
STEP_LEARNING_RATE = "Step/learning rate"
STEP_SKIPPED_UPDATES = "Step/skipped updates"
NOISE_SCALE = "Noise/scale (critical batch)"
NOISE_PROGRESS = "Noise/relative progress per step"

# Pictures.
SLICES = "Slices"
SLICES_LARGEST_ERROR = "Slices, largest error"
EVALUATION_PICTURE = "Evaluation/"  # followed by the name of a picture of an evaluation of the whole validation volume

HPARAM = "hparam/"  # followed by the name of a final result on TensorBoard's HPARAMS page


def ends_epoch(record: Collection[str]) -> bool:
    """True for a record of the end of an epoch, False for one of a logging interval."""
    return STEP_LEARNING_RATE not in record


def progress(records: Sequence[Mapping[str, Any]]) -> str:
    """Epoch and step of the last validation: "epoch 4, step 800". Not every epoch need have one."""
    last = max((record["step"] for record in records if VALID_LOSS in record), default=None)
    if last is None:
        return ""
    epochs = {record["step"] for record in records if ITERATIONS_PER_SECOND in record and record["step"] <= last}
    return f"epoch {len(epochs)}, step {last}"


def evaluation(quantity: str, name: str) -> str:
    """Tag of a scalar of an evaluation of the whole validation volume; TensorBoard folds those of one quantity."""
    return f"Evaluation {quantity}/{name}"
