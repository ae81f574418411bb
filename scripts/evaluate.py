"""Measure several saved models on the same held-out texts, into one table and one plot.

python scripts/evaluate.py --model gpt2=runs/gpt2 --model alibi=runs/alibi --lengths 128 256 512 --output out
accelerate launch --num_processes 2 scripts/evaluate.py ...          # shares the documents, same numbers
torchrun --nproc_per_node 2 scripts/evaluate.py ...   # on CPUs, where accelerate starts one process
"""

from __future__ import annotations

import sys

from hf_posenc.report.command import main

if __name__ == "__main__":
    sys.exit(main(prog="evaluate.py"))
