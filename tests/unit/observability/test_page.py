"""docs/observability.md lists what is exported."""

import re
from pathlib import Path

from outrider.actors.observability.catalog import CATALOG

PAGE = (Path(__file__).parents[3] / "docs" / "observability.md").read_text()
ROW = re.compile(r"^\| `(outrider:\w+)` \| (\w+) \|(?: (`[^|]*`)? \|)?", re.MULTILINE)


def test_every_metric_is_on_the_page_with_its_type():
    rows = {match[1]: match[2] for match in ROW.finditer(PAGE)}
    assert rows == {spec.name: spec.kind for spec in CATALOG.values()}
