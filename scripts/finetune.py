"""Fine-tune by YAML and flags, on one process or many; `--help` lists the options.

python scripts/finetune.py --config run.yaml --learning_rate 1e-3
accelerate launch --num_processes 2 scripts/finetune.py --config run.yaml
torchrun --nproc_per_node 2 scripts/finetune.py ...   # on CPUs, where accelerate starts one process
"""

from __future__ import annotations

import sys

from hf_posenc.conversion.command import main

if __name__ == "__main__":
    sys.exit(main(prog="finetune.py"))
