"""Trains like train.py, but records the whole step as a CUDA graph and replays it.

python train_graph.py --config=bs64_opt
srun -n 8 python train_graph.py --config=bs512_opt
"""

from train import main
from utils.distributed.launch import run_script
from utils.steps.graph import GraphStep

if __name__ == "__main__":
    run_script(lambda: main(step_class=GraphStep))
