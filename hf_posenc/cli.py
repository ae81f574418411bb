"""The `hf-posenc` command: one function for each of its subcommands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Replace the position encoding of a pretrained model, and measure what happens past its trained length.",
)

Model = Annotated[str, typer.Argument(help="Checkpoint: a folder or a Hub name.")]
Encoding = Annotated[str, typer.Option(help="Position encoding to put in; `hf-posenc list` shows them.")]
Options = Annotated[str, typer.Option(help="Fields of the encoding as YAML, such as '{theta: 500000}'.")]
Output = Annotated[Path, typer.Option(help="New folder to write to.")]


@app.command("list")
def list_registry(
    what: Annotated[str, typer.Argument(help="`encodings` or `families`.")] = "encodings",
) -> None:
    """List the encodings, with what each of them is and asks for, or the model families."""
    from hf_posenc.catalogue import HEADINGS, NARROW, WIDE, catalogue
    from hf_posenc.errors import UnknownNameError, did_you_mean
    from hf_posenc.family import FAMILIES

    if what not in ("encodings", "families"):
        raise UnknownNameError(f"there is no list of {what!r}; {did_you_mean(what, ('encodings', 'families'))}")
    console = Console()
    table = Table(box=None, pad_edge=False)
    if what == "encodings":
        fields = HEADINGS if console.width >= WIDE else NARROW
        for field in fields:
            table.add_column(HEADINGS[field], no_wrap=field == "name", overflow="fold")
        for entry in catalogue():
            table.add_row(*(getattr(entry, field) for field in fields))
        if len(fields) < len(HEADINGS):
            table.caption = f"A terminal of {WIDE} columns or more shows paper, trained numbers, start and exports too."
            table.caption_justify = "left"
    else:
        for heading in ("family", "model types", "attention modules"):
            table.add_column(heading, no_wrap=heading == "family", overflow="fold")
        for name, family in sorted({family.name: family for family in FAMILIES.values()}.items()):
            table.add_row(name, ", ".join(family.model_types), ", ".join(family.attention))
    console.print(table)


@app.command()
def inspect(
    model: Model,
    encoding: Annotated[str | None, typer.Option(help="Also show what putting this encoding in would change.")] = None,
    options: Options = "{}",
    documents: Annotated[
        str, typer.Option(help='Texts to try positions on: "embedded", a file or folder.')
    ] = "embedded",
) -> None:
    """Show how a model holds positions, how far they really reach, and what could replace them."""
    from transformers import AutoTokenizer

    import hf_posenc as posenc
    from hf_posenc.data import load_documents
    from hf_posenc.inspection import inspection

    loaded = posenc.from_pretrained(model)
    texts = [document.text for document in load_documents(documents, split="held_out")[:4]]
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, ImportError):  # without one, what rests on text is left out
        tokenizer = None
    table = Table(show_header=False, box=None)
    for heading, words in inspection(loaded, texts, tokenizer=tokenizer).items():
        table.add_row(heading, words)
    Console().print(table)
    if encoding:
        print(posenc.plan(loaded, posenc.encoding(encoding, **_fields(options))))


@app.command()
def diagnose(
    models: Annotated[
        list[str], typer.Argument(help="Checkpoints, each a folder or a Hub name; NAME=PATH to name it.")
    ],
    output: Output,
    documents: Annotated[str, typer.Option(help='"embedded", a file, folder or glob, or a Hub dataset.')] = "embedded",
    split: Annotated[str, typer.Option(help="Split of the embedded corpus or of the Hub dataset.")] = "held_out",
    max_documents: Annotated[int, typer.Option(help="Use only the first so many documents.")] = 20,
    length: Annotated[int | None, typer.Option(help="Tokens in which scores are measured; 128 where possible.")] = None,
    sequences: Annotated[int, typer.Option(help="Sequences of random tokens over which scores are averaged.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the random tokens.")] = 0,
) -> None:
    """Show why absolute positions fail: what positions do in each of these models, in words, a table and plots."""
    from hf_posenc.report.diagnosis import diagnose_checkpoints

    settings: dict[str, Any] = {"length": length, "sequences": sequences, "seed": seed}
    diagnose_checkpoints(models, output, documents=documents, split=split, max_documents=max_documents, **settings)


@app.command()
def patch(model: Model, encoding: Encoding, output: Output, options: Options = "{}") -> None:
    """Put an encoding into a model without training it, and save the result with its tokenizer."""
    from transformers import AutoTokenizer

    import hf_posenc as posenc
    from hf_posenc.errors import OutputExistsError

    if output.exists() and any(output.iterdir()):
        raise OutputExistsError(f"{output} exists and is not empty. Give another output folder, or remove this one.")
    config = posenc.encoding(encoding, **_fields(options))
    loaded = posenc.from_pretrained(model)
    print(posenc.plan(loaded, config))
    posenc.patch(loaded, config)
    print(posenc.verify(loaded))
    loaded.save_pretrained(output)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        posenc.set_model_max_length(tokenizer, loaded)
        tokenizer.save_pretrained(output)
    except (OSError, ValueError, ImportError) as error:
        print(f"no tokenizer was saved, since {model} has none: {error}")
    print(f"saved to {output}")


def _print_routes(asked: bool) -> None:
    """Print the table of routes and end."""
    from hf_posenc.export import known_types, ranked

    if not asked:
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("target", "writes", "from", "other engines that run it"):
        table.add_column(heading, no_wrap=heading == "target", overflow="fold")
    for route in ranked():
        table.add_row(route.name, route.writes, ", ".join(known_types(route)), route.runs)
    Console().print(table)
    raise typer.Exit


@app.command()
def export(
    model: Model,
    folder: Annotated[Path, typer.Argument(help="New folder to write to.")],
    target: Annotated[str | None, typer.Option(help="Route to take; the preferred exact one otherwise.")] = None,
    length: Annotated[int | None, typer.Option(help="Positions to state, and rows of a table that has to end.")] = None,
    routes: Annotated[
        bool, typer.Option("--list", help="Print the routes and exit.", callback=_print_routes, is_eager=True)
    ] = False,
) -> None:
    """Write a patched model as a stock architecture that computes the same, proven in a process without hf_posenc."""
    from transformers import AutoTokenizer

    import hf_posenc as posenc

    loaded = posenc.from_pretrained(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, ImportError) as error:
        tokenizer = None
        print(f"no tokenizer will be saved, since {model} has none: {error}")
    print(posenc.export_native(loaded, folder, tokenizer, target=target, length=length))


def _fields(options: str) -> dict[str, Any]:
    from hf_posenc.conversion.finetune_config import parse_mapping

    return parse_mapping(options, called="--options")


@app.command()
def quickstart(
    output: Output = Path("quickstart"),
    steps: Annotated[int, typer.Option(help="Training steps of every model, 4,096 tokens each.")] = 300,
) -> None:
    """Patch, fine-tune and measure the small bundled model; ends with a table and a plot."""
    from hf_posenc.quickstart import quickstart as run

    run(output, steps=steps)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def finetune(context: typer.Context) -> None:
    """Fine-tune by YAML and flags; `hf-posenc finetune --help` lists them."""
    from hf_posenc.conversion.command import main as run

    raise typer.Exit(run(context.args))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def convert(context: typer.Context) -> None:
    """Convert by a recipe: calibrate, then train beside the original; `hf-posenc convert --help` lists the flags."""
    from hf_posenc.conversion.convert_command import main as run

    raise typer.Exit(run(context.args))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def evaluate(context: typer.Context) -> None:
    """Measure several saved models into one table and one plot; `hf-posenc evaluate --help` lists the flags."""
    from hf_posenc.report.command import main as run

    raise typer.Exit(run(context.args))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def retrieve(context: typer.Context) -> None:
    """Measure what saved models find in texts of growing length; `hf-posenc retrieve --help` lists the flags."""
    from hf_posenc.report.retrieval_command import main as run

    raise typer.Exit(run(context.args))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def compare(context: typer.Context) -> None:
    """Put results and models side by side: table, plots, page, CSV; `hf-posenc compare --help` lists the flags."""
    from hf_posenc.report.compare_command import main as run

    raise typer.Exit(run(context.args))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def push(context: typer.Context) -> None:
    """Publish a saved model with its card, in one commit; `hf-posenc push --help` lists the flags."""
    from hf_posenc.hub.command import main as run

    raise typer.Exit(run(context.args))


@app.command()
def card(
    folder: Annotated[Path, typer.Argument(help="Folder with a result.json, and config.json where it is a model's.")],
    name: Annotated[str, typer.Option(help="What the card calls it; for a model, its name on the Hub.")],
    licence: Annotated[str, typer.Option(help="SPDX identifier of the licence, in lower case.")],
    base_model: Annotated[str | None, typer.Option(help="Hub name of the base model.")] = None,
) -> None:
    """Write README.md, the card of a run, from its result.json."""
    from hf_posenc.hub.card import write_card

    print(f"written to {write_card(folder, name=name, licence=licence, base_model=base_model)}")


def main() -> None:
    """Run the command; errors of this package are one line and exit status 2."""
    from hf_posenc.errors import PosencError

    try:
        app()
    except PosencError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
