"""Corpora: text sources, their documents, their tokens on disk, and the windows that evaluation protocols cut.

- `documents`: what is a document, and how are its words and bytes counted?
- `sources`: the named corpora: hub datasets, wikitext, and Python's standard library
- `local`: how are local files of text read?
- `split`: how are documents split into smaller ones?
- `tokenizers`: how is a tokenizer loaded and hashed, and which special tokens does it add?
- `encode`: how are documents encoded, and how many words and bytes belong to each token?
- `tokens`: how are the tokens of a corpus stored and read?
- `store`: how is a corpus tokenised once, cached, and referred to in requests?
- `seen`: which documents of a corpus was a model trained on?
- `windows`: which tokens does each protocol feed to the model, and which does it score?
- `archives`: how is a tar archive unpacked?

- A request names a token range of a corpus on disk (`store.token_key`) and holds no tokens. Otherwise the 65,536 tokens
  of a long prompt would be copied into lm-eval's documents, samples files and cache keys. The name contains the hashes
  of text and tokenizer, so a cached response never belongs to another text.
- A corpus is never held in memory. Documents are read, hashed and tokenised in batches of about a million characters
  into an Arrow file, which is memory-mapped. `benchmarks/results/corpora.md` has the measured memory.
- Documents that a model was trained on are found by hashes of token spans, not of whole documents, because training and
  evaluation may split a text into documents differently (`seen`).
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
