"""Model repositories on the Hugging Face Hub, through the Hub's own cache: ``hf://organisation/name``."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from conch.core.errors import ConchError, unavailable
from conch.machine import extras
from conch.repository.stores.store import Arrived, Redacted, RemoteFile, explained
from conch.repository.stores.urls import StoreUrl

LOG = logging.getLogger("conch")

#: Progress bars of the Hub's library that would mix with log lines.
_BARS: Final = ("huggingface_hub.http_get", "huggingface_hub.xet_get")
#: The timeout of listing a Hub repository (s).
_SECONDS: Final = 30


def open_hub(url: StoreUrl, environment: Mapping[str, str]) -> HubStore:
    """Open the repository at ``url``. Raises UNSUPPORTED without the extra."""
    hub = extras.load(f"model repository {url}", "huggingface_hub", extra="stores")
    bars = extras.load(f"model repository {url}", "huggingface_hub.utils", extra="stores")
    for group in _BARS:  # conch logs progress itself
        bars.disable_progress_bars(group)
    return HubStore(url, hub, environment.get("HF_TOKEN") or environment.get("PRIVATE_REPO_TOKEN") or "")


class HubStore:
    """A repository on the Hub.

    ``hub`` is the module ``huggingface_hub``; in its offline mode only its cache is read.
    """

    def __init__(self, url: StoreUrl, hub: Any, token: str) -> None:
        self._url = url
        self._hub = hub
        self._token = token or None
        self._redacted = Redacted((token,))
        self._commit = self._revision = url.revision or "main"
        self._inside = f"{url.prefix}/" if url.prefix else ""

    def find(self, below: str = "") -> list[RemoteFile]:
        prefix = f"{self._inside}{below}/" if below else self._inside
        files = self._cached() if self._hub.constants.HF_HUB_OFFLINE else self._listed()
        return [file for path, file in files if path.startswith(prefix)]

    def _listed(self) -> list[tuple[str, RemoteFile]]:
        """List the files on the Hub by path. Later downloads use the commit of this listing."""
        info = self._hub.HfApi(token=self._token).model_info(
            self._url.bucket, revision=self._revision, files_metadata=True, timeout=_SECONDS
        )
        self._commit = info.sha
        files = []
        for sibling in info.siblings or []:
            lfs = sibling.lfs
            # Large files have a SHA-256, others their Git digest.
            stamp = lfs.sha256 if lfs is not None else sibling.blob_id or ""
            digest = f"{'sha256' if lfs is not None else 'git'}:{stamp}" if stamp else ""
            size = lfs.size if lfs is not None else sibling.size
            files.append((sibling.rfilename, self._file(sibling.rfilename, size or 0, stamp, digest)))
        return files

    def _cached(self) -> list[tuple[str, RemoteFile]]:
        """List the files in the Hub's cache by path. The cache names each file by the Hub's digest of its content."""
        try:
            folder = Path(self._hub.snapshot_download(self._url.bucket, revision=self._revision, local_files_only=True))
        except self._hub.errors.LocalEntryNotFoundError:
            raise unavailable(
                f"model repository {self._url} is not in the Hub's cache at {self._hub.constants.HF_HUB_CACHE}, and "
                "offline mode is on: switch it off (HF_HUB_OFFLINE)"
            ) from None
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        named = [(path.relative_to(folder).as_posix(), path) for path in paths]
        return [(name, self._file(name, path.stat().st_size, path.resolve().name, "")) for name, path in named]

    def _file(self, path: str, size: int, stamp: str, digest: str) -> RemoteFile:
        return RemoteFile(path.removeprefix(self._inside), size, stamp, 0.0, digest)

    def fetch(self, file: RemoteFile, target: Path, arrived: Arrived) -> None:
        """Download a file to the Hub's cache and link or copy it to ``target``."""
        arrived(0)
        cached = self._hub.hf_hub_download(
            self._url.bucket,
            f"{self._inside}{file.path}",
            revision=self._commit,
            token=self._token,
            local_files_only=self._hub.constants.HF_HUB_OFFLINE,
        )
        content = Path(cached).resolve()
        target.unlink(missing_ok=True)
        try:
            os.link(content, target)
        except OSError:  # another file system
            shutil.copyfile(content, target)
        arrived(file.size)
        self._note_commit()

    def _note_commit(self) -> None:
        """Record the revision's commit in the Hub's cache for offline mode, as a download by revision does."""
        if self._commit == self._revision:
            return
        folder = self._hub.file_download.repo_folder_name(repo_id=self._url.bucket, repo_type="model")
        named = Path(self._hub.constants.HF_HUB_CACHE, folder, "refs", self._revision)
        try:
            if not named.is_file() or named.read_text() != self._commit:
                named.parent.mkdir(parents=True, exist_ok=True)
                named.write_text(self._commit)
        except OSError as error:
            LOG.warning("%s cannot be written, so that offline mode will not find %s: %s", named, self._url, error)

    def digest_holds(self, file: RemoteFile) -> bool:
        return True

    def explain(self, error: Exception) -> ConchError:
        return explained(self._url, error, "HF_TOKEN, and that its account has accepted the conditions", self._redacted)
