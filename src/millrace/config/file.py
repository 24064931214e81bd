"""Text files that users give to options.

Invariant: an error about a file names the file and the option it was given for.
"""

from __future__ import annotations

from pathlib import Path

from millrace.errors import ConfigError


def read_given(path: Path, option: str) -> str:
    """The text of the file that was given for --`option`."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        what, hint = f"can't read the {option} in {path}: {error.strerror}", "the name of a file"
    except UnicodeDecodeError:
        what, hint = f"the {option} in {path} are not UTF-8", "a file that is saved as UTF-8"
    raise ConfigError(what, hint=f"give --{option} {hint}", file=str(path))
