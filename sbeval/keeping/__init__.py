"""How what is kept is written, held, found again and told apart.

- `writing`: how does a file or a folder appear whole, what stood there stay, and a folder be one process's alone?
- `cache`: where is something kept between runs?
- `content`: how does a process keep what it read of a file until the file changes?
- `hashes`: what is in a file, without reading a large one at every start?
"""
