"""Recall: probes that one forward pass scores, key-value retrieval, many-shot classification, and attention spans.

- `task`: the base classes of probes; finds the answers of a text among its tokens
- `options`: the options of recall tasks
- `sequences`: multi-query repeated associative recall (MQRAR) as sequences of token ids
- `mqrar`: MQRAR tasks over token ids and as text, and flip-flops
- `copying`: copying of words that the model read a given number of tokens ago
- `json_kv`: retrieval of a key's value from a long JSON object
- `retrieval`: needles without a word in common with their question, and the n-th of several similar replies
- `questions`: the list of associations, and the questions of LongBench v2
- `long_bench`: LongBench v2: questions on long texts with four choices
- `labelled`: loads labelled texts for many-shot classification
- `many_shot`: many-shot classification: the label of a text, given labelled examples
- `span`: attention spans of every layer and head

Decisions:

- A recall answer is scored twice: in the text as it is, and with its value replaced earlier in the text. The difference
  (`retrieval_gain`) is the information that the model took from the context. The NLL by itself also falls when a model
  merely gets used to the form of the answers, such as digits.
- `sb_copy` builds its texts from token ids. The words are tokenised once and drawn by index, so a sequence has exactly
  the requested length, a phrase returns after exactly its distance, and 2M tokens take a second. No word's tokens are a
  prefix of another word's: a model that knows only the list of words is then at the level of a guess, in accuracy and
  in nats.
- Many-shot labels all have the same number of digits, because a label that is a prefix of another one would always be
  the more probable of the two. The scored targets are the tokens at which labels differ, so one forward pass scores all
  labels where a number is one token.
- `chance` is the accuracy of a guess among the candidates that the text offers: a model that finds the people of
  `sb_association`, or the replies of `sb_turns`, but not which one the question means, is right once in four. For the
  needles of RULER a guess is one of all possible values.
- Lists of words and associations are packaged, as a benchmark's own lists would need a download. A user's list is
  refused if a needle shares a word with its question.
- LongBench v2 removes the middle of a text that is too long, as its authors do, and asks every question a second time
  without its text.
"""
