"""RULER's tasks: needles, variable tracking, word extraction and question answering at any context length.

- `task`: how do samples become documents, requests and scores?
- `options`: what does a user choose?
- `families`: which class makes which samples, and what if the answer is scored instead of generated?
- `texts`: how are essays read, and what is said where a text is missing?
- `wording`: what are the benchmark's own words?
- `niah`: how are needles hidden, and how chains of variables?
- `words`: how are lists with common words and texts of coded words made?
- `qa`: how are questions read and put behind their documents?
- `haystacks`: which units does a haystack consist of?
- `drafts`: what is a sample before its length is known?
- `sizes`: how many units fill a prompt of a length?
"""
