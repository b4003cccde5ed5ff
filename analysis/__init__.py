"""Uses of a trained network: predictions, evaluations, the Lyman-alpha forest."""

import utils  # noqa: F401 # sets variables that torch reads when it is imported
