"""Judge a reply of the quickstart exactly, word by word.

This is the measure of success, and it stays a measure: no trainer and no reward imports it, so that whatever
the policy learned, it learned from the preference pairs.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from rlhf_tools.demo.words import COLOURS, ITEMS, NAMES, POLITE, RUDE, ShopOrder

_PARTS = {
    "name": "|".join(NAMES),
    "colour": "|".join(COLOURS),
    "item": "|".join(ITEMS),
    "close": "|".join(re.escape(close) for close in (POLITE, *RUDE)),
}
_SLOTS = {part: f"(?P<{part}>{words})" for part, words in _PARTS.items()}
_ORDER = re.compile("{name} wants a {colour} {item} \\.".format(**_SLOTS))
_REPLY = re.compile("Dear {name} , here is your {colour} {item} \\. {close}".format(**_SLOTS))


class Verdict(NamedTuple):
    """The parts of a reply that are right: none in a malformed one."""

    well_formed: bool
    finished: bool
    name: bool = False
    colour: bool = False
    item: bool = False
    close: bool = False

    @property
    def success(self) -> bool:
        return all(self)

    @property
    def mistakes(self) -> tuple[str, ...]:
        """The fields that are wrong; of a malformed reply only what can be said of it."""
        fields = self._fields if self.well_formed else ("well_formed", "finished")
        return tuple(field for field in fields if not getattr(self, field))


def parse_order(prompt: str) -> ShopOrder:
    """Read the order in `prompt`. Raises ValueError where there is none."""
    order = _ORDER.fullmatch(prompt.strip())
    if order is None:
        raise ValueError(f"not an order of the quickstart: {prompt!r}")
    return ShopOrder(*order.groups())


def judge(prompt: str, reply: str, *, finished: bool = True) -> Verdict:
    """Judge `reply` to the order `prompt`, words separated by single spaces.

    finished: whether the reply ended by itself, rather than at the longest length allowed.
    Raises ValueError where `prompt` is no order.
    """
    order = parse_order(prompt)
    said = _REPLY.fullmatch(reply.strip())
    if said is None:
        return Verdict(well_formed=False, finished=finished)
    return Verdict(
        well_formed=True,
        finished=finished,
        name=said["name"] == order.name,
        colour=said["colour"] == order.colour,
        item=said["item"] == order.item,
        close=said["close"] == POLITE,
    )
