"""Measure what several saved models find in texts of growing length, into one table and one plot.

python scripts/retrieve.py --model gpt2=runs/gpt2 --model alibi=runs/alibi --task passkey --lengths 256 512 --output out
accelerate launch --num_processes 2 scripts/retrieve.py ...          # shares the prompts, same numbers
torchrun --nproc_per_node 2 scripts/retrieve.py ...   # on CPUs, where accelerate starts one process
"""

from __future__ import annotations

import sys

from hf_posenc.report.retrieval_command import main

if __name__ == "__main__":
    sys.exit(main(prog="retrieve.py"))
