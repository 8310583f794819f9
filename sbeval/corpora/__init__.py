"""Text sources, their documents, their tokens, and the windows protocols cut from them.

- `documents`: what is a document, and how are its words counted?
- `sources`: which texts are on every machine or have a name, and where does it lie in a dataset of the hub?
- `local`: how are local files read?
- `split`: how are documents cut into smaller ones?
- `tokenizers`: how is a tokenizer loaded, and what does it add to a text?
- `encode`: which words and bytes fall to each token, and what if a document is too long to be encoded at once?
- `tokens`: how do the tokens of a corpus lie on disk?
- `store`: how are they made once, and named in requests?
- `seen`: which documents was a model trained on?
- `windows`: which tokens does a protocol feed and score?
- `archives`: how is a tar archive unpacked?
"""

from sbeval.corpora.documents import Corpus, Document, corpus_sha256, count_words, make_document
from sbeval.corpora.local import local_corpus, local_pairs, read_text, text_name
from sbeval.corpora.sources import KNOWN, hub_corpus, hub_text, split_wikitext_pages, stdlib_corpus, wikitext_corpus
from sbeval.corpora.store import resolve_tokens, token_key, tokenize_corpus
from sbeval.corpora.tokenizers import adds_bos, prefix_token_id, separator_ids, tokenizer_sha256
from sbeval.corpora.tokens import Layout, TokenizedCorpus
from sbeval.keeping.cache import cache_folder

__all__ = [
    "KNOWN",
    "Corpus",
    "Document",
    "Layout",
    "TokenizedCorpus",
    "adds_bos",
    "cache_folder",
    "corpus_sha256",
    "count_words",
    "hub_corpus",
    "hub_text",
    "local_corpus",
    "local_pairs",
    "make_document",
    "prefix_token_id",
    "read_text",
    "resolve_tokens",
    "separator_ids",
    "split_wikitext_pages",
    "stdlib_corpus",
    "text_name",
    "token_key",
    "tokenize_corpus",
    "tokenizer_sha256",
    "wikitext_corpus",
]
