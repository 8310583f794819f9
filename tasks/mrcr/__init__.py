"""MRCR from OpenAI's data: conversations in which several requests are equal, and the last one asks for the n-th reply.

- `data`: loads the conversations
- `turns`: removes turns from the middle of a conversation
- `task`: the tasks: conversations by length, prompts, scores and the record

Decisions:

- Data and score are those of `openai/mrcr` on the hub: the answer has to begin with a random string, and its score is
  the similarity of what follows (`SequenceMatcher.ratio`). `sb_turns` is a task of the same idea that needs no data.
- A conversation has the length it has, so it counts at one context length only: the shortest one that it fits, by the
  tokens of the model at hand, chat template and reserved answer included. Numbers at two lengths are of different
  conversations, and reports do not join them.
- With a chat template, messages stay turns. Without one they are written as a dialogue.
"""
