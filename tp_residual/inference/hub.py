"""A model by its hub id: downloaded once, by huggingface_hub, into its own cache. Imports no torch."""

import re
from collections.abc import Sequence
from pathlib import Path

from tp_residual.errors import ConfigError

CONFIG_ONLY = ("config.json",)
EVERYTHING = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


def resolve_model(name: str, patterns: Sequence[str] = EVERYTHING) -> str:
    """A directory as it is; `owner/name` or `owner/name@revision`, where no such directory exists, as its snapshot in the hub's cache.

    Raises ConfigError when the hub cannot be reached and the cache lacks the model, or when there is no such model.
    """
    if Path(name).exists() or not _HUB_ID.fullmatch(name):
        return name
    from huggingface_hub import snapshot_download  # half a second, which directories need not pay
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    repo_id, _, revision = name.partition("@")
    try:
        return str(snapshot_download(repo_id, revision=revision or None, allow_patterns=list(patterns)))
    except GatedRepoError:
        reason = "it is gated: accept its terms on the hub and log in with `hf auth login`"
    except RepositoryNotFoundError:
        reason = "the hub has no such model, or it is private: check the name, or log in with `hf auth login`"
    except LocalEntryNotFoundError:
        reason = "the hub cannot be reached and its cache has no copy: go online, or give a directory"
    except (HfHubHTTPError, OSError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        reason = f"the download failed ({first}): try again, or give a directory"
    raise ConfigError(f"--model {name} is no directory here, and as a hub id: {reason}")
