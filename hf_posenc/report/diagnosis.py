"""What a diagnosis says, for somebody who meets positions for the first time: sentences, a table, and a folder."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hf_posenc.data import EMBEDDED, HELD_OUT, describe, load_documents
from hf_posenc.errors import ConfigError
from hf_posenc.evaluation.diagnosis import SEQUENCES, Diagnosis, check_settings, diagnose
from hf_posenc.evaluation.loading import load_tokenizer, not_loaded
from hf_posenc.evaluation.position_table import closest_stranger
from hf_posenc.evaluation.result import check_alike, perplexity
from hf_posenc.evaluation.shift import TOLERATED
from hf_posenc.report.diagnosis_plots import plot_comparison, plot_diagnosis
from hf_posenc.report.files import check_output, write_results, write_table
from hf_posenc.report.launching import named_paths

_SAME = 0.005  # nats a token that moving all positions may cost and still count as nothing
_ALL = 0.995  # of a share, from where on it is said to be all
_ODD = re.compile(r"[^\w.-]+")
_LONGEST = 80  # characters of the name of a file
_COMPARISON = "comparison"


def sentences(diagnosis: Diagnosis) -> list[str]:
    """Return what was found, one statement a sentence, ready to print as a list."""
    parts = (_positions, _terms, _scores, _trained, _likeness, _frequencies, _moved)
    return [sentence for part in parts for sentence in part(diagnosis)]


def _positions(d: Diagnosis) -> list[str]:
    if d.max_length is None:
        return [f"Positions: {d.kind}. No table ends, so that text of any length runs; how well is another matter."]
    return [f"Positions: {d.kind}, {d.max_length:,} of them. Token {d.max_length + 1:,} has no position at all."]


def _terms(d: Diagnosis) -> list[str]:
    if d.terms is None:
        return []
    weights = d.terms.total.square()
    share = {name: float((value * weights).sum() / weights.sum()) for name, value in d.terms.share.items()}
    mixed = share["content_position"] + share["position_content"]
    past = "have nothing to read past its end" if d.max_length else "read there, past the training, what they never saw"
    return [
        f"First layer, exactly: its scores vary because of words with words {share['content_content']:.0%}, words with "
        f"places {mixed:.0%}, places with places {share['position_position']:.0%}. All but the first read the table, "
        f"and {past}."
    ]


def _scores(d: Diagnosis) -> list[str]:
    low, high = min(d.position_share), max(d.position_share)
    said = f"All layers, estimated: positions alone, whatever the words, explain {low:.0%} to {high:.0%} of the scores"
    if d.toeplitz_r2 is None:
        return [f"{said}, too little to ask how much of it is distance."]
    if d.toeplitz_r2 > _ALL:
        return [f"{said}. All of that is a matter of distance, which a relative encoding can say at any length."]
    source = "ends where the training ended" if d.table else "comes of how many tokens stand before"
    return [
        f"{said}. Of that, {d.toeplitz_r2:.0%} is distance alone, which a relative encoding can say at any length; "
        f"{1 - d.toeplitz_r2:.0%} is about absolute places, and {source}."
    ]


def _trained(d: Diagnosis) -> list[str]:
    table = d.table
    if table is None or table.trained is None or table.initial is None:
        return []
    rows = len(table.norms)
    if table.trained == 0:
        return [f"Table: no row was ever trained, all are as long as they were drawn ({table.initial:.2f})."]
    if table.trained == rows:
        said = f"Table: every row has moved away from the length it was drawn with ({table.initial:.2f})"
    elif table.trained == rows - 1:
        said = f"Table: the last row was never trained, it is no longer than it was drawn ({table.initial:.2f})"
    else:
        said = (
            f"Table: rows from position {table.trained + 1:,} on were never trained, they are no longer than they were "
            f"drawn ({table.initial:.2f})"
        )
    weak = f"; after position {table.strong:,} rows are shorter than most, for less training"
    weak = weak if table.strong < table.trained else ""
    return [f"{said}{weak}."]


def _likeness(d: Diagnosis) -> list[str]:
    similarity = d.table.similarity if d.table else None if d.rotation is None else d.rotation.similarity
    if similarity is None or len(similarity) < 2:
        return []
    said = f"Likeness: neighbours are alike by {float(similarity[1]):.2f} (1 is the same)"
    stranger = closest_stranger(similarity[: max(len(similarity) * 3 // 4, 2)])  # few pairs are further apart
    if stranger is None:
        return [f"{said}."]
    return [f"{said}; of places further than 16 apart, those at distance {stranger[0]:,} by {stranger[1]:.2f}."]


def _frequencies(d: Diagnosis) -> list[str]:
    if d.rotation is None:
        return []
    pairs, length = len(d.rotation.wavelengths), len(d.rotation.similarity)
    return [
        f"Frequencies: of {pairs} pairs, {d.rotation.repeating} come round again within {length:,} tokens (alone, they "
        f"take far places for near ones), {d.rotation.idle} do not get through a quarter turn (they hardly tell places "
        "apart, and show angles never seen in training as soon as the text is longer)."
    ]


def _moved(d: Diagnosis) -> list[str]:
    if d.shift is None:
        return []
    at, cost = max(d.shift.cost.items(), key=lambda item: item[1])
    if cost <= _SAME:
        return [f"Moved: the same text by up to {max(d.shift.nll):,} positions further costs nothing."]
    said = (
        f"Moved: the same text {at:,} positions further costs {cost:.2f} nats a token more, which is "
        f"{perplexity(cost):.3g} times the perplexity"
    )
    if cost > TOLERATED:
        return [f"{said}. Text stays as good as at the start (within {TOLERATED}) up to position {d.shift.usable:,}."]
    return [f"{said}: every position can be used."]


def diagnosis_table(found: Sequence[Diagnosis]) -> Table:
    """Return models side by side, for rich to print: a row a finding, a column a model."""
    table = Table(title="What positions do", title_justify="left")
    table.add_column("", no_wrap=True)
    for d in found:
        table.add_column(escape(d.name), justify="right")
    columns = [_findings(d) for d in found]
    for heading in columns[0]:
        table.add_row(heading, *(column[heading] for column in columns))
    return table


def _findings(d: Diagnosis) -> dict[str, str]:
    """Return what was found in one model by heading, empty where it has nothing of the kind."""
    trained = None if d.table is None else d.table.trained
    shares, losses = d.position_share, None if d.shift is None else d.shift.nll
    return {
        "positions": d.kind,
        "reach": "no end" if d.max_length is None else f"{d.max_length:,}",
        "trained": "" if trained is None else f"{trained:,}",
        "scores explained": f"{min(shares):.0%} to {max(shares):.0%}",
        "of that distance": "" if d.toeplitz_r2 is None else f"{d.toeplitz_r2:.0%}",
        "loss": "" if losses is None else f"{losses[0]:.3f}",
        "loss moved": "" if losses is None else f"{max(losses.values()):.3f}",
        "usable to": "" if d.shift is None else f"{d.shift.usable:,}",
    }


def diagnosis_text(found: Sequence[Diagnosis]) -> Group:
    """Return, for rich to print, the table and below it the findings for each model, with what was not measured.

    Raises:
        DataError: there is nothing, two of the models share a name, or they were not measured alike.
    """
    check_alike(found, ("sequences", "seed"))
    lines: list[Text] = []
    for d in found:
        lines += [Text(""), Text(d.name, style="bold"), *(Text(f"  {sentence}") for sentence in sentences(d))]
        lines += [Text(f"  Not measured ({what}): {why}") for what, why in d.reasons.items()]
    first = found[0]
    lengths = " or ".join(f"{length:,}" for length in sorted({d.length for d in found}))
    note = (
        f"Estimated over {first.sequences} sequences of {lengths} random tokens of the texts (seed {first.seed}); "
        "loss in nats a token, lower is better."
    )
    return Group(diagnosis_table(found), Text(note), *lines)


def write_diagnosis(found: Sequence[Diagnosis], folder: Path | str, *, corpus: Mapping[str, Any] | None = None) -> Path:
    """Write `result.json`, `table.txt` and, as PNG and SVG, one page of plots for each model and one for all.

    Raises:
        OutputExistsError: the folder already holds a result.
        DataError: as in `diagnosis_text`.
    """
    folder = check_output(folder)
    text = diagnosis_text(found)
    write_table(folder, text, width=160)
    for d, name in zip(found, _file_names([d.name for d in found]), strict=True):
        plot_diagnosis(d, folder / name)
    if len(found) > 1:
        plot_comparison(found, folder / _COMPARISON)
    return write_results(folder, seed=found[0].seed, corpus=corpus, content={"diagnoses": [d.to_dict() for d in found]})


def _file_names(names: Sequence[str]) -> list[str]:
    """Return a name for the plots of each model, without what file systems object to, and no two the same."""
    taken, found = {_COMPARISON}, []
    for name in names:
        plain = _ODD.sub("_", name).strip("_.")[:_LONGEST] or "model"
        numbered = (f"{plain}-{number}" for number in itertools.count(2))
        free = next(option for option in itertools.chain([plain], numbered) if option.lower() not in taken)
        taken.add(free.lower())  # some file systems do not tell the case of letters
        found.append(free)
    return found


def diagnose_checkpoints(
    models: Sequence[str],
    output: Path | str,
    *,
    documents: str = EMBEDDED,
    split: str = HELD_OUT,
    max_documents: int = 20,
    length: int | None = None,
    sequences: int = SEQUENCES,
    seed: int = 0,
) -> list[Diagnosis]:
    """Diagnose saved models on the same texts, one in memory at a time; write the folder and print what is in it.

    Args:
        models: folders or Hub names, or `NAME=PATH`.
        output: new folder, as in `write_diagnosis`.
        documents, split: as in `data.load_documents`.
        max_documents: only the first so many are used, at least 1.
        length, sequences, seed: as in `evaluation.diagnosis.diagnose`.

    Raises:
        PosencError: what cannot be done, where possible before the first model is loaded.
    """
    paths = named_paths(models)
    check_output(output)
    check_settings(length, sequences, seed)
    if max_documents < 1:
        raise ConfigError(f"max_documents must be at least 1; got {max_documents}.")
    used = load_documents(documents, split=split)[:max_documents]
    texts = [document.text for document in used]
    settings: Any = {"length": length, "sequences": sequences, "seed": seed}
    found = [_diagnosed(path, texts, name=name, **settings) for name, path in paths.items()]
    write_diagnosis(found, output, corpus=describe(used))
    Console().print(diagnosis_text(found))
    print(f"written to {output}")
    return found


def _diagnosed(path: str, texts: Sequence[str], **settings: Any) -> Diagnosis:
    """Return the diagnosis of a saved model, whose memory is free again when this returns."""
    import hf_posenc

    try:
        model = hf_posenc.from_pretrained(path, dtype=torch.float32)
    except Exception as error:  # transformers and the Hub's client raise what they like
        raise not_loaded(path, "model", error) from error
    device: Any = "cuda" if torch.cuda.is_available() else "cpu"
    return diagnose(model.to(device), texts, tokenizer=load_tokenizer(path), **settings)
