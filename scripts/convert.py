"""Convert a model to another position encoding, on one process or many; `--help` lists the options.

python scripts/convert.py --model gpt2 --encoding kerple --encoding_options '{per_layer: true}' --output_dir runs/kerple
accelerate launch --num_processes 2 scripts/convert.py --model gpt2 --encoding rope --output_dir runs/rope
torchrun --nproc_per_node 2 scripts/convert.py ...   # on CPUs, where accelerate starts one process
"""

from __future__ import annotations

import sys

from hf_posenc.conversion.convert_command import main

if __name__ == "__main__":
    sys.exit(main(prog="convert.py"))
