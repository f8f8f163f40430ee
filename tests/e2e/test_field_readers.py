"""The readers of calls of vLLM, TRL, `renderers` and SGLang beside ours: what one of them reads, we read or count."""

import re
from pathlib import Path

import pytest

from support.field_readers import DIALECTS, SGLANG, WITH_READERS, compare, find_readers, quiet
from unbroken.rendering.parsing.formats import FORMATS

# What other libraries warn of while they are imported is not ours.
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

TABLE = Path(__file__).parents[2] / "docs" / "templates.md"


def test_every_format_has_spellings() -> None:
    assert {name.partition(",")[0] for name in DIALECTS} == {form.name for form in FORMATS} - {"none"}


@pytest.mark.parametrize("dialect", WITH_READERS)
def test_a_call_that_another_reader_reads_is_read_or_counted_and_the_table_says_so(dialect: str) -> None:
    """The rows are those of docs/templates.md, which `make templates` writes."""
    with quiet():
        found = list(compare(dialect))
    assert [lost for each in found for lost in each.lost] == []
    rows = TABLE.read_text().splitlines()
    assert [each.to_row() for each in found if each.to_row() not in rows] == []


@pytest.mark.skipif(not SGLANG.is_dir(), reason="SGLang is not installed: `make clients` does it")
def test_the_table_has_no_other_rows() -> None:
    rows = re.findall(r"^\| ([^|]+) \| ((?:vLLM|TRL|renderers|SGLang) [^|]+) \|", TABLE.read_text(), re.MULTILINE)
    assert set(rows) == {(dialect, reader) for dialect in DIALECTS for reader in find_readers(dialect)}
