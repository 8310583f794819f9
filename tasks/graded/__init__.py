"""Graded tasks: four kinds of RULER-like tasks at four levels each, and three forms of answers.

- `options`: the options of graded tasks
- `task`: the task classes: prompts, scores and the record
- `scores`: exact match, soft match (1 - WER), and the parts of an answer
- `forms`: questions, and the three forms of answers to them
- `texts`: lines of filler text and of needles
- `haystack`: samples with statements in a haystack of lines
- `needles`: passwords of objects in a haystack
- `variables`: boxes that hold what other boxes hold
- `words`: the most frequent words of a list
- `qa`: questions on documents in the layout of SQuAD 2

Decisions:

- The levels are basic, easy, medium and hard. Each raises what makes a kind hard and keeps the rest: a sample has the
  same seed, keys, values and depths at every level and length, and its haystack has the same order. So levels are
  compared sample by sample, and a report says for each pair of neighbouring levels whether their order is measured.
- A level is a set of options in the YAML file of its task. A user may change them.
- The answer is direct, has two steps (first the evidence, then the answer), or is a choice among four. All three forms
  ask the same question about the same text.
- If an answer has several parts, two of them take two values each, and the four choices are all combinations. So all
  choices are equally similar to each other, and a model cannot find the right one without the text.
- Wrong choices are in the text where it has other needles, two other chains of boxes, or other words. At basic needles
  and variables and in questions on documents, the right choice can be told by its occurrence in the text. With one
  other chain, occurrence excludes two choices.
- The idea of graded levels is that of RULER's second version. Text, samples and scores were made for this project.
"""
