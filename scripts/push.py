"""Publish a saved model on the Hub; `--help` lists the options.

python scripts/push.py runs/alibi user/gpt2-alibi --dry_run upload
"""

from __future__ import annotations

import sys

from hf_posenc.hub.command import main

if __name__ == "__main__":
    sys.exit(main(prog="push.py"))
