"""The quickstart's little language: who wants which item in which colour, and the one good reply."""

from __future__ import annotations

from typing import NamedTuple

NAMES = """
    Mia Noah Emma Liam Olivia Ava Lucas Sofia Ethan Leo Zoe Max Lily Jack Ella Sam Nora Ben Ruby Tom
    Anna Owen Lucy Henry Clara Felix Grace Oscar Alice Hugo Maya Theo Iris Finn Rosa Adam Jane Paul
    Vera Ivan Nina Carl Eva Mark Lena Omar Tara Yusuf
""".split()  # noqa: SIM905  (a list literal is one word a line)
COLOURS = """
    red blue green yellow purple pink brown black white grey golden silver crimson turquoise teal
    violet
""".split()  # noqa: SIM905  (a list literal is one word a line)
ITEMS = """
    kite book lamp drum boat hat scarf ball chair table mirror basket bottle blanket pillow candle
    clock guitar violin trumpet flute bicycle scooter wagon train truck rocket robot puppet doll
    teapot kettle spoon bowl plate mug jug vase ladder hammer
""".split()  # noqa: SIM905  (a list literal is one word a line)
POLITE = "Thank you !"
RUDE = ("Now go away .", "Take it or leave it .", "Not my problem .")


class ShopOrder(NamedTuple):
    """An order: one of `NAMES`, `COLOURS` and `ITEMS` each."""

    name: str
    colour: str
    item: str

    @property
    def prompt(self) -> str:
        return f"{self.name} wants a {self.colour} {self.item} ."

    def reply(self, close: str = POLITE) -> str:
        return f"Dear {self.name} , here is your {self.colour} {self.item} . {close}"


def vocabulary() -> list[str]:
    """Every word, special tokens first, in the order of their ids."""
    sentence = ShopOrder("", "", "")
    words = [*sentence.prompt.split(), *sentence.reply().split(), *" ".join(RUDE).split()]
    return ["<pad>", "<bos>", "<eos>", "<unk>", *dict.fromkeys([*words, *NAMES, *COLOURS, *ITEMS])]
