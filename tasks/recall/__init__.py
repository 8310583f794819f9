"""Recall: probes that one forward pass scores, key-value retrieval, many-shot classification, and attention spans.

- `task`: the base classes of probes; finds the answers of a text among its tokens
- `options`: the options of recall tasks
- `sequences`: multi-query repeated associative recall (MQRAR) as sequences of token ids
- `mqrar`: MQRAR tasks over token ids and as text, and flip-flops
- `algorithms`: sequences of token ids that end as an algorithm says: copy, reverse, sort and others
- `algorithmic`: tasks of these sequences
- `copying`: copying of words that already occurred earlier in the text
- `json_kv`: retrieval of a key's value from a long JSON object
- `retrieval`: retrieval of sentences that share no word with the question, and of the n-th of several similar replies
- `tallies`: counts of labels in a text, and which label is the most frequent
- `questions`: the list of associations, and the questions of LongBench v2
- `long_bench`: LongBench v2: questions on long texts with four choices
- `labelled`: loads labelled texts for many-shot classification
- `many_shot`: many-shot classification: the label of a text, given labelled examples
- `span`: attention spans of every layer and head

Decisions:

- A recall answer is scored twice: after the original text, and after a text in which another value stands in place of
  the answer. The difference of both NLLs (`retrieval_gain`) is the information that the model took from the context.
  The NLL by itself also falls when a model merely learns the form of the answers in the context, such as digits.
- The `sb_copy` tasks build their texts from token ids. The words are tokenised once and drawn by index, so a sequence
  has exactly the requested length, a phrase is repeated after exactly the requested distance, and 2M tokens take a
  second. No word's tokens are a prefix of another word's tokens. A model that knows only the list of words is therefore
  as good as a random guess, both in accuracy and in NLL.
- Many-shot labels all have the same number of digits, because a label that is a prefix of another one would always be
  the more probable of the two. The scored targets are the tokens at which labels differ, so one forward pass scores all
  labels if the tokenizer makes one token of each label.
- `chance` is the accuracy of a random guess among the candidates in the text. For example, a model may find the four
  people of `sb_association` (or the four replies of `sb_turns`) but not know which of them the question means; it is
  then right in a quarter of the samples. For the needles of RULER, the guess is among all possible values.
- The package contains its own lists of words and associations, because those of the original benchmarks would have to
  be downloaded. A user's list of associations is refused if a needle shares a word with its question.
- LongBench v2 removes the middle of a text that is too long, as its authors do, and asks every question a second time
  without its text.
"""
