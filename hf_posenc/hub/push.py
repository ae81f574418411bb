"""Publish a saved model: everything is checked before the first byte, and one commit makes all of it visible at once.

An upload that breaks leaves no revision behind: weights that arrived are found again by their digest, so that a second
call sends what is missing and then commits.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, RepositoryNotFoundError

from hf_posenc.errors import OutputExistsError, PublishError
from hf_posenc.hub.card import model_card
from hf_posenc.hub.staging import files_of, hub_name, result_of, stage

STALE = ["posenc_*.py", "*.safetensors", "*.safetensors.index.json"]
"""What an earlier revision may have that this one replaces under other names."""
TRIES = 4
PAUSE = 0.25
"""Seconds before the first further try, doubled before each one after it."""
FAILURES: tuple[type[Exception], ...] = (OSError, RuntimeError, *HfHubHTTPError.__bases__)
"""The error of the HTTP library, whichever it is, and what huggingface_hub makes of broken uploads."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Publication:
    """What is to be published, and on what terms.

    Attributes:
        repo_id: `owner/name` on the Hub.
        base_model: Hub name of the base model, where it is known.
        licence: SPDX identifier in lower case, None where it is not known.
        private: whether a new repository is private.
        reason: why it is.
        sizes: file -> bytes.
    """

    repo_id: str
    base_model: str | None
    licence: str | None
    private: bool
    reason: str
    sizes: Mapping[str, int]

    def __str__(self) -> str:
        """Return the lines that are shown before anything is sent."""
        state = "private" if self.private else "public"
        lines = [
            f"{self.repo_id}: {state}, {self.reason}",
            f"base model {self.base_model or 'unknown'}, licence {self.licence or 'unknown'}",
            *(f"{size:>14,}  {name}" for name, size in sorted(self.sizes.items())),
            f"{sum(self.sizes.values()):>14,}  bytes in {len(self.sizes)} files",
        ]
        return "\n".join(lines)


def push_to_hub(
    folder: str | Path,
    repo_id: str,
    *,
    base_model: str | None = None,
    licence: str | None = None,
    private: bool | None = None,
    curves: str | Path | None = None,
    dry_run: str | Path | None = None,
    api: HfApi | None = None,
) -> Publication:
    """Publish a saved model with its card, in one commit.

    Args:
        folder: a saved model or a run folder; what `staging.PUBLISHED` names of it goes up.
        repo_id: `owner/name`; made where it does not exist.
        base_model: Hub name of the base; the run's own where it is one.
        licence: of the weights; that of the base where it is left out.
        private: None makes a new repository private where the base is gated or no licence is known, and public
            elsewhere; False publishes in spite of that.
        curves: a `result.json` with the model's curves, or its folder, for the card.
        dry_run: new folder that is written as it would be pushed, in place of pushing. Only the base model is looked
            up, where the Hub can be reached.
        api: the way to the Hub; the token that the user is logged in with.

    Raises:
        PublishError: no token that may write, a licence that contradicts the base's, a repository that is public where
            this must not be, one that somebody else wrote to meanwhile, or an upload that did not get through.
        CheckpointError: the folder holds no model, pickled weights, or weights that are cut.
        OutputExistsError: the folder for the dry run is not empty.
    """
    source, api = Path(folder), api or HfApi()
    files, result = files_of(source), result_of(source, curves)
    base_model = base_model or hub_name(result.get("config", {}).get("model"))
    if dry_run is None:
        _require_role(api, repo_id)
    elif Path(dry_run).exists() and any(Path(dry_run).iterdir()):
        raise OutputExistsError(f"{dry_run} is not empty. Give another folder, or remove this one.")
    closed, licence = _terms(api, base_model, licence, offline=dry_run is not None)
    target = Path(dry_run) if dry_run else source / ".posenc-push"
    try:
        stage(source, files, target, result, curves)
        config = json.loads((target / "config.json").read_text(encoding="utf-8"))
        card = model_card(result, name=repo_id, licence=licence, base_model=base_model, config=config)
        (target / "README.md").write_text(card, encoding="utf-8")
        publication = Publication(
            repo_id=repo_id,
            base_model=base_model,
            licence=licence,
            private=closed is not None if private is None else private,
            reason=(closed or "the base is open") if private is None else "as asked",
            sizes={path.name: path.stat().st_size for path in target.iterdir()},
        )
        if dry_run is None:
            _upload(api, publication, target)
    finally:
        if dry_run is None:
            shutil.rmtree(target, ignore_errors=True)
    return publication


def _require_role(api: HfApi, repo_id: str) -> None:
    """Raise PublishError unless the token may write to that owner's repositories."""
    try:
        user = _tried(api.whoami)
    except LocalTokenNotFoundError as error:
        raise PublishError("There is no token; log in with `hf auth login` and one that may write.") from error
    token = user.get("auth", {}).get("accessToken", {})
    role, owner = token.get("role"), repo_id.partition("/")[0]
    may = role == "write"
    if role == "fineGrained":
        scopes = token.get("fineGrained", {}).get("scoped", [])
        may = any(
            "repo.write" in scope.get("permissions", ()) and scope.get("entity", {}).get("name") in (owner, repo_id)
            for scope in scopes
        )
    if not may:
        raise PublishError(f"The token has the role {role!r}, which may not write to {repo_id}; make one that may.")
    owners = {user.get("name"), *(organisation.get("name") for organisation in user.get("orgs", ()))}
    if owner not in owners:
        raise PublishError(f"{user.get('name')} is no member of {owner!r}, to whom {repo_id} would belong.")


def _terms(api: HfApi, base_model: str | None, licence: str | None, *, offline: bool) -> tuple[str | None, str | None]:
    """Return why the model is not for everybody, None where it may be, and its licence, None where it is not known.

    Raises:
        PublishError: the licence asked for is not that of the base.
    """
    closed = known = None
    try:
        info = None if base_model is None else _tried(lambda: api.model_info(str(base_model)))
        if info is not None:
            known = info.card_data.get("license") if info.card_data else None
            closed = f"{base_model} is gated ({info.gated})" if info.gated else None
            closed = f"{base_model} is private" if info.private else closed
    except RepositoryNotFoundError:
        closed = f"{base_model} is not there or not to be seen"
    except PublishError:
        if not offline:
            raise
    if licence and known and licence != known:
        raise PublishError(
            f"{base_model} is licensed as {known!r}, which a model made of it keeps; not as {licence!r}."
        )
    licence = licence or known
    return closed or (None if licence else "no licence is known"), licence


def _upload(api: HfApi, publication: Publication, folder: Path) -> None:
    repo_id = publication.repo_id
    _tried(lambda: api.create_repo(repo_id, private=publication.private, exist_ok=True))
    there = _tried(lambda: api.model_info(repo_id))
    if publication.private and not there.private:
        raise PublishError(
            f"{repo_id} is public and must not be ({publication.reason}); make it private, or say private=False."
        )
    _tried(
        lambda: api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message="Upload by hf-posenc",
            delete_patterns=STALE,
            parent_commit=there.sha,  # whoever commits meanwhile is not overwritten
        )
    )


def _tried(call: Callable[[], T]) -> T:
    """Return what a call to the Hub returns, tried again where the Hub or the way to it failed.

    Raises:
        PublishError: it is refused, or failed too often.
        RepositoryNotFoundError: there is no such repository, or none that the token may see.
        LocalTokenNotFoundError: there is no token.
    """
    for attempt in range(1, TRIES + 1):
        try:
            return call()
        except (RepositoryNotFoundError, LocalTokenNotFoundError):
            raise
        except FAILURES as error:
            status = getattr(getattr(error, "response", None), "status_code", None)
            said = " ".join(str(error).split())
            if status == 412:
                raise PublishError(f"Somebody else wrote to it meanwhile; look, and push again. {said}") from None
            if status is not None and status < 500:
                raise PublishError(f"The Hub refused ({status}): {said}") from None
            if attempt == TRIES:
                raise PublishError(f"The Hub could not be reached, {TRIES} times: {said}") from None
        time.sleep(PAUSE * 2**attempt)
    raise ValueError("TRIES must be at least 1")
