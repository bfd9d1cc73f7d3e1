"""Complete the metadata as ../../hatch_build.py does; a source distribution has it in PKG-INFO."""

import runpy
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Shared(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        shared = runpy.run_path(str(Path(self.root).parents[1] / "hatch_build.py"))
        shared["complete"](metadata, self.root, self.config)
