"""How the programs end: exit statuses, and sentences that several of them say."""

from pathlib import Path

INTERRUPTED = 130
"""Exit status of what was interrupted."""


def not_told_anew(folder: Path, error: Exception) -> str:
    """Return in a sentence why no summary of a folder of results could be written anew."""
    if isinstance(error, OSError) and error.strerror:
        reason = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    elif isinstance(error, LookupError | TypeError):  # whose texts alone say nothing
        reason = repr(error)
    else:
        reason = str(error).rstrip(".") or repr(error)
    return f"{folder} cannot be told anew: {reason}."
