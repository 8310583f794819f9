"""Writes the texts that `evaluate` scores as files of documents, so that another machine scores the same text.

    python -m research.real_models.texts real/texts --wikitext wikitext-2-raw-test.txt --essays ESSAYS

- `modules.jsonl.gz`: the longest modules of this interpreter's standard library, one document a module
- `packages.jsonl.gz`: its packages, whose modules follow one another, in documents of some 64K tokens and more
- `training.jsonl.gz`: its other modules, for `sbeval extend`
- `library.jsonl.gz`: all its modules, which follow one another, in documents of more than 128K tokens
- `docstrings.jsonl`: the first sentences of its functions' docstrings, each with its package as the label
- `wikitext.jsonl.gz`: wikitext-2's articles, where its raw test split is given
- `essays.jsonl.gz` and `essays/`: essays, one document a file, where a folder of them is given
"""

import argparse
import ast
import gzip
import json
import re
import shutil
import sysconfig
from collections.abc import Iterable
from pathlib import Path

LONG_MODULE_BYTES = 115_000  # some 32,768 tokens of code
LONG_PACKAGE_BYTES = 275_000
LIBRARY_BYTES = 640_000  # some 140,000 tokens and more of code
LIBRARY_DOCUMENTS = 24
LABELLED_SENTENCES = 80
FEWEST_SENTENCES = 60
ARTICLE_TITLE = re.compile(r"(?m)^ = [^=].* = $")

Document = tuple[str, str]
"""A name and a text."""


def write(file: Path, documents: Iterable[Document]) -> None:
    """Writes documents as gzipped JSON lines, byte for byte the same for the same documents."""
    lines = [json.dumps({"name": name, "text": text}, ensure_ascii=False) + "\n" for name, text in documents]
    with gzip.GzipFile(file, "wb", mtime=0) as packed:
        packed.write("".join(lines).encode())
    print(f"{file}: {len(lines)} documents, {file.stat().st_size:,} bytes")


def modules(library: Path) -> list[Document]:
    """Returns the readable modules of a folder, without installed packages and generated tables."""
    documents = []
    for file in sorted(library.rglob("*.py")):
        name = file.relative_to(library).as_posix()
        if name.startswith(("site-packages/", "pydoc_data/", "encodings/", "test/encoded_modules/")):
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        documents.append((name, text))
    return documents


def packages(documents: Iterable[Document]) -> list[Document]:
    """Returns the packages' modules one behind another, in documents of at least `LONG_PACKAGE_BYTES`.

    A comment above each module names it. What is left at the end of a package is part of its last document, and a
    package with less text gives no document.
    """
    texts: dict[str, list[str]] = {}
    for name, text in documents:
        top, *rest = name.split("/")
        if rest and not (top == "test" and len(rest) == 1):
            package = "/".join([top, rest[0]]) if top == "test" else top
            texts.setdefault(package, []).append(f"# {name}\n{text}")
    long_documents = []
    for package, members in texts.items():
        pieces: list[str] = [""]
        for member in members:
            if len(pieces[-1].encode()) >= LONG_PACKAGE_BYTES:
                pieces.append("")
            pieces[-1] += member + "\n"
        if len(pieces) > 1 and len(pieces[-1].encode()) < LONG_PACKAGE_BYTES:
            pieces[-2:] = ["".join(pieces[-2:])]
        if len(pieces[0].encode()) >= LONG_PACKAGE_BYTES:
            long_documents += [(f"{package} {number + 1}", piece) for number, piece in enumerate(pieces)]
    return long_documents


def library_documents(documents: Iterable[Document]) -> list[Document]:
    """Returns the modules one behind another, in documents of at least `LIBRARY_BYTES`, evenly chosen of all."""
    texts: list[Document] = []
    first, text = "", ""
    for name, module in documents:
        first = first or name
        text += f"# {name}\n{module}\n"
        if len(text.encode()) >= LIBRARY_BYTES:
            texts.append((f"{first} to {name}", text))
            first, text = "", ""
    count = min(LIBRARY_DOCUMENTS, len(texts))
    return [texts[number * len(texts) // count] for number in range(count)]


def docstring_sentences(documents: Iterable[Document]) -> list[tuple[str, str]]:
    """Returns first lines of docstrings with their packages; every package has between 60 and 80, all different."""
    sentences: dict[str, dict[str, None]] = {}
    for name, text in documents:
        package, _, rest = name.partition("/")
        if not rest or package in ("test", "idlelib", "lib2to3"):
            continue
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (docstring := ast.get_docstring(node)):
                line = docstring.split("\n", 1)[0].strip()
                if 25 <= len(line) <= 90 and line.isascii() and line.endswith("."):
                    sentences.setdefault(package, {})[line] = None
    unique = {package: list(lines)[:LABELLED_SENTENCES] for package, lines in sentences.items()}
    return [(line, package) for package, lines in unique.items() if len(lines) >= FEWEST_SENTENCES for line in lines]


def articles(text: str) -> list[Document]:
    """Returns the articles of wikitext's raw text."""
    starts = [match.start() for match in ARTICLE_TITLE.finditer(text)]
    ends = [*starts[1:], len(text)]
    return [
        (text[start:end].split("\n", 1)[0].strip(" ="), text[start:end])
        for start, end in zip(starts, ends, strict=True)
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write the texts that real models are evaluated on.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wikitext", type=Path, help="wikitext-2's raw test split")
    parser.add_argument("--essays", type=Path, help="folder of .txt files")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    library = modules(Path(sysconfig.get_paths()["stdlib"]))
    whole_packages = [each for each in packages(library) if len(each[1].encode()) >= LONG_PACKAGE_BYTES]
    long_modules = [each for each in library if len(each[1].encode()) >= LONG_MODULE_BYTES]
    evaluated = tuple({f"{name.rpartition(' ')[0]}/" for name, _ in whole_packages})
    long_names = {name for name, _ in long_modules}
    write(options.folder / "modules.jsonl.gz", long_modules)
    write(options.folder / "packages.jsonl.gz", whole_packages)
    write(
        options.folder / "training.jsonl.gz",
        [each for each in library if each[0] not in long_names and not each[0].startswith(evaluated)],
    )
    write(options.folder / "library.jsonl.gz", library_documents(library))
    labelled = docstring_sentences(library)
    lines = [json.dumps({"text": text, "label": label}) + "\n" for text, label in labelled]
    (options.folder / "docstrings.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"{options.folder / 'docstrings.jsonl'}: {len(labelled)} sentences, {len(dict(labelled).keys())} different")
    if options.wikitext is not None:
        write(options.folder / "wikitext.jsonl.gz", articles(options.wikitext.read_text(encoding="utf-8")))
    if options.essays is not None:
        files = sorted(options.essays.glob("*.txt"))
        write(options.folder / "essays.jsonl.gz", [(file.stem, file.read_text(encoding="utf-8")) for file in files])
        shutil.copytree(options.essays, options.folder / "essays", dirs_exist_ok=True)


if __name__ == "__main__":
    main()
