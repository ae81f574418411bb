"""How tests start two processes that work together: on a CPU, `accelerate launch --num_processes 2` starts one."""

from __future__ import annotations

TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0")
"""What stands between Python and the program that it runs."""
