"""The table of another package's classes is what the kept rows say."""

import pytest

from research.other_models import fla_table
from research.other_models.fla_table import read, with_table


def test_the_page_holds_what_the_kept_rows_say() -> None:
    page = fla_table.PAGE.read_text(encoding="utf-8")
    assert with_table(page, read([fla_table.ROWS])) == page
    with pytest.raises(SystemExit, match="put them where the table goes"):
        with_table("no marks", [])
