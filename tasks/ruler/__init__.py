"""RULER's tasks: needles, variable tracking, word extraction and question answering at any context length.

- `task`: how do samples become documents, requests and scores?
- `options`: what does a user choose?
- `families`: which class makes which samples?
- `forced`: what if the answer is scored instead of generated?
- `corpora`: which corpus does a task need, and can it be had?
- `texts`: how are essays and questions read?
- `wording`: what are the benchmark's own words?
- `niah`: how are needles hidden?
- `vt`: how are chains of variables made?
- `cwe`: how are lists with common words made?
- `fwe`: how are texts of coded words made?
- `qa`: how are questions put behind their documents?
- `haystacks`: which units does a haystack consist of?
- `drafts`: what is a sample before it is fitted to a length?
- `fit`: how many units fill a length?
"""
