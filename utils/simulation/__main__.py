"""python -m utils.simulation --output train.h5 --grid 128 --seed 1"""

from utils.simulation.simulate import main

if __name__ == "__main__":
    main()
