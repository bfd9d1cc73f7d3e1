"""Names on the Hugging Face hub, and the commits that a run keeps to.

`hf://OWNER/NAME@REVISION` is a model, `hf://datasets/OWNER/NAME@REVISION` a dataset; with `/FILE` one file.
A revision is a branch, a tag or a commit; without one, the main branch. huggingface_hub reads the same names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from rlhf_core.errors import InputError, warn

COMMIT = re.compile(r"[0-9a-f]{40}")
_NAME = re.compile(
    r"hf://(?:models/|(?P<dataset>datasets)/)?(?!(?:models|datasets|spaces|buckets)/)"
    r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)"
    r"(?:@(?P<revision>refs/[^/@]+/[^/@]+|[^/@]+))?(?:/(?P<file>.*[^/]))?/?"
)


class HubName(NamedTuple):
    """A name of the hub. type: "model" or "dataset". file: its path in the repository; None: all of it."""

    repository: str
    type: str
    revision: str | None
    file: str | None

    def __str__(self) -> str:
        of = "datasets/" if self.type == "dataset" else ""
        name = f"hf://{of}{self.repository}"
        if self.revision is not None:
            safe = "/" if self._is_ref else ""
            name += f"@{quote(self.revision, safe=safe)}"
        if self.file is not None:
            name += f"/{self.file}"
        return name

    @property
    def _is_ref(self) -> bool:
        return self.revision is not None and self.revision.startswith("refs/")

    @property
    def is_pinned(self) -> bool:
        """Return whether it names a commit, whose content never changes."""
        return self.revision is not None and COMMIT.fullmatch(self.revision) is not None


def in_cache(directory: Path) -> bool:
    """Return whether a directory is a commit in huggingface_hub's cache, of which some files may not be downloaded."""
    return directory.parent.name == "snapshots" and COMMIT.fullmatch(directory.name) is not None


def is_hub_name(value: Any) -> bool:
    """Return whether a value is a text that begins with hf://."""
    return isinstance(value, str) and value.startswith("hf://")


def parse(name: str) -> HubName:
    """Split a name into its parts. Raises InputError for one that is not of the hub's form."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise InputError(
            f"{name} is not a name of the hub: write hf://OWNER/NAME@REVISION for a model, "
            "hf://datasets/OWNER/NAME@REVISION/FILE for data; @REVISION may be left out"
        )
    revision = match["revision"]
    return HubName(
        match["repository"],
        "dataset" if match["dataset"] else "model",
        None if revision is None else unquote(revision),
        match["file"],
    )


@dataclass
class Pins:
    """The commits that a run keeps to.

    recorded: {name as written: name with a commit}, of the run's stages that have begun. used: the same for the names
    that were met now.
    """

    recorded: Mapping[str, str]
    used: dict[str, str] = field(default_factory=dict)

    def pin(self, value: Any, where: str, problems: list[str]) -> Any:
        """Replace each hf:// name in a text, table or list by the name of the commit that it means.

        where: the dotted path of `value`, for `problems`. Warns where the hub has another commit than was recorded.
        """
        if isinstance(value, Mapping):
            return {k: self.pin(v, f"{where}.{k}", problems) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.pin(v, f"{where}[{i}]", problems) for i, v in enumerate(value)]
        if not is_hub_name(value):
            return value
        if value not in self.used:
            try:
                name = parse(value)
                if value in self.recorded:
                    self.used[value] = self.recorded[value]
                    self._warn_of_newer(value, name)
                else:
                    self.used[value] = str(name._replace(revision=_commit(name)))
            except InputError as error:
                problems += [f"{where}: {problem}" for problem in error.problems]
                return value
        return self.used[value]

    def _warn_of_newer(self, written: str, name: HubName) -> None:
        kept = parse(self.recorded[written]).revision or ""
        with suppress(InputError):  # no connection
            newest = _commit(name)
            if newest != kept:
                warn(
                    f"{written} is at commit {newest[:12]} now; the run keeps to {kept[:12]}, with which it began. "
                    "Another --dir takes the new one"
                )


def _commit(name: HubName) -> str:
    """Ask the hub which commit a revision is; without a connection, the cache of huggingface_hub."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    if name.is_pinned:
        return str(name.revision)
    at: dict[str, Any] = {"repo_type": name.type, "revision": name.revision}
    try:
        return str(HfApi().repo_info(name.repository, timeout=10, **at).sha)
    except HfHubHTTPError as error:
        raise _refused(name, error) from error
    except Exception as error:  # no connection, in the words of several libraries
        try:
            return Path(
                snapshot_download(name.repository, local_files_only=True, allow_patterns=[], **at)
            ).name
        except (OSError, ValueError):
            raise _refused(name, error) from error


def fetch(name: str, patterns: Sequence[str] | None = None) -> Path:
    """Download a file or a repository once, and return its path in the cache of huggingface_hub.

    patterns: of the files of a repository to download; None: all. Raises InputError where the hub does not give it.
    """
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    parts = parse(name)
    at: dict[str, Any] = {"repo_type": parts.type, "revision": parts.revision}
    try:
        if parts.file is not None:
            return Path(hf_hub_download(parts.repository, parts.file, **at))
        wanted = None if patterns is None else list(patterns)
        return Path(snapshot_download(parts.repository, allow_patterns=wanted, **at))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise _refused(parts, error) from error


_REASONS = {
    "GatedRepoError": "it is gated; accept its terms on the hub, then type hf auth login",
    "RepositoryNotFoundError": "the hub has no such repository, or it is private; what is private needs hf auth login",
    "RevisionNotFoundError": "the repository has no such revision",
    "LocalEntryNotFoundError": "it is not in the cache, and there is no connection to the hub; download it on another "
    "machine (hf download) and give its path",
    "EntryNotFoundError": "the repository has no such file",
}
"""What errors of huggingface_hub mean, by the names of their classes."""


def _refused(name: HubName, error: Exception) -> InputError:
    for kind in type(error).__mro__:
        reason = _REASONS.get(kind.__name__)
        if reason:
            return InputError(f"{name}: {reason}")
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return InputError(
        f"{name}: the hub does not give it: {reason}; without a connection, download it on another machine "
        "(hf download) and give its path"
    )
