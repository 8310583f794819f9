"""The contents of a wheel, and that it works outside the checkout."""

import json
import re
import shutil
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from fresh_process import run, run_code
from source_tree import ROOT, modules, package_folders

from sbeval.corpora.archives import unpack

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_package_list_is_complete() -> None:
    assert sorted(PYPROJECT["tool"]["setuptools"]["packages"]) == sorted(package_folders())


@pytest.mark.exhaustive
def test_the_wheel_holds_every_module(wheel: Path) -> None:
    expected = {
        name.replace(".", "/") + ("/__init__.py" if file.name == "__init__.py" else ".py")
        for name, file in modules().items()
    }
    assert expected == {name for name in names_in(wheel) if name.endswith(".py")}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("folder", "pattern", "place"),
    [
        ("tasks", "**/*.yaml", "sbeval/tasks"),
        ("reports", "write/templates/*", "sbeval/reports"),
        ("sbeval", "training/recipes/**/*.yaml", "sbeval"),
        ("sbeval", "demo/checkpoints/*/*[!l]", "sbeval"),  # all except logs, *.jsonl
        ("sbeval", "demo/*.tar.xz", "sbeval"),
        ("sbeval", "py.typed", "sbeval"),
    ],
)
def test_the_wheel_holds_the_data(wheel: Path, folder: str, pattern: str, place: str) -> None:
    files = [path for path in (ROOT / folder).glob(pattern) if path.is_file()]
    assert {f"{place}/{path.relative_to(ROOT / folder).as_posix()}" for path in files} <= names_in(wheel)


@pytest.mark.exhaustive
def test_the_wheel_holds_nothing_else(wheel: Path) -> None:
    assert {name.partition("/")[0].partition("-")[0] for name in names_in(wheel)} == {"sbeval", "sbeval_autoload.pth"}
    assert not [name for name in names_in(wheel) if "__pycache__" in name]


@pytest.mark.exhaustive
def test_the_installed_wheel_serves_code_and_data_outside_the_checkout(wheel_python: Path) -> None:
    lines = run_code(
        "import importlib.resources, sbeval.tasks, sbeval.reports, sbeval.registered\n"
        "print(sbeval.__file__)\n"
        "print(*(file.name for file in sbeval.registered.tasks_folder().rglob('*.yaml')))\n"
        "print(importlib.resources.files('sbeval.demo').joinpath('checkpoints').is_dir())",
        python=wheel_python,
    )
    assert Path(lines[0]).is_relative_to(wheel_python.parents[1])
    assert sorted(lines[1].split()) == sorted(file.name for file in (ROOT / "tasks").rglob("*.yaml"))
    assert lines[2] == str((ROOT / "sbeval/demo/checkpoints").is_dir())


def test_torch_and_triton_are_pinned_to_the_tested_pair() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert (pins["torch"], pins["triton"]) == ("2.13.0", "3.7.1")


@pytest.mark.exhaustive
def test_triton_comes_with_torch_alone_and_a_cpu_needs_none(tmp_path: Path) -> None:
    assert not [name for name in PYPROJECT["project"]["dependencies"] if "triton" in name]
    checkpoint = ROOT / "sbeval" / "demo" / "checkpoints" / "stickbreaking"
    (tmp_path / "text.txt").write_text("import this\n" * 400)
    arguments = ["run", "--model_args", f"pretrained={checkpoint}", "--tasks", "sb_text_stream", "--metadata"]
    arguments += [json.dumps({"data_path": str(tmp_path / "text.txt"), "context_lengths": [64]}), "--limit", "1"]
    arguments += ["--device", "cpu"]
    code = (
        "import sys\nsys.modules['triton'] = None\n"  # its import then fails
        f"sys.argv[1:] = {arguments!r}\nfrom sbeval.__main__ import main\nmain()"
    )
    printed = run_code(code, environment={"SBEVAL_CACHE": str(tmp_path / "cache")})
    assert any("sb_text_stream" in line for line in printed)


@pytest.mark.exhaustive
def test_the_tests_of_a_source_distribution_run(wheel: Path, wheel_python: Path, tmp_path: Path) -> None:
    build = "from setuptools import build_meta; import sys; build_meta.build_sdist(sys.argv[1])"
    (tmp_path / "extra.cfg").write_text(f"[egg_info]\negg_base = {tmp_path}\n")
    config = f"import os; os.environ['DIST_EXTRA_CONFIG'] = {str(tmp_path / 'extra.cfg')!r}; "
    run([sys.executable, "-c", config + build, tmp_path], folder=ROOT)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        unpack(packed, tmp_path)
    (unpacked,) = tmp_path.glob("sbeval-*/")
    tests = {file.relative_to(ROOT) for file in (ROOT / "tests").rglob("*.py")}
    assert tests == {file.relative_to(unpacked) for file in (unpacked / "tests").rglob("*.py")}
    # the published source builds the published wheel
    (tmp_path / "extra.cfg").write_text("")
    run([sys.executable, "-c", config + build.replace("sdist", "wheel"), tmp_path], folder=unpacked)
    (rebuilt,) = tmp_path.glob("*.whl")
    assert contents(rebuilt) == contents(wheel)
    one = [wheel_python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/keeping/test_writing.py"]
    process = run(one, folder=unpacked)
    assert process.returncode == 0, process.stdout
    assert "passed" in process.stdout


@pytest.mark.exhaustive
def test_an_editable_install_that_is_taken_back_leaves_a_line_that_does_nothing(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("sbeval", "tasks", "reports", "model_adapters"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "sbeval_autoload.pth"):
        shutil.copy(ROOT / name, source)
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    (site_packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site_packages / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    installed = run([*pip, "install", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-e", source])
    assert installed.returncode == 0, installed.stderr
    assert run([python.with_name("sbeval"), "install-plugin"]).returncode == 0
    code = "from lm_eval.api.registry import model_registry\nimport lm_eval.models\nprint('sb' in model_registry)"
    assert run_code(code, python=python) == ["True"]
    assert run([*pip, "uninstall", "-q", "-y", "sbeval"]).returncode == 0
    assert (site_packages / "sbeval_autoload.pth").is_file()
    process = run([python, "-c", code])
    assert (process.stdout, process.stderr) == ("False\n", "")


def test_every_dependency_is_pinned() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = PYPROJECT["project"]
    extras = [text for texts in project["optional-dependencies"].values() for text in texts]
    wanted = [one for text in project["dependencies"] + extras if (one := Requirement(text)).name != "sbeval"]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pinned = {canonicalize_name(Requirement(line).name): Requirement(line).specifier for line in lines}
    for requirement in wanted:
        (exact,) = pinned[canonicalize_name(requirement.name)]
        assert exact.operator == "=="
        assert requirement.specifier.contains(exact.version), requirement


@pytest.mark.exhaustive
def test_nothing_lies_in_the_wheel_twice_but_the_tokenizer_of_two_checkpoints(wheel: Path) -> None:
    names: dict[int, list[str]] = {}
    for name, checksum in contents(wheel).items():
        names.setdefault(checksum, []).append(name)
    twice = [both for both in names.values() if len(both) > 1]
    small = {"tokenizer_config.json", "generation_config.json"}
    assert {name.split("/")[-1] for both in twice for name in both} == {"tokenizer.json", *small}
    assert all(name.startswith("sbeval/demo/checkpoints/") for both in twice for name in both)


def test_a_readme_on_an_index_links_to_the_repository_once_its_address_is_set(tmp_path: Path) -> None:
    for name in ("setup.py", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (address,) = re.findall(r'^repository = "(.*)"$', text, re.MULTILINE)
    for chosen in ("", "https://example.org/us/sbeval"):
        (tmp_path / "pyproject.toml").write_text(text.replace(f'repository = "{address}"', f'repository = "{chosen}"'))
        code = "import setuptools; setuptools.setup = lambda **given: print(given)\nimport setup"
        printed = run([sys.executable, "-c", code], folder=tmp_path).stdout
        given = re.search(r"'project_urls': ({.*?})", printed)[1]
        assert bool(chosen) == ("/us/sbeval/issues" in given) == (f"]({chosen}/blob/v0.1.0/DESIGN.md)" in printed)
        assert bool(chosen) == (f"]({chosen}/raw/v0.1.0/docs/results/demo/figures/fixed_target.png)" in printed)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, []),
        ({"repository": ""}, ["where the repository is"]),
        ({"tag": "v0.2.0"}, ["the tag v0.1.0"]),
        ({"heading": "## Unreleased"}, ["a section 0.1.0", "no section Unreleased"]),
        ({"released": ""}, ["date-released"]),
        ({"counted": "0.0.9"}, ["holds the counts of 0.0.9: run python tests/measures/census.py --release 0.1.0."]),
        ({"elsewhere": "https://example.org/fork/sbeval"}, ["the repository https://example.org/us/sbeval"]),
    ],
)
def test_a_tag_is_published_when_nothing_is_missing(changed: dict[str, str], said: list[str], tmp_path: Path) -> None:
    home = changed.get("repository", "https://example.org/us/sbeval")
    (tmp_path / "sbeval").mkdir()
    (tmp_path / ".ci").mkdir()
    (tmp_path / "sbeval" / "__init__.py").write_text('__version__ = "0.1.0"')
    (tmp_path / "pyproject.toml").write_text(f'[project]\nversion = "0.1.0"\n[tool.sbeval]\nrepository = "{home}"\n')
    released = changed.get("released", "date-released: 2026-12-01")
    (tmp_path / "CITATION.cff").write_text(f"title: x\nversion: 0.1.0\n{released}\n")
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{changed.get('heading', '## 0.1.0')}\n\n- all\n")
    (tmp_path / "tests" / "measures").mkdir(parents=True)
    counts = {"version": changed.get("counted", "0.1.0"), "counts": {}}
    (tmp_path / "tests" / "measures" / "released.json").write_text(json.dumps(counts))
    shutil.copy(ROOT / ".ci" / "release.py", tmp_path / ".ci")
    arguments = [changed.get("tag", "v0.1.0"), changed.get("elsewhere", "https://example.org/us/sbeval")]
    process = run([sys.executable, tmp_path / ".ci" / "release.py", *arguments])
    assert (process.returncode, len(process.stderr.splitlines())) == (1 if said else 0, len(said))
    assert all(sentence in process.stderr for sentence in said)


@pytest.mark.parametrize("workflow", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda file: file.stem)
def test_a_workflow_names_actions_by_commit_and_only_publishing_may_write(workflow: Path) -> None:
    text = workflow.read_text(encoding="utf-8")
    for used in re.findall(r"uses: (\S+.*)", text):
        assert re.fullmatch(r"\./\.github/workflows/\w+\.yml|[\w/-]+@[0-9a-f]{40} # v[\d.]+", used)
    assert "\npermissions: {contents: read}\n" in text
    assert workflow.stem == "release" or not re.search(r"write|secrets", text)


def contents(wheel: Path) -> dict[str, int]:
    with zipfile.ZipFile(wheel) as archive:
        held = [file for file in archive.infolist() if file.file_size and "RECORD" not in file.filename]
        return {file.filename: file.CRC for file in held}


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/") and ".dist-info/" not in name}
