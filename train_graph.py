"""Trains as train.py does, with the whole step recorded as a CUDA graph and replayed.

python train_graph.py --config=bs64_opt
srun -n 8 python train_graph.py --config=bs512_opt
"""

from __future__ import annotations

from train import main
from utils.distributed import world as distributed
from utils.steps.graph import GraphStep

if __name__ == "__main__":
    distributed.run_script(lambda: main(make_step=GraphStep))
