"""The processes of a command: how they start, how they end together, and what they print last.

- `launch`: how does `sbeval launch` start several processes, and which error does it print when one fails?
- `ranks`: which rank is this process, and how do all ranks end when one fails?
- `signals`: how does a signal become an exception?
- `ending`: how does the body of a command end: an error as one sentence, a signal, a closed pipe?
- `next_step`: which command does a user run next?
"""
