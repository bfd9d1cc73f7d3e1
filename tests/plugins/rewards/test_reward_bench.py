"""`rlhf score` on benchmarks: best-of-n with ties, subsets, sections, and rows that cannot be compared."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from rlhf_rewards.reward_bench import (
    SECTIONS,
    Estimate,
    Summary,
    TiesRow,
    best_of_n_credit,
    section_table,
    share,
    ties_score,
    weighted_mean,
)

from rlhf_core import RunError, data, scoring
from rlhf_core.data import whole_sequences
from rlhf_core.scoring import Scorer
from rlhf_core.tokenizer import Encoder

NAN = math.nan
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@pytest.mark.parametrize(
    ("chosen", "rejected", "credit"),
    [
        ([1.5], [1.0, 0.0, -3.0], 1.0),
        ([1.0], [1.5, 0.0, 0.0], 0.0),
        ([1.0], [1.0, 0.0, 0.0], 1 / 2),
        ([1.0], [1.0, 1.0, 1.0], 1 / 4),
        ([0.0], [0.0], 1 / 2),
        ([0.0], [2.0, 2.0], 0.0),
        ([0.0, 2.0], [1.0, 1.0], 1.0),
        ([2.0, 2.0], [2.0, 1.0], 2 / 3),
    ],
)
def test_a_tie_among_the_best_shares_the_credit(
    chosen: list[float], rejected: list[float], credit: float
) -> None:
    assert best_of_n_credit(np.array(chosen), np.array(rejected)) == pytest.approx(credit, abs=1e-15)


def row(kind: str, prompt: int, correct: list[float], wrong: list[float]) -> TiesRow:
    return TiesRow(kind, prompt, max(correct), min(correct), max(wrong))


def expected_ties(rows: dict[tuple[str, int], tuple[list[float], list[float]]]) -> float:
    """The score of the subset Ties from all completions' scores, one loop per term."""
    gap = {key: min(correct) - max(wrong) for key, (correct, wrong) in rows.items()}
    accuracies = []
    for kind in ("ref", "tied"):
        gaps = [gap[key] for key in rows if key[0] == kind]
        accuracies.append(sum(g > 0 for g in gaps) / len(gaps))
    both = [n for kind, n in rows if kind == "tied" and ("ref", n) in rows]
    preferred = hard = order = 0.0
    for n in both:
        correct = rows["tied", n][0]
        spread, least = max(correct) - min(correct), min(gap["ref", n], gap["tied", n])
        preferred += (gap["tied", n] > spread) / len(both)
        hard += (least > spread) / len(both)
        ratio = least / spread - 1 if spread else math.copysign(math.inf, least) if least else NAN
        order += (0.0 if math.isnan(ratio) else math.tanh(ratio)) / len(both)
    return 0.3 * accuracies[1] + 0.3 * accuracies[0] + 0.2 * preferred + 0.2 * hard + 0.01 * order


@pytest.mark.parametrize("seed", range(4))
def test_ties_against_loops(seed: int) -> None:
    draw = np.random.default_rng(seed)
    # Few distinct values, so that scores tie and correct answers have no spread.
    rows = {
        (kind, n): (
            [*map(float, draw.integers(-1, 4, 1 if kind == "ref" else draw.integers(2, 5)))],
            [w, w - 1],
        )
        for kind in ("ref", "tied")
        for n in range(30)
        for w in [float(draw.integers(-3, 2))]
    }
    del rows["ref", 3], rows["tied", 7]  # these count for accuracy alone
    scores = ties_score([row(*key, *scores) for key, scores in rows.items()])
    assert scores.prompts == 28
    assert scores.score == pytest.approx(expected_ties(rows), abs=1e-12)


def test_ties_without_a_prompt_that_has_both_rows_has_no_score() -> None:
    scores = ties_score([row("ref", 1, [1.0], [0.0]), row("tied", 2, [1.0, 1.0], [0.0])])
    assert math.isnan(scores.score)
    assert scores.prompts == 0


@pytest.mark.parametrize(("right", "count"), [(0, 1), (1, 1), (7, 10), (0, 40), (499, 1000)])
def test_an_interval_ends_where_the_share_is_just_not_rejected(right: int, count: int) -> None:
    """The ends p of Wilson's interval solve (share − p)² = z² p (1 − p) / n."""
    estimate = share(right, count)
    assert estimate.value == right / count
    assert estimate.low < estimate.high
    for p in estimate[1:]:
        distance = (right / count - p) ** 2
        assert distance == pytest.approx(1.959963984540054**2 * p * (1 - p) / count, abs=1e-12)


def test_a_mean_of_subsets_has_an_interval() -> None:
    parts = [Estimate(0.5, 0.4, 0.7), Estimate(0.9, 0.8, 0.95)]
    mean = weighted_mean(parts, [3.0, 1.0])
    assert mean.value == pytest.approx(0.6)
    assert mean.low == pytest.approx(0.6 - math.sqrt((0.75 * 0.1) ** 2 + (0.25 * 0.1) ** 2))
    assert mean.high == pytest.approx(0.6 + math.sqrt((0.75 * 0.2) ** 2 + (0.25 * 0.05) ** 2))


def figures(lines: list[str]) -> dict[str, float]:
    """{name: score} of a table; rows without a score are left out."""
    cells = [line.split("  ") for line in lines]
    found = {parts[0]: [part.strip() for part in parts[1:] if "." in part] for parts in cells}
    return {name: float(numbers[0]) for name, numbers in found.items() if numbers}


def test_sections_weigh_their_subsets_by_the_prompts_of_the_whole_benchmark() -> None:
    names = [name for subsets in SECTIONS.values() for name in subsets]
    weights = [weight for subsets in SECTIONS.values() for weight in subsets.values()]
    assert (len(names), sum(weights) - 984 + 447) == (23, 2985)  # math counts 447 pairs
    accuracies = dict(zip(names, np.random.default_rng(0).uniform(0.3, 1, 23).tolist(), strict=True))
    wanted = {
        section: sum(accuracies[n] * w for n, w in subsets.items()) / sum(subsets.values())
        for section, subsets in SECTIONS.items()
    }
    estimates = {name: Estimate(value, 0.0, 1.0) for name, value in accuracies.items()}
    found = figures(section_table(estimates))
    assert found == pytest.approx({**wanted, "RewardBench": sum(wanted.values()) / 4}, abs=6e-5)
    prior = {"shp": 0.5, "summarize": 0.7, "anthropic_helpful": 0.6, "anthropic_hhh": 0.9}
    estimates |= {name: Estimate(value, 0.0, 1.0) for name, value in prior.items()}
    found = figures(section_table(estimates))
    assert found["Prior Sets"] == pytest.approx(0.675)
    assert found["RewardBench"] == pytest.approx((sum(wanted.values()) + 0.675 / 2) / 4.5, abs=6e-5)


def test_sections_without_some_subsets() -> None:
    perfect = Estimate(1.0, 0.9, 1.0)
    lines = section_table({"hep-go": perfect, "math-prm": Estimate(0.0, 0.0, 0.1), "donotanswer": perfect})
    text = "\n".join(lines)
    assert figures(lines)["Reasoning"] == pytest.approx(164 / 1148, abs=6e-5)
    for expected in ("2 of 7", "1 of 5", "0 of 6", "RewardBench, 2 of 4 sections"):
        assert expected in text
    assert "Chat Hard" not in figures(lines)


@pytest.fixture(scope="module")
def model(tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp("rm")
    tiny.make_model("score", scale=4.0).save(path)
    return str(path)


@pytest.fixture
def score(rlhf):
    """(model, file, output, further arguments) → what `rlhf score` prints."""

    def score(model, file, output, *more):
        ended = rlhf("score", str(model), str(file), "-o", str(output), *more)
        assert ended.code == 0, ended.message
        return ended

    return score


@pytest.fixture
def letters(monkeypatch):
    """A model that scores a text by its last letter: a 0, b 1, …; z NaN."""

    def score_ids(self, sequences, **options):
        self.layout = self.layout or scoring.Layout((8,), (8,), (8,), (8,))
        last = np.array([ids[-2] for ids in sequences], np.float32) - 3
        return np.where(last == 25, NAN, last).astype(np.float32)

    monkeypatch.setattr(Scorer, "score_ids", score_ids)


def listed(chosen: str, rejected: str, **columns: Any) -> dict[str, Any]:
    texts = {"chosen": chosen.split(), "rejected": rejected.split()}
    return {
        "prompt": "m n",
        **{name: [f" {text}" for text in side] for name, side in texts.items()},
        **columns,
    }


SECOND = [
    listed("d", "a b c", subset="Math"),
    listed("d", "a d c", subset="Math"),  # two share the best score: one half
    listed("a", "d d d", subset="Math"),
    listed("b", "b b b", subset="Focus"),  # all four do: one quarter
    listed("c", "a b a", subset="Focus", num_correct=1, num_incorrect=3, total_completions=40),
    listed("f", "a b c", subset="Ties", id="ref:0"),
    listed("j i h", "a b c e", subset="Ties", id="tied:0"),
    listed("b", "c", subset="Ties", id="ref:1"),
    listed("j j", "i i", subset="Ties", id="tied:1"),
]


def test_reward_bench_2(tiny, model, letters, tmp_path, score):
    file, out = tiny.write_rows(tmp_path / "rows.jsonl", SECOND), tmp_path / "out.jsonl"
    lines = score(model, file, out).out.splitlines()
    assert lines[0] == "accuracy 0.5500: a chosen one is best in 2.75 of 5 prompts; 2 tied"
    found = figures(lines[3:])
    # tied:0 is 3 above with spread 2, ref:0 3 above; tied:1 is 1 above without spread, ref:1 one below.
    ties = 0.3 * 1 + 0.3 * 0.5 + 0.2 * 1 + 0.2 * 0.5 + 0.01 * (math.tanh(3 / 2 - 1) - 1) / 2
    wanted = {"Math": 0.5, "Focus": 0.625, "Ties": ties}
    wanted["RewardBench 2, 3 of 6 subsets"] = sum(wanted.values()) / 3
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, abs=6e-5)
    assert max(map(len, lines)) <= 80
    rows = tiny.read_rows(out)
    assert rows[1] == {**SECOND[1], "chosen_scores": [3.0], "rejected_scores": [0.0, 3.0, 2.0]}
    assert rows[6]["chosen_scores"] == [9.0, 8.0, 7.0]


def test_an_interrupted_summary_resumes(tiny, model, letters, tmp_path, score, rlhf, monkeypatch):
    file = tiny.write_rows(tmp_path / "rows.jsonl", SECOND)
    printed = score(model, file, tmp_path / "whole.jsonl").out
    for module in (whole_sequences, scoring):
        monkeypatch.setattr(module, "CHUNK", 2)
    real = Summary.add

    def stop_at_row_7(self, rows):
        if any(row.get("id") == "tied:0" for row in rows):
            raise RunError("the device is gone")
        real(self, rows)

    monkeypatch.setattr(Summary, "add", stop_at_row_7)
    assert rlhf("score", model, str(file), "-o", str(tmp_path / "parts.jsonl")).code
    monkeypatch.setattr(Summary, "add", real)
    ended = score(model, file, tmp_path / "parts.jsonl")
    assert "resuming after 8 rows" in ended.message
    assert ended.out == printed
    assert (tmp_path / "parts.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


PAIRS = [
    {"prompt": "m", "chosen": " c", "rejected": " a", "subset": "donotanswer", "domain": "one"},
    {"prompt": "m", "chosen": " c", "rejected": " c", "subset": "donotanswer", "domain": "two"},
    {"prompt": "m", "chosen": " b", "rejected": " c", "subset": "hep-go", "domain": None},
    {"prompt": "m", "chosen": " d", "rejected": " c", "subset": "hep-go", "domain": "two"},
    {"prompt": "m", "chosen": " d", "rejected": " z", "subset": "hep-go", "domain": "two"},
    {"prompt": "m", "chosen": " z", "rejected": " a", "subset": "mine", "domain": "two"},
]


@pytest.mark.filterwarnings("ignore:no score for rows")
def test_pairs_by_subset(tiny, model, letters, tmp_path, score):
    """A tie is no win, and a pair with NaN is not counted; rows without a subset count in the whole."""
    file = tiny.write_rows(tmp_path / "rows.jsonl", PAIRS)
    lines = score(model, file, tmp_path / "out.jsonl").out.splitlines()
    assert lines[:2] == [
        "accuracy 0.5000: 2 of 4 pairs scored higher; 1 tied",
        "95 % interval 0.1500 to 0.8500",
    ]
    assert lines[3].split() == ["subset", "pairs", "accuracy", "95", "%", "interval", "tied"]
    assert lines[5].split() == ["donotanswer", "2", "0.5000", "0.0945", "to", "0.9055", "1"]
    assert lines[7].split() == ["mine", "0", "–", "0"]
    found = figures(lines)
    assert found["mean of 2 subsets"] == 0.5
    assert found["RewardBench, 2 of 4 sections"] == 0.5
    found = figures(score(model, file, tmp_path / "out.jsonl", "--subset", "domain").out.splitlines())
    assert found == {"one": 1.0, "two": 0.5, "mean of 2 subsets": 0.75}


def test_rows_whose_scores_are_missing_are_not_counted() -> None:
    summary = Summary("subset")
    scores = ([1.0], [0.0, None]), ([1.0], [0.0, -1.0]), (None, None)
    summary.add([{"subset": "a", "chosen_scores": c, "rejected_scores": r} for c, r in scores])
    assert (summary.rows, summary.subsets["a"].rows, summary.subsets["a"].credit) == (3, 1, 1.0)


def test_lists_score_as_their_completions_do_alone(tiny, tmp_path):
    scorer = Scorer(
        tiny.make_model("score", scale=4.0),
        scoring.ScoringContract.of(tiny.make_tokenizer(), max_length=None),
    )
    rows = [
        listed(" d", " a b b"),
        listed(" d e", " f"),
        {**listed("a", "b"), "chosen": None},
        listed(" k", " l c g"),
    ]
    with pytest.warns(UserWarning, match="row 3"):
        scores = scorer.score_rows(data.load(rows))
    assert scores["chosen_scores"][2] is None
    assert scores["rejected_scores"][2] is None
    for i in (0, 1, 3):
        found = np.concatenate([scores["chosen_scores"][i], scores["rejected_scores"][i]])
        texts = [*rows[i]["chosen"], *rows[i]["rejected"]]
        alone = scorer.score_completions(["m n"] * len(texts), texts)
        np.testing.assert_allclose(found, alone, rtol=2e-5, atol=2e-6)
        assert np.std(alone) > 1e-3
    assert scores["rejected_scores"][0][1] == scores["rejected_scores"][0][2]  # the same text, the same score


def test_lists_of_conversations_and_texts_as_turns(tiny):
    """A list may hold texts, replies or whole conversations; as turns they all become the same tokens."""
    encoder = Encoder(tiny.make_tokenizer(), "plain")
    turns = [{"role": "user", "content": "m n"}]
    replies = [[{"role": "assistant", "content": text}] for text in ("d", "a", "b")]
    forms = [
        {"prompt": turns, "chosen": ["d"], "rejected": ["a", "b"]},
        {"prompt": "m n", "chosen": replies[:1], "rejected": replies[1:]},
        {
            "prompt": turns,
            "chosen": [turns + replies[0]],
            "rejected": [turns + reply for reply in replies[1:]],
        },
        {"chosen": [turns + replies[0]], "rejected": [turns + reply for reply in replies[1:]]},
    ]
    wanted = encoder.whole(["m n"] * 3, replies)
    for rows in forms:
        [whole] = whole_sequences.whole_parts(data.load([rows]), encoder)
        assert whole.sides == ("chosen_scores", "rejected_scores")
        assert whole.chosen == [1]
        assert [ids.tolist() for ids in whole.sequences[0]] == [ids.tolist() for ids in wanted]


def test_chat_makes_turns_of_texts(tiny, tmp_path, score):
    """With a chat template, plain texts are a warning, and --chat scores them as the conversation they stand for."""
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] + ' ' + m.content + ' ' }}{% endfor %}</s>"
    reward_model = tiny.make_model("score", scale=4.0)
    reward_model.tokenizer.chat_template = tokenizer.chat_template
    reward_model.save(tmp_path / "rm")
    texts = [listed("d", "a b"), {**listed("e", "f g"), "prompt": [{"role": "user", "content": "m n"}]}]
    turns = [{"role": "user", "content": "m n"}]
    chats = [{**row, "prompt": turns} for row in texts]
    found = []
    for name, rows, chat in (("texts", texts[:1], False), ("texts", texts, True), ("chats", chats, False)):
        file, out = tiny.write_rows(tmp_path / f"{name}.jsonl", rows), tmp_path / "out.jsonl"
        warned = score(tmp_path / "rm", file, out, *["--chat"] * chat).warned
        assert ("add --chat" in warned) == (rows is not chats and not chat)
        found.append(tiny.read_rows(out))
        assert [row["prompt"] for row in found[-1]] == [row["prompt"] for row in rows]
    scores = [[(row["chosen_scores"], row["rejected_scores"]) for row in rows] for rows in found]
    assert scores[1] == scores[2]
    assert scores[0][0] != scores[1][0]
