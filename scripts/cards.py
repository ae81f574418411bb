"""Write the cards in model_cards/ again, each from the result beside it.

python scripts/cards.py
python scripts/cards.py quickstart     # take over what that run of `make quickstart` found, before
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from hf_posenc.hub.card import write_card
from hf_posenc.quickstart import BASE, LICENCE
from hf_posenc.report import PLOT_NAME, RESULT_NAME

CARDS = Path(__file__).resolve().parents[1] / "model_cards"
KEPT = ("config.json", "table.txt", RESULT_NAME, PLOT_NAME)
"""Beside the settings of the quickstart itself; those of a model's training name folders of the machine it ran on."""


def take_over(run: Path) -> None:
    """Copy result, config and plot of a quickstart, and of each of its models as it would be published."""
    places = {"quickstart": run}
    for saved in sorted((run / "models").iterdir()):
        exported = run / "exported" / saved.name
        if saved.name != "original":
            places[f"{Path(BASE).name}-{saved.name}"] = exported if exported.exists() else saved
    for name, source in places.items():
        (CARDS / name).mkdir(exist_ok=True)
        for file in (*KEPT, "config.yaml") if source is run else KEPT:
            if (source / file).exists():
                shutil.copyfile(source / file, CARDS / name / file)


def name_of(folder: Path) -> str:
    """Return what a card calls itself: the name of a model, or what was run."""
    return folder.name if (folder / "config.json").exists() else f"hf-posenc {folder.name}"


def main() -> None:
    """Take over a run, where one is named, and write every card."""
    for run in sys.argv[1:]:
        take_over(Path(run))
    for result in sorted(CARDS.glob(f"*/{RESULT_NAME}")):
        print(write_card(result.parent, name=name_of(result.parent), licence=LICENCE))


if __name__ == "__main__":
    main()
