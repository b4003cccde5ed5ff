"""The command of the simulator: python -m simulation --output train.h5 --grid 128 --seed 1."""

import signal
import sys

from simulation.simulate import main

if __name__ == "__main__":
    # Without a handler, a canceled batch job would leave the temporary file.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
