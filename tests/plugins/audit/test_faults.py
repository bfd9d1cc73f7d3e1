"""Faults that are planted in a finished run: each is found by the check of its name; the honest run passes."""

import io
import json
import shutil
import zipfile

import numpy as np
import pytest
from rlhf_audit import audit
from rlhf_grpo import GRPOConfig, GRPOTrainer

from rlhf_core import load_model, run_pipeline
from rlhf_core.errors import RunError
from rlhf_core.runs import open_run
from tests.shared.pipelines import change_record
from tests.shared.sampled_values import read, write_values

FILE = """
dir = "run"
[[stage]]
name = "policy"
trainer = "grpo"
model = "lm"
train_data = "prompts.jsonl"
eval_data = "heldout.jsonl"
rewards = [{ name = "length", target = 3 }, { name = "reward.py:early", weight = 0.5 }]
total_batch_size = 16
num_generations = 4
max_completion_length = 6
max_training_steps = 4
save_steps = 2
evaluation_steps = 2
learning_rate = 1e-12
weight_decay = 0.0
log_steps = 1
num_preview_samples = 1
"""
REWARD = """
def early(completions):
    return [sum("a" <= word <= "m" for word in text.split()) / 6 for text in completions]
"""


@pytest.fixture(scope="module")
def honest(tiny, tmp_path_factory):
    """A finished run whose policy hardly moves, so that its start is the policy of every rollout."""
    place = tmp_path_factory.mktemp("audit")
    tiny.make_model(scale=4.0).save(place / "lm")
    tiny.write_rows(place / "prompts.jsonl", tiny.prompts(8))
    tiny.write_rows(place / "heldout.jsonl", tiny.prompts(3, seed=9))
    (place / "reward.py").write_text(REWARD)
    (place / "p.toml").write_text(FILE)
    run_pipeline(place / "p.toml", dir=place / "run")
    return place / "run"


@pytest.fixture
def run(honest, tmp_path):
    shutil.copytree(honest, tmp_path / "run")
    return tmp_path / "run"


def checks(run, **options):
    return {check.name: check for check in audit(run, **options)["policy"]}


def failures(run, **options):
    return {name for name, check in checks(run, **options).items() if check.verdict == "FAIL"}


def test_the_honest_run_passes(honest):
    found = checks(honest, replay=2, exact=True)
    assert not {name: (each.why, each.where) for name, each in found.items() if each.verdict == "FAIL"}
    skipped = {name for name, check in found.items() if check.verdict == "not applicable"}
    assert skipped <= {"ids against their text", "ids of our own sampler"}
    assert found["replay"].values == {"since": 2, "until": 4}
    assert found["rewards"].values["completions"] == 32
    assert found["journal rows"].values["completions"] == 64


def test_the_test_is_that_of_the_sums(honest):
    """Gap, error and evidence in float64 from the files; M_λ ← e_λ (M_λ + 1 / (r (r + 1)))."""
    files = [np.load(path) for path in sorted((honest / "policy" / "values").iterdir())]
    sums = np.concatenate([file["sums"] for file in files])
    evidence, most = np.zeros(6), 0.0
    for r, row in enumerate(sums, 1):
        evidence = np.exp(row[5:]) * (evidence + 1 / (r * (r + 1)))
        most = max(most, evidence.mean())
    found = checks(honest)["sampling test"].values
    tokens = sums[:, 2].sum()
    assert found["tokens"] == tokens
    np.testing.assert_allclose(found["gap"], sums[:, 3].sum() / tokens)
    np.testing.assert_allclose(found["standard_error"], np.sqrt(sums[:, 4].sum()) / tokens)
    np.testing.assert_allclose(found["log10_evidence"], np.log10(most))


def test_exact_values_are_those_of_float64(run, honest, tiny):
    """Of the rollouts that version 0 and the checkpoint of update 2 sampled, which are the same policy here."""
    shutil.rmtree(run / "policy" / "values")
    write_values(run / "policy", [load_model(honest.parent / "lm", mesh=tiny.one_device())])
    sums = np.concatenate([np.load(run / "policy" / "values" / f"{n:06d}.npz")["sums"] for n in (0, 2)])
    found = checks(run, exact=True)
    exact, sampled = found["sampling test, exact"], found["policy that sampled"]
    assert exact.number.endswith("2 of 4 rollouts")
    assert exact.values["tokens"] == sums[:, 2].sum()
    np.testing.assert_allclose(exact.values["gap"], sums[:, 3].sum() / sums[:, 2].sum(), atol=1e-5)
    np.testing.assert_allclose(
        exact.values["standard_error"] * sums[:, 2].sum(), np.sqrt(sums[:, 4].sum()), rtol=1e-4
    )
    assert sampled.values["own"] < 1e-5
    (honest.parent / "lm").rename(run.parent / "gone")
    try:
        why = checks(run, exact=True)["sampling test, exact"].why
    finally:
        (run.parent / "gone").rename(honest.parent / "lm")
    assert "lm" in why


class OnlyLikeliest:
    """A model whose logits leave out all but the three likeliest tokens."""

    def __init__(self, model):
        self.model = model

    def logits(self, *batch):
        logits = np.asarray(self.model.logits(*batch))
        return np.where(logits >= np.sort(logits, -1)[..., -3:-2], logits, -1e30)


def from_python(place, **inputs):
    options = {"top_k": 3, "learning_rate": 1e-12, "weight_decay": 0.0, "max_training_steps": 2}
    config = GRPOConfig(
        save_directory=str(place / "grpo"),
        total_batch_size=16,
        num_generations=4,
        max_completion_length=6,
        **options,
    )
    inputs = {"train_dataset": str(place / "prompts.jsonl"), "model": str(place / "lm"), **inputs}
    GRPOTrainer(config, **inputs).train()


def test_exact_takes_filters_and_trainers_called_from_python(honest, tiny):
    """The gap is that of float64 under what top_k = 3 leaves; a sampler that used another top_k fails."""
    place = honest.parent
    with pytest.warns(UserWarning, match="from a filtered distribution"):
        from_python(place, rewards=[lambda completions: [len(text) for text in completions]])
    found = {check.name: check for check in audit(place / "grpo", exact=True)["grpo"]}
    assert "given from Python" in found["rewards"].why
    assert found["advantages"].verdict == "pass"
    exact = found["sampling test, exact"]
    (stage,) = open_run(place / "grpo").stages
    model = OnlyLikeliest(load_model(place / "lm", mesh=tiny.one_device()))
    every = read(next(stage.rollouts()).rollout, model)
    assert exact.verdict == "pass"
    assert exact.number.endswith("1 of 2 rollouts; 0 more tokens are outside sampling.top_k")
    assert exact.values["tokens"] == len(every)
    np.testing.assert_allclose(exact.values["gap"], (-every[:, 0] - every[:, 1]).mean(), atol=1e-5)
    sampling = {**stage.config["sampling"], "top_k": 2}
    change_record(place / "grpo" / "stage.json", config={**stage.config, "sampling": sampling})
    exact = {check.name: check for check in audit(place / "grpo", exact=True)["grpo"]}["sampling test, exact"]
    assert (exact.verdict, exact.why) == ("FAIL", "the sampler filters otherwise, or not at all")


@pytest.mark.filterwarnings("ignore:.*filtered distribution")
def test_a_trainer_from_python_that_stops_at_once_is_audited(honest, tmp_path):
    """It wrote no row, and has nothing that could fail."""

    def broken(completions):
        raise ValueError("broken")

    shutil.copytree(honest.parent / "lm", tmp_path / "lm")
    shutil.copy(honest.parent / "prompts.jsonl", tmp_path)
    with pytest.raises(RunError, match="broken"):
        from_python(tmp_path, rewards=[broken])
    (checked,) = audit(tmp_path / "grpo", exact=True).values()
    assert {check.verdict for check in checked} == {"pass", "not applicable"}


def journal(run, number):
    return run / "policy" / "journal" / f"rollout-{number:06d}.zip"


def change_bytes(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def change_array(path, name, change):
    """Write a rollout's file with another array, whole in every other respect."""
    with zipfile.ZipFile(path) as file:
        members = {each: file.read(each) for each in file.namelist()}
    out = io.BytesIO()
    np.save(out, change(np.load(io.BytesIO(members[f"{name}.npy"]))))
    members[f"{name}.npy"] = out.getvalue()
    sizes = {each: len(content) for each, content in members.items() if each != "manifest.json"}
    members["manifest.json"] = json.dumps(sizes).encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for each, content in members.items():
            file.writestr(each, content)


def change_text(path, name, change):
    with zipfile.ZipFile(path) as file:
        members = {each: file.read(each) for each in file.namelist()}
    rows = json.loads(members[name])
    change(rows)
    members[name] = json.dumps(rows).encode()
    sizes = {each: len(content) for each, content in members.items() if each != "manifest.json"}
    members["manifest.json"] = json.dumps(sizes).encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for each, content in members.items():
            file.writestr(each, content)


def raised(array, row=3, by=1.0):
    changed = array.copy()
    changed[row] += by
    return changed


def change_rows(path, change):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def goes_on(run):
    """As a stage that is not done and has no checkpoint: the rows are chained, and no more."""
    change_record(run / "policy" / "stage.json", state="running", results={})
    shutil.rmtree(run / "policy" / "checkpoints")


def swap_losses(rows):
    rows[0]["loss"], rows[1]["loss"] = rows[1]["loss"], rows[0]["loss"]


def swap(run):
    one, other = journal(run, 1), journal(run, 2)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def change_reward(run):
    """In both places of the journal, and in its sum: only the function knows."""
    change_array(journal(run, 0), "rewards", lambda rewards: raised(rewards, row=(0, 1), by=2.0))
    change_array(journal(run, 0), "total", lambda total: raised(total, row=0, by=1.0))

    def change(rows):
        rows[0]["rewards"]["reward.py:early"] += 2.0
        rows[0]["reward"] += 1.0

    change_text(journal(run, 0), "samples.json", change)


def halve(run):
    """Half of the tokens' sums say that the likeliest tokens were drawn."""
    path = run / "policy" / "values" / "000002.npz"
    values = dict(np.load(path))
    values["sums"] = values["sums"] + np.array([0, 0, 0, 5.0, 0, 0, 0, 0, 0, 0, 0])
    np.savez(path, **values)


FAULTS = {
    "a byte of an artifact": (
        lambda run: change_bytes(run / "policy" / "artifacts" / "model" / "model.safetensors"),
        {"artifact hashes"},
    ),
    "an artifact's file missing": (
        lambda run: (run / "policy" / "artifacts" / "model" / "config.json").unlink(),
        {"artifact hashes"},
    ),
    "a rollout missing": (lambda run: journal(run, 1).unlink(), {"journal"}),
    "the last rollout missing": (lambda run: journal(run, 3).unlink(), {"journal"}),
    "a rollout twice": (
        lambda run: shutil.copy(journal(run, 1), journal(run, 2)),
        {"journal"},
    ),
    "two rollouts swapped": (swap, {"journal"}),
    "a damaged rollout": (lambda run: change_bytes(journal(run, 2)), {"files", "journal"}),
    "a total changed": (
        lambda run: change_array(journal(run, 2), "total", raised),
        {"journal rows"},
    ),
    "a reward changed everywhere": (change_reward, {"rewards", "advantages"}),
    "a token changed": (
        lambda run: change_array(journal(run, 1), "samples_tokens", lambda x: raised(x, (0, 0))),
        {"trainer's values"},
    ),
    "an older policy": (
        lambda run: change_array(journal(run, 3), "samples_version", lambda x: x - 1),
        {"ages of policies"},
    ),
    "an advantage changed": (
        lambda run: change_rows(
            run / "policy" / "samples" / "update-000002.jsonl", lambda rows: rows[1].update(advantage=0.25)
        ),
        {"advantages"},
    ),
    "a completion shown otherwise": (
        lambda run: change_rows(
            run / "policy" / "samples" / "update-000001.jsonl", lambda rows: rows[1].update(completion="a b")
        ),
        {"shown completions"},
    ),
    "a metrics row changed": (
        lambda run: change_rows(run / "policy" / "metrics.jsonl", lambda rows: rows[2].update(loss=0.5)),
        {"metrics rows"},
    ),
    "a metrics row missing": (
        lambda run: change_rows(run / "policy" / "metrics.jsonl", lambda rows: rows.pop(1)),
        {"metrics rows"},
    ),
    "a metrics row changed while the stage goes on": (
        lambda run: (
            change_record(run / "policy" / "stage.json", state="running", results={}),
            (run / "policy" / "metrics.sha256").unlink(),
            change_rows(run / "policy" / "metrics.jsonl", lambda rows: rows[0].update(loss=0.5)),
        ),
        {"metrics rows"},
    ),
    "losses of metrics rows swapped without a checkpoint": (
        lambda run: (
            goes_on(run),
            change_rows(run / "policy" / "metrics.jsonl", swap_losses),
        ),
        {"metrics rows"},
    ),
    "the last metrics row missing without a checkpoint": (
        lambda run: (
            goes_on(run),
            change_rows(run / "policy" / "metrics.jsonl", lambda rows: rows.pop()),
        ),
        {"metrics rows"},
    ),
    "a logged reward changed": (
        lambda run: change_rows(run / "policy" / "metrics.jsonl", lambda rows: rows[-1].update(reward=1.5)),
        {"metrics rows", "logged rewards"},
    ),
    "sums changed": (halve, {"trainer's values"}),
    "values missing": (
        lambda run: (run / "policy" / "values" / "000001.npz").unlink(),
        {"trainer's values"},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_by_name(fault, run):
    plant, named = FAULTS[fault]
    plant(run)
    assert named <= failures(run)


def test_held_out_prompts_that_are_trained_on_are_found(run, honest):
    held = honest.parent / "heldout.jsonl"
    rows = held.read_text().replace('"prompt": "', '"prompt": " ')
    (run.parent / "trained.jsonl").write_text(rows)
    spec = json.loads((run / "policy" / "stage.json").read_text())
    config = {**spec["config"], "train_data": str(run.parent / "trained.jsonl"), "eval_data": str(held)}
    change_record(run / "policy" / "stage.json", config=config)
    found = checks(run)["held-out prompts"]
    assert (found.verdict, found.values) == ("FAIL", {"equal": 0, "similar": 3, "rows": 3})
    assert found.where.endswith("heldout.jsonl, line 1")


def test_a_replay_finds_other_rewards(run):
    change_array(journal(run, 3), "total", raised)
    found = checks(run, replay=2)["replay"]
    assert (found.verdict, found.number) == ("FAIL", "updates 3 to 4")
    assert "first at update 4" in found.why


LONG = [pytest.param(each, marks=pytest.mark.long) for each in ("reward", "kto", "grpo", "online_dpo")]


@pytest.mark.parametrize("trainer", ["sft", "dpo", *LONG])
def test_honest_runs_of_every_trainer_pass(trainer, short):
    short.train(trainer)
    (checked,) = audit(short.directory / trainer).values()
    assert not {check.name: check.why for check in checked if check.verdict == "FAIL"}
    passed = {check.name for check in checked if check.verdict == "pass"}
    assert {"files", "artifact hashes"} <= passed
    assert ("sampling test" in passed) == (trainer in ("grpo", "online_dpo"))


def test_the_command(rlhf, run, honest):
    done = rlhf("audit", str(honest))
    assert done.code == 0
    assert "  pass  sampling test" in done.out
    change_bytes(run / "policy" / "artifacts" / "model" / "model.safetensors")
    refused = rlhf("audit", str(run), "--json", "--stage", "policy")
    assert refused.code == 1
    said = json.loads(refused.out)
    assert [each["name"] for each in said["stages"]["policy"] if each["verdict"] == "FAIL"] == [
        "artifact hashes"
    ]
    assert not said["passed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("nowhere",), "nowhere: does not exist"), (("here", "--stage", "polcy"), "Did you mean 'policy'")],
)
def test_what_is_no_run_is_refused(rlhf, honest, arguments, message):
    place, *rest = arguments
    refused = rlhf("audit", str(honest) if place == "here" else place, *rest)
    assert refused.code == 2
    assert message in refused.message


def test_others_add_checks(honest, tmp_path):
    """With the hook, in a file of the user's."""
    (tmp_path / "mine.py").write_text(
        "from rlhf_audit import Check\nfrom rlhf_core import hookimpl\n"
        "@hookimpl\ndef rlhf_audit(run, stage):\n"
        "    return [Check('mine', 'pass', f'{stage.trainer}')]\n"
    )
    found = audit(honest, plugins=[tmp_path / "mine.py"])["policy"]
    assert (found[-1].name, found[-1].number) == ("mine", "grpo")
