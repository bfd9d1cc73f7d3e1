"""Complete the metadata of every distribution with what all of them share, written once, here.

The version is that of rlhf_core/__init__.py; a distribution's pyproject.toml has the rest, also what it depends on.
A source distribution takes these fields from its PKG-INFO: nothing here is called then.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT = Path(__file__).resolve().parent
REPOSITORY = "https://example.org/rlhf"  # a placeholder until there is an address; nothing else names it
VERSION = re.findall(r'^__version__ = "(.+)"$', (ROOT / "rlhf_core/__init__.py").read_text("utf-8"), re.M)[0]
CLASSIFIERS = [
    "Development Status :: 4 - Beta",
    "Intended Audience :: Developers",
    "Intended Audience :: Science/Research",
    "Operating System :: POSIX :: Linux",
    *(f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13, 14)),
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Typing :: Typed",
]
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#]+)")


class Shared(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        complete(metadata, self.root, self.config)


def complete(metadata: dict[str, Any], root: str, config: dict[str, Any]) -> None:
    """Set version, licence, classifiers, addresses, the README, and what the table `config` says is needed."""
    metadata["version"] = VERSION
    metadata["requires-python"] = ">=3.11"
    metadata["license"] = "Apache-2.0"
    metadata["classifiers"] = CLASSIFIERS
    metadata["urls"] = {
        "Repository": REPOSITORY,
        "Documentation": f"{REPOSITORY}/blob/main/docs/index.md",
        "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
    }
    metadata["readme"] = {"content-type": "text/markdown", "text": readme(Path(root))}
    metadata["dependencies"] = list(map(of_this_release, config["dependencies"]))
    if extras := config.get("optional-dependencies"):
        metadata["optional-dependencies"] = {
            extra: list(map(of_this_release, needed)) for extra, needed in extras.items()
        }


def readme(root: Path) -> str:
    """Return README.md with links that work outside the repository: pictures as files, the rest as pages."""

    def absolute(link: re.Match[str]) -> str:
        path = (root / link[1]).resolve().relative_to(ROOT).as_posix()
        return f"{REPOSITORY}/{'raw' if path.endswith('.png') else 'blob'}/main/{path}"

    return LINK.sub(absolute, (root / "README.md").read_text("utf-8"))


def of_this_release(requirement: str) -> str:
    """Pin a distribution of this repository to the same version: together they use more than the promised names."""
    return f"{requirement}=={VERSION}" if requirement.startswith("rlhf-") else requirement
