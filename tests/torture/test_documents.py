"""Almost valid documents follow from their names, and can be reduced change by change."""

from __future__ import annotations

import io
import json
import tomllib

import pyarrow.parquet as pq
import pytest

from rlhf_core.runtime.files import unseal
from tests.torture import documents, examples
from tests.torture.documents import Form, Table, table

FORM = Form([table(examples.PIPELINES[0])], documents.write_json)


def test_an_example_is_written_as_it_is() -> None:
    tree = examples.PIPELINES[0]
    assert json.loads(documents.write_json(table(tree))) == tree
    assert tomllib.loads(documents.write_toml(table(tree)).decode()) == tree
    assert unseal(documents.write_sealed(table(tree))) == tree
    assert pq.read_table(io.BytesIO(documents.write_parquet(table(examples.PARQUET[0])))).num_rows == 3


def test_a_document_follows_from_its_name() -> None:
    made = [documents.make(FORM, f"toml 0 {number}").content for number in range(50)]
    assert made == [documents.make(FORM, f"toml 0 {number}").content for number in range(50)]
    assert len(set(made)) > 40


@pytest.mark.parametrize("number", range(20))
def test_leaving_a_change_out_leaves_the_others_as_they_are(number: int) -> None:
    name = f"toml 1 {number}"
    for kept in documents.make(FORM, name).changes:
        alone = documents.make(FORM, name, [kept])
        assert list(alone.changes) == [kept]
        assert alone == documents.make(FORM, name, [kept])
    assert json.loads(documents.make(FORM, name, []).content) == examples.PIPELINES[0]


def test_keys_can_come_twice_and_depth_is_limited() -> None:
    tree = Table([["a", 1], ["a", 2]])
    assert documents.write_json(tree) == b'{"a": 1, "a": 2}'
    assert [path for *_, path in documents.places(table({"a": {"b": 1}}), 1)] == [".a"]
