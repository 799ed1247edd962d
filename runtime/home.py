"""Where this user's tracking store and cluster profiles are kept."""

import os
from pathlib import Path


def home() -> Path:
    """$PACELINE_HOME, else $XDG_DATA_HOME/paceline, else ~/.local/share/paceline; absolute."""
    data_home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    folder = os.environ.get("PACELINE_HOME") or Path(data_home) / "paceline"
    return Path(folder).expanduser().absolute()
