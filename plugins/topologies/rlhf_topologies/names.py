"""Names of devices: `h100:8`, `h200:2x8`, `h100:1x4x8`, `v5e:4x4`, `v5p:2x2x4`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from rlhf_core.errors import InputError, suggest
from rlhf_topologies.chips import CHIPS, Chip

FORMS = {
    "gpu": "CHIP:[[SLICESx]HOSTSx]DEVICES, such as {chip}:8, or {chip}:2x8 for two machines of eight",
    "tpu": "CHIP:XxY or XxYxZ as the TPU's documentation writes it, such as {chip}:{example}",
}
MACHINES = {
    "gpu": ((1,), (2,), (4,), (8,)),
    "v5e": ((1, 1), (2, 2), (2, 4)),
    "v6e": ((1, 1), (2, 2), (2, 4)),
    "v5p": ((2, 2, 1), (2, 2, 2)),
}
"""Shapes from which `--suggest` takes the smallest where no number of devices is asked for."""
AXES = {"v5e": 2, "v6e": 2, "v5p": 3}
"""Dimensions of a TPU's interconnect."""


@dataclass(frozen=True)
class Topology:
    """Devices that need not exist. shape: slices × hosts × devices of each (GPU), or as the TPU's name has it."""

    chip: Chip
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """Return the name as it is typed, without leading ones."""
        shape = list(self.shape)
        while self.chip.platform == "gpu" and len(shape) > 1 and shape[0] == 1:
            shape.pop(0)
        return f"{self.chip.name}:{'x'.join(map(str, shape))}"

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def machine(self) -> int:
        """Count the devices that reach each other without a network: of a GPU machine, or of the whole TPU slice."""
        return self.shape[-1] if self.chip.platform == "gpu" else self.count


def parse(name: str) -> Topology:
    """Read the name of devices. Raises InputError that says how names are written."""
    kind, _, written = name.strip().lower().partition(":")
    if kind not in CHIPS:
        raise InputError(
            f"--on {name}: no device '{kind}'; there are {', '.join(CHIPS)}.{suggest(kind, CHIPS)}"
        )
    chip = CHIPS[kind]
    form = FORMS[chip.platform].format(chip=kind, example="4x4" if AXES.get(kind) == 2 else "2x2x4")
    if not re.fullmatch(r"\d+(x\d+)*", written):
        raise InputError(f"--on {name}: write {form}")
    shape = tuple(int(size) for size in written.split("x"))
    wanted = {1, 2, 3} if chip.platform == "gpu" else {AXES[kind]}
    if len(shape) not in wanted or 0 in shape:
        raise InputError(f"--on {name}: write {form}")
    return Topology(chip, (1,) * (3 - len(shape)) + shape if chip.platform == "gpu" else shape)


def machines(name: str) -> list[Topology]:
    """Read the name of devices, or of a chip alone, which stands for machines with ever more of them."""
    kind = name.strip().lower()
    if kind not in CHIPS:
        return [parse(name)]
    chip = CHIPS[kind]
    shapes = MACHINES["gpu" if chip.platform == "gpu" else kind]
    return [parse(f"{kind}:{'x'.join(map(str, shape))}") for shape in shapes]
