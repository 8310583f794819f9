"""Pages of several paragraphs, written for these tests: in wikitext's raw form, and as a mixed crawl has them."""

import json
from pathlib import Path

WIKITEXT_FILE = Path(__file__).parent / "texts" / "wikitext.txt"
WIKITEXT = WIKITEXT_FILE.read_text(encoding="utf-8")
CRAWL = [
    json.loads(line)["text"]
    for line in (WIKITEXT_FILE.with_name("crawl.jsonl")).read_text(encoding="utf-8").splitlines()
]
