"""Recall: probes scored by one forward pass, key-value retrieval, and many-shot classification; and attention spans.

- `task`: what do all probes share, and where do a text's answers lie among its tokens?
- `options`: what does a user choose?
- `sequences`: what is MQRAR at the level of tokens?
- `mqrar`: MQRAR as a task, over its own vocabulary and as text; and which bit was written last?
- `copying`: what was read a number of tokens ago?
- `json_kv`: which value has a key of a long JSON object?
- `retrieval`: who is one association away from the question, and what was replied the n-th time?
- `questions`: which associations are there, and which questions has LongBench v2?
- `long_bench`: which of four choices is right, by a long text?
- `labelled`: which labelled texts are there?
- `many_shot`: which label has a text, by the examples before it?
- `span`: how far back does every layer and head look?
"""
