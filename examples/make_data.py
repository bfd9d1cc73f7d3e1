"""Write the data of a tutorial into the current directory.

    python make_data.py shop|votes|sort

shop: a table of questions and answers, with what real files have: a row that comes twice, and an empty answer.
votes: questions to sort letters, each with two answers and their votes, which are wrong now and then.
sort: prompts and demonstrations of the same task; two in three demonstrations are out of order.
"""

import csv
import json
import random
import sys
from itertools import permutations
from pathlib import Path

LETTERS = "abcdefgh"


def shop():
    colours = ["red", "green", "blue", "black"]
    items = ["kite", "lamp", "chair", "clock", "scarf", "mug", "plant", "mirror", "rug", "shelf"]
    rows = []
    for i, item in enumerate(items):
        for colour in colours:
            yes = (i + len(colour)) % 2
            answer = f"Yes, the {item} comes in {colour}." if yes else f"No {colour} {item}, sorry."
            rows.append(
                {"question": f"Do you have the {item} in {colour}?", "answer": answer, "topic": "colours"}
            )
    rows.append(rows[0])
    rows.append({"question": "Do you have gift cards?", "answer": "", "topic": "gifts"})
    with open("shop.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer", "topic"])
        writer.writeheader()
        writer.writerows(rows)


def votes():
    write_tokenizer()
    train, held_out = orders(256)
    write("votes.jsonl", [vote(order) for order in train])
    write("votes.heldout.jsonl", [vote(order) for order in held_out])


def vote(order):
    mistake = random.choice(["forgotten", "forgotten", "forgotten", "invented", "swapped"])
    answers = [(sorted(order), random.randint(0, 9)), (wrong(order, mistake), random.randint(0, 2))]
    random.shuffle(answers)
    texts, counts = zip(*answers, strict=True)
    return {
        "question": f"sort {' '.join(order)} :",
        "answers": [" ".join(text) for text in texts],
        "votes": counts,
        "mistake": mistake,
    }


def wrong(order, mistake):
    answer = sorted(order)
    if mistake == "forgotten":
        answer.remove(random.choice(answer))
    elif mistake == "invented":
        answer = sorted([*answer, random.choice([x for x in LETTERS if x not in order])])
    else:
        i = random.randrange(len(answer) - 1)
        answer[i], answer[i + 1] = answer[i + 1], answer[i]
    return answer


def sort():
    write_tokenizer()
    train, held_out = orders(128)
    write("demonstrations.jsonl", [demonstration(order) for order in train])
    write("prompts.jsonl", [prompt(order) for order in train])
    write("prompts.heldout.jsonl", [prompt(order) for order in held_out])


def prompt(order):
    return {"prompt": f"sort {' '.join(order)} :", "answer": " ".join(sorted(order)), "count": len(order)}


def demonstration(order):
    completion = sorted(order) if random.random() < 0.3 else random.sample(order, len(order))
    return {"prompt": prompt(order)["prompt"], "completion": " " + " ".join(completion)}


def orders(held_out):
    """Letters to sort, three or four each: for training, and held out."""
    shuffled = [order for count in (3, 4) for order in permutations(LETTERS, count)]
    random.shuffle(shuffled)
    return shuffled[held_out:], shuffled[:held_out]


def write_tokenizer():
    """A tokenizer of 13 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", "<unk>", "sort", ":", *LETTERS]
    Path("tokenizer").mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<unk>"])
    tokenizer.save("tokenizer/tokenizer.json")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
    }
    Path("tokenizer/tokenizer_config.json").write_text(json.dumps(settings))


def write(name, rows):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    makers = {"shop": shop, "votes": votes, "sort": sort}
    if len(sys.argv) != 2 or sys.argv[1] not in makers:
        sys.exit(f"usage: python make_data.py {'|'.join(makers)}")
    random.seed(0)
    makers[sys.argv[1]]()
