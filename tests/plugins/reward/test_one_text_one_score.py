"""One text, one score: every door reads a text to the token ids it was trained on, and none gives it another score."""

import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from rlhf_reward import RewardConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_core import REWARD, data, installed_registry, load_model, plugins
from rlhf_core.fit import ExampleUpdates
from rlhf_core.mesh import make_mesh
from rlhf_core.scoring import Scorer
from tests.shared import commands

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*sequences are longer than the 7 tokens", "ignore:.*over 7 tokens cut"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WIDTH = 40
"""More tokens than any sequence has."""
WORDS = [
    "<pad>",
    "</s>",
    "<unk>",
    "<s>",
    "<user>",
    "<assistant>",
    "<tool>",
    ":",
    *LETTERS,
    "user",
    "assistant",
]
TEMPLATE = """\
{%- for tool in tools or [] %}<tool> {{ tool.name }} {% endfor -%}
{%- for m in messages %}<{{ m.role }}> {{ m.content }} {{ eos_token }} {% endfor -%}
{%- if add_generation_prompt %}<assistant>{% endif -%}
"""


def words(*, pad: str = "<pad>") -> Any:
    """A word a token, with a chat template that ends every turn, and a blank after that."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token=pad, unk_token="<unk>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>", "<tool>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _text(draw: np.random.Generator, low: int, high: int) -> str:
    return " ".join(draw.choice(list(LETTERS), draw.integers(low, high)))


def texts() -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    return [
        {"prompt": _text(draw, 1, 9), **{side: f" {_text(draw, 1, 9)}" for side in ("chosen", "rejected")}}
        for _ in range(6)
    ]


def chats() -> list[dict[str, Any]]:
    """With a tool each; turns before the last end in EOS too."""
    draw = np.random.default_rng(1)
    rows = []
    for i in range(6):
        roles = ["user"] if i % 2 else ["user", "assistant", "user"]
        row: dict[str, Any] = {"prompt": [{"role": role, "content": _text(draw, 1, 4)} for role in roles]}
        for side in ("chosen", "rejected"):
            row[side] = [{"role": "assistant", "content": _text(draw, 1, 6)}]
        row["tools"] = [{"name": _text(draw, 1, 2)}]
        rows.append(row)
    return rows


@dataclass(frozen=True)
class Case:
    rows: list[dict[str, Any]]
    tokenizer: Any
    options: dict[str, Any] = field(default_factory=dict)


CUT = {"max_sequence_length": 7, "overlong": "truncate", "truncation_mode": "keep_end"}
CASES = {
    "texts": Case(texts(), words(), CUT),
    "chat, tools, pad is EOS": Case(chats(), words(pad="</s>")),
}
"""Others are tried without training in tests/packages: tokenizer/test_same_ids.py and core/test_scoring.py."""


@dataclass(frozen=True)
class Trained:
    """A reward model after one update, and the sequences it was trained on, chosen and rejected in turn."""

    case: Case
    path: Any
    ids: list[list[int]]
    alone: np.ndarray
    """float64 [2 · pairs]: each sequence's score in a batch of its own."""
    scorer: Scorer


@pytest.fixture(scope="module", params=CASES)
def trained(request, tiny, tmp_path_factory):
    case, seen = CASES[request.param], []
    inner = ExampleUpdates.__init__

    def spy(self, source, *arguments, **options):
        seen.extend(source.trees)
        inner(self, source, *arguments, **options)

    model = tiny.make_model("score", scale=6.0, vocab_size=64)
    config = RewardConfig(learning_rate=1e-3, max_training_steps=1, total_batch_size=4, **case.options)
    inputs = {"model": model, "tokenizer": case.tokenizer, "train_dataset": case.rows}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExampleUpdates, "__init__", spy)
        path = tiny.run("reward", config, tmp_path_factory.mktemp("rm"), **inputs).path
    ids = [[*tree.prefix.tolist(), *branch.tolist()] for tree in seen for branch in tree.branches]
    judge = load_model(path, head="score", mesh=tiny.one_device())
    filled = [np.pad(each, (0, WIDTH - len(each)))[None] for each in ids]  # one program for all
    masks = [np.int32(np.arange(WIDTH) < len(each))[None] for each in ids]
    alone = [float(judge.scores(x, mask)[0]) for x, mask in zip(filled, masks, strict=True)]
    assert len(ids) == 2 * len(case.rows)
    assert np.std(alone) > 0.02
    return Trained(case, path, ids, np.array(alone), Scorer.load(path))


@pytest.fixture
def read(monkeypatch):
    """The sequences that scorers computed, in order."""
    found: list[list[int]] = []
    inner = Scorer._score_some

    def spy(self, sequences, *arguments):
        found.extend(each.tolist() for each in sequences)
        return inner(self, sequences, *arguments)

    monkeypatch.setattr(Scorer, "_score_some", spy)
    return found


def singles(case: Case) -> list[dict[str, Any]]:
    """A row for every sequence: its prompt, its completion, its tools."""
    return [
        {"completion": row[side], **{k: v for k, v in row.items() if k in ("prompt", "tools")}}
        for row in case.rows
        for side in ("chosen", "rejected")
    ]


def both(scores: dict[str, np.ndarray]) -> np.ndarray:
    return np.stack([scores["chosen_score"], scores["rejected_score"]], 1).ravel()


def preferences(trained, tiny, tmp_path):
    return both(trained.scorer.score_rows(data.load(trained.case.rows)))


def completions(trained, tiny, tmp_path):
    return trained.scorer.score_rows(data.load(singles(trained.case)))["score"]


def conversations(trained, tiny, tmp_path):
    rows = [
        {"messages": [*row["prompt"], *row["completion"]], "tools": row.get("tools")}
        if isinstance(row["prompt"], list)
        else {"text": row["prompt"] + row["completion"]}
        for row in singles(trained.case)
    ]
    return trained.scorer.score_rows(data.load(rows))["score"]


def python(trained, tiny, tmp_path):
    rows = singles(trained.case)
    columns = ([row.get(name) for row in rows] for name in ("prompt", "completion", "tools"))
    return trained.scorer.score_completions(*columns)


def command(trained, tiny, tmp_path):
    source, target = tiny.write_rows(tmp_path / "pairs.jsonl", trained.case.rows), tmp_path / "scored.jsonl"
    commands.rlhf("score", trained.path, source, "-o", target)
    return [row[f"{side}_score"] for row in tiny.read_rows(target) for side in ("chosen", "rejected")]


def reward(trained, tiny, tmp_path):
    """The reward `model`, which is given the texts of a rollout."""
    registry = plugins.load().registry
    judge = registry.get(REWARD, "model", model=str(trained.path))
    judge.setup(SimpleNamespace(devices=tiny.one_device, registry=registry))
    rows = singles(trained.case)
    columns = {"tools": [row["tools"] for row in rows]} if "tools" in rows[0] else {}
    return judge([row["prompt"] for row in rows], [row["completion"] for row in rows], **columns)


DOORS = [preferences, completions, conversations, python, command, reward]


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_every_door_reads_what_was_trained_and_scores_it_alike(trained, read, tiny, tmp_path, door):
    found = np.asarray(door(trained, tiny, tmp_path), np.float64)
    assert read == trained.ids
    assert_same(found, trained.alone)


def assert_same(found, alone):
    assert (np.abs(found - alone) <= 1e-5 * (1 + np.abs(alone))).all(), np.abs(found - alone).max()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_by_eos_is_no_token(trained, tiny, side):
    """The mask says where a sequence ends, not the id of its padding."""
    model = load_model(trained.path, head="score", mesh=tiny.one_device())
    width = max(map(len, trained.ids)) + 3
    ids, mask = np.full((len(trained.ids), width), 1, np.int32), np.zeros((len(trained.ids), width), np.int32)
    for i, own in enumerate(trained.ids):
        at = slice(len(own)) if side == "right" else slice(width - len(own), None)
        ids[i, at], mask[i, at] = own, 1
    assert_same(np.asarray(model.scores(ids, mask), np.float64), trained.alone)


def test_the_cases_are_what_they_say(trained):
    """Texts are cut, at their beginning; conversations begin with a tool and have an EOS inside."""
    case, eos = trained.case, 1
    longest = max(map(len, trained.ids))
    assert all(each[-1] == eos for each in trained.ids)
    if case.options:
        assert longest == 7
    else:
        assert longest > 9
        assert any(eos in each[:-1] for each in trained.ids)
        assert all(each[0] == WORDS.index("<tool>") for each in trained.ids)
    assert WORDS.index("<unk>") not in {i for each in trained.ids for i in each}


def reward_of(directory):
    return installed_registry().get(REWARD, "model", model=str(directory))


def test_a_reward_is_set_up_before_it_is_called(tiny, tmp_path):
    tiny.make_model("score", scale=6.0).save(tmp_path)
    with pytest.raises(RuntimeError, match="setup"):
        reward_of(tmp_path)(["a"], [" b"])


def test_a_resumed_run_scores_in_the_same_shapes(tiny, tmp_path):
    """Others would change the last bits, and with them everything that follows."""
    tiny.make_model("score", scale=6.0).save(tmp_path)
    few, many = ["a b c"], ["d e f g h i j k l m"] * 40
    meshes = [tiny.one_device(), tiny.one_device(), make_mesh(devices=jax.devices()[:4])]
    first, again, elsewhere = (reward_of(tmp_path) for _ in meshes)
    for reward, mesh in zip((first, again, elsewhere), meshes, strict=True):
        reward.setup(SimpleNamespace(devices=lambda mesh=mesh: mesh, registry=None))
    assert first.snapshot() == {}
    again.restore({})
    first(few, [" x"])
    kept = json.loads(json.dumps(first.snapshot()))
    for reward in (again, elsewhere):
        reward.restore(kept)
    assert again.snapshot() == first.snapshot()
    assert again(many, [" x y"] * 40) == first(many, [" x y"] * 40)
    assert len(elsewhere(few, [" x"])) == 1  # its mesh takes rows by four: shapes of its own
    assert elsewhere.snapshot() != first.snapshot()
