"""The handwritten digits that come with scikit-learn: images of 8 × 8 pixels with values 0 to 16."""

from pathlib import Path

import numpy as np

from utils.data.datasets.common import ClassificationData, Dataset
from utils.data.plan import ShufflePlan
from utils.errors import UserError

SAMPLES = {"train": 1437, "valid": 360}
SPLIT_SEED = 1797  # the split is the same for every run


def read(directory: Path) -> dict[str, ClassificationData]:
    """Reads all images; a fixed random fifth is the validation split."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError(
            "data set digits is part of scikit-learn, which is not installed; pip install scikit-learn"
        ) from None
    digits = load_digits()
    images, labels = digits.images.astype(np.uint8)[:, None], digits.target.astype(np.int64)
    order = ShufflePlan(len(labels), len(labels), SPLIT_SEED).epoch(0)
    parts = {"train": order[: SAMPLES["train"]], "valid": order[SAMPLES["train"] :]}
    return {split: ClassificationData(images[rows], labels[rows]) for split, rows in parts.items()}


DIGITS = Dataset((1, 8, 8), 10, SAMPLES, read, scale=1 / 16)
